"""The engines that a plan must have for evaluations that the run does not wait for (`eval.on`)."""

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.planner.plan.axes import session_groups
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.residency import dropped_copies, shares_trained_copy
from realgraph.runtime.job.job import EvalOn


def eval_on_mistake(graph: Graph, plan: Plan, on: EvalOn) -> tuple[str, str] | None:
    """The reason why no engine can evaluate while the run goes on, and what to do about it; None where nothing does."""
    name = next(iter(graph.generates), "")
    trains = [n for n, c in graph.calls.items() if isinstance(c, Train) and name and c.model == graph.role(name)]
    if not plan.staleness or not trains:
        what = "nothing generates by weights that are trained" if not trains else "the plan is synchronous"
        return f"{what}, so nothing goes on during an evaluation", "set staleness to 1 or more, or leave eval.on out"
    if len(graph.generates) > 1:
        return "the graph generates more than once, and only one of the calls evaluates", "leave eval.on out"
    own = plan.allocations[name]
    shared = shares_trained_copy(graph.calls[name], own, plan.allocations[trains[-1]])
    if shared or name in dropped_copies(graph, plan.allocations, plan.staleness):
        text = f"{name!r} generates on the devices of other calls, whose weights change during an evaluation"
        return text, f"pin it to devices of its own: allocation: {{{name}: {{first: ..., devices: ...}}}}"
    if on != "interleaved":
        n_engines = len(session_groups(own.layout))
        if own.layout.dp < 2 or n_engines < own.layout.dp:
            text = f"{name!r} has one engine, which can't be set aside"
            return text, "give the call more devices as dp, or set eval.on to interleaved"
    return None
