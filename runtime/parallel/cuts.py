"""The box of each Hugging Face tensor that a device holds. Knows names, shapes, ranks and layouts; no torch.

Tensor parallelism cuts vocabularies by rows, attention by heads and MLPs by width; norms, routers, value and score
heads lie whole on every rank. KV heads fewer than the ranks are copied: rank r computes with head r x KV heads // tp.
Biases of `o_proj` and `down_proj` lie whole on every rank and are added once, behind the sum over the ranks. Experts
are whole and spread over the expert-parallel ranks, balanced and in order; with one such rank each is cut by width like
an MLP. gpt-oss has one tensor for all experts of a layer, gate and up in turns. The cuts over ranks need not be even.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from realgraph.planner.inputs.model_spec import Head, ModelSpec, shape_faults
from realgraph.planner.plan.axes import coordinates_of, expert_copies, expert_rank
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.stages import layer_ranges, stages_of

EMBEDDING, NORM, LM_HEAD, SCORE = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FUSED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")  # of all experts of a layer
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_ATTENTION = re.compile(r"self_attn\.(?:([qkvo]|q_b|kv_b)_proj\.(weight|bias)|sinks)")
_MLP = re.compile(r"mlp\.(?:shared_experts?\.)?(gate|up|down)_proj\.(weight|bias)")
_WHOLE = re.compile(
    r"self_attn\.(?:[qk]_norm\.weight|(?:q|kv)_a_(?:layernorm\.weight|proj(?:_with_mqa)?\.(?:weight|bias)))|(?:input|(?:pre|post)_feedforward|post_attention)_layernorm\.weight"
    r"|(?:mlp|block_sparse_moe)\.gate\.weight|mlp\.router\.(?:weight|bias)|mlp\.shared_expert_gate\.weight"
)


class Box(NamedTuple):
    """A part of one tensor: its first element and its extent in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in its tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The part that both boxes of one tensor hold; None where there is none."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - first for first, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Box") -> "Box":
        """The box as seen from the first element of `outer`, which holds it."""
        return Box(tuple(mine - first for mine, first in zip(self.start, outer.start, strict=True)), self.shape)


class Overlap(NamedTuple):
    """The part that two boxes of one tensor hold, and its index in each: () where it is all of it."""

    box: Box
    in_first: tuple[slice, ...]
    in_second: tuple[slice, ...]


@lru_cache(maxsize=1 << 15)  # asked of the same boxes in every reallocation, between copies that empty the caches
def overlap(first: Box, second: Box) -> Overlap | None:
    """The part that both boxes of one tensor hold; None where there is none."""
    common = first.intersect(second)
    if common is None:
        return None
    return Overlap(common, *(() if common == box else common.within(box).slices for box in (first, second)))


class Shard(Struct, frozen=True):
    """The place of a device among those that hold one copy of a model."""

    layers: tuple[int, ...]  # global numbers, of all chunks of its stage
    first: bool = True  # the stage begins with the embedding
    last: bool = True  # the stage ends with the final norm and the head
    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1


class _Units(NamedTuple):
    """The whole units into which tensor and expert parallelism cut a layer."""

    heads: int
    kv_heads: int
    experts: int


class _Ranks(NamedTuple):
    """The ranks of a shard in a layer."""

    tp_rank: int
    tp: int
    ep_rank: int
    ep: int


@lru_cache(maxsize=1 << 16)  # names of a model are asked for again and again
def is_expert(name: str) -> bool:
    """True for a tensor of routed experts: of one, or of all of a layer."""
    layer = _LAYER.fullmatch(name)
    return layer is not None and any(names.fullmatch(layer[2]) for names in (_EXPERT, _FUSED))


def is_fixed(name: str) -> bool:
    """True for a tensor that no step changes and every worker of its layer has whole: it is a buffer of the network."""
    return name.endswith(".mlp.gate.e_score_correction_bias")


def split(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, size) of a rank's part of n: parts lie in order of ranks, and the first n % ranks are one longer."""
    size, longer = divmod(n, ranks)
    return rank * size + min(rank, longer), size + (rank < longer)


def rows(shape: tuple[int, ...], ranks: int, rank: int) -> Box | None:
    """The rows of a tensor that FSDP2 leaves on a rank: equal parts, of which the last are shorter or none."""
    each = math.ceil(shape[0] / ranks)
    size = min(each, shape[0] - rank * each)
    return _slab(shape, 0, rank * each, size) if size > 0 else None


def whole_boxes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
    """For each tensor the box that is all of it."""
    return {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}


def layout_boxes(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, model: tuple[ModelSpec, Head] | None
) -> dict[int, Mapping[str, Box]]:
    """The boxes that each device of a layout holds: the piece of its stage and tensor-parallel rank, and FSDP's rows of
    it, which are cut over the dp x cp workers that hold the same piece. Devices that hold the same have one mapping."""
    pieces: dict[Shard | None, dict[str, Box]] = {}
    boxes: dict[int, Mapping[str, Box]] = {}
    for device in layout.mesh.devices:
        shard = _shard(model, layout, device)
        if shard not in pieces:  # copies of a model hold the same
            pieces[shard] = _pieces(shapes, model, shard)
        own = pieces[shard]
        boxes[device] = _own_rows(own, layout, device) if layout.sharding == "fsdp" else own
    return boxes


def _pieces(
    shapes: Mapping[str, tuple[int, ...]], model: tuple[ModelSpec, Head] | None, shard: Shard | None
) -> dict[str, Box]:
    """The boxes of the tensors of which a shard of a model holds a part; shard: None for all of it."""
    if model is None or shard is None:
        return whole_boxes(shapes)
    cuts = {name: cut(*model, name, shape, shard) for name, shape in shapes.items()}
    return {name: box for name, box in cuts.items() if box is not None}


def _own_rows(pieces: Mapping[str, Box], layout: Layout, device: int) -> dict[str, Box]:
    """The rows of the pieces that FSDP leaves on a device."""
    dense, experts = _shards(layout, device), _expert_shards(layout, device)
    own = {name: _rows_of(box, *(experts if is_expert(name) else dense)) for name, box in pieces.items()}
    return {name: box for name, box in own.items() if box is not None}


@lru_cache(maxsize=1 << 12)  # the layers of a model are alike
def _rows_of(piece: Box, ranks: int, rank: int) -> Box | None:
    own = rows(piece.shape, ranks, rank)
    return own and Box((own.start[0] + piece.start[0], *piece.start[1:]), own.shape)


@lru_cache(maxsize=1 << 10)
def _shard(model: tuple[ModelSpec, Head] | None, layout: Layout, device: int) -> Shard | None:
    """The place of a device among those that hold one copy; None where each has all of it."""
    if layout.tp == layout.pp == layout.ep == 1:
        return None
    assert model is not None, "heads, widths, layers and experts say how a model is cut"
    at = coordinates_of(layout, device)
    chunks = layer_ranges(stages_of(*model, layout))[at.pp]
    layers = tuple(number for chunk in chunks for number in chunk)
    ends = (at.pp == 0, at.pp == layout.pp - 1)
    return Shard(layers, *ends, at.tp, layout.tp, expert_rank(layout, device), layout.ep)


def _shards(layout: Layout, device: int) -> tuple[int, int]:
    """The ranks over which FSDP shards a tensor, and this device's among them."""
    at = coordinates_of(layout, device)
    return layout.dp * layout.cp, at.dp * layout.cp + at.cp


def _expert_shards(layout: Layout, device: int) -> tuple[int, int]:
    """The same of a tensor of a routed expert."""
    if layout.ep == 1:
        return _shards(layout, device)
    copies = next(group for group in expert_copies(layout) if device in group)
    return len(copies), copies.index(device)


def cut(model: ModelSpec, head: Head, name: str, shape: tuple[int, ...], shard: Shard) -> Box | None:
    """The box of the parameter `name` (whole: `shape`) that a device holds; None where it holds nothing of it.

    name: as in a checkpoint that names each expert; see `heads.parameter_name`. A tied embedding lies on the first
    stage, and where the role has a language model's head on the last one too. Raises ValueError for a name that this
    model and head don't have, and for a cut that is impossible.
    """
    for _, fault in shape_faults(model, shard.tp, 1, shard.ep):
        raise ValueError(fault)
    if not shard.layers:
        raise ValueError("a stage without layers holds no part of a model")
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _outside(model, head, name, shape, shard)
    if int(layer[1]) >= model.layers:
        raise ValueError(f"the tensor {name!r} is of a layer that the model, with {model.layers} layers, does not have")
    units = _Units(model.heads, model.kv_heads, model.experts)
    part = _in_layer(units, layer[2], shape, _Ranks(shard.tp_rank, shard.tp, shard.ep_rank, shard.ep))
    if part is None:
        raise ValueError(f"no rule says how to cut the tensor {name!r}")
    dim, start, size = part
    return _slab(shape, dim, start, size) if size and int(layer[1]) in shard.layers else None


def _outside(model: ModelSpec, head: Head, name: str, shape: tuple[int, ...], shard: Shard) -> Box | None:
    """The box of a tensor that belongs to no layer."""
    tied = model.tied and head == "lm"
    if name == EMBEDDING:
        here = shard.first or (shard.last and tied)
    elif name == NORM or (name == (LM_HEAD if head == "lm" else SCORE) and not tied):
        here = shard.last
    else:
        raise ValueError(f"no rule says how to cut the tensor {name!r} under the head {head!r}")
    rows = name in (EMBEDDING, LM_HEAD)
    start, size = split(shape[0], shard.tp, shard.tp_rank) if rows else (0, shape[0])
    return _slab(shape, 0, start, size) if here and size else None


@lru_cache(maxsize=1 << 14)  # the layers of a model are alike
def _in_layer(units: _Units, name: str, shape: tuple[int, ...], at: _Ranks) -> tuple[int, int, int] | None:
    """(dim, start, size) of what a rank of the stage holds of a layer's tensor; None for a name without a rule."""
    if _WHOLE.fullmatch(name):
        return 0, 0, shape[0]
    if match := _ATTENTION.fullmatch(name):
        if match[1] == "o":
            return (1, *_heads(units.heads, shape[1], at)) if match[2] == "weight" else (0, 0, shape[0])
        return 0, *_heads(units.kv_heads if match[1] in ("k", "v") else units.heads, shape[0], at)
    if match := _MLP.fullmatch(name):
        if match[1] != "down":
            return 0, *split(shape[0], at.tp, at.tp_rank)
        return (1, *split(shape[1], at.tp, at.tp_rank)) if match[2] == "weight" else (0, 0, shape[0])
    if match := _FUSED.fullmatch(name):
        return _in_fused(shape, at, gated=match[1] == "gate_up", bias=match[2] is not None)
    match = _EXPERT.fullmatch(name)
    if match is None or int(match[1]) >= units.experts:
        return None
    if at.ep == 1:
        dim = 1 if match[2] in ("down_proj", "w2") else 0
        return dim, *split(shape[dim], at.tp, at.tp_rank)
    first, count = split(units.experts, at.ep, at.ep_rank)
    return 0, 0, shape[0] if first <= int(match[1]) < first + count else 0


def _in_fused(shape: tuple[int, ...], at: _Ranks, *, gated: bool, bias: bool) -> tuple[int, int, int]:
    """`_in_layer` of [experts, in, out] or [experts, out]. gated: the columns of gate and up lie in pairs."""
    if at.ep > 1:
        return 0, *split(shape[0], at.ep, at.ep_rank)
    if gated:
        start, size = split(shape[-1] // 2, at.tp, at.tp_rank)
        return len(shape) - 1, 2 * start, 2 * size
    return (0, 0, shape[0]) if bias else (1, *split(shape[1], at.tp, at.tp_rank))


def _heads(heads: int, rows: int, at: _Ranks) -> tuple[int, int]:
    """(start, size) in rows of the whole heads that a rank computes with; ranks beyond the heads share them."""
    width = rows // heads
    return at.tp_rank * heads // at.tp * width, max(1, heads // at.tp) * width


@lru_cache(maxsize=1 << 14)
def _slab(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    """The box that cuts one dim and holds all of the others."""
    first = tuple(start if i == dim else 0 for i in range(len(shape)))
    return Box(first, tuple(size if i == dim else n for i, n in enumerate(shape)))
