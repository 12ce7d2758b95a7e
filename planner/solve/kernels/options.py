"""Compiled: the second level of the search, which gives each task on its mesh an option within a period."""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import NO_PATH_SECONDS, ONE, ZERO, Floats, Ints, compiled, entry
from realgraph.planner.solve.kernels.exchange import drop_dominated
from realgraph.planner.solve.kernels.instance import Instance
from realgraph.planner.solve.kernels.lists import (
    DECIDING_NODES,
    GLANCE_NODES,
    Lists,
    fill,
    filter_memory,
    fits,
    in_time,
)
from realgraph.planner.solve.kernels.memory import MemoryNeeds
from realgraph.planner.solve.kernels.period import Net

NONE_LEFT, FOUND, UNDECIDED, PAUSED = 0, 1, 2, 3


class Choosing(NamedTuple):
    """The state of the depth-first search over options, and the seconds of the moves between the meshes chosen."""

    order: Ints  # [tasks]
    at: Ints  # [tasks]: the option tried at each depth
    depth: Ints  # [1]
    unsure: Ints  # [1]: 1 where some options could not be decided
    nodes: Ints  # [1]
    move_begin: Ints  # [precedences and moves]: where an arc's matrix of seconds begins
    move_columns: Ints
    least_move: Floats  # of all options that are left; -1 where not known yet


def new_choosing(tasks: int, arcs: int) -> Choosing:
    return Choosing(
        order=np.zeros(tasks, np.int64),
        at=np.zeros(tasks, np.int64),
        depth=np.zeros(1, np.int64),
        unsure=np.zeros(1, np.int64),
        nodes=np.zeros(1, np.int64),
        move_begin=np.zeros(arcs, np.int64),
        move_columns=np.zeros(arcs, np.int64),
        least_move=np.zeros(arcs),
    )


@entry
def choose(
    instance: Instance,
    needs: MemoryNeeds,
    lists: Lists,
    state: Choosing,
    moves: Floats,
    net: Net,
    limit: float,
    budget: int,
) -> int:
    """Goes on from where it stands: FOUND, NONE_LEFT, UNDECIDED for want of a schedule, or PAUSED after `budget`.

    It begins anew where state.depth is -1. FOUND: needs.option has options with a period of at most `limit`. moves: the
    matrices of seconds of all moves between the meshes of needs.mesh.
    """
    last = len(instance.role) - 1
    if state.depth[0] < 0 and not _begin(instance, needs, lists, state, moves, net, limit):
        return NONE_LEFT
    while state.depth[0] >= 0:
        if budget <= 0:
            return PAUSED
        depth = state.depth[0]
        task = int(state.order[depth])
        state.at[depth] += 1
        if state.at[depth] >= lists.left[task]:
            needs.option[task] = -1
            state.depth[0] -= 1
            continue
        needs.option[task] = lists.options[task, state.at[depth]]
        budget -= 1
        state.nodes[0] += 1
        if not _tied(instance, needs, task) or not fits(instance, needs, lists):
            continue
        thorough = ONE if 2 * depth < last else ZERO
        verdict = _moves_in_time(instance, needs, lists, state, moves, net, limit, thorough)
        if verdict == 0:
            continue
        if depth < last:
            state.depth[0] += 1
            state.at[depth + 1] = -1
        elif verdict == 1:
            return FOUND
        else:
            state.unsure[0] = 1
    return UNDECIDED if state.unsure[0] else NONE_LEFT


@compiled
def _begin(
    instance: Instance, needs: MemoryNeeds, lists: Lists, state: Choosing, moves: Floats, net: Net, limit: float
) -> bool:
    """Lists the options that may be within the limit; false where a task has none."""
    state.unsure[0] = 0
    for a in range(len(instance.arc_source)):
        state.least_move[a] = -1.0
    for i in range(len(instance.role)):
        needs.option[i] = -1
    fill(instance, needs, lists, limit)
    for _ in range(2):
        if not filter_memory(instance, needs, lists):
            return False
    if not _filter_seconds(instance, needs, lists, state, moves, net, limit):
        return False
    drop_dominated(instance, needs, lists, moves, state.move_begin, state.move_columns)
    _sort_tasks(instance, lists, state)
    state.depth[0] = 0
    state.at[0] = -1
    if not filter_memory(instance, needs, lists):
        return False
    return _moves_in_time(instance, needs, lists, state, moves, net, limit, ONE) != 0


@compiled
def _tied(instance: Instance, needs: MemoryNeeds, task: int) -> bool:
    """True where the task's layout is that of the tasks tied to it that have one."""
    for other in range(len(instance.role)):
        option = needs.option[other]
        tied = instance.tied[other] == instance.tied[task] and option >= 0
        if tied and instance.layout[option] != instance.layout[needs.option[task]]:
            return False
    return True


@compiled
def _filter_seconds(
    instance: Instance, needs: MemoryNeeds, lists: Lists, state: Choosing, moves: Floats, net: Net, limit: float
) -> bool:
    """Drops options that are too slow even beside the fastest of the others; false where a task has none left.

    Where latencies rise as seconds do, bisection finds the first that is too slow; any other is tried by itself. In
    that, moves take the least that they may between any options: with an option's own, a slower one may be in time
    again. What is left then is tried with its own moves.
    """
    if _moves_in_time(instance, needs, lists, state, moves, net, limit, ZERO) == 0:
        return False
    for i in range(len(instance.role)):
        moving = _is_moved(instance, i)
        low, high = ZERO, lists.left[i] - 1
        while low < high:
            middle = (low + high + 1) // 2
            needs.option[i] = lists.options[i, middle]
            if in_time(instance, needs, lists, net, limit, ZERO, ZERO + GLANCE_NODES) == 0:
                high = middle - 1
            else:
                low = middle
        # latencies that are in time with the seconds of `low`; that are too late with more
        ready, late = NO_PATH_SECONDS, 1e300
        needs.option[i] = lists.options[i, low]
        if low > 0 or in_time(instance, needs, lists, net, limit, ZERO, ZERO + GLANCE_NODES) != 0:
            ready = instance.latency[needs.option[i]]
        kept = ZERO
        for c in range(lists.left[i]):
            o = lists.options[i, c]
            needs.option[i] = o
            if c > low and instance.latency[o] >= late:
                continue
            untried = c > low or instance.latency[o] > ready
            if untried and in_time(instance, needs, lists, net, limit, ZERO, ZERO + GLANCE_NODES) == 0:
                late = min(late, instance.latency[o]) if c > low else late
                continue
            if moving:
                verdict = _moves_in_time(instance, needs, lists, state, moves, net, limit, ZERO)
                _set_least_moves(instance, lists, state)
                if verdict == 0:
                    continue
            lists.options[i, kept] = o
            kept += 1
        needs.option[i] = -1
        lists.left[i] = kept
        if kept == 0:
            return False
    return True


@compiled
def _is_moved(instance: Instance, task: int) -> bool:
    """True where weights are moved from or to the task."""
    for a in range(len(instance.arc_source)):
        if instance.arc_move[a] >= 0 and (instance.arc_source[a] == task or instance.arc_target[a] == task):
            return True
    return False


@compiled
def _set_least_moves(instance: Instance, lists: Lists, state: Choosing) -> None:
    """Each move takes the least that it may between any options."""
    for a in range(len(instance.arc_source)):
        if instance.arc_move[a] >= 0:
            lists.moved[a] = state.least_move[a]


@compiled
def _sort_tasks(instance: Instance, lists: Lists, state: Choosing) -> None:
    """Those that train first, as moves and shared bytes hang on them; then those with the fewest options."""
    for i in range(len(instance.role)):
        at = i
        while at > 0:
            before = state.order[at - 1]
            if instance.trains[before] > instance.trains[i]:
                break
            if instance.trains[before] == instance.trains[i] and lists.left[before] <= lists.left[i]:
                break
            state.order[at] = before
            at -= 1
        state.order[at] = i


@compiled
def _moves_in_time(
    instance: Instance,
    needs: MemoryNeeds,
    lists: Lists,
    state: Choosing,
    moves: Floats,
    net: Net,
    limit: float,
    thorough: int,
) -> int:
    """As `in_time`, with the least seconds of each move between the options that are left."""
    for a in range(len(instance.arc_source)):
        if instance.arc_move[a] < 0:
            continue
        source, target = instance.arc_source[a], instance.arc_target[a]
        left, right = needs.option[source], needs.option[target]
        fewest = 1e300
        if left < 0 and right < 0 and state.least_move[a] >= 0 and not (thorough == 1 and state.depth[0] == 0):
            lists.moved[a] = state.least_move[a]
            continue
        for c in range(1 if left >= 0 else lists.left[source]):
            row = instance.number[left if left >= 0 else lists.options[source, c]] * state.move_columns[a]
            for d in range(1 if right >= 0 else lists.left[target]):
                column = instance.number[right if right >= 0 else lists.options[target, d]]
                fewest = min(fewest, moves[state.move_begin[a] + row + column])
            if fewest <= 0.0:
                break
        lists.moved[a] = fewest
        if left < 0 and right < 0:
            state.least_move[a] = fewest
    schedules = ZERO + DECIDING_NODES
    for i in range(len(instance.role)):
        if needs.option[i] < 0:
            schedules = ZERO + GLANCE_NODES
    return in_time(instance, needs, lists, net, limit, thorough, schedules)
