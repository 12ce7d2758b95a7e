"""Makes ready groups of admitted numbers: hands them out, follows them through streaming functions and later calls.

Knows neither meshes nor weights: the Scheduler says how many groups are admitted, and which later sessions are open.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct

from realgraph.runtime.commands.aborted import LATE_BATCHES, AbortedGroups, AbortedGroupsImage
from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.commands.function_queues import FunctionQueues, FunctionQueuesImage
from realgraph.runtime.commands.keepers import keeper_of
from realgraph.runtime.commands.loads import Admission, GroupLoads, GroupLoadsImage, UnexpectedReply, by_group
from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.commands.tasks import Task, Tasks
from realgraph.runtime.job.engine_loss import shares_tokens
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.concurrency.ages import batched_group
from realgraph.runtime.scheduler.concurrency.controller import Concurrency, ConcurrencyImage
from realgraph.runtime.scheduler.concurrency.settings import settings_of
from realgraph.runtime.scheduler.concurrency.unlimited import Unlimited
from realgraph.runtime.scheduler.groups.ledger import Group, GroupImage, Ledger
from realgraph.runtime.scheduler.groups.transitions import GroupState
from realgraph.runtime.scheduler.placement import Batch, by_owner, drops_of, ids_beside, shares_of, sources_of_groups
from realgraph.runtime.scheduler.program import CallPlan, Program
from realgraph.runtime.wire.protocol import Abort, Drop, Execute, Generated, Load, Loaded, Sample, Submit

DISCARDED_BATCHES = 20  # batches of groups in a row that all were left out: the run gives up
NO_VERSION = -1  # of an engine that takes no groups over


class CollectionImage(Struct, frozen=True):
    """The groups on their way, as plain data."""

    leaving: tuple[GroupImage, ...]
    aborted: AbortedGroupsImage
    loads: dict[str, GroupLoadsImage]
    sessions: dict[str, int]
    paused: tuple[str, ...]
    functions: FunctionQueuesImage
    tally: int  # its number
    step: int
    n_discarded_in_row: int
    n_skipped: int
    concurrency: ConcurrencyImage | None  # where the work in flight is limited


class Collection:
    """The groups on their way. `tally` takes what is reported of groups that no batch has taken yet."""

    def __init__(self, job: Job, program: Program, ledger: Ledger, tasks: Tasks) -> None:
        self._program, self._ledger, self._tasks = program, ledger, tasks
        # the limit of the work in flight counts samples of groups by their age, which is one where they are trained on
        settings = settings_of(job, len(program.owner_workers)) if program.generate in program.paced else None
        self._concurrency: Concurrency | Unlimited = Concurrency(settings) if settings else Unlimited()
        self._all, self._shares = (1 << len(program.stream)) - 1, shares_tokens(job.graph, job.plan)
        self._leaving: dict[int, Group] = {}  # discarded, but a function still reads them
        self._aborted = AbortedGroups()
        self.loads = {program.generate: GroupLoads(program.owner_workers)}  # by call, '' where data are loaded
        self.loads |= {name: GroupLoads(rank[0] for rank in program.calls[name].ranks) for name in program.later}
        self.sessions: dict[str, int] = {}  # later generate calls that may be sent groups -> version of their weights
        self.paused: frozenset[str] = frozenset()  # of these calls, later ones, no sample begins
        self._functions = FunctionQueues(program.function_processes, program.slack_seconds)
        self.tally = StepTally()
        self.step = 0  # the next batch: what groups are made for
        self.n_discarded_in_row = 0  # groups left out since the last one that was ready
        self.n_skipped = 0  # of them, those whose prompt was too long
        predicted = sum(program.calls[name].predicted_seconds for name in program.generates)
        self.limit_seconds = job.runtime.deadline(predicted)  # at most, from a worker's one made group to its next

    def image(self, tallies: TallyNumbers) -> CollectionImage:
        """All that it has but the ledger's groups."""
        leaving = tuple([group.image for group in self._leaving.values()])
        loads = {name: loads.image for name, loads in self.loads.items()}
        groups = leaving, self._aborted.image, loads, dict(self.sessions), tuple(sorted(self.paused))
        counts = self.step, self.n_discarded_in_row, self.n_skipped
        limit = self._concurrency.image
        return CollectionImage(*groups, self._functions.image, tallies.of(self.tally), *counts, limit)

    def restore(self, image: CollectionImage, tallies: Sequence[StepTally]) -> None:
        """Go on from an image."""
        self._leaving = {group.id: Group.restored(group) for group in image.leaving}
        self._aborted.restore(image.aborted)
        self.sessions, self.paused = dict(image.sessions), frozenset(image.paused)
        for name, loads in image.loads.items():
            self.loads[name].restore(loads)
        self._functions.restore(image.functions)
        self.tally, self.step = tallies[image.tally], image.step
        self.n_discarded_in_row, self.n_skipped = image.n_discarded_in_row, image.n_skipped
        if isinstance(self._concurrency, Concurrency) and image.concurrency is not None:
            self._concurrency.restore(image.concurrency)

    # --- handing out --------------------------------------------------------------------------------------------------

    def _answered(self, reply: Generated | Loaded, now: float) -> None:
        call, drawn = ("", 0) if isinstance(reply, Loaded) else (reply.call, reply.drawn)
        worker, n_tokens = reply.worker, sum(sample.n_tokens for sample in reply.samples)
        self.loads[call].answered(worker, len(reply.groups) + len(reply.skipped), n_tokens, drawn)
        if self.n_open(worker):
            self._tasks.watch(worker, now, self.limit_seconds)
        else:
            self._tasks.unwatch(worker)

    def admit(self, places: int, at: Admission, now: float, limited: bool = True) -> list[Action]:
        """Admit a group to each place, fewer where `limited` by the work in flight, each to who has least to do."""
        limit = self._concurrency
        places, most = min(places, limit.room(self._ledger.n_waiting)) if limited else places, limit.most_per_engine
        dealt = self.loads[self._program.generate].deal(places, at.owners, most, at.resting)
        groups = [self._ledger.admit(worker, at.version) for worker in dealt]
        limit.admitted([group.id for group in groups], now)
        return [self.submit(worker, its, at.weights, now) for worker, its in by_owner(groups).items()]

    def submit(self, worker: int, groups: Sequence[Group], weights: int, now: float) -> Action:
        """Have a worker make or load groups, which count among its own already."""
        self._tasks.watch(worker, now, self.limit_seconds)
        numbers, call = tuple([group.id for group in groups]), self._program.generate
        if not call:
            return Send(worker, Load(numbers))
        return Send(worker, Submit(call, numbers, weights, keepers=self.keepers(groups)))

    def keepers(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Choose the workers that keep the tokens of groups from now on; none where tokens are not shared."""
        engines = tuple(self.loads[self._program.generate].open)
        for group in groups if self._shares else ():
            group.keeper = keeper_of(group.id, group.owner, engines)
        return tuple([group.keeper for group in groups]) if self._shares else ()

    def abort(self) -> list[Action]:
        """Stop all generation: no step of this run will need what is not made yet. A resumed run makes it again."""
        return self._abort((*self._ledger.live.values(), *self._leaving.values()))

    def _abort(self, groups: Iterable[Group]) -> list[Action]:
        by_worker: dict[int, list[int]] = {}
        for group in groups:
            for call, worker in group.at_work(self._program.generate, self._program.stream):
                self.loads[call].answered(worker, 1)  # nobody waits for it any more
                if group.id not in by_worker.setdefault(worker, []):
                    by_worker[worker].append(group.id)
        for worker, numbers in by_worker.items():
            self._aborted.add(worker, numbers, self._ledger.next_group + LATE_BATCHES * self._ledger.per_batch)
            if not self.n_open(worker):
                self._tasks.unwatch(worker)
        return [Send(worker, Abort(tuple(numbers))) for worker, numbers in by_worker.items()]

    def n_open(self, worker: int) -> int:
        """Groups that `worker` has still to make."""
        return sum(loads.open.get(worker, 0) for loads in self.loads.values())

    def making(self, worker: int) -> list[str]:
        """The generate calls by which `worker` has groups to make."""
        return [name for name, loads in self.loads.items() if loads.open.get(worker, 0)]

    def call_of(self, worker: int) -> str:
        """The call by which `worker` makes groups, for messages; '' where it loads data."""
        return next(iter(self.making(worker)), self._program.generate)

    def next_batch(self, groups: Sequence[Group], now: float) -> StepTally:
        """A batch has been taken: what was reported of its groups; from now on groups are made for the next step."""
        oldest = (self.step - self._ledger.staleness) * self._trains_of(self._program.generate)
        self._concurrency.batched(self.step, [batched_group(one.id, one.samples, oldest) for one in groups], now)
        self.step, tally, self.tally = self.step + 1, self.tally, StepTally()
        return tally

    def step_ended(self, step: int, now: float) -> None:
        """Every call of `step` has ended."""
        self._concurrency.step_ended(step, now)

    def starves(self, starving: bool, now: float) -> None:
        """The devices that train have nothing to do from now on until a batch is there, or they have again."""
        self._concurrency.starves(starving, now)

    # --- coming back --------------------------------------------------------------------------------------------------

    def arrived(self, reply: Generated | Loaded, version: int, now: float) -> list[Action]:
        """Groups were made, or skipped. version: by now, of the weights that make the samples of groups, in train
        steps."""
        crossed, left = self._aborted.crossed(reply)  # on their ways, the answer and the abort
        gone = [number for number in crossed if number not in self._ledger.live and number not in self._leaving]
        drops: list[Action] = [Send(reply.worker, Drop(tuple(sorted(gone))))] if gone else []
        return [*drops, *self._take(left, version, now)] if left is not None else drops

    def _take(self, reply: Generated | Loaded, version: int, now: float) -> list[Action]:
        if isinstance(reply, Generated) and reply.call in self._program.later:
            return self._later_ended(reply, now)
        version_per_step = self._trains_of(self._program.generate)
        groups = [self._ledger.made_by(number, reply.worker) for number in sorted(reply.groups)]
        skipped = [self._ledger.made_by(number, reply.worker) for number in reply.skipped]
        samples = by_group(reply.samples, self._program.ids_of(reply.groups))
        self._answered(reply, now)
        for group in groups:
            own = samples[group.id]
            oldest = min(sample.oldest for sample in own) // version_per_step if version_per_step else group.version
            self._ledger.generated(group, self._program.with_places(own), oldest)
            group.note_lengths(self._program.generate, own)
            self._concurrency.generated(group.id, [sample.n_new_tokens for sample in own], version, now)
        if isinstance(reply, Generated):
            self.tally.add(reply.call, reply.metrics, reply.started, reply.ended)
        self._left(skipped, now)
        for group in skipped:
            self._ledger.skip(group)
            self.tally.n_skipped += 1
        self.n_discarded_in_row, self.n_skipped = self.n_discarded_in_row + len(skipped), self.n_skipped + len(skipped)
        return self._advance(groups, now)

    def _trains_of(self, generate: str) -> int:
        """Train calls a step behind the versions of a generate call's samples; 0 where their age does not count."""
        return self._program.trains_of(generate) if generate in self._program.paced else 0

    def _later_ended(self, reply: Generated, now: float) -> list[Action]:
        """Samples of groups were made by a later generate call; skipped: those whose prompts were too long."""
        call, bit = self._program.calls[reply.call], 1 << self._program.stream.index(reply.call)
        known = [self._through(number, reply, bit) for number in (*sorted(reply.groups), *reply.skipped)]
        samples = by_group(reply.samples, ids_beside(call, known[: len(reply.groups)]))
        alive, gone = [], []
        for group in known:
            if group.id in self._leaving:
                gone += [] if group.running else [self._leaving.pop(group.id)]
            elif group.id in samples:
                self._note_samples(group, call, samples[group.id])
                alive.append(group)
            else:
                gone += self._leave_out(group, now, too_long=True)
        self._answered(reply, now)
        self.tally.add(reply.call, reply.metrics, reply.started, reply.ended)
        return [*drops_of(gone), *self._advance(alive, now)]

    def _note_samples(self, group: Group, call: CallPlan, samples: Sequence[Sample]) -> None:
        """Keep the lengths of a later call's samples, and their age where they are trained on."""
        if trains := self._trains_of(call.name):
            group.oldest = min(group.oldest, min(sample.oldest for sample in samples) // trains)
        group.samples = self._program.with_lengths(group.samples, call.name, samples)
        group.note_lengths(call.name, samples)

    def _through(self, number: int, reply: Generated, bit: int) -> Group:
        """A group that a worker was to make samples of, by a later call, which has ended for it."""
        group = self._leaving.get(number) or self._ledger.live.get(number)
        if group is None or group.makers.get(reply.call) != reply.worker or group.done & bit:
            raise UnexpectedReply(f"worker {reply.worker} answered for group {number}, which it was not to make")
        group.running -= 1
        group.done |= bit
        return group

    def function_ended(self, task: Task, worker: int, now: float) -> list[Action]:
        """A streaming function has run on the groups of `task`; those that it leaves too few samples are discards."""
        bit = 1 << self._program.stream.index(task.call)
        self._functions.end(worker)
        alive, gone = [], []
        for number in task.groups:
            group = self._leaving.get(number) or self._ledger.live[number]
            group.running -= 1
            group.done |= bit
            group.left_out += task.left_out.get(number, ())
            group.metrics[task.call] = task.by_group.get(number, {})
            if number in self._leaving:
                self.tally.add(task.call, group.metrics[task.call], 0.0, 0.0)
                gone += [] if group.running else [self._leaving.pop(number)]
            elif len(group.kept) >= self._program.least_samples:
                alive.append(group)
            else:
                gone += self._leave_out(group, now)
        return [*drops_of(gone), *self._advance(alive, now)]

    def _left(self, groups: Sequence[Group], now: float) -> None:
        """No batch takes these: what was measured of them counts for the step whose batch is being made."""
        self.tally.add_groups([group.metrics for group in groups])
        self._concurrency.left([group.id for group in groups], now)

    def drop_overdue(self, groups: Sequence[Group], now: float) -> list[Action]:
        """The ledger has left these out: they are too old for the next batch."""
        self.tally.n_dropped += len(groups)
        self._left(groups, now)
        return drops_of(groups)

    def drop_surplus(self, groups: Sequence[Group], now: float) -> list[Action]:
        """These were begun beyond what batches need, and are too old for the next: stop those that are being made."""
        self.tally.n_surplus += len(groups)
        self._left(groups, now)
        actions = self._abort(group for group in groups if group.state is GroupState.ADMITTED)
        self._leaving |= {group.id: group for group in groups if group.running}
        actions += drops_of(group for group in groups if group.state is not GroupState.ADMITTED and not group.running)
        for group in groups:
            self._ledger.discard_surplus(group)
        return actions

    def _leave_out(self, group: Group, now: float, too_long: bool = False) -> list[Group]:
        """Filter `group` out, or skip it for a written prompt; returned if its keys can be dropped at once."""
        self._left([group], now)
        self._ledger.filter_out(group)
        self.tally.n_dropped += not too_long
        self.tally.n_skipped += too_long
        self.n_discarded_in_row, self.n_skipped = self.n_discarded_in_row + 1, self.n_skipped + too_long
        if group.running:
            self._leaving[group.id] = group
            return []
        return [group]

    def lose(
        self, worker: int, batches: Sequence[tuple[Batch, StepTally]], versions: Mapping[int, int], now: float
    ) -> tuple[dict[int, list[Group]], int]:
        """A worker is gone. Its groups that no step has begun to use go on with those that keep their tokens, which are
        returned with their new workers; others are made again, so many. batches: put back for that. versions: those
        that may go on with groups, and the versions, in train steps, that these must not be newer than."""
        for batch, tally in batches:
            self._ledger.put_back(batch.groups)
            self.tally.absorb(tally)
            self.step = min(self.step, batch.step)
        loads = self.loads[self._program.generate]
        loads.lose(worker)
        own = self._ledger.unbatched(worker)
        kept = [group for group in own if versions.get(group.keeper, NO_VERSION) >= group.age_version]
        for group in kept:
            self._ledger.go_on(group, group.keeper)
            loads.give(group.owner)
        again = self._ledger.lose(worker)
        self._concurrency.moved([group.id for group in kept], now)
        self._concurrency.lost(again, now)
        self._leaving = {number: group for number, group in self._leaving.items() if group.owner != worker}
        self._functions.lose(worker)
        self._aborted.lose(worker)
        self._tasks.unwatch(worker)
        return by_owner(kept), len(again)

    def join(self, worker: int) -> None:
        """A worker that was gone is there again, without groups."""
        self.loads[self._program.generate].join(worker)

    # --- streaming calls ----------------------------------------------------------------------------------------------

    def open_session(self, name: str, version: int, now: float) -> list[Action]:
        """The later generate call `name` may be sent groups from now on: those that wait for it first."""
        self.sessions[name] = version
        return self._start_waiting(name, now)

    def hold(self, calls: Container[str], now: float) -> list[Action]:
        """From now on samples of just these later calls wait for new weights; those of others, which waited, begin."""
        begins = [name for name in self.sessions if name in self.paused and name not in calls]
        self.paused = frozenset(name for name in self._program.later if name in calls)
        return [action for name in begins for action in self._start_waiting(name, now)]

    def _start_waiting(self, name: str, now: float) -> list[Action]:
        waiting = [group for group in self._ledger.live.values() if group.state is GroupState.GENERATED]
        return self._start_due(self._program.stream.index(name), waiting, now)

    def _start_due(self, index: int, groups: Sequence[Group], now: float) -> list[Action]:
        """Start one streaming call for those of `groups` that are ready for it and have not had it."""
        name = self._program.stream[index]
        bit, needs = 1 << index, self._program.calls[name].needs
        due = [group for group in groups if not group.launched & bit and group.done & needs == needs]
        if name in self._program.later:
            return self._generate(name, bit, due, now) if name in self.sessions and name not in self.paused else []
        return [self._run(name, bit, its, now) for its in by_owner(due).values()]

    def _advance(self, groups: Sequence[Group], now: float) -> list[Action]:
        """Start what these groups have become ready for; those through with it are ready for a batch."""
        actions = [one for index in range(len(self._program.stream)) for one in self._start_due(index, groups, now)]
        for group in groups:
            if group.done == self._all:
                self._ledger.ready(group)
                self.n_discarded_in_row = self.n_skipped = 0
        return actions

    def _generate(self, name: str, bit: int, groups: Sequence[Group], now: float) -> list[Action]:
        """Give groups to the workers of a later generate call."""
        by_worker: dict[int, list[Group]] = {}
        for group in groups:
            worker = group.makers[name] = self.loads[name].take(near=group.workers)
            by_worker.setdefault(worker, []).append(group)
            group.launched |= bit
            group.running += 1
        actions: list[Action] = []
        for worker, given in by_worker.items():
            sources = sources_of_groups(self._program.calls[name], given)
            numbers = tuple([group.id for group in given])
            actions.append(Send(worker, Submit(name, numbers, self.sessions[name], sources)))
            self._tasks.watch(worker, now, self.limit_seconds)
        return actions

    def _run(self, name: str, bit: int, groups: Sequence[Group], now: float) -> Send:
        """One `Execute` of a streaming function over `groups` of one owner."""
        call, owner = self._program.calls[name], groups[0].owner
        shares, sources = shares_of(call, groups), sources_of_groups(call, groups)
        task = self._tasks.open("stream", name, self.step, self.tally)
        task.groups = tuple([group.id for group in groups])
        for group in groups:
            group.launched |= bit
            group.running += 1
        seconds = self._functions.begin(owner, call.timeout_seconds, len(shares), now)
        command = Execute(task.number, name, self.step, shares, sources, deadline_seconds=seconds)
        self._tasks.fly(task, (owner,), now, seconds)
        return Send(owner, command)
