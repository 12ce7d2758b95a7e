"""The error bar of a plan's period, from the calls and moves on its critical circuit."""

from collections.abc import Iterator
from math import hypot

from realgraph.planner.costs.spread import SPREADS, SpreadPhase, bar_of, measured_deviation
from realgraph.planner.options.calls import free_seconds, phase_of
from realgraph.planner.plan.plan import REALLOCATION, Plan
from realgraph.planner.request.request import PlanRequest


def calls_error(request: PlanRequest, plan: Plan) -> float:
    """Deviation of the seconds on the critical circuit, as `costs/spread.py` has it: calls of one phase err together,
    phases independently of each other, and functions not at all. 0 where no call's error is known."""
    if not any(plan.allocations[name].error for name in plan.bottleneck if name in plan.allocations):
        return 0.0
    off: dict[SpreadPhase, float] = {}
    total = 0.0
    for phase, seconds, error in _nodes(request, plan):
        off[phase] = off.get(phase, 0.0) + seconds * error
        total += seconds
    return hypot(*off.values()) / total if total > 0 else 0.0


def moves_error(request: PlanRequest) -> float:
    """Deviation of the seconds of a move of weights."""
    known = request.costs.phases.get("reallocate")
    return max(known.error if known is not None else 0.0, measured_deviation("reallocate", cpu=request.cluster.is_cpu))


def _nodes(request: PlanRequest, plan: Plan) -> Iterator[tuple[SpreadPhase, float, float]]:
    """Phase, seconds and deviation of each node of the circuit."""
    free, moves = free_seconds(request), moves_error(request)
    for name in plan.bottleneck:
        if name in plan.allocations:
            yield phase_of(request.graph.calls[name]), plan.allocations[name].seconds, plan.allocations[name].error
        elif name.startswith(REALLOCATION):
            yield "reallocate", plan.reallocation_seconds.get(name.removeprefix(REALLOCATION), 0.0), moves
        else:
            yield "step", free.get(name, 0.0), 0.0


def period_error(request: PlanRequest, plan: Plan) -> float:
    """Deviation of the period. Besides its calls' a step has one of its own, of all that lies between them: measuring
    calls tells nothing of it, and on CPUs it is the one of GPUs, as no other is known."""
    calls = calls_error(request, plan)
    return hypot(calls, SPREADS["step"]["plain"]) if calls else 0.0


def period_bar(request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Seconds between which 80 % of such periods are measured; (0, 0) where no call's error is known."""
    error = period_error(request, plan)
    return bar_of(plan.period_seconds, error) if error else (0.0, 0.0)
