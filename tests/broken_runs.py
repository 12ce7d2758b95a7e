"""Runs to be broken, the numbers of one that is not, and what must be true of each when it has ended."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import (
    GRPO,
    PLAIN,
    Running,
    Special,
    copy_home,
    finish,
    numbers,
    records,
    set_fault,
    start,
    stop,
    write_run,
)
from tests.traces import Traces, traces

STEPS = 40
LONG: dict[str, Any] = {"steps": 100_000}


@pytest.fixture(scope="session")
def reference(home: Path) -> dict[int, dict[str, float]]:
    """The numbers of a run that nothing interrupts."""
    finish(home, "run", str(write_run(home, "reference", GRPO, {"steps": STEPS})), name="reference")
    return numbers(home / "reference")


@pytest.fixture
def own(home: Path, tmp_path: Path) -> Iterator[Path]:
    """A home to be broken. Its runs end with the test."""
    folder = copy_home(home, tmp_path / "home")
    yield folder
    stop(folder)


class Broken:
    """A run, long enough to be broken at will, and what it holds."""

    def __init__(
        self, own: Path, *parts: dict[str, Any], special: Special = PLAIN, overrides: Sequence[str] = ()
    ) -> None:
        self.home = own
        self.traces: Traces = traces(own)
        self.running: Running = start(
            own, "run", str(write_run(own, "run", GRPO, LONG, *parts)), *overrides, special=special
        )

    def at_step(self, step: int) -> "Broken":
        self.running.until_step(step)
        self.traces.look()
        return self

    def ends(self, code: int, seconds: float = 30.0) -> str:
        """Its output, after it has ended with `code` and left nothing behind."""
        found = self.running.wait(seconds)
        output = self.running.output()
        assert found == code, output
        said, _, _ = output.partition("details could not be written")
        assert "Traceback" not in said, output
        self.traces.gone()
        return output

    def error(self, seconds: float = 30.0) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.ends(3, seconds).splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, lines
        return lines[0]

    def slow_training(self) -> None:
        """Make training most of a step from now on; returns when the run is in it."""
        set_fault(self.home, compute_sleep=1.5)
        self.running.until((self.home / "computing").exists, "slow training")

    @property
    def saved(self) -> int:
        """Steps in the newest checkpoint."""
        return max((int(path.name[5:]) for path in (self.home / "run/checkpoints").glob("step-??????")), default=0)

    def goes_on_like(self, reference: dict[int, dict[str, float]], more: int = 3, *options: str) -> None:
        """Resume from what was saved for some steps: all numbers are those of the run that nothing interrupted."""
        set_fault(self.home)
        saved = self.saved
        assert saved > 0
        assert saved + more <= STEPS, "the reference is too short"
        finish(self.home, "run", "--resume", str(self.home / "run"), f"steps={saved + more}", *options)
        first = records(self.home / "run", "start")[-1]["first_step"]
        assert first == saved
        found = numbers(self.home / "run")
        assert sorted(found) == list(range(saved + more))
        for step in found:
            assert found[step] == reference[step], step


@pytest.fixture
def broken(own: Path) -> Broken:
    return Broken(own)
