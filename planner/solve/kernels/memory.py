"""Compiled: whether what lies on devices and nodes fits, and the room that is left to each task there.

Meshes are intervals, so what lies on a device changes only where a mesh begins or ends. A task whose option isn't
chosen yet counts with the least that it may need, so a `no` is final.
"""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import ZERO, Ints, compiled
from realgraph.planner.solve.kernels.instance import Instance

NO_LIMIT_BYTES = 1 << 62


class MemoryNeeds(NamedTuple):
    """Each task's needs on each of its devices: bytes of its option, or the least of those that are left to it."""

    mesh: Ints  # [tasks]: -1 where it has no place yet
    option: Ints  # -1 where none is chosen
    resident: Ints
    active: Ints  # without what it shares with training, where it may
    host: Ints
    room: Ints  # out: `resident` and `active` of its option together may not pass it
    resident_room: Ints  # out: nor its `resident` this
    breaks: Ints  # [2 tasks + 1]: scratch


def new_needs(tasks: int) -> MemoryNeeds:
    return MemoryNeeds(
        mesh=np.full(tasks, -1, np.int64),
        option=np.full(tasks, -1, np.int64),
        resident=np.zeros(tasks, np.int64),
        active=np.zeros(tasks, np.int64),
        host=np.zeros(tasks, np.int64),
        room=np.zeros(tasks, np.int64),
        resident_room=np.zeros(tasks, np.int64),
        breaks=np.zeros(4 * tasks + 2, np.int64),
    )


@compiled
def in_place(instance: Instance, needs: MemoryNeeds, task: int) -> int:
    """Tells if the task's role is trained on its mesh: 2 surely under its layout, 1 perhaps, 0 no."""
    if instance.trains[task] == 1 or instance.frozen[task] == 1:
        return 0
    perhaps = 0
    for other in range(len(instance.role)):
        if instance.trains[other] == 0 or instance.role[other] != instance.role[task]:
            continue
        if needs.mesh[other] < 0:
            perhaps = 1
        elif needs.mesh[other] == needs.mesh[task]:
            if needs.option[other] < 0 or needs.option[task] < 0:
                perhaps = 1
            elif instance.layout[needs.option[other]] == instance.layout[needs.option[task]]:
                return 2
    return perhaps


@compiled
def least(values: Ints, first: int, end: int) -> int:
    """The least of values[0][first:end], by range minima."""
    level = 0
    while (2 << level) <= end - first:
        level += 1
    return int(min(values[level, first], values[level, end - (1 << level)]))


@compiled
def _same_copy(instance: Instance, needs: MemoryNeeds, one: int, two: int) -> bool:
    """True where two calls of a frozen role may keep one copy."""
    if instance.frozen[one] == 0 or instance.role[one] != instance.role[two] or needs.mesh[one] != needs.mesh[two]:
        return False
    if needs.option[one] < 0 or needs.option[two] < 0:
        return True
    return bool(instance.layout[needs.option[one]] == instance.layout[needs.option[two]])


@compiled
def _counted(instance: Instance, needs: MemoryNeeds, task: int) -> int:
    """The task's share of the resident bytes: all, or what the first of those that keep one copy doesn't count.

    Those with a chosen option count exactly; the others nothing beside one that may hold their copy.
    """
    nbytes = int(needs.resident[task])
    if instance.frozen[task] == 0:
        return nbytes
    for other in range(len(instance.role)):
        if other == task or needs.mesh[other] < 0 or not _same_copy(instance, needs, task, other):
            continue
        if needs.option[task] < 0:
            if other < task or needs.option[other] >= 0:
                return 0
        elif needs.option[other] >= 0:
            if other < task:
                return 0
            nbytes = max(nbytes, needs.resident[other])
    return nbytes


@compiled
def _sort(values: Ints, count: int) -> None:
    """The first `count` values, by insertion: they are few."""
    for i in range(1, count):
        value, at = values[i], i
        while at > 0 and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value


@compiled
def memory_fits(instance: Instance, needs: MemoryNeeds) -> bool:
    """True where all that has a place fits; fills `room` and `resident_room` of these tasks."""
    n = len(instance.role)
    count = ZERO
    for i in range(n):
        needs.room[i] = NO_LIMIT_BYTES
        needs.resident_room[i] = NO_LIMIT_BYTES
        if needs.mesh[i] >= 0:
            needs.breaks[count] = instance.first[needs.mesh[i]]
            needs.breaks[count + 1] = instance.first[needs.mesh[i]] + instance.size[needs.mesh[i]]
            count += 2
    breaks = needs.breaks
    _sort(breaks, count)
    for b in range(count - 1):
        if breaks[b] < breaks[b + 1] and not _interval_fits(instance, needs, breaks[b], breaks[b + 1]):
            return False
    return instance.hosts == 0 or _hosts_fit(instance, needs)


@compiled
def _interval_fits(instance: Instance, needs: MemoryNeeds, first: int, end: int) -> bool:
    """True where all fits on devices first to end, on all of which the same tasks lie."""
    n = len(instance.role)
    capacity = least(instance.memory, first, end)
    total, largest, second = 0, 0, 0
    for i in range(n):
        mesh = needs.mesh[i]
        if mesh >= 0 and instance.first[mesh] <= first and first < instance.first[mesh] + instance.size[mesh]:
            total += _counted(instance, needs, i)
            if needs.active[i] > largest:
                largest, second = needs.active[i], largest
            elif needs.active[i] > second:
                second = needs.active[i]
    if total + largest > capacity:
        return False
    for i in range(n):
        mesh = needs.mesh[i]
        if mesh >= 0 and instance.first[mesh] <= first and first < instance.first[mesh] + instance.size[mesh]:
            others = total - _counted(instance, needs, i)
            if instance.frozen[i] == 1:  # copies that may be one with its own say nothing about its own
                others = 0
                for j in range(n):
                    other = needs.mesh[j]
                    on = other >= 0 and instance.first[other] <= first < instance.first[other] + instance.size[other]
                    if on and j != i and not (other == mesh and instance.role[j] == instance.role[i]):
                        others += _counted(instance, needs, j)
            most = second if needs.active[i] == largest else largest
            needs.room[i] = min(needs.room[i], capacity - others)
            needs.resident_room[i] = min(needs.resident_room[i], capacity - others - most)
    return True


@compiled
def _hosts_fit(instance: Instance, needs: MemoryNeeds) -> bool:
    """True where what waits in the memory of nodes fits there."""
    n = len(instance.role)
    nodes = instance.host_memory.shape[1]
    count = ZERO
    for i in range(n):
        if needs.mesh[i] >= 0:
            first = instance.first[needs.mesh[i]] // instance.per_node
            last = (instance.first[needs.mesh[i]] + instance.size[needs.mesh[i]] - 1) // instance.per_node
            needs.breaks[count], needs.breaks[count + 1] = first, min(first + 1, nodes)
            needs.breaks[count + 2], needs.breaks[count + 3] = last, min(last + 1, nodes)
            count += 4
    breaks = needs.breaks
    _sort(breaks, count)
    for b in range(count):
        end = breaks[b + 1] if b + 1 < count else nodes
        if breaks[b] >= end:
            continue
        total = 0
        left = breaks[b] * instance.per_node
        for i in range(n):
            if needs.mesh[i] >= 0:
                first = instance.first[needs.mesh[i]]
                on = min(first + instance.size[needs.mesh[i]], left + instance.per_node) - max(first, left)
                if on > 0:
                    total += on * needs.host[i]
        if total > least(instance.host_memory, breaks[b], end):
            return False
    return True
