"""Makes ready groups of admitted numbers: hands out groups, follows them through the streaming functions.

Knows neither meshes nor weights: the Scheduler says how many groups may be admitted, and when.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.commands.tasks import Task, Tasks
from realgraph.runtime.job.job import RuntimeSpec
from realgraph.runtime.scheduler.ledger import Group, GroupImage, Ledger
from realgraph.runtime.scheduler.program import GROUP_OWNER, Program
from realgraph.runtime.scheduler.transitions import GroupState
from realgraph.runtime.wire.protocol import Abort, Drop, Execute, Generated, Load, Loaded, Sample, SampleSource, Submit

DISCARDED_BATCHES = 20  # batches of groups in a row that all were left out: the run gives up


class UnexpectedReply(Exception):
    """A worker answered what it was not asked: a bug of ours, reported like a failure of that worker."""


class CollectionImage(Struct, frozen=True):
    """The groups on their way, as plain data."""

    leaving: tuple[GroupImage, ...]
    aborted: tuple[int, ...]
    open: dict[int, int]
    lightest: tuple[tuple[int, int], ...]
    busy_until: dict[int, float]
    n_functions: dict[int, int]
    tally: int  # its number
    step: int
    n_discarded_in_row: int
    n_skipped: int


class Collection:
    """The groups on their way. `tally` takes what is reported of groups that no batch has taken yet."""

    def __init__(self, program: Program, ledger: Ledger, tasks: Tasks, runtime: RuntimeSpec) -> None:
        self._program, self._ledger, self._tasks, self._runtime = program, ledger, tasks, runtime
        self._all = (1 << len(program.stream)) - 1
        self._leaving: dict[int, Group] = {}  # discarded, but a function still reads them
        self._aborted: set[int] = set()
        self._open = dict.fromkeys(program.owner_workers, 0)  # groups to be made, per worker
        self._lightest = [(0, worker) for worker in program.owner_workers]  # heap; outdated entries are skipped
        heapq.heapify(self._lightest)
        self._busy_until: dict[int, float] = {}  # worker -> when its queue of functions ends at the latest
        self._n_functions: dict[int, int] = {}  # worker -> tasks of streaming functions in flight
        self.tally = StepTally()
        self.step = 0  # the next batch: what groups are made for
        self.n_discarded_in_row = 0  # groups left out since the last one that was ready
        self.n_skipped = 0  # of them, those whose prompt was too long

    def image(self, tallies: TallyNumbers) -> CollectionImage:
        """All that it has but the ledger's groups."""
        return CollectionImage(
            tuple([group.image for group in self._leaving.values()]),
            tuple(sorted(self._aborted)),
            dict(self._open),
            tuple(self._lightest),
            dict(self._busy_until),
            dict(self._n_functions),
            tallies.of(self.tally),
            self.step,
            self.n_discarded_in_row,
            self.n_skipped,
        )

    def restore(self, image: CollectionImage, tallies: Sequence[StepTally]) -> None:
        """Go on from an image."""
        self._leaving = {group.id: Group.restored(group) for group in image.leaving}
        self._aborted, self._open, self._lightest = set(image.aborted), dict(image.open), list(image.lightest)
        self._busy_until, self._n_functions = dict(image.busy_until), dict(image.n_functions)
        self.tally, self.step = tallies[image.tally], image.step
        self.n_discarded_in_row, self.n_skipped = image.n_discarded_in_row, image.n_skipped

    # --- handing out --------------------------------------------------------------------------------------------------

    def _take_lightest(self) -> int:
        while True:
            load, worker = self._lightest[0]
            if self._open[worker] == load:
                self._open[worker] = load + 1
                heapq.heapreplace(self._lightest, (load + 1, worker))
                return worker
            heapq.heappop(self._lightest)

    def _answered(self, worker: int, n_groups: int, now: float, seconds: float) -> None:
        left = self._open[worker] - n_groups
        if left < 0:
            raise UnexpectedReply(f"worker {worker} answered for more groups than it had")
        self._open[worker] = left
        heapq.heappush(self._lightest, (left, worker))
        if left:
            self._tasks.watch(worker, now, seconds)
        else:
            self._tasks.unwatch(worker)

    def admit(self, n_groups: int, version: int, weights: int, now: float) -> list[Action]:
        """Admit `n_groups` at `version` (train steps), evenly over the workers; `weights`: the role's version."""
        by_worker: dict[int, list[int]] = {}
        for _ in range(n_groups):
            worker = self._take_lightest()
            by_worker.setdefault(worker, []).append(self._ledger.admit(worker, version).id)
        call = self._program.generate
        actions: list[Action] = []
        for worker, groups in by_worker.items():
            command = Submit(call, tuple(groups), weights) if call else Load(tuple(groups))
            actions.append(Send(worker, command))
            self._tasks.watch(worker, now, self.limit_seconds)
        return actions

    @property
    def limit_seconds(self) -> float:
        """The longest that a worker may take from one made group to the next."""
        call = self._program.calls.get(self._program.generate)
        predicted = call.predicted_seconds if call else 0.0
        return max(self._runtime.min_deadline_seconds, self._runtime.deadline_factor * predicted)

    def abort(self) -> list[Action]:
        """Stop all generation: no step of this run will need what is not made yet. A resumed run makes it again."""
        by_owner: dict[int, list[int]] = {}
        for group in self._ledger.live.values():
            if group.state is GroupState.ADMITTED:
                by_owner.setdefault(group.owner, []).append(group.id)
        for owner, groups in by_owner.items():
            self._aborted.update(groups)
            self._tasks.unwatch(owner)
        return [Send(owner, Abort(tuple(groups))) for owner, groups in by_owner.items()]

    def n_open(self, worker: int) -> int:
        """Groups that `worker` has still to make."""
        return self._open[worker]

    def next_batch(self) -> StepTally:
        """A batch has been taken: what was reported of its groups; from now on groups are made for the next step."""
        tally, self.tally = self.tally, StepTally()
        self.step += 1
        return tally

    # --- coming back --------------------------------------------------------------------------------------------------

    def arrived(self, reply: Generated | Loaded, version_per_step: int, now: float) -> list[Action]:
        """Groups were made, or skipped. version_per_step: train calls a step of the role, 0 where it is frozen."""
        if self._aborted and self._aborted.issuperset((*reply.groups, *reply.skipped)):
            return []  # the answer and the abort have crossed
        groups = [self._expect(number, reply.worker) for number in sorted(reply.groups)]
        skipped = [self._expect(number, reply.worker) for number in reply.skipped]
        samples: dict[int, list[Sample]] = {number: [] for number in reply.groups}
        n = self._program.samples_per_group
        for sample in reply.samples:
            if sample.sample // n not in samples:
                raise UnexpectedReply(f"sample {sample.sample} belongs to none of the groups it came with")
            samples[sample.sample // n].append(sample)
        self._answered(reply.worker, len(groups) + len(skipped), now, self.limit_seconds)
        for group in groups:
            own = sorted(samples[group.id], key=lambda sample: sample.sample)
            if [sample.sample for sample in own] != list(range(group.id * n, group.id * n + n)):
                raise UnexpectedReply(f"group {group.id} came with {len(own)} samples, not its {n}")
            oldest = min(sample.oldest for sample in own) // version_per_step if version_per_step else group.version
            self._ledger.generated(group, tuple(own), oldest)
        if isinstance(reply, Generated):
            self.tally.add(reply.call, reply.metrics, reply.started, reply.ended)
        for group in skipped:
            self._ledger.skip(group)
            self.tally.n_skipped += 1
            self.n_discarded_in_row += 1
            self.n_skipped += 1
        return self._advance(groups, now)

    def _expect(self, number: int, worker: int) -> Group:
        group = self._ledger.live.get(number)
        if group is None or group.owner != worker or group.samples:
            raise UnexpectedReply(f"worker {worker} answered for group {number}, which it was not to make")
        return group

    def function_ended(self, task: Task, worker: int, now: float) -> list[Action]:
        """A streaming function has run on the groups of `task`."""
        bit = 1 << self._program.stream.index(task.call)
        self._n_functions[worker] -= 1
        if not self._n_functions[worker]:
            self._busy_until.pop(worker, None)
        alive, gone = [], []
        for number in task.groups:
            group = self._leaving.get(number) or self._ledger.live[number]
            group.running -= 1
            group.done |= bit
            if number in self._leaving:
                if not group.running:
                    gone.append(self._leaving.pop(number))
            elif task.kept.get(number, True):
                alive.append(group)
            else:
                gone += self._leave_out(group)
        actions = self.drop(gone)
        actions += self._advance(alive, now)
        return actions

    def _leave_out(self, group: Group) -> list[Group]:
        """Filter `group` out; returned if its keys can be dropped at once."""
        self._ledger.filter_out(group)
        self.tally.n_dropped += 1
        self.n_discarded_in_row += 1
        if group.running:
            self._leaving[group.id] = group
            return []
        return [group]

    def drop(self, groups: Iterable[Group]) -> list[Action]:
        """Tell the owners of `groups` to forget them."""
        by_owner: dict[int, list[int]] = {}
        for group in groups:
            by_owner.setdefault(group.owner, []).append(group.id)
        return [Send(owner, Drop(tuple(sorted(numbers)))) for owner, numbers in by_owner.items()]

    # --- streaming functions ------------------------------------------------------------------------------------------

    def _advance(self, groups: Sequence[Group], now: float) -> list[Action]:
        """Start what these groups (of one owner) have become ready for; those through with it are ready for a batch."""
        actions: list[Action] = []
        for index, name in enumerate(self._program.stream):
            bit, needs = 1 << index, self._program.calls[name].needs
            due = [group for group in groups if not group.launched & bit and group.done & needs == needs]
            if due:
                actions.append(self._run(name, bit, due, now))
        for group in groups:
            if group.done == self._all:
                self._ledger.ready(group)
                self.n_discarded_in_row = self.n_skipped = 0
        return actions

    def _run(self, name: str, bit: int, groups: Sequence[Group], now: float) -> Send:
        """One `Execute` of a streaming function over `groups` of one owner."""
        call, n, owner = self._program.calls[name], self._program.samples_per_group, groups[0].owner
        ids = tuple([group.id * n + index for group in groups for index in range(n)])
        if call.per_group:
            shares = tuple([ids[start : start + n] for start in range(0, len(ids), n)])
        else:
            shares = tuple([(sample,) for sample in ids])
        keys = call.reads.get(GROUP_OWNER, ())
        task = self._tasks.open("stream", name, self.step, self.tally)
        task.groups = tuple([group.id for group in groups])
        for group in groups:
            group.launched |= bit
            group.running += 1
        seconds = self._function_seconds(owner, call.timeout_seconds, len(shares), now)
        sources = (SampleSource(owner, keys, ids),) if keys else ()
        command = Execute(task.number, name, self.step, shares, sources, deadline_seconds=seconds)
        self._tasks.fly(task, (owner,), now, seconds)
        return Send(owner, command)

    def _function_seconds(self, worker: int, timeout: float, n_units: int, now: float) -> float:
        """Seconds from `now` until a function must have ended, behind those that its worker already has."""
        processes = self._program.function_processes
        busy = max(now, self._busy_until.get(worker, now)) + timeout * math.ceil(n_units / processes)
        self._busy_until[worker] = busy
        self._n_functions[worker] = self._n_functions.get(worker, 0) + 1
        return busy - now + self._runtime.min_deadline_seconds
