"""Predicted seconds of training calls. Backward is twice the forward (arXiv:2001.08361, table 1)."""

import math

from msgspec import Struct

from realgraph.planner.cost import Setting
from realgraph.planner.cost_comm import allreduce_seconds, collective_bytes_per_s, gather_seconds, latency_seconds
from realgraph.planner.cost_forward import forward_seconds
from realgraph.planner.cost_overhead import computed_share, dispatch_seconds, optimizer_bytes_per_s
from realgraph.planner.memory import master_bytes, shards

FSDP_SLOWDOWN_GPU = 1.1  # of compute: a layer's weights are copied out of flat buffers, and kernels wait for gathers
FSDP_SLOWDOWN_CPU = 1.3  # measured with FSDP2 on two processes: 1.27 at 30M parameters, 1.6 at 0.8M


class TrainWork(Struct, frozen=True):
    """Tokens of the whole batch, mean tokens of a sample, tokens of a micro-batch, and optimizer steps of one call.

    prompt_tokens, of a sample, are equal in all `samples_per_group` samples of a group.
    """

    tokens: int
    sample_tokens: float
    microbatch_tokens: int
    optimizer_steps: int = 1
    epochs: int = 1
    prompt_tokens: float = 0.0
    samples_per_group: int = 1


def train_seconds(setting: Setting, work: TrainWork) -> float:
    """One train call: every epoch's micro-batches forward and backward, gradient reduction, and optimizer steps.

    Backward is twice the forward, and gradient checkpointing repeats the forward. Pipeline stages idle for pp - 1 of
    n + pp - 1 micro-batches (arXiv:1811.06965). FSDP gathers weights twice and scatters gradients once a micro-batch.
    """
    layout, steps = setting.layout, work.optimizer_steps
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = steps * max(1, math.ceil(per_device / steps / work.microbatch_tokens))
    passes = 1 + setting.costs.backward + setting.role.gradient_checkpointing
    computed = per_device / count * shared_prompts(setting, work, per_device / count, steps)
    forward = forward_seconds(setting, computed, work.sample_tokens / 2)
    one = passes * forward + setting.costs.microbatch_seconds
    compute = fsdp_slowdown(setting) * one * (count + steps * (layout.pp - 1)) / layout.pp
    states = steps * optimizer_seconds(setting)
    dispatched = dispatch_seconds(setting.costs, per_device / work.sample_tokens)
    return work.epochs * (compute + _reduction_seconds(setting, count, steps) + states) + dispatched


def shared_prompts(setting: Setting, work: TrainWork, tokens: float, steps: int = 1) -> float:
    """Share of a micro-batch's `tokens` that are computed, where the engine computes equal prompts once."""
    if not setting.cluster.is_cpu or work.samples_per_group == 1:
        return 1.0
    groups = work.tokens / work.sample_tokens / work.samples_per_group / steps
    prompts = work.prompt_tokens / work.sample_tokens
    return computed_share(tokens / work.sample_tokens, groups, work.samples_per_group, prompts)


def fsdp_slowdown(setting: Setting) -> float:
    """How much longer compute takes under FSDP than on whole weights, traffic between devices aside."""
    if setting.layout.sharding != "fsdp" or setting.layout.mesh.n_devices == 1:
        return 1.0
    return FSDP_SLOWDOWN_CPU if setting.cluster.is_cpu else FSDP_SLOWDOWN_GPU


def _reduction_seconds(setting: Setting, microbatches: int, steps: int) -> float:
    """Gradients (and FSDP's weights) between the dp copies; not overlapped with compute."""
    layout = setting.layout
    ranks = layout.dp * layout.cp
    rate, latency = collective_bytes_per_s(setting, ranks), latency_seconds(setting)
    n_params = setting.model.n_params(setting.role.head) / (layout.tp * layout.pp)
    gradients = master_bytes(setting.role) * n_params
    if layout.sharding == "replicated":
        return steps * allreduce_seconds(gradients, ranks, rate, latency)
    weights = 2 * gather_seconds(setting.element * n_params, ranks, rate, latency)
    layers = 0.0 if ranks == 1 else 3 * setting.model.layers * latency
    return microbatches * (weights + gather_seconds(gradients, ranks, rate, latency) + layers)


def optimizer_seconds(setting: Setting) -> float:
    """One AdamW step: reads and writes gradient, moments, master and weight: about 32 bytes a parameter in float32."""
    nbytes = 8 * master_bytes(setting.role) * setting.model.n_params(setting.role.head) / shards(setting.layout)
    return nbytes / optimizer_bytes_per_s(setting) + setting.costs.optimizer_step_seconds
