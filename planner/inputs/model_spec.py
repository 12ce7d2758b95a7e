"""The shape of a model, from its config.json: what memory and seconds follow from."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.windows import SlidingWindow, sliding_window

Architecture = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
Head = Literal["lm", "value", "score"]
Count = Annotated[int, Meta(ge=1)]
# KV heads where a config.json does not say: the defaults of transformers' configuration classes.
KV_HEADS = {
    **{"qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "mistral": 8, "mixtral": 8},
    **{"gemma": 16, "gemma2": 4, "gemma3_text": 4, "gpt_oss": 8},
}
# of a layer and of a token, likewise
EXPERTS = {"qwen3_moe": (128, 8), "mixtral": (8, 2), "gpt_oss": (128, 4), "deepseek_v3": (256, 8)}
ROUTER_GROUPS = (8, 4)  # of DeepSeek-V3, all and those of a token, likewise
EXPERT_WIDTH = {"qwen3_moe": 768, "deepseek_v3": 2048}  # where it is not that of an MLP, likewise
HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128, "gpt_oss": 64}  # likewise


class LatentAttention(Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1): ranks and head sizes in elements."""

    query_rank: int  # 0: queries come from the hidden state at once
    kv_rank: int
    rope_dim: int  # of a query's and the one shared key's rotary part
    value_dim: int  # of a head's values; `head_dim` of the model is that of a key's other part


class ModelSpec(Struct, frozen=True, cache_hash=True):
    """Dimensions of a decoder: sizes in elements. Expert layers have no dense MLP.

    qkv_bias, out_bias, mlp_bias and expert_bias (the router's and the experts') say which linear layers carry a bias.
    Facts by architecture: transformers 5, modeling_<architecture>.py.
    """

    architecture: Architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2  # RMSNorm vectors of a layer besides those of queries and keys (qk_norm)
    experts: int = 0  # 0 is a dense model
    experts_per_token: int = 0
    router_groups: int = 1  # of neighbouring experts, of which a token's experts lie in `router_groups_per_token`
    router_groups_per_token: int = 1
    expert_intermediate: int = 0
    expert_layers: int = 0
    dense_layers: tuple[int, ...] = ()  # of a mixture: the numbers of those without experts
    mlp_matrices: int = 3  # 3 where an MLP is gated, else 2
    shared_intermediate: int = 0  # width of what every token passes beside its experts
    latent: LatentAttention | None = None
    expert_bias: bool = False
    sinks: bool = False  # each head has a logit that takes part in the softmax and adds nothing
    window: SlidingWindow | None = None

    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        if self.latent is not None:
            return self._latent_params(self.latent)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 2 * self.hidden * query + 2 * self.hidden * key
        biases = self.qkv_bias * (query + 2 * key) + self.out_bias * self.hidden
        return matrices + biases + self.qk_norm * 2 * self.head_dim + self.sinks * self.heads

    def _latent_params(self, latent: LatentAttention) -> int:
        inward = latent.query_rank or self.hidden
        queries = inward * self.heads * (self.head_dim + latent.rope_dim)
        up = latent.kv_rank * self.heads * (self.head_dim + latent.value_dim)
        out = self.heads * latent.value_dim * self.hidden + self.out_bias * self.hidden
        return self._down_params(latent) + queries + up + out

    def _down_params(self, latent: LatentAttention) -> int:
        """Projections to latents, and their norms."""
        widths = latent.query_rank + latent.kv_rank + latent.rope_dim
        return (self.hidden + int(self.qkv_bias)) * widths + latent.query_rank + latent.kv_rank

    def attention_width(self) -> int:
        """Such that attention takes 4 operations an element for each token and position that it sees."""
        if self.latent is None:
            return self.heads * self.head_dim
        return self.heads * (self.head_dim + self.latent.rope_dim + self.latent.value_dim) // 2

    def attention_copies(self, tp: int) -> float:
        """Parameters of a layer's attention that each of `tp` ranks has over its share: keys and values where there are
        more ranks than KV heads, of which neighbours hold copies; the projections to latents."""
        if self.latent is not None:
            return self._down_params(self.latent) * (1 - 1 / tp)
        if tp <= self.kv_heads:
            return 0.0
        return self.kv_width() * (self.hidden + int(self.qkv_bias)) * (1 / self.kv_heads - 1 / tp)

    def kv_width(self) -> int:
        """Elements that a cache keeps of one token in one layer; latent attention keeps the latent and one key."""
        if self.latent is None:
            return 2 * self.kv_heads * self.head_dim
        return self.latent.kv_rank + self.latent.rope_dim

    def mlp_params(self) -> int:
        """Parameters of one dense MLP."""
        matrices = self.mlp_matrices * self.hidden * self.intermediate
        return matrices + self.mlp_bias * ((self.mlp_matrices - 1) * self.intermediate + self.hidden)

    def expert_params(self) -> int:
        """Parameters of one expert."""
        biases = self.expert_bias * (2 * self.expert_intermediate + self.hidden)
        return 3 * self.hidden * self.expert_intermediate + biases

    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers: what expert parallelism cuts."""
        return self.expert_layers * self.experts * self.expert_params()

    def route_bytes(self) -> int:
        """Bytes of the choices of experts of one token, as `routing_replay` keeps them: in all layers of experts."""
        return self.expert_layers * self.experts_per_token * choice_bytes(self.experts)

    def head_params(self, head: Head = "lm") -> int:
        """Parameters of the output head besides the embedding: none where tied; a value or score head is one row."""
        if head != "lm":
            return self.hidden
        return 0 if self.tied else self.vocab * self.hidden

    def n_params(self, head: Head = "lm") -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        dense = (self.layers - self.expert_layers) * self.mlp_params()
        sparse = self.expert_layers * (self.experts * self.expert_params() + self.common_params())
        return self.vocab * self.hidden + self._shared_params() + dense + sparse + self.head_params(head)

    def active_params(self) -> int:
        """Parameters that one token multiplies in the layers: no embedding, no head, its own experts only."""
        dense = (self.layers - self.expert_layers) * self.mlp_params()
        per_token = self.experts_per_token * self.expert_params() + self.common_params()
        return self._shared_params() + dense + self.expert_layers * per_token

    def layer_params(self) -> int:
        """Parameters of the largest layer: what FSDP gathers at once."""
        routed = self.experts * self.expert_params() + self.common_params()
        sparse = routed if self.expert_layers else 0
        dense = self.mlp_params() if self.expert_layers < self.layers else 0
        return self.attention_params() + self.norms * self.hidden + max(sparse, dense)

    def head_flops(self, head: Head = "lm") -> int:
        """Floating-point operations of the head's forward pass for one token."""
        return 2 * self.hidden * (self.vocab if head == "lm" else 1)

    def common_params(self) -> int:
        """Parameters of a layer of experts that every token passes: the router, and the MLP beside the experts."""
        return self.experts * (self.hidden + self.expert_bias) + 3 * self.hidden * self.shared_intermediate

    def _shared_params(self) -> int:
        """Attention and norms of every layer, and the last norm."""
        return self.layers * (self.attention_params() + self.norms * self.hidden) + self.hidden


def choice_bytes(experts: int) -> Literal[1, 2, 4]:
    """Bytes of the number of one of so many experts, or of none of them."""
    return 1 if experts < 1 << 8 else 2 if experts < 1 << 15 else 4


class _Config(Struct, frozen=True):
    """The fields of a config.json that matter here; the rest is ignored."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    num_key_value_heads: Count | UnsetType | None = UNSET
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    num_experts: Annotated[int, Meta(ge=0)] | None = None
    num_local_experts: Annotated[int, Meta(ge=0)] | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None
    # of DeepSeek-V3, with the defaults of transformers' class
    n_routed_experts: Annotated[int, Meta(ge=0)] | None = None
    n_shared_experts: Annotated[int, Meta(ge=0)] = 1
    n_group: Count | None = None
    topk_group: Count | None = None
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 3
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128


def spec_from_config(config: Mapping[str, Any], where: Where) -> ModelSpec:
    """A decoded config.json -> ModelSpec. Raises ConfigError at `where`, naming what is wrong or unsupported."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        hint = f"supported: {', '.join(ARCHITECTURES)}"
        raise ConfigError([Problem(where, f"architecture {kind!r} is not supported", hint, "model")])
    try:
        spec = _spec(kind, msgspec.convert(config, _Config))
        spec = msgspec.structs.replace(spec, window=sliding_window(kind, config, spec.layers))
    except msgspec.ValidationError as error:
        raise ConfigError([Problem(where, f"config.json: {error}", "", "model")]) from error
    if spec.heads % spec.kv_heads:
        text = f"config.json: {spec.heads} heads do not divide among {spec.kv_heads} KV heads"
        raise ConfigError([Problem(where, text, "", "model")])
    if spec.expert_layers and spec.experts_per_token > spec.experts:
        text = f"config.json: a token can't pass {spec.experts_per_token} of {spec.experts} experts"
        raise ConfigError([Problem(where, text, "", "model")])
    return spec


def _spec(kind: Architecture, config: _Config) -> ModelSpec:
    gemma = kind in ("gemma", "gemma2", "gemma3_text")
    asked = config.attention_bias if config.attention_bias is not None else kind == "gpt_oss"
    biased = kind == "qwen2" or (kind not in ("mistral", "mixtral") and asked)
    fixed_head_dim = HEAD_DIM.get(kind, config.hidden_size // config.num_attention_heads)
    shape = ModelSpec(
        architecture=kind,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=_kv_heads(kind, config),
        head_dim=config.head_dim or fixed_head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=gemma if config.tie_word_embeddings is None else config.tie_word_embeddings,
        max_positions=config.max_position_embeddings or 0,
        qkv_bias=biased,
        out_bias=biased and kind != "qwen2",
        mlp_bias=kind == "llama" and config.mlp_bias,
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        sinks=kind == "gpt_oss",
    )
    if kind == "deepseek_v3":
        shape = _with_latent(shape, config)
    return _with_experts(shape, config) if kind in EXPERTS else shape


def _kv_heads(kind: Architecture, config: _Config) -> int:
    """null means one per head; a config that leaves the field out means its class's default, as transformers has it."""
    given = KV_HEADS.get(kind) if isinstance(config.num_key_value_heads, UnsetType) else config.num_key_value_heads
    return given or config.num_attention_heads


def _with_latent(shape: ModelSpec, config: _Config) -> ModelSpec:
    latent = LatentAttention(config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim)
    return msgspec.structs.replace(shape, kv_heads=shape.heads, head_dim=config.qk_nope_head_dim, latent=latent)


def _with_experts(shape: ModelSpec, config: _Config) -> ModelSpec:
    kind = shape.architecture
    given = (config.num_experts, config.num_local_experts, config.n_routed_experts)
    default, default_per_token = EXPERTS[kind]
    n_experts = next((experts for experts in given if experts is not None), default)
    dense: Collection[int] = ()  # layers without experts
    if kind == "deepseek_v3":
        dense = range(config.first_k_dense_replace)
    elif kind == "qwen3_moe":
        step = config.decoder_sparse_step
        dense = {*(config.mlp_only_layers or ()), *(i for i in range(shape.layers) if (i + 1) % step)}
    groups = (config.n_group or ROUTER_GROUPS[0]) if kind == "deepseek_v3" else 1
    without = tuple(i for i in range(shape.layers) if i in dense)
    width = (config.moe_intermediate_size or EXPERT_WIDTH[kind]) if kind in EXPERT_WIDTH else shape.intermediate
    return msgspec.structs.replace(
        shape,
        experts=n_experts,
        experts_per_token=config.num_experts_per_tok or default_per_token,
        router_groups=groups,
        router_groups_per_token=min(groups, config.topk_group or ROUTER_GROUPS[1]) if groups > 1 else 1,
        expert_intermediate=width,
        expert_layers=shape.layers - len(without) if n_experts else 0,
        dense_layers=without if n_experts else (),
        shared_intermediate=width * config.n_shared_experts if kind == "deepseek_v3" else 0,
        expert_bias=kind == "gpt_oss",
    )


def shape_faults(model: ModelSpec, tp: int, pp: int, ep: int) -> Iterator[tuple[str, str]]:
    """Axes by which a model can't be cut, each with why."""
    if model.heads % tp:
        yield "tp", f"tp {tp} does not divide {model.heads} attention heads"
    elif model.kv_heads % tp and tp % model.kv_heads:
        yield "tp", f"tp {tp} neither divides {model.kv_heads} KV heads nor is a multiple of them"
    if pp > model.layers:
        yield "pp", f"pp {pp} is more than the {model.layers} layers"
    if ep > 1 and not model.experts:
        yield "ep", f"ep {ep} spreads experts, of which the model has none"
    elif ep > 1 and model.experts % ep:
        yield "ep", f"ep {ep} does not divide {model.experts} experts"


def shape_fix(model: ModelSpec, axis: str) -> str:
    """The fix of a fault of `shape_faults` on this axis."""
    if axis != "tp":
        return ""
    *sizes, most = [str(tp) for tp in range(1, model.heads + 1) if not any(shape_faults(model, tp, 1, 1))]
    return f"set tp to {', '.join(sizes)} or {most}" if sizes else f"set tp to {most}"
