"""The call during which an offloaded call's states may come back from host memory: the one before it on its devices."""

from collections.abc import Sequence

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Inference, Train
from realgraph.planner.plan.plan import Plan, Turn


def turn_before(order: Sequence[Turn], call: str) -> tuple[str, int] | None:
    """The turn before a call's in the cyclic order of a device, and how many steps earlier than the call's it is;
    None where the device has no turn of the call, or no other."""
    calls = [turn.call for turn in order]
    if call not in calls or len(calls) == 1:
        return None
    place = calls.index(call)
    before, own = order[place - 1], order[place]
    return before.call, own.offset - before.offset + (place == 0)


def call_before(graph: Graph, plan: Plan, call: str) -> str:
    """The call that is before an offloaded one on all its devices, and beside which nothing else runs there; '' where
    there is none.

    A generate call fills its devices with caches, and a stream of generation goes on between any two others. Calls of
    one role may read one copy.
    """
    orders = [plan.orders.get(device, ()) for device in plan.allocations[call].layout.mesh.devices]
    found = {turn_before(order, call) for order in orders}
    before = next(iter(found))
    if len(found) > 1 or before is None or not isinstance(graph.calls.get(before[0]), Inference | Train):
        return ""
    beside = {turn.call for order in set(orders) for turn in order}
    alone = plan.staleness == 0 and len(graph.generates) < 2  # generation, in its turn
    streams = not alone and any(isinstance(graph.calls.get(name), Generate) for name in beside)
    return "" if streams or graph.role(before[0]) == graph.role(call) else before[0]
