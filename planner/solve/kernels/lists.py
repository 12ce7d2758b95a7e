"""Compiled: the options that are left to each task on its mesh, and what memory, time and both together say of them."""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import NO_PATH_SECONDS, ZERO, Floats, Ints, compiled
from realgraph.planner.solve.kernels.instance import Instance
from realgraph.planner.solve.kernels.memory import MemoryNeeds, in_place, least, memory_fits
from realgraph.planner.solve.kernels.period import Net, add_arc, add_pair, clear, feasible

DECIDING_NODES = 5_000  # nodes of one search for integers k where it decides
GLANCE_NODES = 200  # and where it only saves work: proofs that take longer cost more than they cut off
ASCENT_STEPS = 12  # steps towards the best multipliers of a device's memory


class Lists(NamedTuple):
    """The options that are left to tasks with a mesh; of the other tasks what is known of all options."""

    options: Ints  # [tasks, most options]: numbers, the fastest first
    left: Ints  # [tasks]: how many
    fastest: Floats  # [tasks]: least seconds of a task without a mesh
    soonest: Floats  # [tasks]: and its least latency
    moved: Floats  # [precedences and moves]: least seconds of a move, 0 where none may be needed
    multiplier: Floats  # [tasks]: scratch, seconds per byte, each for the moment when the task runs
    cheapest: Ints  # [tasks]: scratch, an option


def new_lists(tasks: int, options: int, arcs: int) -> Lists:
    return Lists(
        options=np.zeros((tasks, options), np.int64),
        left=np.zeros(tasks, np.int64),
        fastest=np.zeros(tasks),
        soonest=np.zeros(tasks),
        moved=np.zeros(arcs),
        multiplier=np.zeros(tasks),
        cheapest=np.zeros(tasks, np.int64),
    )


@compiled
def fill(instance: Instance, needs: MemoryNeeds, lists: Lists, limit: float) -> None:
    """All options within the limit."""
    for i in range(len(instance.role)):
        lists.left[i] = 0
        if needs.mesh[i] >= 0:
            table = instance.tables[i, needs.mesh[i]]
            for o in range(instance.begin[table], instance.begin[table + 1]):
                if instance.seconds[o] > limit:
                    break
                lists.options[i, lists.left[i]] = o
                lists.left[i] += 1


@compiled
def filter_memory(instance: Instance, needs: MemoryNeeds, lists: Lists) -> bool:
    """Drops options that don't fit beside the least of the others; false where a task has none left."""
    if not fits(instance, needs, lists):
        return False
    for i in range(len(instance.role)):
        if needs.mesh[i] < 0 or needs.option[i] >= 0:
            continue
        shares, kept = in_place(instance, needs, i), ZERO
        for c in range(lists.left[i]):
            o = lists.options[i, c]
            active = instance.active[o] - (instance.shared[o] if shares > 0 else 0)
            resident = instance.resident[o]
            if resident + active <= needs.room[i] and resident <= needs.resident_room[i]:
                lists.options[i, kept] = o
                kept += 1
        lists.left[i] = kept
        if kept == 0:
            return False
    return True


@compiled
def fits(instance: Instance, needs: MemoryNeeds, lists: Lists) -> bool:
    """True where what is chosen fits beside the least that the others need."""
    for i in range(len(instance.role)):
        if needs.mesh[i] < 0:
            continue
        shares = in_place(instance, needs, i)
        resident = active = host = 1 << 62
        count = 1 if needs.option[i] >= 0 else lists.left[i]
        for c in range(count):
            o = needs.option[i] if needs.option[i] >= 0 else lists.options[i, c]
            resident = min(resident, instance.resident[o])
            active = min(active, instance.active[o] - (instance.shared[o] if shares > 0 else 0))
            host = min(host, instance.host[o])
        if count == 0:
            return False
        needs.resident[i], needs.active[i], needs.host[i] = resident, active, host
    return memory_fits(instance, needs)


# --- time -------------------------------------------------------------------------------------------------------------


@compiled
def in_time(
    instance: Instance, needs: MemoryNeeds, lists: Lists, net: Net, limit: float, thorough: int, schedules: int
) -> int:
    """0: no period within the limit, even with the fastest of what is left; 1: there is one; -1: perhaps.

    thorough: 1 asks also whether memory leaves options that are fast enough. schedules: `feasible`'s budget.
    """
    n = len(instance.role)
    clear(net, n)
    for i in range(n):
        seconds, latency = float(lists.fastest[i]), float(lists.soonest[i])
        if needs.option[i] >= 0:
            seconds, latency = float(instance.seconds[needs.option[i]]), float(instance.latency[needs.option[i]])
        elif needs.mesh[i] >= 0:
            seconds, latency = float(instance.seconds[lists.options[i, 0]]), 1e300
            for c in range(lists.left[i]):
                latency = min(latency, float(instance.latency[lists.options[i, c]]))
        net.seconds[i] = seconds
        for a in range(len(instance.arc_source)):
            if instance.arc_source[a] != i:
                continue
            target, distance = int(instance.arc_target[a]), int(instance.arc_distance[a])
            if instance.arc_move[a] < 0 or lists.moved[a] <= 0.0:
                add_arc(net, i, target, latency + instance.arc_delay[a], distance)
            else:
                node = int(net.size[0])
                net.size[0] = node + 1
                net.seconds[node] = lists.moved[a]
                net.k[node, node] = a
                add_arc(net, i, node, latency, distance)
                add_arc(net, node, target, lists.moved[a], ZERO)
    _add_pairs(instance, needs, net)
    verdict = feasible(net, limit, schedules)
    if thorough == 1 and verdict != 0 and _crowded(instance, needs, lists, net, limit):
        return 0
    return verdict


@compiled
def _add_pairs(instance: Instance, needs: MemoryNeeds, net: Net) -> None:
    """Pairs of nodes that share a device, but for those that no schedule lets overlap. A move holds both its meshes."""
    n = len(needs.mesh)
    for j in range(net.size[0]):
        j_source = j if j < n else int(instance.arc_source[net.k[j, j]])
        j_target = j if j < n else int(instance.arc_target[net.k[j, j]])
        for i in range(j):
            i_source = i if i < n else int(instance.arc_source[net.k[i, i]])
            i_target = i if i < n else int(instance.arc_target[net.k[i, i]])
            if j < n and instance.exclusive[i, j] == 1:
                net.apart[i, j] = net.apart[j, i] = 1
            elif j < n and instance.alike[i] == instance.alike[j] and needs.mesh[i] == needs.mesh[j] >= 0:
                net.apart[i, j] = net.apart[j, i] = 1
                add_arc(
                    net, i, j, float(net.seconds[i]), ZERO
                )  # twins may change names: the first in number goes first
            elif (
                _overlap(instance, needs, i_source, j_source)
                or (j >= n and _overlap(instance, needs, i_source, j_target))
                or (i >= n and _overlap(instance, needs, i_target, j_source))
                or (i >= n and j >= n and _overlap(instance, needs, i_target, j_target))
            ):
                add_pair(net, i, j)


@compiled
def _overlap(instance: Instance, needs: MemoryNeeds, one: int, two: int) -> bool:
    a, b = needs.mesh[one], needs.mesh[two]
    if a < 0 or b < 0:
        return False
    return bool(
        instance.first[a] < instance.first[b] + instance.size[b]
        and instance.first[b] < instance.first[a] + instance.size[a]
    )


# --- memory against time ----------------------------------------------------------------------------------------------


@compiled
def _crowded(instance: Instance, needs: MemoryNeeds, lists: Lists, net: Net, limit: float) -> bool:
    """True where some device has too little memory for options that are fast enough.

    Tasks on one device run one after the other. With multipliers p_j >= 0 of its memory M at the moment of task j,
        T >= sum over tasks of min over options (t + r sum(p) + a p_i) - M sum(p) + what else never overlaps them,
    for r resident and a active bytes. Multipliers come from a few steps of subgradient ascent with Polyak's length.
    """
    n = len(instance.role)
    for i in range(n):
        if needs.mesh[i] < 0:
            continue
        device = int(instance.first[needs.mesh[i]])
        earlier = False  # the same tasks may lie on another task's first device
        for j in range(i):
            earlier |= needs.mesh[j] >= 0 and instance.first[needs.mesh[j]] == device
        if not earlier and _device_crowded(instance, needs, lists, net, limit, device):
            return True
    return False


@compiled
def _device_crowded(instance: Instance, needs: MemoryNeeds, lists: Lists, net: Net, limit: float, device: int) -> bool:
    n = len(instance.role)
    memory = float(least(instance.memory, device, device + 1))
    rest = _beside(instance, needs, net, device)
    for j in range(n):
        lists.multiplier[j] = 0.0
    for _ in range(ASCENT_STEPS):
        total, resident, bound = 0.0, 0.0, rest
        for j in range(n):
            total += lists.multiplier[j]
        bound -= total * memory
        for j in range(n):
            if not _on(instance, needs, j, device):
                continue
            cheapest, cost = _cheapest(instance, needs, lists, j, total)
            lists.cheapest[j] = cheapest
            bound += cost
            resident += instance.resident[cheapest] / _copies(instance, needs, j)
        if bound > limit * (1 + 1e-9):
            return True
        norm, over = 0.0, False
        for j in range(n):
            if _on(instance, needs, j, device):
                excess = (resident + _active(instance, needs, j, lists.cheapest[j])) / memory - 1
                over |= excess > 0
                if excess > 0 or lists.multiplier[j] > 0:
                    norm += excess * excess
        if not over or norm <= 1e-12:
            return False
        length = 1.05 * max(limit - bound, 1e-3 * limit) / norm
        for j in range(n):
            if _on(instance, needs, j, device):
                excess = (resident + _active(instance, needs, j, lists.cheapest[j])) / memory - 1
                lists.multiplier[j] = max(0.0, lists.multiplier[j] + length * excess / memory)
    return False


@compiled
def _on(instance: Instance, needs: MemoryNeeds, task: int, device: int) -> bool:
    mesh = needs.mesh[task]
    return bool(mesh >= 0 and instance.first[mesh] <= device < instance.first[mesh] + instance.size[mesh])


@compiled
def _beside(instance: Instance, needs: MemoryNeeds, net: Net, device: int) -> float:
    """Least seconds of a period in which none of the device's tasks runs.

    In them run all moves that hold the device, one after the other; or a task elsewhere that overlaps none of the
    device's tasks, and those of the moves that it doesn't overlap either. It may run beside the other moves.
    """
    n = len(needs.mesh)
    most = 0.0
    for j in range(n, net.size[0]):
        if _holds(instance, needs, net, device, j):
            most += net.seconds[j]
    for i in range(n):
        if _on(instance, needs, i, device) or not _apart_from_all(instance, needs, net, device, i):
            continue
        seconds = net.seconds[i]
        for j in range(n, net.size[0]):
            if net.apart[i, j] == 1 and _holds(instance, needs, net, device, j):
                seconds += net.seconds[j]
        most = max(most, seconds)
    return most


@compiled
def _holds(instance: Instance, needs: MemoryNeeds, net: Net, device: int, move: int) -> bool:
    """True where the node, a move, holds the device."""
    arc = net.k[move, move]
    source, target = int(instance.arc_source[arc]), int(instance.arc_target[arc])
    return bool(_on(instance, needs, source, device) or _on(instance, needs, target, device))


@compiled
def _apart_from_all(instance: Instance, needs: MemoryNeeds, net: Net, device: int, task: int) -> bool:
    """True where the task never runs beside any task of the device."""
    apart = True
    for j in range(len(needs.mesh)):
        apart &= not _on(instance, needs, j, device) or net.apart[j, task] == 1
    return apart


@compiled
def _cheapest(instance: Instance, needs: MemoryNeeds, lists: Lists, task: int, total: float) -> tuple[int, float]:
    """The option of least reduced cost, and that cost. total: the sum of all multipliers."""
    shares, copies = in_place(instance, needs, task), _copies(instance, needs, task)
    cheapest, cost = ZERO - 1, -NO_PATH_SECONDS
    for c in range(1 if needs.option[task] >= 0 else lists.left[task]):
        o = needs.option[task] if needs.option[task] >= 0 else lists.options[task, c]
        active = instance.active[o] - (instance.shared[o] if shares > 0 else 0)
        own = instance.seconds[o] + total * instance.resident[o] / copies + lists.multiplier[task] * active
        if own < cost:
            cheapest, cost = o, own
    return cheapest, cost


@compiled
def _active(instance: Instance, needs: MemoryNeeds, task: int, option: int) -> int:
    return int(instance.active[option]) - (instance.shared[option] if in_place(instance, needs, task) > 0 else 0)


@compiled
def _copies(instance: Instance, needs: MemoryNeeds, task: int) -> int:
    """Number of tasks that may share the copy that the task keeps: each counts with its part."""
    if instance.frozen[task] == 0:
        return 1
    count = ZERO
    for j in range(len(instance.role)):
        if instance.role[j] == instance.role[task] and needs.mesh[j] == needs.mesh[task]:
            count += 1
    return count
