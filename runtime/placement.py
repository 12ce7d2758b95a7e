"""A step's batch: which worker holds what of it, how it is cut into shares, and the messages that say so."""

import heapq
from collections.abc import Iterable, Sequence

from realgraph.runtime.cursor import minibatch_groups
from realgraph.runtime.ledger import Group
from realgraph.runtime.program import HOME, CallPlan
from realgraph.runtime.protocol import Source


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
        self.owners = {HOME: [group.home for group in groups for _ in range(samples_per_group)]}
        self._parts: dict[tuple[int, bool], list[list[int]]] = {}
        self._held: dict[tuple[int, bool, str], list[list[tuple[int, tuple[int, ...]]]]] = {}

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

    def _holders(self, owner: str, positions: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """(worker, ids) of what `owner` (HOME or a call) left where, for the samples at these positions."""
        owners, ids = self.owners[owner], self.ids
        by_worker: dict[int, list[int]] = {}
        for position in positions:
            worker = owners[position]
            held = by_worker.get(worker)
            if held is None:
                by_worker[worker] = [ids[position]]
            else:
                held.append(ids[position])
        return [(worker, tuple(held)) for worker, held in by_worker.items()]

    def sources(self, call: CallPlan, positions: Sequence[int]) -> tuple[Source, ...]:
        """Where `call` finds what it reads of the samples at these positions."""
        return tuple(
            Source(worker, keys, ids)
            for owner, keys in call.reads.items()
            for worker, ids in self._holders(owner, positions)
        )

    def sources_of_ranks(self, call: CallPlan) -> list[tuple[Source, ...]]:
        """`sources` of each rank's part of the whole batch; the look-up is shared by the step's calls."""
        n_ranks = len(call.ranks)
        found = []
        for owner in call.reads:
            key = (n_ranks, call.whole_groups, owner)
            if key not in self._held:
                parts = self.whole(n_ranks, call.whole_groups)
                self._held[key] = [self._holders(owner, part) for part in parts]
            found.append((call.reads[owner], self._held[key]))
        return [
            tuple([Source(worker, keys, ids) for keys, held in found for worker, ids in held[rank]])
            for rank in range(n_ranks)
        ]

    def own(self, call: str, parts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """What `call` writes lies with these (worker, positions)."""
        owners = [0] * len(self.ids)
        for worker, positions in parts:
            for position in positions:
                owners[position] = worker
        self.owners[call] = owners

    def by_home(self) -> dict[int, list[int]]:
        """Home worker -> positions of the samples it holds."""
        homes: dict[int, list[int]] = {}
        for position, worker in enumerate(self.owners[HOME]):
            homes.setdefault(worker, []).append(position)
        return homes

    def units(self, positions: Sequence[int], per_group: bool) -> tuple[tuple[int, ...], ...]:
        """Shares of a function: one per sample, or one per group (whole groups lie at one home)."""
        if not per_group:
            return tuple([(self.ids[position],) for position in positions])
        n = self.per_group
        return tuple([self.named(positions[start : start + n]) for start in range(0, len(positions), n)])

    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Worker -> the groups of which it holds any key."""
        numbers = [group.id for group in self.groups for _ in range(self.per_group)]
        pairs: set[tuple[int, int]] = set()
        for owners in self.owners.values():
            pairs.update(zip(owners, numbers, strict=True))
        held: dict[int, list[int]] = {}
        for worker, number in sorted(pairs):
            held.setdefault(worker, []).append(number)
        return {worker: tuple(groups) for worker, groups in held.items()}
