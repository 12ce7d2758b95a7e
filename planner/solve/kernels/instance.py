"""A search problem as arrays for the compiled functions. Only options that another is at least as good as are lost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from realgraph.planner.plan.problem import OptionTable, SearchProblem
from realgraph.planner.solve.kernels.compiled import Floats, Ints
from realgraph.planner.solve.kernels.dominance import columns_of, nondominated

UNBOUND_STEPS = 1 << 20  # steps between two tasks that no path connects


class Instance(NamedTuple):
    """Options are numbered through all tables; those of table b are begin[b] to begin[b + 1], the fastest first."""

    first: Ints  # [meshes]
    size: Ints
    tables: Ints  # [tasks, meshes]: number of a table, -1 where barred
    begin: Ints  # [tables + 1]
    seconds: Floats  # [options]
    latency: Floats
    resident: Ints
    active: Ints
    shared: Ints
    host: Ints
    layout: Ints
    number: Ints  # of the option in its own table of the problem
    role: Ints  # [tasks]
    trains: Ints  # 1: the task trains its role
    frozen: Ints  # 1: no task trains its role
    arc_source: Ints  # [precedences and moves]
    arc_target: Ints
    arc_distance: Ints
    arc_delay: Floats
    arc_move: Ints  # -1, or the number of the move that may lie between
    exclusive: Ints  # [tasks, tasks]: 1: no schedule lets the two overlap
    leader: Ints  # [tasks]: the first of those that share its mesh by a tie
    tied: Ints  # the first of those that share its layout by a tie
    alike: Ints  # the first of those that differ in nothing but their names
    memory: Ints  # [levels, devices]: least memory of 2^level devices from one on
    host_memory: Ints  # [levels, nodes]
    per_node: int
    hosts: int  # 0: no option needs a node's memory


def instance_of(problem: SearchProblem) -> Instance:
    """Tables sorted by seconds, paths between tasks counted in steps."""
    names = [task.name for task in problem.tasks]
    roles = sorted({task.role for task in problem.tasks})
    trained = {task.role for task in problem.tasks if task.trains}
    tables = np.full((len(names), len(problem.meshes)), -1, np.int64)
    for i, task in enumerate(problem.tasks):
        for mesh, table in task.tables.items():
            tables[i, mesh] = table
    kept = _kept_rows(problem)

    def column(name: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        return [np.asarray(getattr(table, name))[rows] for table, rows in zip(problem.tables, kept, strict=True)]

    arcs = [(p.source, p.target, p.distance, p.delay, -1) for p in problem.precedences]
    arcs += [(move.source, move.target, move.distance, 0.0, m) for m, move in enumerate(problem.moves)]
    source = np.array([names.index(arc[0]) for arc in arcs], np.int64)
    target = np.array([names.index(arc[1]) for arc in arcs], np.int64)
    distance = np.array([arc[2] for arc in arcs], np.int64)
    return Instance(
        first=np.array([mesh.first for mesh in problem.meshes], np.int64),
        size=np.array([mesh.n_devices for mesh in problem.meshes], np.int64),
        tables=tables,
        begin=np.cumsum([0, *(len(rows) for rows in kept)]).astype(np.int64),
        seconds=_joined(column("seconds")).astype(np.float64),
        latency=_joined(column("latency")).astype(np.float64),
        resident=_joined(column("resident")).astype(np.int64),
        active=_joined(column("active")).astype(np.int64),
        shared=_joined(column("shared")).astype(np.int64),
        host=_joined(column("host")).astype(np.int64),
        layout=_joined(column("layout")).astype(np.int64),
        number=_joined(kept).astype(np.int64),
        role=np.array([roles.index(task.role) for task in problem.tasks], np.int64),
        trains=np.array([task.trains for task in problem.tasks], np.int64),
        frozen=np.array([task.role not in trained for task in problem.tasks], np.int64),
        arc_source=source,
        arc_target=target,
        arc_distance=distance,
        arc_delay=np.array([arc[3] for arc in arcs], np.float64),
        arc_move=np.array([arc[4] for arc in arcs], np.int64),
        exclusive=_exclusive(len(names), source, target, distance),
        leader=_leaders(problem, layout=False),
        tied=_leaders(problem, layout=True),
        alike=_alike(problem),
        memory=_range_minima(problem.memory),
        host_memory=_range_minima(problem.host_memory),
        per_node=problem.devices_per_node,
        hosts=int(any(table.host.any() for table in problem.tables)),
    )


def _joined(
    parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return np.concatenate(parts) if parts else np.zeros(0)


def _layout_blind(problem: SearchProblem) -> list[bool]:
    """True for each table in which an option's layout and `shared` bytes matter to none of the tasks that use it.

    They matter where weights are moved, where a tie asks for equal layouts, where a role is trained, and where two
    calls of a frozen role may keep one copy.
    """
    matters = {task.role for task in problem.tasks if task.trains}
    roles = [task.role for task in problem.tasks]
    matters |= {role for role in roles if roles.count(role) > 1}
    moved = {name for move in problem.moves for name in (move.source, move.target)}
    moved |= {name for tie in problem.ties if tie.layout for name in tie.tasks}
    blind = [True] * len(problem.tables)
    for task in problem.tasks:
        if task.role in matters or task.name in moved:
            for table in task.tables.values():
                blind[table] = False
    return blind


def _kept_rows(problem: SearchProblem) -> list[Ints]:
    """The options of each table that may be needed: all where moves of weights tell equal layouts apart."""
    moved = {name for move in problem.moves for name in (move.source, move.target)}
    distinguished = {table for task in problem.tasks if task.name in moved for table in task.tables.values()}
    whole = set() if problem.moves_by_layout else distinguished
    return [
        _fastest_first(table) if i in whole else _kept(table, blind)
        for i, (table, blind) in enumerate(zip(problem.tables, _layout_blind(problem), strict=True))
    ]


def _fastest_first(table: OptionTable) -> Ints:
    return np.lexsort((table.active, table.resident, table.latency, table.seconds)).astype(np.int64)


def _kept(table: OptionTable, blind: bool) -> Ints:
    """The options that no other is at least as good as in everything, the fastest first."""
    order = _fastest_first(table)
    return order[nondominated(columns_of(table, order), int(blind))]


def _exclusive(n: int, source: Ints, target: Ints, distances: Ints) -> Ints:
    """Tasks on a circuit of distance 1: each waits for the other, in this step or the next, in every schedule."""
    steps = np.full((n, n), UNBOUND_STEPS, np.int64)
    for i, j, distance in zip(source, target, distances, strict=True):
        steps[i, j] = min(steps[i, j], distance)
    for via in range(n):
        np.minimum(steps, steps[:, via, None] + steps[None, via, :], out=steps)
    return ((steps + steps.T <= 1) & ~np.eye(n, dtype=bool)).astype(np.int64)


def _leaders(problem: SearchProblem, layout: bool) -> Ints:
    """The first task of each set joined by ties."""
    names = [task.name for task in problem.tasks]
    leader = np.arange(len(names))
    for tie in problem.ties:
        if layout and not tie.layout:
            continue
        joined = np.isin(leader, leader[[names.index(name) for name in tie.tasks]])
        leader[joined] = np.flatnonzero(joined).min()
    return leader.astype(np.int64)


def _alike(problem: SearchProblem) -> Ints:
    """The first task of each set of twins: the only calls of frozen roles, with equal options and neighbours."""
    roles = [task.role for task in problem.tasks]
    bound = {name for tie in problem.ties for name in tie.tasks}
    bound |= {name for move in problem.moves for name in (move.source, move.target)}
    known: dict[bytes, int] = {}
    content = [known.setdefault(_content(table), number) for number, table in enumerate(problem.tables)]
    seen: dict[object, int] = {}
    alike = list(range(len(roles)))
    for i, task in enumerate(problem.tasks):
        if task.trains or task.name in bound or roles.count(task.role) > 1:
            continue
        arcs = [(p.target, p.distance, p.delay, 0) for p in problem.precedences if p.source == task.name]
        arcs += [(p.source, p.distance, p.delay, 1) for p in problem.precedences if p.target == task.name]
        places = tuple(sorted((mesh, content[table]) for mesh, table in task.tables.items()))
        alike[i] = seen.setdefault((places, tuple(sorted(arcs))), i)
    return np.array(alike, np.int64)


def _content(table: OptionTable) -> bytes:
    """The common content of tables of twins."""
    columns = (table.seconds, table.latency, table.resident, table.active, table.host)
    return b"|".join(np.asarray(column).tobytes() for column in columns)


def _range_minima(values: Ints) -> Ints:
    """[levels, n]: the least of 2^level values from each place on, as far as there are any."""
    levels = [np.asarray(values, np.int64)]
    width = 1
    while 2 * width <= len(values):
        last = levels[-1]
        shifted = np.concatenate([last[width:], np.full(width, np.iinfo(np.int64).max)])
        levels.append(np.minimum(last, shifted))
        width *= 2
    return np.array(levels, np.int64)
