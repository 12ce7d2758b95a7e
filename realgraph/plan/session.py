"""One `realgraph plan` in progress: its limits, Ctrl-C, what the terminal shows, and how it ends without a plan."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.plan.limits import Progress, interruptible
from realgraph.plan.options import PlanOptions
from realgraph.planner.plan.problem import Limits
from realgraph.run_file.compose import Checked
from realgraph.screen.first_search import prepare_search
from realgraph.screen.terminal import error_terminal

Found = TypeVar("Found")
NOT_FOUND, INTERRUPTED = 5, 130  # exit codes
UNFINISHED = "search"  # the rule of an error that says that a search ended before it found or ruled out a plan


class NoPlanYet(ConfigError):
    """The time limit or Ctrl-C ended the search before any plan was found, and none was ruled out."""

    def __init__(self, problems: tuple[Problem, ...], exit_code: int) -> None:
        super().__init__(problems)
        self.exit_code = exit_code


class Session(Struct, frozen=True):
    """One call of `realgraph plan`: its limits, Ctrl-C and its progress line."""

    limits: Limits  # of the main search
    stop: Callable[[], bool]  # true once Ctrl-C was pressed
    progress: Progress  # the line that changes in place
    checked: Checked | None = None

    def quick(self, seconds: float, gap: float = 0.01) -> Limits:
        """Limits of a search beside the main one, which nobody waits for and nothing is shown of."""
        least = min(seconds, self.limits.seconds)
        return replace(self.limits, seconds=least, gap=max(gap, self.limits.gap), progress=_nothing)

    def find(self, search: Callable[[], Found]) -> Found:
        """The result of a search; its errors placed in the user's files, and with the exit code of how it ended.

        Raises ConfigError, Infeasible (4), NoPlanYet (5, or 130 after Ctrl-C).
        """
        prepare_search()
        try:
            return search()
        except ConfigError as error:
            error.problems = tuple(self._placed(problem) for problem in error.problems)
            if any(problem.rule == UNFINISHED for problem in error.problems):
                raise NoPlanYet(error.problems, INTERRUPTED if self.stop() else NOT_FOUND) from error
            raise

    def _placed(self, problem: Problem) -> Problem:
        """The planner knows paths of the run file, not its lines."""
        if problem.where.file or self.checked is None:
            return problem
        return replace(problem, where=self.checked.where(problem.where.path))


@contextmanager
def session(options: PlanOptions, checked: Checked | None = None) -> Iterator[Session]:
    """Ctrl-C asks for the best plan so far while this is open; progress is shown where stderr is a terminal."""
    progress = Progress(error_terminal())
    with interruptible() as stop, _uncollected():
        limits = Limits(seconds=options.time_limit, seed=options.seed, stop=stop, progress=progress.report)
        try:
            yield Session(limits, stop, progress, checked)
        finally:
            progress.close()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Tables are many small objects without cycles: looking for some takes a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Budget:
    """Seconds that searches beside the main one may take in all."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _nothing(period: float, bound: float) -> None:
    """No progress is shown."""
