"""Offloaded states that come back while the call before runs, where they fit beside it. Searches nothing.

The search prices the way there as part of the call itself, so a plan is never slower than what the search found.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from realgraph.graphs.spec import Generate, Train
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import free_seconds, phase_of
from realgraph.planner.options.holdings import bound_of, candidate_of, group_for
from realgraph.planner.options.pricing import is_measured, measured_there, offloading_seconds
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.events import event_graph, period
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.plan.prefetch import call_before
from realgraph.planner.request.cost_table import PhaseFactor
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.streams import starts_of

PREFETCHED = "; offloaded states that come back within their own calls"  # what a bound leaves out


def with_prefetches(request: PlanRequest, plan: Plan) -> Plan:
    """The plan as the search has it, with all prefetches that fit, and the period that follows; its bytes are not
    counted anew."""
    allocations = dict(plan.allocations)
    for name, own in plan.allocations.items():
        before = "" if own.residency != "offloaded" else _before(request, plan, name)
        if before:
            tried = {**allocations, name: replace(own, prefetch_during=before)}
            limit = device_bytes(request, group_for(request, own.layout))
            if bound_of(request, tried, before) <= limit:
                allocations = tried
    if allocations == plan.allocations:
        return plan
    early = replace(plan, allocations=prefetch_priced(request, allocations), scope=plan.scope + PREFETCHED)
    found = period(event_graph(request.graph, early, free_seconds(request))).seconds
    early = replace(early, period_seconds=min(plan.period_seconds, found))
    return replace(early, starts=starts_of(request, early)) if plan.starts else early


def _before(request: PlanRequest, plan: Plan, call: str) -> str:
    return "" if isinstance(request.graph.calls[call], Generate) else call_before(request.graph, plan, call)


def prefetch_priced(request: PlanRequest, allocations: Mapping[str, Allocation]) -> dict[str, Allocation]:
    """The allocations, priced as if all states came back within their calls, with the seconds of those that do not.

    A call's own states have the way to the host first: what is prefetched beside it comes after them.
    """
    ways = {}
    for name, own in allocations.items():
        coming, both = host_seconds(
            request, name, candidate_of(request, allocations, name), group_for(request, own.layout)
        )
        ways[name] = (coming, both - coming if own.prefetch_during else both)
    return {
        name: replace(
            own,
            seconds=max(0.0, own.seconds - ways[name][0]),
            prefetch_seconds=ways[name][0] + ways[own.prefetch_during][1] if ways[name][0] else 0.0,
        )
        if own.prefetch_during
        else own
        for name, own in allocations.items()
    }


def host_seconds(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a priced call in which its states come from the host, and in which they go there and back.

    0 where the call itself was measured, and on a CPU: a copy takes its cores and memory from what runs beside.
    """
    both = offloading_seconds(request, call, candidate, cluster)
    if not both or cluster.is_cpu or is_measured(request, call, candidate):
        return 0.0, 0.0
    kind = request.graph.calls[call]
    both *= measured_there(request, candidate.layout).phases.get(phase_of(kind), PhaseFactor()).factor
    return (both / 2 if isinstance(kind, Train) else both), both
