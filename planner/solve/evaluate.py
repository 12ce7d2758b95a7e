"""The exact period of given choices: do they fit, and what is the best schedule that repeats once a period.

The search's own objective, so that reports, baselines and tests speak of the same number. Chooses nothing.
"""

from collections.abc import Mapping
from math import floor

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Turn, reallocation_node
from realgraph.planner.plan.problem import Choice, Schedule, SearchProblem, Solution
from realgraph.planner.solve.kernels.compiled import Floats
from realgraph.planner.solve.kernels.period import Net, least_period, new_net
from realgraph.planner.solve.memory import fits, layout_of, table_of

SCHEDULE_NODES = 200_000  # nodes of one search for integers k
BOUNDARY_FRACTION = 1e-9  # of a period: how far a start may lie before a boundary and still count as on it
SAME_MOMENT_FRACTION = 1e-8  # of a period: starts that are no further apart are one moment


class ScheduledNode(Struct, frozen=True):
    """A task or a move of a plan: what it holds and for how long, and when its outputs are ready."""

    name: str
    meshes: tuple[DeviceMesh, ...]
    seconds: float
    latency: float

    def overlaps(self, other: "ScheduledNode") -> bool:
        return any(one.overlaps(two) for one in self.meshes for two in other.meshes)


class Arc(Struct, frozen=True):
    """Node `target` of step k starts `cost` seconds or more after `source` of step k - `distance` started."""

    source: int
    target: int
    cost: float
    distance: int


class PrecedenceGraph(Struct, frozen=True):
    """Resources that the choices of a problem hold, and what waits for what: nodes are tasks in order, then moves."""

    nodes: tuple[ScheduledNode, ...]
    arcs: tuple[Arc, ...]


def evaluate(problem: SearchProblem, choices: Mapping[str, Choice]) -> Schedule | None:
    """The least period of these choices with starts and the critical circuit; None where they can't be a plan.

    Exact to a relative 1e-8, by branching on the order of any two tasks that share a device.
    """
    if not (fits(problem, choices) and ties_hold(problem, choices)):
        return None
    return schedule(problem, precedence_graph(problem, choices))


def schedule(problem: SearchProblem, timed: PrecedenceGraph) -> Schedule | None:
    """As `evaluate`, of choices that fit."""
    net = net_of(timed)
    starts, circuit = np.zeros(len(timed.nodes)), np.zeros(len(timed.nodes) + 1, np.int64)
    period = least_period(net, problem.floor_seconds, starts, circuit, SCHEDULE_NODES)
    if not np.isfinite(period):
        return None
    names = [node.name for node in timed.nodes]
    members = [names[i] for i in circuit[: circuit.tolist().index(-1)]][::-1]
    first = min(range(len(members)), key=lambda i: names.index(members[i]), default=0)
    early = _early(problem, timed, starts, period) if period > 0 else _soonest(timed)
    return Schedule(period, dict(zip(names, early, strict=True)), tuple(members[first:] + members[:first]))


def precedence_graph(problem: SearchProblem, choices: Mapping[str, Choice]) -> PrecedenceGraph:
    """Nodes and arcs of the choices."""
    nodes: list[ScheduledNode] = []
    for task in problem.tasks:
        choice = choices[task.name]
        table = table_of(problem, task, choice)
        seconds, latency = float(table.seconds[choice.option]), float(table.latency[choice.option])
        nodes.append(ScheduledNode(task.name, (problem.meshes[choice.mesh],), seconds, latency))
    number = {node.name: i for i, node in enumerate(nodes)}
    arcs = [
        Arc(number[p.source], number[p.target], nodes[number[p.source]].latency + p.delay, p.distance)
        for p in problem.precedences
    ]
    for move in problem.moves:
        source, target = number[move.source], number[move.target]
        left, right = choices[move.source], choices[move.target]
        seconds = float(problem.move_seconds(move, left.mesh, right.mesh)[left.option, right.option])
        through = target
        if seconds > 0:
            through = len(nodes)
            both = nodes[source].meshes + nodes[target].meshes
            nodes.append(ScheduledNode(reallocation_node(move.target), both, seconds, seconds))
            arcs.append(Arc(through, target, seconds, 0))
        arcs.append(Arc(source, through, nodes[source].latency, move.distance))
    return PrecedenceGraph(tuple(nodes), tuple(arcs))


def net_of(timed: PrecedenceGraph) -> Net:
    """The arrays that the compiled functions read."""
    n, arcs = len(timed.nodes), len(timed.arcs)
    pairs = [(i, j) for j in range(n) for i in range(j) if timed.nodes[i].overlaps(timed.nodes[j])]
    net = new_net(n, arcs)
    net.size[:] = n, arcs, len(pairs)
    net.seconds[:] = [node.seconds for node in timed.nodes]
    net.source[:arcs] = [arc.source for arc in timed.arcs]
    net.target[:arcs] = [arc.target for arc in timed.arcs]
    net.cost[:arcs] = [arc.cost for arc in timed.arcs]
    net.distance[:arcs] = [arc.distance for arc in timed.arcs]
    for p, (i, j) in enumerate(pairs):
        net.left[p], net.right[p] = i, j
        net.apart[i, j] = net.apart[j, i] = 1
    return net


# --- ties -------------------------------------------------------------------------------------------------------------


def ties_hold(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    """True where tied tasks share a mesh, and a layout where that is asked."""
    tasks = {task.name: task for task in problem.tasks}
    for tie in problem.ties:
        layouts = {
            (choices[name].mesh, layout_of(problem, tasks[name], choices[name]) if tie.layout else 0)
            for name in tie.tasks
        }
        if len(layouts) > 1:
            return False
    return True


# --- orders -----------------------------------------------------------------------------------------------------------


def _early(problem: SearchProblem, timed: PrecedenceGraph, starts: Floats, period: float) -> list[float]:
    """The same schedule with each set of tasks that wait for each other moved by whole periods as early as can be.

    The first of them begin in [0, period).
    """
    n = len(timed.nodes)
    reach = np.eye(n, dtype=bool)
    for arc in timed.arcs:
        reach[arc.source, arc.target] = True
    for via in range(n):
        reach |= reach[:, via, None] & reach[None, via, :]
    early = starts.copy()
    together = [np.flatnonzero(reach[i] & reach[:, i]) for i in range(n)]
    for i in sorted(range(n), key=lambda i: int(reach[:, i].sum())):
        if together[i][0] != i:
            continue
        inside = set(together[i].tolist())
        waits = [
            early[arc.source] + arc.cost - arc.distance * period - early[arc.target]
            for arc in timed.arcs
            if arc.target in inside and arc.source not in inside
        ]
        room = -max(waits) if waits else float(early[together[i]].min())
        early[together[i]] -= floor(room / period + BOUNDARY_FRACTION) * period
    return [max(0.0, float(start)) if start > -BOUNDARY_FRACTION * period else float(start) for start in early]


def _soonest(timed: PrecedenceGraph) -> list[float]:
    """Starts of nodes that take no time and repeat at once: all steps are at one time, and only delays put them off."""
    starts = [0.0] * len(timed.nodes)
    for _ in starts:
        for arc in timed.arcs:
            starts[arc.target] = max(starts[arc.target], starts[arc.source] + arc.cost)
    return starts


def orders(problem: SearchProblem, solution: Solution) -> dict[int, tuple[Turn, ...]]:
    """Every device's tasks and moves in the order of one round; a device that nothing holds has an empty one.

    In round p, from p periods on, a device runs a task of step p + offset.
    """
    timed = precedence_graph(problem, solution.choices)
    nodes, turns = timed.nodes, _turns(timed, solution)
    shared: dict[tuple[int, ...], tuple[Turn, ...]] = {}
    holders: list[list[int]] = [[] for _ in range(problem.devices)]
    for place, turn in enumerate(turns):
        for device in sorted({device for mesh in nodes[turn[0]].meshes for device in mesh.devices}):
            holders[device].append(place)
    return {
        device: shared.setdefault(tuple(places), tuple(turns[place][1] for place in places))
        for device, places in enumerate(holders)
    }


def _turns(timed: PrecedenceGraph, solution: Solution) -> list[tuple[int, Turn]]:
    """Nodes by number, each with its turn, in the order in which they begin within a period.

    Of those that begin together the ones that take no time come first, and what waits for one of them after it:
    otherwise two devices could wait for each other.
    """
    period, starts = solution.period, [solution.starts[node.name] for node in timed.nodes]
    rounds = [floor(start / period + BOUNDARY_FRACTION) if period > 0 else 0 for start in starts]
    phase = [max(0.0, start - number * period) for start, number in zip(starts, rounds, strict=True)]
    near = SAME_MOMENT_FRACTION * period
    moment, before, last = [0] * len(starts), 0, 0.0
    for place, node in enumerate(sorted(range(len(starts)), key=lambda node: phase[node])):
        together = place > 0 and phase[node] - last <= near
        moment[node] = moment[before] + (not together) if place else 0
        before, last = node, last if together else phase[node]
    depth = [0] * len(starts)  # how many nodes of its moment a node waits for, one after the other
    at_once = [
        arc
        for arc in timed.arcs
        if arc.cost <= near
        and moment[arc.source] == moment[arc.target]
        and arc.distance == rounds[arc.source] - rounds[arc.target]
    ]
    for _ in starts:
        for arc in at_once:
            depth[arc.target] = max(depth[arc.target], depth[arc.source] + 1)

    def rank(node: int) -> tuple[int, bool, int, float, int]:
        return moment[node], timed.nodes[node].seconds > near, depth[node], starts[node], node

    return [(node, Turn(timed.nodes[node].name, -rounds[node])) for node in sorted(range(len(starts)), key=rank)]
