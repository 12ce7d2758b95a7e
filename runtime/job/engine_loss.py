"""The engines without which an asynchronous run can go on."""

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.planner.plan.axes import session_groups
from realgraph.planner.plan.plan import Plan


def expendable_engines(graph: Graph, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The workers, ascending, of each engine that does nothing but generate what is trained on, while training goes on:
    where the plan is asynchronous, one call generates, and no other call has any of its devices. Data-parallel ranks
    that share experts generate together, and are one."""
    trained = {call.model for call in graph.calls.values() if isinstance(call, Train)}
    if len(graph.generates) != 1 or not plan.staleness or graph.role(graph.generates[0]) not in trained:
        return ()
    name = graph.generates[0]
    layout = plan.allocations[name].layout
    others = {device for other, its in plan.allocations.items() if other != name for device in its.layout.mesh.devices}
    return session_groups(layout) if others.isdisjoint(layout.mesh.devices) else ()


def expendable_workers(graph: Graph, plan: Plan) -> frozenset[int]:
    """All workers of `expendable_engines`."""
    return frozenset(worker for engine in expendable_engines(graph, plan) for worker in engine)


def meeting_worker(graph: Graph, plan: Plan, n_workers: int) -> int:
    """The worker in whose store all meet: the first that the run can't go on without."""
    return min(set(range(n_workers)) - expendable_workers(graph, plan))


def shares_tokens(graph: Graph, plan: Plan) -> bool:
    """True where engines tell each other what they have drawn, so that others go on from it. The experts that tokens
    went to do not travel with them."""
    several = len(expendable_engines(graph, plan)) > 1
    return several and not graph.models[graph.role(graph.generates[0])].routing_replay
