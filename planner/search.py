"""The search for a plan: every combination of shardings, each with the largest micro-batches that fit. Exhaustive.

It moves no call to a mesh of its own: calls lie on all devices, or where a pin puts them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Generate
from realgraph.planner.events import EventGraph, event_graph, period
from realgraph.planner.layout import Layout
from realgraph.planner.memory import Footprint, usable_bytes
from realgraph.planner.options import (
    active,
    call_layout,
    call_seconds,
    extra_seconds,
    held_copies,
    peak,
    pin_problems,
    role_shardings,
    sample_tokens,
    token_ladder,
)
from realgraph.planner.pins import Pin
from realgraph.planner.plan import Allocation, Plan, Turn
from realgraph.planner.request import PlanRequest, hashes
from realgraph.planner.residency import reallocations

GB = 1e9


class Misfit(Struct, frozen=True):
    """A call that does not fit even with its smallest micro-batch: on which device, and what would be there."""

    call: str
    device: int
    footprint: Footprint
    parts: tuple[tuple[str, int], ...]  # of the footprint, in words and bytes


def search(request: PlanRequest) -> Plan:
    """The plan of the least predicted period among all that fit. Raises ConfigError where a pin is wrong or none fits.

    The lower bound holds for the options tried: no order of calls on the same options is faster.
    """
    problems = tuple(pin_problems(request))
    if problems:
        raise ConfigError(problems)
    shardings = role_shardings(request)
    plans: list[Plan] = []
    misfits: list[Misfit] = []
    for chosen in product(*shardings.values()):
        found = _allocate(request, dict(zip(shardings, chosen, strict=True)))
        if isinstance(found, Misfit):
            misfits.append(found)
        else:
            plans.append(assemble(request, found))
    if not plans:
        raise ConfigError([_misfit_problem(request, min(misfits, key=lambda misfit: misfit.footprint.total))])
    best = min(plans, key=lambda plan: plan.period_seconds)  # the first of equals: fewest sharded roles
    bound = min(best.period_seconds, lower_bound_seconds(request, plans))
    return msgspec.structs.replace(best, lower_bound_seconds=bound, scope=_scope(request, len(plans) + len(misfits)))


def assemble(request: PlanRequest, allocations: Mapping[str, Allocation]) -> Plan:
    """A plan of these allocations in the default order: on every device the graph's topological order, no offsets."""
    orders = {
        device: tuple(Turn(name) for name in request.mesh_calls if device in allocations[name].layout.mesh.devices)
        for device in range(request.cluster.n_devices)
    }
    plan = Plan(dict(allocations), orders, hashes(request))
    found = period(events_of(request, plan))
    return msgspec.structs.replace(plan, period_seconds=found.seconds, bottleneck=found.circuit)


def events_of(request: PlanRequest, plan: Plan) -> EventGraph:
    """The plan's timed event graph, with the predicted seconds of free calls and reallocations."""
    layouts = {name: allocation.layout for name, allocation in plan.allocations.items()}
    return event_graph(request.graph, plan, request.workload.staleness, extra_seconds(request, layouts))


def reprice(request: PlanRequest, plan: Plan) -> Plan:
    """An edited plan with every prediction computed anew. The plan must be valid: see `validate`.

    The bound and scope of a search do not speak of an edited plan; the bound left is its own allocations' one.
    """
    layouts = {name: allocation.layout for name, allocation in plan.allocations.items()}
    allocations = {
        name: _priced(request, layouts, name, allocation.max_tokens_per_microbatch)
        for name, allocation in plan.allocations.items()
    }
    priced = msgspec.structs.replace(plan, allocations=allocations)
    found = period(events_of(request, priced))
    bound = min(found.seconds, lower_bound_seconds(request, [priced]))
    return msgspec.structs.replace(
        priced,
        period_seconds=found.seconds,
        bottleneck=found.circuit,
        lower_bound_seconds=bound,
        scope="any order of the allocations given",
    )


def lower_bound_seconds(request: PlanRequest, plans: Sequence[Plan]) -> float:
    """The larger of two bounds over the allocations of these plans, each call taken at its fastest.

    Work: device seconds of all calls over the number of devices. Path: the period with a mesh for every call alone.
    """
    options = [(name, allocation) for plan in plans for name, allocation in plan.allocations.items()]
    seconds = {name: min(a.seconds for call, a in options if call == name) for name in request.mesh_calls}
    area = {
        name: min(a.seconds * a.layout.mesh.n_devices for call, a in options if call == name)
        for name in request.mesh_calls
    }
    alone = msgspec.structs.replace(plans[0], allocations={}, orders={})
    path = event_graph(request.graph, alone, request.workload.staleness, extra_seconds(request, {}) | seconds)
    return max(sum(area.values()) / request.cluster.n_devices, period(path).seconds)


# --- one combination --------------------------------------------------------------------------------------------------


def _allocate(request: PlanRequest, shardings: Mapping[str, str]) -> dict[str, Allocation] | Misfit:
    """The largest micro-batch that fits for each call, or the call that lacks most memory."""
    layouts = {name: call_layout(request, name, shardings[request.graph.role(name)]) for name in request.mesh_calls}
    usable = usable_bytes(request.cluster)
    allocations: dict[str, Allocation] = {}
    misfits: list[Misfit] = []
    for name, layout in layouts.items():
        device, most = peak(request, layouts, name, 0)
        resident_bytes = most.total - active(request, name, layout, 0).total
        sizes = token_ladder(request, name, layout)
        room = [size for size in sizes if resident_bytes + active(request, name, layout, size).total <= usable]
        if room:
            allocations[name] = _priced(request, layouts, name, room[0])
        else:
            footprint = peak(request, layouts, name, sizes[-1])[1]
            misfits.append(Misfit(name, device, footprint, _parts(request, layouts, name, device)))
    return max(misfits, key=lambda misfit: misfit.footprint.total) if misfits else allocations


def _priced(request: PlanRequest, layouts: Mapping[str, Layout], call: str, tokens: int) -> Allocation:
    _, held = peak(request, layouts, call, tokens)
    return Allocation(
        layout=layouts[call],
        max_tokens_per_microbatch=tokens,
        recompute=request.role(call).gradient_checkpointing and not isinstance(request.graph.calls[call], Generate),
        residency="reallocated" if call in reallocations(request.graph, layouts) else "resident",
        seconds=call_seconds(request, call, layouts[call], tokens),
        peak_bytes=held.total,
        worst_term=held.worst,
    )


def _scope(request: PlanRequest, count: int) -> str:
    where = "on all devices or where pins put them" if request.pins else "on all devices"
    return f"calls {where}, dp only, in topological order; {count} combination{'s' * (count > 1)} of sharding"


def shown_bytes(nbytes: int) -> str:
    """`57.7 GB`, or `3.2 MB` below a tenth of a GB."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.1f} MB"


def _misfit_problem(request: PlanRequest, misfit: Misfit) -> Problem:
    held, usable = misfit.footprint, usable_bytes(request.cluster)
    largest, nbytes = max(misfit.parts, key=lambda part: part[1])
    text = (
        f"no plan fits: call {misfit.call!r} needs {shown_bytes(held.total)} on device {misfit.device}, "
        f"{shown_bytes(usable)} of {shown_bytes(request.cluster.memory_bytes)} are usable; "
        f"largest by purpose: {held.worst.replace('_', ' ')} {shown_bytes(getattr(held, held.worst))}; "
        f"by owner: {largest} {shown_bytes(nbytes)}"
    )
    return Problem(Where(path="$.cluster"), text, "; or ".join(_mends(request, misfit)), "memory")


def _parts(request: PlanRequest, layouts: Mapping[str, Layout], call: str, device: int) -> tuple[tuple[str, int], ...]:
    """What `device` holds while `call` runs with its smallest micro-batch, in words and bytes."""
    held = [
        (f"the {'trained states' if copy.trained else 'weights'} of {copy.role!r} for {', '.join(copy.calls)}", nbytes)
        for copy, nbytes in held_copies(request, layouts, device)
    ]
    smallest = token_ladder(request, call, layouts[call])[-1]
    return (*held, (f"{call!r} itself", active(request, call, layouts[call], smallest).total))


def _mends(request: PlanRequest, misfit: Misfit) -> Iterator[str]:
    """What would help, the cheapest first."""
    call, role = misfit.call, request.role(misfit.call)
    for name, pin in request.pins.items():
        if pin.sharding == "replicated" and not isinstance(request.graph.calls[name], Generate):
            yield f"set allocation.{name}.sharding: fsdp"
    if misfit.footprint.worst in ("activations", "kv_cache", "logits"):
        own = request.pins.get(call, Pin()).max_tokens_per_microbatch
        fixed = own or request.workload.max_tokens_per_microbatch
        if fixed and fixed > sample_tokens(request):
            yield f"lower {f'allocation.{call}' if own else 'batch'}.max_tokens_per_microbatch (now {fixed})"
        if not role.gradient_checkpointing and misfit.footprint.worst == "activations":
            yield f"set models.{request.graph.role(call)}.gradient_checkpointing: true"
        yield f"lower batch.max_new_tokens (now {request.workload.max_new_tokens})"
    wide = [name for name in request.models if request.graph.models[name].dtype in ("float32", "float64")]
    yield from (f"set models.{name}.dtype: bfloat16" for name in wide)
    if any(nbytes > usable_bytes(request.cluster) for words, nbytes in misfit.parts if words.startswith("the weights")):
        yield "take a smaller model: in this version every device that generates holds it whole"
    yield "use more devices, or devices with more memory"
