"""Attention over packed sequences, plugged into transformers' models. Knows no model, no loss and no cache.

A model is run on one row of T tokens, the samples end to end. `Segments` says where each begins; it travels as a
keyword of the model's forward down to the kernel, so that two threads can run two models at once.
"""

from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sinks import Rows, SinklessKernel, beside_sinks

PACKED = "realgraph_packed"  # the name under which transformers knows `packed_attention`
MAX_SCORE_ENTRIES = 1 << 24  # entries of an explicit [rows, heads, width, width] score matrix at a time


class _Fill(torch.autograd.Function):
    """[T, ...] packed -> [P, ...] slots. Padding slots get no gradient, so the backward is a gather, and a sum only
    over the copies of shared tokens."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, segments: Segments) -> Tensor:
        assert segments.fill is not None
        ctx.segments = segments
        return packed.index_select(0, segments.fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].index_select(0, ctx.segments.back)
        if ctx.segments.again is not None:
            slots, tokens = ctx.segments.again
            grad.index_add_(0, tokens, grads[0].index_select(0, slots))
        return grad, None


class _Back(torch.autograd.Function):
    """[P, ...] slots -> [T, ...] packed; a padding slot's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.n_slots = slots.shape[0]
        return slots.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].new_zeros((ctx.n_slots, *grads[0].shape[1:]))
        return grad.index_copy_(0, ctx.saved_tensors[0], grads[0]), None


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention inside each sample of a packed row; the signature is transformers' AttentionInterface.

    query: [1, heads, T, dim]; key, value: [1, kv_heads, T, dim]. Returns ([1, T, heads, dim], None). options:
    `segments` (required), `scaling`, `sliding_window` (tokens seen, the own included), `softcap` (Gemma 2) and `s_aux`
    ([heads], gpt-oss's sinks). Dropout is left out: a policy's log-probabilities have to be those that its rollout saw.
    """
    segments: Segments | PartOfRow | None = options.get("segments")
    if segments is None:
        raise ValueError("packed attention was called without `segments`: run the model through PackedModel")
    if segments.n_rows != query.shape[2]:
        raise ValueError(f"segments hold {segments.n_rows} tokens, the row {query.shape[2]}")
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    window, softcap = options.get("sliding_window"), options.get("softcap")
    if window is not None and window >= segments.longest:
        window = None
    shape = ScoreShape(window, softcap, options.get("s_aux"))
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, heads, dim]
    return attend(rows, segments, scaling, shape)[None], None


class ScoreShape(NamedTuple):
    """The scores of a layer. window: tokens that a query sees, the own included. softcap: see `capped_scores`. sinks:
    [heads], see `softmax_beside`."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PartOfRow(Protocol):
    """The part of a packed row that one of several ranks computes. longest: tokens of the row's longest sample."""

    longest: int
    n_rows: int

    def attend(self, rows: Rows, scaling: float, shape: ScoreShape) -> Tensor:
        """As `attend` of this module, for the part."""
        ...


def attend(rows: Rows, segments: Segments | PartOfRow, scaling: float, shape: ScoreShape) -> Tensor:
    """[T, heads, dim]: causal attention inside each sample. rows: [T, heads, dim] and twice [T, kv_heads, dim]."""
    if not isinstance(segments, Segments):
        return segments.attend(rows, scaling, shape)
    out = None
    if segments.shared is None:
        same = (segments.offsets, segments.longest)
        out = variable_length(rows, Ragged(*same, *same), scaling, shape)
    return bucketed(rows, segments, scaling, shape) if out is None else out


def bucketed(rows: Rows, segments: Segments, scaling: float, shape: ScoreShape) -> Tensor:
    """[T, heads, dim], on any device and dtype: right-padded rectangles of like lengths, where causal masks enough."""
    query, key, value = rows
    if segments.fill is not None and segments.back is not None:
        query, key, value = (_Fill.apply(x, segments) for x in rows)  # type: ignore[no-untyped-call]
    # all at once: the backward of a slice fills a whole tensor with zeros, and there would be one for each bucket
    sizes = [n_rows * width for n_rows, width in segments.buckets]
    pieces = []
    split = (torch.split(x, sizes) for x in (query, key, value))
    for (n_rows, width), seen, *parts in zip(segments.buckets, segments.visible(shape.window), *split, strict=True):
        q, k, v = (x.view(n_rows, width, *x.shape[1:]).transpose(1, 2) for x in parts)
        out = rectangle((q, k, v), scaling, shape, seen)
        pieces.append(out.transpose(1, 2).reshape(n_rows * width, q.shape[1], v.shape[-1]))
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if segments.back is None:
        return joined
    return cast(Tensor, _Back.apply(joined, segments.back))  # type: ignore[no-untyped-call]


def _repeat(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, L, dim] -> [B, heads, L, dim]: on a CPU faster than SDPA's own grouping."""
    n, kv_heads, width, dim = x.shape
    if kv_heads == heads:
        return x
    return x[:, :, None].expand(n, kv_heads, heads // kv_heads, width, dim).reshape(n, heads, width, dim)


def rectangle(rows: Rows, scaling: float, shape: ScoreShape, seen: Tensor | None) -> Tensor:
    """Attention of [B, heads, L, dim] over keys and values [B, kv_heads, L, dim]: causal, where a window no shorter
    than L changes nothing. Or under the mask `seen` [B or 1, 1, L, K] over K keys, in which a window is."""
    window, plain = shape.window, shape.softcap is None and shape.sinks is None
    query, width = rows[0], rows[0].shape[2]
    key, value = (_repeat(x, query.shape[1]) for x in rows[1:])
    if seen is None and window is not None and window < width:
        seen = _band(width, window, query.device)
    if plain:
        if seen is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    if seen is None:
        seen = _band(width, width, query.device)
    n = max(1, MAX_SCORE_ENTRIES // (query.shape[1] * width * key.shape[2]))
    seen = seen.expand(len(query), 1, width, key.shape[2])
    pieces = [
        _softmaxed(q, k, v, mask, scaling, shape)
        for q, k, v, mask in zip(*(torch.split(x, n) for x in (query, key, value, seen)), strict=True)
    ]
    return torch.cat(pieces)


def _band(width: int, window: int, device: torch.device) -> Tensor:
    """[width, width] bool: token i sees the `window` tokens up to and with itself."""
    step = torch.arange(width, device=device)
    ago = step[:, None] - step[None, :]
    return (ago >= 0) & (ago < window)


def softmax_beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of masked scores [n, h, q, k] over k, in at least float32. sinks: [heads], heads = h x q or h, in this
    order: of each the score of a key without a value, which takes its share of every query's weights (gpt-oss, arXiv:
    2508.10925)."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    column = sinks.to(scores.dtype).view(scores.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1, dtype=wide)[..., :-1]


def capped_scores(query: Tensor, key: Tensor, scaling: float, cap: float | None) -> Tensor:
    """[..., q, k]: scores of queries and keys; with a soft cap they are cap x tanh(score / cap) (Gemma 2, arXiv:
    2408.00118, sec. 2)."""
    scores = query @ key.mT * (scaling if cap is None else scaling / cap)
    return scores if cap is None else torch.tanh(scores) * cap


def _softmaxed(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, shape: ScoreShape) -> Tensor:
    """Attention by explicit scores."""
    scores = capped_scores(query, key, scaling, shape.softcap)
    weights = softmax_beside(scores.masked_fill(~seen, float("-inf")), shape.sinks)
    return weights.to(query.dtype) @ value


class Ragged(NamedTuple):
    """Queries and keys of N runs of rows, the queries of each the last of its keys: offsets [N + 1] int32, and the
    longest run."""

    queries: Tensor
    longest_queries: int
    keys: Tensor
    longest_keys: int


def variable_length(rows: Rows, ragged: Ragged, scaling: float, shape: ScoreShape) -> Tensor | None:
    """[T, heads, dim] by a variable-length kernel, which aligns its causal mask to the last query and the last key;
    None where this device has none for these rows."""
    query = rows[0]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if shape.sinks is not None and shape.softcap is not None:
        return None
    if (short := query.shape[-1] - rows[2].shape[-1]) > 0:  # kernels want values as wide as keys
        wide = (*rows[:2], F.pad(rows[2], (0, short)))
        out = variable_length(wide, ragged, scaling, shape)
        return None if out is None else out[..., :-short]
    kernel = _varlen_kernel(shape.softcap is not None, query.shape[-1], query.device.index or 0)
    if kernel == "torch":
        return _torch_varlen(rows, ragged, scaling, shape)
    return _flash_varlen(rows, ragged, scaling, shape) if kernel == "flash" else None


@lru_cache
def _varlen_kernel(softcap: bool, dim: int, device: int) -> str:
    """The variable-length flash kernel that this GPU has: `torch`, `flash` (the flash-attn package) or none ('')."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0) or dim > 256 or dim % 8:
        return ""
    if not softcap:
        return "torch"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return ""
    return "flash"


def _torch_varlen(rows: Rows, ragged: Ragged, scaling: float, shape: ScoreShape) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs no GPU to import, but only GPUs have the kernel

    query, key, value = (x.contiguous() for x in rows)
    window = shape.window
    if shape.sinks is not None:
        return beside_sinks((query, key, value), shape.sinks, _varlen_of(ragged, scaling, window))
    out = varlen_attn(
        query,
        key,
        value,
        ragged.queries,
        ragged.keys,
        ragged.longest_queries,
        ragged.longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_grouping(),
    )
    assert isinstance(out, Tensor)
    return out


@lru_cache
def _grouping() -> dict[str, Any]:
    """The argument by which torch's kernel groups heads: 2.11 has none, and groups them unasked."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _varlen_of(ragged: Ragged, scaling: float, window: int | None) -> SinklessKernel:
    """torch's variable-length kernel, forward and backward apart."""
    places = (ragged.queries, ragged.keys, ragged.longest_queries, ragged.longest_keys, 0.0, window is None)
    sides: dict[str, Any] = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}

    def forward(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        out, sums, state, _, _ = torch.ops.aten._flash_attention_forward(*rows, *places, False, scale=scaling, **sides)
        return out, sums, state

    def backward(grad: Tensor, rows: Rows, kept: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        out, sums, state = kept
        unused = torch.empty(0, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad, *rows, out, sums, *places, state, unused, scale=scaling, **sides
        )
        return grads[0], grads[1], grads[2]

    return SinklessKernel(forward, backward)


def _flash_varlen(rows: Rows, ragged: Ragged, scaling: float, shape: ScoreShape) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    window, softcap = shape.window, shape.softcap
    out: Tensor = flash_attn_varlen_func(
        *(x.contiguous() for x in rows),
        ragged.queries,
        ragged.keys,
        ragged.longest_queries,
        ragged.longest_keys,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out


def register() -> None:
    """Make `packed_attention` known to transformers. It has no mask function there, so models build no mask."""
    AttentionInterface.register(PACKED, packed_attention)
