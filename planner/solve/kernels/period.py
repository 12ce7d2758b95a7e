"""Compiled: whether tasks on meeting meshes can be kept apart in a given period, and the exact period where they are.

Nodes are tasks and moves. An arc says s_b >= s_a + cost - distance T. A pair of nodes on one device has an integer k:
    s_j >= s_i + d_i - k T    and    s_i >= s_j + d_j - (1 - k) T.
For a fixed T the arcs are difference constraints: they can be met iff no circuit is longer than 0, and the longest
paths leave each pair an interval of k. A depth-first search over the pairs decides. An arc to a node that the source
does not wait for never binds: the one and all that waits for it can run whole periods later.
"""

from math import ceil, floor
from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import NO_PATH_SECONDS, ONE, ZERO, Floats, Ints, compiled, entry

BRANCHED_PAIRS = 64  # pairs that a search may have branched on at once
PERIOD_TOLERANCE = 1e-10  # of a period: what counts as met


class Net(NamedTuple):
    """Nodes, arcs and pairs; the lengths in `size` say how much of each array is in use: [nodes, arcs, pairs]."""

    size: Ints
    seconds: Floats  # [nodes]: how long each holds its devices
    source: Ints  # [arcs]
    target: Ints
    cost: Floats
    distance: Ints
    left: Ints  # [pairs]: i
    right: Ints  # j
    apart: Ints  # [nodes, nodes]: 1: never at one time, be it by a pair or by the arcs
    linked: Ints  # [nodes, nodes]: 1: each waits for the other, as `feasible` found
    k: Ints  # [nodes, nodes]: in, what to try first; out, the integers found
    paths: Floats  # [BRANCHED_PAIRS, nodes, nodes]: scratch, longest paths
    fixed: Ints  # [BRANCHED_PAIRS, pairs]: scratch, k or UNFIXED_K
    clique: Ints  # [nodes]: scratch
    via: Ints  # [nodes]: scratch
    frame: Ints  # [BRANCHED_PAIRS, 5]: scratch: the pair branched on, the k tried first, number tried, first and last k


UNFIXED_K = 1 << 30


def new_net(nodes: int, arcs: int) -> Net:
    """Room for so many nodes and arcs, and for all pairs."""
    pairs = nodes * (nodes - 1) // 2
    return Net(
        size=np.zeros(3, np.int64),
        seconds=np.zeros(nodes),
        source=np.zeros(arcs + 2 * pairs + nodes, np.int64),  # `fixed_period` adds two of each pair, one of each node
        target=np.zeros(arcs + 2 * pairs + nodes, np.int64),
        cost=np.zeros(arcs + 2 * pairs + nodes),
        distance=np.zeros(arcs + 2 * pairs + nodes, np.int64),
        left=np.zeros(pairs, np.int64),
        right=np.zeros(pairs, np.int64),
        apart=np.zeros((nodes, nodes), np.int64),
        linked=np.zeros((nodes, nodes), np.int64),
        k=np.zeros((nodes, nodes), np.int64),
        paths=np.zeros((BRANCHED_PAIRS, nodes, nodes)),
        fixed=np.zeros((BRANCHED_PAIRS, max(1, pairs)), np.int64),
        clique=np.zeros(nodes, np.int64),
        via=np.zeros(nodes, np.int64),
        frame=np.zeros((BRANCHED_PAIRS, 5), np.int64),
    )


@compiled
def clear(net: Net, nodes: int) -> None:
    """No arcs, no pairs, and so many nodes; a later node takes the next number."""
    net.size[0], net.size[1], net.size[2] = nodes, 0, 0
    for i in range(len(net.seconds)):
        for j in range(len(net.seconds)):
            net.apart[i, j] = 0


@compiled
def add_arc(net: Net, source: int, target: int, cost: float, distance: int) -> None:
    at = net.size[1]
    net.source[at] = source
    net.target[at] = target
    net.cost[at] = cost
    net.distance[at] = distance
    net.size[1] = at + 1


@compiled
def add_pair(net: Net, left: int, right: int) -> None:
    at = net.size[2]
    net.left[at] = left
    net.right[at] = right
    net.size[2] = at + 1
    net.apart[left, right] = net.apart[right, left] = 1


@compiled
def feasible(net: Net, period: float, budget: int) -> int:
    """1 where some k for each pair meets all arcs (they are left in net.k), 0 where none does, -1 beyond the budget."""
    if _overloaded(net, period) or not _close(net, period):
        return 0
    for p in range(net.size[2]):
        net.fixed[0, p] = UNFIXED_K
    depth = ZERO
    while True:
        branch = _propagate(net, period, depth)
        budget -= 1
        if branch == -1:
            for p in range(net.size[2]):
                net.k[net.left[p], net.right[p]] = net.fixed[depth, p]
            return 1
        if branch >= 0:
            if depth + 1 >= BRANCHED_PAIRS or budget < 0:
                return -1
            _open(net, period, depth, branch)
        else:
            depth -= 1
            while depth >= 0 and not _next(net, depth):
                depth -= 1
            if depth < 0:
                return 0
        _descend(net, period, depth)
        depth += 1


@compiled
def _overloaded(net: Net, period: float) -> bool:
    """True if nodes that never run at one time take longer than the period: cliques, grown greedily from each node."""
    n = net.size[0]
    clique = net.clique
    for first in range(n):
        clique[0], count, total = first, 1, net.seconds[first]
        for step in range(1, n):
            other = (first + step) % n
            joins = True
            for c in range(count):
                if net.apart[clique[c], other] == 0:
                    joins = False
                    break
            if joins:
                clique[count] = other
                count += 1
                total += net.seconds[other]
        if total > period * (1 + PERIOD_TOLERANCE):
            return True
    return False


@compiled
def _close(net: Net, period: float) -> bool:
    """Longest paths over the arcs into paths[0]; false where a circuit is longer than 0."""
    n = net.size[0]
    paths = net.paths[0]
    for i in range(n):
        for j in range(n):
            paths[i, j] = NO_PATH_SECONDS
        paths[i, i] = 0.0
    for e in range(net.size[1]):
        weight = net.cost[e] - net.distance[e] * period
        if weight > paths[net.source[e], net.target[e]]:
            paths[net.source[e], net.target[e]] = weight
    limit = PERIOD_TOLERANCE * period
    for via in range(n):
        for i in range(n):
            head = paths[i, via]
            if head > NO_PATH_SECONDS / 2:
                for j in range(n):
                    if head + paths[via, j] > paths[i, j]:
                        paths[i, j] = head + paths[via, j]
        if paths[via, via] > limit:
            return False
    for i in range(n):
        if paths[i, i] > limit or net.seconds[i] > period + limit:
            return False
        paths[i, i] = 0.0
    for i in range(n):
        for j in range(i + 1, n):
            linked = paths[i, j] > NO_PATH_SECONDS / 2 and paths[j, i] > NO_PATH_SECONDS / 2
            net.linked[i, j] = net.linked[j, i] = 1 if linked else 0
            if not linked:
                paths[i, j] = paths[j, i] = NO_PATH_SECONDS
    return True


@compiled
def _propagate(net: Net, period: float, depth: int) -> int:
    """Fixes every k that has one value left. -1: all are fixed, -2: one has none, else the pair to branch on."""
    paths, fixed = net.paths[depth], net.fixed[depth]
    while True:
        changed = False
        best, fewest = ZERO - 1, UNFIXED_K
        for p in range(net.size[2]):
            if fixed[p] != UNFIXED_K:
                continue
            first, last = _range(net, period, paths, p)
            if first > last:
                return -2
            if first == last:
                fixed[p] = first
                i, j = int(net.left[p]), int(net.right[p])
                _extend(paths, int(net.size[0]), i, j, float(net.seconds[i] - first * period))
                _extend(paths, int(net.size[0]), j, i, float(net.seconds[j] - (1 - first) * period))
                changed = True
            elif last - first < fewest or (last - first == fewest and _heavier(net, p, best)):
                best, fewest = p, last - first
        if not changed:
            return best


@compiled
def _heavier(net: Net, one: int, two: int) -> bool:
    """True where the pair `one` takes longer in all than `two`."""
    first = net.seconds[net.left[one]] + net.seconds[net.right[one]]
    return bool(first > net.seconds[net.left[two]] + net.seconds[net.right[two]])


@compiled
def _range(net: Net, period: float, paths: Floats, p: int) -> tuple[int, int]:
    """The first and last k that no circuit forbids.

    Where no path joins the two, shifting one and all that is joined to it changes no meeting: one k stands for all.
    """
    i, j = net.left[p], net.right[p]
    there, back = paths[i, j], paths[j, i]
    limit = PERIOD_TOLERANCE * 4
    if (net.seconds[i] + net.seconds[j]) / period > 1 + limit:
        return 1, 0
    if there < NO_PATH_SECONDS / 2:
        return 0, 0
    return ceil((net.seconds[i] + back) / period - limit), floor(1 - (net.seconds[j] + there) / period + limit)


@compiled
def _extend(paths: Floats, n: int, source: int, target: int, weight: float) -> None:
    """The longest paths with one more arc."""
    if paths[source, target] >= weight:
        return
    for i in range(n):
        head = paths[i, source] + weight
        if head > NO_PATH_SECONDS / 2:
            for j in range(n):
                if head + paths[target, j] > paths[i, j]:
                    paths[i, j] = head + paths[target, j]
    for i in range(n):
        paths[i, i] = 0.0


@compiled
def _open(net: Net, period: float, depth: int, pair: int) -> None:
    """A frame for the pair, to try first the k of the last answer, else the one with most room."""
    first, last = _range(net, period, net.paths[depth], pair)
    i, j = net.left[pair], net.right[pair]
    there, back = net.paths[depth, i, j], net.paths[depth, j, i]
    began, most = net.k[i, j], NO_PATH_SECONDS
    if began < first or began > last:
        for k in range(first, last + 1):
            room = min(k * period - back, period - net.seconds[j]) - max(k * period + there, net.seconds[i])
            if room > most:
                began, most = k, room
    frame = net.frame[depth]
    frame[0], frame[1], frame[2], frame[3], frame[4] = pair, began, 0, first, last


@compiled
def _next(net: Net, depth: int) -> bool:
    """True where the frame has a further k; it is then the one to try."""
    frame = net.frame[depth]
    frame[2] += 1
    return bool(frame[2] <= frame[4] - frame[3])


@compiled
def _descend(net: Net, period: float, depth: int) -> None:
    """The state of the next depth: that of this one with the frame's pair fixed at its k."""
    n, frame = int(net.size[0]), net.frame[depth]
    for i in range(n):
        for j in range(n):
            net.paths[depth + 1, i, j] = net.paths[depth, i, j]
    for p in range(net.size[2]):
        net.fixed[depth + 1, p] = net.fixed[depth, p]
    k = frame[1]
    if frame[2] > 0:  # the others rise from the first, `began` left out
        k = frame[3] + frame[2] - 1
        if k >= frame[1]:
            k += 1
    i, j = int(net.left[frame[0]]), int(net.right[frame[0]])
    net.fixed[depth + 1, frame[0]] = k
    _extend(net.paths[depth + 1], n, i, j, float(net.seconds[i] - k * period))
    _extend(net.paths[depth + 1], n, j, i, float(net.seconds[j] - (1 - k) * period))


# --- the period of fixed integers -------------------------------------------------------------------------------------


@compiled
def fixed_period(net: Net, least: float, starts: Floats, circuit: Ints) -> float:
    """The largest cost / distance of a circuit of the arcs and of the pairs under net.k, at least `least`.

    Fills `starts` with longest paths, and `circuit` with the nodes of the circuit that is longest, -1 after the last;
    it is empty where `least` is the period. Infinite where a circuit's distance is below 1. Newton's iteration.
    """
    fixed = net.size[1]
    for p in range(net.size[2]):
        i, j = int(net.left[p]), int(net.right[p])
        add_arc(net, i, j, float(net.seconds[i]), int(net.k[i, j]))
        add_arc(net, j, i, float(net.seconds[j]), int(1 - net.k[i, j]))
    for i in range(net.size[0]):
        add_arc(net, i, i, net.seconds[i], ONE)
    period = least
    circuit[0] = -1
    while True:
        cost, distance = _longest(net, period, fixed, starts, circuit)
        if distance == 0 and cost == 0.0:
            break
        if distance <= 0:
            period = np.inf
            break
        period = max(cost / distance, period * (1 + 1e-13))
    net.size[1] = fixed
    return period


@compiled
def _longest(net: Net, period: float, arcs: int, starts: Floats, circuit: Ints) -> tuple[float, int]:
    """Longest paths from everywhere; the cost and distance of a circuit longer than 0, left in `circuit`; 0, 0: none.

    arcs: how many are the problem's own. Of those only the ones between linked nodes can lie on a circuit.
    """
    n = net.size[0]
    via = net.via
    limit = PERIOD_TOLERANCE * period + 1e-15
    last = -1
    for i in range(n):
        starts[i] = 0.0
    for _ in range(n + 1):
        last = -1
        for e in range(net.size[1]):
            if e < arcs and net.source[e] != net.target[e] and net.linked[net.source[e], net.target[e]] == 0:
                continue
            reached = starts[net.source[e]] + net.cost[e] - net.distance[e] * period
            if reached > starts[net.target[e]] + limit:
                starts[net.target[e]] = reached
                via[net.target[e]] = e
                last = net.target[e]
        if last < 0:
            return 0.0, 0
    for _ in range(n):  # walk back into the circuit
        last = net.source[via[last]]
    cost, distance, at, node = 0.0, ZERO, 0, last
    while True:
        cost += float(net.cost[via[node]])
        distance += int(net.distance[via[node]])
        circuit[at] = node
        at += 1
        node = net.source[via[node]]
        if node == last:
            break
    circuit[at] = -1
    return cost, distance


@entry
def least_period(net: Net, least: float, starts: Floats, circuit: Ints, budget: int) -> float:
    """The least period of all integers k, at least `least`; infinite where there is none. As `fixed_period` fills.

    Exact to a relative 1e-8. Where `budget` nodes of a search don't decide, the period is one that can be met.
    """
    low = max(least, 1e-9)
    for i in range(net.size[0]):
        low = max(low, net.seconds[i])
    high = low
    for e in range(net.size[1]):
        high += abs(net.cost[e])
    for i in range(net.size[0]):
        high += net.seconds[i]
    if feasible(net, low, budget) == 1:
        return fixed_period(net, least, starts, circuit)
    doublings = 0
    while feasible(net, high, budget) != 1:
        high *= 4
        doublings += 1
        if doublings > 6:
            return np.inf
    high = fixed_period(net, least, starts, circuit)
    while high > low * (1 + 1e-8):
        middle = (low + high) / 2
        if feasible(net, middle, budget) == 1:
            high = fixed_period(net, least, starts, circuit)
            continue
        low = middle
        if feasible(net, high * (1 - 1e-8), budget) != 1:
            break
        high = fixed_period(net, least, starts, circuit)
    return high
