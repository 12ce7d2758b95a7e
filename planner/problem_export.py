"""Any search problem as a problem file, so that other planners can be measured on the same numbers. Chooses nothing."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from realgraph.planner.problem import Floats, Move, SearchProblem, SearchTask
from realgraph.planner.problem_spec import CallSpec, EdgeSpec, OptionSpec, ProblemFile, ReallocationSpec, TieSpec


class Rows(Struct, frozen=True):
    """Options `start` to `stop` of a call's list: one table of it on some meshes."""

    table: int
    meshes: tuple[int, ...]
    start: int
    stop: int


def problem_spec(problem: SearchProblem, name: str = "") -> ProblemFile:
    """The file of a problem: one option for all meshes of a table, unless moves tell its meshes apart."""
    listed = {task.name: _by_table(problem, task) for task in problem.tasks}
    moves = _moves(problem, listed, in_place=True)
    if moves is None:
        listed = {task.name: _by_mesh(problem, task) for task in problem.tasks}
        moves = _moves(problem, listed, in_place=False)
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


def _by_table(problem: SearchProblem, task: SearchTask) -> list[Rows]:
    meshes: dict[int, list[int]] = {}
    for mesh, table in sorted(task.tables.items()):
        meshes.setdefault(table, []).append(mesh)
    return _numbered(problem, [(table, tuple(found)) for table, found in meshes.items()])


def _by_mesh(problem: SearchProblem, task: SearchTask) -> list[Rows]:
    return _numbered(problem, [(table, (mesh,)) for mesh, table in sorted(task.tables.items())])


def _numbered(problem: SearchProblem, parts: Sequence[tuple[int, tuple[int, ...]]]) -> list[Rows]:
    found, start = [], 0
    for table, meshes in parts:
        stop = start + len(problem.tables[table])
        found.append(Rows(table, meshes, start, stop))
        start = stop
    return found


def _call(problem: SearchProblem, task: SearchTask, listed: Sequence[Rows]) -> CallSpec:
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
    problem: SearchProblem, listed: dict[str, list[Rows]], in_place: bool
) -> tuple[ReallocationSpec, ...] | None:
    """None where the seconds of two options depend on more than the options and whether the copy is read in place."""
    found = []
    for move in problem.moves:
        matrix = _matrix(problem, move, (listed[move.source], listed[move.target]), in_place)
        if matrix is None:
            return None
        columns = matrix[0].tolist()
        rows = columns if (matrix == matrix[0]).all() else [tuple(row) for row in matrix.tolist()]
        found.append(ReallocationSpec(move.source, move.target, tuple(rows), move.distance, in_place))
    return tuple(found)


def _matrix(
    problem: SearchProblem, move: Move, ends: tuple[Sequence[Rows], Sequence[Rows]], in_place: bool
) -> Floats | None:
    """Seconds of [options of the source, options of the target]; None where one entry would need two numbers.

    in_place: what lies on one mesh under an equal layout is 0 by rule and needs no number.
    """
    sources, targets = ends
    matrix = np.full((sources[-1].stop, targets[-1].stop), np.nan)
    for left in sources:
        for right in targets:
            block = matrix[left.start : left.stop, right.start : right.stop]
            here, there = (problem.tables[part.table].layout for part in (left, right))
            equal = here[:, None] == there[None, :]
            for source in left.meshes:
                for target in right.meshes:
                    seconds = problem.move_seconds(move, source, target)
                    if in_place and source == target:
                        if (seconds[equal] != 0).any():
                            return None
                        seconds = np.where(equal, np.nan, seconds)
                    if (~np.isnan(seconds) & ~np.isnan(block) & (seconds != block)).any():
                        return None
                    block[:] = np.where(np.isnan(seconds), block, seconds)
    matrix[np.isnan(matrix)] = 0.0
    return matrix
