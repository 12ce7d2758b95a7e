"""`realgraph plan --explain CALL`: the call's next-best options beside the rest of the plan, and why each loses."""

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.planner.advise.alternatives import Alternative, alternatives
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.format import change_text, seconds_text
from realgraph.planner.request.request import PlanRequest

SAME_FRACTION = 1e-6  # relative: periods closer than this are equal
NOTHING_SECONDS = 5e-7  # less is shown as no time


def refuse_free(request: PlanRequest, call: str) -> None:
    """Raise ConfigError for what is no call with devices."""
    if call not in request.mesh_calls:
        what = "holds no devices, so it has no options" if call in request.graph.calls else "is no call of the graph"
        where = Where("command line", path="--explain")
        raise ConfigError([Problem(where, f"{call!r} {what}", suggest(call, request.mesh_calls), "explain")])


def explained(request: PlanRequest, plan: Plan, call: str) -> tuple[Alternative, ...]:
    """The best first, each with what it costs beside the plan or why it does not fit."""
    own = plan.allocations[call].seconds
    ranked = alternatives(request, plan, call)
    return tuple(replace(one, reason=_why(one, plan.period_seconds, own)) for one in ranked)


def _why(alternative: Alternative, period: float, seconds: float) -> str:
    """period, seconds: the plan's, and those of the call in it."""
    if alternative.period_seconds is None:
        return alternative.reason
    call = f"call {difference(alternative.seconds - seconds)}"
    change = change_text(alternative.period_seconds / period)
    within = ": within what the search left open" if alternative.period_seconds < period * (1 - SAME_FRACTION) else ""
    return f"{'a step as long' if change == 'equal' else f'{change} a step'}; {call}{within}"


def difference(seconds: float) -> str:
    """`0.778 s more`, `41.2 ms less`, `as long`."""
    if abs(seconds) < NOTHING_SECONDS:
        return "as long"
    return f"{seconds_text(abs(seconds))} {'more' if seconds > 0 else 'less'}"
