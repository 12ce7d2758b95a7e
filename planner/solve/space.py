"""The space of a walk: meshes that the dual bound leaves to each task, their symmetries, reduced costs."""

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.problem import SearchProblem
from realgraph.planner.solve.bound import (
    Multipliers,
    ascend,
    conditioned,
    cost_tables,
    dual_bound,
    first_multipliers,
    rows_of,
)
from realgraph.planner.solve.kernels.ascent import BoundRows
from realgraph.planner.solve.kernels.compiled import Ints, Mask
from realgraph.planner.solve.kernels.instance import Instance
from realgraph.planner.solve.kernels.meshes import ReducedCosts
from realgraph.planner.solve.kernels.places import Tree, no_tree, tree_of

ROOT_STEPS = 150  # of the ascent of multipliers
MANY_TASKS = 8  # tasks: with more of them, twice as many steps, and all tasks count as long ones
LONGEST_TABLE_STEPS, TABLE_STEPS = 80, 12  # with one of the longest tasks on meshes of one table, and with another one
LONGEST_TASKS = 2
# Natural logarithm of a number of placements that are looked at faster than multipliers are found for each table.
FAST_PLACEMENTS_LOG = 14.0


class Space(Struct, frozen=True, eq=False):
    """The space of one walk: the meshes left to each task, their symmetries, and reduced costs."""

    allowed: Mask
    tree: Tree
    reduced_costs: ReducedCosts


def space_of(
    problem: SearchProblem, instance: Instance, everywhere: Mask, limit: float, look_up: Callable[[], None] | None
) -> tuple[float, Space | None]:
    """A bound on all periods, at most the limit, and where plans within the limit may lie; None: nowhere.

    look_up: called often, to end the search by an exception; None: only the multipliers of the whole are wanted.
    """
    rows = rows_of(instance, everywhere, limit)
    if rows is None:
        return limit, None
    start = first_multipliers(rows)
    few = float(np.log(everywhere.sum(axis=1)).sum()) < FAST_PLACEMENTS_LOG
    best = ascend(
        rows, start, limit, TABLE_STEPS if few else ROOT_STEPS if len(rows.begin) <= MANY_TASKS else 2 * ROOT_STEPS
    )
    if best.bound > limit:
        return limit, None
    bound, sets = best.bound, [start, best]
    if look_up is not None and not few:
        more, table_sets = _by_table(rows, best, limit, look_up)
        bound, sets = max(bound, more), sets + table_sets
    if bound > limit:
        return limit, None
    space = _pruned(problem, instance, rows, sets, everywhere, limit)
    return (limit if space is None else bound), space


def _by_table(
    rows: BoundRows, best: Multipliers, limit: float, look_up: Callable[[], None]
) -> tuple[float, list[Multipliers]]:
    """Multipliers for each task on meshes of each table, and what they prove: some table each task must take."""
    bound, sets, longest = best.bound, [], LONGEST_TASKS if len(rows.begin) <= MANY_TASKS else len(rows.begin)
    by_work = np.argsort([-float(np.min(rows.area[rows.task == i])) for i in range(len(rows.begin))], kind="stable")
    for rank, task in enumerate(by_work.tolist()):
        look_up()
        tables = np.unique(rows.table[rows.task == task])
        if len(tables) > 1:
            table_sets = [
                _conditioned(conditioned(rows, task, int(table)), best, limit, rank < longest) for table in tables
            ]
            bound = max(bound, min(one.bound for one in table_sets))
            sets += table_sets
    return bound, sets


def _conditioned(rows: BoundRows, known: Multipliers, limit: float, long: bool) -> Multipliers:
    """Multipliers for rows of which some are gone; of a long task from the better of two beginnings."""
    start = dual_bound(rows, known)
    if long:
        start = max(first_multipliers(rows), start, key=lambda one: one.bound)
    return ascend(rows, start, limit, LONGEST_TABLE_STEPS if long else TABLE_STEPS)


def _pruned(
    problem: SearchProblem, instance: Instance, rows: BoundRows, sets: list[Multipliers], everywhere: Mask, limit: float
) -> Space | None:
    """The meshes whose tables no set of multipliers forbids; None where a task has none."""
    costs = cost_tables(instance, rows, sets)
    total = costs.free.sum(axis=1) - costs.spent
    excess = (total[:, None, None] - costs.free[:, :, None] + costs.table - limit).max(axis=0)
    allowed = everywhere.copy()
    for task in range(len(problem.tasks)):
        over = np.flatnonzero(excess[task] > 1e-9 * limit)
        allowed[task] &= ~np.isin(instance.tables[task], over)
    allowed = shared(instance, allowed)
    if not allowed.any(axis=1).all():
        return None
    table = np.ascontiguousarray(costs.table.transpose(1, 2, 0))
    reduced_costs = ReducedCosts(table, np.ascontiguousarray(costs.free.T), costs.spent, np.zeros(len(sets)))
    return Space(allowed, tree_of(problem, allowed) or no_tree(), reduced_costs)


def shared(instance: Instance, allowed: Mask) -> Mask:
    """Tied tasks may lie only where all of them may."""
    both = allowed.copy()
    for i, leader in enumerate(instance.leader):
        both[leader] &= allowed[i]
    for i, leader in enumerate(instance.leader):
        both[i] &= both[leader]
    return both


def order_of(instance: Instance, allowed: Mask) -> tuple[Ints, list[int]]:
    """Number of meshes that are left to each task, and the order in which tasks get one.

    Tasks with one mesh come first, then those with most work; tied ones together.
    """
    leader, many = instance.leader, allowed.sum(axis=1)
    work = np.array([least_of(instance, i, allowed[i])[2] for i in range(len(leader))])

    def rank(task: int) -> tuple[bool, float, int, int]:
        first = int(leader[task])
        return bool(many[first] > 1), -float(work[leader == first].max()), first, task

    return many, sorted(range(len(leader)), key=rank)


def least_of(instance: Instance, task: int, allowed: Mask) -> tuple[float, float, float]:
    """Least seconds, latency and device seconds of a task on the meshes left to it."""
    tables, places = np.unique(instance.tables[task][allowed], return_index=True)
    sizes = instance.size[np.flatnonzero(allowed)[places]].tolist()
    options = [slice(int(instance.begin[table]), int(instance.begin[table + 1])) for table in tables]
    seconds = [float(instance.seconds[rows].min(initial=np.inf)) for rows in options]
    latency = min(float(instance.latency[rows].min(initial=np.inf)) for rows in options)
    return min(seconds), latency, min(size * least for size, least in zip(sizes, seconds, strict=True))


def busy_seconds(problem: SearchProblem) -> float:
    """A period below which the devices could not do all tasks wherever these lie: the longest task where it takes the
    least, and what all tasks take of the devices at least, spread evenly."""
    least = [float(np.min(table.seconds, initial=np.inf)) for table in problem.tables]
    sizes = [mesh.n_devices for mesh in problem.meshes]
    longest = [min((least[table] for table in task.tables.values()), default=0.0) for task in problem.tasks]
    taken = [min((least[n] * sizes[i] for i, n in task.tables.items()), default=0.0) for task in problem.tasks]
    return max(*longest, sum(taken) / problem.devices)
