"""The amount in flight in a plan's stream of generation, and the period that follows from it. Searches no layouts.

Tokens between two weight updates follow from the plan: the stream has the time that its mesh has left in a period, so
their seconds and the rest of the mesh's calls add up to the period. With fewer tokens there is more in flight, until
the staleness bound, which counts that, makes the period longer than the mesh needs: see `costs/generate/rollout.py`.
"""

import math
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate
from realgraph.planner.costs.generate.rollout import Stream, variant_of
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import free_seconds
from realgraph.planner.options.holdings import active_of, candidate_of, group_for, margin_of, resident_on
from realgraph.planner.options.pricing import Timing, candidate_stream, stream_timing
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.events import (
    Dependency,
    EventGraph,
    empty_circuit,
    event_graph,
    liveness_graph,
    moved_calls,
    period,
)
from realgraph.planner.plan.late_turns import earliest_starts
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import REALLOCATION, Plan, reallocation_node
from realgraph.planner.request.request import PlanRequest

N_TRIED_POINTS = 16  # tokens between two updates that are tried before the place between two of them is found
HALVINGS = 24
DECIDING_FRACTION = 1 - 1e-9  # of a period: a mesh that is in use for so much of it decides it


class _Flow(Struct, frozen=True, eq=False):
    """The known facts of a plan's stream."""

    request: PlanRequest
    call: str
    candidate: CallOption
    cluster: Cluster
    stream: Stream
    paused: bool
    events: EventGraph  # with the call's data edges marked by their delay
    turns: tuple[tuple[str, ...], ...]  # nodes that hold each device of the mesh, in any order


class _Point(Struct, frozen=True):
    """One number of tokens between updates."""

    between: float
    timing: Timing
    period: float  # of the whole plan
    bound: bool  # whether the stream's mesh decides it


def streams(request: PlanRequest) -> bool:
    """True where generation runs on while weights are trained."""
    calls = request.graph.calls
    return request.workload.staleness > 0 and any(isinstance(calls[name], Generate) for name in request.mesh_calls)


def steady_state(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with the seconds and the latency that its stream of generation finds, and the period that follows.

    As it is where nothing streams, and where no stream keeps to the staleness and the order of calls: generation then
    takes turns with them, as the search has it.
    """
    call = next((name for name in request.graph.generates if name in plan.allocations), "")
    if not call or plan.staleness < 1:
        return plan
    begun = _labelled(plan, call, -plan.allocations[call].ahead)
    flow = _flow(request, begun, call)
    point = _steady_point(flow)
    if math.isfinite(point.period) and not keeps_caches(request, plan, call):
        anew = variant_of(flow.stream, point.between, paused=True).pause_seconds
        if _blocks(request, _with_point(begun, call, point), call, anew) > 1:
            point = _steady_point(replace(flow, paused=True))
    if not math.isfinite(point.period):
        return plan
    steady = _labelled(_with_point(begun, call, point), call, point.timing.whole)
    if not plan.allocations[call].ahead:  # its turns are still counted by what is begun
        steady = _counted(request, steady, call)
    return replace(steady, starts=starts_of(request, steady)) if plan.starts else steady


def gives_up_caches(request: PlanRequest, plan: Plan) -> bool:
    """True where generation goes on beside calls that pause it, and its caches and weights have no room there."""
    generates = [name for name in request.graph.generates if name in plan.allocations]
    beside = plan.staleness > 0 or len(generates) > 1
    return beside and not all(keeps_caches(request, plan, name) for name in generates)


def keeps_caches(request: PlanRequest, plan: Plan, call: str) -> bool:
    """True if a paused stream's caches and weights stay where they are: all that runs there meanwhile has room beside.

    If not, its sequences are prefilled again after the pause.
    """
    return room_beside(request, plan, call) >= 0


def room_beside(request: PlanRequest, plan: Plan, call: str) -> float:
    """Bytes that are left of the fullest device of a paused stream while another call runs there beside its caches and
    weights; less than 0: they have no room; infinite where nothing else runs there."""
    allocations, mesh = plan.allocations, plan.allocations[call].layout.mesh
    limit = device_bytes(request, group_for(request, allocations[call].layout))
    own = active_of(request, allocations, call).total + margin_of(request, allocations, call)
    room = math.inf
    for name, other in allocations.items():
        there = other.layout.mesh
        if name != call and there.overlaps(mesh):
            both = max(mesh.first, there.first), min(mesh.devices.stop, there.devices.stop)
            added = active_of(request, allocations, name).total + margin_of(request, allocations, name)
            room = min(room, limit - (resident_on(request, allocations, *both) + added + own))
    return room


def kept_caches(request: PlanRequest, plan: Plan) -> dict[str, int]:
    """Bytes of the caches, on each device of a call's mesh, that streams keep while they pause for the call."""
    if plan.staleness < 1 or gives_up_caches(request, plan):
        return {}
    kept: dict[str, int] = {}
    for stream in (name for name in request.graph.generates if name in plan.allocations):
        nbytes, mesh = active_of(request, plan.allocations, stream).kv_cache, plan.allocations[stream].layout.mesh
        for name, allocation in plan.allocations.items():
            if name != stream and allocation.layout.mesh.overlaps(mesh):
                kept[name] = kept.get(name, 0) + nbytes
    return kept


def _with_point(plan: Plan, call: str, point: "_Point") -> Plan:
    """The plan in which step k of the call is the one that begins batch k."""
    timing = point.timing
    latency = timing.latency + timing.whole * (point.period - timing.seconds)
    allocation = replace(
        plan.allocations[call], seconds=timing.seconds, latency_seconds=latency, running=timing.running
    )
    return replace(plan, allocations={**plan.allocations, call: allocation}, period_seconds=point.period)


def _labelled(plan: Plan, call: str, batches: int) -> Plan:
    """Step k of the call becomes the session that many batches later: from the one that begins batch k to the one that
    completes it, as the runtime counts; or back, with a negative number. Its turns stay: they are counted by what is
    completed, however much is in flight."""
    if not batches:
        return plan
    old = plan.allocations[call]
    latency = old.latency_seconds - batches * plan.period_seconds
    allocation = replace(old, ahead=old.ahead + batches, latency_seconds=latency)
    return replace(plan, allocations={**plan.allocations, call: allocation})


def _counted(request: PlanRequest, plan: Plan, call: str) -> Plan:
    """Turns of sessions counted by what they complete: as many batches earlier as are in flight, or as the orders of
    the other calls let it."""
    for batches in range(plan.allocations[call].ahead, 0, -1):
        orders = {
            device: tuple(
                replace(t, offset=t.offset - batches) if t.call in (call, reallocation_node(call)) else t for t in order
            )
            for device, order in plan.orders.items()
        }
        counted = replace(plan, orders=orders)
        if empty_circuit(liveness_graph(request.graph, counted)) is None:
            return counted
    return plan


def starts_of(request: PlanRequest, plan: Plan) -> dict[str, float]:
    """Seconds at which the calls and reallocations of step 0 may start at the earliest in the plan's period; the first
    at 0. Longest paths, see `planner/plan/events.py`."""
    events = event_graph(request.graph, plan, free_seconds(request), keeps_turns=False)
    starts = earliest_starts(events, plan.period_seconds)
    known = [name for name in starts if name in plan.allocations or name.startswith(REALLOCATION)]
    first = min(starts[name] for name in known)
    return {name: starts[name] - first for name in known}


def _blocks(request: PlanRequest, plan: Plan, call: str, anew: float) -> int:
    """Number of times in a period that other calls take the mesh of the stream and the memory of its caches. New
    weights arrive as soon as they are trained, whatever the order of calls.

    anew: seconds in which the caches are computed anew. A gap that is no longer leaves the stream no time: what comes
    before and after it counts once.
    """
    starts, whole = starts_of(request, plan), plan.period_seconds
    spans = {name: (starts[name], plan.allocations[name].seconds) for name in plan.allocations if name != call}
    trainer = moved_calls(request.graph, plan).get(call)
    if trainer:
        spans[reallocation_node(call)] = (sum(spans[trainer]), plan.reallocation_seconds.get(call, 0.0))
    most = 0
    layout = plan.allocations[call].layout
    size = layout.mesh.n_devices // layout.dp
    for first in range(layout.mesh.first, layout.mesh.first + layout.mesh.n_devices, size):
        there = {turn.call for device in range(first, first + size) for turn in plan.orders.get(device, ())}
        busy = sorted((spans[n][0] % whole, spans[n][1]) for n in {*there, reallocation_node(call)} if n in spans)
        ends = [start + seconds for start, seconds in busy]
        latest = [max(ends[: i + 1]) for i in range(len(busy))]
        gaps = sum(busy[i + 1][0] > latest[i] + anew for i in range(len(busy) - 1))
        round_it = bool(busy) and busy[0][0] + whole > latest[-1] + anew
        most = max(most, gaps + round_it)
    return most


def _flow(request: PlanRequest, plan: Plan, call: str) -> _Flow:
    candidate = candidate_of(request, plan.allocations, call)
    cluster = group_for(request, candidate.layout)
    unit = replace(plan.allocations[call], seconds=1.0, latency_seconds=2.0)
    marked = replace(plan, allocations={**plan.allocations, call: unit})
    devices = candidate.layout.mesh.devices
    orders = {plan.orders.get(device, ()) for device in devices}
    moved = reallocation_node(call)
    turns = {tuple(sorted({*(turn.call for turn in order), moved})) for order in orders}
    return _Flow(
        request=request,
        call=call,
        candidate=candidate,
        cluster=cluster,
        stream=candidate_stream(request, call, candidate, cluster),
        paused=False,
        events=event_graph(request.graph, marked, free_seconds(request), keeps_turns=False),
        turns=tuple(turns),
    )


def _steady_point(flow: _Flow) -> _Point:
    """The fewest tokens between two updates at which the mesh itself, and not the staleness bound, decides the period;
    where it never does, the point of the least period, and of those the last."""
    before: _Point | None = None
    points: list[_Point] = []
    for between in np.geomspace(flow.stream.least, flow.stream.most, N_TRIED_POINTS):
        point = _point(flow, float(between))
        points.append(point)
        if point.bound:
            return point if before is None else _first_bound(flow, before, point)
        before = point
    least = min(point.period for point in points)
    return [point for point in points if point.period <= least * (1 + 1e-9)][-1]


def _first_bound(flow: _Flow, free: _Point, bound: _Point) -> _Point:
    """Between a point where the mesh does not decide and one where it does."""
    for _ in range(HALVINGS):
        middle = _point(flow, (free.between * bound.between) ** 0.5)
        free, bound = (free, middle) if middle.bound else (middle, bound)
    return bound


def _point(flow: _Flow, between: float) -> _Point:
    variant = variant_of(flow.stream, between, flow.paused)
    timing = stream_timing(flow.request, flow.call, flow.candidate, flow.cluster, variant)
    events = _streamed(flow, timing)
    try:
        period_seconds = period(events).seconds
    except ValueError:  # a batch would take longer than the staleness bound has periods: more tokens between updates
        period_seconds = float("inf")
    load = max(sum(events.seconds.get(name, 0.0) for name in names) for names in flow.turns)
    return _Point(between, timing, period_seconds, load >= period_seconds * DECIDING_FRACTION)


def _streamed(flow: _Flow, timing: Timing) -> EventGraph:
    """The event graph in which what reads the outputs of step k starts `rest` seconds after the session of step k +
    `whole` has begun."""
    seconds: Mapping[str, float] = {**flow.events.seconds, flow.call: timing.seconds}
    late = timing.latency - (timing.whole + 1) * timing.seconds  # after the end of that session
    late = late if timing.whole else max(0.0, late)
    edges = [
        Dependency(edge.source, edge.target, edge.distance - timing.whole, late)
        if edge.source == flow.call and edge.delay > 0
        else edge
        for edge in flow.events.dependencies
    ]
    return EventGraph(dict(seconds), tuple(edges), flow.events.loads)
