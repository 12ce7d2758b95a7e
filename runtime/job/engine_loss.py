"""The workers without which an asynchronous run can go on."""

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.planner.plan.axes import session_groups
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


def replacement_mistake(graph: Graph, plan: Plan) -> tuple[str, str] | None:
    """The reason why an engine of an asynchronous plan can't be replaced, and what to do about it: it has several
    workers, whose process groups take nobody in again. None where each has one."""
    if len(graph.generates) != 1 or not plan.staleness:
        return None
    name = graph.generates[0]
    n_workers = max(len(session) for session in session_groups(plan.allocations[name].layout))
    if n_workers == 1:
        return None
    text = f"an engine of {name!r} has {n_workers} workers, and only those of one are replaced"
    return text, "give the call its devices as dp, or leave rollout.replacements out: a lost engine then ends the run"


def shares_tokens(graph: Graph, plan: Plan) -> bool:
    """True where engines tell each other what they have drawn, so that others go on from it. The experts that tokens
    went to do not travel with them."""
    several = len(expendable_workers(graph, plan)) > 1
    return several and not graph.models[graph.role(graph.generates[0])].routing_replay
