"""The seconds that one task may take in a plan below a period: what the dual bound leaves to it.

For any multipliers (`bound.py`) with inside weight a of a task, beside weight b and memory weights of sum m, a plan in
which the task takes t seconds on n of N devices has a period of at least
    (a + b n / N) t + (least reduced costs of all other tasks) - m,
as what the task needs of memory is never negative. So no plan is below `period` where this passes it.
"""

import numpy as np

from realgraph.planner.plan.problem import SearchProblem
from realgraph.planner.solve.bound import Multipliers, ascend, conditioned, first_multipliers, reduced_costs, rows_of
from realgraph.planner.solve.kernels.ascent import BoundRows
from realgraph.planner.solve.kernels.instance import instance_of
from realgraph.planner.solve.space import LONGEST_TABLE_STEPS, ROOT_STEPS, shared


def most_seconds(problem: SearchProblem, name: str, period: float) -> dict[int, float]:
    """Devices of a mesh -> the most seconds that the task may take there in a plan of less than `period`; no entry
    where there is no such plan. Of several kinds of device the most."""
    instance = instance_of(problem)
    task = next(i for i, one in enumerate(problem.tasks) if one.name == name)
    rows = rows_of(instance, shared(instance, instance.tables >= 0), period)
    if rows is None:
        return {}
    whole = ascend(rows, first_multipliers(rows), period, ROOT_STEPS)
    if whole.bound > period:
        return {}
    most: dict[int, float] = {}
    for table in np.unique(rows.table[rows.task == task]).tolist():
        size = problem.meshes[next(mesh for mesh, one in problem.tasks[task].tables.items() if one == table)].n_devices
        there = conditioned(rows, task, table)
        own = ascend(
            there, max(first_multipliers(there), whole, key=lambda one: one.bound), period, LONGEST_TABLE_STEPS
        )
        if own.bound <= period:
            share = size / problem.devices
            room = min(_room(rows, task, share, one, period) for one in (whole, own))
            most[size] = max(most.get(size, 0.0), room)
    return most


def _room(rows: BoundRows, task: int, share: float, known: Multipliers, period: float) -> float:
    inside, beside = (float(known.cliques @ one[:, task]) for one in (rows.inside, rows.beside))
    least = np.minimum.reduceat(reduced_costs(rows, known.cliques, known.memory), rows.begin)
    left = period + float(known.memory.sum()) - float(least.sum() - least[task])
    weight = inside + beside * share
    return left / weight if weight > 0 else float("inf") if left >= 0 else 0.0
