"""Bytes of a whole plan: which copies lie on which device, and what each call adds there while it runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from realgraph.graphs.spec import Train
from realgraph.planner.costs.memory.memory import Footprint
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import is_trained
from realgraph.planner.options.couplings import train_calls
from realgraph.planner.options.meshes import group_of
from realgraph.planner.options.pricing import Holding, holding
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.option import CallOption, Residency
from realgraph.planner.plan.plan import Allocation
from realgraph.planner.plan.residency import shares_trained_copy
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
    found = allocations[call]
    residency: Residency = "offloaded" if found.residency == "offloaded" else "resident"
    if reads_in_place(request, allocations, call):
        residency = "in_place"
    elif is_trained(request, request.graph.role(call)) and not isinstance(request.graph.calls[call], Train):
        residency = "reallocated"
    return CallOption(**{**_chosen(found), "residency": residency})


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
    trained = allocations[trains[-1]]
    if trained.residency == "offloaded":
        return False
    return shares_trained_copy(kind, allocations[call].layout, trained.layout)


def held_copies(request: PlanRequest, allocations: Allocations) -> tuple[ResidentCopy, ...]:
    """Every copy that stays on devices or in host memory. Calls of a role with equal layouts share one."""
    found: dict[tuple[object, ...], ResidentCopy] = {}
    for call in request.mesh_calls:
        if call not in allocations:
            continue
        candidate = candidate_of(request, allocations, call)
        role, layout = request.graph.role(call), candidate.layout
        trained = isinstance(request.graph.calls[call], Train)
        own = holding(request, call, candidate, group_for(request, layout))
        key = (role, "trained") if trained or candidate.residency == "in_place" else (role, layout, candidate.residency)
        if key in found:
            held = found[key]
            footprint = held.footprint if held.trained or not trained else own.resident
            host = max(held.host, own.host)
            found[key] = ResidentCopy(role, held.layout, (*held.calls, call), held.trained or trained, footprint, host)
        else:
            found[key] = ResidentCopy(role, layout, (call,), trained, own.resident, own.host)
    return tuple(found.values())


def active_of(request: PlanRequest, allocations: Allocations, call: str) -> Footprint:
    """Bytes that a running call adds on each device of its mesh."""
    return _held_by(request, allocations, call).active


def host_of(request: PlanRequest, allocations: Allocations, call: str) -> int:
    """Bytes per device that wait in the node's memory for a call."""
    return _held_by(request, allocations, call).host


def _held_by(request: PlanRequest, allocations: Allocations, call: str) -> Holding:
    candidate = candidate_of(request, allocations, call)
    return holding(request, call, candidate, group_for(request, candidate.layout))


def peak_of(request: PlanRequest, allocations: Allocations, call: str) -> tuple[int, Footprint]:
    """The device of the call's mesh that is fullest while it runs, and what it holds then."""
    mesh, copies = allocations[call].layout.mesh, held_copies(request, allocations)
    held = {
        device: sum((c.footprint for c in copies if device in c.layout.mesh.devices), Footprint())
        for device in sorted({mesh.first, *(device for device in _first_devices(copies) if device in mesh.devices)})
    }
    worst = max(held, key=lambda device: held[device].total)
    return worst, held[worst] + active_of(request, allocations, call)


def resident_on(request: PlanRequest, allocations: Allocations, first: int, stop: int) -> int:
    """Bytes that lie there all the time on the fullest of the devices from `first` up to `stop`."""
    copies = held_copies(request, allocations)
    devices = {first, *(device for device in _first_devices(copies) if first < device < stop)}
    return max(sum(c.footprint.total for c in copies if device in c.layout.mesh.devices) for device in devices)


def _first_devices(copies: tuple[ResidentCopy, ...]) -> Iterator[int]:
    """Devices where what lies there changes."""
    for copy in copies:
        yield copy.layout.mesh.first
        yield copy.layout.mesh.first + copy.layout.mesh.n_devices


def offloading(request: PlanRequest, allocations: Allocations) -> dict[int, int]:
    """Node -> bytes that wait in its memory; nodes are numbered through all groups."""
    nodes: dict[int, int] = {}
    for copy in held_copies(request, allocations):
        for device in copy.layout.mesh.devices if copy.host else ():
            node = node_of(request.cluster, device)
            nodes[node] = nodes.get(node, 0) + copy.host
    return nodes


def node_of(cluster: Cluster, device: int) -> int:
    """The node of a device, numbered through all groups."""
    group = group_of(cluster, device)
    before = sum(one.nodes for one in cluster.groups[:group])
    return before + (device - cluster.first_of(group)) // cluster.groups[group].devices_per_node
