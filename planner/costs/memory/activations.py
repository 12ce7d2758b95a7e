"""Bytes that a running call adds: activations, logits, messages and caches of one micro-batch. Pure formulas.

Counted from what autograd keeps of a layer of transformers' modules with a fused attention kernel
(tests/test_planner_models.py counts again), and, for layouts that cut a model, of fused layers as in arXiv:2205.05198.
"""

import math
from functools import lru_cache

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.memory.terms import (
    CACHE_PAGE_TOKENS,
    PREFILL_TOKENS,
    DType,
    Footprint,
    Recompute,
    cuts_model,
    element_bytes,
)
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.stages import stage_totals, stages_of

LOGITS_CHUNK_BYTES = 1 << 26  # float32 logits that exist at once: the head is computed in chunks of tokens
# Of each number that an expert gives for a token, float32 numbers that live while a backward pass goes through the
# weighted sum of experts: its gradient, and that of its weight before it is summed (runtime/parallel/experts/block.py).
COMBINED = 2
LIVE_LAYERS = 2.0  # layers' worth of tensors while one layer's backward pass runs: its own and their gradients


def kept_bytes_per_token(model: ModelSpec, dtype: DType, fused: bool = False) -> int:
    """Bytes that autograd keeps of one token in one layer: norms partly in float32, queries, keys, values, MLP.

    fused: norms keep their input and output in the layer's own precision, and a gated MLP its two inputs and its
    output, as in Transformer Engine.
    """
    element = element_bytes(dtype)
    wide = max(4, element)
    heads = (model.heads + model.kv_heads) * model.head_dim
    if fused:
        attention = element * (2 * model.attention_width() + 2 * model.kv_heads * model.head_dim) + 12 * model.heads
        return 2 * model.norms * element * model.hidden + attention + _mlp_kept(model, element, 3)
    norm = 2 * wide if model.architecture.startswith("gemma") else wide + element  # Gemma scales in float32
    attention = 2 * element * heads + model.qk_norm * norm * heads + 12 * model.heads
    return (model.norms * norm + 2 * element) * model.hidden + attention + _mlp_kept(model, element, 4)


class Running(Struct, frozen=True):
    """The manner of a training pass, where it is not as the engine of such a layout runs it."""

    recompute: Recompute | None = None  # None for the role's own choice
    fused: bool | None = None  # kernels of norms and MLP, None: where the layout cuts the model
    live: float = LIVE_LAYERS  # layers' worth of tensors while one is in its backward pass
    offloaded: bool = False  # layers' inputs wait in host memory
    # of each logit, where those of the micro-batch exist at once; 0 where they exist in chunks of tokens only, None: as
    # the layout's engine keeps them
    logit_bytes: int | None = None
    microbatches: int | None = None  # of a step, which bounds how many a stage keeps
    chunks: int = 1  # of an interleaved stage
    score_bytes: int = 0  # that unfused attention keeps of each score
    sample_tokens: int = 0  # scores that a token has
    sequence_parallel: bool = True  # residuals are cut over tp
    combined: int = COMBINED  # float32 copies of the experts' outputs in their weighted sum's backward pass


PLAIN_PASSES = Running()


@lru_cache(maxsize=1 << 16)
def train_activations(
    model: ModelSpec, role: ModelRole, layout: Layout, tokens: int, running: Running = PLAIN_PASSES
) -> Footprint:
    """Activations and logits of one micro-batch of `tokens` packed tokens in forward and backward.

    With full recomputation a layer's input is all that stays, and one layer is live; a backward pass holds about one
    layer's worth of gradients besides, and of experts their outputs in float32. Selective recomputation keeps what
    matrix products and attention read: norms and activation functions are computed again (arXiv:2205.05198, sec. 5,
    where attention is not fused its scores too). Of pp stages the first keeps most micro-batches (`in_flight`), and the
    last one has the logits: the fullest counts.
    """
    element = element_bytes(role.dtype)
    cut = layout.tp if running.sequence_parallel else 1
    per_layer, live = _kept_layers(model, role, layout, running)
    ends = 4 * max(4, element) * model.hidden // cut  # embedding, last norm, and their gradients
    combined = 4 * running.combined * model.experts_per_token * model.hidden // (layout.tp if layout.ep > 1 else 1)
    layers = stage_totals(stages_of(model, role.head, layout))
    kept = [count * begun for count, begun in zip(layers, in_flight(layout.pp, running), strict=True)]
    rows = [
        int(tokens * (each * per_layer + live + combined + ends * (stage in (0, layout.pp - 1))))
        for stage, each in enumerate(kept)
    ]
    logits = _logits(model, role, layout, tokens, running.logit_bytes)
    buckets = _messages(model, layout, element, tokens)
    fullest = max(rows)
    if rows[-1] + logits >= fullest:
        return Footprint(activations=rows[-1], logits=logits, buckets=buckets)
    return Footprint(activations=fullest, buckets=buckets)


def in_flight(stages: int, running: Running) -> tuple[float, ...]:
    """Micro-batches whose activations each stage keeps at once; never more than a step has.

    1F1B: as many as stages follow, itself counted (arXiv:2104.04473, sec. 2.2.1). Interleaved: the first stage warms up
    with 2 (p - 1) + (v - 1) p chunks and so keeps p (1 + (p - 1) / (p v)) micro-batches (arXiv:2205.05198, sec. 4.2.3),
    each later one 2 chunks less, the last stage (v - 1) p and the one that it works on.
    """
    most = float(running.microbatches or math.inf)
    if stages == 1:
        return (1.0,)
    if running.chunks > 1:
        return tuple(min(most, stages + (stages - 1 - 2 * stage) / running.chunks) for stage in range(stages))
    return tuple(min(most, float(stages - stage)) for stage in range(stages))


def _kept_layers(model: ModelSpec, role: ModelRole, layout: Layout, running: Running) -> tuple[float, float]:
    """Bytes of one token: what stays of a layer, and what lives besides while one is in its backward pass."""
    element = element_bytes(role.dtype)
    recompute = running.recompute or ("full" if role.gradient_checkpointing else "none")
    fused = cuts_model(layout) if running.fused is None else running.fused
    cut = layout.tp if running.sequence_parallel else 1
    layer = kept_bytes_per_token(model, role.dtype, fused) // layout.tp
    if cut < layout.tp:
        residual = _residual_bytes(model, element, fused)
        layer += residual - residual // layout.tp
    layer += running.score_bytes * running.sample_tokens * model.heads // layout.tp
    gathered = _gathered_bytes(model, element, layout)
    if recompute == "none":
        return layer + gathered, (running.live - 1) * layer
    if recompute == "selective":
        return min(layer, _product_inputs(model, element, layout.tp, cut)) + gathered, running.live / 2 * layer
    return 0 if running.offloaded else element * model.hidden // cut, running.live * layer + gathered


def _gathered_bytes(model: ModelSpec, element: int, layout: Layout) -> int:
    """Keys and values of the other cp ranks' tokens, by each own token, that a layer's attention keeps: as if every
    sample were cut."""
    width = model.kv_width() if model.latent is None else 2 * model.attention_width()
    return element * width * (layout.cp - 1) // layout.tp


def _residual_bytes(model: ModelSpec, element: int, fused: bool) -> int:
    """The part of what a layer keeps of a token that only sequence parallelism cuts: norms and residuals."""
    if fused:
        return 2 * model.norms * element * model.hidden
    return (model.norms * (max(4, element) + element) + 2 * element) * model.hidden


def _product_inputs(model: ModelSpec, element: int, tp: int, cut: int) -> int:
    """Bytes of one token that a layer's matrix products and attention read: the rest is computed again."""
    attention = 2 * model.attention_width() + 2 * model.kv_heads * model.head_dim
    dense = (model.mlp_matrices - 1) * model.intermediate if model.expert_layers < model.layers else 0
    routed = model.experts_per_token * (2 * model.expert_intermediate + model.hidden) + 2 * model.shared_intermediate
    mlp = max(dense, routed if model.expert_layers else 0)
    return element * (2 * model.hidden // cut + (attention + mlp) // tp)


def _messages(model: ModelSpec, layout: Layout, element: int, tokens: int) -> int:
    """Buffers of a pass: hidden states to and from neighbouring stages, and tokens to experts and back."""
    stages = 4 * element * model.hidden * tokens // layout.tp if layout.pp > 1 else 0
    experts = 2 * model.experts_per_token * element * model.hidden * tokens // layout.tp if layout.ep > 1 else 0
    return stages + experts


def forward_activations(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    """Activations and logits of a forward pass without gradients: one layer's tensors live at once."""
    rows = _forward_rows(model, role, layout, tokens)
    return rows + Footprint(logits=_logits(model, role, layout, tokens))


def _forward_rows(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    """The same without logits."""
    element = element_bytes(role.dtype)
    width = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * _mlp_width(model)
    per_token = element * (4 * model.hidden + width // layout.tp) + 8 * model.hidden
    return Footprint(activations=per_token * tokens, buckets=_messages(model, layout, element, tokens))


def kv_bytes_per_token(model: ModelSpec, element: int) -> int:
    """Keys and values of one token in all layers; element: bytes of a number. Sliding-window layers count as full."""
    return model.layers * model.kv_width() * element


def generation(
    model: ModelSpec, role: ModelRole, layout: Layout, kv_tokens: int, cache_bytes: int | None = None
) -> Footprint:
    """A cache of `kv_tokens` tokens in the fullest stage's layers, in whole pages and one for padding, and the
    activations and logits of a prefill pass. cache_bytes: of a number in it; None: as in the role's dtype."""
    per_token = cache_bytes_per_token(model, role, layout, cache_bytes)
    entered = min(kv_tokens, PREFILL_TOKENS)
    prefill = _forward_rows(model, role, layout, entered)
    logits = _logits(model, role, layout, entered, 0)  # engines that serve need those of last tokens only
    pages = math.ceil(kv_tokens / CACHE_PAGE_TOKENS) + 1
    return Footprint(kv_cache=per_token * pages * CACHE_PAGE_TOKENS, logits=logits) + prefill


def decode_logits(model: ModelSpec, role: ModelRole, layout: Layout, sequences: int) -> int:
    """Bytes of the logits of a decode step of so many sequences: as computed, and as a captured graph keeps them."""
    return 2 * element_bytes(role.dtype) * sequences * model.vocab // layout.tp


def cache_bytes_per_token(model: ModelSpec, role: ModelRole, layout: Layout, cache_bytes: int | None = None) -> int:
    """Bytes of one token in the cache of a device of the fullest stage."""
    cut = min(layout.tp, model.kv_heads) if model.latent is None else 1  # one latent serves all heads
    layers = max(stage_totals(stages_of(model, role.head, layout)))
    return kv_bytes_per_token(model, cache_bytes or element_bytes(role.dtype)) * layers // (model.layers * cut)


def _logits(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int, whole: int | None = None) -> int:
    """Logits as computed and in float32, their log-softmax and their gradient; other heads have none.

    This project's engines have them of one chunk at a time. whole: bytes of each logit where those of all tokens exist
    at once, as in engines that cut a model: each rank has its part of the vocabulary (arXiv:1909.08053, sec. 3), as
    computed, in float32, and as a softmax in float32 that becomes the gradient (Megatron-Core,
    core/tensor_parallel/cross_entropy.py).
    """
    if role.head != "lm":
        return 0
    element = element_bytes(role.dtype)
    wide = max(4, element)
    if whole is None:
        whole = 2 * wide + (element if element < wide else 0) if cuts_model(layout) else 0
    if whole:
        return whole * tokens * model.vocab // layout.tp
    chunk = max(LOGITS_CHUNK_BYTES, 4 * model.vocab) // 4  # logits, at least of one token
    return 4 * wide * min(tokens * model.vocab, chunk) // layout.tp


def _mlp_kept(model: ModelSpec, element: int, gated: int) -> int:
    """Gate, its activation, up and their product (`gated` of them); of an MLP of two matrices its middle, twice.

    Experts keep a permuted copy of their inputs too, and of their outputs where activations are not fused (gated 4).
    """
    kept = 2 if model.mlp_matrices == 2 else gated
    dense = kept * element * model.intermediate if model.expert_layers < model.layers else 0
    routed = gated * element * model.expert_intermediate + (gated - 2) * element * model.hidden
    shared = gated * element * model.shared_intermediate
    return max(dense, model.experts_per_token * routed + shared if model.expert_layers else 0)


def _mlp_width(model: ModelSpec) -> int:
    dense = model.intermediate if model.expert_layers < model.layers else 0
    routed = model.experts_per_token * (model.expert_intermediate + model.hidden) + model.shared_intermediate
    return max(dense, routed if model.expert_layers else 0)
