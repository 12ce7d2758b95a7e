"""Turns of an asynchronous plan as late as training lets them be, so that a batch that is late holds up nothing.

A search has each call begin as early as it can: an inference call works on a batch as soon as it is predicted to be
there, in some plans periods before the batch is trained. Turns keep their order, so where generation takes longer than
predicted, the calls of older batches behind it wait on its devices, training among them. Whole periods later the call
has the same place in its round, with a batch that has been there for as long.
"""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.plan.events import EventGraph, empty_circuit, event_graph, liveness_graph, moved_calls
from realgraph.planner.plan.plan import Plan, reallocation_node

ROUNDING = 1e-6  # of a period


def with_late_turns(graph: Graph, plan: Plan, extra_seconds: Mapping[str, float]) -> Plan:
    """The plan in which inference and what is between it and training have their turns whole periods later, as many as
    its period leaves room for. Generation and training keep theirs, so that samples get no older.

    extra_seconds: see `event_graph`. The period stays; `starts` are those of the plan given.
    """
    if plan.staleness < 1 or plan.period_seconds <= 0:
        return plan
    later = _periods_later(graph, plan, extra_seconds)
    orders = {
        device: tuple(replace(turn, offset=turn.offset - later.get(turn.call, 0)) for turn in order)
        for device, order in plan.orders.items()
    }
    late = replace(plan, orders=orders)
    return late if empty_circuit(liveness_graph(graph, late)) is None else plan


def earliest_starts(events: EventGraph, period_seconds: float) -> dict[str, float]:
    """Seconds at which every node of step 0 may start at the earliest: longest paths."""
    starts = dict.fromkeys(events.seconds, 0.0)
    for _ in range(len(starts) + 1):
        for edge in events.dependencies:
            soonest = starts[edge.source] + events.seconds[edge.source] + edge.delay - edge.distance * period_seconds
            starts[edge.target] = max(starts[edge.target], soonest)
    return starts


def _periods_later(graph: Graph, plan: Plan, extra_seconds: Mapping[str, float]) -> dict[str, int]:
    """Whole periods by which each node that has a turn may begin later; 0 of those that no other waits for.

    A turn keeps its place in the round; what has none, such as an advantage, may begin at any time.
    """
    period_seconds = plan.period_seconds
    starts = earliest_starts(event_graph(graph, plan, extra_seconds, keeps_turns=False), period_seconds)
    data = event_graph(graph, replace(plan, orders={}), extra_seconds)  # turns move with what has them
    turns = {turn.call for order in plan.orders.values() for turn in order}
    stays = {name for name, call in graph.calls.items() if isinstance(call, Generate | Train)}
    stays |= {reallocation_node(name) for name in moved_calls(graph, plan) if name in stays}
    latest = {name: starts[name] if name in stays else math.inf for name in data.seconds}
    for _ in latest:
        for edge in data.dependencies:
            start = latest[edge.target] + edge.distance * period_seconds - edge.delay - data.seconds[edge.source]
            later = start - starts[edge.source]
            if edge.source in turns and math.isfinite(later):
                start = starts[edge.source] + math.floor(later / period_seconds + ROUNDING) * period_seconds
            if edge.source not in stays:
                latest[edge.source] = min(latest[edge.source], max(start, starts[edge.source]))
    periods = {name: (latest[name] - starts[name]) / period_seconds for name in turns & latest.keys()}
    return {name: round(number) if math.isfinite(number) else 0 for name, number in periods.items()}
