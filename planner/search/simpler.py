"""The simpler of plans that no prediction tells apart: what makes a plan odd is left out where that costs next to
nothing.

Odd are: experts spread over nodes, stages or chunks of stages whose number does not divide the layers, interleaving of
single layers, and, of a synchronous plan, calls on devices of their own. Each is forbidden in turn by pins, and the
search asked again. What it finds then is taken where nothing else of it is odd that was not before, and where it is
within the plan's own error bar and within MOST_LOSS: the errors of plans that are alike go together, so that most of a
bar says nothing about which of two is faster.
"""

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.options.constraints import constraint_problems
from realgraph.planner.options.holdings import group_for
from realgraph.planner.options.passes import counts_without_single_layers, even_chunks, has_single_layers
from realgraph.planner.options.tables import Known
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.plan.stages import stages_of
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.levels import best_level, levels_of

LIMITS = Limits(seconds=5.0)  # of each search
MOST_LOSS = 0.02  # of the exact plan's period, all that is made simpler together

OddKind = Literal["experts over nodes", "uneven stages", "uneven chunks", "single layers", "calls apart"]


class Oddity(Struct, frozen=True):
    """One thing that makes a plan odd. call: '' where it is of the plan as a whole."""

    kind: OddKind
    call: str = ""


class Simplification(Struct, frozen=True):
    """A change that leaves an oddity out. asked: the request under which it can't be otherwise."""

    oddity: Oddity
    text: str
    asked: PlanRequest


def oddities(request: PlanRequest, plan: Plan) -> frozenset[Oddity]:
    """All that is odd about a plan. A stage that has a layer more or fewer than another for the sake of the embedding
    or the head is not, where the number of stages divides the layers."""
    found = set[Oddity]()
    for call, allocation in plan.allocations.items():
        layout, model = allocation.layout, request.model(call)
        if layout.ep > group_for(request, layout).devices_per_node:
            found.add(Oddity("experts over nodes", call))
        if model.layers % layout.pp:
            found.add(Oddity("uneven stages", call))
        if allocation.schedule == "interleaved":
            stages = stages_of(model, request.role(call).head, layout, allocation.chunks)
            if has_single_layers(stages):
                found.add(Oddity("single layers", call))
            if not model.layers % layout.pp and model.layers % (layout.pp * allocation.chunks):
                found.add(Oddity("uneven chunks", call))
    meshes = {allocation.layout.mesh for allocation in plan.allocations.values()}
    if len(meshes) > 1 and not plan.staleness:
        found.add(Oddity("calls apart"))
    return frozenset(found)


def simplest(request: PlanRequest, plan: Plan, limits: Limits = LIMITS) -> Plan:
    """The plan, or one that is simpler and takes at most MOST_LOSS longer, and no longer than the plan's own error bar.

    The bound stays that of the exact plan; `exact_seconds` and `simplified` tell what was given up. limits: of each
    search, that takes no longer than LIMITS; what it does not find in time changes nothing.
    """
    if plan.period_seconds <= 0:
        return plan
    bar = max(0.0, plan.period_bar_seconds[1] / plan.period_seconds - 1)
    most = plan.period_seconds * (1 + min(MOST_LOSS, bar))
    limits = replace(limits, seconds=min(limits.seconds, LIMITS.seconds))
    best, texts, tried = plan, list[str](), set[str]()
    seconds = plan.search_seconds
    while (change := next((one for one in _changes(request, best) if one.text not in tried), None)) is not None:
        tried.add(change.text)
        made = _without(change, oddities(request, best), limits, most)
        if made is not None:
            best, request = made
            seconds += best.search_seconds
            texts.append(change.text)
    if best is plan:
        return plan
    return replace(
        best,
        lower_bound_seconds=min(plan.lower_bound_seconds, best.period_seconds),
        scope=plan.scope,
        stopped=plan.stopped,
        search_seconds=seconds,
        exact_seconds=plan.period_seconds,
        simplified=tuple(texts),
    )


def _without(
    change: Simplification, before: frozenset[Oddity], limits: Limits, most: float
) -> tuple[Plan, PlanRequest] | None:
    """A plan under a change that is odd in fewer ways than `before` and in no other, and its request; what comes with
    the change is left out in turn. None where there is none that takes less than `most` seconds."""
    found = _searched(change.asked, limits, most)
    if found is None:
        return None
    odd = oddities(change.asked, found)
    if odd < before:
        return found, change.asked
    further = (one for one in _changes(change.asked, found) if one.oddity in odd - before)
    return next((made for made in (_without(one, before, limits, most) for one in further) if made is not None), None)


def _searched(asked: PlanRequest, limits: Limits, most: float) -> Plan | None:
    """The best plan of a request, None where none is found that takes less than `most` seconds."""
    if limits.stop() or constraint_problems(asked):
        return None
    found = best_level(asked, limits, Known(), levels_of(asked), most).best
    return found.plan if found is not None else None


def _changes(request: PlanRequest, plan: Plan) -> Iterator[Simplification]:
    """For each oddity the changes that leave it out, the simplest first."""
    odd = oddities(request, plan)
    for call, allocation in plan.allocations.items():
        pin = request.pins.get(call, Pin())
        kinds: set[OddKind] = {oddity.kind for oddity in odd if oddity.call == call}
        for kind, text, changed in _of_call(request, (call, allocation), pin, kinds):
            yield Simplification(Oddity(kind, call), text, replace(request, pins={**request.pins, call: changed}))
    if Oddity("calls apart") in odd and not request.constraints.colocated:
        together = replace(request, constraints=replace(request.constraints, colocated=True))
        yield Simplification(Oddity("calls apart"), "every call on all devices", together)


def _of_call(
    request: PlanRequest, placed: tuple[str, Allocation], pin: Pin, kinds: set[OddKind]
) -> Iterator[tuple[OddKind, str, Pin]]:
    """Changes of one call: what they leave out, their texts, and its pin with each. What is pinned stays."""
    call, allocation = placed
    layout, model = allocation.layout, request.model(call)
    if "experts over nodes" in kinds and pin.ep is None:
        inside = math.gcd(layout.ep, group_for(request, layout).devices_per_node)
        text = f"{call}: ep {inside} within a node, not {layout.ep} over several"
        yield "experts over nodes", text, replace(pin, ep=inside)
    if "uneven stages" in kinds and pin.pp is None:
        even = max(pp for pp in range(1, layout.pp) if model.layers % pp == layout.mesh.n_devices % pp == 0)
        text = f"{call}: pp {even}, which divides {model.layers} layers as {layout.pp} does not"
        yield "uneven stages", text, replace(pin, pp=even)
    odd_chunks: tuple[OddKind, ...] = ("single layers", "uneven chunks")
    kind: OddKind | None = next((one for one in odd_chunks if one in kinds), None)
    if kind is not None and pin.chunks is None:
        before = f"not interleaved x{allocation.chunks} in {layout.pp} stages of {model.layers} layers"
        if pin.schedule is None:
            yield kind, f"{call}: 1F1B, {before}", replace(pin, schedule="1f1b")
        counts = counts_without_single_layers(request, call, layout) if kind == "single layers" else ()
        even = even_chunks(model.layers, layout.pp)
        count = even if even > 1 else next(iter(counts), 0)
        if count:
            text = f"{call}: interleaved x{count}, {before}"
            yield kind, text, replace(pin, pp=layout.pp, schedule="interleaved", chunks=count)
