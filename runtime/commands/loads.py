"""Groups that workers have still to make by one call, and who gets the next. Does not know what making them takes."""

import heapq
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.wire.protocol import Sample

LEAST_LEFT = 0.1  # of a group of mean length, that is outstanding until it ends
NEAR_LOAD = 1.25  # times the smallest load, and a group more: who has what a group begins with may have so much
KEPT = 0.99  # of the weight of the lengths known before, when another group has ended
MOST_OUTDATED = 4  # entries per worker, from which outdated ones are removed


class UnexpectedReply(Exception):
    """A worker answered what it was not asked: a bug of ours, reported like a failure of that worker."""


class Admission(NamedTuple):
    """The weights that groups are admitted at. version: in train steps; weights: the role's version; owners: that have
    them, where not all do; resting: that get no groups for now."""

    version: int
    weights: int
    owners: Container[int] | None = None
    resting: Container[int] = ()


class GroupLoadsImage(Struct, frozen=True):
    """The same as plain data."""

    open: dict[int, int]
    drawn: dict[int, float]
    lightest: tuple[tuple[float, int], ...]
    groups: float
    tokens: float


class GroupLoads:
    """Groups to be made, and the tokens of them that are outstanding, per worker.

    A load counts in groups of mean length: those that a worker has, less what it has drawn of them by its last report.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.open = dict.fromkeys(workers, 0)
        self._drawn = dict.fromkeys(self.open, 0.0)  # in groups of mean length
        self._lightest = [(0.0, worker) for worker in self.open]  # heap; outdated entries are skipped
        heapq.heapify(self._lightest)
        self._groups = self._tokens = 0.0  # of groups that were made; older ones count ever less

    @property
    def n_making(self) -> int:
        """Groups that are still to be made, of all workers."""
        return sum(self.open.values())

    def load(self, worker: int) -> float:
        """Outstanding tokens of a worker, in groups of mean length. A group that has not ended has some left, however
        many were drawn of it."""
        n_groups = self.open[worker]
        return max(n_groups - self._drawn[worker], LEAST_LEFT * n_groups)

    def _least(self) -> int:
        """The worker with the fewest outstanding tokens, the first of equals."""
        while True:
            load, worker = self._lightest[0]
            if worker in self.open and self.load(worker) == load:
                return worker
            heapq.heappop(self._lightest)

    def take(self, near: Sequence[int] = ()) -> int:
        """The worker with the fewest outstanding tokens, which now has one group more. near: workers that have what
        the group begins with; the first of them gets it where it has little more than the fewest."""
        worker = self._least()
        most = NEAR_LOAD * self.load(worker) + 1
        worker = next((one for one in near if one in self.open and self.load(one) <= most), worker)
        self.give(worker)
        return worker

    def give(self, worker: int) -> None:
        """A worker has one group more."""
        self.open[worker] += 1
        self._place(worker)

    def _place(self, worker: int) -> None:
        """The worker's load is new."""
        heapq.heappush(self._lightest, (self.load(worker), worker))
        if len(self._lightest) > MOST_OUTDATED * len(self.open):
            self._order()

    def deal(
        self, n_groups: int, owners: Container[int] | None, most: float = math.inf, resting: Container[int] = ()
    ) -> list[int]:
        """The workers of so many groups, each the one with the fewest outstanding tokens of those with less than `most`
        groups; fewer, where there is none. owners: that may get some; None: all. resting: that get none, and keep no
        place.

        What falls to a worker that is not in `owners` stays for when it is: the first of many engines that has new
        weights does not take what they let in for all. What no worker has room for waits here, not in the queue of one
        while others run dry.
        """
        dealt, full = list[int](), set[int]()
        while len(dealt) < n_groups and len(full) < len(self.open):
            worker = self._least()
            if worker not in full and worker not in resting and self.open[worker] < most:
                self.give(worker)
                dealt.append(worker)
            else:
                full.add(worker)
                heapq.heappop(self._lightest)
        for worker in full:
            self._place(worker)
        if owners is None:
            return dealt
        for worker in dealt:
            if worker not in owners:
                self.open[worker] -= 1
        self._order()
        return [worker for worker in dealt if worker in owners]

    def answered(self, worker: int, n_groups: int, n_tokens: int = 0, drawn: int = 0) -> None:
        """`worker` has made so many, of so many tokens, or was told to leave them; of those that it has left it has
        drawn `drawn` tokens, prompts included. Raises UnexpectedReply where it had fewer groups."""
        left = self.open.get(worker, 0) - n_groups
        if left < 0:
            raise UnexpectedReply(f"worker {worker} answered for more groups than it had")
        if n_tokens:
            self._tokens = KEPT * self._tokens + n_tokens
            self._groups = KEPT * self._groups + n_groups
        self.open[worker] = left
        self._drawn[worker] = drawn * self._groups / self._tokens if self._tokens and left else 0.0
        self._place(worker)

    def lose(self, worker: int) -> None:
        """A worker is gone, with its groups."""
        del self.open[worker], self._drawn[worker]
        self._order()

    def join(self, worker: int) -> None:
        """A worker comes, or is there again, without groups."""
        self.open[worker], self._drawn[worker] = 0, 0.0
        self._order()

    def _order(self) -> None:
        """One entry for each worker."""
        self._lightest = [(self.load(worker), worker) for worker in self.open]
        heapq.heapify(self._lightest)

    @property
    def image(self) -> GroupLoadsImage:
        """All that they have."""
        return GroupLoadsImage(dict(self.open), dict(self._drawn), tuple(self._lightest), self._groups, self._tokens)

    def restore(self, image: GroupLoadsImage) -> None:
        """Go on from an image."""
        self.open, self._drawn, self._lightest = dict(image.open), dict(image.drawn), list(image.lightest)
        self._groups, self._tokens = image.groups, image.tokens


def by_group(samples: Sequence[Sample], expected: Mapping[int, Sequence[int]]) -> Mapping[int, tuple[Sample, ...]]:
    """The samples of each group, in order. expected: group -> its samples' numbers, in order. Raises UnexpectedReply
    where they are not just those."""
    found: dict[int, list[Sample]] = {number: [] for number in expected}
    for sample in samples:
        if (number := group_of(sample.sample)) not in found:
            raise UnexpectedReply(f"sample {sample.sample} belongs to none of the groups it came with")
        found[number].append(sample)
    for number, own in found.items():
        own.sort(key=lambda sample: sample.sample)
        if [sample.sample for sample in own] != list(expected[number]):
            raise UnexpectedReply(f"group {number} came with {len(own)} samples, not its {len(expected[number])}")
    return {number: tuple(own) for number, own in found.items()}
