"""Settings of all tests: random cases repeat, and thousands of tests in one process are quick."""

import gc
import os
from collections import Counter

import pytest
from hypothesis import settings

# Before torch is loaded: the ranks and workers of a test share the cores, and threads that spin would take all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases in each run of `make test`, so that a red one is due to a change; `make fuzz` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

RANDOM = ("seed", "first", "block", "number")  # parameters that only number random cases
MEASURED = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage on the first random cases only: the tracer more than doubles what the others would take.

    Where pytest-cov is not in use, its mark means nothing.
    """
    n_seen: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            fixed = {name: value for name, value in item.callspec.params.items() if name not in RANDOM}
            if len(fixed) == len(item.callspec.params):
                continue
            test = f"{item.nodeid.partition('[')[0]} {fixed}"
            n_seen[test] += 1
            if n_seen[test] > MEASURED:
                item.add_marker("no_cover")


def pytest_collection_finish() -> None:
    """Every module is imported by now: the garbage collector need not walk over them again and again."""
    gc.collect()
    gc.freeze()
