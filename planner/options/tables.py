"""From a PlanRequest to the SearchProblem: option tables per call and mesh size, precedences, moves, limits.

Tables are shared by all meshes of one size in one group of nodes. An option is left out where another is as good in
seconds and bytes; across layouts only where that one is faster by more than any move of weights can cost.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Train
from realgraph.planner.costs.generate.refined import IntervalCuts, StreamWindow
from realgraph.planner.costs.memory.memory import usable_bytes
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import free_seconds, is_trained, stages_weights, streams
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.constraints import named_meshes, server_meshes
from realgraph.planner.options.couplings import free_floor, moves_of, precedences, readers, ties_of, train_calls
from realgraph.planner.options.footprints import copy_of
from realgraph.planner.options.meshes import Family, family
from realgraph.planner.options.moves import Moves, Place, longer_moves, longest_moves
from realgraph.planner.options.pricing import PricedOption, Run, Timed, options_of
from realgraph.planner.options.pruning import TableRows, kept_rows
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import Floats, Ints, OptionTable, SearchProblem, SearchTask
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

HOST_FRACTION = 0.8  # of a node's memory that offloaded states may fill: data, engines and the system have the rest


Key = tuple[str, int, int]  # call, group of nodes, devices
Spot = tuple[str, int, int, int]  # reader, group of nodes, devices, number of a layout


class Known(Struct, frozen=True, eq=False):
    """The common part of all problems of one request, whatever the period, the staleness and the pinned places: priced
    once, filled as they are made."""

    # of calls that do not stream; apart those with room for new weights beside those in use
    options: dict[tuple[Key, bool], list[PricedOption]] = {}
    streams: dict[tuple[Key, int, bool], Timed] = {}  # of those that do, by staleness and `careful`
    cuts: dict[tuple[Key, int], dict[Run, IntervalCuts]] = {}
    moves: dict[tuple[object, ...], Floats] = {}  # see Moves
    # every option on the mesh of a `whole_problem`, of calls that do not generate
    whole: dict[tuple[str, DeviceMesh], tuple[PricedOption, ...]] = {}
    memory_only: bool = False  # see Timed: tables for a question of memory alone


class PreparedProblem(Struct, frozen=True, eq=False):
    """The problem, and what its numbers stand for: the options of each table, and the group of nodes of each mesh."""

    request: PlanRequest
    problem: SearchProblem
    options: tuple[tuple[PricedOption, ...], ...]
    groups: tuple[int, ...]
    known: Known  # by other problems of the request


class StreamRows(Struct, frozen=True):
    """The rows that are asked for of calls that stream.

    least: a bound of every plan's period, on which latencies depend. careful: rows tell what becomes of caches when
    streams are paused; else every row is a bound. window: of streams in plans faster than one that is known.
    """

    least: float = 0.0
    careful: bool = False
    window: StreamWindow | None = None


def problem_of(
    request: PlanRequest, whole: str = "", asked: StreamRows = StreamRows(), known: Known | None = None
) -> PreparedProblem:
    """The whole search problem of a request. Pins and constraints must be sound: see `constraints.constraint_problems`.

    whole: a call of which every option that fits is kept, for explanations. known: of other problems of the same
    request.
    """
    mesh_family = family(request.cluster, request.constraints.reserve, named_meshes(request))
    known = known or Known()
    made = _Tables(request, mesh_family, whole, asked, known)
    by_call = {call: made.on_meshes(call) for call in _readers_first(request)}
    wanted = sorted({mesh for numbers in by_call.values() for mesh in numbers})
    number = {mesh: i for i, mesh in enumerate(wanted)}
    moves = Moves(request, [(mesh_family.meshes[mesh], mesh_family.groups[mesh]) for mesh in wanted], known.moves)
    tasks = []
    for call in request.mesh_calls:
        numbers = {number[mesh]: table for mesh, table in by_call[call].items()}
        trains = isinstance(request.graph.calls[call], Train)
        tasks.append(SearchTask(call, request.graph.role(call), trains, numbers))
        moves.add(call, {mesh: made.tables[table] for mesh, table in numbers.items()})
    free = free_seconds(request)
    memory, host, per_node = limits_of(request)
    problem = SearchProblem(
        devices=request.cluster.n_devices,
        devices_per_node=per_node,
        memory=memory,
        host_memory=host,
        meshes=tuple(mesh_family.meshes[mesh] for mesh in wanted),
        tables=tuple(option_table(options, made.layouts) for options in made.tables),
        tasks=tuple(tasks),
        precedences=precedences(request, free),
        moves=moves_of(request),
        move_seconds=moves.seconds,
        tree=mesh_family.tree,
        floor_seconds=free_floor(request, free),
        ties=tuple(ties_of(request)),
    )
    return PreparedProblem(
        request, problem, tuple(made.tables), tuple(mesh_family.groups[mesh] for mesh in wanted), known
    )


def _readers_first(request: PlanRequest) -> list[str]:
    """Train calls last: which of their options may be left out depends on what reads their weights."""
    return sorted(request.mesh_calls, key=lambda call: isinstance(request.graph.calls[call], Train))


def limits_of(request: PlanRequest) -> tuple[Ints, Ints, int]:
    """Usable bytes of each device and of each node's memory, and devices per node.

    Where groups have nodes of different sizes, a node counts as several of the largest size that divides them all.
    """
    cluster = request.cluster
    per_node = math.gcd(*(group.devices_per_node for group in cluster.groups))
    memory, host = [], []
    for group in cluster.groups:
        memory += [device_bytes(request, group)] * group.n_devices
        parts = group.devices_per_node // per_node
        host += [node_bytes(request, group) // parts] * (group.nodes * parts)
    return np.array(memory, dtype=np.int64), np.array(host, dtype=np.int64), per_node


def device_bytes(request: PlanRequest, group: Cluster) -> int:
    """Bytes that a plan may fill of one device of a group."""
    most, usable = request.constraints.memory_gb, usable_bytes(group)
    return usable if most is None else min(usable, round(1e9 * most))


def node_bytes(request: PlanRequest, group: Cluster) -> int:
    """Bytes of a node's memory that offloaded states may fill, of a node of this group."""
    most, usable = request.constraints.host_memory_gb, round(HOST_FRACTION * group.host_memory_bytes)
    return usable if most is None else min(usable, round(1e9 * most))


# --- tables -----------------------------------------------------------------------------------------------------------


class _Tables:
    """Builds each (call, group, size) once. layouts: numbers of equal layouts, offloaded trained states apart."""

    def __init__(self, request: PlanRequest, mesh_family: Family, whole: str, asked: StreamRows, known: Known) -> None:
        self._request, self._family, self._whole, self._known = request, mesh_family, whole, known
        self._asked = asked
        self._made: dict[Key, int | None] = {}
        self.tables: list[tuple[PricedOption, ...]] = []
        self.layouts: dict[tuple[object, ...], int] = {}
        self._places: dict[str, list[Place]] = {}  # of calls that read trained weights, with the options that are kept
        self._saved: dict[Spot, tuple[int, int]] = {}  # bytes of a reader's copy, and of all it needs while it runs

    def on_meshes(self, call: str) -> dict[int, int]:
        """Number of a mesh -> number of the call's table there."""
        numbers: dict[int, int] = {}
        for i, mesh in enumerate(self._family.meshes):
            if allowed(mesh, call, self._request):
                table = self._table(call, self._family.groups[i], mesh.n_devices)
                if table is not None:
                    numbers[i] = table
        return numbers

    def _table(self, call: str, group: int, size: int) -> int | None:
        key = (call, group, size)
        if key not in self._made:
            options = self._options(call, group, size)
            self._made[key] = len(self.tables) if options else None
            if options:
                self.tables.append(options)
        return self._made[key]

    def _options(self, call: str, group: int, size: int) -> tuple[PricedOption, ...]:
        priced = self._priced(call, group, size)
        for option in priced:
            self.layouts.setdefault(layout_key(option), len(self.layouts))
        if not priced:
            return ()
        kept = kept_rows(self._rows(call, group, priced))
        options = tuple(priced) if call == self._whole else tuple(priced[i] for i in kept)
        self._remember(call, group, size, options)
        if is_trained(self._request, self._request.graph.role(call)):
            mesh = options[0].candidate.layout.mesh
            self._places.setdefault(call, []).append(Place(mesh, group, options))
        return options

    def _priced(self, call: str, group: int, size: int) -> list[PricedOption]:
        """Every row of what fits an empty device."""
        request, cluster, key = self._request, self._request.cluster.groups[group], (call, group, size)
        staleness = request.workload.staleness
        streaming = streams(request, call)
        apart = key, stages_weights(request, call, cluster)
        if not streaming and apart in self._known.options:
            return self._known.options[apart]
        mesh, room = DeviceMesh(request.cluster.first_of(group), size), usable_bytes(cluster)
        timed = Timed(room=room, memory_only=self._known.memory_only)
        if streaming:
            rows = self._asked
            cuts = self._known.cuts.setdefault((key, staleness), {})
            shared = self._known.streams.setdefault(
                (key, staleness, rows.careful), replace(timed, careful=rows.careful, cuts=cuts)
            )
            timed = replace(shared, least=rows.least, window=rows.window)
        priced = [
            option
            for candidate in candidates(
                request, call, mesh, cluster, lambda layout: copy_of(request, call, layout, cluster).total <= room
            )
            for option in options_of(request, call, candidate, cluster, timed)
        ]
        if not streaming:
            self._known.options[apart] = priced
        return priced

    def _rows(self, call: str, group: int, options: Sequence[PricedOption]) -> TableRows:
        """With what a row's layout means for other calls of its role, where there are any."""
        request, role = self._request, self._request.graph.role(call)
        mesh = options[0].candidate.layout.mesh
        table = option_table(options, self.layouts)
        if is_trained(request, role):
            if isinstance(request.graph.calls[call], Train):
                return self._train_rows(call, Place(mesh, group, options), table)
            return TableRows(table, longest_moves(request, call, Place(mesh, group, options)))
        alone = len(readers(request, role)) == 1
        return TableRows(table) if alone else TableRows(table, np.zeros(len(table)), bonus=table.resident)

    def _train_rows(self, call: str, place: Place, table: OptionTable) -> TableRows:
        """The meaning of a train call's layouts for the calls that read the trained weights.

        A copy may save moves: it may be read in place, or its devices may hold slices that others get.
        """
        request, spot = self._request, (place.group, place.mesh.n_devices)
        names = readers(request, request.graph.role(call))
        if len(train_calls(request, request.graph.role(call))) > 1:
            return TableRows(
                table, np.full(len(table), np.inf)
            )  # both calls must be left the same layouts to choose from
        if not names:
            return TableRows(table)
        layouts, row = np.unique(table.layout, return_inverse=True)
        bonus, beside = np.zeros(len(layouts), dtype=np.int64), np.zeros(len(layouts), dtype=np.int64)
        for i, number in enumerate(layouts.tolist()):
            copies = [self._saved.get((name, *spot, number)) for name in names]
            shared = [one for one in copies if one is not None]
            bonus[i] = sum(nbytes for nbytes, _ in shared)
            beside[i] = max((nbytes for _, nbytes in shared), default=0)
        longer = longer_moves(request, {name: self._places.get(name, []) for name in names}, place)
        return TableRows(table, longer.more, longer.less, bonus[row], beside[row])

    def _remember(self, call: str, group: int, size: int, options: Sequence[PricedOption]) -> None:
        """Keeps of a call that reads weights what it needs, and what it would save by sharing the trained copy."""
        for option in options:
            spot = (call, group, size, self.layouts[layout_key(option)])
            resident, active, shared = option.nbytes
            own = (
                (0, active - shared)
                if option.candidate.residency == "in_place"
                else (max(resident, shared), resident + active)
            )
            known = self._saved.get(spot, (0, 0))
            self._saved[spot] = (max(known[0], own[0]), max(known[1], own[1]))


def layout_key(option: PricedOption) -> tuple[object, ...]:
    """Equal for options that may share one copy of a role's weights on one mesh; offloaded copies are never shared."""
    return (*option.candidate.layout.axes, option.candidate.residency == "offloaded", option.beside)


def allowed(mesh: DeviceMesh, call: str, request: PlanRequest) -> bool:
    """True where pins and constraints let a call lie on this mesh."""
    pin, constraints = request.pins.get(call, Pin()), request.constraints
    if pin.devices is not None and mesh != DeviceMesh(pin.first or 0, pin.devices):
        return False
    if pin.first is not None and mesh.first != pin.first:
        return False
    if any(mesh.overlaps(taken) for name, taken in server_meshes(request).items() if name != call):
        return False
    for other in constraints.forbid.get(call, ()):
        placed = other.first == mesh.first and other == Pin(first=other.first, devices=other.devices)
        if placed and other.devices in (None, mesh.n_devices):
            return False
    return not constraints.colocated or mesh == DeviceMesh(0, request.cluster.n_devices - constraints.reserve)


def option_table(options: Sequence[PricedOption], layouts: Mapping[tuple[object, ...], int]) -> OptionTable:
    nbytes = np.array([option.nbytes for option in options], dtype=np.int64).reshape(-1, 3)
    return OptionTable(
        seconds=np.array([option.seconds for option in options], dtype=np.float64),
        latency=np.array([option.latency for option in options], dtype=np.float64),
        resident=nbytes[:, 0].copy(),
        active=nbytes[:, 1].copy(),
        shared=nbytes[:, 2].copy(),
        host=np.array([option.host for option in options], dtype=np.int64),
        layout=np.array([layouts[layout_key(option)] for option in options], dtype=np.int64),
    )
