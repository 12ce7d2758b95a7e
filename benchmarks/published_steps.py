"""A whole step of an RL system, from the planner's cost functions and one table of what lies between the calls."""

import math
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published_adapters import lora_params
from benchmarks.published_backends import eight_bit
from benchmarks.published_generation import rollout_variants
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.backend import FSDP, MEGATRON
from realgraph.planner.costs.compute.forward import mean_context
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import TrainWork, microbatches, train_seconds
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds
from realgraph.planner.costs.lengths import lengths_of
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout

BF16 = ModelRole(dtype="bfloat16")
MOST_RUNNING = 1024  # sequences of one engine: vLLM's default on devices of 70 GB or more
ENGINE_BYTES = 4_000_000_000  # activations, graphs and buffers of an engine
STATE_BYTES = 14  # of a parameter's float32 master, two moments and bf16 weight: what a colocated step offloads


Way = Literal["sharded", "whole", "buckets", "one_rank"]


class Glue(Struct, frozen=True, forbid_unknown_fields=True):
    """published_glue.yaml: seconds and bytes; see there."""

    engine_step_seconds: float
    engine_sequence_seconds: float
    engine_nodes_seconds: float
    wake_seconds: float
    host_bytes_per_s: float
    sync_tensor_seconds: float
    sync_bytes_per_s: float
    sync_seconds: float
    bucketed_share: float
    broadcast_bytes_per_s: float
    file_bytes_per_s: float
    padded_token_seconds: float
    reward_seconds: float
    reward_workers: int
    step_seconds: float
    microbatch_seconds: float


@cache
def glue() -> Glue:
    """The shipped table."""
    return msgspec.convert(yaml.safe_load(Path(__file__).with_name("published_glue.yaml").read_text("utf-8")), Glue)


class Batch(Struct, frozen=True):
    """The work of one step of RL."""

    samples: int
    per_group: int  # samples of one prompt
    prompt: float  # mean tokens
    mean: float  # new tokens
    limit: int  # of new tokens
    steps: int = 1  # of the optimizer
    passes: int = 1  # forward passes besides training
    staleness: int = 0  # 0 is synchronous
    rewarded: bool = True  # answers are checked by rules on cores
    lengths: tuple[int, ...] = ()  # new tokens at equal steps of probability, where more is known than the mean


class Engines(Struct, frozen=True):
    """The engines of a system, with their layouts and settings."""

    generate: Layout
    train: Layout
    colocated: bool  # both on the same devices
    memory_share: float = 0.9  # of a device's memory that the engine may use
    microbatch: int = 8192  # tokens
    recompute: bool = True  # whole layers are computed again
    fp8: bool = False  # layers' products, and the weights that the engine serves
    controller: bool = True  # one process holds the batch
    in_flight: int = 0  # samples that run at once on all engines at most, 0 for no limit
    files: bool = False  # weights go through files, not from device to device
    looks_seconds: float = 0.0  # between two looks of engines for new files


class StepSeconds(Struct, frozen=True):
    """Seconds of the parts of one step; whole: what is compared."""

    generate: float
    passes: float
    train: float
    sync: float
    glue: float
    whole: float


def step_seconds(model: ModelSpec, cluster: Cluster, engines: Engines, batch: Batch) -> StepSeconds:
    """One step. Colocated: all parts in turn, with engines put to sleep and states offloaded between them.

    Apart and synchronous: in turn too, each side idle while the other works.
    Apart and late: generation streams within the staleness bound beside passes and training; the slower side counts, or
    the circuit through both (planner/costs/generate/rollout.py). Weights are synchronised in either case.
    """
    table = glue()
    generate, train = settings_of(model, cluster, engines)
    work = generate_work(generate, engines, batch)
    passes = batch.passes * pass_seconds(train, engines, batch)
    trained = update_seconds(train, engines, batch)
    sync = sync_seconds(generate)
    if engines.files:
        sync = written_seconds(model) + read_seconds(model) + engines.looks_seconds / 2
    reward = batch.samples * table.reward_seconds / table.reward_workers if batch.rewarded else 0.0
    fixed = table.step_seconds
    if engines.colocated or not batch.staleness:
        seconds = generate_seconds(generate, work)
        states = STATE_BYTES * model.n_params() / engines.train.mesh.n_devices
        switch = engines.colocated * (2 * table.wake_seconds + 2 * states / table.host_bytes_per_s)
        between = reward + fixed + switch
        return StepSeconds(seconds, passes, trained, sync, between, seconds + passes + trained + sync + between)
    variants = rollout_variants(generate, replace(work, stall_seconds=sync), max(1, batch.staleness))
    side = passes + trained + sync + fixed
    busy = [v.seconds + (0.0 if v.staleness else sync) for v in variants]  # streams stand still for it, batches wait
    bounds = [
        max(seconds, side, (v.remainder_seconds + reward + side) / left)
        if (left := 1 + batch.staleness - v.latency_periods) > 0
        else math.inf
        for seconds, v in zip(busy, variants, strict=True)
    ]
    best = min(range(len(variants)), key=bounds.__getitem__)
    return StepSeconds(busy[best], passes, trained, sync, fixed, bounds[best])


def settings_of(model: ModelSpec, cluster: Cluster, engines: Engines) -> tuple[Setting, Setting]:
    """The settings of generation, with a serving engine's overheads, and of training."""
    backend = FSDP if engines.train.sharding == "fsdp" else MEGATRON
    generate = Setting(model, BF16, engines.generate, cluster)
    train = Setting(model, BF16, engines.train, cluster, backend=backend)
    if engines.fp8:
        generate, train = eight_bit(generate), eight_bit(train)
    own = replace(train.costs, microbatch_seconds=glue().microbatch_seconds)
    return serving(generate), replace(train, factors=own)


def serving(setting: Setting) -> Setting:
    """The setting with the overheads of a serving engine in Python."""
    table, layout = glue(), setting.layout
    apart = layout.tp * layout.pp > setting.cluster.devices_per_node
    step = table.engine_step_seconds + table.engine_nodes_seconds * apart
    costs = replace(setting.costs, step_seconds=step, sequence_seconds=table.engine_sequence_seconds)
    return replace(setting, factors=costs)


def generate_work(setting: Setting, engines: Engines, batch: Batch) -> GenerateWork:
    """The generate call, with as many sequences at once as the cache has room for."""
    held = (setting.engine.weight_bytes or setting.element) * setting.model.n_params() / engines.generate.tp
    room = engines.memory_share * setting.cluster.memory_bytes - held - ENGINE_BYTES
    lengths = lengths_of(batch.mean, batch.limit, batch.lengths)
    each = cache_bytes_per_token(setting) * (batch.prompt + 1.15 * lengths.mean_age)
    running = max(1, min(MOST_RUNNING, int(room / each)))
    if engines.in_flight:
        held = lengths.mean / lengths.expected_max(batch.per_group) if batch.staleness else 1.0
        running = max(1, min(running, round(engines.in_flight * held / engines.generate.dp)))
    return GenerateWork(
        samples=batch.samples,
        samples_per_group=batch.per_group,
        prompt_tokens=batch.prompt,
        mean_new_tokens=batch.mean,
        max_new_tokens=batch.limit,
        running=running,
        lengths=batch.lengths,
    )


def pass_seconds(setting: Setting, engines: Engines, batch: Batch) -> float:
    """One forward pass over the batch."""
    work = train_work(engines, replace(batch, steps=1))
    seconds = inference_seconds(setting, work) + microbatches(setting, work) * glue().microbatch_seconds
    return seconds + controller_seconds(engines, batch)


def update_seconds(setting: Setting, engines: Engines, batch: Batch) -> float:
    """Training on the batch."""
    return train_seconds(setting, train_work(engines, batch)) + controller_seconds(engines, batch)


def controller_seconds(engines: Engines, batch: Batch) -> float:
    """The padded batch through one process, for one call."""
    padded = batch.samples * (batch.prompt + batch.limit)
    return padded * glue().padded_token_seconds if engines.controller else 0.0


def train_work(engines: Engines, batch: Batch) -> TrainWork:
    """Packed samples; ranks get equal shares up to the longest sample."""
    sample, lengths = batch.prompt + batch.mean, lengths_of(batch.mean, batch.limit, batch.lengths)
    return TrainWork(
        tokens=round(batch.samples * sample),
        sample_tokens=sample,
        microbatch_tokens=max(1, engines.microbatch // engines.train.cp),
        optimizer_steps=batch.steps,
        recompute="full" if engines.recompute else "none",
        longest_tokens=round(batch.prompt + lengths.expected_max(batch.samples / batch.steps)),
        attended_tokens=mean_context(batch.prompt, lengths),
    )


def sync_seconds(setting: Setting, way: Way = "sharded") -> float:
    """Trained weights to the engines, tensor by tensor: sharded, each device takes in its part; whole, every tensor and
    cuts it; buckets, many tensors at once, gathered while the bucket before is sent; one_rank sends all to all."""
    table, model, layout = glue(), setting.model, setting.layout
    whole = setting.element * model.n_params()
    each = table.sync_tensor_seconds * (table.bucketed_share if way == "buckets" else 1.0)
    moved = {
        "sharded": whole / layout.tp / table.sync_bytes_per_s,
        "whole": whole / table.sync_bytes_per_s,
        "buckets": whole / table.sync_bytes_per_s / 2,
        "one_rank": whole / table.broadcast_bytes_per_s,
    }
    return table.sync_seconds + tensors_of(model) * each + moved[way]


def written_seconds(model: ModelSpec, lora_rank: int = 0) -> float:
    """Trained weights in 16 bits, or adapters alone, into files after a step: tensor by tensor, by one process."""
    table = glue()
    per_layer = 4 + 3 * (model.expert_layers * model.experts / model.layers or 1)
    tensors = 2 * per_layer * model.layers if lora_rank else tensors_of(model)
    nbytes = 2 * (lora_params(model, lora_rank) if lora_rank else model.n_params())
    return table.sync_seconds + tensors * table.sync_tensor_seconds + nbytes / table.file_bytes_per_s


def read_seconds(model: ModelSpec) -> float:
    """Files of weights in 16 bits into engines, which read them side by side and load tensor by tensor."""
    table = glue()
    return tensors_of(model) * table.sync_tensor_seconds + 2 * model.n_params() / table.file_bytes_per_s


def reload_seconds(model: ModelSpec, devices: int) -> float:
    """Float32 parameters that wait on the host, to `devices` and back."""
    return 2 * 4 * model.n_params() / devices / glue().host_bytes_per_s


def tensors_of(model: ModelSpec) -> int:
    """Weight tensors as checkpoints name them: about nine a layer, and three an expert."""
    return 9 * model.layers + 3 * model.expert_layers * model.experts + 3


def layout_of(devices: int, tp: int = 1, pp: int = 1, sharded: bool = False) -> Layout:
    """dp over what is left; sharded: fsdp over all."""
    sharding = "fsdp" if sharded else "replicated"
    return Layout(DeviceMesh(0, devices), dp=max(1, devices // (tp * pp)), tp=tp, pp=pp, sharding=sharding)
