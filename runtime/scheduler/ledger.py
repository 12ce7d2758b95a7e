"""The ledger: one state per prompt group, who may be admitted, and which groups make a step's batch.

Knows nothing of workers' messages, calls or meshes. `version` here counts completed train *steps* of the role that
generates. The admission rule is AReaL's (arXiv:2505.24298, eq. 3); it counts the candidate and leaves discards out.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from realgraph.runtime.scheduler.transitions import GroupEvent, GroupState, group_after
from realgraph.runtime.wire.protocol import Sample

Overdue = Literal["mask", "wait", "drop", "allow"]


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

    launched and done are bit sets over the graph's streaming functions; `running` counts those now at work.
    """

    __slots__ = ("done", "id", "launched", "oldest", "owner", "running", "samples", "state", "version")

    def __init__(self, number: int, owner: int, version: int) -> None:
        self.id, self.owner, self.version, self.oldest = number, owner, version, version
        self.state = GroupState.ADMITTED
        self.samples: tuple[Sample, ...] = ()
        self.launched = self.done = self.running = 0

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
        )

    @staticmethod
    def restored(image: GroupImage) -> "Group":
        """The group of an image."""
        group = Group(image.id, image.owner, image.version)
        group.oldest, group.state, group.samples = image.oldest, image.state, image.samples
        group.launched, group.done, group.running = image.launched, image.done, image.running
        return group


class Ledger:
    """Every group of a run. Trained and discarded groups leave nothing but a count.

    ahead: the steps by which admission runs ahead of training, no more than `staleness`, beyond which a sample is old.
    """

    def __init__(self, per_batch: int, staleness: int, overdue: Overdue, ahead: int | None = None) -> None:
        self.per_batch, self.staleness, self.overdue = per_batch, staleness, overdue
        self.ahead = staleness if ahead is None else ahead
        self.next_group = 0
        self.n_trained = self.n_discarded = 0
        self.live: dict[int, Group] = {}
        self.batched = 0  # live groups that belong to a batch
        self._again: deque[int] = deque()  # of a checkpoint: to be admitted anew, under their old numbers
        self._ready: list[tuple[int, int]] = []  # (oldest, id), sorted
        self._ages: dict[
            int, int
        ] = {}  # version -> groups in no batch yet: of admission, of the oldest token once ready

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

    def room(self, version: int, n_steps: int) -> int:
        """Groups that may still be admitted at `version` in a run of `n_steps`.

        Candidate N is admitted only while floor((N - 1) / B) <= version + ahead and N <= n_steps x B.
        """
        bound = min(version + self.ahead + 1, n_steps) * self.per_batch
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

    def _must_wait(self, step: int, taken: Sequence[tuple[int, int]]) -> bool:
        """True where the batch of `step`, made of `taken`, leaves more old groups than can still be trained in time.

        Groups of versions up to i fit into the batches up to step i + staleness. Admission sees to it that they do as
        long as older groups go first, so what is waited for is always on its way.
        """
        left = dict(self._ages)
        for oldest, _ in taken:
            left[oldest] -= 1
        n_left = 0
        for version in sorted(left):
            n_left += left[version]
            if n_left > max(0, version + self.staleness - step) * self.per_batch:
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
