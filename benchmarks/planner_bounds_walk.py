"""Decides by enumeration if a planning problem has a plan of a given period; shares no code with the search.

It reads a problem file by the rules of docs/planning_problem.md alone. All combinations of options are looked at, by a
depth-first walk where a device that would be held for longer than the period ends a branch; of each combination that
fits the memory starts are searched for.

Starts: two nodes that share a device keep apart iff for a whole number q
    q T + d_i <= s_j - s_i <= (q + 1) T - d_j,
so the unknowns are the q of all such pairs; each choice leaves difference constraints, which longest paths decide. A
constraint between nodes that don't wait for each other in turn is left out: all that waits may be put off by whole
periods, which changes no distance modulo T. For the same reason such a pair needs one q only.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np

from benchmarks.planner_bounds_arrays import Floats, Links, Room, Rows

F = TypeVar("F", bound=Callable[..., object])

SLACK = 1e-9  # of a period: what a constraint may be missed by and still count as met
NONE = -1e18  # seconds of a longest path where there is none

fast = cast(Callable[[F], F], numba.njit(cache=True, error_model="numpy"))


@fast
def plan_within(rows: Rows, links: Links, room: Room, period: float, fixed: int) -> bool:
    """True where some combination has a plan of this period, left in room.row. fixed: 1: only the one in room.row.

    An infinite period asks for memory and ties alone.
    """
    n, devices = len(rows.count), len(links.memory)
    first = room.row.copy()
    room.leaves[0] = 0
    at = np.full(n, -1, np.int64)
    room.load[0, :] = 0.0
    call = 0
    while call >= 0:
        at[call] += 1
        if at[call] >= (1 if fixed == 1 else rows.count[call]):
            at[call] = -1
            call -= 1
            continue
        row = first[call] if fixed == 1 else at[call]
        room.row[call] = row
        if not ties_hold(rows, room, call):
            continue
        seconds, within = rows.seconds[call, row], True
        for device in range(devices):
            busy = room.load[call, device]
            if (rows.devices[call, row] >> device) & 1:
                busy += seconds
                within &= busy <= period * (1 + SLACK)
            room.load[call + 1, device] = busy
        if not within:
            continue
        if call + 1 < n:
            call += 1
        elif fits(rows, links, room):
            if period == np.inf:
                return True
            room.leaves[0] += 1
            if _starts_exist(rows, links, room, period):
                return True
    return False


@fast
def ties_hold(rows: Rows, room: Room, call: int) -> bool:
    """True where the ties of `call` with the calls before it hold."""
    row = room.row[call]
    for other in range(call):
        if rows.mesh_tie[call, other] == 1 and rows.devices[call, row] != rows.devices[other, room.row[other]]:
            return False
        if rows.layout_tie[call, other] == 1 and rows.layout[call, row] != rows.layout[other, room.row[other]]:
            return False
    return True


@fast
def _same_place(rows: Rows, room: Room, one: int, two: int) -> bool:
    """True where two calls share role, mesh and layout."""
    left, right = room.row[one], room.row[two]
    return bool(
        rows.role[one] == rows.role[two]
        and rows.devices[one, left] == rows.devices[two, right]
        and rows.layout[one, left] == rows.layout[two, right]
    )


@fast
def fits(rows: Rows, links: Links, room: Room) -> bool:
    n = len(rows.count)
    for device in range(len(links.memory)):
        resident, largest = 0, 0
        for call in range(n):
            row = room.row[call]
            if (rows.devices[call, row] >> device) & 1 == 0:
                continue
            kept, counted = rows.resident[call, row], True
            active = rows.active[call, row]
            for other in range(n):
                if other == call or not _same_place(rows, room, call, other):
                    continue
                if rows.frozen[call] == 1:  # one copy, as large as the largest says: the first call counts it
                    kept = max(kept, rows.resident[other, room.row[other]])
                    counted &= call < other
                elif rows.trains[other] == 1 and rows.trains[call] == 0:
                    active = rows.active[call, row] - rows.shared[call, row]
            if counted:
                resident += kept
            largest = max(largest, active)
        if resident + largest > links.memory[device]:
            return False
    for node in range(len(links.host_memory)):
        host = 0
        for device in range(node * links.per_node, min((node + 1) * links.per_node, len(links.memory))):
            for call in range(n):
                if (rows.devices[call, room.row[call]] >> device) & 1:
                    host += rows.host[call, room.row[call]]
        if host > links.host_memory[node]:
            return False
    return True


@fast
def _wait(paths: Floats, source: int, target: int, seconds: float) -> None:
    if seconds > paths[source, target]:
        paths[source, target] = seconds


@fast
def _starts_exist(rows: Rows, links: Links, room: Room, period: float) -> bool:
    n = len(rows.count)
    nodes, paths = n, room.paths[0]
    paths[:, :] = NONE
    for call in range(n):
        room.seconds[call] = rows.seconds[call, room.row[call]]
        room.devices[call] = rows.devices[call, room.row[call]]
    for e in range(len(links.source)):
        ready = rows.latency[links.source[e], room.row[links.source[e]]] + links.delay[e]
        _wait(paths, links.source[e], links.target[e], ready - links.distance[e] * period)
    for m in range(len(links.move_source)):
        source, target = links.move_source[m], links.move_target[m]
        seconds = links.move_seconds[m, room.row[source], room.row[target]]
        ready = rows.latency[source, room.row[source]] - links.move_distance[m] * period
        if seconds > 0:
            room.seconds[nodes] = seconds
            room.devices[nodes] = room.devices[source] | room.devices[target]
            _wait(paths, source, nodes, ready)
            _wait(paths, nodes, target, seconds)
            nodes += 1
        else:
            _wait(paths, source, target, ready)
    return _in_load(room, nodes, period) and _closed(room, nodes, period) and _apart(room, nodes, period)


@fast
def _in_load(room: Room, nodes: int, period: float) -> bool:
    """True where sets of nodes that share devices two by two, grown from each node, run within a period: saves work."""
    for first in range(nodes):
        total = 0.0
        taken = np.zeros(nodes, np.int64)
        for step in range(nodes):
            other = (first + step) % nodes
            joins = True
            for node in range(nodes):
                joins &= taken[node] == 0 or room.devices[node] & room.devices[other] != 0
            if joins:
                taken[other] = 1
                total += room.seconds[other]
        if total > period * (1 + SLACK):
            return False
    return True


@fast
def _closed(room: Room, nodes: int, period: float) -> bool:
    """Longest paths of all pairs; false where a circuit is longer than 0 or a node than the period."""
    paths = room.paths[0]
    for via in range(nodes):
        if room.seconds[via] > period * (1 + SLACK):
            return False
        for i in range(nodes):
            if paths[i, via] > NONE / 2:
                for j in range(nodes):
                    if paths[via, j] > NONE / 2:
                        paths[i, j] = max(paths[i, j], paths[i, via] + paths[via, j])
    for i in range(nodes):
        if paths[i, i] > SLACK * period:
            return False
    for i in range(nodes):
        for j in range(i):
            if paths[i, j] < NONE / 2 or paths[j, i] < NONE / 2:
                paths[i, j] = paths[j, i] = NONE
    return True


@fast
def _turns(room: Room, paths: Floats, period: float, i: int, j: int) -> tuple[int, int]:
    """The first q that the paths between two nodes leave, and how many there are."""
    slack = 2 * SLACK
    if room.seconds[i] + room.seconds[j] > period * (1 + slack):
        return 0, 0
    if paths[i, j] < NONE / 2 or paths[j, i] < NONE / 2:
        return 0, 1
    first = np.ceil((paths[i, j] + room.seconds[j]) / period - 1 - slack)
    last = np.floor((-paths[j, i] - room.seconds[i]) / period + slack)
    return int(first), max(0, int(last - first) + 1)


@fast
def _apart(room: Room, nodes: int, period: float) -> bool:
    """True where every pair that shares a device finds a q: depth first, the pair with the fewest of them next."""
    done = np.zeros((nodes * nodes + 1, nodes, nodes), np.int64)
    frame = np.zeros((nodes * nodes + 1, 4), np.int64)  # of each depth the pair, the next q, how many are left
    depth = 0
    opened = False
    while depth >= 0:
        paths = room.paths[depth]
        if not opened:
            least = 1 << 40
            for i in range(nodes):
                for j in range(i + 1, nodes):
                    if done[depth, i, j] == 0 and room.devices[i] & room.devices[j] != 0:
                        first, count = _turns(room, paths, period, i, j)
                        if count < least:
                            least = count
                            frame[depth, 0], frame[depth, 1], frame[depth, 2], frame[depth, 3] = i, j, first, count
            if least == 1 << 40:
                return True
        if frame[depth, 3] <= 0:
            depth -= 1
            opened = True
            continue
        i, j, q = frame[depth, 0], frame[depth, 1], frame[depth, 2]
        frame[depth, 2] += 1
        frame[depth, 3] -= 1
        room.paths[depth + 1, :, :] = paths
        done[depth + 1, :, :] = done[depth]
        done[depth + 1, i, j] = 1
        there = _joined(room.paths[depth + 1], nodes, (i, j), q * period + room.seconds[i], SLACK * period)
        back = _joined(room.paths[depth + 1], nodes, (j, i), room.seconds[j] - (q + 1) * period, SLACK * period)
        opened = not (there and back)
        if not opened:
            depth += 1
    return False


@fast
def _joined(paths: Floats, nodes: int, ends: tuple[int, int], seconds: float, slack: float) -> bool:
    """Longest paths with one more constraint; false where that closes a circuit longer than 0."""
    source, target = ends
    if paths[target, source] > NONE / 2 and paths[target, source] + seconds > slack:
        return False
    if paths[source, target] >= seconds:
        return True
    for i in range(nodes):
        head = 0.0 if i == source else paths[i, source]
        if head > NONE / 2:
            for j in range(nodes):
                tail = 0.0 if j == target else paths[target, j]
                if tail > NONE / 2 and head + seconds + tail > paths[i, j]:
                    paths[i, j] = head + seconds + tail
    return True
