"""All calls on one mesh, one shape of layout for all calls of a role: a tie on shapes, in the same search.

The mesh stands in the search's problem once for each shape, with the options of that shape. So calls that are tied to
one mesh are tied to one shape, and the search places roles on shapes as it places tasks on meshes. Where a role has one
call nothing is tied: all its options stay together.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.plan.problem import (
    Choice,
    Floats,
    Limits,
    Move,
    OptionTable,
    SearchProblem,
    SearchTask,
    Solution,
    Tie,
)
from realgraph.planner.solve.heuristics import one_mesh
from realgraph.planner.solve.solver import solve

SHAPED_GAP = 1e-6  # relative: the best plan of its kind, not one near it


class LayoutShape(Struct, frozen=True, order=True):
    """The shape of a layout beside its data-parallel ranks and its sharding."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1


Rows = dict[tuple[str, int], list[int]]  # (task, number of a shape) -> numbers of its options in the task's table


def shaped_plan(
    problem: SearchProblem,
    shapes: Mapping[int, LayoutShape],
    limits: Limits,
    allowed: Mapping[str, set[LayoutShape]] | None = None,
) -> Solution | None:
    """The best plan on the largest mesh that has all tasks, each role under one shape; None where none was found.

    shapes: of every layout number. allowed: role -> the shapes that it may have; by default all.
    """
    mesh = one_mesh(problem)
    if mesh is None:
        return None
    kinds, ties = sorted(set(shapes.values())), _ties(problem)
    tied = {name for tie in ties for name in tie.tasks}
    rows: Rows = {}
    for task in problem.tasks:
        layouts = problem.tables[task.tables[mesh]].layout.tolist()
        for row, shape in enumerate(shapes[layout] for layout in layouts):
            if allowed is None or shape in allowed[task.role]:
                number = kinds.index(shape) if task.name in tied else 0
                rows.setdefault((task.name, number), []).append(row)
    split = replace(_split(problem, mesh, rows, len(kinds)), ties=ties)
    solution = solve(split, replace(limits, gap=min(SHAPED_GAP, limits.gap)))
    if not isinstance(solution, Solution):
        return None
    choices = {name: Choice(mesh, rows[name, one.mesh][one.option]) for name, one in solution.choices.items()}
    return replace(solution, choices=choices)


def _ties(problem: SearchProblem) -> tuple[Tie, ...]:
    """The calls of each role that has several, and those that need an equal layout, which has an equal shape."""
    calls: dict[str, list[str]] = {}
    for task in problem.tasks:
        calls.setdefault(task.role, []).append(task.name)
    roles = [Tie(tuple(names)) for names in calls.values() if len(names) > 1]
    return (*roles, *(tie for tie in problem.ties if tie.layout))


def _split(problem: SearchProblem, mesh: int, rows: Rows, n_shapes: int) -> SearchProblem:
    """The same problem on this mesh alone, which stands there once for each shape, with the rows of that shape."""
    tables: list[OptionTable] = []
    tasks: list[SearchTask] = []
    for task in problem.tasks:
        whole = problem.tables[task.tables[mesh]]
        mine = [number for number in range(n_shapes) if (task.name, number) in rows]
        tasks.append(replace(task, tables={number: len(tables) + i for i, number in enumerate(mine)}))
        tables += [_cut(whole, rows[task.name, number]) for number in mine]

    def move_seconds(move: Move, source: int, target: int) -> Floats:
        whole = problem.move_seconds(move, mesh, mesh)
        return whole[np.ix_(rows[move.source, source], rows[move.target, target])]

    return replace(
        problem,
        meshes=(problem.meshes[mesh],) * n_shapes,
        tables=tuple(tables),
        tasks=tuple(tasks),
        move_seconds=move_seconds,
        tree=None,
    )


def _cut(table: OptionTable, rows: Sequence[int]) -> OptionTable:
    return OptionTable(**{name: getattr(table, name)[rows] for name in table.__struct_fields__})
