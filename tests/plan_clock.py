"""A plan on the wall clock: workers that take exactly the predicted seconds drive the runtime's own Scheduler."""

import heapq
from collections.abc import Mapping
from itertools import count

from realgraph.planner.events import reallocation_node
from realgraph.runtime.actions import Action, CheckpointWritten, Event, Halt, Send, StepEnded
from realgraph.runtime.job import Job
from realgraph.runtime.protocol import (
    Command,
    Done,
    Drop,
    Execute,
    Generated,
    Load,
    Loaded,
    Reallocate,
    Sample,
    Save,
    Submit,
)
from realgraph.runtime.scheduler import Scheduler

ROWS = 1_000_000


class PlanClock:
    """One run of a job's steps. extra: seconds of free calls by name, and of reallocations by their node.

    A synchronous batch is there at once after its seconds; with staleness each home makes its groups one by one, so
    that a batch takes as long. A reallocation lasts until both meshes are through with it.
    """

    def __init__(self, job: Job, extra: Mapping[str, float]) -> None:
        self.job, self.now, self.ended = job, 0.0, []
        calls = {name: allocation.seconds for name, allocation in job.plan.allocations.items()}
        self._seconds: dict[str, float] = dict(extra) | calls
        self._scheduler = Scheduler(job, range(job.cluster.n_devices), ROWS)
        self._events: list[tuple[float, int, Event]] = []
        self._number = count()
        self._free: dict[int, float] = {}  # home -> when it has made all that it was given
        self.spans: list[tuple[str, int, float, float]] = []  # call, step, from, to
        self.halt: Halt | None = None

    def run(self) -> list[float]:
        """When each step ended, in seconds from the start."""
        self._take(self._scheduler.start(self.now))
        while self.halt is None:
            self.now, _, event = heapq.heappop(self._events)
            self._take(self._scheduler.on(event, self.now))
        assert self.halt.error is None, self.halt
        return self.ended

    def period(self) -> float:
        """Seconds a step over the second half of the run."""
        ended = self.run()
        half = len(ended) // 2
        return (ended[-1] - ended[half - 1]) / (len(ended) - half)

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._command(action.worker, action.command)
                case StepEnded():
                    self.ended.append(self.now)
                case Halt():
                    self.halt = action
                case CheckpointWritten():
                    pass
                case _:
                    raise AssertionError(action)

    def _later(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), event))

    def _command(self, worker: int, command: Command) -> None:
        match command:
            case Submit(call=call, groups=groups, version=version):
                self._generate(worker, call, groups, version)
            case Load(groups=groups):
                self._later(0.0, Loaded(worker, groups, self._samples(groups, 0)))
            case Execute(task=task, call=call, step=step):
                seconds = self._seconds.get(call, 0.0)
                self.spans.append((call, step, self.now, self.now + seconds))
                self._later(seconds, Done(worker, task, call, {}))
            case Reallocate(task=task, call=call):
                node = reallocation_node(call)
                seconds = self._seconds.get(node, 0.0)
                self.spans.append((node, -1, self.now, self.now + seconds))
                self._later(seconds, Done(worker, task, call, {}))
            case Save(task=task):
                self._later(0.0, Done(worker, task, "", {}))
            case Drop():
                pass
            case _:
                raise AssertionError(command)

    def _generate(self, home: int, call: str, groups: tuple[int, ...], version: int) -> None:
        seconds = self._seconds[call]
        if not self.job.staleness:
            self.spans.append((call, -1, self.now, self.now + seconds))
            self._later(seconds, Generated(home, call, groups, self._samples(groups, version), {}))
            return
        homes = self.job.plan.allocations[call].layout.dp
        one = seconds * homes / self.job.batch.groups
        late = max(0.0, self.job.plan.allocations[call].latency_seconds - seconds)
        for group in groups:
            self._free[home] = max(self._free.get(home, 0.0), self.now) + one
            self._later(
                self._free[home] - self.now + late,
                Generated(home, call, (group,), self._samples((group,), version), {}),
            )

    def _samples(self, groups: tuple[int, ...], version: int) -> tuple[Sample, ...]:
        n = self.job.graph.samples_per_group
        return tuple(Sample(group * n + i, 8, 4, oldest=version) for group in groups for i in range(n))
