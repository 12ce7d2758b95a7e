"""`realgraph plan --explain CALL`: the call's next-best options beside the rest of the plan, and why each loses."""

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.planner.advise.alternatives import Alternative, alternatives
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.content import Option
from realgraph.planner.report.format import change_text, seconds_text
from realgraph.planner.report.text import passes_text
from realgraph.planner.request.request import PlanRequest

SAME = 1e-6  # relative: periods closer than this are equal
NOTHING = 5e-7  # seconds


def refuse_free(request: PlanRequest, call: str) -> None:
    """Raise ConfigError for what is no call with devices."""
    if call not in request.mesh_calls:
        what = "holds no devices, so it has no options" if call in request.graph.calls else "is no call of the graph"
        where = Where("command line", path="--explain")
        raise ConfigError([Problem(where, f"{call!r} {what}", suggest(call, request.mesh_calls), "explain")])


def explained(request: PlanRequest, plan: Plan, call: str) -> tuple[Option, ...]:
    """The best first."""
    own = plan.allocations[call].seconds
    return tuple(_option(one, plan.period_seconds, own) for one in alternatives(request, plan, call))


def _option(found: Alternative, period: float, seconds: float) -> Option:
    """period, seconds: the plan's, and those of the call in it."""
    notes = passes_text(found.passes.recompute, found.passes.schedule, found.passes.chunks)
    if found.residency != "resident":
        notes.append("copy" if found.residency == "reallocated" else found.residency)
    return Option(
        found.layout, found.tokens, ", ".join(notes), found.seconds, found.period, _why(found, period, seconds)
    )


def _why(found: Alternative, period: float, seconds: float) -> str:
    """What it costs, or why it does not fit."""
    if found.period is None:
        return found.reason
    call = f"call {difference(found.seconds - seconds)}"
    change = change_text(found.period / period)
    within = ": within what the search left open" if found.period < period * (1 - SAME) else ""
    return f"{'a step as long' if change == 'equal' else f'{change} a step'}; {call}{within}"


def difference(seconds: float) -> str:
    """`0.778 s more`, `41.2 ms less`, `as long`."""
    if abs(seconds) < NOTHING:
        return "as long"
    return f"{seconds_text(abs(seconds))} {'more' if seconds > 0 else 'less'}"
