"""A Plan from a solved problem, and the predictions of a plan that was edited by hand. Searches nothing."""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from realgraph.planner.costs.memory.memory import Footprint
from realgraph.planner.costs.memory.terms import CACHE_PAGE_TOKENS
from realgraph.planner.options.calls import (
    free_seconds,
    input_seconds,
    microbatches_of,
    most_running,
    sample_tokens,
    sequences_in_flight,
    step_end_seconds,
    streams,
    tokens_in_flight,
)
from realgraph.planner.options.choices import CONTEXT_TOKENS
from realgraph.planner.options.couplings import moves_of
from realgraph.planner.options.footprints import spare_room
from realgraph.planner.options.holdings import (
    allocation_of,
    candidate_of,
    group_for,
    host_of,
    margin_of,
    peak_of,
    reads_in_place,
    with_stages,
)
from realgraph.planner.options.meshes import group_of
from realgraph.planner.options.moves import Place, move_matrix, transport_of
from realgraph.planner.options.pricing import PricedOption, options_of
from realgraph.planner.options.tables import PreparedProblem, device_bytes
from realgraph.planner.plan.events import EventGraph, event_graph, period
from realgraph.planner.plan.late_turns import with_late_turns
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Allocation, Plan, Transport, Turn
from realgraph.planner.plan.problem import Choice, Solution
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.period_error import period_bar
from realgraph.planner.search.prefetch import prefetch_priced, with_prefetches
from realgraph.planner.search.streams import kept_caches, room_beside, starts_of, steady_state
from realgraph.planner.solve.solver import orders

SPARE_FRACTION = 0.5  # of the memory that is left, for longer samples: peaks are predictions, and the rest stays free
TOLERANCE = 1e-9  # of a period


def plan_of(prepared: PreparedProblem, solution: Solution) -> Plan:
    """The plan that a solution stands for, with every prediction filled in."""
    request, problem = prepared.request, prepared.problem
    chosen = {name: option_of(prepared, name, choice) for name, choice in solution.choices.items()}
    meshes = {name: problem.meshes[choice.mesh] for name, choice in solution.choices.items()}
    partial = {name: _allocation(request, name, chosen[name], meshes[name]) for name in request.mesh_calls}
    partial = with_stages(request, partial)
    moved = {
        move.target: move_seconds_of(prepared, move.target, solution.choices)
        for move in problem.moves
        if not reads_in_place(request, partial, move.target)
    }
    first = min((start for start in solution.starts.values()), default=0.0)
    plan = Plan(
        allocations=partial,
        orders=_all_devices(request, orders(problem, solution)),
        hashes=hashes(request),
        staleness=request.workload.staleness,
        period_seconds=solution.period,
        lower_bound_seconds=solution.bound,
        scope=scope_of(prepared),
        starts={name: start - first for name, start in solution.starts.items()},
        reallocation_seconds=moved,
        reallocation_transport=transports_of(request, partial),
        stopped=solution.stopped,
        search_seconds=solution.seconds,
    )
    plan = with_prefetches(request, plan)
    plan = replace(plan, allocations=_all_completed(request, plan.allocations))
    plan = _late(request, steady_state(request, plan))
    plan = _with_spare_room(request, _beside_streams(request, plan))
    bounds = period(events_of(request, plan)).circuit  # the search's own circuit leaves out the free calls
    bound = min(plan.lower_bound_seconds, plan.period_seconds)  # a stream that gives way at any time may do better
    plan = replace(plan, lower_bound_seconds=bound, bottleneck=bounds, latency_seconds=step_latency(plan))
    return replace(plan, period_bar_seconds=period_bar(request, plan))


def option_of(prepared: PreparedProblem, call: str, choice: Choice) -> PricedOption:
    """The option that a choice of the search stands for."""
    task = next(task for task in prepared.problem.tasks if task.name == call)
    return prepared.options[task.tables[choice.mesh]][choice.option]


def move_seconds_of(prepared: PreparedProblem, target: str, choices: Mapping[str, Choice]) -> float:
    """Seconds of the move to a call under these choices."""
    move = next(move for move in prepared.problem.moves if move.target == target)
    left, right = choices[move.source], choices[target]
    return float(prepared.problem.move_seconds(move, left.mesh, right.mesh)[left.option, right.option])


def events_of(request: PlanRequest, plan: Plan) -> EventGraph:
    """The plan's timed event graph, with the predicted seconds of free calls."""
    return event_graph(request.graph, plan, free_seconds(request), keeps_turns=False)


def _late(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with late turns, and its starts with them; as it is where the period would be longer."""
    late = with_late_turns(request.graph, plan, free_seconds(request))
    if late.orders == plan.orders or period(events_of(request, late)).seconds > plan.period_seconds * (1 + TOLERANCE):
        return plan
    return replace(late, starts=starts_of(request, late))


def step_latency(plan: Plan) -> float:
    """Seconds from the start of a step's first call, or of the session that begins its batch, to the end of its last; 0
    where no starts are known."""
    ends = [
        plan.starts[name] + max(allocation.seconds, allocation.latency_seconds)
        for name, allocation in plan.allocations.items()
        if name in plan.starts
    ]
    begun = [
        plan.starts[name] - allocation.ahead * plan.period_seconds
        for name, allocation in plan.allocations.items()
        if name in plan.starts
    ]
    return max(ends) - min(begun) if ends else 0.0


def scope_of(prepared: PreparedProblem) -> str:
    """The scope of the lower bound."""
    request, problem = prepared.request, prepared.problem
    rows = sum(len(table) for table in problem.tables)
    context = f"cp from {CONTEXT_TOKENS:,} tokens of a sample a rank on"
    shown = {"cp": context}
    if request.cluster.is_cpu:
        shown |= {axis: f"{axis} where it is pinned" for axis in request.engine.axes}
    axes = ", ".join(shown.get(axis, axis) for axis in ("dp", *request.engine.axes))
    what = f"{axes}, recomputation and pipeline schedules" if request.engine.axes else "dp only"
    meshes = len(problem.meshes)
    where = f"{meshes:,} mesh{'es' * (meshes != 1)} (aligned blocks and runs of nodes)"
    turns = ", generation in turns with the calls that share its devices" if request.workload.staleness else ""
    return f"schedules that repeat every step{turns}; {where}; {rows:,} options of all calls and mesh sizes: {what}"


def _all_devices(request: PlanRequest, found: Mapping[int, tuple[Turn, ...]]) -> dict[int, tuple[Turn, ...]]:
    """Every device of the cluster has an order, an empty one where nothing lies there."""
    return {device: tuple(found.get(device, ())) for device in range(request.cluster.n_devices)}


# --- allocations ------------------------------------------------------------------------------------------------------


def _allocation(request: PlanRequest, call: str, option: PricedOption, mesh: DeviceMesh) -> Allocation:
    layout = replace(option.candidate.layout, mesh=mesh)
    cluster = group_for(request, layout)
    return replace(
        allocation_of(replace(option.candidate, layout=layout)),
        seconds=option.seconds,
        latency_seconds=option.latency if option.latency > option.seconds else 0.0,
        microbatches=microbatches_of(request, call, option.candidate, cluster),
        running=option.running,
        error=option.error,
        input_seconds=input_seconds(request, call, layout, cluster),
        step_end_seconds=step_end_seconds(request, call, cluster),
    )


def _beside_streams(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with the peaks of calls for which a stream pauses and keeps its caches."""
    kept = kept_caches(request, plan)
    beside = {name: _completed(request, plan.allocations, name, nbytes) for name, nbytes in kept.items()}
    return replace(plan, allocations={**plan.allocations, **beside})


def _with_spare_room(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with a part of the memory that is left for its generate call: of a stream, for as many more sequences at
    once as the staleness bound lets be in flight, and for the cache of all of them, as far as they could get as long as
    they may.

    A cache that is pinned stays as it is. Several generate calls get no room, as their caches lie beside each other.
    """
    names = [name for name in request.graph.generates if name in plan.allocations]
    if len(names) != 1:
        return plan
    (call,) = names
    allocation = plan.allocations[call]
    usable = device_bytes(request, group_for(request, allocation.layout))
    kept = kept_caches(request, plan)
    room: float = min(usable - plan.allocations[name].bound_bytes for name in (call, *kept))
    if kept:
        room = min(room, room_beside(request, plan, call))
    grown = _grown(request, call, allocation, max(0, int(SPARE_FRACTION * room)))
    if grown == allocation:
        return plan
    allocations = {**plan.allocations, call: grown}
    allocations[call] = _completed(request, allocations, call)
    return _beside_streams(request, replace(plan, allocations=allocations))


def _grown(request: PlanRequest, call: str, allocation: Allocation, left: int) -> Allocation:
    """The allocation of a generate call with what is spare, in so many bytes of each device."""
    layout, running, sequences = allocation.layout, allocation.running, 0
    if streams(request, call):
        most = min(sequences_in_flight(request, layout.dp), most_running(request))
        sequences = max(0, min(most - running, left // spare_room(request, call, layout, 0, 1).total))
        left -= spare_room(request, call, layout, 0, sequences).total
    pages = 0
    if not request.pins.get(call, Pin()).kv_cache_tokens:
        wanted = (running + sequences) * sample_tokens(request) - allocation.tokens
        page = spare_room(request, call, layout, CACHE_PAGE_TOKENS, 0).total
        pages = max(0, min(math.ceil(wanted / CACHE_PAGE_TOKENS), left // page))
    tokens = pages * CACHE_PAGE_TOKENS
    filled = int((allocation.tokens + tokens) / tokens_in_flight(request))
    return replace(allocation, spare_cache_tokens=tokens, spare_running=max(0, min(sequences, filled - running)))


def _all_completed(request: PlanRequest, allocations: Mapping[str, Allocation]) -> dict[str, Allocation]:
    return {name: _completed(request, allocations, name) for name in allocations}


def _completed(request: PlanRequest, allocations: Mapping[str, Allocation], call: str, kept: int = 0) -> Allocation:
    """With what depends on the other allocations: memory, and whether a copy of its own is refreshed. kept: bytes of
    the caches of others that lie there meanwhile."""
    allocation, footprint = allocations[call], peak_of(request, allocations, call)[1] + Footprint(kv_cache=kept)
    return replace(
        allocation,
        residency=allocation_of(candidate_of(request, allocations, call)).residency,
        peak_bytes=footprint.total,
        bound_bytes=footprint.total + margin_of(request, allocations, call),
        worst_term=footprint.worst,
        host_bytes=host_of(request, allocations, call),
    )


# --- edited plans -----------------------------------------------------------------------------------------------------


def repriced(request: PlanRequest, plan: Plan) -> Plan:
    """An edited plan with every prediction computed anew; its orders stay. The plan must be valid: see `validate`.

    What was priced by a table of measured costs that the request does not have keeps its seconds: the shipped factors
    know less.
    """
    keeps = bool(plan.hashes.costs) and not hashes(request).costs
    plan = replace(plan, allocations=with_stages(request, plan.allocations))
    partial = {}
    for name, old in plan.allocations.items():
        candidate = candidate_of(request, plan.allocations, name)
        if keeps:
            partial[name] = old
            continue
        partial[name] = _allocation(request, name, _priced(request, name, plan), old.layout.mesh)
        partial[name] = replace(
            partial[name],
            residency=allocation_of(candidate).residency,
            ahead=old.ahead,
            spare_cache_tokens=old.spare_cache_tokens,
            spare_running=old.spare_running,
            prefetch_during=old.prefetch_during,
        )
    allocations = _all_completed(request, partial if keeps else prefetch_priced(request, partial))
    moved = _moved(request, allocations)
    priced = replace(
        plan,
        allocations=allocations,
        reallocation_seconds={n: plan.reallocation_seconds.get(n, s) if keeps else s for n, s in moved.items()},
        reallocation_transport=transports_of(request, allocations),
    )
    if not keeps:
        priced = steady_state(request, replace(priced, starts={}))
        priced = replace(priced, hashes=replace(plan.hashes, costs=hashes(request).costs))
    critical = period(events_of(request, priced))
    timed = replace(
        priced, period_seconds=critical.seconds, bottleneck=critical.circuit, stopped="", search_seconds=0.0
    )
    started = _beside_streams(request, replace(timed, starts=starts_of(request, timed)))
    return replace(started, latency_seconds=step_latency(started), period_bar_seconds=period_bar(request, started))


def _priced(request: PlanRequest, call: str, plan: Plan) -> PricedOption:
    """The option that an allocation says; of a batch as a whole and streams of several levels, the one it runs as."""
    allocation = plan.allocations[call]
    candidate = candidate_of(request, plan.allocations, call)
    priced_options = tuple(options_of(request, call, candidate, group_for(request, candidate.layout)))
    assert priced_options, f"{call} passed validation and fits an empty device"
    streams = allocation.latency_seconds > allocation.seconds

    def far(option: PricedOption) -> tuple[bool, int]:
        return ((option.latency > option.seconds) != streams, abs(option.running - allocation.running))

    return min(priced_options, key=far)


def _moved(request: PlanRequest, allocations: Mapping[str, Allocation]) -> dict[str, float]:
    """call -> seconds to bring the trained weights to its copy."""
    seconds = {}
    for move in moves_of(request):
        if reads_in_place(request, allocations, move.target):
            continue
        source, target = (_place(request, allocations, call) for call in (move.source, move.target))
        seconds[move.target] = float(move_matrix(request, move.target, source, target)[0, 0])
    return seconds


def transports_of(request: PlanRequest, allocations: Mapping[str, Allocation]) -> dict[str, Transport]:
    """call -> how trained weights get to what it reads, of every call that reads them without training."""
    transports: dict[str, Transport] = {}
    for move in moves_of(request):
        transports[move.target] = "in_place"
        if not reads_in_place(request, allocations, move.target):
            source, target = (_place(request, allocations, call) for call in (move.source, move.target))
            transports[move.target] = transport_of(request, move.target, source, target)
    return transports


def _place(request: PlanRequest, allocations: Mapping[str, Allocation], call: str) -> Place:
    candidate = candidate_of(request, allocations, call)
    option = PricedOption(candidate, 0.0, 0.0, (0, 0, 0))
    return Place(candidate.layout.mesh, group_of(request.cluster, candidate.layout.mesh.first), (option,))
