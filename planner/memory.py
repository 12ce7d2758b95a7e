"""Bytes that one device holds: weights and optimizer states of each copy, and what a running call adds. Pure formulas.

Sizes of states: ZeRO, arXiv:1910.02054, sec. 3.1. Activations: counted from what autograd keeps of a layer of
transformers' modules with a fused attention kernel (tests/test_planner_memory.py counts again).
"""

from typing import Literal

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.cluster import Cluster
from realgraph.planner.layout import Layout
from realgraph.planner.model_spec import ModelSpec

DType = Literal["float32", "bfloat16", "float16", "float64"]
Term = Literal["weights", "gradients", "optimizer", "activations", "logits", "kv_cache"]
TERMS: tuple[Term, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache")
ELEMENT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
LOGITS_CHUNK_BYTES = 1 << 26  # float32 logits that exist at once: the head is computed in chunks of tokens
PREFILL_TOKENS = 4096  # prompt tokens that enter the cache in one forward pass
FRACTION = 0.94  # of a device's memory that a plan may use: allocators fragment
GPU_RUNTIME_BYTES = 1_500_000_000  # CUDA context, NCCL and cuBLAS workspaces of one process
CPU_RUNTIME_BYTES = 600_000_000  # a Python process with torch and transformers loaded


class Footprint(Struct, frozen=True):
    """Bytes on one device, by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(*(getattr(self, term) + getattr(other, term) for term in TERMS))

    @property
    def total(self) -> int:
        return sum(getattr(self, term) for term in TERMS)

    @property
    def worst(self) -> Term:
        """The largest term."""
        return max(TERMS, key=lambda term: getattr(self, term))


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device that a plan may fill."""
    runtime = CPU_RUNTIME_BYTES if cluster.is_cpu else GPU_RUNTIME_BYTES
    return max(0, round(FRACTION * cluster.memory_bytes) - runtime)


def element_bytes(dtype: DType) -> int:
    """Bytes of one element."""
    return ELEMENT_BYTES[dtype]


def master_bytes(role: ModelRole) -> int:
    """Bytes of one element of gradients, master weights and Adam moments: at least float32."""
    return 8 if "float64" in (role.dtype, role.master_dtype) else 4


def shards(layout: Layout) -> int:
    """Devices among which one copy's states are divided."""
    model_parallel = layout.tp * layout.pp
    return model_parallel * layout.dp * layout.cp if layout.sharding == "fsdp" else model_parallel


def lora_params(model: ModelSpec, rank: int) -> int:
    """Of adapters of `rank` on attention's and the MLP's matrices: rank x (rows + columns) each (arXiv:2106.09685)."""
    queries, keys = model.attention_width(), model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    dense = model.mlp_matrices * (model.hidden + model.intermediate)
    routed = 3 * model.experts * (model.hidden + model.expert_intermediate)
    mlps = (model.layers - model.expert_layers) * dense + model.expert_layers * routed
    return rank * (model.layers * attention + mlps)


def trained_copy(model: ModelSpec, role: ModelRole, layout: Layout) -> Footprint:
    """Resident bytes of a trained role under AdamW with gradients summed in the masters' precision.

    Whole copies: weights, a master copy where that is wider, summed gradients, two moments, and in mixed precision the
    gradients that a backward pass leaves before they are summed. FSDP's shards are the masters themselves, and a
    backward pass always leaves gradients of its own. So 16 bytes a parameter in float32, 20 in bfloat16 and in FSDP.
    """
    n_params = _ceil(model.n_params(role.head), shards(layout))
    own, wide = element_bytes(role.dtype), master_bytes(role)
    if layout.sharding == "fsdp":
        return Footprint(weights=wide * n_params, gradients=2 * wide * n_params, optimizer=2 * wide * n_params)
    if wide == own:
        return Footprint(weights=own * n_params, gradients=wide * n_params, optimizer=2 * wide * n_params)
    return Footprint(weights=own * n_params, gradients=(wide + own) * n_params, optimizer=3 * wide * n_params)


def rescue_copies(model: ModelSpec, role: ModelRole, layout: Layout) -> Footprint:
    """Host bytes of the states kept of a whole trained copy before each train call: the last, and the one being taken.

    Sharded copies keep none: no single process has the whole state.
    """
    if layout.sharding == "fsdp":
        return Footprint()
    own, wide = element_bytes(role.dtype), master_bytes(role)
    per_param = own + 2 * wide + (wide if wide > own else 0)
    return Footprint(optimizer=2 * per_param * _ceil(model.n_params(role.head), shards(layout)))


def frozen_copy(model: ModelSpec, role: ModelRole, layout: Layout) -> Footprint:
    """Resident bytes of a copy that only runs forward: its weights, and masters where a moving average updates them."""
    own, wide = element_bytes(role.dtype), master_bytes(role)
    averaged = wide if role.ema_rate is not None and wide > own else 0
    return Footprint(weights=(own + averaged) * _ceil(model.n_params(role.head), shards(layout)))


def gathered(model: ModelSpec, role: ModelRole, layout: Layout, trains: bool) -> Footprint:
    """What FSDP gathers while a call runs: two layers (one prefetched) and, as one group, embedding, norm and head.

    In a backward pass a layer's and that group's whole gradients wait for their reduction.
    """
    if layout.sharding != "fsdp":
        return Footprint()
    ends = model.vocab * model.hidden + model.head_params(role.head)
    weights = element_bytes(role.dtype) * (2 * model.layer_params() + ends) // layout.tp
    gradients = master_bytes(role) * (model.layer_params() + ends) // layout.tp if trains else 0
    return Footprint(weights=weights, gradients=gradients)


def kept_bytes_per_token(model: ModelSpec, dtype: DType) -> int:
    """Bytes that autograd keeps of one token in one layer: norms partly in float32, queries, keys, values, MLP."""
    element = element_bytes(dtype)
    wide = max(4, element)
    heads = (model.heads + model.kv_heads) * model.head_dim
    norm = 2 * wide if model.architecture.startswith("gemma") else wide + element  # Gemma scales in float32
    attention = 2 * element * heads + model.qk_norm * norm * heads + 12 * model.heads
    return (model.norms * norm + 2 * element) * model.hidden + attention + _mlp_kept(model, element)


def train_activations(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    """Activations and logits of one micro-batch of `tokens` packed tokens in forward and backward.

    With gradient checkpointing a layer's input is all that stays, and one layer is live; a backward pass holds about
    one layer's worth of gradients besides. With pp, a stage keeps up to pp micro-batches (1F1B, arXiv:2104.04473).
    """
    element = element_bytes(role.dtype)
    layer = kept_bytes_per_token(model, role.dtype) // layout.tp
    layers = _ceil(model.layers, layout.pp) * layout.pp
    stack = layers * element * model.hidden + 2 * layer if role.gradient_checkpointing else (layers + 1) * layer
    ends = 4 * max(4, element) * model.hidden  # embedding, last norm, and their gradients
    return Footprint(activations=(stack + ends) * tokens, logits=_logits(model, role, layout, tokens))


def forward_activations(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    """Activations and logits of a forward pass without gradients: one layer's tensors live at once."""
    element = element_bytes(role.dtype)
    width = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * _mlp_width(model)
    per_token = element * (4 * model.hidden + width // layout.tp) + 8 * model.hidden
    return Footprint(activations=per_token * tokens, logits=_logits(model, role, layout, tokens))


def kv_bytes_per_token(model: ModelSpec, dtype: DType) -> int:
    """Keys and values of one token in all layers. Sliding-window layers count as full: an upper bound."""
    return 2 * model.layers * model.kv_heads * model.head_dim * element_bytes(dtype)


def generation(model: ModelSpec, role: ModelRole, layout: Layout, kv_tokens: int) -> Footprint:
    """A cache of `kv_tokens` tokens, and the activations and logits of a prefill pass."""
    per_token = kv_bytes_per_token(model, role.dtype) // min(layout.tp, model.kv_heads)
    prefill = forward_activations(model, role, layout, min(kv_tokens, PREFILL_TOKENS))
    return Footprint(kv_cache=per_token * kv_tokens) + prefill


def _logits(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> int:
    """Logits of one chunk as computed and in float32, their log-softmax and their gradient; other heads have none."""
    if role.head != "lm":
        return 0
    wide = max(4, element_bytes(role.dtype))
    chunk = max(LOGITS_CHUNK_BYTES, 4 * model.vocab) // 4  # logits, at least of one token
    return 4 * wide * min(tokens * model.vocab, chunk) // layout.tp


def _mlp_kept(model: ModelSpec, element: int) -> int:
    """Gate, its activation, up and their product; experts keep a permuted copy of their inputs and outputs too."""
    dense = 4 * element * model.intermediate if model.expert_layers < model.layers else 0
    routed = 4 * element * model.expert_intermediate + 2 * element * model.hidden
    return max(dense, model.experts_per_token * routed if model.expert_layers else 0)


def _mlp_width(model: ModelSpec) -> int:
    dense = model.intermediate if model.expert_layers < model.layers else 0
    routed = model.experts_per_token * (model.expert_intermediate + model.hidden) if model.expert_layers else 0
    return max(dense, routed)


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)
