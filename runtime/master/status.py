"""The file of a run directory that says what the run does right now, written about once a second while it lives."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.runtime.commands.failures import doing_text
from realgraph.runtime.scheduler.image import SchedulerImage

STATUS_SECONDS = 1.0
_RECENT_STEPS = 10  # whose mean seconds tell when the run ends


class WorkerSigns(Struct, frozen=True):
    """A worker as its heartbeats show it. silent_seconds: since the last."""

    silent_seconds: float
    host_bytes: int = 0
    device_bytes: int = 0
    host: str = ""  # '': the master's


class WorkerStatus(Struct, frozen=True):
    """A worker, and what it does: `train of step 3`, or '' where nothing is awaited of it."""

    worker: int
    signs: WorkerSigns
    doing: str = ""
    seconds: float = 0.0  # since it began
    limit_seconds: float = 0.0  # what that may take


class RunStatus(Struct, frozen=True):
    """A run. groups: by state (`admitted`, `generated`, `ready`, `batched`). lag: steps of training by which the oldest
    tokens of a group that waits for a batch are behind."""

    name: str
    pid: int
    time: float  # Unix seconds
    steps_done: int
    steps: int
    step_seconds: float  # the mean of the last ones; 0 before the first
    groups: dict[str, int]
    lag: int
    staleness: int
    workers: tuple[WorkerStatus, ...]
    restarts: int = 0  # by itself, after lost workers or hosts
    lost: tuple[int, ...] = ()  # engines that it goes on without
    replaced: tuple[int, ...] = ()  # engines in whose place a new process is

    @property
    def seconds_left(self) -> float:
        """To the end of the run at the pace of the last steps; 0 where there is none yet."""
        return (self.steps - self.steps_done) * self.step_seconds


class StatusFile:
    """Writes the file; `due` says when."""

    def __init__(self, path: Path, name: str, steps: int, staleness: int, restarts: int = 0) -> None:
        self._path, self._name, self._steps, self._staleness = path, name, steps, staleness
        self._restarts = restarts
        self._recent: list[float] = []
        self._next = 0.0

    def step_took(self, seconds: float) -> None:
        """A step has ended."""
        self._recent = [*self._recent[1 - _RECENT_STEPS :], seconds]

    def due(self) -> bool:
        """True about once a second."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + STATUS_SECONDS
        return True

    def write(self, image: SchedulerImage, now: float, workers: Mapping[int, WorkerSigns]) -> None:
        """image: of the Scheduler at `now`, by its clock. Raises OSError."""
        status = RunStatus(
            name=self._name,
            pid=os.getpid(),
            time=time.time(),
            steps_done=image.last_state.step,
            steps=self._steps,
            step_seconds=sum(self._recent) / len(self._recent) if self._recent else 0.0,
            groups=dict(Counter(group.state.value for group in image.ledger.live)),
            lag=_lag(image),
            staleness=self._staleness,
            workers=tuple(_worker(image, now, worker, signs) for worker, signs in sorted(workers.items())),
            restarts=self._restarts,
            lost=image.gone,
            replaced=tuple(sorted(image.devices.engines.joined.keys() - set(image.gone))),
        )
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_bytes(msgspec.json.encode(status))
        os.replace(partial, self._path)

    def remove(self) -> None:
        """The run has ended: it does nothing any more."""
        self._path.unlink(missing_ok=True)


def read_status(path: Path) -> RunStatus | None:
    """The newest; None where the run has written none. Raises OSError, and ValueError where it can't be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except FileNotFoundError:
        return None


def _lag(image: SchedulerImage) -> int:
    newest = max(image.ledger.ages, default=None)
    return 0 if newest is None else max(0, image.last_state.step - min(image.ledger.ages))


def _worker(image: SchedulerImage, now: float, worker: int, signs: WorkerSigns) -> WorkerStatus:
    tasks = [task for task in image.tasks.flying if worker in task.waiting]
    if tasks:
        task = next((task for task in tasks if task.kind != "stream"), tasks[0])
        return WorkerStatus(worker, signs, doing_text(task), now - task.started, task.deadline - task.started)
    if worker in image.tasks.watches:
        since, seconds = image.tasks.watches[worker]
        return WorkerStatus(worker, signs, f"groups of step {image.collection.step}", now - since, seconds)
    return WorkerStatus(worker, signs)
