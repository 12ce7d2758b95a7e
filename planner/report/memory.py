"""The memory of each group of devices at its worst moment, owner by owner: the stacked bars of a report."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from realgraph.planner.costs.memory.memory import TERMS, Footprint
from realgraph.planner.options.holdings import (
    ResidentCopy,
    active_of,
    group_for,
    margin_of,
    prefetched_during,
    resident_copies,
)
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.format import words
from realgraph.planner.request.request import PlanRequest


class MemoryPart(Struct, frozen=True):
    """Bytes of one owner on each device of a group. resident: all the time; active: while the worst call runs; margin:
    by which it may need more, at the quantile that the run file asks."""

    label: str
    nbytes: int
    kind: Literal["resident", "active", "margin"]


class MemoryBar(Struct, frozen=True):
    """A group of devices that hold the same things. The worst moment is while `call` runs, '' where none does."""

    devices: tuple[int, ...]
    parts: tuple[MemoryPart, ...]
    call: str
    usable_bytes: int  # what a plan may fill
    device_bytes: int  # what the device has

    @property
    def expected_bytes(self) -> int:
        """The prediction: the mean."""
        return sum(part.nbytes for part in self.parts if part.kind != "margin")

    @property
    def bound_bytes(self) -> int:
        """The peak's bound, which must fit."""
        return sum(part.nbytes for part in self.parts)


def memory_bars(request: PlanRequest, plan: Plan) -> tuple[MemoryBar, ...]:
    """One bar per group of devices of one kind with the same calls, in the order of their first devices."""
    copies = resident_copies(request, plan.allocations)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(request.cluster.n_devices):
        place = Layout(DeviceMesh(device, 1))
        calls = [i for i, a in enumerate(plan.allocations.values()) if device in a.layout.mesh.devices]
        kind = request.cluster.groups.index(group_for(request, place))
        groups.setdefault((kind, *calls), []).append(device)
    return tuple(_bar(request, plan, copies, devices) for devices in groups.values())


def _bar(request: PlanRequest, plan: Plan, copies: Sequence[ResidentCopy], devices: Sequence[int]) -> MemoryBar:
    device = devices[0]
    here = [name for name, allocation in plan.allocations.items() if device in allocation.layout.mesh.devices]
    moments = {name: _moment(request, plan, name, device) for name in here}
    margins = {name: margin_of(request, plan.allocations, name) for name in here}
    worst = max(moments, key=lambda name: moments[name].total + margins[name], default="")
    running = [
        MemoryPart(f"{worst}: {words(term)}", getattr(moments[worst], term), "active")
        for term in (TERMS if worst else ())
        if getattr(moments[worst], term)
    ]
    if margins.get(worst):
        running.append(MemoryPart(f"margin of {worst}", margins[worst], "margin"))
    nodes = group_for(request, Layout(DeviceMesh(device, 1)))
    resident = [part for copy in copies if device in copy.layout.mesh.devices for part in _resident(copy)]
    return MemoryBar(tuple(devices), (*resident, *running), worst, device_bytes(request, nodes), nodes.memory_bytes)


def _moment(request: PlanRequest, plan: Plan, call: str, device: int) -> Footprint:
    """Bytes that a running call adds on one of its devices, with those that are prefetched meanwhile."""
    early = prefetched_during(request, plan.allocations, call)
    active = active_of(request, plan.allocations, call)
    return sum((states for mesh, states in early if device in mesh.devices), active)


def _resident(copy: ResidentCopy) -> Iterator[MemoryPart]:
    """A trained copy term by term; another is all weights, named by the calls that read it."""
    whose = copy.role if copy.trained else f"{copy.role} for {', '.join(copy.calls)}"
    for term in TERMS:
        nbytes = getattr(copy.footprint, term)
        if nbytes:
            yield MemoryPart(f"{whose}: {words(term)}", nbytes, "resident")
