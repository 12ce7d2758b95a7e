"""Predicted seconds of one decode step on one replica: a roofline over weights, cache, arithmetic and collectives.

A step gives each of b running sequences one token. It reads the weights that some of them touch, or multiplies them,
whichever takes longer; it reads the keys and values of every sequence; tensor-parallel ranks add their parts up twice a
layer in messages so small that latency rules. Steps that wait for memory keep the full clock. Rates in units per
second, sizes in bytes; arrays go through as arrays.
"""

import math

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.comm import axis_link, collective_bytes_per_s, exchange_seconds
from realgraph.planner.costs.layer import EXPERT_TILE, GROUPED_RATE, MLP_ELEMENTS, NORM_ELEMENTS
from realgraph.planner.costs.lengths import Floats
from realgraph.planner.costs.memory.memory import kv_bytes_per_token, served_expert_ranks, trained_expert_ranks
from realgraph.planner.costs.overhead import collective_seconds, elementwise_bytes_per_s
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import fewer_windowed, window_of, windowed_share
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.stages import EMBEDDING_LAYERS, fullest_stage, head_layers, stage_loads, stages_of

# Small messages: every rank reads the others' whole buffers once (custom all-reduce kernels of serving engines). Large
# ones: NCCL's ring; nccl-tests on 8 A100 reach about 105 GB/s at 8 MB, less than half of their best rate.
RING_SECONDS = 7e-5
# Between nodes: latency of small messages on two nodes, and of each further doubling of their number (a tree).
NODES_SECONDS = 4e-5
NODE_HOP_SECONDS = 1.5e-5
# Experts are read a slice at a time, in tiles of 128 columns, of which the last is half empty on average: a slice of
# this many columns reaches half of the memory's rate.
EXPERT_HALF_COLUMNS = 64
# Of a layer's small kernels, in a captured graph: scores, top k, counts, sort and alignment by expert, activation, sum
# of answers (vLLM, fused_moe): six of about 5 us, the least that a kernel takes from start to end.
EXPERT_LAYER_SECONDS = 3e-5


class DecodeStep(Struct, frozen=True, eq=False):
    """The coefficients of a decode step for one setting; call it with sequences and their mean length in tokens."""

    dense_read: float  # seconds to read the shared weights
    dense_token: float  # seconds to multiply one token with them at the full rate
    half: float  # rows of a product at which half of that rate is reached
    cache_token: float  # seconds to read one token's keys and values
    attended: float  # seconds to multiply one token's keys and values
    fixed: float  # seconds a step
    sequence: float  # seconds a sequence
    # of all tensor-parallel all-reduces of a step: latency, and seconds per sequence
    direct: tuple[float, float] = (0.0, 0.0)
    ring: tuple[float, float] = (0.0, 0.0)  # the same another way; the faster one is taken
    stages: int = 1  # of the pipeline
    slowest: float = 1.0  # seconds of the slowest stage over those of the mean one
    # of each stage, where they have other shares of windowed layers: seconds over those of the mean one, and windowed
    # layers fewer than at the model's share, of all of them
    uneven: tuple[tuple[float, float], ...] = ()
    window: float = math.inf  # tokens that a query sees in windowed layers
    windowed: float = 0.0  # share of the layers that are
    expert_read: float = 0.0  # seconds to read all the experts of one rank once
    expert_token: float = 0.0  # seconds to multiply one token with them at the full rate
    unchosen: float = 0.0  # logarithm of the probability that one token passes an expert over
    experts: int = 0  # of a layer
    chosen: int = 0  # of one token
    group: float = 1.0  # replicas whose tokens meet at the same experts; less where those of one meet in several places

    def __call__(self, running: Floats, context: Floats) -> Floats:
        """Seconds of a step of `running` sequences, each `context` tokens long.

        A pipeline has as many groups of sequences on their way as stages, one in each: a step of all of them takes as
        many turns as there are groups, each as long as the slowest stage takes for running / stages sequences, with all
        its chunks of layers. Of fewer sequences than stages each is a group, and passes all stages. Of unequal
        sequences with a mean of `context`, those shorter than a window read less of it: left out.
        """
        rows = np.maximum(running / self.stages, np.minimum(running, 1.0))
        dense = np.maximum(self.dense_read, self.dense_token * (rows + self.half))
        hidden = rows * np.maximum(0.0, context - self.window) * max(self.cache_token, self.attended)
        cached = rows * context * max(self.cache_token, self.attended) - self.windowed * hidden
        reduced = np.minimum(self.direct[0] + rows * self.direct[1], self.ring[0] + rows * self.ring[1])
        layers: Floats = dense + cached + reduced + rows * self.sequence
        if self.experts:
            layers = layers + self._experts(rows)
        slowest = self.slowest * layers
        if self.uneven:
            slowest = np.max([ratio * layers + fewer * hidden for ratio, fewer in self.uneven], axis=0)
        return np.asarray(slowest + self.fixed)

    def seconds(self, running: float, context: float) -> float:
        """The same of single numbers."""
        return float(self(np.array(float(running)), np.array(float(context))))

    def _experts(self, rows: Floats) -> Floats:
        """Experts that some token chose are read, or multiplied with about an equal part of the tokens each."""
        tokens = rows * self.group
        touched: Floats = -np.expm1(tokens * self.unchosen)
        each: Floats = tokens * self.chosen / (self.experts * np.maximum(touched, 1e-9))
        computed: Floats = self.expert_token * rows * (1 + EXPERT_TILE / 2 / each)
        return np.maximum(self.expert_read * touched, computed)


def decode_step(setting: Setting) -> DecodeStep:
    """The coefficients for one replica of a setting: its tp x pp ranks; `ep` spreads experts over replicas besides."""
    model, layout, cluster, costs = setting.model, setting.layout, setting.cluster, setting.costs
    bandwidth, width = cluster.memory_bytes_per_s, model.hidden / layout.tp
    weight = setting.engine.weight_bytes or setting.element
    rate = setting.engine.product_speedup * setting.flops * costs.gemm * width / (width + costs.gemm_width)
    experts = model.experts if model.expert_layers else 0
    ranks = served_expert_ranks(layout) if setting.cuts_served_experts else trained_expert_ranks(layout)
    slices = model.expert_intermediate / (1 if _experts_whole(setting) else layout.tp)
    routed = model.expert_layers * model.expert_params()
    dense = model.active_params() - model.experts_per_token * routed + model.hidden * model.vocab
    direct, ring = _allreduces(setting)
    hops, exchanged = _exchanges(setting)
    slowest = slowest_stage(setting)
    turns = layout.pp * (costs.step_seconds + _handover_seconds(setting))
    experts_fixed = 0.0 if cluster.is_cpu else model.expert_layers * EXPERT_LAYER_SECONDS
    return DecodeStep(
        dense_read=weight * dense / layout.tp / (bandwidth * costs.memory),
        dense_token=2 * dense / layout.tp / rate,
        half=costs.gemm_tokens,
        cache_token=cache_bytes_per_token(setting) / (bandwidth * costs.kv),
        attended=attention_flops(model) / layout.tp / (setting.flops * costs.attention),
        fixed=turns + slowest * (model.layers * costs.layer_seconds + hops + experts_fixed),
        sequence=costs.sequence_seconds + _elementwise_seconds(setting) + exchanged,
        direct=direct,
        ring=ring,
        stages=layout.pp,
        slowest=slowest,
        uneven=uneven_stages(setting),
        window=window_of(setting),
        windowed=windowed_share(model),
        expert_read=weight
        * experts
        * routed
        / ranks
        / (bandwidth * costs.memory)
        * (1 + EXPERT_HALF_COLUMNS / max(1, slices)),
        expert_token=2 * model.experts_per_token * routed / layout.tp / (rate * GROUPED_RATE) if experts else 0.0,
        unchosen=math.log1p(-model.experts_per_token / experts) if experts > model.experts_per_token else -50.0,
        experts=experts,
        chosen=model.experts_per_token,
        group=ranks / layout.tp,
    )


def decode_seconds(setting: Setting, running: float, context: float) -> float:
    """One decode step of `running` sequences of mean length `context` tokens on one replica."""
    return decode_step(setting).seconds(running, context)


def cache_bytes_per_token(setting: Setting) -> float:
    """Keys and values of one token on one rank: heads are divided among tp ranks, at least one a rank; a latent, which
    serves all heads, is not."""
    model = setting.model
    nbytes = kv_bytes_per_token(model, setting.engine.cache_bytes or setting.element)
    return nbytes / (min(setting.layout.tp, model.kv_heads) if model.latent is None else 1)


def attention_flops(model: ModelSpec) -> float:
    """Operations of one new token on one cached token, all layers: two products, each of 2 operations a number.

    Latent attention multiplies the latents themselves, its projections taken into queries and outputs
    (arXiv:2405.04434, sec. 2.1.2).
    """
    if model.latent is None:
        return 4.0 * model.attention_width() * model.layers
    return 2.0 * model.heads * (2 * model.latent.kv_rank + model.latent.rope_dim) * model.layers


def _elementwise_seconds(setting: Setting) -> float:
    """Seconds of one sequence in one step: norms, residuals and rotary embeddings, which every tp rank computes whole,
    and the activations of the MLP, cut over the ranks; read from and written to memory."""
    model = setting.model
    routed = model.experts_per_token * model.expert_intermediate if model.expert_layers else 0
    nbytes = setting.element * (
        NORM_ELEMENTS * model.hidden + MLP_ELEMENTS * max(routed, model.intermediate) / setting.layout.tp
    )
    return model.layers * nbytes / elementwise_bytes_per_s(setting)


def _allreduces(setting: Setting) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two a layer among tp ranks, by direct reads and by a ring: latency of all, and seconds per sequence.

    Direct reads stay inside a node; there n - 1 buffers of the hidden states enter each rank, of a ring 2 (n - 1) / n.
    """
    model, n = setting.model, setting.layout.tp
    if n == 1:
        return (0.0, 0.0), (0.0, 0.0)
    count, row = 2 * model.layers, setting.element * model.hidden
    rate = collective_bytes_per_s(setting, n)
    traffic = count * 2 * (n - 1) / n * row / rate
    if setting.cluster.is_cpu:
        measured = (count * 2 * collective_seconds(setting.cluster, setting.costs), traffic)
        return measured, measured
    if n > setting.cluster.devices_per_node:
        across = (count * (NODES_SECONDS + _hops(setting, n)), traffic)
        return across, across
    ring = (count * RING_SECONDS, traffic)
    return (count * collective_seconds(setting.cluster, setting.costs), count * (n - 1) * row / rate), ring


def _exchanges(setting: Setting) -> tuple[float, float]:
    """Seconds a step, and a sequence, of what passes between ranks that have whole experts, each with its share of the
    rows: a dispatch and a combine a layer, each as in training (see `exchange_seconds`)."""
    model, layout, costs = setting.model, setting.layout, setting.costs
    latency, traffic = 0.0, 0.0
    if _experts_whole(setting) and model.expert_layers:
        row = setting.element * model.hidden / layout.tp
        one = exchange_seconds(setting, row, layout.ep, axis_link(setting, layout.ep, 1, "exchange"))
        latency += (
            2
            * model.expert_layers
            * (collective_seconds(setting.cluster, costs, "exchange") + _hops(setting, layout.ep))
        )
        traffic += 2 * model.expert_layers * one
    return latency, traffic


def _experts_whole(setting: Setting) -> bool:
    """True where experts lie whole on ranks, and rows go to them; else every rank has a slice of all that its replica
    has, and the sum over tp ranks is all that passes."""
    return setting.layout.ep > (setting.layout.tp if setting.cuts_served_experts else 1)


def slowest_stage(setting: Setting) -> float:
    """Seconds of the slowest pipeline stage over those of the mean one: of layers, and the head on the last."""
    model, head, pp = setting.model, setting.role.head, setting.layout.pp
    if pp == 1:
        return 1.0
    ends = EMBEDDING_LAYERS, head_layers(model, head)
    return pp * fullest_stage(stages_of(model, head, setting.layout), ends) / (model.layers + sum(ends))


def uneven_stages(setting: Setting) -> tuple[tuple[float, float], ...]:
    """Seconds of each stage over those of the mean one, were all layers alike; and windowed layers that it has fewer
    than at the model's share, over the mean stage's layers. () where stages are alike."""
    model, head, pp = setting.model, setting.role.head, setting.layout.pp
    stages = stages_of(model, head, setting.layout)
    fewer = fewer_windowed(model, stages) if pp > 1 and window_of(setting) < math.inf else ()
    ends = EMBEDDING_LAYERS, head_layers(model, head)
    mean = (model.layers + sum(ends)) / pp
    loads = stage_loads(stages, ends) if fewer else []
    return tuple((load / mean, less / mean) for load, less in zip(loads, fewer, strict=True))


def _handover_seconds(setting: Setting) -> float:
    """Latency of one group's hidden states from a stage to the next, once for each chunk of its layers."""
    layout = setting.layout
    if layout.pp == 1:
        return 0.0
    chunks = len(stages_of(setting.model, setting.role.head, layout)[0])
    far = layout.mesh.n_devices > setting.cluster.devices_per_node  # some neighbouring stages lie on two nodes
    return chunks * (collective_seconds(setting.cluster, setting.costs, "p2p") + far * NODE_HOP_SECONDS)


def _hops(setting: Setting, ranks: int) -> float:
    """Latency between nodes of one collective over `ranks` neighbouring devices."""
    nodes = max(1.0, ranks / setting.cluster.devices_per_node)
    return NODE_HOP_SECONDS * math.ceil(math.log2(nodes))
