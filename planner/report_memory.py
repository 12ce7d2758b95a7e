"""What fills each group of devices at its worst moment, owner by owner: the stacked bars of a report."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from realgraph.planner.layout import Layout
from realgraph.planner.memory import TERMS, usable_bytes
from realgraph.planner.options import active, held_copies
from realgraph.planner.plan import Plan
from realgraph.planner.report_format import words
from realgraph.planner.request import PlanRequest


class MemoryPart(Struct, frozen=True):
    """Bytes of one owner on each device of a group. resident: all the time; active: while the worst call runs."""

    label: str
    nbytes: int
    kind: Literal["resident", "active"]


class MemoryBar(Struct, frozen=True):
    """A group of devices that hold the same things. The worst moment is while `call` runs, '' where none does.

    usable_bytes: what a plan may fill; device_bytes: what the device has.
    """

    devices: tuple[int, ...]
    parts: tuple[MemoryPart, ...]
    call: str
    usable_bytes: int
    device_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def memory_bars(request: PlanRequest, plan: Plan) -> tuple[MemoryBar, ...]:
    """One bar per group of devices with the same calls, in the order of their first devices."""
    layouts = {name: allocation.layout for name, allocation in plan.allocations.items()}
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in range(request.cluster.n_devices):
        calls = tuple(name for name, layout in layouts.items() if device in layout.mesh.devices)
        groups.setdefault(calls, []).append(device)
    return tuple(_bar(request, plan, layouts, devices) for devices in groups.values())


def _bar(request: PlanRequest, plan: Plan, layouts: Mapping[str, Layout], devices: Sequence[int]) -> MemoryBar:
    device, cluster = devices[0], request.cluster
    resident = [
        MemoryPart(_copy_label(copy.role, copy.calls, copy.trained), nbytes, "resident")
        for copy, nbytes in held_copies(request, layouts, device)
    ]
    here = [name for name, layout in layouts.items() if device in layout.mesh.devices]
    moments = {
        name: active(request, name, layouts[name], plan.allocations[name].max_tokens_per_microbatch) for name in here
    }
    worst = max(moments, key=lambda name: moments[name].total, default="")
    running = [
        MemoryPart(f"{worst}: {words(term)}", getattr(moments[worst], term), "active")
        for term in (TERMS if worst else ())
        if getattr(moments[worst], term)
    ]
    return MemoryBar(tuple(devices), (*resident, *running), worst, usable_bytes(cluster), cluster.memory_bytes)


def _copy_label(role: str, calls: Sequence[str], trained: bool) -> str:
    what = "trained states" if trained else "weights"
    return f"{role}: {what} for {', '.join(calls)}"
