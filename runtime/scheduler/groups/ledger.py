"""The ledger: one state per prompt group, who may be admitted, and which groups make a step's batch.

Knows nothing of workers' messages, calls or meshes. `version` here counts completed train *steps* of the role that
generates. The admission rule is AReaL's (arXiv:2505.24298, eq. 3); it counts the candidate and leaves discards out.
A surplus of groups may be begun beyond it; as many of those that it makes too old for any batch are discarded.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from realgraph.runtime.commands.loads import UnexpectedReply
from realgraph.runtime.scheduler.groups.transitions import GroupEvent, GroupState, group_after
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import NOBODY, Sample

Overdue = Literal["mask", "wait", "drop", "allow"]
LEFT_TO_DO = {GroupState.ADMITTED: 0, GroupState.GENERATED: 1, GroupState.READY: 2}  # the most first


class GroupImage(Struct, frozen=True):
    """A group as plain data."""

    id: int
    owner: int
    version: int
    oldest: int
    state: GroupState
    samples: tuple[Sample, ...]
    launched: int
    done: int
    running: int
    makers: dict[str, int] = {}
    left_out: tuple[int, ...] = ()
    keeper: int = NOBODY
    metrics: dict[str, dict[str, Mean]] = {}


class LedgerImage(Struct, frozen=True):
    """The ledger as plain data."""

    next_group: int
    n_trained: int
    n_discarded: int
    live: tuple[GroupImage, ...]
    batched: int
    again: tuple[int, ...]
    ready: tuple[tuple[int, int], ...]
    ages: dict[int, int]


class Group:
    """A prompt group in hand. `owner` is the worker that holds it; `version` that of its admission.

    launched and done are bit sets over the graph's streaming calls; `running` counts those now at work. makers: later
    generate call -> the worker that makes its samples. left_out: numbers of samples that no batch takes; all streaming
    calls see the group whole, so it does not matter which of them come first. keeper: the worker that keeps its tokens.
    metrics: call -> name -> over its samples, those left out too; they count for the step that trains it.
    """

    __slots__ = (
        *("done", "id", "keeper", "launched", "left_out", "makers", "metrics", "oldest", "owner", "running"),
        *("samples", "state", "version"),
    )

    def __init__(self, number: int, owner: int, version: int) -> None:
        self.id, self.owner, self.version, self.oldest = number, owner, version, version
        self.state = GroupState.ADMITTED
        self.samples: tuple[Sample, ...] = ()
        self.launched = self.done = self.running = 0
        self.makers: dict[str, int] = {}
        self.left_out: tuple[int, ...] = ()
        self.keeper = NOBODY
        self.metrics: dict[str, dict[str, Mean]] = {}

    def move(self, event: GroupEvent) -> None:
        """Take `event` in its life. Raises IllegalTransition."""
        self.state = group_after(self.state, event, self.id)

    @property
    def image(self) -> GroupImage:
        """All that is known of it."""
        return GroupImage(
            self.id,
            self.owner,
            self.version,
            self.oldest,
            self.state,
            self.samples,
            self.launched,
            self.done,
            self.running,
            dict(self.makers),
            self.left_out,
            self.keeper,
            dict(self.metrics),
        )

    @staticmethod
    def restored(image: GroupImage) -> "Group":
        """The group of an image."""
        group = Group(image.id, image.owner, image.version)
        group.oldest, group.state, group.samples = image.oldest, image.state, image.samples
        group.launched, group.done, group.running = image.launched, image.done, image.running
        group.makers, group.left_out, group.keeper = dict(image.makers), image.left_out, image.keeper
        group.metrics = dict(image.metrics)
        return group

    def go_on(self, worker: int) -> None:
        """Another worker goes on with it, from the tokens that are known there; nothing else of it is left."""
        self.version = self.age_version
        self.move(GroupEvent.MOVED)
        self.owner, self.samples, self.makers, self.left_out, self.metrics = worker, (), {}, (), {}
        self.launched = self.done = self.running = 0

    def note_lengths(self, call: str, samples: Sequence[Sample]) -> None:
        """A generate call has made these of it; `call` is '' where they were loaded."""
        if call:
            n, new_tokens = float(len(samples)), float(sum(sample.n_new_tokens for sample in samples))
            self.metrics[call] = {
                "new_tokens": Mean(new_tokens, n),
                "prompt_tokens": Mean(float(sum(sample.n_tokens for sample in samples)) - new_tokens, n),
                "finished": Mean(float(sum(sample.finished for sample in samples)), n),
            }

    @property
    def kept(self) -> tuple[Sample, ...]:
        """The samples that a batch takes."""
        if not self.left_out:
            return self.samples
        return tuple([sample for sample in self.samples if sample.sample not in self.left_out])

    @property
    def age_version(self) -> int:
        """The version that its age counts from: of its oldest token where it is ready, else of its admission."""
        return self.version if self.state in (GroupState.ADMITTED, GroupState.GENERATED) else self.oldest

    @property
    def workers(self) -> tuple[int, ...]:
        """All that hold anything of it."""
        return tuple(dict.fromkeys((self.owner, *self.makers.values())))

    def at_work(self, generate: str, stream: Sequence[str]) -> list[tuple[str, int]]:
        """The generate calls that make samples of it now, each with its worker. generate: the first one."""
        if self.state is GroupState.ADMITTED:
            return [(generate, self.owner)]
        return [(name, worker) for name, worker in self.makers.items() if not self.done >> stream.index(name) & 1]


class Ledger:
    """Every group of a run. Trained and discarded groups leave nothing but a count.

    ahead: the steps by which admission runs ahead of training, no more than `staleness`, beyond which a sample is old.
    surplus: groups that are begun beyond what batches need.
    """

    def __init__(
        self, per_batch: int, staleness: int, overdue: Overdue, ahead: int | None = None, surplus: int = 0
    ) -> None:
        self.per_batch, self.staleness, self.overdue = per_batch, staleness, overdue
        self.ahead = staleness if ahead is None else ahead
        self.surplus = surplus
        self.next_group = 0
        self.n_trained = self.n_discarded = 0
        self.live: dict[int, Group] = {}
        self.batched = 0  # live groups that belong to a batch
        self._again: deque[int] = deque()  # of a checkpoint: to be admitted anew, under their old numbers
        self._ready: list[tuple[int, int]] = []  # (oldest, id), sorted
        # version -> groups in no batch yet: of admission, of the oldest token once ready
        self._ages: dict[int, int] = {}

    def restore(self, next_group: int, again: Sequence[int], n_trained: int, n_discarded: int) -> None:
        """Go on from a checkpoint's counts; `again` are its open groups."""
        self.next_group, self.n_trained, self.n_discarded = next_group, n_trained, n_discarded
        self._again = deque(sorted(again))

    @property
    def image(self) -> LedgerImage:
        """All that it has."""
        live = tuple([group.image for group in self.live.values()])
        counts = (self.next_group, self.n_trained, self.n_discarded)
        return LedgerImage(*counts, live, self.batched, tuple(self._again), tuple(self._ready), dict(self._ages))

    def restore_image(self, image: LedgerImage) -> None:
        """Go on from an image."""
        self.next_group, self.n_trained, self.n_discarded = image.next_group, image.n_trained, image.n_discarded
        self.live = {group.id: Group.restored(group) for group in image.live}
        self.batched, self._again = image.batched, deque(image.again)
        self._ready, self._ages = list(image.ready), dict(image.ages)

    @property
    def open(self) -> tuple[int, ...]:
        """Groups admitted and neither trained nor discarded, in order."""
        return tuple(sorted([*self.live, *self._again]))

    @property
    def n_ready(self) -> int:
        """Ready groups that no batch has taken yet."""
        return len(self._ready)

    @property
    def n_waiting(self) -> int:
        """Ready groups in no batch, or in one behind another."""
        return len(self._ready) + max(0, self.batched - self.per_batch)

    def room(self, version: int, n_steps: int) -> int:
        """Groups that may still be admitted at `version` in a run of `n_steps`.

        Candidate N is admitted only while floor((N - 1) / B) <= version + ahead and N <= n_steps x B; beyond it the
        surplus, while batches are to be made for which it is not too old.
        """
        bound = min(version + self.ahead + 1, n_steps) * self.per_batch
        if self.n_trained + self.batched < bound:
            bound += self.surplus
        return max(0, bound - len(self.live) - self.n_trained)

    def admit(self, owner: int, version: int) -> Group:
        """The next group, from now on in hand."""
        if self._again:
            number = self._again.popleft()
        else:
            number = self.next_group
            self.next_group += 1
        group = self.live[number] = Group(number, owner, version)
        self._count(version, 1)
        return group

    def made_by(self, number: int, worker: int) -> Group:
        """The group that a worker was to make. Raises UnexpectedReply where it was not."""
        group = self.live.get(number)
        if group is None or group.owner != worker or group.samples:
            raise UnexpectedReply(f"worker {worker} answered for group {number}, which it was not to make")
        return group

    def generated(self, group: Group, samples: tuple[Sample, ...], oldest: int) -> None:
        """All samples of `group` are in a store; `oldest` is the version of their oldest token."""
        group.move(GroupEvent.MADE)
        group.samples, group.oldest = samples, oldest

    def ready(self, group: Group) -> None:
        """All that is computed group by group has been: a batch may take it."""
        group.move(GroupEvent.COMPUTED)
        self._count(group.version, -1)
        self._count(group.oldest, 1)
        insort(self._ready, (group.oldest, group.id))

    def skip(self, group: Group) -> None:
        """Its prompt is too long: leave the group out for good; its place is free at once."""
        group.move(GroupEvent.SKIPPED)
        self._count(group.version, -1)
        self._forget(group)

    def filter_out(self, group: Group) -> None:
        """A function says so: leave the group out for good; its place is free at once."""
        group.move(GroupEvent.FILTERED)
        self._count(group.version, -1)
        self._forget(group)

    def _count(self, version: int, change: int) -> None:
        n_groups = self._ages.get(version, 0) + change
        if n_groups:
            self._ages[version] = n_groups
        else:
            del self._ages[version]

    def _forget(self, group: Group) -> None:
        del self.live[group.id]
        self.n_discarded += 1

    def overdue_groups(self, step: int) -> list[Group]:
        """Under `drop`: takes the ready groups that are too old for the batch of `step` out, and returns them."""
        if self.overdue != "drop":
            return []
        late = [number for oldest, number in self._ready if step - oldest > self.staleness]
        groups = [self.live[number] for number in late]
        del self._ready[: len(late)]  # sorted by age: the late ones come first
        for group in groups:
            group.move(GroupEvent.OVERDUE)
            self._count(group.oldest, -1)
            self._forget(group)
        return groups

    def surplus_groups(self, step: int) -> list[Group]:
        """The groups to be discarded now that the batch of `step` is there: they would be too old for the next one. Not
        more than the surplus, the oldest first, and of these what has most left to do."""
        if not self.surplus:
            return []
        late = [group for group in self.live.values() if group.age_version < step + 1 - self.ahead]
        late = [group for group in late if group.state is not GroupState.BATCHED]
        return sorted(late, key=lambda group: (group.age_version, LEFT_TO_DO[group.state], -group.id))[: self.surplus]

    def discard_surplus(self, group: Group) -> None:
        """Leave the group out for good; its place is free at once."""
        self._count(group.age_version, -1)
        if group.state is GroupState.READY:
            del self._ready[bisect_left(self._ready, (group.oldest, group.id))]
        group.move(GroupEvent.SURPLUS)
        self._forget(group)

    def _must_wait(self, step: int, taken: Sequence[tuple[int, int]]) -> bool:
        """True where the batch of `step`, made of `taken`, leaves more old groups than can still be trained in time.

        Groups of versions up to i fit into the batches up to step i + staleness, all but the surplus. Admission sees to
        it that they do as long as older groups go first, so what is waited for is always on its way.
        """
        left = dict(self._ages)
        for oldest, _ in taken:
            left[oldest] -= 1
        n_left = 0
        for version in sorted(left):
            n_left += left[version]
            surplus = self.surplus if step <= version + self.ahead else 0
            if n_left > max(0, version + self.staleness - step) * self.per_batch + surplus:
                return True
        return False

    def batch(self, step: int) -> list[Group] | None:
        """The ready groups with the oldest tokens, then the lowest numbers, in order of number; None: not yet.

        Under `wait`, not before every group can be trained within the bound.
        """
        if len(self._ready) < self.per_batch:
            return None
        taken = self._ready[: self.per_batch]
        if self.overdue == "wait" and self._must_wait(step, taken):
            return None
        for oldest, _ in taken:
            self._count(oldest, -1)
        del self._ready[: self.per_batch]
        self.batched += self.per_batch
        groups = [self.live[number] for number in sorted(number for _, number in taken)]
        for group in groups:
            group.move(GroupEvent.TAKEN)
        return groups

    def trained(self, groups: Sequence[Group]) -> None:
        """The step of these groups has ended."""
        for group in groups:
            group.move(GroupEvent.STEP_ENDED)
            del self.live[group.id]
        self.n_trained += len(groups)
        self.batched -= len(groups)

    def put_back(self, groups: Sequence[Group]) -> None:
        """These leave their batch, which is not made after all: they are ready again."""
        for group in groups:
            group.move(GroupEvent.PUT_BACK)
            self._count(group.oldest, 1)
            insort(self._ready, (group.oldest, group.id))
        self.batched -= len(groups)

    def unbatched(self, owner: int) -> list[Group]:
        """The groups of a worker that are in no batch."""
        return [one for one in self.live.values() if one.owner == owner and one.state is not GroupState.BATCHED]

    def go_on(self, group: Group, worker: int) -> None:
        """Another worker goes on with a group that is in no batch, from its tokens, which are as old as they were."""
        if group.state is GroupState.READY:
            self._ready.remove((group.oldest, group.id))
        group.go_on(worker)

    def lose(self, owner: int) -> list[int]:
        """A worker is gone, with all that was made of its groups: those in no batch are admitted anew, under their
        numbers, which are returned."""
        own = self.unbatched(owner)
        for group in own:
            ready = group.state is GroupState.READY
            group.move(GroupEvent.WORKER_LOST)
            self._count(group.oldest if ready else group.version, -1)
            if ready:
                self._ready.remove((group.oldest, group.id))
            del self.live[group.id]
        numbers = [group.id for group in own]
        self._again = deque(sorted([*self._again, *numbers]))
        return numbers

    def missing(self, step: int) -> int:
        """Groups that the batches up to that of `step` still lack, those under way included in what there is."""
        return max(0, (step + 1) * self.per_batch - self.n_trained - len(self.live))

    @property
    def n_again(self) -> int:
        """Groups to be admitted anew."""
        return len(self._again)

    def check(self) -> None:
        """Assert what is always true: every number that was ever given out is in exactly one place."""
        assert self.next_group == len(self.live) + len(self._again) + self.n_trained + self.n_discarded
        assert not set(self.live) & set(self._again)
        assert all(number < self.next_group for number in [*self.live, *self._again])
        states = Counter(group.state for group in self.live.values())
        assert states[GroupState.READY] == len(self._ready)
        assert states[GroupState.BATCHED] == self.batched
        assert len(self.live) - self.batched == sum(self._ages.values())
        assert all(self.live[number].state is GroupState.READY for _, number in self._ready)
        assert self._ready == sorted(self._ready)
        assert not any(group.state in (GroupState.TRAINED, GroupState.DISCARDED) for group in self.live.values())
