"""Predicted seconds of training calls. Backward is twice the forward (arXiv:2001.08361, table 1)."""

import math

from msgspec import Struct

from realgraph.planner.cost import Setting
from realgraph.planner.cost_comm import COLLECTIVE_SECONDS, allreduce_seconds, collective_bytes_per_s, gather_seconds
from realgraph.planner.cost_forward import forward_seconds
from realgraph.planner.memory import master_bytes, shards

FSDP_SLOWDOWN_GPU = 1.1  # of compute: a layer's weights are copied out of flat buffers, and kernels wait for gathers
FSDP_SLOWDOWN_CPU = 1.3  # measured with FSDP2 on two processes: 1.27 at 30M parameters, 1.6 at 0.8M


class TrainWork(Struct, frozen=True):
    """Tokens of the whole batch, mean tokens of a sample, tokens of a micro-batch, and optimizer steps of one call."""

    tokens: int
    sample_tokens: float
    microbatch_tokens: int
    optimizer_steps: int = 1
    epochs: int = 1


def train_seconds(setting: Setting, work: TrainWork) -> float:
    """One train call: every epoch's micro-batches forward and backward, gradient reduction, and optimizer steps.

    Backward is twice the forward, and gradient checkpointing repeats the forward. Pipeline stages idle for pp - 1 of
    n + pp - 1 micro-batches (arXiv:1811.06965). FSDP gathers weights twice and scatters gradients once a micro-batch.
    """
    layout, steps = setting.layout, work.optimizer_steps
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = steps * max(1, math.ceil(per_device / steps / work.microbatch_tokens))
    passes = 4 if setting.role.gradient_checkpointing else 3
    forward = forward_seconds(setting, per_device / count, work.sample_tokens / 2)
    compute = fsdp_slowdown(setting) * passes * forward * (count + steps * (layout.pp - 1)) / layout.pp
    return work.epochs * (compute + _reduction_seconds(setting, count, steps) + steps * optimizer_seconds(setting))


def fsdp_slowdown(setting: Setting) -> float:
    """How much longer compute takes under FSDP than on whole weights, traffic between devices aside."""
    if setting.layout.sharding != "fsdp" or setting.layout.mesh.n_devices == 1:
        return 1.0
    return FSDP_SLOWDOWN_CPU if setting.cluster.is_cpu else FSDP_SLOWDOWN_GPU


def _reduction_seconds(setting: Setting, microbatches: int, steps: int) -> float:
    """Gradients (and FSDP's weights) between the dp copies; not overlapped with compute."""
    layout = setting.layout
    ranks = layout.dp * layout.cp
    rate = collective_bytes_per_s(setting, ranks)
    n_params = setting.model.n_params(setting.role.head) / (layout.tp * layout.pp)
    gradients = master_bytes(setting.role) * n_params
    if layout.sharding == "replicated":
        return steps * allreduce_seconds(gradients, ranks, rate)
    weights = 2 * gather_seconds(setting.element * n_params, ranks, rate)
    latency = 0.0 if ranks == 1 else 3 * setting.model.layers * COLLECTIVE_SECONDS
    return microbatches * (weights + gather_seconds(gradients, ranks, rate) + latency)


def optimizer_seconds(setting: Setting) -> float:
    """One AdamW step: reads and writes gradient, moments, master and weight: about 32 bytes a parameter in float32."""
    nbytes = 8 * master_bytes(setting.role) * setting.model.n_params(setting.role.head) / shards(setting.layout)
    return nbytes / (setting.cluster.memory_bytes_per_s * setting.costs.memory)
