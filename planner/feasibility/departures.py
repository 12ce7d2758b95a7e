"""Pins and constraints that a given plan does not keep to. They bind the search; a plan that was edited may part from
them, and this says where."""

from collections.abc import Iterator

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.yaml.document import child
from realgraph.planner.options.choices import barred
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.option import SETTINGS
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

RULE = "plan_departs"


def departures(plan: Plan, request: PlanRequest) -> tuple[Problem, ...]:
    """All of them, each at its path of the run file. The plan is valid for the request."""
    return (*_pins(plan, request), *_forbidden(plan, request), *_constraints(plan, request))


def _departure(path: str, text: str) -> Problem:
    return Problem(Where(path=path), f"the given plan counts, and {text}", "change the plan, or leave this out", RULE)


def _pins(plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    for name, pin in request.pins.items():
        allocation, path = plan.allocations[name], f"$.allocation.{name}"
        if field := _misplaced(pin, allocation.layout.mesh):
            yield _departure(f"{path}.{field}", f"has {name!r} on {_devices(allocation)}")
        for field in SETTINGS:
            wanted, found = getattr(pin, field), allocation.settings[field]
            if wanted not in (None, found):
                yield _departure(f"{path}.{field}", f"has {field} {found} for {name!r}")


def _misplaced(pin: Pin, mesh: DeviceMesh) -> str:
    """The field of a pin that another place than this was said by; '' where it is the place."""
    if pin.devices not in (None, mesh.n_devices):
        return "devices"
    first = pin.first if pin.devices is None else pin.first or 0
    if first in (None, mesh.first):
        return ""
    return "first" if pin.first is not None else "devices"


def _forbidden(plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    for name, pins in request.constraints.forbid.items():
        mesh = plan.allocations[name].layout.mesh
        for i, pin in enumerate(pins):
            there = pin.first == mesh.first and pin.devices in (None, mesh.n_devices)
            if there or barred(plan.allocations[name], pin):
                path = f"{child('$.constraints.forbid', name)}[{i}]"
                yield _departure(path, f"has {name!r} so, on {_devices(plan.allocations[name])}")


def _constraints(plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    constraints = request.constraints
    for i, calls in enumerate(constraints.share):
        if len({plan.allocations[name].layout.mesh for name in calls}) > 1:
            places = ", ".join(f"{name!r} on {_devices(plan.allocations[name])}" for name in calls)
            yield _departure(f"$.constraints.share[{i}]", f"has {places}")
    free = request.cluster.n_devices - constraints.reserve
    for name, allocation in plan.allocations.items():
        mesh, where = allocation.layout.mesh, f"has {name!r} on {_devices(allocation)}"
        if mesh.first + mesh.n_devices > free:
            yield _departure("$.constraints.reserve", where)
        if constraints.colocated and mesh != DeviceMesh(0, free):
            yield _departure("$.constraints.colocated", where)
        if allocation.residency == "offloaded" and not constraints.offload:
            yield _departure("$.constraints.offload", f"has the weights of {name!r} wait in host memory")


def _devices(allocation: Allocation) -> str:
    devices = allocation.layout.mesh.devices
    return f"devices {devices[0]} to {devices[-1]}" if len(devices) > 1 else f"device {devices[0]}"
