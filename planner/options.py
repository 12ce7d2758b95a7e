"""What the search may choose for each call today, and what a choice costs in seconds and bytes. Chooses nothing."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner import memory
from realgraph.planner.cluster import Cluster
from realgraph.planner.cost import Setting
from realgraph.planner.cost_generate import GenerateWork, generate_seconds
from realgraph.planner.cost_inference import inference_seconds
from realgraph.planner.cost_move import reallocation_seconds
from realgraph.planner.cost_train import TrainWork, train_seconds
from realgraph.planner.events import reallocation_node
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.lengths import lengths_of
from realgraph.planner.memory import Footprint
from realgraph.planner.pins import Pin
from realgraph.planner.request import PlanRequest
from realgraph.planner.residency import Copy, copies, reallocations

MAX_RUNNING = 128  # sequences that decode at once on a GPU: the embedded engine's own bound
MAX_RUNNING_CPU = 256  # on a CPU
MAX_RUNNING_SERVER = 1024  # of one replica of a generation server
CACHE_STEP = 64  # positions: the cache of a GPU grows in such steps
CACHE_STEP_CPU = 16
LADDER_CPU = (1024, 2048, 4096, 8192)
LADDER_GPU = (1024, 2048, 4096, 8192, 16384, 32768)
FUNCTION_SECONDS = 1e-4  # of one sample, in one of the workers' subprocesses
ADVANTAGE_SECONDS = 1e-5  # of one sample


class Candidate(Struct, frozen=True):
    """One way to run a call. Where its place is open, the layout's mesh is any of that size in its group of nodes.

    tokens: of a micro-batch, or of the cache of a generate call. home: the call reads the trained copy in place,
    and may be so only where that lies on its mesh under its layout.
    """

    layout: Layout
    tokens: int
    recompute: bool = False
    residency: Literal["resident", "offloaded", "reallocated"] = "resident"
    home: bool = False


# --- meshes and layouts -----------------------------------------------------------------------------------------------


def mesh_fault(mesh: DeviceMesh, cluster: Cluster) -> str:
    """Why a mesh is none of this cluster's, '' where it is one: aligned powers of two in a node, or whole nodes."""
    per_node, last = cluster.devices_per_node, mesh.first + mesh.n_devices
    if mesh.first < 0 or mesh.n_devices < 1 or last > cluster.n_devices:
        return f"devices {mesh.first} to {last - 1} are not all of the cluster's, 0 to {cluster.n_devices - 1}"
    if mesh.first % per_node == 0 and mesh.n_devices % per_node == 0:
        return ""
    if mesh.first // per_node != (last - 1) // per_node:
        return f"devices {mesh.first} to {last - 1} cross a node's border without being whole nodes of {per_node}"
    if mesh.n_devices & (mesh.n_devices - 1):
        return f"{mesh.n_devices} devices are neither a power of two nor whole nodes of {per_node}"
    if (mesh.first % per_node) % mesh.n_devices:
        return (
            f"{mesh.n_devices} devices must begin at a multiple of {mesh.n_devices} in their node, not at {mesh.first}"
        )
    return ""


def pin_problems(request: PlanRequest) -> Iterator[Problem]:
    """What is wrong with the pins, whatever the search would choose."""
    for name, pin in request.pins.items():
        where = Where(path=f"$.allocation.{name}")
        if name in request.mesh_calls:
            yield from _pin_problems(request, name, pin, where)
        else:
            what = "holds no devices: it can't be placed" if name in request.graph.calls else "is no call of the graph"
            yield Problem(where, f"{name!r} {what}", suggest(name, request.mesh_calls), "pin")
    homes: dict[str, str] = {}
    for name, call in request.graph.calls.items():
        if isinstance(call, Train):
            first = homes.setdefault(call.model, name)
            if _pinned_mesh(request, name) != _pinned_mesh(request, first):
                text = f"{first!r} trains the same role on other devices"
                yield Problem(Where(path=f"$.allocation.{name}"), text, "pin both to the same devices", "pin")


def _pin_problems(request: PlanRequest, name: str, pin: Pin, where: Where) -> Iterator[Problem]:
    missing = [axis for axis in ("tp", "pp") if (getattr(pin, axis) or 1) > 1]
    if missing:
        yield Problem(where, engine_lacks(missing[0]), "use dp, and sharding: fsdp for models that don't fit", "pin")
        return
    mesh = _pinned_mesh(request, name)
    fault = mesh_fault(mesh, request.cluster)
    if fault:
        yield Problem(where, fault, "", "pin")
    elif pin.dp not in (None, mesh.n_devices):
        text = f"dp {pin.dp} on {mesh.n_devices} devices: dp x tp x pp must be {mesh.n_devices}"
        yield Problem(where, text, "leave dp out, or set devices to it", "pin")
    if not isinstance(request.graph.calls[name], Generate):
        return
    if pin.sharding == "fsdp":
        yield Problem(where, "generation needs whole weights on a device", "leave sharding out", "pin")
    tokens, longest = pin.max_tokens_per_microbatch, sample_tokens(request)
    if tokens is not None and tokens < longest:
        text = f"a cache of {tokens} tokens holds no sample: the longest has {longest}"
        yield Problem(where, text, f"set max_tokens_per_microbatch to {longest} or more", "pin")


def engine_lacks(axis: str) -> str:
    """Why an axis of parallelism can't be used yet."""
    feature = {
        "tp": "tensor parallelism: layers cut over devices",
        "pp": "pipeline parallelism: stages with ragged micro-batches",
        "ep": "expert parallelism: experts spread over devices",
        "cp": "context parallelism: sequences cut over devices",
    }[axis]
    return f"{axis} > 1 needs {feature}; the engines of this version run dp only"


def _pinned_mesh(request: PlanRequest, call: str) -> DeviceMesh:
    """Where a pin puts a call; all devices (from `first` on) where it says nothing."""
    pin = request.pins.get(call, Pin())
    first = pin.first or 0
    return DeviceMesh(first, pin.devices or pin.dp or request.cluster.n_devices - first)


def call_layout(request: PlanRequest, call: str, sharding: str) -> Layout:
    """The layout of a call whose role has this sharding; generation always holds whole weights."""
    mesh = _pinned_mesh(request, call)
    generates = isinstance(request.graph.calls[call], Generate)
    return Layout(mesh, dp=mesh.n_devices, sharding="fsdp" if sharding == "fsdp" and not generates else "replicated")


def role_shardings(request: PlanRequest) -> dict[str, tuple[str, ...]]:
    """role -> the shardings to try. A pin on any of the role's calls decides; one device has nothing to shard."""
    options: dict[str, tuple[str, ...]] = {}
    for role in dict.fromkeys(request.graph.role(name) for name in request.mesh_calls):
        calls = [name for name in request.mesh_calls if request.graph.role(name) == role]
        sharded = [name for name in calls if not isinstance(request.graph.calls[name], Generate)]
        pinned = {request.pins[name].sharding for name in sharded if name in request.pins} - {None}
        if len(pinned) > 1:
            where = Where(path=f"$.allocation.{sharded[0]}.sharding")
            raise ConfigError(
                [Problem(where, f"the calls of role {role!r} are pinned to different shardings", "", "pin")]
            )
        widest = max((_pinned_mesh(request, name).n_devices for name in sharded), default=1)
        free = ("replicated", "fsdp") if widest > 1 else ("replicated",)
        options[role] = tuple(str(sharding) for sharding in pinned) or free
    return options


# --- micro-batches ----------------------------------------------------------------------------------------------------


def sample_tokens(request: PlanRequest) -> int:
    """The longest sample: prompt and response, tokens."""
    return request.workload.prompt_tokens + request.workload.max_new_tokens


def mean_tokens(request: PlanRequest) -> float:
    """The expected sample: prompt and response, tokens."""
    return mean_prompt_tokens(request) + request.workload.mean_new_tokens


def mean_prompt_tokens(request: PlanRequest) -> float:
    """The expected prompt, tokens."""
    mean = request.workload.mean_prompt_tokens
    return request.workload.prompt_tokens if mean is None else mean


def token_ladder(request: PlanRequest, call: str, layout: Layout) -> tuple[int, ...]:
    """Sizes to try, largest first: tokens of a micro-batch, or of the cache of a generate call.

    A pin or `batch.max_tokens_per_microbatch` leaves one size; a sample that is longer is a micro-batch of its own.
    """
    workload, pinned = request.workload, request.pins.get(call, Pin()).max_tokens_per_microbatch
    share = math.ceil(workload.n_samples / layout.dp)
    if isinstance(request.graph.calls[call], Generate):
        length = _slot_tokens(request, sample_tokens(request))
        running = min(share, workload.max_running or _engine_running(request.cluster))
        rungs = [running >> i for i in range(running.bit_length())]
        return (pinned,) if pinned else tuple(length * rung for rung in rungs)
    fixed = pinned or workload.max_tokens_per_microbatch
    longest = sample_tokens(request)
    if fixed:
        return (fixed,)
    ladder = sorted({longest, *(size for size in _ladder(request.cluster) if size > longest)})
    enough = [size for size in ladder if size >= share * longest]
    return tuple(reversed([size for size in ladder if not enough or size <= enough[0]]))


def _ladder(cluster: Cluster) -> tuple[int, ...]:
    return LADDER_CPU if cluster.is_cpu else LADDER_GPU


# --- bytes ------------------------------------------------------------------------------------------------------------


def resident(request: PlanRequest, layouts: Mapping[str, Layout], device: int) -> Footprint:
    """Bytes that `device` holds all the time: every copy of every role that lies there."""
    return sum((_copy_bytes(request, copy) for copy in _held(request, layouts, device)), Footprint())


def held_copies(request: PlanRequest, layouts: Mapping[str, Layout], device: int) -> tuple[tuple[Copy, int], ...]:
    """The copies that lie on `device`, each with its bytes there."""
    return tuple((copy, _copy_bytes(request, copy).total) for copy in _held(request, layouts, device))


def _held(request: PlanRequest, layouts: Mapping[str, Layout], device: int) -> Iterator[Copy]:
    return (copy for copy in copies(request.graph, layouts) if device in copy.layout.mesh.devices)


def _copy_bytes(request: PlanRequest, copy: Copy) -> Footprint:
    model, role = request.models[copy.role], request.graph.models[copy.role]
    if not copy.trained:
        return memory.frozen_copy(model, role, copy.layout)
    states = memory.trained_copy(model, role, copy.layout)
    return states + memory.rescue_copies(model, role, copy.layout) if request.cluster.is_cpu else states


def active(request: PlanRequest, call: str, layout: Layout, tokens: int) -> Footprint:
    """Bytes that a running call adds on each of its devices."""
    model, role = request.model(call), request.role(call)
    if isinstance(request.graph.calls[call], Generate):
        return memory.generation(model, role, layout, tokens)
    tokens = max(tokens, sample_tokens(request))
    train = isinstance(request.graph.calls[call], Train)
    rows = (memory.train_activations if train else memory.forward_activations)(model, role, layout, tokens)
    return rows + memory.gathered(model, role, layout, train)


def peak(request: PlanRequest, layouts: Mapping[str, Layout], call: str, tokens: int) -> tuple[int, Footprint]:
    """The device of the call's mesh that is fullest while it runs, and what it holds."""
    mesh = layouts[call].mesh
    borders = {layout.mesh.first for layout in layouts.values()} | {
        layout.mesh.first + layout.mesh.n_devices for layout in layouts.values()
    }
    devices = sorted({mesh.first} | {border for border in borders if border in mesh.devices})
    held = {device: resident(request, layouts, device) for device in devices}
    worst = max(devices, key=lambda device: held[device].total)
    return worst, held[worst] + active(request, call, layouts[call], tokens)


# --- seconds ----------------------------------------------------------------------------------------------------------


def is_trained(request: PlanRequest, role: str) -> bool:
    """Whether some call of the graph trains the role."""
    return any(isinstance(call, Train) and call.model == role for call in request.graph.calls.values())


def call_seconds(request: PlanRequest, call: str, layout: Layout, tokens: int) -> float:
    """Predicted seconds of one mesh-holding call with micro-batches (or a cache) of `tokens`."""
    setting = Setting(request.model(call), request.role(call), layout, request.cluster, request.costs.factors)
    return setting_seconds(request, call, setting, tokens)


def setting_seconds(request: PlanRequest, call: str, setting: Setting, tokens: int) -> float:
    """The same of any setting of the call, by the formulas alone: without what was measured of whole calls."""
    workload = request.workload
    match request.graph.calls[call]:
        case Train(minibatches=minibatches, epochs=epochs):
            return train_seconds(setting, _packed_work(request, tokens, minibatches, epochs))
        case Inference():
            return inference_seconds(setting, _packed_work(request, tokens))
        case Generate():
            work = GenerateWork(
                samples=workload.n_samples,
                samples_per_group=workload.samples_per_group,
                prompt_tokens=mean_prompt_tokens(request),
                mean_new_tokens=workload.mean_new_tokens,
                max_new_tokens=workload.max_new_tokens,
                running=running_sequences(request, setting.layout, tokens),
            )
            return generate_seconds(setting, work)
        case Function() | Advantage():
            raise AssertionError(f"{call} holds no mesh")


def _packed_work(request: PlanRequest, tokens: int, steps: int = 1, epochs: int = 1) -> TrainWork:
    mean = mean_tokens(request)
    return TrainWork(
        tokens=math.ceil(request.workload.n_samples * mean),
        sample_tokens=mean,
        microbatch_tokens=tokens,
        optimizer_steps=steps,
        epochs=epochs,
        prompt_tokens=mean_prompt_tokens(request),
        samples_per_group=request.workload.samples_per_group,
    )


def running_sequences(request: PlanRequest, layout: Layout, kv_tokens: int) -> int:
    """How many sequences decode at once on a replica with a cache of `kv_tokens`.

    The embedded engine's cache grows in whole steps; a server's is paged.
    """
    share = math.ceil(request.workload.n_samples / layout.dp)
    if request.engine == "any":
        return max(1, min(share, most_running(request), int(kv_tokens / tokens_in_flight(request) + 1e-9)))
    return max(1, min(share, most_running(request), kv_tokens // _slot_tokens(request, mean_tokens(request))))


def most_running(request: PlanRequest) -> int:
    """Sequences that may decode at once on one replica."""
    most = _engine_running(request.cluster) if request.engine == "installed" else MAX_RUNNING_SERVER
    return request.workload.max_running or most


def _engine_running(cluster: Cluster) -> int:
    """Sequences that the embedded engine decodes at once."""
    return MAX_RUNNING_CPU if cluster.is_cpu else MAX_RUNNING


def _slot_tokens(request: PlanRequest, tokens: float) -> int:
    """Positions of the embedded engine's cache for a sequence of `tokens`, and the one that is written next."""
    step = CACHE_STEP_CPU if request.cluster.is_cpu else CACHE_STEP
    return math.ceil((tokens + 1) / step) * step


def tokens_in_flight(request: PlanRequest) -> float:
    """Cache tokens that one of many running sequences takes: its prompt and the age of a running sequence, with room.

    1.15 covers the fluctuation of the sum over many sequences of all ages.
    """
    workload = request.workload
    lengths = lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths)
    return mean_prompt_tokens(request) + 1.15 * lengths.mean_age


def extra_seconds(request: PlanRequest, layouts: Mapping[str, Layout]) -> dict[str, float]:
    """Predicted seconds of what holds no allocation: free calls by name, and reallocation nodes."""
    samples = request.workload.n_samples
    measured = request.costs.factors.function_seconds if request.costs.factors else None
    function_seconds = FUNCTION_SECONDS if measured is None else measured
    seconds: dict[str, float] = {}
    for name, call in request.graph.calls.items():
        if isinstance(call, Function):
            seconds[name] = function_seconds * math.ceil(samples / request.cluster.n_devices)
        elif isinstance(call, Advantage):
            seconds[name] = ADVANTAGE_SECONDS * samples
    for name in reallocations(request.graph, layouts):
        setting = Setting(
            request.model(name), request.role(name), layouts[name], request.cluster, request.costs.factors
        )
        seconds[reallocation_node(name)] = reallocation_seconds(setting)
    return seconds
