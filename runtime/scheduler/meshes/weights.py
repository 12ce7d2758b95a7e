"""The weights of the engines that make the samples of groups, one by one: who has newer ones than the others, who keeps
older ones, which are on their way. Knows no turns and no sessions.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace


class WeightMove(Struct, frozen=True):
    """A reallocation in flight: the version that it brings, to the copy of which call, on which of its workers."""

    version: int
    call: str
    receivers: tuple[int, ...]


class EngineWeightsImage(Struct, frozen=True):
    """The same as plain data."""

    moving: dict[int, WeightMove]
    switched: dict[int, int]
    kept: tuple[int, ...]
    late: dict[int, int]
    ranks: tuple[tuple[int, ...], ...]
    joined: dict[int, int]


class EngineWeights:
    """Reallocations in flight, by task, and what their engines have meanwhile. An engine is named by its head worker.

    call: that makes the samples of groups, '' where none does; ranks: the workers of each of its engines, heads first.
    """

    def __init__(self, call: str, ranks: Sequence[tuple[int, ...]]) -> None:
        self._call, self._ranks, self._all = call, tuple(ranks), tuple(ranks)
        self.moving: dict[int, WeightMove] = {}
        self.switched: dict[int, int] = {}  # engines that generate under newer weights than the others, which follow
        self._kept: tuple[int, ...] = ()  # engines that evaluate, and so keep their weights
        self.late: dict[int, int] = {}  # engines that have older weights than the others: their version
        self.joined: dict[int, int] = {}  # workers of engines in the place of lost ones -> number of the process there

    @property
    def image(self) -> EngineWeightsImage:
        """All that they have."""
        joined = dict(self.joined)
        return EngineWeightsImage(
            dict(self.moving), dict(self.switched), self._kept, dict(self.late), self._ranks, joined
        )

    def restore(self, image: EngineWeightsImage) -> None:
        """Go on from an image."""
        self.moving, self.switched = dict(image.moving), dict(image.switched)
        self._kept, self.late, self._ranks = image.kept, dict(image.late), image.ranks
        self.joined = dict(image.joined)

    @property
    def heads(self) -> tuple[int, ...]:
        """The engines that there are."""
        return tuple([rank[0] for rank in self._ranks])

    def lose(self, engine: int) -> None:
        """An engine is gone."""
        workers = self._workers(engine)
        self._ranks = tuple([rank for rank in self._ranks if rank[0] != engine])
        self._kept = tuple([one for one in self._kept if one != engine])
        self.switched.pop(engine, None)
        self.late.pop(engine, None)
        for task, move in self.moving.items():  # other processes there do not get what these were sent
            self.moving[task] = replace(move, receivers=tuple([one for one in move.receivers if one not in workers]))

    def join(self, engine: int, process: int, version: int, others: int) -> None:
        """New processes stand for an engine that is gone, by their number there, with weights of `version`, where
        `others` have theirs."""
        present = {*self.heads, engine}
        self._ranks = tuple([rank for rank in self._all if rank[0] in present])
        self.joined |= dict.fromkeys(self._workers(engine), process)
        if version < others:
            self.late[engine] = version

    def _workers(self, engine: int) -> tuple[int, ...]:
        return next(rank for rank in self._all if rank[0] == engine)

    def keep(self, engines: Sequence[int]) -> None:
        """From now on just these engines keep the weights that they have, and take no new ones."""
        self._kept = tuple(engines)

    def load(self, engine: int, version: int, others: int) -> None:
        """An engine that keeps its weights reads those of a checkpoint, which are no newer than the others' have."""
        self.late.pop(engine, None)
        if version < others:
            self.late[engine] = version

    @property
    def resting(self) -> frozenset[int]:
        """Engines that get no groups: those that have older weights than the others or evaluate alone."""
        alone = len(self._kept) < len(self._ranks)
        return frozenset((*self.late, *(self._kept if alone else ())))

    def version(self, engine: int, others: int) -> int:
        """The version that an engine has, where `others` have theirs."""
        return self.switched.get(engine, self.late.get(engine, others))

    @property
    def newcomers(self) -> bool:
        """True where engines in the places of lost ones wait for weights: they may be the only ones that are left."""
        return bool(self.late.keys() & self.joined.keys())

    @property
    def settled(self) -> bool:
        """True where all engines have the same weights, and no new ones are on their way."""
        return not self.late and not any(move.call == self._call for move in self.moving.values())

    def brings(self, call: str, version: int) -> bool:
        """True where weights of `version` are on their way to the copy of `call`."""
        return any((move.call, move.version) == (call, version) for move in self.moving.values())

    def receivers(self, call: str, workers: tuple[int, ...], current: int, newest: int) -> tuple[int, ...]:
        """Those of the workers of `call` whose copy is older than `newest`, but for engines that keep theirs. current:
        that of all engines but those that are late."""
        if call != self._call or not (self._kept or self.late or self._ranks != self._all):
            return workers if current < newest else ()
        due = [rank for rank in self._ranks if rank[0] not in self._kept and self.late.get(rank[0], current) < newest]
        return tuple([worker for rank in due for worker in rank])

    def ended(self, task: int, before: int) -> int:
        """A reallocation has ended; the version that its copy has now. before: what it had."""
        move = self.moving.pop(task)
        if move.call == self._call:
            self.switched.clear()
            others = [rank[0] for rank in self._ranks if rank[0] not in move.receivers]
            late = {engine: self.late.get(engine, before) for engine in others}
            self.late = {engine: version for engine, version in late.items() if version < move.version}
        return move.version
