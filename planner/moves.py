"""Seconds of bringing trained weights to the copies that read them, for every pair of options. Cached by geometry."""

from collections.abc import Sequence

import numpy as np

from realgraph.planner.cluster import Cluster
from realgraph.planner.cost import Setting
from realgraph.planner.cost_move import reallocation_seconds
from realgraph.planner.cost_table import PhaseFactor
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.pricing import Option
from realgraph.planner.problem import Floats, Move
from realgraph.planner.request import PlanRequest


class Place:
    """A mesh with the options of one call there."""

    def __init__(self, mesh: DeviceMesh, group: int, options: Sequence[Option]) -> None:
        self.mesh, self.group, self.options = mesh, group, options


def move_matrix(request: PlanRequest, target: str, source: Place, there: Place) -> Floats:
    """Seconds of [options of the source, options of the target]: 0 where a call reads the trained copy in place."""
    column = np.array([moved_seconds(request, target, option, there) for option in there.options])
    matrix = np.broadcast_to(column, (len(source.options), len(column))).copy()
    if source.mesh == there.mesh:
        for i, trained in enumerate(source.options):
            for j, read in enumerate(there.options):
                if in_place(trained, read):
                    matrix[i, j] = 0.0
    return matrix


def in_place(trained: Option, read: Option) -> bool:
    """Whether a call on the same mesh reads the trained copy itself: equal layouts, and states that stay there."""
    if trained.candidate.residency == "offloaded":
        return False
    return _axes(trained.candidate.layout) == _axes(read.candidate.layout)


def _axes(layout: Layout) -> tuple[object, ...]:
    return (layout.dp, layout.tp, layout.pp, layout.ep, layout.cp, layout.sharding)


def moved_seconds(request: PlanRequest, target: str, option: Option, there: Place) -> float:
    """To one copy, whatever it comes from; corrected by what was measured."""
    cluster: Cluster = request.cluster.groups[there.group]
    factors = request.costs.factors if request.costs.kind in ("", cluster.kind) else None
    setting = Setting(request.model(target), request.role(target), option.candidate.layout, cluster, factors)
    found = request.costs.phases.get("reallocate", PhaseFactor())
    return found.factor * reallocation_seconds(setting) + found.constant_seconds


class Moves:
    """The search's `move_seconds`. Two pairs of meshes of equal sizes and equal relative places have equal matrices."""

    def __init__(self, request: PlanRequest, places: Sequence[tuple[DeviceMesh, int]]) -> None:
        self._request, self._places = request, places
        self._tables: dict[str, dict[int, Sequence[Option]]] = {}
        self._known: dict[tuple[object, ...], Floats] = {}

    def add(self, call: str, options: dict[int, Sequence[Option]]) -> None:
        """The options of a call on each mesh."""
        self._tables[call] = options

    def seconds(self, move: Move, source: int, target: int) -> Floats:
        """[options of the source there, options of the target there]."""
        (home, near), (mesh, group) = self._places[source], self._places[target]
        key = (move.source, move.target, near, group, *_relation(home, mesh))
        if key not in self._known:
            here = Place(home, near, self._tables[move.source][source])
            there = Place(mesh, group, self._tables[move.target][target])
            self._known[key] = move_matrix(self._request, move.target, here, there)
        return self._known[key]


def _relation(source: DeviceMesh, target: DeviceMesh) -> tuple[int, int, int]:
    """Sizes, and where the two lie to each other as far as they meet."""
    offset = target.first - source.first if source.meets(target) else source.n_devices
    return (source.n_devices, target.n_devices, offset)
