"""A planning problem's file as arrays, for the checker of answers: see planner_bounds_walk.py. Chooses nothing."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from realgraph.planner.problem_file.spec import CallSpec, ProblemFile, ReallocationSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
DEVICES = 50  # exact in a float64: a set of devices is a whole number of so many bits
COLUMNS = ("option", "devices", "seconds", "latency", "resident", "active", "shared", "host", "layout")


class Rows(NamedTuple):
    """All ways to run all calls: an option on one of its meshes. [calls, most rows], or one number of each call."""

    count: Ints  # [calls]
    option: Ints  # number in the file
    devices: Ints  # of the mesh, as bits
    seconds: Floats
    latency: Floats
    resident: Ints
    active: Ints
    shared: Ints
    host: Ints
    layout: Ints
    role: Ints  # [calls]
    trains: Ints  # [calls]
    frozen: Ints  # [calls]: no call trains its role
    mesh_tie: Ints  # [calls, calls]: 1: on one mesh
    layout_tie: Ints  # [calls, calls]: 1: under an equal layout too


class Links(NamedTuple):
    """Edges and reallocations: what waits for what, and what limits memory."""

    source: Ints  # [edges]
    target: Ints
    distance: Ints
    delay: Floats
    move_source: Ints  # [reallocations]
    move_target: Ints
    move_distance: Ints
    move_seconds: Floats  # [reallocations, rows of the source, rows of the target]
    memory: Ints  # [devices]
    host_memory: Ints  # [nodes]
    per_node: int


class Room(NamedTuple):
    """Scratch of a walk."""

    row: Ints  # [calls]: the combination
    seconds: Floats  # [nodes]: calls, then reallocations
    devices: Ints  # [nodes]
    paths: Floats  # [depth, nodes, nodes]
    load: Floats  # [calls + 1, devices]
    leaves: Ints  # [1]: combinations whose starts were looked for


# --- arrays of a file -------------------------------------------------------------------------------------------------


def arrays(spec: ProblemFile) -> tuple[Rows, Links, Room]:
    """The file as arrays."""
    assert spec.devices <= DEVICES, "sets of devices are bits of one number"
    layouts: dict[object, int] = {}
    listed = [list(_rows(call, layouts)) for call in spec.calls]
    n, most = len(spec.calls), max(map(len, listed))
    table = np.zeros((len(COLUMNS), n, most))
    for call, rows in enumerate(listed):
        table[:, call, : len(rows)] = np.array(rows).T
    number = {call.name: i for i, call in enumerate(spec.calls)}
    roles = [call.role or call.name for call in spec.calls]
    trained = {role for role, call in zip(roles, spec.calls, strict=True) if call.trains}
    mesh_tie, layout_tie = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    for tie in spec.ties:
        for one in tie.calls:
            for two in tie.calls:
                mesh_tie[number[one], number[two]] = 1
                layout_tie[number[one], number[two]] |= int(tie.layout)
    columns = dict(zip(COLUMNS, table, strict=True))
    whole = {name: columns[name].astype(np.int64) for name in COLUMNS if name not in ("seconds", "latency")}
    found = Rows(
        count=np.array([len(rows) for rows in listed]),
        seconds=columns["seconds"],
        latency=columns["latency"],
        **whole,
        role=np.array([roles.index(role) for role in roles]),
        trains=np.array([int(call.trains) for call in spec.calls]),
        frozen=np.array([int(role not in trained) for role in roles]),
        mesh_tie=mesh_tie,
        layout_tie=layout_tie,
    )
    return found, _links(spec, found, number), _room(n, len(spec.reallocations), spec.devices)


def _rows(call: CallSpec, layouts: dict[object, int]) -> Iterator[tuple[float, ...]]:
    """The columns of each option on each of its meshes. layouts: layout -> its number; new ones are added."""
    for i, option in enumerate(call.options):
        named = option.dp is not None or option.tp is not None or option.pp is not None or option.sharding != ""
        ranks = (option.dp or 1, option.tp or 1, option.pp or 1, option.ep, option.cp)
        layout: object = (ranks, option.sharding, option.offloaded) if named else (call.name, i)
        for mesh in option.meshes or (option.mesh,):
            assert mesh is not None, "an option has a mesh"
            yield (
                i,
                ((1 << mesh[1]) - 1) << mesh[0],
                option.seconds,
                max(option.latency, option.seconds),
                *map(round, (option.resident, option.active, option.shared, option.host)),
                layouts.setdefault(layout, len(layouts)),
            )


def _room(calls: int, moves: int, devices: int) -> Room:
    nodes = calls + moves
    return Room(
        row=np.zeros(calls, np.int64),
        seconds=np.zeros(nodes),
        devices=np.zeros(nodes, np.int64),
        paths=np.zeros((nodes * nodes + 1, nodes, nodes)),
        load=np.zeros((calls + 1, devices)),
        leaves=np.zeros(1, np.int64),
    )


def _links(spec: ProblemFile, rows: Rows, number: dict[str, int]) -> Links:
    most = rows.option.shape[1]
    seconds = np.zeros((len(spec.reallocations), most, most))
    for m, entry in enumerate(spec.reallocations):
        seconds[m] = _move_seconds(entry, rows, number[entry.source], number[entry.target])
    per_node = spec.devices_per_node or spec.devices
    nodes = -(-spec.devices // per_node)
    host = spec.host_memory if spec.host_memory is not None else 2.0**60
    return Links(
        source=np.array([number[e.source] for e in spec.edges], np.int64),
        target=np.array([number[e.target] for e in spec.edges], np.int64),
        distance=np.array([e.distance for e in spec.edges], np.int64),
        delay=np.array([e.delay for e in spec.edges], np.float64),
        move_source=np.array([number[e.source] for e in spec.reallocations], np.int64),
        move_target=np.array([number[e.target] for e in spec.reallocations], np.int64),
        move_distance=np.array([e.distance for e in spec.reallocations], np.int64),
        move_seconds=seconds,
        memory=_bytes(spec.memory, spec.devices),
        host_memory=_bytes(host, nodes),
        per_node=per_node,
    )


def _bytes(given: float | Sequence[float], count: int) -> Ints:
    return np.array([round(b) for b in ([given] * count if isinstance(given, float | int) else given)], np.int64)


def _move_seconds(entry: ReallocationSpec, rows: Rows, source: int, target: int) -> Floats:
    """[rows of the source, rows of the target]."""
    found = np.zeros((rows.option.shape[1], rows.option.shape[1]))
    for i in range(rows.count[source]):
        for j in range(rows.count[target]):
            left, right = int(rows.option[source, i]), int(rows.option[target, j])
            one = entry.seconds[left] if isinstance(entry.seconds[0], tuple) else entry.seconds[right]
            found[i, j] = one[right] if isinstance(one, tuple) else one
            if rows.devices[source, i] == rows.devices[target, j]:
                if isinstance(entry.in_place, bool):
                    free = entry.in_place and rows.layout[source, i] == rows.layout[target, j]
                else:
                    free = left in entry.in_place[right]
                if free:
                    found[i, j] = 0.0
    return found
