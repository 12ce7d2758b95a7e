"""Requests for plans of published runs: the graph that a system runs, pins for its layouts, and its cost profile.

`realgraph plan` answers them as it answers any other: what it would print for such a run is the prediction. What ran
fits, so devices have room for all of it here; whether memory is predicted right is another table's business.
"""

import math
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.published_adapters import lora_params
from benchmarks.published_backends import in_eight_bits
from realgraph.graphs.errors import ConfigError
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, ModelRole, Train
from realgraph.planner.costs.backend import FSDP, MEGATRON, Backend, backend_of
from realgraph.planner.costs.compute.move import weight_tensors
from realgraph.planner.costs.engine_overheads import EngineOverheads
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.lengths import lengths_of
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import tokens_in_flight
from realgraph.planner.options.meshes import mesh_fault
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.engine_support import TORCH, EngineSupport
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import search
from realgraph.run_file.open_graph import open_graph

BF16 = ModelRole(dtype="bfloat16")
MOST_RUNNING = 1024  # sequences of one engine: vLLM's default on devices of 70 GB or more
ENGINE_BYTES = 4_000_000_000  # activations, graphs and buffers of an engine
ROOM_BYTES = 10**15  # of a device and of a node: what was measured has fitted
LIMITS = Limits(seconds=10.0)
PASSES = {  # forward passes that a system makes and a library graph lacks, as calls of its graph; loss terms read them
    "old": "{kind: inference, model: actor, output: logprobs, writes: [old_logprobs]}",
}
READS_OLD = "{kind: kl, to: old_logprobs, estimator: k3, coef: 0.1}"

Way = Literal["sharded", "whole", "buckets", "one_rank", "files"]
Pass = Literal["old", "ref"]


class OverheadTable(Struct, frozen=True, forbid_unknown_fields=True):
    """published_overheads.yaml: see there."""

    system: EngineOverheads
    ways: dict[Way, dict[str, float | bool]]
    host_bytes_per_s: float
    file_bytes_per_s: float


class Batch(Struct, frozen=True):
    """The work of one step of RL."""

    samples: int
    per_group: int  # samples of one prompt
    prompt: float  # mean tokens
    mean: float  # new tokens
    limit: int  # of new tokens
    steps: int = 1  # of the optimizer
    passes: tuple[Pass, ...] = ("old",)  # forward passes besides training: of the policy, of a reference
    critic: bool = False  # PPO: values and their training, and scores of a reward model in the place of rules
    staleness: int = 0  # 0 is synchronous
    lengths: tuple[int, ...] = ()  # new tokens at equal steps of probability, where more is known than the mean


class Engines(Struct, frozen=True):
    """The engines of a system, with their layouts and settings."""

    generate: Layout
    train: Layout  # and of all calls that are not placed elsewhere
    colocated: bool  # both on the same devices, from which the states of training go to the host meanwhile
    memory_share: float = 0.9  # of a device's memory that the engine may use
    microbatch: int = 8192  # tokens
    recompute: bool = True  # whole layers are computed again
    fp8: bool = False  # layers' products, and the weights that the engine serves
    controller: bool = True  # one process holds the batch
    in_flight: int = 0  # samples that run at once on all engines at most, 0 for no limit
    way: Way = "sharded"  # of new weights to the engines
    looks_seconds: float = 0.0  # between two looks of engines for new files
    backend: Backend | None = None  # of training, None: by its layout
    places: dict[str, Layout] = field(default_factory=dict)  # call -> its layout, where it is not `train`
    sleeps: bool = True  # the engine gives up its caches between two sessions, where it is colocated


@cache
def overhead_table() -> OverheadTable:
    """The shipped table."""
    file = Path(__file__).with_name("published_overheads.yaml")
    return msgspec.convert(yaml.safe_load(file.read_text("utf-8")), OverheadTable)


@cache
def overheads(way: Way = "sharded") -> EngineOverheads:
    """Those of a system whose weights get to its engines this way."""
    known = msgspec.to_builtins(overhead_table().system)
    return msgspec.convert({**known, **overhead_table().ways[way]}, EngineOverheads)


# --- requests ---------------------------------------------------------------------------------------------------------


def plan_for(request: PlanRequest) -> Plan | str:
    """The plan that these pins leave, as `realgraph plan` finds it; why there is none, in words."""
    try:
        return search(request, LIMITS, (request.workload.staleness,))
    except ConfigError as error:
        return error.problems[0].text


def step_request(model: ModelSpec, cluster: Cluster, engines: Engines, batch: Batch) -> PlanRequest:
    """One step of a system: generation, the passes of its graph, training, and the way of new weights."""
    generate, train = engines.generate, engines.train
    if not engines.colocated:
        train = _from(train, generate.mesh.n_devices)
    graph = step_graph(batch)
    layouts = {name: engines.places.get(name, train) for name, call in graph.calls.items() if graph.role(name)}
    layouts = {n: generate if isinstance(graph.calls[n], Generate) else one for n, one in layouts.items()}
    machine = _machine(cluster, tuple(layout.mesh for layout in layouts.values()))
    costs = device_kind(cluster.kind).costs
    backend = engines.backend or (FSDP if train.sharding == "fsdp" else MEGATRON)
    serving = backend_of(generate)
    if engines.fp8:
        backend, serving = (in_eight_bits(one, costs.fp8) for one in (backend, serving))
    own = overheads(engines.way)
    request = PlanRequest(
        graph=graph,
        workload=_workload(batch),
        cluster=machine,
        models=dict.fromkeys(graph.models, model),
        engine=replace(SYSTEM, backend=backend, generate_backend=serving),
        costs=CostTable(
            factors=replace(costs, host=overhead_table().host_bytes_per_s / cluster.pcie_bytes_per_s),
            overheads=replace(
                own,
                sync_seconds=own.sync_seconds + engines.looks_seconds / 2,
                padded_token_seconds=own.padded_token_seconds if engines.controller else 0.0,
                wake_seconds=own.wake_seconds if engines.colocated and engines.sleeps else 0.0,
            ),
        ),
    )
    running = running_sequences(Setting(model, BF16, generate, cluster, backend=serving), engines, batch)
    request = with_running(request, running)
    pins = {name: _pin(request, name, layout, engines) for name, layout in layouts.items()}
    return replace(request, pins=pins)


SYSTEM = replace(TORCH, name="its engines", max_running=MOST_RUNNING, expert_copies=False)


def generate_request(
    model: ModelSpec, machine: tuple[Layout, Cluster], engine: EngineSupport, batch: Batch, running: int
) -> PlanRequest:
    """Generation alone, under a layout on a cluster, with so many sequences at once on a replica."""
    layout, cluster = machine
    graph = _graph("generate", ("params.reward_fn=''", "models.actor.dtype=bfloat16"))
    request = PlanRequest(
        graph=graph,
        workload=_workload(batch),
        cluster=_machine(cluster, (layout.mesh,)),
        models=dict.fromkeys(graph.models, model),
        engine=engine,
        costs=CostTable(overheads=engine.overheads),
    )
    request = with_running(request, running)
    settings = Engines(layout, layout, colocated=True)
    return replace(request, pins={name: _pin(request, name, layout, settings) for name in graph.calls})


def with_running(request: PlanRequest, running: int) -> PlanRequest:
    """So many sequences decode at once on a replica, at most."""
    return replace(request, workload=replace(request.workload, max_running=running))


def step_graph(batch: Batch) -> Graph:
    """GRPO's or PPO's graph with the passes of a system."""
    old, ref = "old" in batch.passes, "ref" in batch.passes
    changes = [f"params.minibatches={batch.steps}", f"params.kl_coef={0.1 if ref else 0.0}"]
    train = "train_actor" if batch.critic else "train"
    if old:
        changes += [f"calls.old_logp={PASSES['old']}", f"calls.{train}.loss.terms.old={READS_OLD}"]
    if not batch.critic:
        return _graph(
            "grpo", (*changes, "models.actor.dtype=bfloat16", *(["models.ref.dtype=bfloat16"] if ref else []))
        )
    roles = ("actor", "critic", "reward_model", *(["ref"] if ref else []))
    scored = ("params.reward_fn=''", "params.reward_model=model")
    return _graph("ppo", (*changes, *scored, *(f"models.{role}.dtype=bfloat16" for role in roles)))


@cache
def _graph(name: str, changes: tuple[str, ...]) -> Graph:
    return open_graph(name, changes)


def _workload(batch: Batch) -> Workload:
    return Workload(
        groups=max(1, round(batch.samples / batch.per_group)),
        samples_per_group=batch.per_group,
        prompt_tokens=math.ceil(batch.prompt),
        max_new_tokens=batch.limit,
        mean_new_tokens=batch.mean,
        staleness=batch.staleness,
        mean_prompt_tokens=batch.prompt,
        lengths=batch.lengths,
    )


def _pin(request: PlanRequest, call: str, layout: Layout, engines: Engines) -> Pin:
    """A call in its place under its layout."""
    mesh, kind = layout.mesh, request.graph.calls[call]
    place = Pin(
        first=mesh.first, devices=mesh.n_devices, dp=layout.dp, tp=layout.tp, pp=layout.pp, ep=layout.ep, cp=layout.cp
    )
    if isinstance(kind, Generate):
        longest = request.workload.prompt_tokens + request.workload.max_new_tokens
        cached = math.ceil((request.workload.max_running or 1) * tokens_in_flight(request)) + 1
        return replace(place, kv_cache_tokens=max(longest, cached))
    tokens = max(1, engines.microbatch // layout.cp)
    place = replace(place, sharding=layout.sharding, max_tokens_per_microbatch=tokens)
    if not isinstance(kind, Train):
        return place
    waits = engines.colocated and engines.sleeps
    again = "full" if engines.recompute else "none"
    return replace(place, recompute=again, schedule="1f1b", chunks=1, residency="offloaded" if waits else "resident")


def _machine(cluster: Cluster, meshes: tuple[DeviceMesh, ...]) -> Cluster:
    """The cluster with room for all, and with nodes of so few devices that all these meshes are whole nodes or parts of
    one."""
    end = max(mesh.first + mesh.n_devices for mesh in meshes)
    per_node = cluster.devices_per_node
    while True:
        nodes = max(cluster.n_devices, end) // per_node
        machine = replace(
            cluster,
            nodes=max(1, nodes),
            devices_per_node=per_node,
            memory_bytes=ROOM_BYTES,
            host_memory_bytes=ROOM_BYTES,
        )
        if per_node == 1 or not any(mesh_fault(mesh, machine) for mesh in meshes):
            return machine
        per_node = per_node // 2 if per_node % 2 == 0 else 1


def running_sequences(setting: Setting, engines: Engines, batch: Batch) -> int:
    """As many sequences at once as a replica's cache has room for."""
    weights = (setting.engine.weight_bytes or setting.element) * setting.model.n_params() / setting.layout.tp
    room = engines.memory_share * setting.cluster.memory_bytes - weights - ENGINE_BYTES
    lengths = lengths_of(batch.mean, batch.limit, batch.lengths)
    each = cache_bytes_per_token(setting) * (batch.prompt + 1.15 * lengths.mean_age)
    running = max(1, min(MOST_RUNNING, int(room / each)))
    if engines.in_flight:
        occupied = lengths.mean / lengths.expected_max(batch.per_group) if batch.staleness else 1.0
        running = max(1, min(running, round(engines.in_flight * occupied / setting.layout.dp)))
    return running


# --- what lies outside a step -----------------------------------------------------------------------------------------


def sync_request(model: ModelSpec, cluster: Cluster, devices: int, way: Way) -> PlanRequest:
    """Trained weights to engines on as many other devices."""
    tp = engine_ranks(model, devices)
    count = max(devices, tp)
    engines = Engines(layout_of(count, tp), layout_of(count, sharded=count > 1), colocated=False, way=way)
    batch = Batch(samples=8 * count, per_group=1, prompt=128, mean=128.0, limit=128, passes=())
    return step_request(model, cluster, engines, batch)


def engine_ranks(model: ModelSpec, devices: int) -> int:
    """Tensor-parallel ranks of an engine, where a source does not tell."""
    return max(1, min(8, devices)) if model.n_params() > 3e10 else 1


def written_seconds(model: ModelSpec, lora_rank: int = 0, each_tensor: bool = True) -> float:
    """Trained weights in 16 bits, or adapters alone, into files after a step, by one process.

    each_tensor: every tensor takes seconds of its own.
    """
    own = overhead_table().system
    per_layer = 4 + 3 * (model.expert_layers * model.experts / model.layers or 1)
    tensors = (2 * per_layer * model.layers if lora_rank else weight_tensors(model)) if each_tensor else 0
    nbytes = 2 * (lora_params(model, lora_rank) if lora_rank else model.n_params())
    return own.sync_seconds + tensors * own.sync_tensor_seconds + nbytes / overhead_table().file_bytes_per_s


def reload_seconds(model: ModelSpec, devices: int) -> float:
    """Float32 parameters that wait on the host, to `devices` and back."""
    return 2 * 4 * model.n_params() / devices / overhead_table().host_bytes_per_s


def layout_of(devices: int, tp: int = 1, pp: int = 1, sharded: bool = False) -> Layout:
    """dp over what is left; sharded: fsdp over all."""
    sharding = "fsdp" if sharded else "replicated"
    return Layout(DeviceMesh(0, devices), dp=max(1, devices // (tp * pp)), tp=tp, pp=pp, sharding=sharding)


def _from(layout: Layout, first: int) -> Layout:
    return replace(layout, mesh=DeviceMesh(first, layout.mesh.n_devices))
