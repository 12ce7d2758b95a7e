"""Streaming functions that workers have in hand, one after the other, and when each must have ended."""

import math

from msgspec import Struct


class FunctionQueuesImage(Struct, frozen=True):
    """The same as plain data."""

    busy_until: dict[int, float]
    n_tasks: dict[int, int]


class FunctionQueues:
    """The queue of each worker. A function waits for those that its worker already has."""

    def __init__(self, processes: int, slack_seconds: float) -> None:
        """processes: subprocesses of a worker; slack_seconds: that a worker may be late."""
        self._processes, self._slack_seconds = processes, slack_seconds
        self._busy_until: dict[int, float] = {}  # worker -> when its queue ends at the latest
        self._n_tasks: dict[int, int] = {}  # worker -> tasks in flight

    def begin(self, worker: int, timeout: float, n_units: int, now: float) -> float:
        """Seconds from `now` until a function must have ended. timeout: seconds of one unit, of which it has so
        many."""
        busy = max(now, self._busy_until.get(worker, now)) + timeout * math.ceil(n_units / self._processes)
        self._busy_until[worker] = busy
        self._n_tasks[worker] = self._n_tasks.get(worker, 0) + 1
        return busy - now + self._slack_seconds

    def end(self, worker: int) -> None:
        """A function of `worker` has ended."""
        self._n_tasks[worker] -= 1
        if not self._n_tasks[worker]:
            self._busy_until.pop(worker, None)

    def lose(self, worker: int) -> None:
        """A worker is gone, with its functions."""
        self._busy_until.pop(worker, None)
        self._n_tasks.pop(worker, None)

    @property
    def image(self) -> FunctionQueuesImage:
        """All that they have."""
        return FunctionQueuesImage(dict(self._busy_until), dict(self._n_tasks))

    def restore(self, image: FunctionQueuesImage) -> None:
        """Go on from an image."""
        self._busy_until, self._n_tasks = dict(image.busy_until), dict(image.n_tasks)
