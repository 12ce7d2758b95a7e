"""A step's batch: which worker holds what of it, how it is cut into shares, and the messages that say so."""

import heapq
from collections.abc import Iterable, Sequence

from realgraph.runtime.cursor import minibatch_groups
from realgraph.runtime.ledger import Group
from realgraph.runtime.program import HOME, CallPlan
from realgraph.runtime.protocol import Source

Place = int  # a number of one way in which the batch lies over workers
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


class Batch:
    """The groups of a step in order of number. Positions are those of `ids`, the samples in order of number."""

    def __init__(self, step: int, groups: Sequence[Group], samples_per_group: int, seed: int) -> None:
        self.step, self.groups, self.per_group, self.seed = step, tuple(groups), samples_per_group, seed
        self.ids = [group.id * samples_per_group + index for group in groups for index in range(samples_per_group)]
        self.n_tokens = [sample.n_tokens for group in groups for sample in group.samples]
        assert len(self.n_tokens) == len(self.ids)
        homes = [group.home for group in groups for _ in range(samples_per_group)]
        self._workers = [homes]  # place -> worker of every position; calls that lie alike share one
        self._cuts: list[tuple[tuple[tuple[int, ...], ...], bool]] = [((), False)]  # place -> (ranks, whole groups)
        self._place: dict[str, Place] = {HOME: 0}  # of what a call wrote
        self._parts: dict[tuple[int, bool], list[list[int]]] = {}
        self._named: dict[tuple[int, bool], list[tuple[int, ...]]] = {}
        self._held: dict[tuple[int, bool, Place], list[Holders]] = {}

    def _cut(self, groups: Sequence[int], n_ranks: int, whole_groups: bool) -> list[list[int]]:
        """Positions of the samples of `groups` (positions too), balanced by tokens over `n_ranks`."""
        n = self.per_group
        positions = [group * n + index for group in groups for index in range(n)]
        if not whole_groups:
            return [[positions[i] for i in part] for part in balance([self.n_tokens[p] for p in positions], n_ranks)]
        weights = [sum(self.n_tokens[group * n : (group + 1) * n]) for group in groups]
        return [[groups[i] * n + index for i in part for index in range(n)] for part in balance(weights, n_ranks)]

    def whole(self, n_ranks: int, whole_groups: bool = False) -> list[list[int]]:
        """The whole batch cut for `n_ranks`; calls of one step with as many ranks get equal parts."""
        key = (n_ranks, whole_groups)
        if key not in self._parts:
            self._parts[key] = self._cut(range(len(self.groups)), n_ranks, whole_groups)
        return self._parts[key]

    def minibatches(self, call: CallPlan) -> list[list[list[int]]]:
        """Of a train call with several mini-batches: mini-batch -> rank -> positions."""
        cuts = []
        for epoch in range(call.epochs):
            for groups in minibatch_groups(len(self.groups), call.minibatches, self.seed, self.step, epoch):
                cuts.append(self._cut(groups, len(call.ranks), call.whole_groups))
        return cuts

    def named(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The ids of the samples at these positions."""
        ids = self.ids
        return tuple([ids[position] for position in positions])

    def whole_named(self, n_ranks: int, whole_groups: bool) -> list[tuple[int, ...]]:
        """`whole`, as ids of samples."""
        key = (n_ranks, whole_groups)
        if key not in self._named:
            self._named[key] = [self.named(part) for part in self.whole(n_ranks, whole_groups)]
        return self._named[key]

    # --- who holds what -----------------------------------------------------------------------------------------------

    def own(self, call: CallPlan) -> None:
        """What `call` writes lies with the first worker of each rank, for its part of the whole batch."""
        cut = (call.ranks or (call.workers,), call.whole_groups)
        if cut in self._cuts:
            self._place[call.name] = self._cuts.index(cut)
            return
        self._place[call.name] = len(self._cuts)
        self._cuts.append(cut)
        workers = [call.workers[0] if call.workers else 0] * len(self.ids)
        for rank, part in zip(call.ranks, self.whole(len(cut[0]), call.whole_groups), strict=False):
            for position in part:
                workers[position] = rank[0]
        self._workers.append(workers)

    def owners(self, owner: str) -> list[int]:
        """The worker that holds what `owner` (HOME or a call) wrote, of every position."""
        return self._workers[self._place[owner]]

    def _places(self, call: CallPlan) -> dict[Place, tuple[str, ...]]:
        """What `call` reads, by where it lies."""
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
            held = by_worker.get(worker)
            if held is None:
                by_worker[worker] = [ids[position]]
            else:
                held.append(ids[position])
        return [(worker, tuple(held)) for worker, held in by_worker.items()]

    def sources(self, call: CallPlan, positions: Sequence[int]) -> tuple[Source, ...]:
        """Where `call` finds what it reads of the samples at these positions."""
        return tuple(
            [
                Source(worker, keys, ids)
                for place, keys in self._places(call).items()
                for worker, ids in self._holders(place, positions)
            ]
        )

    def sources_of_ranks(self, call: CallPlan) -> list[tuple[Source, ...]]:
        """`sources` of each rank's part of the whole batch; the look-up is shared by the step's calls."""
        n_ranks = len(call.ranks)
        found = []
        for place, keys in self._places(call).items():
            key = (n_ranks, call.whole_groups, place)
            if key not in self._held:
                self._held[key] = [self._holders(place, part) for part in self.whole(n_ranks, call.whole_groups)]
            found.append((keys, self._held[key]))
        return [
            tuple([Source(worker, keys, ids) for keys, held in found for worker, ids in held[rank]])
            for rank in range(n_ranks)
        ]

    def by_home(self) -> dict[int, list[int]]:
        """Home worker -> positions of the samples it holds."""
        homes: dict[int, list[int]] = {}
        for position, worker in enumerate(self._workers[0]):
            homes.setdefault(worker, []).append(position)
        return homes

    def units(self, positions: Sequence[int], per_group: bool) -> tuple[tuple[int, ...], ...]:
        """Shares of a function: one per sample, or one per group (whole groups lie at one home)."""
        if not per_group:
            return tuple([(self.ids[position],) for position in positions])
        n = self.per_group
        return tuple([self.named(positions[start : start + n]) for start in range(0, len(positions), n)])

    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Worker -> the groups of which it may hold any key: all workers of a rank, of what its first one owns."""
        n = self.per_group
        numbers = [group.id for group in self.groups]
        pairs: set[tuple[int, int]] = set()
        for place in set(self._place.values()):
            workers = self._workers[place]
            owned: set[tuple[int, int]] = set()
            for index in range(n):
                owned.update(zip(workers[index::n], numbers, strict=True))
            pairs |= owned
            others = {rank[0]: rank[1:] for rank in self._cuts[place][0] if len(rank) > 1}
            if others:
                pairs.update((other, number) for worker, number in owned for other in others.get(worker, ()))
        held: dict[int, list[int]] = {}
        for worker, number in sorted(pairs):
            held.setdefault(worker, []).append(number)
        return {worker: tuple(groups) for worker, groups in held.items()}
