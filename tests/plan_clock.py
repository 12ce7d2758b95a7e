"""A plan on the wall clock: workers that take exactly the predicted seconds drive the runtime's own Scheduler.

A stream of generation is followed sequence by sequence: each has a length of its own, gains a token a step, and every
token step of a replica takes what the cost model says of the sequences that run there then. Groups end when their
sequences do: neither the seconds of a step's generation nor its latency are told to the clock.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Mapping
from itertools import count
from typing import Protocol

import numpy as np
from msgspec import Struct

from realgraph.graphs.spec import Generate, Train
from realgraph.planner.costs.generate.generate import prefill_seconds
from realgraph.planner.costs.generate.rollout import Stream
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.plan.plan import reallocation_node
from realgraph.runtime.commands.actions import Action, CheckpointWritten, Event, Halt, Send, StepEnded
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.scheduler.concurrency.unlimited import Unlimited
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
    Prefetch,
    Reallocate,
    Sample,
    Save,
    Submit,
)

ROWS = 1_000_000
STRIDE = 64.0  # tokens for which a step is taken to cost the same


class Engine(Protocol):
    """The speed of a replica, and what its sequences are like. fixed, each: seconds of a token step by the number of
    sequences, and those that it has more for each token of their mean length."""

    slots: int  # sequences that run at once
    kept: bool  # its caches stay where they are while other calls have the devices
    prompt_tokens: float
    per_group: int
    fixed: list[float]
    each: list[float]
    start: float  # seconds of one sequence's beginning

    def again(self, running: int, tokens: float) -> float:
        """Seconds of an interruption of so many sequences with so many tokens in all."""
        ...

    def length(self, sample: int) -> float:
        """Tokens of a sample."""
        ...


class Prices:
    """An engine as the cost model sees it. slots: sequences that run at once on a replica; inputs: seconds of a step;
    kept: whether its caches stay where they are while other calls have the devices."""

    def __init__(self, stream: Stream, slots: int, inputs: float, kept: bool) -> None:
        work = stream.work
        self.stream, self.slots, self.kept = stream, slots, kept
        self.prompt_tokens, self.per_group = float(work.prompt_tokens), work.samples_per_group
        running = np.arange(1.0, slots + 1)
        none = stream.step(running, np.zeros(slots))
        self.fixed = [0.0, *none.tolist()]
        self.each = [0.0, *(stream.step(running, np.ones(slots)) - none).tolist()]  # of a token of mean length more
        starting = stream.prompt_seconds + rollout_dispatch_seconds(stream.setting.costs, stream.share) + inputs
        self.start = starting / stream.share  # of one sequence
        self._samples, self._drawn = work.samples, dict[int, list[float]]()

    def again(self, running: int, tokens: float) -> float:
        """See Engine."""
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

    def __init__(self, prices: Engine) -> None:
        self.prices = prices
        self.waiting = deque[tuple[int, float]]()  # sample and length of sequences without a slot
        self.running: list[tuple[float, int, float]] = []  # heap: token at which one ends, sample, token of its start
        self.version = 0  # of the weights
        self.updates: list[tuple[float, int]] = [(0.0, 0)]  # tokens at which weights came, and their version
        self.drawn: dict[int, list[tuple[int, float]]] = {}  # sample -> versions of its tokens, and how many of each
        self.per_group = prices.per_group
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
        mean = self.prices.prompt_tokens + self.token - self.starts / n + min(self.ahead, STRIDE) / 2
        return self.prices.fixed[n] + self.prices.each[n] * mean

    @property
    def ahead(self) -> float:
        """Tokens until the next sequence ends."""
        return max(0.0, self.running[0][0] - self.token)

    def admit(self, group: int, lengths: list[float]) -> None:
        self.left[group] = len(lengths)
        self.waiting.extend(zip(sample_ids(group, len(lengths)), lengths, strict=True))

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
            tokens = n * (self.prices.prompt_tokens + self.token) - self.starts
            self.still = self.prices.again(n, tokens)

    def fill(self) -> None:
        """Free slots take what waits."""
        while self.waiting and len(self.running) < self.prices.slots:
            sample, length = self.waiting.popleft()
            heapq.heappush(self.running, (self.token + length, sample, self.token))
            self.starts += self.token
            self.still += self.prices.start

    def update(self, version: int) -> None:
        """New weights: tokens from here on are theirs."""
        if version != self.version:
            self.version = version
            self.updates.append((self.token, version))

    def _versions(self, start: float) -> list[tuple[int, float]]:
        """The tokens from `start` until now by their versions."""
        found: list[tuple[int, float]] = []
        end = self.token
        for token, version in reversed(self.updates):
            if end > token or not found:
                found.append((version, end - max(start, token)))
            end = min(end, token)
            if token <= start:
                break
        return found[::-1]

    def next_seconds(self) -> float:
        """Seconds until something is to be looked at."""
        return self.still + min(self.ahead, STRIDE) * self.token_seconds()

    def ended(self) -> list[int]:
        """Groups all of whose sequences have ended."""
        found = []
        while self.running and self.running[0][0] <= self.token + 1e-6:
            _, sample, start = heapq.heappop(self.running)
            self.starts -= start
            self.drawn[sample] = self._versions(start)
            group = group_of(sample)
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

    A synchronous batch is there at once after its seconds; with staleness `prices` say how it streams. limited: the
    work in flight, by more than the admission rule.
    """

    def __init__(
        self, job: Job, extra: Mapping[str, float], prices: Engine | None = None, *, limited: bool = True
    ) -> None:
        self.job, self.now = job, 0.0
        self.ended: list[float] = []
        calls = {name: allocation.seconds for name, allocation in job.plan.allocations.items()}
        self._seconds: dict[str, float] = dict(extra) | calls
        self._scheduler = Scheduler(job, range(job.cluster.n_devices), ROWS)
        if not limited:
            self._scheduler._collection._concurrency = Unlimited()
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
        self.ages: dict[int, Counter[int]] = {}  # step -> age -> sampled tokens in its first train call
        self._drawn: dict[int, list[tuple[int, float]]] = {}  # sample in no batch yet -> its tokens by version
        self._coming: dict[int, int] = {}  # task -> version of the generator's weights after it
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
                self._update(event)
                self._call_began_or_ended(event.worker, event.call, -1)
            self._take(self._scheduler.on(event, self.now))
        assert self.halt.error is None, self.halt
        return self.ended

    def period(self) -> float:
        """Seconds a step, without the first quarter, when streams fill, and the last sixth, when they run dry."""
        ended = self.run()
        first, last = self._steady
        return (ended[last] - ended[first]) / (last - first)

    @property
    def _steady(self) -> tuple[int, int]:
        return len(self.ended) // 4 - 1, 5 * len(self.ended) // 6 - 1

    def steady_ages(self) -> dict[int, float]:
        """Age in steps -> share of the sampled tokens that are trained in the steps of `period`, after a run."""
        first, last = self._steady
        counts = sum((self.ages[step] for step in range(first + 1, last + 1)), Counter[int]())
        return {age: n / counts.total() for age, n in sorted(counts.items())}

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
                self._note_training(command)
                self._work(worker, task, call, call)
            case Reallocate(task=task, call=call):
                if call == self._generate:
                    self._coming[task] = command.version
                self._work(worker, task, call, reallocation_node(call))
            case Save(task=task) | Prefetch(task=task):
                self._later(0.0, Done(worker, task, "", {}))
            case Drop() | EndSession():
                pass
            case _:
                raise AssertionError(command)

    def _work(self, worker: int, task: int, call: str, node: str) -> None:
        seconds = self._seconds.get(node, 0.0)
        self.spans.append((node, worker, self.now, self.now + seconds))
        self._call_began_or_ended(worker, call, 1)
        self._later(seconds, Done(worker, task, call, {}))

    # --- versions -----------------------------------------------------------------------------------------------------

    def _note_training(self, command: Execute) -> None:
        """The ages of what a train call is given; where the generator reads its weights in place, these change."""
        call = self.job.graph.calls[command.call]
        if not isinstance(call, Train) or call.model != self._role:
            return
        program = self._scheduler._program
        if not program.calls[self._generate].trainer:
            self._coming[command.task] = command.version + 1
        counts = self.ages.setdefault(command.step, Counter())
        for sample in {sample for share in command.shares for sample in share}:
            for version, n_tokens in self._drawn.pop(sample, ()):
                counts[command.step - version // program.trains_of(self._generate)] += round(n_tokens)

    def _update(self, done: Done) -> None:
        home = self._homes.get(done.worker)
        if home is not None and done.task in self._coming:
            home.settle(self.now)
            home.update(self._coming[done.task])

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
            self._homes[home].admit(group, lengths)
        self._go_on(home)

    def _call_began_or_ended(self, worker: int, call: str, change: int) -> None:
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
            del home.left[group]
            samples = self._generated(home, group)
            done = Generated(made.home, self._generate, (group,), samples, {})
            self._take(self._scheduler.on(done, self.now))

    def _generated(self, home: Home, group: int) -> tuple[Sample, ...]:
        """The samples of a group, with their lengths and the versions of their oldest tokens."""
        samples = []
        for sample in sample_ids(group, home.per_group):
            drawn = self._drawn[sample] = home.drawn.pop(sample)
            n_tokens = max(1, round(sum(n for _, n in drawn)))
            counts, oldest = dict(drawn), drawn[0][0]
            by_version = tuple(round(counts.get(version, 0.0)) for version in range(oldest, drawn[-1][0] + 1))
            samples.append(Sample(sample, n_tokens, n_tokens, oldest=oldest, by_version=by_version))
        return tuple(samples)

    def _samples(self, groups: tuple[int, ...], version: int) -> tuple[Sample, ...]:
        n = self.job.graph.samples_per_group
        return tuple(Sample(one, 8, 4, oldest=version) for group in groups for one in sample_ids(group, n))
