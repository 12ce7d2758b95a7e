"""Couplings of the mesh-holding calls of a request: precedences, moves of weights, ties. Pure.

Free calls (functions, advantages) hold no mesh, so the search never places them: a path through them is a delay.
"""

from collections.abc import Iterator, Mapping

from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner.plan.events import Dependency, EventGraph, graph_edges, period
from realgraph.planner.plan.problem import Move, Precedence, Tie
from realgraph.planner.request.request import PlanRequest

Edge = tuple[str, str, int]  # producer, consumer, distance in steps


def precedences(request: PlanRequest, free: Mapping[str, float]) -> tuple[Precedence, ...]:
    """Between mesh-holding calls, each path through free calls as the sum of their seconds in `free`.

    Of several paths with equal distance the longest counts; one that a shorter distance implies is left out.
    """
    holding = set(request.mesh_calls)
    edges = list(graph_edges(request.graph, request.workload.staleness))
    after: dict[str, list[tuple[str, int]]] = {}
    for producer, consumer, distance in edges:
        after.setdefault(producer, []).append((consumer, distance))
    longest: dict[Edge, float] = {}
    for source in request.mesh_calls:
        for target, distance, delay in _paths(source, after, holding, free):
            edge = (source, target, distance)
            longest[edge] = max(longest.get(edge, 0.0), delay)
    kept = [
        Precedence(*edge, delay)
        for edge, delay in longest.items()
        if not any(
            (source, target) == edge[:2] and distance < edge[2] and other >= delay
            for (source, target, distance), other in longest.items()
        )
    ]
    return tuple(precedence for precedence in kept if precedence.source != precedence.target or precedence.delay > 0)


def _paths(
    source: str, after: Mapping[str, list[tuple[str, int]]], holding: set[str], free: Mapping[str, float]
) -> Iterator[tuple[str, int, float]]:
    """Target, distance and delay of every path from `source` through free calls, each at most once on a path."""
    stack: list[tuple[str, int, float, tuple[str, ...]]] = [(source, 0, 0.0, ())]
    while stack:
        node, distance, delay, passed = stack.pop()
        for target, steps in after.get(node, ()):
            if target in holding:
                yield target, distance + steps, delay
            elif target not in passed:
                stack.append((target, distance + steps, delay + free.get(target, 0.0), (*passed, target)))


def free_floor(request: PlanRequest, free: Mapping[str, float]) -> float:
    """The period that the free calls alone need: each runs once a step, and some carry state from step to step."""
    names = [name for name, call in request.graph.calls.items() if isinstance(call, Function | Advantage)]
    if not names:
        return 0.0
    edges = graph_edges(request.graph, request.workload.staleness)
    dependencies = {Dependency(*edge) for edge in edges if edge[0] in names and edge[1] in names}
    dependencies |= {Dependency(name, name, 1) for name in names}
    return period(EventGraph({name: free.get(name, 0.0) for name in names}, tuple(sorted(dependencies)))).seconds


def readers(request: PlanRequest, role: str) -> tuple[str, ...]:
    """The calls that read the weights of a role without training it."""
    calls = request.graph.calls
    return tuple(n for n in request.mesh_calls if request.graph.role(n) == role and not isinstance(calls[n], Train))


def moves_of(request: PlanRequest) -> tuple[Move, ...]:
    """Trained weights to each call that reads them. Averages of a role's weights are made where it is trained."""
    return tuple(
        Move(producer, consumer, distance)
        for producer, consumer, distance in graph_edges(request.graph, request.workload.staleness)
        if isinstance(request.graph.calls[producer], Train)
        and isinstance(request.graph.calls[consumer], Generate | Inference)
        and request.graph.role(producer) == request.graph.role(consumer)
    )


def ties_of(request: PlanRequest) -> Iterator[Tie]:
    """Calls that lie on one mesh: train calls of one role, references that follow a role, and what the user shares."""
    graph = request.graph
    for role in graph.models:
        trains = train_calls(request, role)
        if len(trains) > 1:
            yield Tie(trains, layout=True)
        followers = [name for name, other in graph.models.items() if other.ema_rate is not None and other.init == role]
        for name in followers:
            calls = readers(request, name)
            if trains and calls:
                yield Tie((trains[0], *calls))
    for calls in request.constraints.share:
        if len(calls) > 1:
            yield Tie(tuple(calls))


def train_calls(request: PlanRequest, role: str) -> tuple[str, ...]:
    """The calls that train a role, in the graph's order; its optimizer states count with the first."""
    calls = request.graph.calls
    return tuple(n for n in request.mesh_calls if request.graph.role(n) == role and isinstance(calls[n], Train))
