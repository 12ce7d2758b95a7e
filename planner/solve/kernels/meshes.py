"""Compiled: the first level of the search, which gives every task a mesh. Depth first, resumable.

A placement is cut off where no plan under it has a period below the limit: by reduced costs (`bound`), by memory, and
by the periodic schedule of what has a place already, every task as fast as it may still be.
"""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import ONE, ZERO, Floats, Ints, Mask, compiled, entry
from realgraph.planner.solve.kernels.instance import Instance
from realgraph.planner.solve.kernels.lists import GLANCE_NODES, Lists, fill, filter_memory, in_time
from realgraph.planner.solve.kernels.memory import MemoryNeeds
from realgraph.planner.solve.kernels.period import Net
from realgraph.planner.solve.kernels.places import Tree, places

DONE, LEAF, MISSING, PAUSED = 0, 1, 2, 3
CUT, KEPT, UNKNOWN = 0, 1, 2


class MoveSeconds(NamedTuple):
    """The least seconds of a move between two meshes, by an open-addressing hash table. Keys are -1 where free."""

    keys: Ints
    seconds: Floats
    missing: Ints  # [0]: how many keys were asked for in vain; then these


class Walk(NamedTuple):
    """The state of the depth-first search."""

    order: Ints  # [tasks], in which they get a mesh
    mesh: Ints  # [tasks], -1 for none
    ranked: Ints  # [tasks, meshes]: places of each depth, the most promising first
    score: Floats  # [meshes]: scratch
    many: Ints  # [tasks]: how many places; -1 where they weren't looked for yet
    at: Ints  # [tasks]: the next one
    depth: Ints  # [1]
    nodes: Ints  # [1]
    places: Ints  # [tasks]: how many meshes are left to each

    def restart(self) -> None:
        """At its beginning."""
        self.mesh[:] = -1
        self.many[:] = -1
        self.depth[0] = 0


class ReducedCosts(NamedTuple):
    """`bound.CostTables`, for compiled code."""

    table: Floats  # [tasks, tables, sets]
    free: Floats  # [tasks, sets]: of a task without a place
    spent: Floats  # [sets]
    rest: Floats  # [sets]: scratch, the costs of all tasks but one


def new_walk(tasks: int, meshes: int) -> Walk:
    return Walk(
        order=np.arange(tasks),
        mesh=np.full(tasks, -1, np.int64),
        ranked=np.zeros((tasks, meshes), np.int64),
        score=np.zeros(meshes),
        many=np.full(tasks, -1, np.int64),
        at=np.zeros(tasks, np.int64),
        depth=np.zeros(1, np.int64),
        nodes=np.zeros(1, np.int64),
        places=np.zeros(tasks, np.int64),
    )


def new_moves(size: int) -> MoveSeconds:
    return MoveSeconds(np.full(size, -1, np.int64), np.zeros(size), np.zeros(64, np.int64))


@entry
def remember(moves: MoveSeconds, key: int, seconds: float) -> None:
    slot = key % len(moves.keys)
    while moves.keys[slot] >= 0 and moves.keys[slot] != key:
        slot = (slot + 1) % len(moves.keys)
    moves.keys[slot] = key
    moves.seconds[slot] = seconds


@compiled
def _least_move(moves: MoveSeconds, key: int) -> float:
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
    reduced_costs: ReducedCosts,
    walk: Walk,
    needs: MemoryNeeds,
    lists: Lists,
    moves: MoveSeconds,
    net: Net,
    limit: float,
    budget: int,
) -> int:
    """Goes on until all placements are done, one is complete, a move's seconds are missing, or for `budget` nodes.

    A complete placement stands in walk.mesh until the next call, which goes on behind it.
    """
    n = len(walk.order)
    while walk.depth[0] >= 0:
        depth = walk.depth[0]
        if depth == n:
            walk.depth[0] -= 1
            return LEAF
        task = int(walk.order[depth])
        if walk.many[depth] < 0:
            walk.mesh[task] = -1
            walk.many[depth] = _rank(instance, tree, allowed, reduced_costs, walk, task, limit)
            walk.at[depth] = 0
        if walk.at[depth] >= walk.many[depth]:
            walk.many[depth] = -1
            walk.mesh[task] = -1
            walk.depth[0] -= 1
            continue
        if budget <= 0:
            return PAUSED
        budget -= 1
        walk.mesh[task] = walk.ranked[depth, walk.at[depth]]
        moves.missing[0] = 0
        verdict = judge(instance, walk, needs, lists, moves, net, limit)
        if verdict == UNKNOWN:
            return MISSING
        walk.nodes[0] += 1
        walk.at[depth] += 1
        if verdict == KEPT:
            walk.depth[0] += 1
            if depth + 1 < n:
                walk.many[depth + 1] = -1
        else:
            walk.mesh[task] = -1
    return DONE


@compiled
def _rank(
    instance: Instance, tree: Tree, allowed: Mask, reduced_costs: ReducedCosts, walk: Walk, task: int, limit: float
) -> int:
    """Fills walk.ranked with the task's places that reduced costs allow, the most promising first; says how many."""
    ranked = walk.ranked[walk.depth[0]]
    leader = instance.leader[task]
    if leader != task and walk.mesh[leader] >= 0:
        ranked[0] = walk.mesh[leader]
        count = 1 if allowed[task, ranked[0]] else 0
    else:
        count = places(instance, tree, allowed, task, walk.mesh, walk.places[task] == 1, ranked)
    kept = 0
    _sum_others(instance, reduced_costs, walk.mesh, task)
    for c in range(count):
        if not _in_rank(instance, walk.mesh, task, int(ranked[c])):
            continue
        excess = _excess(reduced_costs, task, int(instance.tables[task, ranked[c]]), limit)
        if excess <= 0:
            mesh, at = ranked[c], kept
            while at > 0 and walk.score[at - 1] > excess:
                walk.score[at] = walk.score[at - 1]
                ranked[at] = ranked[at - 1]
                at -= 1
            walk.score[at] = excess
            ranked[at] = mesh
            kept += 1
    return kept


@compiled
def _in_rank(instance: Instance, mesh: Ints, task: int, place: int) -> bool:
    """Twins may change names: of those that have a place, the first in number has the largest."""
    size = instance.size[place]
    for other in range(len(mesh)):
        if instance.alike[other] == instance.alike[task] and mesh[other] >= 0:
            taken = instance.size[mesh[other]]
            if (other < task and taken < size) or (other > task and taken > size):
                return False
    return True


@compiled
def _sum_others(instance: Instance, reduced_costs: ReducedCosts, mesh: Ints, task: int) -> None:
    """Sums for each set of multipliers what all tasks but this one cost."""
    for s in range(len(reduced_costs.spent)):
        reduced_costs.rest[s] = -reduced_costs.spent[s]
    for i in range(len(mesh)):
        if i == task:
            continue
        for s in range(len(reduced_costs.spent)):
            reduced_costs.rest[s] += (
                reduced_costs.free[i, s] if mesh[i] < 0 else reduced_costs.table[i, instance.tables[i, mesh[i]], s]
            )


@compiled
def _excess(reduced_costs: ReducedCosts, task: int, table: int, limit: float) -> float:
    """By how much the bound of the strongest multipliers passes the limit."""
    most = -1e300
    for s in range(len(reduced_costs.spent)):
        most = max(most, reduced_costs.rest[s] + reduced_costs.table[task, table, s])
    return most - limit * (1 + 1e-9)


@compiled
def judge(
    instance: Instance, walk: Walk, needs: MemoryNeeds, lists: Lists, moves: MoveSeconds, net: Net, limit: float
) -> int:
    """Judges if a plan with these places may have a period below the limit: CUT, KEPT, or UNKNOWN where a move's is."""
    for i in range(len(walk.order)):
        needs.mesh[i] = walk.mesh[i]
        needs.option[i] = -1
    fill(instance, needs, lists, limit)
    if not filter_memory(instance, needs, lists):
        return CUT
    meshes = len(instance.first)
    for a in range(len(instance.arc_source)):
        lists.moved[a] = 0.0
        source, target = walk.mesh[instance.arc_source[a]], walk.mesh[instance.arc_target[a]]
        if instance.arc_move[a] >= 0 and source >= 0 and target >= 0:
            lists.moved[a] = _least_move(moves, (instance.arc_move[a] * meshes + source) * meshes + target)
    if moves.missing[0] > 0:
        return UNKNOWN
    return CUT if in_time(instance, needs, lists, net, limit, ONE, ZERO + GLANCE_NODES) == 0 else KEPT
