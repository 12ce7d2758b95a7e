"""Changes from one plan to another: period, allocations, orders, and whether they were made for the same thing."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.feasibility.validate import HASHED
from realgraph.planner.plan.option import CHOSEN, TOKENS
from realgraph.planner.plan.plan import Allocation, Plan, Turn
from realgraph.planner.report.format import (
    bytes_text,
    change_text,
    devices_text,
    layout_text,
    seconds_text,
    words,
)
from realgraph.planner.report.text import TRANSPORT_WORDS, layers_text

SAME_FRACTION = 0.005  # of seconds or bytes: below it two predictions are told as equal


class PlanChange(Struct, frozen=True):
    """One thing that differs."""

    subject: str  # a call, or '' for the plan
    what: str
    before: str
    after: str
    change: str = ""  # relative where both are numbers


def diff(before: Plan, after: Plan) -> tuple[PlanChange, ...]:
    """All changes, those of the whole plan first, then call by call, then the orders of devices."""
    return (*_whole(before, after), *_calls(before, after), *_orders(before, after))


def _whole(before: Plan, after: Plan) -> Iterator[PlanChange]:
    for part, what in HASHED.items():
        if getattr(before.hashes, part) != getattr(after.hashes, part):
            text = "the two were made for different things, so their predictions don't compare like for like"
            yield PlanChange(
                "", f"the {what}", getattr(before.hashes, part) or "none", getattr(after.hashes, part) or "none", text
            )
    yield from _seconds("", "period", before.period_seconds, after.period_seconds)
    yield from _seconds("", "lower bound", before.lower_bound_seconds, after.lower_bound_seconds)
    if before.latency_seconds and after.latency_seconds:  # 0 where a plan written by hand says none
        yield from _seconds("", "latency of a step", before.latency_seconds, after.latency_seconds)
    if before.staleness != after.staleness:
        yield PlanChange("", "staleness", str(before.staleness), str(after.staleness))
    if before.bottleneck != after.bottleneck:
        yield PlanChange("", "critical circuit", " -> ".join(before.bottleneck), " -> ".join(after.bottleneck))


def _calls(before: Plan, after: Plan) -> Iterator[PlanChange]:
    for name in dict.fromkeys((*before.allocations, *after.allocations)):
        old, new = before.allocations.get(name), after.allocations.get(name)
        if old is None or new is None:
            yield PlanChange(name, "call", *(layout_text(a.layout) if a else "absent" for a in (old, new)))
        else:
            yield from _allocation(name, old, new)
    for name in _moved(before) | _moved(after):
        old_seconds, new_seconds = (plan.reallocation_seconds.get(name, 0.0) for plan in (before, after))
        yield from _seconds(name, "reallocation", old_seconds, new_seconds)
        old_way, new_way = before.reallocation_transport.get(name), after.reallocation_transport.get(name)
        if old_way is not None and new_way is not None and old_way != new_way:
            yield PlanChange(name, "transport", TRANSPORT_WORDS[old_way], TRANSPORT_WORDS[new_way])


def _moved(plan: Plan) -> dict[str, None]:
    """The calls that read trained weights, in the plan's order."""
    return dict.fromkeys((*plan.reallocation_transport, *plan.reallocation_seconds))


def _allocation(name: str, old: Allocation, new: Allocation) -> Iterator[PlanChange]:
    if replace(old.layout, stages=()) != replace(new.layout, stages=()):
        yield PlanChange(name, "layout", layout_text(old.layout), layout_text(new.layout))
    elif old.layout.stages and new.layout.stages:
        before, after = layers_text(old.layout.stages), layers_text(new.layout.stages)
        if before != after:
            yield PlanChange(name, "stages", before, after)
    if _batches(old) != _batches(new):
        yield PlanChange(name, "micro-batches", _batches(old), _batches(new))
    for what in (name for name in CHOSEN if name not in TOKENS):
        if getattr(old, what) != getattr(new, what):
            yield PlanChange(name, what, *(str(getattr(a, what)).lower() for a in (old, new)))
    if old.prefetch_during != new.prefetch_during:
        yield PlanChange(name, "prefetched during", *(a.prefetch_during or "its own call" for a in (old, new)))
    yield from _seconds(name, "seconds", old.seconds, new.seconds)
    if _differs(old.peak_bytes, new.peak_bytes):
        texts = [f"{bytes_text(a.peak_bytes)} ({words(a.worst_term)})" for a in (old, new)]
        yield PlanChange(name, "memory", texts[0], texts[1], _change(old.peak_bytes, new.peak_bytes))


def _batches(allocation: Allocation) -> str:
    spare = f" + {allocation.spare_cache_tokens:,}" if allocation.spare_cache_tokens else ""
    tokens = f"{allocation.tokens:,}{spare} tokens"
    more = f" + {allocation.spare_running:,}" if allocation.spare_running else ""
    running = f", {allocation.running:,}{more} sequences at once" if allocation.running else ""
    return f"{allocation.microbatches:,} x {tokens}{running}" if allocation.microbatches else f"{tokens}{running}"


def _orders(before: Plan, after: Plan) -> Iterator[PlanChange]:
    """Devices with equal changes of their cyclic order, together."""
    groups: dict[tuple[tuple[Turn, ...], tuple[Turn, ...]], list[int]] = {}
    for device in sorted({*before.orders, *after.orders}):
        pair = (before.orders.get(device, ()), after.orders.get(device, ()))
        if pair[0] != pair[1]:
            groups.setdefault(pair, []).append(device)
    for (old, new), devices in groups.items():
        yield PlanChange(f"devices {devices_text(devices)}", "order", _order(old), _order(new))


def _order(turns: tuple[Turn, ...]) -> str:
    return " -> ".join(f"{turn.call}{f' ({turn.offset:+d})' if turn.offset else ''}" for turn in turns) or "nothing"


def _seconds(subject: str, what: str, old: float, new: float) -> Iterator[PlanChange]:
    if _differs(old, new):
        yield PlanChange(subject, what, seconds_text(old), seconds_text(new), _change(old, new))


def _differs(old: float, new: float) -> bool:
    return abs(new - old) > SAME_FRACTION * max(abs(old), abs(new))


def _change(old: float, new: float) -> str:
    return change_text(new / old) if old > 0 else ""
