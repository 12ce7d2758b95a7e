"""Any search problem as a problem file, so that other planners can be measured on the same numbers. Chooses nothing."""

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.plan.problem import Floats, Move, SearchProblem, SearchTask
from realgraph.planner.problem_file.spec import CallSpec, EdgeSpec, OptionSpec, ProblemFile, ReallocationSpec, TieSpec


class ExportedRows(Struct, frozen=True):
    """Options `start` to `stop` of a call's list: one table of it on some meshes."""

    table: int
    meshes: tuple[int, ...]
    start: int
    stop: int


def problem_spec(problem: SearchProblem, name: str = "", by_table: bool = False) -> ProblemFile:
    """The file of a problem: one option for all meshes of a table, unless moves tell its meshes apart.

    by_table: the caller vouches that moves depend on two tables and on whether the meshes are one, as those of a
    cluster of one kind do; else every pair of meshes is looked at, which takes long on large clusters.
    """
    listed = {task.name: _by_table(problem, task) for task in problem.tasks}
    moves = _moves(problem, listed, (True, by_table))
    if moves is None:
        listed = {task.name: _by_mesh(problem, task) for task in problem.tasks}
        moves = _moves(problem, listed, (False, False))
        assert moves is not None, "with each mesh by itself every matrix of moves can be written down"
    host = problem.host_memory
    return ProblemFile(
        devices=problem.devices,
        memory=_one_or_all(problem.memory.tolist()),
        calls=tuple(_call(problem, task, listed[task.name]) for task in problem.tasks),
        edges=tuple(EdgeSpec(p.source, p.target, p.distance, p.delay) for p in problem.precedences),
        reallocations=moves,
        ties=tuple(TieSpec(tie.tasks, tie.layout) for tie in problem.ties),
        devices_per_node=problem.devices_per_node,
        host_memory=_one_or_all(host.tolist()),
        floor_seconds=problem.floor_seconds,
        name=name,
    )


def _one_or_all(numbers: Sequence[int]) -> float | tuple[float, ...]:
    return float(numbers[0]) if len(set(numbers)) == 1 else tuple(map(float, numbers))


def _by_table(problem: SearchProblem, task: SearchTask) -> list[ExportedRows]:
    meshes: dict[int, list[int]] = {}
    for mesh, table in sorted(task.tables.items()):
        meshes.setdefault(table, []).append(mesh)
    return _numbered(problem, [(table, tuple(found)) for table, found in meshes.items()])


def _by_mesh(problem: SearchProblem, task: SearchTask) -> list[ExportedRows]:
    return _numbered(problem, [(table, (mesh,)) for mesh, table in sorted(task.tables.items())])


def _numbered(problem: SearchProblem, parts: Sequence[tuple[int, tuple[int, ...]]]) -> list[ExportedRows]:
    found, start = [], 0
    for table, meshes in parts:
        stop = start + len(problem.tables[table])
        found.append(ExportedRows(table, meshes, start, stop))
        start = stop
    return found


def _call(problem: SearchProblem, task: SearchTask, listed: Sequence[ExportedRows]) -> CallSpec:
    options = []
    for part in listed:
        table = problem.tables[part.table]
        places = tuple((problem.meshes[mesh].first, problem.meshes[mesh].n_devices) for mesh in part.meshes)
        for i in range(len(table)):
            seconds, latency = float(table.seconds[i]), float(table.latency[i])
            options.append(
                OptionSpec(
                    seconds=seconds,
                    resident=float(table.resident[i]),
                    active=float(table.active[i]),
                    mesh=places[0] if len(places) == 1 else None,
                    meshes=places if len(places) > 1 else (),
                    sharding=f"layout {table.layout[i]}",
                    latency=latency if latency > seconds else 0.0,
                    shared=float(table.shared[i]),
                    host=float(table.host[i]),
                )
            )
    return CallSpec(task.name, tuple(options), task.role, task.trains)


def _moves(
    problem: SearchProblem, listed: dict[str, list[ExportedRows]], how: tuple[bool, bool]
) -> tuple[ReallocationSpec, ...] | None:
    """None where the seconds of two options depend on more than the options and whether the copy is read in place."""
    found = []
    for move in problem.moves:
        ends = (listed[move.source], listed[move.target])
        free = _free(problem, move, ends, how[1]) if how[0] else None
        matrix = _matrix(problem, move, ends, (free, how[1]))
        if matrix is None:
            return None
        columns = matrix[0].tolist()
        rows = columns if (matrix == matrix[0]).all() else [tuple(row) for row in matrix.tolist()]
        in_place: bool | tuple[tuple[int, ...], ...] = False
        if free is not None and free.any():
            in_place = tuple(tuple(np.flatnonzero(column).tolist()) for column in free.T)
        found.append(ReallocationSpec(move.source, move.target, tuple(rows), move.distance, in_place))
    return tuple(found)


def _free(
    problem: SearchProblem, move: Move, ends: tuple[Sequence[ExportedRows], Sequence[ExportedRows]], by_table: bool
) -> npt.NDArray[np.bool_]:
    """[options of the source, options of the target]: whether the two take no time on a mesh that both lie on."""
    sources, targets = ends
    free = np.zeros((sources[-1].stop, targets[-1].stop), np.bool_)
    for left, right in product(sources, targets):
        for source, target in _pairs(left.meshes, right.meshes, by_table):
            if source == target:
                free[left.start : left.stop, right.start : right.stop] |= (
                    problem.move_seconds(move, source, target) == 0
                )
    return free


def _matrix(
    problem: SearchProblem,
    move: Move,
    ends: tuple[Sequence[ExportedRows], Sequence[ExportedRows]],
    how: tuple[npt.NDArray[np.bool_] | None, bool],
) -> Floats | None:
    """Seconds of [options of the source, options of the target]; None where one entry would need two numbers.

    how: what takes no time in place and needs no number, if that is told apart; and whether one pair of meshes, and one
    mesh that is both, speak for all of two tables.
    """
    (sources, targets), (free, by_table) = ends, how
    matrix = np.full((sources[-1].stop, targets[-1].stop), np.nan)
    for left, right in product(sources, targets):
        block = matrix[left.start : left.stop, right.start : right.stop]
        for source, target in _pairs(left.meshes, right.meshes, by_table):
            seconds = problem.move_seconds(move, source, target)
            if free is not None and source == target:
                here = free[left.start : left.stop, right.start : right.stop]
                if (seconds[here] != 0).any():
                    return None
                seconds = np.where(here, np.nan, seconds)
            if (~np.isnan(seconds) & ~np.isnan(block) & (seconds != block)).any():
                return None
            block[:] = np.where(np.isnan(seconds), block, seconds)
    for column in matrix.T:  # what is only ever read in place may have any number: that of its column
        known = column[~np.isnan(column)]
        column[np.isnan(column)] = known[0] if len(known) else 0.0
    return matrix


def _pairs(left: Sequence[int], right: Sequence[int], by_table: bool) -> Iterator[tuple[int, int]]:
    """All pairs of meshes, or one of two meshes and one of a mesh with itself."""
    if not by_table:
        yield from product(left, right)
        return
    both = sorted(set(left) & set(right))
    if both:
        yield both[0], both[0]
    apart = next(((one, two) for one, two in product(left[:2], right[:2]) if one != two), None)
    if apart is not None:
        yield apart


def problem_text(spec: ProblemFile) -> str:
    """The JSON of a problem file on one line; what is left at its default is left out."""
    return msgspec.json.encode(spec).decode() + "\n"
