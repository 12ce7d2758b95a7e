"""A plan on the wall clock: workers that take exactly the predicted seconds drive the runtime's own Scheduler."""

import heapq
from collections import deque
from collections.abc import Mapping
from itertools import count

from msgspec import Struct

from realgraph.graphs.spec import Generate
from realgraph.planner.events import reallocation_node
from realgraph.runtime.actions import Action, CheckpointWritten, Event, Halt, Send, StepEnded
from realgraph.runtime.job import Job
from realgraph.runtime.program import ranks_of
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


class Home:
    """One data-parallel rank of the generate call: it makes groups one by one, and none while another call holds it.

    one: seconds from one group to the next. Many are in the making at once; that they end one by one is what
    Little's law leaves of it: a group that has K before it is there after K + 1 such times.
    """

    def __init__(self, one: float) -> None:
        self.one, self.queue = one, deque[tuple[int, int]]()  # (group, version)
        self.left = one  # of the first in the queue
        self.since = 0.0  # when it was last looked at
        self.held = 0  # calls on its devices now
        self.epoch = 0  # events of an earlier one no longer hold

    def settle(self, now: float) -> None:
        """What has been done until now."""
        if self.queue and not self.held:
            self.left -= now - self.since
        self.since, self.epoch = now, self.epoch + 1


class Made(Struct, frozen=True):
    """A home's next group is there, if nothing has come between."""

    home: int
    epoch: int


class PlanClock:
    """One run of a job's steps. extra: seconds of free calls by name, and of reallocations by their node.

    A synchronous batch is there at once after its seconds; with staleness a home makes its groups as a stream.
    """

    def __init__(self, job: Job, extra: Mapping[str, float]) -> None:
        self.job, self.now = job, 0.0
        self.ended: list[float] = []
        calls = {name: allocation.seconds for name, allocation in job.plan.allocations.items()}
        self._seconds: dict[str, float] = dict(extra) | calls
        self._scheduler = Scheduler(job, range(job.cluster.n_devices), ROWS)
        self._events: list[tuple[float, int, Event | Made]] = []
        self._number = count()
        self._generate = next((n for n, call in job.graph.calls.items() if isinstance(call, Generate)), "")
        self._homes: dict[int, Home] = {}
        self._home_of: dict[int, int] = {}  # device -> the home whose rank it belongs to
        if self._generate:
            layout = job.plan.allocations[self._generate].layout
            for rank in ranks_of(layout):
                one = self._seconds[self._generate] * layout.dp / job.batch.groups
                self._homes[rank[0]] = Home(one)
                self._home_of |= dict.fromkeys(rank, rank[0])
        self.spans: list[tuple[str, int, float, float]] = []  # call, worker, from, to
        self.halt: Halt | None = None

    def run(self) -> list[float]:
        """When each step ended, in seconds from the start."""
        self._take(self._scheduler.start(self.now))
        while self.halt is None:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Made):
                self._made(event)
                continue
            if isinstance(event, Done):
                self._held(event.worker, event.call, -1)
            self._take(self._scheduler.on(event, self.now))
        assert self.halt.error is None, self.halt
        return self.ended

    def period(self) -> float:
        """Seconds a step over the middle third of the run: streams fill before it and run dry after it."""
        ended = self.run()
        third = len(ended) // 3
        return (ended[2 * third - 1] - ended[third - 1]) / third

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

    def _later(self, seconds: float, event: Event | Made) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), event))

    def _command(self, worker: int, command: Command) -> None:
        match command:
            case Submit(groups=groups, version=version):
                self._submit(worker, groups, version)
            case Load(groups=groups):
                self._later(0.0, Loaded(worker, groups, self._samples(groups, 0)))
            case Execute(task=task, call=call):
                self._work(worker, task, call, call)
            case Reallocate(task=task, call=call):
                self._work(worker, task, call, reallocation_node(call))
            case Save(task=task):
                self._later(0.0, Done(worker, task, "", {}))
            case Drop():
                pass
            case _:
                raise AssertionError(command)

    def _work(self, worker: int, task: int, call: str, node: str) -> None:
        seconds = self._seconds.get(node, 0.0)
        self.spans.append((node, worker, self.now, self.now + seconds))
        self._held(worker, call, 1)
        self._later(seconds, Done(worker, task, call, {}))

    # --- generation ---------------------------------------------------------------------------------------------------

    def _submit(self, home: int, groups: tuple[int, ...], version: int) -> None:
        if not self.job.staleness:
            seconds = self._seconds[self._generate]
            self._later(seconds, Generated(home, self._generate, groups, self._samples(groups, version), {}))
            return
        self._homes[home].settle(self.now)
        self._homes[home].queue.extend((group, version) for group in groups)
        self._go_on(home)

    def _held(self, worker: int, call: str, change: int) -> None:
        home = self._home_of.get(worker)
        if home is None or call not in self.job.plan.allocations:
            return
        self._homes[home].settle(self.now)
        self._homes[home].held += change
        self._go_on(home)

    def _go_on(self, number: int) -> None:
        home = self._homes[number]
        if home.queue and not home.held:
            self._later(max(0.0, home.left), Made(number, home.epoch))

    def _made(self, made: Made) -> None:
        home = self._homes[made.home]
        if made.epoch != home.epoch:
            return
        home.settle(self.now)
        home.left = home.one
        group, version = home.queue.popleft()
        self._go_on(made.home)
        self._take(
            self._scheduler.on(
                Generated(made.home, self._generate, (group,), self._samples((group,), version), {}), self.now
            )
        )

    def _samples(self, groups: tuple[int, ...], version: int) -> tuple[Sample, ...]:
        n = self.job.graph.samples_per_group
        return tuple(Sample(group * n + i, 8, 4, oldest=version) for group in groups for i in range(n))
