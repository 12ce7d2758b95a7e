"""Compiled: the first level of the search, which gives every task a mesh. Depth first, resumable.

A placement is cut off where no plan under it has a period below the limit: by prices (`solve_bound`), by memory, and by
the periodic schedule of what has a place already, every task as fast as it may still be.
"""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve_compiled import Floats, Ints, compiled, entry
from realgraph.planner.solve_instance import Instance
from realgraph.planner.solve_memory import Needs, at_home, memory_fits
from realgraph.planner.solve_period import Net, add_arc, add_pair, clear, feasible
from realgraph.planner.solve_places import Mask, Tree, places

DONE, LEAF, MISSING, PAUSED = 0, 1, 2, 3
CUT, KEPT, UNKNOWN = 0, 1, 2
SCHEDULES = 3000  # nodes of one search for integers k; beyond it a placement is kept


class Moves(NamedTuple):
    """The least seconds of a move between two meshes, by an open-addressing hash table. Keys are -1 where free."""

    keys: Ints
    seconds: Floats
    missing: Ints  # [0]: how many keys were asked for in vain; then these


class Walk(NamedTuple):
    """Where the depth-first search stands."""

    order: Ints  # [tasks], in which they get a mesh
    mesh: Ints  # [tasks], -1 for none
    found: Ints  # [tasks, meshes]: places of each depth, the most promising first
    score: Floats  # [meshes]: scratch
    count: Ints  # [tasks]: how many places; -1 where they weren't looked for yet
    at: Ints  # [tasks]: the next one
    depth: Ints  # [1]
    nodes: Ints  # [1]
    fastest: Floats  # [tasks]: seconds of the fastest option anywhere
    soonest: Floats  # [tasks]: latency


class Costs(NamedTuple):
    """`solve_bound.Priced`, for compiled code."""

    table: Floats  # [sets, tasks, tables]
    free: Floats  # [sets, tasks]
    spent: Floats  # [sets]


def new_walk(tasks: int, meshes: int) -> Walk:
    return Walk(
        order=np.arange(tasks),
        mesh=np.full(tasks, -1, np.int64),
        found=np.zeros((tasks, meshes), np.int64),
        score=np.zeros(meshes),
        count=np.full(tasks, -1, np.int64),
        at=np.zeros(tasks, np.int64),
        depth=np.zeros(1, np.int64),
        nodes=np.zeros(1, np.int64),
        fastest=np.zeros(tasks),
        soonest=np.zeros(tasks),
    )


def new_moves(size: int) -> Moves:
    return Moves(np.full(size, -1, np.int64), np.zeros(size), np.zeros(64, np.int64))


@entry
def remember(moves: Moves, key: int, seconds: float) -> None:
    slot = key % len(moves.keys)
    while moves.keys[slot] >= 0 and moves.keys[slot] != key:
        slot = (slot + 1) % len(moves.keys)
    moves.keys[slot] = key
    moves.seconds[slot] = seconds


@compiled
def _least_move(moves: Moves, key: int) -> float:
    """-1 where it isn't known yet: the key is then among `missing`."""
    slot = key % len(moves.keys)
    while moves.keys[slot] >= 0:
        if moves.keys[slot] == key:
            return float(moves.seconds[slot])
        slot = (slot + 1) % len(moves.keys)
    count = moves.missing[0] + 1
    if count < len(moves.missing):
        moves.missing[0] = count
        moves.missing[count] = key
    return -1.0


@entry
def advance(
    instance: Instance,
    tree: Tree,
    allowed: Mask,
    costs: Costs,
    walk: Walk,
    needs: Needs,
    moves: Moves,
    net: Net,
    limit: float,
    budget: int,
) -> int:
    """Goes on until all placements are done, or one is complete, or a move's seconds are missing, or for `budget` nodes.

    A complete placement stands in walk.mesh until the next call, which goes on behind it.
    """
    n = len(walk.order)
    while walk.depth[0] >= 0:
        depth = walk.depth[0]
        if depth == n:
            walk.depth[0] -= 1
            return LEAF
        task = walk.order[depth]
        if walk.count[depth] < 0:
            walk.mesh[task] = -1
            walk.count[depth] = _rank(instance, tree, allowed, costs, walk, task, limit)
            walk.at[depth] = 0
        if walk.at[depth] >= walk.count[depth]:
            walk.count[depth] = -1
            walk.mesh[task] = -1
            walk.depth[0] -= 1
            continue
        if budget <= 0:
            return PAUSED
        budget -= 1
        walk.mesh[task] = walk.found[depth, walk.at[depth]]
        moves.missing[0] = 0
        verdict = judge(instance, costs, walk, needs, moves, net, limit)
        if verdict == UNKNOWN:
            return MISSING
        walk.nodes[0] += 1
        walk.at[depth] += 1
        if verdict == KEPT:
            walk.depth[0] += 1
            if depth + 1 < n:
                walk.count[depth + 1] = -1
        else:
            walk.mesh[task] = -1
    return DONE


@compiled
def _rank(instance: Instance, tree: Tree, allowed: Mask, costs: Costs, walk: Walk, task: int, limit: float) -> int:
    """Fills walk.found with the task's places that prices allow, the most promising first, and says how many."""
    found = walk.found[walk.depth[0]]
    leader = instance.leader[task]
    if leader != task and walk.mesh[leader] >= 0:
        found[0] = walk.mesh[leader]
        count = 1 if allowed[task, found[0]] else 0
    else:
        count = places(instance, tree, allowed, task, walk.mesh, found)
    kept = 0
    for c in range(count):
        walk.mesh[task] = found[c]
        excess = _excess(instance, costs, walk.mesh, limit)
        if excess <= 0:
            mesh, at = found[c], kept
            while at > 0 and walk.score[at - 1] > excess:
                walk.score[at] = walk.score[at - 1]
                found[at] = found[at - 1]
                at -= 1
            walk.score[at] = excess
            found[at] = mesh
            kept += 1
    walk.mesh[task] = -1
    return kept


@compiled
def _excess(instance: Instance, costs: Costs, mesh: Ints, limit: float) -> float:
    """By how much the bound of the most telling prices passes the limit."""
    most = -1e300
    for s in range(len(costs.spent)):
        total = -costs.spent[s]
        for i in range(len(mesh)):
            total += costs.free[s, i] if mesh[i] < 0 else costs.table[s, i, instance.tables[i, mesh[i]]]
        most = max(most, total - limit * (1 + 1e-9))
    return most


@compiled
def least_needs(instance: Instance, needs: Needs, limit: float) -> bool:
    """The least that each task with a place but no option needs there; false where it has no option in the limit."""
    for i in range(len(instance.role)):
        if needs.mesh[i] < 0 or needs.option[i] >= 0:
            continue
        table = instance.tables[i, needs.mesh[i]]
        home = at_home(instance, needs, i)
        resident = active = host = 1 << 62
        for o in range(instance.begin[table], instance.begin[table + 1]):
            if instance.seconds[o] > limit:
                break
            resident = min(resident, instance.resident[o])
            active = min(active, instance.active[o] - (instance.shared[o] if home else 0))
            host = min(host, instance.host[o])
        if resident == 1 << 62:
            return False
        needs.resident[i], needs.active[i], needs.host[i] = resident, active, host
    return True


@compiled
def judge(instance: Instance, costs: Costs, walk: Walk, needs: Needs, moves: Moves, net: Net, limit: float) -> int:
    """Whether a plan with these places may have a period below the limit: CUT, KEPT, or UNKNOWN where a move's is."""
    n = len(walk.order)
    for i in range(n):
        needs.mesh[i] = walk.mesh[i]
        needs.option[i] = -1
    if _excess(instance, costs, walk.mesh, limit) > 0:
        return CUT
    if not least_needs(instance, needs, limit) or not memory_fits(instance, needs):
        return CUT
    clear(net, n)
    for i in range(n):
        net.seconds[i] = walk.fastest[i]
        soonest = walk.soonest[i]
        if walk.mesh[i] >= 0:
            net.seconds[i], soonest = _fastest(instance, needs, i, limit)
            if net.seconds[i] > limit:
                return CUT
        for a in range(len(instance.arc_source)):
            if instance.arc_source[a] == i and instance.arc_move[a] < 0:
                add_arc(net, i, instance.arc_target[a], soonest + instance.arc_delay[a], instance.arc_tokens[a])
            elif instance.arc_source[a] == i:
                _add_move(instance, walk.mesh, moves, net, a, soonest)
    if moves.missing[0] > 0:
        return UNKNOWN
    add_pairs(instance, walk.mesh, net)
    return CUT if feasible(net, limit, SCHEDULES) == 0 else KEPT


@compiled
def _fastest(instance: Instance, needs: Needs, task: int, limit: float) -> tuple[float, float]:
    """Least seconds and least latency of the options that memory leaves to a task on its mesh."""
    table = instance.tables[task, needs.mesh[task]]
    home = at_home(instance, needs, task)
    seconds, latency = 1e300, 1e300
    for o in range(instance.begin[table], instance.begin[table + 1]):
        if instance.seconds[o] > limit:
            break
        if has_room(instance, needs, task, o, home):
            seconds = min(seconds, instance.seconds[o])
            latency = min(latency, instance.latency[o])
    return seconds, latency


@compiled
def has_room(instance: Instance, needs: Needs, task: int, option: int, home: int) -> bool:
    """Whether the option fits beside the least that the others need."""
    active = instance.active[option] - (instance.shared[option] if home else 0)
    resident = instance.resident[option]
    return bool(resident + active <= needs.room[task] and resident <= needs.resident_room[task])


@compiled
def _add_move(instance: Instance, mesh: Ints, moves: Moves, net: Net, arc: int, soonest: float) -> None:
    """The arc of a move: through a node of its own where both ends have a place and it takes time."""
    source, target, move = instance.arc_source[arc], instance.arc_target[arc], instance.arc_move[arc]
    seconds = 0.0
    if mesh[source] >= 0 and mesh[target] >= 0:
        meshes = len(instance.first)
        seconds = _least_move(moves, (move * meshes + mesh[source]) * meshes + mesh[target])
    add_move_arcs(net, source, target, arc, instance.arc_tokens[arc], soonest, seconds)


@compiled
def add_move_arcs(net: Net, source: int, target: int, arc: int, tokens: int, latency: float, seconds: float) -> None:
    """k of a node's place in net.k[i, i]: the number of the arc whose move it is."""
    if seconds <= 0.0:
        add_arc(net, source, target, latency, tokens)
        return
    node = net.size[0]
    net.size[0] = node + 1
    net.seconds[node] = seconds
    net.k[node, node] = arc
    add_arc(net, source, node, latency, tokens)
    add_arc(net, node, target, seconds, 0)


@compiled
def add_pairs(instance: Instance, mesh: Ints, net: Net) -> None:
    """Pairs of nodes that share a device, but for those that no schedule lets overlap."""
    n = len(mesh)
    for j in range(net.size[0]):
        for i in range(j):
            if j < n and instance.exclusive[i, j] == 1:
                net.apart[i, j] = net.apart[j, i] = 1
            elif _meets(instance, mesh, net, i, j):
                add_pair(net, i, j)


@compiled
def _meets(instance: Instance, mesh: Ints, net: Net, one: int, two: int) -> bool:
    """Whether two nodes share a device; a move holds the meshes of both its ends."""
    n = len(mesh)
    one_source = one if one < n else instance.arc_source[net.k[one, one]]
    one_target = one if one < n else instance.arc_target[net.k[one, one]]
    two_source = two if two < n else instance.arc_source[net.k[two, two]]
    two_target = two if two < n else instance.arc_target[net.k[two, two]]
    return (
        _overlap(instance, mesh, one_source, two_source)
        or _overlap(instance, mesh, one_source, two_target)
        or _overlap(instance, mesh, one_target, two_source)
        or _overlap(instance, mesh, one_target, two_target)
    )


@compiled
def _overlap(instance: Instance, mesh: Ints, one: int, two: int) -> bool:
    a, b = mesh[one], mesh[two]
    if a < 0 or b < 0:
        return False
    return bool(
        instance.first[a] < instance.first[b] + instance.size[b]
        and instance.first[b] < instance.first[a] + instance.size[a]
    )
