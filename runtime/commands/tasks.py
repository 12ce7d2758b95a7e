"""Commands that wait for an answer, and until when: every wait has a deadline. Does not know what a command does."""

import heapq
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Sample

TaskKind = Literal["stream", "prefetch", "call", "reallocate", "save", "evaluate"]


class TaskImage(Struct, frozen=True):
    """A task as plain data."""

    number: int
    kind: TaskKind
    call: str
    step: int
    waiting: tuple[int, ...]
    started: float
    deadline: float
    groups: tuple[int, ...]
    left_out: dict[int, tuple[int, ...]]
    by_group: dict[int, dict[str, Mean]]
    state: dict[str, float]
    tally: int  # its number
    loaded: dict[int, tuple[Sample, ...]] = {}


class TasksImage(Struct, frozen=True):
    """The tasks in flight as plain data."""

    next_task: int
    flying: tuple[TaskImage, ...]
    given_up: tuple[int, ...]
    watches: dict[int, tuple[float, float]]


class Task:
    """One command to one or more workers. `groups`: of a streaming function, the groups it works on; `left_out`: the
    samples of these that it has left out, by group; `by_group`: what it has measured of each; `loaded`: the samples of
    held-out rows that each worker has loaded."""

    __slots__ = (
        *("by_group", "call", "deadline", "groups", "kind", "left_out", "loaded", "number", "started", "state"),
        *("step", "tally", "waiting"),
    )

    def __init__(self, number: int, kind: TaskKind, call: str, step: int) -> None:
        self.number, self.call, self.step = number, call, step
        self.kind: TaskKind = kind
        self.waiting: set[int] = set()
        self.started = self.deadline = 0.0
        self.groups: tuple[int, ...] = ()
        self.left_out: dict[int, tuple[int, ...]] = {}
        self.by_group: dict[int, dict[str, Mean]] = {}
        self.loaded: dict[int, tuple[Sample, ...]] = {}
        self.state: dict[str, float] = {}
        self.tally = StepTally()

    def answered(self, reply: Done) -> None:
        """One of its workers has ended. A streaming function's groups keep what it has measured of them."""
        self.waiting.discard(reply.worker)
        if self.kind == "prefetch":
            return
        name = "reallocate" if self.kind == "reallocate" else self.call
        self.tally.add(name, reply.metrics, reply.started, reply.ended)
        if reply.transcripts:
            self.tally.transcripts.extend(reply.transcripts)
        if reply.state:
            self.state.update(reply.state)
        if reply.left_out:
            self.left_out.update(reply.left_out)
        if reply.loaded:
            self.loaded[reply.worker] = reply.loaded
        if reply.by_group and self.kind == "stream":
            self.by_group.update(reply.by_group)
        elif reply.by_group:
            self.tally.add_groups([{name: metrics} for metrics in reply.by_group.values()])


class Tasks:
    """The tasks in flight, and a watch on every worker that makes or loads groups."""

    def __init__(self) -> None:
        self.next_task = 0
        self.flying: dict[int, Task] = {}
        self.given_up: set[int] = set()  # tasks that nobody waits for any more, though they may still be answered
        self.watches: dict[int, tuple[float, float]] = {}  # worker -> last progress, seconds it may take to the next
        self._due: list[tuple[float, int, int]] = []  # (deadline, task or -1, worker); entries may be outdated
        self._queued: set[int] = set()  # workers with an entry in _due

    def open(self, kind: TaskKind, call: str, step: int, tally: StepTally) -> Task:
        """A new task; `send` follows when its workers are known."""
        task = Task(self.next_task, kind, call, step)
        task.tally = tally
        self.next_task += 1
        return task

    def fly(self, task: Task, workers: Iterable[int], now: float, seconds: float) -> None:
        """Expect an answer of `workers` within `seconds` from now on."""
        task.waiting.update(workers)
        task.started, task.deadline = now, now + seconds
        self.flying[task.number] = task
        heapq.heappush(self._due, (task.deadline, task.number, -1))

    def close(self, task: Task) -> None:
        """Every worker has answered."""
        del self.flying[task.number]

    def give_up(self, task: Task) -> None:
        """It is of no use any more; answers to it may still come."""
        self.close(task)
        self.given_up.add(task.number)

    def watch(self, worker: int, now: float, seconds: float) -> None:
        """`worker` has groups to make, and has just got some or answered: the next answer is due within `seconds`."""
        self.watches[worker] = (now, seconds)
        if worker not in self._queued:
            self._queued.add(worker)
            heapq.heappush(self._due, (now + seconds, -1, worker))

    def unwatch(self, worker: int) -> None:
        """`worker` has no group left to make."""
        self.watches.pop(worker, None)

    def deadline(self) -> float | None:
        """The time at which the next answer is overdue; None where none is awaited."""
        due = self._due
        while due:
            deadline, number, worker = due[0]
            if number >= 0:
                if number in self.flying:
                    return deadline
                heapq.heappop(due)
            elif worker in self.watches:
                since, seconds = self.watches[worker]
                if since + seconds <= deadline:
                    return deadline
                heapq.heapreplace(due, (since + seconds, -1, worker))
            else:
                heapq.heappop(due)
                self._queued.discard(worker)
        return None

    def overdue(self, now: float) -> Task | int | None:
        """A task past its deadline, or a watched worker that is; the one due first."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return None
        _, number, worker = self._due[0]
        return self.flying[number] if number >= 0 else worker

    def of(self, worker: int) -> list[Task]:
        """The tasks that `worker` has not answered yet, oldest first."""
        return [task for task in self.flying.values() if worker in task.waiting]

    def image(self, tallies: TallyNumbers) -> TasksImage:
        """All that is in flight and watched."""
        flying = [
            TaskImage(
                task.number,
                task.kind,
                task.call,
                task.step,
                tuple(sorted(task.waiting)),
                task.started,
                task.deadline,
                task.groups,
                dict(task.left_out),
                dict(task.by_group),
                dict(task.state),
                tallies.of(task.tally),
                dict(task.loaded),
            )
            for task in self.flying.values()
        ]
        return TasksImage(self.next_task, tuple(flying), tuple(sorted(self.given_up)), dict(self.watches))

    def restore(self, image: TasksImage, tallies: Sequence[StepTally]) -> None:
        """Go on from an image."""
        self.next_task, self.watches = image.next_task, dict(image.watches)
        self.given_up = set(image.given_up)
        self._queued = set(image.watches)
        self._due = [(since + seconds, -1, worker) for worker, (since, seconds) in image.watches.items()]
        for entry in image.flying:
            task = Task(entry.number, entry.kind, entry.call, entry.step)
            task.waiting, task.started, task.deadline = set(entry.waiting), entry.started, entry.deadline
            task.groups, task.left_out, task.state = entry.groups, dict(entry.left_out), dict(entry.state)
            task.by_group, task.loaded = dict(entry.by_group), dict(entry.loaded)
            task.tally = tallies[entry.tally]
            self.flying[task.number] = task
            self._due.append((task.deadline, task.number, -1))
        heapq.heapify(self._due)
