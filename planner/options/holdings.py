"""Bytes of a whole plan: which copies lie on which device, and what each call adds there while it runs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Train
from realgraph.planner.costs.memory.memory import Footprint
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import is_trained, stays_beside
from realgraph.planner.options.couplings import train_calls
from realgraph.planner.options.footprints import Holding, holding, spare_room, states_of
from realgraph.planner.options.meshes import group_of
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages
from realgraph.planner.plan.option import CallOption, Residency
from realgraph.planner.plan.plan import Allocation
from realgraph.planner.plan.residency import shares_trained_copy, waits_apart
from realgraph.planner.plan.stages import stages_of
from realgraph.planner.request.request import PlanRequest

Allocations = Mapping[str, Allocation]


class ResidentCopy(Struct, frozen=True):
    """One copy of a role's weights on each device of `layout`'s mesh, and the calls that use it."""

    role: str
    layout: Layout
    calls: tuple[str, ...]
    trained: bool
    footprint: Footprint
    host: int = 0


def group_for(request: PlanRequest, layout: Layout) -> Cluster:
    """The group of nodes that a layout lies in."""
    return request.cluster.groups[group_of(request.cluster, layout.mesh.first)]


def candidate_of(request: PlanRequest, allocations: Allocations, call: str) -> CallOption:
    """The option of an allocation, as the search has it; whether it reads the trained copy in place follows from the
    layouts."""
    allocation = allocations[call]
    residency: Residency = "offloaded" if allocation.residency == "offloaded" else "resident"
    if reads_in_place(request, allocations, call):
        residency = "in_place"
    elif is_trained(request, request.graph.role(call)) and not isinstance(request.graph.calls[call], Train):
        residency = "reallocated"
    return CallOption(**{**_chosen(allocation), "residency": residency})


def allocation_of(candidate: CallOption) -> Allocation:
    """The inverse, of which nothing is predicted yet: what reads the trained copy in place is resident in a plan."""
    residency = "resident" if candidate.residency == "in_place" else candidate.residency
    return Allocation(**{**_chosen(candidate), "residency": residency})


def _chosen(option: CallOption) -> dict[str, Any]:
    return {name: getattr(option, name) for name in CallOption.__struct_fields__}


def reads_in_place(request: PlanRequest, allocations: Allocations, call: str) -> bool:
    """True where a call that does not train reads the trained copy of its role where that lies."""
    kind, trains = request.graph.calls[call], train_calls(request, request.graph.role(call))
    if isinstance(kind, Train) or not trains or trains[-1] not in allocations:
        return False
    return shares_trained_copy(kind, allocations[call], allocations[trains[-1]])


def chunks_of(request: PlanRequest, allocations: Allocations, call: str) -> int:
    """Chunks of a call's stages: its own, or those of the trained copy of its role under whose layout it runs."""
    return _followed(request, allocations, call).chunks


def balanced_for(request: PlanRequest, allocations: Allocations, call: str) -> Stages:
    """The layers of a call's stages and chunks where nobody says them, () where it has one stage."""
    layout = replace(allocations[call].layout, stages=())
    if layout.pp == 1:
        return ()
    return stages_of(request.model(call), request.role(call).head, layout, chunks_of(request, allocations, call))


def with_stages(request: PlanRequest, allocations: Allocations) -> dict[str, Allocation]:
    """The allocations, each with the layers of its stages: as it says them, else as the trained copy of its role under
    whose layout it runs, else balanced."""
    staged = {}
    for call, allocation in allocations.items():
        layout = allocation.layout
        stages: Stages = ()
        if layout.pp > 1:
            followed = _followed(request, allocations, call).layout
            stages = layout.stages or followed.stages or balanced_for(request, allocations, call)
        staged[call] = replace(allocation, layout=replace(layout, stages=stages))
    return staged


def _followed(request: PlanRequest, allocations: Allocations, call: str) -> Allocation:
    """The allocation of the trained copy of a call's role where its layout is the call's but for stages, else its
    own."""
    own, trains = allocations[call], train_calls(request, request.graph.role(call))
    trained = allocations.get(trains[-1]) if trains else None
    alike = trained is not None and replace(trained.layout, stages=()) == replace(own.layout, stages=())
    return trained if trained is not None and alike else own


def resident_copies(request: PlanRequest, allocations: Allocations) -> tuple[ResidentCopy, ...]:
    """Every copy that stays on devices or in host memory. Calls of a role with equal layouts share one."""
    copies: dict[tuple[object, ...], ResidentCopy] = {}
    for call in request.mesh_calls:
        if call not in allocations:
            continue
        candidate = candidate_of(request, allocations, call)
        role, layout = request.graph.role(call), candidate.layout
        trained = isinstance(request.graph.calls[call], Train)
        own = holding(request, call, candidate, group_for(request, layout))
        key: tuple[object, ...] = (role, layout, candidate.residency, waits_apart(request.graph.calls[call], candidate))
        if stays_beside(request, call):
            key = (role, "beside", call)
        elif trained or candidate.residency == "in_place":
            key = (role, "trained")
        if key in copies:
            known = copies[key]
            footprint = known.footprint if known.trained else own.resident if trained else _larger(known, own)
            host = max(known.host, own.host)
            copies[key] = ResidentCopy(
                role, known.layout, (*known.calls, call), known.trained or trained, footprint, host
            )
        else:
            copies[key] = ResidentCopy(role, layout, (call,), trained, own.resident, own.host)
    return tuple(copies.values())


def _larger(other: ResidentCopy, own: Holding) -> Footprint:
    """The bytes of a copy of which one call may keep what another gives up."""
    return max(other.footprint, own.resident, key=lambda footprint: footprint.total)


def active_of(request: PlanRequest, allocations: Allocations, call: str) -> Footprint:
    """Bytes that a running call adds on each device of its mesh."""
    allocation, active = allocations[call], _holding_of(request, allocations, call).active
    if not (allocation.spare_cache_tokens or allocation.spare_running):
        return active
    tokens, sequences = allocation.spare_cache_tokens, allocation.spare_running
    return active + spare_room(request, call, allocation.layout, tokens, sequences)


def margin_of(request: PlanRequest, allocations: Allocations, call: str) -> int:
    """Bytes by which a peak may lie above the prediction while a call runs, at the quantile that the request asks."""
    return _holding_of(request, allocations, call).margin


def prefetched_during(
    request: PlanRequest, allocations: Allocations, call: str
) -> tuple[tuple[DeviceMesh, Footprint], ...]:
    """States of other calls that come from host memory while a call runs, and their devices."""
    return tuple(
        (other.layout.mesh, states_of(request, name, other.layout, group_for(request, other.layout)))
        for name, other in allocations.items()
        if other.prefetch_during == call
    )


def host_of(request: PlanRequest, allocations: Allocations, call: str) -> int:
    """Bytes per device that wait in the node's memory for a call."""
    return _holding_of(request, allocations, call).host


def _holding_of(request: PlanRequest, allocations: Allocations, call: str) -> Holding:
    candidate = candidate_of(request, allocations, call)
    return holding(request, call, candidate, group_for(request, candidate.layout))


def peak_of(request: PlanRequest, allocations: Allocations, call: str) -> tuple[int, Footprint]:
    """The device of the call's mesh that is fullest while it runs, and what it holds then."""
    mesh = allocations[call].layout.mesh
    on_devices = [(copy.layout.mesh, copy.footprint) for copy in resident_copies(request, allocations)]
    on_devices += prefetched_during(request, allocations, call)
    firsts = _first_devices(there for there, _ in on_devices)
    by_device = {
        device: sum((footprint for there, footprint in on_devices if device in there.devices), Footprint())
        for device in sorted({mesh.first, *(device for device in firsts if device in mesh.devices)})
    }
    worst = max(by_device, key=lambda device: by_device[device].total)
    return worst, by_device[worst] + active_of(request, allocations, call)


def bound_of(request: PlanRequest, allocations: Allocations, call: str) -> int:
    """Bytes below which the peak of that device stays with the probability that the request asks."""
    return peak_of(request, allocations, call)[1].total + margin_of(request, allocations, call)


def resident_on(request: PlanRequest, allocations: Allocations, first: int, stop: int) -> int:
    """Bytes that lie there all the time on the fullest of the devices from `first` up to `stop`."""
    copies = resident_copies(request, allocations)
    firsts = _first_devices(copy.layout.mesh for copy in copies)
    devices = {first, *(device for device in firsts if first < device < stop)}
    return max(sum(c.footprint.total for c in copies if device in c.layout.mesh.devices) for device in devices)


def _first_devices(meshes: Iterable[DeviceMesh]) -> Iterator[int]:
    """Devices where what lies there changes."""
    for mesh in meshes:
        yield mesh.first
        yield mesh.first + mesh.n_devices


def offloading(request: PlanRequest, allocations: Allocations) -> dict[int, int]:
    """Node -> bytes that wait in its memory; nodes are numbered through all groups."""
    nodes: dict[int, int] = {}
    for copy in resident_copies(request, allocations):
        for device in copy.layout.mesh.devices if copy.host else ():
            node = request.cluster.node_of(device)
            nodes[node] = nodes.get(node, 0) + copy.host
    return nodes
