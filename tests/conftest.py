"""Coverage is measured on the first seeds of a test only: the tracer more than doubles what the others would take."""

from collections import Counter

import pytest

RANDOM = ("seed", "first")  # parameters that only number random cases
MEASURED = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases for pytest-cov; where it is not in use, the mark means nothing."""
    n_seen: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if not any(name in item.callspec.params for name in RANDOM):
                continue
            n_seen[item.nodeid.partition("[")[0]] += 1
            if n_seen[item.nodeid.partition("[")[0]] > MEASURED:
                item.add_marker("no_cover")
