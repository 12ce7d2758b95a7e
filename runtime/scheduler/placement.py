"""A step's batch: which worker holds what of it, how it is cut into shares, and the messages that say so."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise

from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.job.cursor import minibatch_groups
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.scheduler.groups.ledger import Group
from realgraph.runtime.scheduler.program import GROUP_OWNER, OF_GROUP, SHARED, CallPlan
from realgraph.runtime.wire.protocol import Drop, SampleSource

Place = int  # a number of one way in which the batch lies over workers
Shape = tuple[int, bool, int]  # ranks, whole groups, whose lengths balance them
Cut = tuple[tuple[tuple[int, ...], ...], bool, int]  # the ranks' workers, heads first; whole groups, whose lengths
Holders = list[tuple[int, tuple[int, ...]]]  # (worker, ids of samples)


def balance(weights: Sequence[int], n_parts: int) -> list[list[int]]:
    """Positions of `weights` (tokens) cut into `n_parts`, each in order: longest first, to the lightest part.

    The heaviest and the lightest part differ by at most the largest weight. Source: Graham 1969 (LPT rule).
    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    heap = list(range(n_parts))  # load x n_parts + part: one comparison each
    for position in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        lightest = heap[0]
        parts[lightest % n_parts].append(position)
        heapq.heapreplace(heap, lightest + weights[position] * n_parts)
    for part in parts:
        part.sort()
    return parts


def drawn(cuts: Sequence[Sequence[Sequence[int]]], rank: int) -> list[int]:
    """The positions that a rank has in any of these mini-batches, in order."""
    return sorted({position for cut in cuts for position in cut[rank]})


def _shape(call: CallPlan) -> Shape:
    return len(call.ranks), call.whole_groups, call.own


class Batch:
    """The groups of a step in order of number, each with the samples that it has kept. Positions are those of `ids`,
    these samples in order of number."""

    def __init__(self, step: int, groups: Sequence[Group], seed: int) -> None:
        self.step, self.groups, self.seed = step, tuple(groups), seed
        members = [(group, group.kept) for group in groups]
        samples = [sample for _, kept in members for sample in kept]
        self.ids = [sample.sample for sample in samples]
        self.n_tokens = [sample.n_tokens for sample in samples]
        sizes = [len(kept) for _, kept in members]
        self._of_group = [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]  # its positions
        n_own = min((len(sample.own_tokens) for sample in samples), default=0)
        self._own = [[sample.own_tokens[i] for sample in samples] for i in range(n_own)]
        owners = [group.owner for group, kept in members for _ in kept]
        self._workers = [owners]  # place -> worker of every position; calls that lie alike share one
        self._cuts: list[Cut] = [((), False, SHARED)]  # place -> how it is cut
        self._place: dict[str, Place] = {GROUP_OWNER: 0}  # of what a call wrote
        self._made: set[str] = set()  # later generate calls
        for name in self.groups[0].makers if self.groups else ():
            self._made.add(name)
            self._place[name] = len(self._workers)
            self._workers.append([group.makers[name] for group, kept in members for _ in kept])
            self._cuts.append(((), False, SHARED))
        self._parts: dict[Shape, list[list[int]]] = {}
        self._named: dict[Shape, list[tuple[int, ...]]] = {}
        self._whole_holders: dict[tuple[Shape, Place], list[Holders]] = {}

    def lengths(self, own: int = SHARED) -> list[int]:
        """The tokens of the samples at every position, as `CallPlan.own` has them."""
        return self._own[own] if 0 <= own < len(self._own) else self.n_tokens

    def _cut(self, groups: Sequence[int], shape: Shape) -> list[list[int]]:
        """Positions of the samples of `groups` (positions too), balanced by tokens over the ranks of `shape`. OF_GROUP:
        the first of each group stands for it, and ranks get as many."""
        n_ranks, whole_groups, own = shape
        if own == OF_GROUP:
            first = [self._of_group[group].start for group in groups]
            return [[first[i] for i in part] for part in balance([1] * len(first), n_ranks)]
        lengths = self.lengths(own)
        if not whole_groups:
            positions = [position for group in groups for position in self._of_group[group]]
            return [[positions[i] for i in part] for part in balance([lengths[p] for p in positions], n_ranks)]
        members = [self._of_group[group] for group in groups]
        weights = [sum(lengths[own.start : own.stop]) for own in members]
        return [[position for i in part for position in members[i]] for part in balance(weights, n_ranks)]

    def whole(self, n_ranks: int, whole_groups: bool = False, own: int = SHARED) -> list[list[int]]:
        """The whole batch cut for `n_ranks`; calls of one step with as many ranks and lengths get equal parts."""
        shape = (n_ranks, whole_groups, own)
        if shape not in self._parts:
            self._parts[shape] = self._cut(range(len(self.groups)), shape)
        return self._parts[shape]

    def minibatches(self, call: CallPlan) -> list[list[list[int]]]:
        """Shares of a train call with several mini-batches: mini-batch -> rank -> positions."""
        cuts = []
        for epoch in range(call.epochs):
            for groups in minibatch_groups(len(self.groups), call.minibatches, self.seed, self.step, epoch):
                cuts.append(self._cut(groups, _shape(call)))
        return cuts

    def named(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The ids of the samples at these positions."""
        ids = self.ids
        return tuple([ids[position] for position in positions])

    def whole_named(self, call: CallPlan) -> list[tuple[int, ...]]:
        """`whole` for a call's ranks, as ids of samples."""
        shape = _shape(call)
        if shape not in self._named:
            self._named[shape] = [self.named(part) for part in self.whole(*shape)]
        return self._named[shape]

    # --- who holds what -----------------------------------------------------------------------------------------------

    def own(self, call: CallPlan) -> None:
        """Note that what `call` writes lies with the head worker of each rank, for its part of the whole batch."""
        cut = (call.ranks or (call.workers,), call.whole_groups, call.own)
        if cut in self._cuts:
            self._place[call.name] = self._cuts.index(cut)
            return
        self._place[call.name] = len(self._cuts)
        self._cuts.append(cut)
        workers = [call.workers[0] if call.workers else 0] * len(self.ids)
        for rank, part in zip(call.ranks, self.whole(len(cut[0]), call.whole_groups, call.own), strict=False):
            head = rank[0]
            for position in part:
                workers[position] = head
        self._workers.append(workers)

    @property
    def owned(self) -> tuple[str, ...]:
        """The calls of which `own` has been told, in order."""
        return tuple([name for name in self._place if name != GROUP_OWNER and name not in self._made])

    def owners(self, owner: str) -> list[int]:
        """The worker that holds what `owner` (GROUP_OWNER or a call) wrote, of every position."""
        return self._workers[self._place[owner]]

    def _places(self, call: CallPlan) -> dict[Place, tuple[str, ...]]:
        """Keys that `call` reads, by where they lie."""
        keys: dict[Place, tuple[str, ...]] = {}
        for owner, names in call.reads.items():
            place = self._place[owner]
            keys[place] = keys.get(place, ()) + names
        return keys

    def _holders(self, place: Place, positions: Sequence[int]) -> Holders:
        workers, ids = self._workers[place], self.ids
        by_worker: dict[int, list[int]] = {}
        for position in positions:
            worker = workers[position]
            own = by_worker.get(worker)
            if own is None:
                by_worker[worker] = [ids[position]]
            else:
                own.append(ids[position])
        return [(worker, tuple(own)) for worker, own in by_worker.items()]

    def sources(self, call: CallPlan, positions: Sequence[int]) -> tuple[SampleSource, ...]:
        """The places where `call` finds what it reads of the samples at these positions."""
        return tuple(
            [
                SampleSource(worker, keys, ids)
                for place, keys in self._places(call).items()
                for worker, ids in self._holders(place, positions)
            ]
        )

    def prefetched(self, call: CallPlan) -> list[tuple[tuple[int, ...], tuple[SampleSource, ...]]]:
        """The workers of each data-parallel rank of `call`, or the one that runs it over the whole batch, and where
        they find what lies with the workers that made the groups."""
        place, keys = self._place[GROUP_OWNER], call.reads[GROUP_OWNER]
        return [
            (workers, tuple([SampleSource(owner, keys, ids) for owner, ids in self._holders(place, positions)]))
            for workers, positions in self._read(call)
        ]

    def _read(self, call: CallPlan) -> list[tuple[tuple[int, ...], Sequence[int]]]:
        """The positions that each rank of `call` reads."""
        if not call.ranks:
            return [(call.workers, range(len(self.ids)))]
        if call.minibatches == 1:
            return list(zip(call.ranks, self.whole(*_shape(call)), strict=True))
        cuts = self.minibatches(call)
        return [(workers, drawn(cuts, rank)) for rank, workers in enumerate(call.ranks)]

    def sources_of_ranks(self, call: CallPlan) -> list[tuple[SampleSource, ...]]:
        """`sources` of each rank's part of the whole batch; the look-up is shared by the step's calls."""
        shape = _shape(call)
        holders = []
        for place, keys in self._places(call).items():
            key = (shape, place)
            if key not in self._whole_holders:
                self._whole_holders[key] = [self._holders(place, part) for part in self.whole(*shape)]
            holders.append((keys, self._whole_holders[key]))
        return [
            tuple([SampleSource(worker, keys, ids) for keys, ranks in holders for worker, ids in ranks[rank]])
            for rank in range(len(call.ranks))
        ]

    def by_owner(self) -> dict[int, list[int]]:
        """Owner -> positions of the samples it holds."""
        positions_of: dict[int, list[int]] = {}
        for position, worker in enumerate(self._workers[0]):
            positions_of.setdefault(worker, []).append(position)
        return positions_of

    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Worker -> the groups of which it may hold any key: all workers of a rank, of what its head owns."""
        numbers = [group_of(sample) for sample in self.ids]
        pairs: set[tuple[int, int]] = set()
        for place in set(self._place.values()):
            owned = set(zip(self._workers[place], numbers, strict=True))
            pairs |= owned
            others = {rank[0]: rank[1:] for rank in self._cuts[place][0] if len(rank) > 1}
            if others:
                pairs.update((other, number) for worker, number in owned for other in others.get(worker, ()))
        by_worker: dict[int, list[int]] = {}
        for worker, number in sorted(pairs):
            by_worker.setdefault(worker, []).append(number)
        return {worker: tuple(groups) for worker, groups in by_worker.items()}


def units_of(ids: Sequence[int], per_group: bool) -> tuple[tuple[int, ...], ...]:
    """Shares of a function over these samples, those of a group side by side: one per sample, or one per group."""
    if not per_group:
        return tuple([(sample,) for sample in ids])
    return tuple([tuple(own) for _, own in groupby(ids, key=group_of)])


def ids_of_groups(groups: Sequence[Group]) -> tuple[int, ...]:
    """The samples of groups."""
    return tuple([sample.sample for group in groups for sample in group.samples])


def ids_beside(call: CallPlan, groups: Sequence[Group]) -> dict[int, Sequence[int]]:
    """The samples that a later generate call makes of each group: one beside each of the group's, or one for all."""
    return {group.id: ids_of_groups([group]) if call.per_sample else sample_ids(group.id, 1) for group in groups}


def by_owner(groups: Iterable[Group]) -> dict[int, list[Group]]:
    """Groups by the worker that has them."""
    found: dict[int, list[Group]] = {}
    for group in groups:
        found.setdefault(group.owner, []).append(group)
    return found


def drops_of(groups: Iterable[Group]) -> list[Action]:
    """Have all that hold anything of groups forget them."""
    holders: dict[int, list[int]] = {}
    for group in groups:
        for worker in group.workers:
            holders.setdefault(worker, []).append(group.id)
    return [Send(worker, Drop(tuple(sorted(numbers)))) for worker, numbers in holders.items()]


def shares_of(call: CallPlan, groups: Sequence[Group]) -> tuple[tuple[int, ...], ...]:
    """Shares of a streaming function over groups in no batch."""
    return units_of(ids_of_groups(groups), call.whole_groups)


def sources_of_groups(call: CallPlan, groups: Sequence[Group]) -> tuple[SampleSource, ...]:
    """The places where a streaming call finds what it reads of groups in no batch."""
    places: dict[tuple[int, tuple[str, ...]], list[Group]] = {}
    for owner, keys in call.reads.items():
        for group in groups:
            worker = group.owner if owner == GROUP_OWNER else group.makers[owner]
            places.setdefault((worker, keys), []).append(group)
    return tuple([SampleSource(worker, keys, ids_of_groups(own)) for (worker, keys), own in places.items()])
