"""All calls on one mesh, one shape of layout for all calls of a role: the fastest choices that fit. Exact, by merging.

On one mesh calls run one after another, so the seconds of a step are a sum, and memory is one sum and one maximum. The
choices of a role are combined first, since its calls share copies and moves of weights; then the roles are.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.plan.problem import Choice, Floats, Ints, OptionTable, SearchProblem, SearchTask
from realgraph.planner.solve.heuristics import one_mesh
from realgraph.planner.solve.kernels.dominance import columns_of, nondominated


class LayoutShape(Struct, frozen=True, order=True):
    """The shape of a layout beside its data-parallel ranks and its sharding."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1


class Ways(Struct, frozen=True, eq=False):
    """Ways to run some tasks on the mesh: rows [ways, tasks] of their tables, and per way the sums of seconds (moves
    of weights included), resident and host bytes of a device, and the largest active bytes.
    """

    rows: Ints
    seconds: Floats
    resident: Ints
    host: Ints
    active: Ints

    def __len__(self) -> int:
        return len(self.seconds)

    def at(self, index: Ints) -> "Ways":
        return Ways(*(getattr(self, name)[index] for name in self.__struct_fields__))


def shaped_choices(
    problem: SearchProblem, shapes: Mapping[int, LayoutShape], allowed: Mapping[str, set[LayoutShape]] | None = None
) -> dict[str, Choice] | None:
    """The choices with the least sum of seconds, each role under one shape (of `allowed`); None where none fits."""
    mesh = one_mesh(problem)
    if mesh is None:
        return None
    roles = list(dict.fromkeys(task.role for task in problem.tasks))
    tasks = [[task for task in problem.tasks if task.role == role] for role in roles]
    parts = [_of_role(problem, mesh, mine, (shapes, allowed)) for mine in tasks]
    if not all(map(len, parts)):
        return None
    least = [float(part.seconds.min()) for part in parts]
    most = _relaxed(problem, mesh, parts)
    slower = [part.seconds - low > most - sum(least) for part, low in zip(parts, least, strict=True)]
    parts = [part.at(np.flatnonzero(~late)) for part, late in zip(parts, slower, strict=True)]
    merged = _fitting(problem, mesh, parts[0])
    for part in parts[1:]:
        merged = _fitting(problem, mesh, _product(merged, _fitting(problem, mesh, part)))
    if not len(merged):
        return None
    best = merged.rows[int(np.argmin(merged.seconds))]
    order = [task for mine in tasks for task in mine]
    return {task.name: Choice(mesh, int(row)) for task, row in zip(order, best, strict=True)}


def _relaxed(problem: SearchProblem, mesh: int, parts: Sequence[Ways]) -> float:
    """Seconds of a plan that fits, found by a multiplier on bytes that rises until they fit; else inf."""
    limit = float(problem.memory.min())
    scale = sum(float(part.seconds.min()) for part in parts) / max(1.0, limit)
    best = float("inf")
    for multiplier in (0.0, *(scale * 4.0**power for power in range(-6, 8))):
        chosen = [
            part.at(np.array([np.argmin(part.seconds + multiplier * (part.resident + 0.5 * part.active))]))
            for part in parts
        ]
        whole = chosen[0]
        for part in chosen[1:]:
            whole = _product(whole, part)
        whole = whole.at(np.flatnonzero(_fits(problem, mesh, whole)))
        if len(whole):
            best = min(best, float(whole.seconds[0]))
    return best * (1 + 1e-9)


def _of_role(
    problem: SearchProblem,
    mesh: int,
    tasks: Sequence[SearchTask],
    rule: tuple[Mapping[int, LayoutShape], Mapping[str, set[LayoutShape]] | None],
) -> Ways:
    """All ways of one role under any one shape."""
    shapes, allowed = rule
    tables = [problem.tables[task.tables[mesh]] for task in tasks]
    of_rows = [[shapes[int(number)] for number in table.layout] for table in tables]
    found = []
    for shape in sorted(set.intersection(*map(set, of_rows))):
        if allowed is None or shape in allowed[tasks[0].role]:
            rows = [
                _nondominated(table, np.array([i for i, one in enumerate(mine) if one == shape]))
                for table, mine in zip(tables, of_rows, strict=True)
            ]
            grid = np.stack([axis.ravel() for axis in np.meshgrid(*rows, indexing="ij")], axis=1)
            ways = _summed(problem, mesh, tasks, grid)
            found.append(ways.at(np.flatnonzero(_fits(problem, mesh, ways))))
    if not found:
        return Ways(np.zeros((0, len(tasks)), np.int64), np.zeros(0), *(np.zeros(0, np.int64) for _ in range(3)))
    return Ways(*(np.concatenate([getattr(ways, name) for ways in found]) for name in Ways.__struct_fields__))


def _nondominated(table: OptionTable, rows: Ints) -> Ints:
    """Those of these rows that no other of them under an equal layout beats in everything."""
    columns = (table.active - table.shared, table.host, table.active, table.resident, table.latency, table.seconds)
    order = rows[np.lexsort([column[rows] for column in columns])]
    return order[nondominated(columns_of(table, order), 0)]


def _summed(problem: SearchProblem, mesh: int, tasks: Sequence[SearchTask], rows: Ints) -> Ways:
    """Seconds and bytes of given rows [ways, tasks] of one role."""
    tables = [problem.tables[task.tables[mesh]] for task in tasks]
    layout = np.stack([table.layout[rows[:, i]] for i, table in enumerate(tables)], axis=1)
    resident, active = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    host, seconds = np.zeros(len(rows), np.int64), np.zeros(len(rows))
    trains = [i for i, task in enumerate(tasks) if task.trains]
    for i, (task, table) in enumerate(zip(tasks, tables, strict=True)):
        mine = rows[:, i]
        seconds += table.seconds[mine]
        host += table.host[mine]
        twins = [] if trains else range(i)  # a frozen role's calls under an equal layout keep one copy
        known = np.zeros(len(rows), np.int64)
        for j in twins:
            same = layout[:, j] == layout[:, i]
            known = np.where(same, np.maximum(known, tables[j].resident[rows[:, j]]), known)
        resident += np.maximum(0, table.resident[mine] - known)
        in_place = np.zeros(len(rows), bool)
        for j in trains if not task.trains else ():
            in_place |= layout[:, j] == layout[:, i]
        active = np.maximum(active, table.active[mine] - in_place * table.shared[mine])
    number = {task.name: i for i, task in enumerate(tasks)}
    for move in problem.moves:
        if move.source in number and move.target in number:
            matrix = problem.move_seconds(move, mesh, mesh)
            seconds += matrix[rows[:, number[move.source]], rows[:, number[move.target]]]
    keep = _tied(problem, tasks, layout)
    return Ways(rows, seconds, resident, host, active).at(np.flatnonzero(keep))


def _tied(problem: SearchProblem, tasks: Sequence[SearchTask], layout: Ints) -> Ints:
    """Which ways have equal layouts where a tie asks for it."""
    keep = np.ones(len(layout), bool)
    for tie in problem.ties:
        bound = [i for i, task in enumerate(tasks) if task.name in tie.tasks]
        if tie.layout and bound:
            keep &= (layout[:, bound] == layout[:, bound[:1]]).all(axis=1)
    return keep.astype(np.int64)


def _product(left: Ways, right: Ways) -> Ways:
    i, j = (axis.ravel() for axis in np.meshgrid(np.arange(len(left)), np.arange(len(right)), indexing="ij"))
    return Ways(
        np.concatenate([left.rows[i], right.rows[j]], axis=1),
        left.seconds[i] + right.seconds[j],
        left.resident[i] + right.resident[j],
        left.host[i] + right.host[j],
        np.maximum(left.active[i], right.active[j]),
    )


def _fits(problem: SearchProblem, mesh: int, ways: Ways) -> npt.NDArray[np.bool_]:
    """Which of them fit into memory alone: the rule of `solve/memory.py` for one mesh and many ways at once."""
    place = problem.meshes[mesh]
    limit = int(problem.memory[place.first : place.first + place.n_devices].min())
    fits = ways.resident + ways.active <= limit
    for node, most in enumerate(problem.host_memory):
        first = node * problem.devices_per_node
        here = len(range(max(first, place.first), min(first + problem.devices_per_node, place.devices.stop)))
        fits &= here * ways.host <= most
    return fits


def _fitting(problem: SearchProblem, mesh: int, ways: Ways) -> Ways:
    """Those that fit alone and that no other beats in seconds and all bytes."""
    ways = ways.at(np.flatnonzero(_fits(problem, mesh, ways)))
    alike = np.zeros(len(ways), np.int64)
    table = OptionTable(ways.seconds, ways.seconds, ways.resident, ways.active, alike, ways.host, alike)
    order = np.lexsort((ways.active, ways.resident, ways.seconds))
    return ways.at(order[nondominated(columns_of(table, order), 1)])
