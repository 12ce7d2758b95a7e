"""Settings of a run that have no effect under its plan, or that a given plan departs from: warnings. What no plan could
follow is the checker's matter."""

from collections.abc import Iterator

from realgraph.graphs.errors import Problem
from realgraph.graphs.spec import Train, role_of
from realgraph.planner.feasibility.departures import departures
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.residency import reallocations
from realgraph.planner.request.request import PlanRequest
from realgraph.run.requests import placed
from realgraph.run_file.compose import Checked
from realgraph.run_file.run_warnings import OF_ASYNCHRONY, OF_ENGINE_LOSS, changed_fields
from realgraph.runtime.job.engine_loss import expendable_engines
from realgraph.runtime.job.rollout import RolloutSpec

RULE = "without_effect"


def plan_warnings(checked: Checked, plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    """All of them."""
    yield from departed(checked, plan, request)
    if checked.run.staleness:
        yield from _asynchrony(checked, plan)
    yield from _in_place(checked, plan)


def departed(checked: Checked, plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    """Pins and constraints that the plan, which was given, does not keep to."""
    yield from (placed(checked, problem) for problem in departures(plan, request))


def _in_place(checked: Checked, plan: Plan) -> Iterator[Problem]:
    calls = checked.graph.calls.values()
    trained = {call.model for call in calls if isinstance(call, Train)}
    read = any(role_of(call) in trained for call in calls if not isinstance(call, Train))
    if checked.run.runtime.verified_updates and read and not reallocations(checked.graph, plan.allocations):
        text = "every call reads the trained weights in place, so there are no two sides to compare"
        yield Problem(checked.where("$.runtime.verify_weights"), text, "leave it out", RULE)


def _asynchrony(checked: Checked, plan: Plan) -> Iterator[Problem]:
    run, graph = checked.run, checked.graph
    asked = [*changed_fields(run.rollout, RolloutSpec(), OF_ASYNCHRONY)]
    of_losses = [name for name in asked if name in OF_ENGINE_LOSS and len(graph.generates) == 1]
    engines = expendable_engines(graph, plan)
    if not plan.staleness:
        paths = [*(f"$.rollout.{name}" for name in asked), *["$.overdue"] * (run.overdue != "mask")]
        text = "the plan is synchronous, so nothing reads it"
        for path in paths:
            yield Problem(checked.where(path), text, "leave it out, or pin generation to devices of its own", RULE)
    elif not engines:
        text = "engines share their devices with other calls, so the loss of one ends the run, and none is replaced"
        for name in of_losses:
            yield Problem(checked.where(f"$.rollout.{name}"), text, "pin generation to devices of its own", RULE)
    elif "min_engines" in of_losses and run.rollout.min_engines >= len(engines):
        count = f"{len(engines)} engine{'s' * (len(engines) != 1)}"
        text = f"the plan has {count}, so the loss of any ends the run"
        hint = f"set it below {len(engines)}" if len(engines) > 1 else "leave it out"
        yield Problem(checked.where("$.rollout.min_engines"), text, hint, RULE)
