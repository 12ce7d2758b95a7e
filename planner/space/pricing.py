"""Seconds and bytes of one way to run a call: the rows of the search's tables. Chooses nothing.

A stream of generation on a mesh that other calls share is priced as if nothing paused it: the pauses lengthen its
latency, which the staleness bound limits in the same way as sequences in flight. So its best level may be one too high.
"""

from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

from realgraph.graphs.spec import Generate, Inference, ModelCall, ModelRole, Train
from realgraph.planner.cluster import Cluster
from realgraph.planner.cost_table import MeasuredCall, Phase, PhaseFactor
from realgraph.planner.costs import memory
from realgraph.planner.costs.memory import Footprint, Running
from realgraph.planner.costs.move import offload_seconds
from realgraph.planner.costs.rollout import rollout_variants
from realgraph.planner.costs.setting import Setting
from realgraph.planner.devices import Costs
from realgraph.planner.layout import AXES, PASSES, Layout
from realgraph.planner.model_spec import ModelSpec
from realgraph.planner.request import PlanRequest, call_hashes
from realgraph.planner.space.options import (
    Candidate,
    Passes,
    formula_seconds,
    generate_work,
    input_seconds,
    longest_part,
    running_sequences,
)

STREAMS = 3  # levels of sequences in flight of one cache size: the batch as a whole, and the two fullest streams
ELSEWHERE = 1 << 50  # bytes that no device has: what reads the trained copy in place fits nowhere else
DEFAULT_ERROR: dict[Phase, float] = {"train": 0.12, "inference": 0.25, "generate": 0.15, "reallocate": 0.5}


class Holding(Struct, frozen=True):
    """Bytes of one call on each device of its mesh.

    resident: all the time. active: besides, while it runs. shared: the part of `active` that is there anyway where the
    call's role is trained on the same mesh under an equal layout. host: of the node's memory, all the time.
    """

    resident: Footprint
    active: Footprint
    shared: int = 0
    host: int = 0


class Option(Struct, frozen=True):
    """A candidate with its price. running: sequences that decode at once on a replica, of a generate call.

    error: relative standard error of `seconds`. nbytes: resident, active and shared, as the search counts them.
    """

    candidate: Candidate
    seconds: float
    latency: float
    nbytes: tuple[int, int, int]
    host: int = 0
    running: int = 0
    error: float = 0.0


class Timing(Struct, frozen=True):
    """Seconds that a call holds its mesh, seconds until its outputs are there, sequences that decode at once."""

    seconds: float
    latency: float
    running: int = 0
    error: float = 0.0


def phase_of(call: ModelCall) -> Phase:
    """The phase whose measured factor applies."""
    match call:
        case Train():
            return "train"
        case Inference():
            return "inference"
        case Generate():
            return "generate"
        case _:
            raise ValueError("free calls have no phase")


Key = tuple[Layout, int, Passes]


class Timed(Struct, frozen=True):
    """Of one call on one mesh, what several candidates share: seconds and bytes of a run under all residencies, and
    seconds for the inputs of so many data-parallel ranks."""

    timings: dict[Key, tuple[Timing, ...]] = {}
    running: dict[Key, Footprint] = {}
    inputs: dict[int, float] = {}


def options_of(
    request: PlanRequest, call: str, candidate: Candidate, cluster: Cluster, timed: Timed | None = None
) -> Iterator[Option]:
    """The rows of one candidate, none where it can't fit an empty device of `cluster`, its group of nodes.

    timed: of one call on one mesh, what was found for the same candidate under other residencies.
    """
    known = Timed() if timed is None else timed
    key = (candidate.layout, candidate.tokens, candidate.passes)
    if key not in known.running:
        known.running[key] = _running(request, call, candidate)
    held = _holding(request, call, candidate, cluster, known.running[key])
    resident, active = held.resident.total, held.active.total
    if resident + active > memory.usable_bytes(cluster):
        return
    if candidate.home:
        active, shared = active + ELSEWHERE, ELSEWHERE
    else:
        shared = held.shared
    if key not in known.timings:
        known.timings[key] = formula_timings(request, call, candidate, cluster)
    ranks = candidate.layout.dp
    if ranks not in known.inputs:
        known.inputs[ranks] = input_seconds(request, call, candidate.layout, cluster)
    more = known.inputs[ranks] + _offload_seconds(request, call, candidate, cluster)
    for base in known.timings[key]:
        timing = corrected(request, call, candidate, base, more)
        yield Option(
            candidate=candidate,
            seconds=timing.seconds,
            latency=timing.latency,
            nbytes=(resident, active, shared),
            host=held.host,
            running=timing.running,
            error=timing.error,
        )


# --- bytes ------------------------------------------------------------------------------------------------------------


def holding(request: PlanRequest, call: str, candidate: Candidate, cluster: Cluster) -> Holding:
    """What a call's devices hold for it. Where a copy is dropped after use, its weights count while the call runs."""
    return _holding(request, call, candidate, cluster, _running(request, call, candidate))


def copy_of(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> Footprint:
    """Bytes of a call's own copy of its role's weights, and of optimizer states where it trains."""
    trains = isinstance(request.graph.calls[call], Train)
    return (_trained if trains else _frozen)(request.model(call), request.role(call), layout, cluster.is_cpu)


def _holding(request: PlanRequest, call: str, candidate: Candidate, cluster: Cluster, active: Footprint) -> Holding:
    """The same where what a running call adds is known."""
    if candidate.home:
        return Holding(Footprint(), active)
    copy = copy_of(request, call, candidate.layout, cluster)
    if candidate.residency == "offloaded":
        return Holding(Footprint(), active + copy, host=copy.total)
    if request.engine == "any" and candidate.residency == "reallocated":
        return Holding(Footprint(), active + copy, shared=copy.weights)
    return Holding(copy, active)


def _running(request: PlanRequest, call: str, candidate: Candidate) -> Footprint:
    """What a running call adds, its weights left aside."""
    model, role, layout = request.model(call), request.role(call), candidate.layout
    if isinstance(request.graph.calls[call], Generate):
        return memory.generation(model, role, layout, candidate.tokens)
    tokens = max(candidate.tokens, longest_part(request, layout))
    trains = isinstance(request.graph.calls[call], Train)
    if trains:
        rows = memory.train_activations(model, role, layout, tokens, running_of(candidate.passes))
    else:
        rows = _forward(model, role, layout, tokens)
    return rows + memory.gathered(model, role, layout, trains)


def running_of(passes: Passes) -> Running:
    """The same in the terms of memory: see `memory.train_activations`."""
    return Running(passes.recompute, chunks=passes.chunks, delayed=passes.schedule == "zero_bubble")


@lru_cache(maxsize=65536)
def _forward(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    return memory.forward_activations(model, role, layout, tokens)


@lru_cache(maxsize=16384)
def _trained(model: ModelSpec, role: ModelRole, layout: Layout, cpu: bool) -> Footprint:
    """A trained copy's states; on CPUs the rescue copies lie in the same memory."""
    states = memory.trained_copy(model, role, layout)
    return states + memory.rescue_copies(model, role, layout) if cpu else states


@lru_cache(maxsize=16384)
def _frozen(model: ModelSpec, role: ModelRole, layout: Layout, cpu: bool) -> Footprint:
    """A copy that only runs forward; `cpu` changes nothing of it."""
    return memory.frozen_copy(model, role, layout)


# --- seconds ----------------------------------------------------------------------------------------------------------


def formula_timings(request: PlanRequest, call: str, candidate: Candidate, cluster: Cluster) -> tuple[Timing, ...]:
    """By the formulas alone; several where a generate call may have more or less in flight."""
    generates = isinstance(request.graph.calls[call], Generate)
    setting = Setting(request.model(call), request.role(call), candidate.layout, cluster, factors_of(request, cluster))
    if generates and request.workload.staleness > 0:
        work = generate_work(request, candidate.layout, candidate.tokens)
        streams = rollout_variants(setting, work, request.workload.staleness)[:STREAMS]
        return tuple(Timing(v.seconds, v.latency, v.running) for v in streams)
    seconds = formula_seconds(request, call, setting, candidate.tokens, candidate.passes)
    running = running_sequences(request, candidate.layout, candidate.tokens) if generates else 0
    return (Timing(seconds, seconds, running),)


def factors_of(request: PlanRequest, cluster: Cluster) -> Costs | None:
    """Measured efficiency factors of a group's kind of device; None: the shipped ones."""
    return request.costs.factors if request.costs.kind in ("", cluster.kind) else None


def corrected(request: PlanRequest, call: str, candidate: Candidate, timing: Timing, more: float) -> Timing:
    """With `more` seconds of offloading and of its inputs, and the phase's measured factor.

    Where this very call was measured under this layout and workload, its measured seconds stand.
    """
    measured = _measured(request, call, candidate)
    if measured is not None:
        return Timing(measured[0], measured[0], timing.running, measured[1])
    phase = phase_of(request.graph.calls[call])
    found = request.costs.phases.get(phase, PhaseFactor())
    seconds = found.factor * (timing.seconds + more) + found.constant_seconds
    latency = found.factor * (timing.latency + more) + found.constant_seconds
    return Timing(seconds, max(seconds, latency), timing.running, found.error or DEFAULT_ERROR[phase])


def _measured(request: PlanRequest, call: str, candidate: Candidate) -> tuple[float, float] | None:
    """The measured seconds and error of exactly this call, None where there are none."""
    for found in request.costs.calls:
        same = found.call == call and _ran(found, candidate)
        if same and (found.model, found.workload) == call_hashes(request, call):
            return found.seconds, found.error
    return None


def _ran(found: MeasuredCall, candidate: Candidate) -> bool:
    """Whether what was measured ran as the candidate says."""
    layout, passes = candidate.layout, candidate.passes
    now = (*layout.axes, passes.recompute, passes.schedule, passes.chunks, layout.mesh.n_devices, candidate.tokens)
    then = (getattr(found, name) for name in (*AXES, *PASSES, "devices", "max_tokens_per_microbatch"))
    return now == tuple(then)


def _offload_seconds(request: PlanRequest, call: str, candidate: Candidate, cluster: Cluster) -> float:
    """Frozen weights are read from the host before use; trained states are read and written back."""
    if candidate.residency != "offloaded":
        return 0.0
    copy, trains = copy_of(request, call, candidate.layout, cluster), isinstance(request.graph.calls[call], Train)
    return (2 if trains else 1) * offload_seconds(cluster, copy.total)
