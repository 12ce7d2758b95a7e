"""Predicted seconds of calls: a roofline of each phase at the fractions of the peaks in devices.yaml. Pure formulas.

Per device throughout. Matrix products: 2 operations per weight and token, backward twice the forward (arXiv:2001.08361,
table 1); ring collectives: Patarasuk & Yuan 2009. What a run measures replaces these guesses, never the other way.
"""

import heapq
import math

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.cluster import Cluster
from realgraph.planner.devices import Costs, device_kind
from realgraph.planner.layout import Layout
from realgraph.planner.memory import DType, element_bytes, kv_bytes_per_token, master_bytes, shards
from realgraph.planner.model_spec import ModelSpec

LENGTH_QUANTILES = 128  # sequences that stand for a device's share when generation is simulated
COLLECTIVE_SECONDS = 1e-5  # latency of one collective operation
FSDP_SLOWDOWN_GPU = 1.1  # of compute: a layer's weights are copied out of flat buffers, and kernels wait for gathers
FSDP_SLOWDOWN_CPU = 1.3  # measured with FSDP2 on two processes: 1.27 at 30M parameters, 1.6 at 0.8M


class Setting(Struct, frozen=True):
    """One role under one layout on a cluster: what every cost depends on."""

    model: ModelSpec
    role: ModelRole
    layout: Layout
    cluster: Cluster

    @property
    def costs(self) -> Costs:
        return device_kind(self.cluster.kind).costs

    @property
    def element(self) -> int:
        """Bytes of one weight."""
        return element_bytes(self.role.dtype)

    @property
    def flops(self) -> float:
        """Peak operations per second of one device in the role's dtype."""
        return self.cluster.flops * dtype_rate(self.role.dtype, self.cluster.is_cpu)


class TrainWork(Struct, frozen=True):
    """Tokens of the whole batch, mean tokens of a sample, tokens of a micro-batch, and optimizer steps of one call."""

    tokens: int
    sample_tokens: float
    microbatch_tokens: int
    optimizer_steps: int = 1
    epochs: int = 1


class GenerateWork(Struct, frozen=True):
    """Samples of the whole batch and of one group, their lengths in tokens, and how many a device runs at once.

    prompt_tokens and mean_new_tokens are means over the samples.
    """

    samples: int
    samples_per_group: int
    prompt_tokens: float
    mean_new_tokens: float
    max_new_tokens: int
    running: int


def dtype_rate(dtype: DType, cpu: bool) -> float:
    """Arithmetic rate relative to the cluster's `flops` (bf16 on a GPU, fp32 on a CPU).

    GPU: tensor cores in TF32 at half the bf16 rate, fp64 at 1/15 (NVIDIA A100 and H100 data sheets). CPU: AVX-512 with
    bf16 units, measured.
    """
    if cpu:
        return {"float32": 1.0, "bfloat16": 2.0, "float16": 0.5, "float64": 0.5}[dtype]
    return {"float32": 0.5, "bfloat16": 1.0, "float16": 1.0, "float64": 1 / 15}[dtype]


def gemm_efficiency(costs: Costs, tokens: float, width: float) -> float:
    """Reached fraction of the peak for a product of `tokens` rows over the smaller of the layer's widths."""
    return costs.gemm * tokens / (tokens + costs.gemm_tokens) * width / (width + costs.gemm_width)


def collective_bytes_per_s(setting: Setting, ranks: int) -> float:
    """Bandwidth of a ring over `ranks` neighbouring devices: the link inside a node, all its NICs between nodes."""
    cluster, costs = setting.cluster, setting.costs
    link = cluster.link_bytes_per_s * costs.link
    if ranks <= cluster.devices_per_node:
        return link
    return min(link, cluster.nic_bytes_per_s * costs.nic * max(1, cluster.devices_per_node // setting.layout.tp))


def allreduce_seconds(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds of a ring all-reduce of `nbytes` a rank: each moves 2 (n - 1) / n of its buffer."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * nbytes / bytes_per_s + 2 * COLLECTIVE_SECONDS


def gather_seconds(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds of a ring all-gather to (or reduce-scatter from) `nbytes` on each rank."""
    return 0.0 if ranks == 1 else (ranks - 1) / ranks * nbytes / bytes_per_s + COLLECTIVE_SECONDS


def forward_seconds(setting: Setting, tokens: float, context: float) -> float:
    """One forward pass of `tokens` packed tokens that each see `context` tokens on average; logits of all of them."""
    model, layout, cluster, costs = setting.model, setting.layout, setting.cluster, setting.costs
    width = min(model.hidden, model.expert_intermediate or model.intermediate) / layout.tp
    rate = setting.flops * gemm_efficiency(costs, tokens, width)
    products = tokens * (2 * model.active_params() + model.head_flops(setting.role.head)) / layout.tp / rate
    attended = 4 * model.heads * model.head_dim * context * model.layers * tokens / layout.tp
    attention = attended / (setting.flops * costs.attention)
    elementwise = setting.element * model.layers * tokens * (14 * model.hidden + 4 * model.intermediate) / layout.tp
    traffic = elementwise / (cluster.memory_bytes_per_s * costs.memory)
    nbytes = setting.element * tokens * model.hidden
    reduced = 2 * model.layers * allreduce_seconds(nbytes, layout.tp, collective_bytes_per_s(setting, layout.tp))
    return products + attention + traffic + reduced + model.layers * costs.layer_seconds


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


def inference_seconds(setting: Setting, work: TrainWork) -> float:
    """One forward pass over the whole batch in micro-batches."""
    layout = setting.layout
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    forward = forward_seconds(setting, per_device / count, work.sample_tokens / 2)
    gathered = 0.0
    if layout.sharding == "fsdp":
        nbytes = setting.element * setting.model.n_params(setting.role.head) / (layout.tp * layout.pp)
        gathered = gather_seconds(nbytes, layout.dp * layout.cp, collective_bytes_per_s(setting, layout.dp))
    return fsdp_slowdown(setting) * forward * (count + layout.pp - 1) / layout.pp + count * gathered


def decode_seconds(setting: Setting, running: float, context: float) -> float:
    """One decode step of `running` sequences of mean length `context` on one replica: bound by memory or arithmetic."""
    model, layout, cluster, costs = setting.model, setting.layout, setting.cluster, setting.costs
    active = model.active_params() + model.hidden * model.vocab
    bandwidth = cluster.memory_bytes_per_s
    read = setting.element * _touched_params(model, running) / layout.tp / (bandwidth * costs.memory)
    rate = setting.flops * gemm_efficiency(costs, running, model.hidden / layout.tp)
    computed = 2 * active * running / layout.tp / rate
    cache = kv_bytes_per_token(model, setting.role.dtype) / min(layout.tp, model.kv_heads)
    cached = running * context * cache / (bandwidth * costs.kv)
    nbytes = setting.element * running * model.hidden
    reduced = 2 * model.layers * allreduce_seconds(nbytes, layout.tp, collective_bytes_per_s(setting, layout.tp))
    fixed = costs.step_seconds + model.layers * costs.layer_seconds + running * costs.sequence_seconds
    return max(read, computed) + cached + reduced + fixed


def generate_seconds(setting: Setting, work: GenerateWork) -> float:
    """All samples of a batch: prefill of each group's prompt once, then continuous batching over `running` slots.

    A device's share is simulated by at most LENGTH_QUANTILES sequences at the quantiles of a truncated exponential
    distribution of lengths; a slot whose sequence ends takes the next one.
    """
    share = math.ceil(work.samples / setting.layout.dp)
    count = min(share, LENGTH_QUANTILES)
    scale = share / count  # real sequences behind each simulated one
    lengths = [length_quantile((i + 0.5) / count, work.mean_new_tokens, work.max_new_tokens) for i in range(count)]
    waiting = [lengths[i * _stride(count) % count] for i in range(count)]  # long and short ones mixed
    slots = max(1, min(count, round(work.running / scale)))
    ends = waiting[:slots]
    heapq.heapify(ends)
    queue, now, seconds = iter(waiting[slots:]), 0.0, 0.0
    while ends:
        end = heapq.heappop(ends)
        age = min(end, work.mean_new_tokens) / 2
        running = min(work.running, (len(ends) + 1) * scale)
        seconds += max(0.0, end - now) * decode_seconds(setting, running, work.prompt_tokens + age)
        now = max(now, end)
        following = next(queue, None)
        if following is not None:
            heapq.heappush(ends, now + following)
    prompts = math.ceil(share / work.samples_per_group) * work.prompt_tokens
    return seconds + forward_seconds(setting, prompts, work.prompt_tokens / 2)


def length_quantile(share: float, mean: float, longest: int) -> float:
    """The length below which `share` of the samples fall: exponential, cut at `longest`, with the given mean.

    mean = scale (1 - exp(-longest / scale)): samples that would run on are cut, not redrawn.
    """
    if mean >= 0.99 * longest:
        return float(longest)
    low, high = mean, longest * 100.0
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if scale * -math.expm1(-longest / scale) < mean else (low, scale)
    return min(float(longest), -high * math.log1p(-share))


def reallocation_seconds(setting: Setting) -> float:
    """Trained weights to another copy: each device of the copy takes its part over the slowest link between the two."""
    nbytes = setting.element * setting.model.n_params(setting.role.head) / shards(setting.layout)
    one_node = setting.cluster.nodes == 1
    rate = setting.cluster.link_bytes_per_s * setting.costs.link
    return nbytes / (rate if one_node else min(rate, setting.cluster.nic_bytes_per_s * setting.costs.nic))


def _touched_params(model: ModelSpec, tokens: float) -> float:
    """Weights that a step of `tokens` tokens reads: of the experts, those that some token chose."""
    head = model.vocab * model.hidden
    if not model.expert_layers:
        return model.active_params() + head
    unchosen = math.exp(tokens * math.log1p(-model.experts_per_token / model.experts))
    chosen = model.experts * (1 - unchosen)
    routed = model.expert_layers * model.expert_params()
    return model.active_params() + head + routed * max(0.0, chosen - model.experts_per_token)


def _stride(count: int) -> int:
    """A step near the golden section of `count` and coprime to it: i x step visits every place, well mixed."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step
