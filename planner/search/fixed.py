"""A plan's allocations as pins of a request, and as choices of the search problem that these pins leave."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from realgraph.graphs.spec import Train
from realgraph.planner.options.calls import drops_copy
from realgraph.planner.options.holdings import balanced_for, candidate_of
from realgraph.planner.options.pricing import PricedOption
from realgraph.planner.options.tables import PreparedProblem
from realgraph.planner.plan.option import PASSES, CallOption
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.plan.problem import Choice
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, kept_by


def pinned_to(request: PlanRequest, plan: Plan, but: str = "") -> PlanRequest:
    """The request with every call pinned to what the plan gives it, the call `but` left as it was asked, and under the
    staleness that the plan keeps to."""
    pins = {name: _pin(request, plan, name) for name in plan.allocations if name != but}
    if but in request.pins:
        pins[but] = request.pins[but]
    kept = request.constraints
    limits = Constraints(reserve=kept.reserve, memory_gb=kept.memory_gb, host_memory_gb=kept.host_memory_gb)
    forbid = {but: kept.forbid[but]} if but in kept.forbid else {}
    return replace(
        kept_by(request, plan), pins=pins, constraints=replace(limits, forbid=forbid, offload=kept.offload or not but)
    )


def _pin(request: PlanRequest, plan: Plan, call: str) -> Pin:
    """All that was chosen, but what belongs to calls of another kind."""
    allocation, mesh = plan.allocations[call], plan.allocations[call].layout.mesh
    foreign = () if isinstance(request.graph.calls[call], Train) else PASSES
    settings: dict[str, Any] = {name: value for name, value in allocation.settings.items() if name not in foreign}
    return Pin(first=mesh.first, devices=mesh.n_devices, **settings)


def choices_of(prepared: PreparedProblem, plan: Plan) -> dict[str, Choice] | None:
    """The numbers of the plan's meshes and options in a problem; None where one of them is not in it."""
    choices: dict[str, Choice] = {}
    for task in prepared.problem.tasks:
        allocation = plan.allocations[task.name]
        candidate = candidate_of(prepared.request, plan.allocations, task.name)
        if candidate.residency == "in_place" and drops_copy(prepared.request, task.name):
            candidate = replace(candidate, residency="reallocated")  # one row for both: see `shared`
        if candidate.layout.stages == balanced_for(prepared.request, plan.allocations, task.name):
            candidate = replace(candidate, layout=replace(candidate.layout, stages=()))  # as options have them
        for mesh, table in task.tables.items():
            if prepared.problem.meshes[mesh] == allocation.layout.mesh:
                rows = list(_matching(prepared.options[table], candidate, allocation))
                if rows:
                    choices[task.name] = Choice(mesh, min(rows)[1])
    return choices if len(choices) == len(prepared.problem.tasks) else None


def _matching(
    options: tuple[PricedOption, ...], candidate: CallOption, allocation: Allocation
) -> Iterator[tuple[float, int]]:
    """Rows that say the same, each with how far its level of generation in flight is from the allocation's."""
    for i, option in enumerate(options):
        there = replace(option.candidate.layout, mesh=candidate.layout.mesh)
        if replace(option.candidate, layout=there) == candidate:
            planned = allocation.latency_seconds or allocation.seconds
            yield abs(option.latency - planned) + abs(option.seconds - allocation.seconds), i
