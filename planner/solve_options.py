"""Compiled: the second level of the search, which gives each task on its mesh an option within a period."""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve_compiled import NONE, Floats, Ints, compiled, entry
from realgraph.planner.solve_instance import Instance
from realgraph.planner.solve_memory import Needs, at_home, memory_fits
from realgraph.planner.solve_meshes import add_move_arcs, add_pairs, has_room
from realgraph.planner.solve_period import Net, add_arc, clear, feasible

SCHEDULES = 20_000  # nodes of one search for integers k


class Choosing(NamedTuple):
    """Options that are left to each task on its mesh, and where the depth-first search over them stands."""

    options: Ints  # [tasks, most options]: numbers, the fastest first
    count: Ints  # [tasks]
    order: Ints  # [tasks]
    at: Ints  # [tasks]: the option tried at each depth
    move_begin: Ints  # [precedences and moves]: where an arc's matrix of seconds begins in `moves`
    move_columns: Ints
    nodes: Ints  # [1]


def new_choosing(tasks: int, options: int, arcs: int) -> Choosing:
    return Choosing(
        options=np.zeros((tasks, options), np.int64),
        count=np.zeros(tasks, np.int64),
        order=np.zeros(tasks, np.int64),
        at=np.zeros(tasks, np.int64),
        move_begin=np.zeros(arcs, np.int64),
        move_columns=np.zeros(arcs, np.int64),
        nodes=np.zeros(1, np.int64),
    )


@entry
def choose(
    instance: Instance, needs: Needs, state: Choosing, moves: Floats, net: Net, limit: float, budget: int
) -> int:
    """1: needs.option has options whose period is at most `limit`; 0: none has; -1: undecided within `budget` nodes.

    needs.mesh: a mesh for every task. moves: the matrices of seconds of all moves between these meshes.
    """
    n = len(instance.role)
    for i in range(n):
        needs.option[i] = -1
        table = instance.tables[i, needs.mesh[i]]
        state.count[i] = 0
        for o in range(instance.begin[table], instance.begin[table + 1]):
            if instance.seconds[o] <= limit:
                state.options[i, state.count[i]] = o
                state.count[i] += 1
    for _ in range(2):
        if not _filter_memory(instance, needs, state, limit):
            return 0
    if not _filter_seconds(instance, needs, state, moves, net, limit):
        return 0
    if not _filter_memory(instance, needs, state, limit):
        return 0
    _sort_tasks(instance, needs, state)
    depth, unsure = 0, False
    state.at[0] = -1
    while depth >= 0:
        task = state.order[depth]
        state.at[depth] += 1
        if state.at[depth] >= state.count[task]:
            needs.option[task] = -1
            depth -= 1
            continue
        needs.option[task] = state.options[task, state.at[depth]]
        budget -= 1
        state.nodes[0] += 1
        if budget < 0:
            return -1
        if not _tied(instance, needs, task) or not _fits(instance, needs, state):
            continue
        verdict = _in_time(instance, needs, state, moves, net, limit)
        if verdict == 0:
            continue
        if depth == n - 1:
            if verdict == 1:
                return 1
            unsure = True
            continue
        depth += 1
        state.at[depth] = -1
    return -1 if unsure else 0


@compiled
def _tied(instance: Instance, needs: Needs, task: int) -> bool:
    """Whether the task's layout is that of the tasks tied to it that have one."""
    for other in range(len(instance.role)):
        if instance.tied[other] == instance.tied[task] and needs.option[other] >= 0:
            if instance.layout[needs.option[other]] != instance.layout[needs.option[task]]:
                return False
    return True


@compiled
def _least_left(instance: Instance, needs: Needs, state: Choosing) -> None:
    """What each task needs: of its option, or the least of those left to it."""
    for i in range(len(instance.role)):
        home = at_home(instance, needs, i)
        if needs.option[i] >= 0:
            o = needs.option[i]
            needs.resident[i], needs.host[i] = instance.resident[o], instance.host[o]
            needs.active[i] = instance.active[o] - (instance.shared[o] if home > 0 else 0)
            continue
        resident = active = host = 1 << 62
        for c in range(state.count[i]):
            o = state.options[i, c]
            resident = min(resident, instance.resident[o])
            active = min(active, instance.active[o] - (instance.shared[o] if home > 0 else 0))
            host = min(host, instance.host[o])
        needs.resident[i], needs.active[i], needs.host[i] = resident, active, host


@compiled
def _fits(instance: Instance, needs: Needs, state: Choosing) -> bool:
    _least_left(instance, needs, state)
    return memory_fits(instance, needs)


@compiled
def _filter_memory(instance: Instance, needs: Needs, state: Choosing, limit: float) -> bool:
    """Drops options that don't fit beside the least of the others; false where a task has none left."""
    if not _fits(instance, needs, state):
        return False
    for i in range(len(instance.role)):
        home, kept = at_home(instance, needs, i), 0
        for c in range(state.count[i]):
            o = state.options[i, c]
            if has_room(instance, needs, i, o, home):
                state.options[i, kept] = o
                kept += 1
        state.count[i] = kept
        if kept == 0:
            return False
    return True


@compiled
def _filter_seconds(instance: Instance, needs: Needs, state: Choosing, moves: Floats, net: Net, limit: float) -> bool:
    """Drops options that are too slow even beside the fastest of the others; false where a task has none left."""
    if _in_time(instance, needs, state, moves, net, limit) == 0:
        return False
    for i in range(len(instance.role)):
        low, high = 0, state.count[i] - 1  # the last that is in time, if latencies rise as seconds do
        while low < high:
            middle = (low + high + 1) // 2
            needs.option[i] = state.options[i, middle]
            if _in_time(instance, needs, state, moves, net, limit) == 0:
                high = middle - 1
            else:
                low = middle
        needs.option[i] = state.options[i, low]
        ready, late = NONE, 1e300  # latencies that are in time with the seconds of `low`; that are too late with more
        if low > 0 or _in_time(instance, needs, state, moves, net, limit) != 0:
            ready = instance.latency[needs.option[i]]
        kept = 0
        for c in range(state.count[i]):
            o = state.options[i, c]
            needs.option[i] = o
            if c > low and instance.latency[o] >= late:
                continue
            if c > low or instance.latency[o] > ready:
                if _in_time(instance, needs, state, moves, net, limit) == 0:
                    late = min(late, instance.latency[o]) if c > low else late
                    continue
            state.options[i, kept] = o
            kept += 1
        needs.option[i] = -1
        state.count[i] = kept
        if kept == 0:
            return False
    return True


@compiled
def _sort_tasks(instance: Instance, needs: Needs, state: Choosing) -> None:
    """Those that train first, as moves and shared bytes hang on them; then those with the fewest options."""
    n = len(instance.role)
    for i in range(n):
        at = i
        while at > 0 and _later(instance, state, state.order[at - 1], i):
            state.order[at] = state.order[at - 1]
            at -= 1
        state.order[at] = i


@compiled
def _later(instance: Instance, state: Choosing, one: int, two: int) -> bool:
    if instance.trains[one] != instance.trains[two]:
        return bool(instance.trains[one] < instance.trains[two])
    return bool(state.count[one] > state.count[two])


@compiled
def _in_time(instance: Instance, needs: Needs, state: Choosing, moves: Floats, net: Net, limit: float) -> int:
    """1 or -1: the period may be within the limit, surely or perhaps, with the fastest of what is left to the others."""
    n = len(instance.role)
    clear(net, n)
    for i in range(n):
        seconds = latency = 1e300
        if needs.option[i] >= 0:
            seconds, latency = instance.seconds[needs.option[i]], instance.latency[needs.option[i]]
        else:
            for c in range(state.count[i]):
                seconds = min(seconds, instance.seconds[state.options[i, c]])
                latency = min(latency, instance.latency[state.options[i, c]])
        net.seconds[i] = seconds
        for a in range(len(instance.arc_source)):
            if instance.arc_source[a] != i:
                continue
            if instance.arc_move[a] < 0:
                add_arc(net, i, instance.arc_target[a], latency + instance.arc_delay[a], instance.arc_tokens[a])
            else:
                moved = _move_seconds(instance, needs, state, moves, a)
                add_move_arcs(net, i, instance.arc_target[a], a, instance.arc_tokens[a], latency, moved)
    add_pairs(instance, needs.mesh, net)
    return feasible(net, limit, SCHEDULES)


@compiled
def _move_seconds(instance: Instance, needs: Needs, state: Choosing, moves: Floats, arc: int) -> float:
    """Of the chosen options, or the least of those that are left."""
    source, target = instance.arc_source[arc], instance.arc_target[arc]
    begin, columns = state.move_begin[arc], state.move_columns[arc]
    left, right = needs.option[source], needs.option[target]
    least = 1e300
    for c in range(1 if left >= 0 else state.count[source]):
        row = instance.number[left if left >= 0 else state.options[source, c]] * columns
        for d in range(1 if right >= 0 else state.count[target]):
            column = instance.number[right if right >= 0 else state.options[target, d]]
            least = min(least, moves[begin + row + column])
            if least <= 0.0:
                return 0.0
    return least
