"""Dual bounds of every schedule, by Lagrangian multipliers: of time on cliques that never overlap, and of memory.

Let tasks of a clique Q never overlap, and let E be other tasks that overlap none of Q. Of N devices in a period T,
    sum of t_i over Q + sum of (n_j t_j) / N over E <= T,
and of memory V in all, for each task i with `active` bytes a_i on its n_i devices beside all resident bytes r,
    (sum of n_j r_j + n_i a_i) / V <= 1.
Any multipliers of these rows (those of the first kind sum to 1) is a bound on T that is a sum over tasks of the
least reduced cost of its options: the dual bound. The best multipliers come from a subgradient ascent.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from realgraph.planner.solve.kernels.ascent import BoundRows, climb
from realgraph.planner.solve.kernels.compiled import Floats, Ints, Mask
from realgraph.planner.solve.kernels.instance import Instance

MOST_CLIQUES = 96


class Multipliers(Struct, frozen=True, eq=False):
    """Multipliers of the rows, and the dual bound that they prove."""

    cliques: Floats
    memory: Floats  # [tasks]
    bound: float


def cliques_of(exclusive: Ints) -> list[tuple[int, ...]]:
    """Sets of tasks that never overlap, the empty one too: all where they are few, else small and maximal ones."""
    n = len(exclusive)
    cliques: list[tuple[int, ...]] = [()]
    level: list[tuple[int, ...]] = [()]
    while level and len(cliques) < 4 * MOST_CLIQUES:
        level = [
            (*clique, i)
            for clique in level
            for i in range((clique[-1] + 1) if clique else 0, n)
            if all(exclusive[i, j] for j in clique)
        ]
        cliques += level
    if len(cliques) <= MOST_CLIQUES:
        return cliques
    maximal = [c for c in cliques if not any(all(exclusive[i, j] for j in c) for i in range(n) if i not in c)]
    return (maximal + [c for c in cliques if c not in set(maximal)])[:MOST_CLIQUES]


def rows_of(instance: Instance, allowed: Mask, period: float) -> BoundRows | None:
    """The options that a plan within `period` may use; None where some task has none."""
    n, devices = len(instance.role), instance.memory.shape[1]
    memory = max(1.0, float(instance.memory[0].sum()))
    tasks: list[int] = []
    tables: list[int] = []
    options: list[Ints] = []
    sizes: list[Ints] = []
    begin: list[int] = []
    total = 0
    for i in range(n):
        begin.append(total)
        for table in np.unique(instance.tables[i][allowed[i]]):
            meshes = np.flatnonzero(allowed[i] & (instance.tables[i] == table))
            size = int(instance.size[meshes].min())
            rows = np.arange(int(instance.begin[table]), int(instance.begin[table + 1]))
            rows = rows[instance.seconds[rows] <= period]
            tasks += [i] * len(rows)
            tables += [int(table)] * len(rows)
            options.append(rows)
            sizes.append(np.full(len(rows), size))
            total += len(rows)
        if total == begin[-1]:
            return None
    option, size_of, task = np.concatenate(options), np.concatenate(sizes), np.array(tasks, np.int64)
    copies = np.array([_copies(instance, i) for i in range(n)], np.float64)
    active = instance.active[option] - np.where(
        instance.trains[task] | instance.frozen[task], 0, instance.shared[option]
    )
    sets = cliques_of(instance.exclusive)
    inside = np.array([[float(i in clique) for i in range(n)] for clique in sets])
    beside = np.array(
        [[float(i not in c and all(instance.exclusive[i, j] for j in c)) for i in range(n)] for c in sets]
    )
    return BoundRows(
        task=task,
        table=np.array(tables, np.int64),
        seconds=instance.seconds[option],
        area=instance.seconds[option] * size_of / devices,
        resident=size_of * instance.resident[option] / copies[task] / memory,
        active=size_of * active / memory,
        begin=np.array(begin, np.int64),
        inside=inside,
        beside=beside,
    )


def _copies(instance: Instance, task: int) -> int:
    """Number of calls that may share one copy of the task's weights: each counts with its part."""
    return int((instance.role == instance.role[task]).sum()) if instance.frozen[task] else 1


def reduced_costs(rows: BoundRows, cliques: Floats, memory: Floats) -> Floats:
    """The reduced cost of each option, under multipliers."""
    inside, beside = cliques @ rows.inside, cliques @ rows.beside
    costs: Floats = (
        rows.seconds * inside[rows.task]
        + rows.area * beside[rows.task]
        + rows.resident * memory.sum()
        + rows.active * memory[rows.task]
    )
    return costs


def ascend(rows: BoundRows, start: Multipliers, target: float, steps: int) -> Multipliers:
    """Better multipliers, by at most so many steps; the ascent ends where they prove more than the target."""
    cliques, memory = start.cliques.copy(), start.memory.copy()
    bound = climb(rows, cliques, memory, start.bound, target, steps)
    return Multipliers(cliques, memory, bound)


def first_multipliers(rows: BoundRows) -> Multipliers:
    """The best of the rows alone."""
    values = rows.seconds * rows.inside[:, rows.task] + rows.area * rows.beside[:, rows.task]
    bounds = np.minimum.reduceat(values, rows.begin, axis=1).sum(axis=1)
    number = int(np.argmax(bounds))
    return Multipliers(np.eye(len(bounds))[number], np.zeros(len(rows.begin)), float(bounds[number]))


def dual_bound(rows: BoundRows, known: Multipliers) -> Multipliers:
    """The same multipliers with the dual bound that they prove of these rows."""
    value = reduced_costs(rows, known.cliques, known.memory)
    bound = float(np.minimum.reduceat(value, rows.begin).sum() - known.memory.sum())
    return Multipliers(known.cliques, known.memory, bound)


class CostTables(Struct, frozen=True, eq=False):
    """Reduced costs for the compiled search: [sets, tasks, option tables]; `free`: of tasks without a place."""

    table: Floats
    free: Floats  # [sets, tasks]
    spent: Floats  # [sets]: what the multipliers of memory give back


def cost_tables(instance: Instance, rows: BoundRows, sets: Sequence[Multipliers]) -> CostTables:
    """The least reduced cost per task and table under each set of multipliers; infinite where no option is left."""
    table = np.full((len(sets), len(instance.role), len(instance.begin) - 1), np.inf)
    for s, one in enumerate(sets):
        np.minimum.at(table[s], (rows.task, rows.table), reduced_costs(rows, one.cliques, one.memory))
    return CostTables(table, table.min(axis=2), np.array([one.memory.sum() for one in sets]))


def conditioned(rows: BoundRows, task: int, table: int) -> BoundRows:
    """The rows with the task on meshes of one table alone."""
    keep = (rows.task != task) | (rows.table == table)
    return rows._replace(
        task=rows.task[keep],
        table=rows.table[keep],
        seconds=rows.seconds[keep],
        area=rows.area[keep],
        resident=rows.resident[keep],
        active=rows.active[keep],
        begin=np.searchsorted(rows.task[keep], np.arange(len(rows.begin))).astype(np.int64),
    )
