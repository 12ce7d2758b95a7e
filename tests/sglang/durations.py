"""The seconds that `make test-sglang` takes, and the most that it is to take."""

from collections.abc import Iterator
from pathlib import Path

BUILD_SECONDS, TEST_SECONDS = 240.0, 360.0  # at most: of the environment from nothing, and of the tests


def durations(build: float | None, tests: float) -> Iterator[tuple[str, bool]]:
    """Lines for the end of the tests, and whether each is a warning. build: seconds, where they are known."""
    for what, seconds, most in (("building the environment", build, BUILD_SECONDS), ("the tests", tests, TEST_SECONDS)):
        if seconds is not None:
            late = seconds > most
            yield f"{'warning: ' if late else ''}{what} took {seconds:.0f} s (at most {most:.0f})", late


def build_seconds(ready: Path) -> float | None:
    """Those that make has written when the environment was ready; None where it was built before that."""
    text = ready.read_text().strip() if ready.is_file() else ""
    return float(text) if text else None
