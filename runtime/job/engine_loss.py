"""The workers without which an asynchronous run can go on."""

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.planner.plan.plan import Plan


def expendable_workers(graph: Graph, plan: Plan) -> frozenset[int]:
    """Engines of one device that do nothing but generate what is trained on, while training goes on: where the plan is
    asynchronous, one call generates, and no other call has any of its devices."""
    trained = {call.model for call in graph.calls.values() if isinstance(call, Train)}
    if len(graph.generates) != 1 or not plan.staleness or graph.role(graph.generates[0]) not in trained:
        return frozenset()
    name = graph.generates[0]
    layout = plan.allocations[name].layout
    mine = frozenset(layout.mesh.devices)
    others = {device for other, its in plan.allocations.items() if other != name for device in its.layout.mesh.devices}
    return mine if layout.dp == len(mine) and layout.ep == 1 and mine.isdisjoint(others) else frozenset()


def shares_tokens(graph: Graph, plan: Plan) -> bool:
    """True where engines tell each other what they have drawn, so that others go on from it. The experts that tokens
    went to do not travel with them."""
    several = len(expendable_workers(graph, plan)) > 1
    return several and not graph.models[graph.role(graph.generates[0])].routing_replay
