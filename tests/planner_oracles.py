"""Slow, plain answers to a planning problem, for tests: every choice, every order of two tasks that share a device.

The rules are read off the docstrings of `problem.py` and share no code with the search. A schedule of period T starts
task i of step k at s_i + k T. Two tasks on meeting meshes keep apart iff for some integer k
    s_j >= s_i + d_i - k T    and    s_i >= s_j + d_j - (1 - k) T,
which are two more edges of an event graph, of distances k and 1 - k: the period is its largest seconds / distance.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import reallocation_node
from realgraph.planner.plan.problem import Choice, Move, OptionTable, SearchProblem, SearchTask

NEVER = 10**6  # steps between two tasks that no path connects

Edges = list[tuple[int, int, float, int]]  # source, target, seconds, distance


class Node(Struct, frozen=True):
    """A task or a move of a plan: what it holds, for how long, and when its outputs are ready."""

    name: str
    meshes: tuple[DeviceMesh, ...]
    seconds: float
    latency: float


class Optimum(Struct, frozen=True):
    """The least period of all plans, with the choices and starts that reach it."""

    period: float
    choices: dict[str, Choice]
    starts: dict[str, float]
    evaluated: int


def table_of(problem: SearchProblem, task: SearchTask, choice: Choice) -> OptionTable:
    return problem.tables[task.tables[choice.mesh]]


def ties_hold(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    """True where tied tasks share a mesh and, where asked, a layout."""
    tables = {task.name: table_of(problem, task, choices[task.name]) for task in problem.tasks}
    for tie in problem.ties:
        meshes = {choices[name].mesh for name in tie.tasks}
        layouts = {int(tables[name].layout[choices[name].option]) for name in tie.tasks}
        if len(meshes) > 1 or (tie.layout and len(layouts) > 1):
            return False
    return True


# --- memory -----------------------------------------------------------------------------------------------------------


def fits(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    """True where every device and every node has the memory for what lies and runs there."""
    trained = {task.role for task in problem.tasks if task.trains}
    rows = [(task, choices[task.name], table_of(problem, task, choices[task.name])) for task in problem.tasks]
    trained_copies = {
        (task.role, choice.mesh, int(table.layout[choice.option])) for task, choice, table in rows if task.trains
    }
    host = np.zeros(len(problem.host_memory), np.int64)
    for device in range(problem.devices):
        copies: dict[tuple[object, ...], int] = {}
        largest = 0
        for task, choice, table in rows:
            if device not in problem.meshes[choice.mesh].devices:
                continue
            layout = int(table.layout[choice.option])
            copy = (task.role, choice.mesh, layout) if task.role not in trained else (task.name,)
            copies[copy] = max(copies.get(copy, 0), int(table.resident[choice.option]))
            in_place = not task.trains and (task.role, choice.mesh, layout) in trained_copies
            active = int(table.active[choice.option]) - in_place * int(table.shared[choice.option])
            largest = max(largest, active)
            host[device // problem.devices_per_node] += int(table.host[choice.option])
        if sum(copies.values()) + largest > problem.memory[device]:
            return False
    return bool((host <= problem.host_memory).all())


# --- the period of fixed choices --------------------------------------------------------------------------------------


def nodes_of(problem: SearchProblem, choices: Mapping[str, Choice]) -> tuple[list[Node], Edges]:
    """Tasks, moves that take time, and what waits for what; each node also waits for its own last instance."""
    nodes: list[Node] = []
    for task in problem.tasks:
        choice = choices[task.name]
        table = table_of(problem, task, choice)
        seconds, latency = float(table.seconds[choice.option]), float(table.latency[choice.option])
        nodes.append(Node(task.name, (problem.meshes[choice.mesh],), seconds, latency))
    number = {node.name: i for i, node in enumerate(nodes)}
    edges = [
        (number[p.source], number[p.target], nodes[number[p.source]].latency + p.delay, p.distance)
        for p in problem.precedences
    ]
    for move in problem.moves:
        source, target = number[move.source], number[move.target]
        seconds = seconds_of_move(problem, move, choices)
        through = target
        if seconds > 0:
            held = nodes[source].meshes + nodes[target].meshes
            through = len(nodes)
            nodes.append(Node(reallocation_node(move.target), held, seconds, seconds))
            edges.append((through, target, seconds, 0))
        edges.append((source, through, nodes[source].latency, move.distance))
    edges += [(i, i, node.seconds, 1) for i, node in enumerate(nodes)]
    return nodes, edges


def seconds_of_move(problem: SearchProblem, move: Move, choices: Mapping[str, Choice]) -> float:
    source, target = choices[move.source], choices[move.target]
    return float(problem.move_seconds(move, source.mesh, target.mesh)[source.option, target.option])


def meeting(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """The pairs that share a device."""
    return [
        (i, j)
        for i, j in combinations(range(len(nodes)), 2)
        if any(left.overlaps(right) for left in nodes[i].meshes for right in nodes[j].meshes)
    ]


def least_period(
    problem: SearchProblem, choices: Mapping[str, Choice], below: float = float("inf")
) -> tuple[float, dict[str, float]] | None:
    """The exact period of these choices and starts that reach it; None where it isn't less than `below`.

    What waits for a set of nodes but is not waited for by it may come any number of periods later: such edges bound no
    period and are met at the end. All other orders of meeting pairs are tried, the one with the least period first.
    """
    nodes, edges = nodes_of(problem, choices)
    n = len(nodes)
    distance = least_distance(n, edges)
    circular = [edge for edge in edges if distance[edge[1], edge[0]] < NEVER // 2]
    root = critical_ratio(n, circular, problem.floor_seconds, below)
    best: tuple[float, list[float]] | None = None
    stack = [] if root is None else [(root, circular, meeting(nodes))]
    while stack:
        found, fixed, free = stack.pop()
        if found[0] >= (below if best is None else best[0]):
            continue
        if not free:
            best = found
            continue
        (i, j), integers = narrowest(n, fixed, free)
        left = [pair for pair in free if pair != (i, j)]
        children = []
        for k in integers:
            apart = [*fixed, (i, j, nodes[i].seconds, k), (j, i, nodes[j].seconds, 1 - k)]
            ratio = critical_ratio(n, apart, found[0], below if best is None else best[0])
            if ratio is not None:
                children.append((ratio, apart, left))
        stack += sorted(children, key=lambda child: -child[0][0])
    if best is None:
        return None
    period, starts = best
    return period, {node.name: s for node, s in zip(nodes, put_off(starts, edges, period), strict=True)}


def put_off(starts: Sequence[float], edges: Edges, period: float) -> list[float]:
    """Starts that also meet the edges out of circuits, by whole periods: what waits is put off with all its circuit."""
    distance = least_distance(len(starts), edges)
    later = list(starts)
    while True:
        late = [
            (target, later[source] + seconds - h * period - later[target])
            for source, target, seconds, h in edges
            if distance[target, source] > NEVER // 2
        ]
        behind = [(target, amount) for target, amount in late if amount > 1e-9 * max(1.0, period)]
        if not behind:
            return later
        target, amount = behind[0]
        for node in range(len(later)):  # all that waits for `target`, itself included
            if distance[target, node] < NEVER // 2:
                later[node] += int(np.ceil(amount / period)) * period


def critical_ratio(n: int, edges: Edges, floor: float, below: float) -> tuple[float, list[float]] | None:
    """The largest seconds / distance of a circuit (at least `floor`) and longest paths; None unless it is < `below`."""
    period = floor
    while period < below:
        starts, via = [0.0] * n, [(-1, 0.0, 0)] * n
        last = -1
        for _ in range(n + 1):
            last = -1
            for source, target, seconds, distance in edges:
                reached = starts[source] + seconds - distance * period
                if reached > starts[target] + 1e-9:
                    starts[target], via[target], last = reached, (source, seconds, distance), target
            if last < 0:
                return period, starts
        for _ in range(n):
            last = via[last][0]
        node, seconds, distance = last, 0.0, 0
        while True:
            source, w, h = via[node]
            seconds, distance, node = seconds + w, distance + h, source
            if node == last:
                break
        if distance <= 0:
            return None
        period = max(seconds / distance, period * (1 + 1e-12))
    return None


def least_distance(n: int, edges: Edges) -> npt.NDArray[np.int64]:
    """[n, n]: the least distance of a path between two nodes; about NEVER where there is none."""
    distance = np.full((n, n), NEVER, np.int64)
    np.fill_diagonal(distance, 0)
    for source, target, _, h in edges:
        distance[source, target] = min(distance[source, target], h)
    for middle in range(n):
        np.minimum(distance, distance[:, middle, None] + distance[None, middle, :], out=distance)
    return distance


def narrowest(n: int, edges: Edges, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], Sequence[int]]:
    """The pair with the fewest integers k, and these: no circuit may be left without a token.

    Where no path connects the two, shifting one with all of its circuit by whole periods changes no meeting: k = 0
    stands for all.
    """
    distance = least_distance(n, edges)
    best: tuple[tuple[int, int], Sequence[int]] | None = None
    for i, j in pairs:
        there, back = int(distance[i, j]), int(distance[j, i])
        integers = range(1 - back, there + 1) if there < NEVER // 2 else [0]
        if best is None or len(integers) < len(best[1]):
            best = (i, j), integers
        if len(integers) <= 1:
            break
    assert best is not None
    return best


# --- all choices ------------------------------------------------------------------------------------------------------


def every_choice(problem: SearchProblem, task: SearchTask) -> list[Choice]:
    return [Choice(mesh, o) for mesh, table in sorted(task.tables.items()) for o in range(len(problem.tables[table]))]


def brute_force(problem: SearchProblem) -> Optimum | None:
    """The best of all combinations of choices; None where none fits into memory.

    Combinations come by rising load of their busiest device, which no period undercuts, so the rest can be left out.
    """
    options = [every_choice(problem, task) for task in problem.tasks]
    best: Optimum | None = None
    evaluated = 0
    for load, row in _by_load(problem, options):
        limit = float("inf") if best is None else best.period
        if max(load, problem.floor_seconds) >= limit:
            break
        choices = {task.name: options[i][row[i]] for i, task in enumerate(problem.tasks)}
        if not (ties_hold(problem, choices) and fits(problem, choices)):
            continue
        evaluated += 1
        found = least_period(problem, choices, limit)
        if found is not None:
            best = Optimum(found[0], choices, found[1], evaluated)
    return best


def _by_load(problem: SearchProblem, options: Sequence[Sequence[Choice]]) -> Iterator[tuple[float, list[int]]]:
    shape = [len(choices) for choices in options]
    grid = np.indices(shape).reshape(len(shape), -1)
    load = np.zeros((problem.devices, grid.shape[1]))
    for i, (task, choices) in enumerate(zip(problem.tasks, options, strict=True)):
        held: npt.NDArray[np.float64] = np.zeros((problem.devices, len(choices)))
        for column, choice in enumerate(choices):
            mesh = problem.meshes[choice.mesh]
            held[mesh.first : mesh.first + mesh.n_devices, column] = table_of(problem, task, choice).seconds[
                choice.option
            ]
        load += held[:, grid[i]]
    busiest = load.max(axis=0)
    for column in np.argsort(busiest, kind="stable"):
        yield float(busiest[column]), [int(row) for row in grid[:, column]]


# --- checks of an answer ----------------------------------------------------------------------------------------------


def violations(
    problem: SearchProblem, choices: Mapping[str, Choice], starts: Mapping[str, float], period: float
) -> list[str]:
    """Rules that an unrolled schedule of six periods breaks, in words."""
    nodes, edges = nodes_of(problem, choices)
    slack = 1e-6 * max(1.0, period)
    wrong = [f"no start of {node.name}" for node in nodes if node.name not in starts]
    if wrong:
        return wrong
    for source, target, seconds, distance in edges:
        late = starts[nodes[source].name] + seconds - distance * period - starts[nodes[target].name]
        if late > slack:
            wrong.append(f"{nodes[target].name} starts {late:.6f} s before {nodes[source].name} is done")
    for i, j in meeting(nodes):
        a, b = nodes[i], nodes[j]
        gap = starts[b.name] - starts[a.name]
        nearest = int(np.floor(gap / period))
        for step in range(nearest - 3, nearest + 4):  # instances of b that could touch instance 0 of a
            begin = gap - step * period
            overlap = min(a.seconds, begin + b.seconds) - max(0.0, begin)
            if overlap > slack:
                wrong.append(f"{a.name} of step 0 and {b.name} of step {-step} overlap for {overlap:.6f} s")
    return wrong
