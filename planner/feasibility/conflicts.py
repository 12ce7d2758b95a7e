"""The user's constraints one by one, each with its path in the run file, and the request without it. Pure."""

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

PLACE_FIELDS = ("first", "devices")  # of a pin: one constraint together


class Constraint(Struct, frozen=True):
    """Something that the user fixed."""

    path: str
    text: str
    without: Callable[[PlanRequest], PlanRequest]  # the request with everything but this


def constraints_of(request: PlanRequest) -> tuple[Constraint, ...]:
    """All that may be left out: pins field by field, constraints one by one, and the batch's micro-batch size."""
    return (*_pins(request), *_constraints(request), *_batch(request))


def _pins(request: PlanRequest) -> Iterator[Constraint]:
    for call, pin in request.pins.items():
        if any(getattr(pin, name) is not None for name in PLACE_FIELDS):
            shown = " ".join(f"{name} {getattr(pin, name)}" for name in PLACE_FIELDS if getattr(pin, name) is not None)
            yield Constraint(f"allocation.{call}", f"allocation.{call} on {shown}", _without_fields(call, PLACE_FIELDS))
        for name in Pin.__struct_fields__:
            value = getattr(pin, name)
            if name not in PLACE_FIELDS and value is not None:
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                path = f"allocation.{call}.{name}"
                yield Constraint(path, f"{path}: {shown}", _without_fields(call, (name,)))


def _without_fields(call: str, names: tuple[str, ...]) -> Callable[[PlanRequest], PlanRequest]:
    def without(request: PlanRequest) -> PlanRequest:
        pin = replace(request.pins[call], **dict.fromkeys(names))
        return replace(request, pins={**request.pins, call: pin})

    return without


def _constraints(request: PlanRequest) -> Iterator[Constraint]:
    given, default = request.constraints, Constraints()
    for i, calls in enumerate(given.share):
        yield Constraint(f"constraints.share[{i}]", f"{', '.join(calls)} on one mesh", _without_share(calls))
    for call, pins in given.forbid.items():
        for i, pin in enumerate(pins):
            path = f"constraints.forbid.{call}[{i}]"
            yield Constraint(path, path, _without_forbidden(call, pin))
    for name in ("reserve", "memory_gb", "host_memory_gb", "colocated", "offload"):
        value = getattr(given, name)
        if value != getattr(default, name):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            yield Constraint(f"constraints.{name}", f"constraints.{name}: {shown}", _without_constraint(name))


def _without_share(calls: tuple[str, ...]) -> Callable[[PlanRequest], PlanRequest]:
    def without(request: PlanRequest) -> PlanRequest:
        kept = tuple(other for other in request.constraints.share if other != calls)
        return replace(request, constraints=replace(request.constraints, share=kept))

    return without


def _without_forbidden(call: str, pin: Pin) -> Callable[[PlanRequest], PlanRequest]:
    def without(request: PlanRequest) -> PlanRequest:
        forbid = request.constraints.forbid
        kept = {**forbid, call: tuple(other for other in forbid[call] if other != pin)}
        return replace(request, constraints=replace(request.constraints, forbid=kept))

    return without


def _without_constraint(name: str) -> Callable[[PlanRequest], PlanRequest]:
    default = getattr(Constraints(), name)
    return lambda request: replace(request, constraints=replace(request.constraints, **{name: default}))


def _batch(request: PlanRequest) -> Iterator[Constraint]:
    tokens = request.workload.max_tokens_per_microbatch
    if tokens is not None:
        path = "batch.max_tokens_per_microbatch"
        yield Constraint(path, f"{path}: {tokens}", _without_batch)


def _without_batch(request: PlanRequest) -> PlanRequest:
    return replace(request, workload=replace(request.workload, max_tokens_per_microbatch=None))
