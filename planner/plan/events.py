"""A plan as a timed event graph: its steady period, the circuit that bounds it, and the circuit that would deadlock it.

A node is a call with its predicted seconds. A dependency source -> target of distance h says: `target` of step k starts
after `source` of step k - h has ended (steps before the first count as done). A circuit's distance is the sum of its
dependencies' (the tokens of a Petri net). Such a system never deadlocks iff every circuit's distance is 1 or more, and
its period is the largest seconds / distance of a circuit (Baccelli, Cohen, Olsder, Quadrat: Synchronization and
Linearity, 1992, theorems 2.38 and 3.28).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Function, Generate, Train
from realgraph.planner.plan.plan import Plan, Turn, reallocation_node
from realgraph.planner.plan.prefetch import turn_before
from realgraph.planner.plan.residency import reallocations


class Dependency(Struct, frozen=True, order=True):
    """`target` of step k starts `delay` seconds or more after `source` of step k - `distance` has ended.

    Distances may be negative. The delay is that of outputs which come later than the devices are free.
    """

    source: str
    target: str
    distance: int
    delay: float = 0.0


class EventGraph(Struct, frozen=True):
    """Seconds of every node, and the dependencies between them."""

    seconds: dict[str, float]
    dependencies: tuple[Dependency, ...]
    # nodes that share a device, in whatever order, so that a period has room for all of them: a circuit of distance 1
    # each
    loads: tuple[tuple[str, ...], ...] = ()


class Period(Struct, frozen=True):
    """Steady-state seconds a step, and the critical circuit: each node waits for the one before it."""

    seconds: float
    circuit: tuple[str, ...]


def event_graph(graph: Graph, plan: Plan, extra_seconds: Mapping[str, float], keeps_turns: bool = True) -> EventGraph:
    """Calls of the graph under the plan's device orders.

    What reads a call's outputs waits for its latency; what follows it on a device waits for its seconds. A stream of
    generation begins batches `ahead` of the one it completes, so it needs the weights for these. What is prefetched
    comes from the start of the call before on; its own call waits for it. extra_seconds: of free
    calls, which the plan does not price, and of reallocation nodes where not the plan's; 0 where absent. keeps_turns:
    whether a stream and its reallocation wait for their turns, as a search has it; in the runtime the stream stands
    still while others have its devices, whenever that is, and new weights arrive right after they are trained.
    """
    moved = moved_calls(graph, plan)
    seconds = {name: extra_seconds.get(name, 0.0) for name in graph.calls}
    seconds |= {name: allocation.seconds for name, allocation in plan.allocations.items()}
    seconds |= {
        reallocation_node(call): extra_seconds.get(reallocation_node(call), plan.reallocation_seconds.get(call, 0.0))
        for call in moved
    }
    late = {
        name: a.latency_seconds - a.seconds if a.ahead else max(0.0, a.latency_seconds - a.seconds)
        for name, a in plan.allocations.items()
    }
    dependencies = {Dependency(name, name, 1) for name in seconds}
    for source, target, distance in graph_edges(graph, plan.staleness):
        if target in plan.allocations and isinstance(graph.calls[source], Train):
            distance -= plan.allocations[target].ahead
        if target in moved and source == moved[target]:
            dependencies.add(Dependency(source, reallocation_node(target), distance))
            dependencies.add(Dependency(reallocation_node(target), target, 0))
        else:
            dependencies.add(Dependency(source, target, distance, late.get(source, 0.0)))
    dependencies.update(_prefetches(plan, seconds))
    planned = {turn.call for order in plan.orders.values() for turn in order}
    implied = {call: train for call, train in moved.items() if reallocation_node(call) not in planned}
    stream = "" if keeps_turns else stream_call(graph, plan)
    arrival = _arrival(graph, plan, stream)
    loads: set[tuple[str, ...]] = set()
    for order in set(plan.orders.values()):
        turns = _with_reallocations([turn for turn in order if turn.call in seconds], implied)
        dependencies.update(_order_edges(_without_stream(turns, stream, arrival)))
        if any(turn.call == stream for turn in turns):
            loads.add(_in_order(seconds, [turn.call for turn in turns]))
    known = tuple(sorted(d for d in dependencies if d.source in seconds and d.target in seconds))
    return EventGraph(seconds, known, tuple(sorted(loads)))


def _prefetches(plan: Plan, seconds: Mapping[str, float]) -> Iterator[Dependency]:
    """An offloaded call starts when its states have come, which the call before it may not be long enough for."""
    for name, allocation in plan.allocations.items():
        found = turn_before(plan.orders.get(allocation.layout.mesh.first, ()), name)
        if found is not None and found[0] == allocation.prefetch_during:
            left = max(0.0, allocation.prefetch_seconds - seconds[found[0]])
            yield Dependency(found[0], name, found[1], left)


def stream_call(graph: Graph, plan: Plan) -> str:
    """The call that generates while weights are trained; empty where none does."""
    return next((name for name in graph.generates if plan.staleness > 0 and name in plan.allocations), "")


def liveness_graph(graph: Graph, plan: Plan) -> EventGraph:
    """The events that the runtime waits for, without seconds: a session counts by the batch that it completes, takes
    its turn as other calls do, and gets its weights in no fixed order."""
    stream = stream_call(graph, plan)
    if not stream:
        return event_graph(graph, plan, {})
    allocations = {**plan.allocations, stream: replace(plan.allocations[stream], ahead=0)}
    moved = reallocation_node(stream)
    orders = {device: tuple(turn for turn in order if turn.call != moved) for device, order in plan.orders.items()}
    return event_graph(graph, replace(plan, allocations=allocations, orders=orders), {})


def moved_calls(graph: Graph, plan: Plan) -> dict[str, str]:
    """call -> the train call whose weights are brought to it: copies of its own, and what waits in host memory."""
    moved = reallocations(graph, plan.allocations)
    for role, trains in _trains(graph).items():
        for name, allocation in plan.allocations.items():
            if allocation.residency == "reallocated" and graph.role(name) == role:
                moved.setdefault(name, trains[-1])
    return moved


def graph_edges(graph: Graph, staleness: int) -> Iterator[tuple[str, str, int]]:
    """Data edges, and weight edges: generation is up to 1 + `staleness` steps behind training, the rest as compiled.

    Train calls of one role follow each other, and the next step's first waits for this step's last. What works on a
    batch waits for all generate calls: a batch is made of groups with which all are done.
    """
    for edge in graph.edges:
        if edge.role and isinstance(graph.calls[edge.consumer], Generate):
            yield edge.producer, edge.consumer, 1 + staleness
        else:
            yield edge.producer, edge.consumer, edge.distance
    yield from _batch_edges(graph, staleness)
    for trains in _trains(graph).values():
        yield from ((before, after, 0) for before, after in pairwise(trains))
        yield trains[-1], trains[0], 1


def _batch_edges(graph: Graph, staleness: int) -> Iterator[tuple[str, str, int]]:
    """From each of several generate calls to what works on a batch, where one call alone is before that by its keys;
    from the later ones to the first one's samples of a batch to come: its session ends with the batch."""
    batched = [n for n, call in graph.calls.items() if not isinstance(call, Generate | Function)]
    batched += [n for n, call in graph.calls.items() if isinstance(call, Function) and call.over == "batch"]
    if len(graph.generates) > 1:
        yield from ((generate, name, 0) for generate in graph.generates for name in batched)
        yield from ((later, graph.generates[0], 1 + staleness) for later in graph.generates[1:])


def _trains(graph: Graph) -> dict[str, list[str]]:
    trains: dict[str, list[str]] = {}
    for name, call in graph.calls.items():
        if isinstance(call, Train):
            trains.setdefault(call.model, []).append(name)
    return trains


def _with_reallocations(order: Sequence[Turn], moved: Mapping[str, str]) -> tuple[Turn, ...]:
    """A reallocation that the orders do not name takes the copy's devices just before its call.

    From the trained copy's other devices it takes a moment between two of their calls, in no fixed order.
    """
    turns: list[Turn] = []
    for turn in order:
        if turn.call in moved:
            turns.append(Turn(reallocation_node(turn.call), turn.offset))
        turns.append(turn)
    return tuple(turns)


def _arrival(graph: Graph, plan: Plan, stream: str) -> tuple[str, Turn] | None:
    """The train call whose end brings a stream new weights, and the turn of these, were its own of step 0."""
    trainer = moved_calls(graph, plan).get(stream)
    if trainer is None:
        return None
    return trainer, Turn(reallocation_node(stream), 1 + plan.staleness - plan.allocations[stream].ahead)


def _without_stream(order: Sequence[Turn], stream: str, arrival: tuple[str, Turn] | None) -> tuple[Turn, ...]:
    """An open session runs whenever nothing else does, and gets new weights as soon as they are trained."""
    turns: list[Turn] = []
    for turn in order:
        if turn.call not in (stream, reallocation_node(stream)):
            turns.append(turn)
        if arrival is not None and turn.call == arrival[0]:
            turns.append(replace(arrival[1], offset=arrival[1].offset + turn.offset))
    return tuple(turns)


def _order_edges(order: Sequence[Turn]) -> Iterator[Dependency]:
    """The cyclic order of one device; the distance of its own circuit is always 1."""
    for before, after in pairwise(order):
        yield Dependency(before.call, after.call, after.offset - before.offset)
    if order:
        yield Dependency(order[-1].call, order[0].call, 1 + order[0].offset - order[-1].offset)


# --- circuits ---------------------------------------------------------------------------------------------------------


def empty_circuit(events: EventGraph) -> tuple[str, ...] | None:
    """A circuit of a distance below 1: its calls wait for each other for ever. None where the graph is live.

    Exact: a circuit of at most n edges has sum(h) <= 0 iff sum(1 - (n + 1) h) > 0, in integers.
    """
    scale = len(events.seconds) + 1
    circuit = _positive_circuit(events, lambda dependency: 1 - scale * dependency.distance)
    return None if circuit is None else _named(events, circuit)


def period(events: EventGraph) -> Period:
    """The largest seconds / distance of a circuit, and that circuit. Raises ValueError where a circuit is empty.

    Newton's iteration on the ratio: while some circuit has seconds - ratio x distance > 0, its ratio is the next.
    """
    stuck = empty_circuit(events)
    if stuck is not None:
        raise ValueError(f"the circuit {show_circuit(stuck)} has a distance below 1")
    alone = [(seconds, (name,)) for name, seconds in events.seconds.items()]
    loads = [(sum(events.seconds[name] for name in names), names) for names in events.loads]
    ratio, critical = max([*loads, *alone], key=lambda one: one[0])
    for _ in range(10_000):
        gain = _gain(events, ratio)
        circuit = _positive_circuit(events, gain)
        if circuit is None:
            return Period(ratio, critical)
        distance = sum(dependency.distance for dependency in circuit)
        better = sum(events.seconds[dependency.source] + dependency.delay for dependency in circuit) / distance
        if better <= ratio:  # equal up to rounding
            return Period(ratio, critical)
        ratio, critical = better, _named(events, circuit)
    raise AssertionError("the ratio rises at every iteration over finitely many circuits")


def show_circuit(circuit: Sequence[str]) -> str:
    """`ref -> actor_train -> generate -> ref`."""
    return " -> ".join([*circuit, circuit[0]])


def _gain(events: EventGraph, ratio: float) -> Callable[[Dependency], float]:
    return lambda dependency: events.seconds[dependency.source] + dependency.delay - ratio * dependency.distance


def _positive_circuit(events: EventGraph, weight: Callable[[Dependency], float]) -> tuple[Dependency, ...] | None:
    """A circuit of positive total weight by Bellman-Ford longest paths from everywhere; None where there is none."""
    weighted = [(dependency, weight(dependency)) for dependency in events.dependencies]
    tolerance = 1e-12 * max((abs(value) for _, value in weighted), default=0.0)
    longest = dict.fromkeys(events.seconds, 0.0)
    via: dict[str, Dependency] = {}
    last = ""
    for _ in range(len(longest) + 1):
        last = ""
        for dependency, value in weighted:
            reached = longest[dependency.source] + value
            if reached > longest[dependency.target] + tolerance:
                longest[dependency.target], via[dependency.target], last = reached, dependency, dependency.target
        if not last:
            return None
    for _ in range(len(longest)):  # walk back into the circuit
        last = via[last].source
    circuit, node = [via[last]], via[last].source
    while node != last:
        circuit.append(via[node])
        node = via[node].source
    return tuple(reversed(circuit))


def _named(events: EventGraph, circuit: Sequence[Dependency]) -> tuple[str, ...]:
    """The circuit's nodes, beginning with the earliest in the graph's order."""
    return _in_order(events.seconds, [dependency.source for dependency in circuit])


def _in_order(seconds: Mapping[str, float], circuit: Sequence[str]) -> tuple[str, ...]:
    rank = {name: i for i, name in enumerate(seconds)}
    start = min(range(len(circuit)), key=lambda i: rank[circuit[i]])
    return (*circuit[start:], *circuit[:start])
