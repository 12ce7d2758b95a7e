"""`realgraph plan --explain CALL`: the call's next-best options beside the rest of the plan, and why each loses."""

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.planner.plan import Plan
from realgraph.planner.report.report import Option
from realgraph.planner.report.text import passes_text
from realgraph.planner.request import PlanRequest
from realgraph.planner.search.alternatives import Alternative, alternatives


def explained(request: PlanRequest, plan: Plan, call: str) -> tuple[Option, ...]:
    """The best first. Raises ConfigError for what is no call with devices."""
    if call not in request.mesh_calls:
        what = "holds no devices, so it has no options" if call in request.graph.calls else "is no call of the graph"
        where = Where("command line", path="--explain")
        raise ConfigError([Problem(where, f"{call!r} {what}", suggest(call, request.mesh_calls), "explain")])
    return tuple(_option(one) for one in alternatives(request, plan, call))


def _option(found: Alternative) -> Option:
    notes = passes_text(found.passes.recompute, found.passes.schedule, found.passes.chunks)
    if found.residency != "resident":
        notes.append("copy" if found.residency == "reallocated" else found.residency)
    return Option(found.layout, found.tokens, ", ".join(notes), found.seconds, found.period, found.reason)
