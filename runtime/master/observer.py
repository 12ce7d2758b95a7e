"""Records that a run tells those who watch it, and the interface of a watcher. Writes nothing itself."""

from collections.abc import Iterable
from typing import Literal, Protocol

from msgspec import Struct, field, structs

from realgraph.runtime.wire.metrics import ArrivedBytes, ResidentBytes


class PlannedSeconds(Struct, frozen=True):
    """Seconds that the run's plan predicts."""

    step: float = 0.0  # the period; 0: none is predicted
    calls: dict[str, float] = field(default_factory=dict)  # by the names that metrics have: NAME/seconds


class RunStarted(Struct, frozen=True, tag="start"):
    """The workers are ready."""

    name: str
    graph: str
    steps: int
    first_step: int
    run_dir: str
    calls: tuple[str, ...]
    facts: dict[str, float] = field(default_factory=dict)  # seconds of start-up, parameters, rows of data
    time: float = 0.0
    restarts: int = 0  # of this run by itself before this start
    planned: PlannedSeconds = PlannedSeconds()


class Span(Struct, frozen=True, tag="span"):
    """One call on one worker."""

    worker: int
    call: str
    step: int  # -1: outside steps
    started: float  # Unix seconds
    ended: float
    arrived: ArrivedBytes = ArrivedBytes()
    resident: ResidentBytes | None = None


class StepRecord(Struct, frozen=True, tag="step"):
    """A finished step."""

    step: int
    seconds: float  # of the wall clock
    metrics: dict[str, float]  # by `call/name`
    time: float = 0.0
    lengths: tuple[int, ...] = ()  # new tokens at equal steps of probability, rising; none where nothing was generated


class EvalRecord(Struct, frozen=True, tag="eval"):
    """A held-out evaluation of the weights after `step` steps."""

    step: int
    metrics: dict[str, float]
    best: bool = False
    time: float = 0.0


class Transcript(Struct, frozen=True, tag="transcript"):
    """Some samples as text, for people."""

    step: int
    text: str
    split: Literal["train", "eval"] = "train"


class CheckpointRecord(Struct, frozen=True, tag="checkpoint"):
    """A complete checkpoint lies at `path`."""

    step: int
    path: str
    seconds: float = 0.0


class Note(Struct, frozen=True, tag="note"):
    """One line for people."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


class RunEnded(Struct, frozen=True, tag="end"):
    """The last record."""

    step: int
    reason: str  # `finished`, `stopped`, or the error in one line
    ok: bool
    time: float = 0.0


RunRecord = RunStarted | Span | StepRecord | EvalRecord | Transcript | CheckpointRecord | Note | RunEnded


class WatcherLost(Exception):
    """A watcher that the run goes on without has failed; the text says which one, and why."""


class Observer(Protocol):
    """A watcher of a run: the metrics file, the trace, the screen, a tracker. May raise OSError: the run then ends; or
    WatcherLost."""

    def observe(self, record: RunRecord) -> None: ...

    def close(self) -> None: ...


class Observers:
    """Several watchers as one."""

    def __init__(self, observers: Iterable[Observer], begun_at: int = 0) -> None:
        """begun_at: completed steps of the weights that a run without steps has; its records count from there."""
        self.observers, self._begun_at = tuple(observers), begun_at
        self._watching = list(self.observers)

    def observe(self, record: RunRecord) -> None:
        """Tell all. One that fails (a full disk) is told nothing more, so that the others hear how the run ended.

        Raises the OSError of the first that failed, when all have been told.
        """
        problem: OSError | None = None
        lost: list[str] = []
        if self._begun_at:
            record = _later(record, self._begun_at)
        for observer in tuple(self._watching):
            try:
                observer.observe(record)
            except OSError as error:
                self._watching.remove(observer)
                problem = problem or error
            except WatcherLost as error:
                self._watching.remove(observer)
                lost.append(str(error))
        if problem is not None:
            raise problem
        for text in lost:
            self.note(text, "warning")

    def note(self, text: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """One line for people."""
        self.observe(Note(text, level))

    def close(self) -> None:
        """Close all. Raises the first that failed, when all have been closed."""
        problem: OSError | WatcherLost | None = None
        for observer in self.observers:
            try:
                observer.close()
            except (OSError, WatcherLost) as error:
                problem = problem or error
        if problem is not None:
            raise problem


def _later(record: RunRecord, steps: int) -> RunRecord:
    """A record of the step that lies `steps` later."""
    match record:
        case RunStarted():
            return structs.replace(record, first_step=record.first_step + steps, steps=record.steps + steps)
        case StepRecord() | EvalRecord() | Transcript() | CheckpointRecord() | RunEnded():
            return structs.replace(record, step=record.step + steps)
        case Span() | Note():
            return record
