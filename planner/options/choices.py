"""The choices of a call on a mesh of a given size: layouts, micro-batches, recomputation, residency. Prices nothing.

The abilities of engines (`EngineSupport`) bound it: the embedded ones train and infer under data, tensor, pipeline,
expert and context parallelism with whole or FSDP-sharded weights, generate under all of these axes but the last, and
drop copies of trained weights after use.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from realgraph.graphs.spec import Generate, Inference, Train
from realgraph.planner.costs.memory.memory import element_bytes
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import shape_faults
from realgraph.planner.options.calls import (
    drops_copy,
    is_trained,
    longest_part,
    most_running,
    phase_of,
    sample_tokens,
    sequences_in_flight,
    sized,
    stays_on_devices,
    tokens_in_flight,
)
from realgraph.planner.options.passes import passes_for, shared_states
from realgraph.planner.plan.layout import AXES, DeviceMesh, Layout
from realgraph.planner.plan.option import SETTINGS, CallOption
from realgraph.planner.request.engine_support import Axis
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

MICROBATCH_TOKENS_CPU = (1024, 2048, 4096, 8192)
MICROBATCH_TOKENS_GPU = (1024, 2048, 4096, 8192, 16384, 32768)
CACHE_RUNGS = 6  # sizes of a generate call's cache, each half of the one before
MOST_STAGES = 32  # of a pipeline that trains
MOST_FORWARD_STAGES = 4  # of one that only infers
CONTEXT_TOKENS = 8192  # of a sample on each context-parallel rank, at least
FORWARD_MICROBATCH_TOKENS = (8192, 32768)  # sizes of micro-batches that only infer, beside the longest sample
WIDE_TP_NODES = 4  # nodes that one generating replica may span where no node holds the weights
FULL_NODE_FRACTION = 0.6  # of a node's memory: weights beyond it make a replica span nodes


def candidates(
    request: PlanRequest,
    call: str,
    mesh: DeviceMesh,
    cluster: Cluster,
    fits: Callable[[Layout], bool] = lambda layout: True,
) -> Iterator[CallOption]:
    """All that pins and constraints leave for a call on a mesh of this size; what memory and seconds say is not asked.

    cluster: the group of nodes that the mesh lies in. fits: layouts of which it is false are left out.
    """
    pin, forbidden = request.pins.get(call, Pin()), request.constraints.forbid.get(call, ())
    free = pin == Pin() and not forbidden
    reads = is_trained(request, request.graph.role(call)) and not isinstance(request.graph.calls[call], Train)
    away = request.constraints.offload and _may_wait(request, call, cluster)
    for layout in _layouts(request, call, mesh, cluster):
        if not _cut_as_pinned(layout, pin) or not fits(layout):
            continue
        for tokens in token_ladder(request, call, layout, cluster):
            for candidate in _ways(request, call, (layout, tokens), cluster, (reads, away)):
                if free or (agrees(candidate, pin) and not any(barred(candidate, other) for other in forbidden)):
                    yield candidate


def _may_wait(request: PlanRequest, call: str, cluster: Cluster) -> bool:
    """True where a call's states may wait in host memory. On a CPU that is where they are: it has to be asked for."""
    asked = request.pins.get(call, Pin()).residency == "offloaded"
    able = phase_of(request.graph.calls[call]) in request.engine.offload
    free = not shared_states(request, call) and not stays_on_devices(request, call)
    return able and free and (asked or not cluster.is_cpu)


def agrees(candidate: CallOption, pin: Pin) -> bool:
    """True where all that a pin sets besides the place is true of a candidate."""
    settings = candidate.settings
    return all(getattr(pin, name) in (None, settings[name]) for name in SETTINGS)


def is_cut(request: PlanRequest, call: str, mesh: DeviceMesh, cluster: Cluster) -> bool:
    """True where some layout of a call on a mesh of this size has the ranks that its pin sets."""
    pin = request.pins.get(call, Pin())
    set_ones = {axis: ranks for axis in ("dp", "tp", "pp", "cp") if (ranks := getattr(pin, axis)) is not None}
    layouts = _layouts(request, call, mesh, cluster)
    return any(all(getattr(layout, axis) == ranks for axis, ranks in set_ones.items()) for layout in layouts)


def _cut_as_pinned(layout: Layout, pin: Pin) -> bool:
    """True where a layout has every axis and the sharding that a pin sets: no other is worth a closer look."""
    return all(getattr(pin, axis) in (None, getattr(layout, axis)) for axis in AXES)


def barred(candidate: CallOption, pin: Pin) -> bool:
    """True where all that a forbidding pin sets is true of a candidate; places are barred by mesh, not here."""
    if pin.first is not None or pin == Pin():
        return False
    return pin.devices in (None, candidate.layout.mesh.n_devices) and agrees(candidate, pin)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _axes(request: PlanRequest, call: str) -> tuple[Axis, ...]:
    """The axes of parallelism, besides dp, that the call's engine has."""
    return request.engine.axes_of(generates=isinstance(request.graph.calls[call], Generate))


def _asked(request: PlanRequest, call: str, axis: Axis) -> list[int]:
    """The ranks of an axis that are pinned for calls of the same role, which may read or train one copy, and 1.

    On a CPU devices share one memory, so these axes save none, and each collective costs more than between GPUs: the
    search does not choose them by itself.
    """
    role = request.graph.role(call)
    asked = {
        getattr(pin, axis)
        for name, pin in request.pins.items()
        if name in request.mesh_calls and request.graph.role(name) == role
    }
    return sorted({1} | {ranks for ranks in asked if ranks})


def _layouts(request: PlanRequest, call: str, mesh: DeviceMesh, cluster: Cluster) -> Iterator[Layout]:
    if not _axes(request, call):
        yield Layout(mesh, dp=mesh.n_devices)
        asked = request.pins.get(call, Pin()).sharding == "fsdp"
        if (mesh.n_devices > 1 or asked) and not isinstance(request.graph.calls[call], Generate):
            yield Layout(mesh, dp=mesh.n_devices, sharding="fsdp")
        return
    most = sized(request, call).workload.n_samples
    for tp in _tensor_ranks(request, call, mesh, cluster):
        for pp in _stages(request, call, mesh.n_devices // tp, cluster):
            for cp in _context_ranks(request, call, mesh.n_devices // tp // pp, cluster):
                dp = mesh.n_devices // (tp * pp * cp)
                if dp <= most:
                    yield from _with_experts(request, call, Layout(mesh, dp=dp, tp=tp, pp=pp, cp=cp))


def _tensor_ranks(request: PlanRequest, call: str, mesh: DeviceMesh, cluster: Cluster) -> list[int]:
    """Divisors of a node's devices that divide the heads, and KV heads evenly or into equal copies."""
    if "tp" not in _axes(request, call):
        return [1]
    model, pinned = request.model(call), request.pins.get(call, Pin()).tp
    widest = min(mesh.n_devices, cluster.devices_per_node)
    if isinstance(request.graph.calls[call], Generate):
        weights = element_bytes(request.role(call).dtype) * model.n_params()
        while weights > FULL_NODE_FRACTION * widest * cluster.memory_bytes and 2 * widest <= mesh.n_devices:
            if widest >= WIDE_TP_NODES * cluster.devices_per_node:
                break
            widest *= 2
    sizes: Sequence[int] = [pinned] if pinned else range(1, widest + 1)
    if cluster.is_cpu and not pinned:
        sizes = [1] if isinstance(request.graph.calls[call], Generate) else _asked(request, call, "tp")
    return [
        tp
        for tp in sizes
        if mesh.n_devices % tp == 0
        and (tp >= cluster.devices_per_node or cluster.devices_per_node % tp == 0)
        and not any(shape_faults(model, tp, pp=1, ep=1))
    ]


def _stages(request: PlanRequest, call: str, devices: int, cluster: Cluster) -> list[int]:
    """Pipeline stages: divisors of the devices that are left, never more than layers."""
    if "pp" not in _axes(request, call):
        return [1]
    kind, pinned = request.graph.calls[call], request.pins.get(call, Pin()).pp
    if pinned:
        return [pinned] if devices % pinned == 0 else []
    if isinstance(kind, Generate):
        return [1]
    layers = request.model(call).layers
    if cluster.is_cpu:
        return [pp for pp in _asked(request, call, "pp") if pp <= layers and devices % pp == 0]
    most = MOST_FORWARD_STAGES if isinstance(kind, Inference) else MOST_STAGES
    return [pp for pp in range(1, min(most, layers) + 1) if devices % pp == 0]


def _context_ranks(request: PlanRequest, call: str, devices: int, cluster: Cluster) -> list[int]:
    """Context parallelism pays only where a sample is long."""
    if "cp" not in _axes(request, call):
        return [1]
    pinned = request.pins.get(call, Pin()).cp
    if pinned:
        return [pinned] if devices % pinned == 0 else []
    if cluster.is_cpu:
        return [cp for cp in _asked(request, call, "cp") if devices % cp == 0]
    longest = sample_tokens(sized(request, call))
    return [cp for cp in (1, 2, 4, 8) if devices % cp == 0 and (cp == 1 or longest // cp >= CONTEXT_TOKENS)]


def _with_experts(request: PlanRequest, call: str, layout: Layout) -> Iterator[Layout]:
    """The layout and its expert-parallel kin, each whole and sharded."""
    generates = isinstance(request.graph.calls[call], Generate)
    asked = layout.mesh.n_devices == 1 and request.pins.get(call, Pin()).sharding == "fsdp"  # one rank has all shards
    for ep in _expert_ranks(request, call, layout):
        spread = replace(layout, ep=ep)
        yield spread
        if not generates and (layout.dp * layout.cp > 1 or asked):
            yield replace(spread, sharding="fsdp")


def _expert_ranks(request: PlanRequest, call: str, layout: Layout) -> list[int]:
    """Divisors of the experts and of a stage's devices, dp, cp and tp together; of a server's, where it serves them."""
    model, pinned = request.model(call), request.pins.get(call, Pin()).ep
    generates = isinstance(request.graph.calls[call], Generate)
    served = generates and request.engine.experts_in_replica
    wide = layout.tp if served else layout.dp * layout.cp * layout.tp
    if pinned:
        sizes = [pinned]
    elif "ep" not in _axes(request, call) or served:  # tp cuts experts already: no formula tells them apart
        sizes = [1]
    elif request.cluster.is_cpu:  # as of tp: no formula knows what it takes there
        sizes = [1] if generates else _asked(request, call, "ep")
    else:
        sizes = [1, *(ep for ep in range(2, min(wide, model.experts) + 1) if model.experts % ep == 0)]
    return [ep for ep in sizes if wide % ep == 0 and not any(shape_faults(model, tp=1, pp=1, ep=ep))]


# --- micro-batches ----------------------------------------------------------------------------------------------------


def token_ladder(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> tuple[int, ...]:
    """Sizes to try, largest first: tokens of a micro-batch, or of the cache of a generate call.

    A pin or `batch.max_tokens_per_microbatch` leaves one size; a sample that is longer is a micro-batch of its own.
    """
    own, pin = sized(request, call), request.pins.get(call, Pin())
    workload = own.workload
    if isinstance(request.graph.calls[call], Generate):
        return (
            (pin.kv_cache_tokens,) if pin.kv_cache_tokens else _cache_ladder(own, sequences_in_flight(own, layout.dp))
        )
    share = math.ceil(workload.n_samples / layout.dp)
    fixed = pin.max_tokens_per_microbatch or workload.max_tokens_per_microbatch
    longest = longest_part(request, call, layout)
    if fixed:
        return (fixed,)
    ladder = sorted({longest, *(size for size in _ladder(request, call, cluster) if size > longest)})
    enough = [size for size in ladder if size >= share * longest]
    return tuple(reversed([size for size in ladder if not enough or size <= enough[0]]))


def _ladder(request: PlanRequest, call: str, cluster: Cluster) -> tuple[int, ...]:
    if cluster.is_cpu:
        return MICROBATCH_TOKENS_CPU
    wide = request.engine.axes and isinstance(request.graph.calls[call], Inference)
    return FORWARD_MICROBATCH_TOKENS if wide else MICROBATCH_TOKENS_GPU


def _cache_ladder(request: PlanRequest, in_flight: int) -> tuple[int, ...]:
    """Cache tokens for all that may be in flight on a rank at once, for half of it, and so on; at least for the longest
    sample. A cache is paged, and holds what sequences have now."""
    running = min(in_flight, most_running(request))
    longest, each = sample_tokens(request), tokens_in_flight(request)
    rungs = [running >> i for i in range(running.bit_length())]
    return tuple(dict.fromkeys(max(longest, math.ceil(each * rung)) for rung in rungs[:CACHE_RUNGS]))


# --- what is kept where -----------------------------------------------------------------------------------------------


def _ways(
    request: PlanRequest, call: str, size: tuple[Layout, int], cluster: Cluster, kept: tuple[bool, bool]
) -> Iterator[CallOption]:
    """Recomputation, schedule and residency, of a layout and tokens. kept: whether the call reads
    trained weights, and whether states may wait in host memory.

    States that several train calls share lie once, for all of them, and stay on the devices.
    """
    kind = request.graph.calls[call]
    (layout, tokens), (reads, offloads) = size, kept
    plain = CallOption(layout, kv_cache_tokens=tokens) if isinstance(kind, Generate) else CallOption(layout, tokens)
    if reads:
        yield replace(plain, residency="reallocated")
        if not drops_copy(request, call) and (not isinstance(kind, Generate) or layout.sharding == "replicated"):
            yield replace(plain, residency="in_place")
        return
    for candidate in passes_for(request, call, plain, cluster) if isinstance(kind, Train) else (plain,):
        yield candidate
        if offloads:
            yield replace(candidate, residency="offloaded")
