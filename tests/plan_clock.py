"""A plan on the wall clock: workers that take exactly the predicted seconds drive the runtime's own Scheduler.

A stream of generation is followed sequence by sequence: each has a length of its own, gains a token a step, and every
token step of a replica takes what the cost model says of the sequences that run there then. Groups end when their
sequences do: neither the seconds of a step's generation nor its latency are told to the clock.
"""

import heapq
import random
from collections import deque
from collections.abc import Mapping
from itertools import count

import numpy as np
from msgspec import Struct

from realgraph.graphs.spec import Generate, Train
from realgraph.planner.costs.generate.generate import prefill_seconds
from realgraph.planner.costs.generate.rollout import Stream
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.plan.plan import reallocation_node
from realgraph.runtime.commands.actions import Action, CheckpointWritten, Event, Halt, Send, StepEnded
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.program import ranks_of
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import (
    Command,
    Done,
    Drop,
    EndSession,
    Execute,
    Generated,
    Load,
    Loaded,
    Reallocate,
    Sample,
    Save,
    Submit,
)

ROWS = 1_000_000
STRIDE = 64.0  # tokens for which a step is taken to cost the same


class Prices:
    """Seconds of a stream's parts. slots: sequences that run at once on a replica; inputs: seconds of a step; kept:
    whether its caches stay where they are while other calls have the devices."""

    def __init__(self, stream: Stream, slots: int, inputs: float, kept: bool) -> None:
        work = stream.work
        self.stream, self.slots, self.kept = stream, slots, kept
        running = np.arange(1.0, slots + 1)
        none = stream.step(running, np.zeros(slots))
        self.fixed = [0.0, *none.tolist()]
        self.each = [0.0, *(stream.step(running, np.ones(slots)) - none).tolist()]  # of a token of mean length more
        starting = stream.prompt_seconds + rollout_dispatch_seconds(stream.setting.costs, stream.share) + inputs
        self.start = starting / stream.share  # of one sequence
        self._samples, self._drawn = work.samples, dict[int, list[float]]()

    def again(self, running: int, tokens: float) -> float:
        """An interruption of so many sequences with so many tokens in all."""
        work = self.stream.work
        return prefill_seconds(self.stream.setting, tokens, tokens / running) + work.stall_seconds

    def length(self, sample: int) -> float:
        """Tokens of a sample: each batch has the quantiles of the lengths, in an order of its own."""
        batch, place = divmod(sample, self._samples)
        if batch not in self._drawn:
            lengths = self.stream.lengths
            shares = (np.arange(self._samples) + 0.5) / self._samples
            drawn = [max(1.0, float(one)) for one in np.interp(shares, lengths.shares, lengths.tokens)]
            random.Random(batch).shuffle(drawn)
            self._drawn[batch] = drawn
        return self._drawn[batch][place]


class Home:
    """One data-parallel rank of the generate call. It stands still while another call holds its devices."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.waiting = deque[tuple[int, float]]()  # group and length of sequences without a slot
        self.running: list[tuple[float, int, float]] = []  # heap: token at which one ends, group, token of its start
        self.versions: dict[int, int] = {}  # of the groups in hand
        self.left: dict[int, int] = {}  # sequences of a group that have not ended
        self.token = self.starts = 0.0  # gained by whoever runs all the time; sum of the starts of what runs
        self.still = 0.0  # seconds for which it stands still from `since` on
        self.since = 0.0
        self.held = 0
        self.stale = False  # whether what runs has to be prefilled again
        self.epoch = 0  # events of an earlier one no longer hold

    def token_seconds(self) -> float:
        """Seconds of a token step with what runs now, in the middle of the next stride."""
        n = len(self.running)
        mean = self.prices.stream.work.prompt_tokens + self.token - self.starts / n + min(self.ahead, STRIDE) / 2
        return self.prices.fixed[n] + self.prices.each[n] * mean

    @property
    def ahead(self) -> float:
        """Tokens until the next sequence ends."""
        return max(0.0, self.running[0][0] - self.token)

    def admit(self, group: int, version: int, lengths: list[float]) -> None:
        self.versions[group], self.left[group] = version, len(lengths)
        self.waiting.extend((group, length) for length in lengths)

    def settle(self, now: float) -> None:
        """Account for what has been done until now."""
        seconds, self.since = now - self.since, now
        self.epoch += 1
        if self.held:
            return
        pause = min(self.still, seconds)
        self.still -= pause
        if self.running and seconds > pause:
            self.token += (seconds - pause) / self.token_seconds()

    def hold(self, change: int, update: bool) -> None:
        """Other calls take the devices, or give them back; without caches, or under new weights, all is prefilled."""
        self.held += change
        self.stale |= update or not self.prices.kept
        if not self.held and self.stale and self.running:
            self.stale = False
            n = len(self.running)
            tokens = n * (self.prices.stream.work.prompt_tokens + self.token) - self.starts
            self.still = self.prices.again(n, tokens)

    def fill(self) -> None:
        """Free slots take what waits."""
        while self.waiting and len(self.running) < self.prices.slots:
            group, length = self.waiting.popleft()
            heapq.heappush(self.running, (self.token + length, group, self.token))
            self.starts += self.token
            self.still += self.prices.start

    def next_seconds(self) -> float:
        """Seconds until something is to be looked at."""
        return self.still + min(self.ahead, STRIDE) * self.token_seconds()

    def ended(self) -> list[int]:
        """Groups all of whose sequences have ended."""
        found = []
        while self.running and self.running[0][0] <= self.token + 1e-6:
            _, group, start = heapq.heappop(self.running)
            self.starts -= start
            self.left[group] -= 1
            if not self.left[group]:
                found.append(group)
        return found


class Made(Struct, frozen=True):
    """A home is to be looked at, if nothing has come between."""

    home: int
    epoch: int


class PlanClock:
    """One run of a job's steps. extra: seconds of free calls by name, and of reallocations by their node.

    A synchronous batch is there at once after its seconds; with staleness `prices` say how it streams.
    """

    def __init__(self, job: Job, extra: Mapping[str, float], prices: Prices | None = None) -> None:
        self.job, self.now = job, 0.0
        self.ended: list[float] = []
        calls = {name: allocation.seconds for name, allocation in job.plan.allocations.items()}
        self._seconds: dict[str, float] = dict(extra) | calls
        self._scheduler = Scheduler(job, range(job.cluster.n_devices), ROWS)
        self._events: list[tuple[float, int, Event | Made]] = []
        self._number = count()
        self._generate = next((n for n, call in job.graph.calls.items() if isinstance(call, Generate)), "")
        self._role = job.graph.role(self._generate) if self._generate else ""
        self._homes: dict[int, Home] = {}
        self._prices = prices
        self._home_of: dict[int, int] = {}  # device -> the home whose rank it belongs to
        if self._generate:
            layout = job.plan.allocations[self._generate].layout
            for rank in ranks_of(layout):
                if prices is not None:
                    self._homes[rank[0]] = Home(prices)
                self._home_of |= dict.fromkeys(rank, rank[0])
        self.spans: list[tuple[str, int, float, float]] = []  # call, worker, from, to
        self.halt: Halt | None = None

    def run(self) -> list[float]:
        """Ends of the steps, in seconds from the start."""
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
        """Seconds a step, without the first quarter, when streams fill, and the last sixth, when they run dry."""
        ended = self.run()
        first, last = len(ended) // 4 - 1, 5 * len(ended) // 6 - 1
        return (ended[last] - ended[first]) / (last - first)

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
            case Drop() | EndSession():
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
        if self._prices is None:
            seconds = self._seconds[self._generate]
            self._later(seconds, Generated(home, self._generate, groups, self._samples(groups, version), {}))
            return
        n = self.job.graph.samples_per_group
        self._homes[home].settle(self.now)
        for group in groups:
            lengths = [self._prices.length(group * n + i) for i in range(n)]
            self._homes[home].admit(group, version, lengths)
        self._go_on(home)

    def _held(self, worker: int, call: str, change: int) -> None:
        home = self._homes.get(self._home_of.get(worker, -1))
        if home is None or call not in self.job.plan.allocations:
            return
        home.settle(self.now)
        kind = self.job.graph.calls[call]
        home.hold(change, call == self._generate or (isinstance(kind, Train) and kind.model == self._role))
        self._go_on(self._home_of[worker])

    def _go_on(self, number: int) -> None:
        home = self._homes[number]
        if not home.held:
            home.fill()
            if home.running:
                self._later(home.next_seconds(), Made(number, home.epoch))

    def _made(self, made: Made) -> None:
        home = self._homes[made.home]
        if made.epoch != home.epoch:
            return
        home.settle(self.now)
        groups = home.ended()
        self._go_on(made.home)
        for group in groups:
            samples = self._samples((group,), home.versions.pop(group))
            del home.left[group]
            done = Generated(made.home, self._generate, (group,), samples, {})
            self._take(self._scheduler.on(done, self.now))

    def _samples(self, groups: tuple[int, ...], version: int) -> tuple[Sample, ...]:
        n = self.job.graph.samples_per_group
        return tuple(Sample(group * n + i, 8, 4, oldest=version) for group in groups for i in range(n))
