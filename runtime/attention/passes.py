"""Attention of one forward pass over a paged key-value cache. Knows pages and positions, no request.

transformers' models call the attention function that their config names; `CACHED_ATTENTION` is registered once and
hands each layer's query, key and value to the pass (`DecodePass`, `PrefillPass`) that came in with the forward call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from realgraph.runtime.attention.attention import ScoreShape, capped_scores, softmax_beside
from realgraph.runtime.attention.kv_cache import KVCache
from realgraph.runtime.attention.paged import paged_attention, reads_pages
from realgraph.runtime.attention.pages import PAGE_TOKENS, pages_for

CACHED_ATTENTION = "realgraph_cached"
KERNEL_DIM = 256  # of heads, the most that kernels know
MOST_SCORES = 1 << 26  # entries of a matrix of scores at a time
_MAX_DISTINCT_SHARE = 0.8  # share of sequences computed above which finding their rows costs what it saves


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """True -> 0, False -> -inf: the mask form that attention adds, made once for all layers."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _visible(queries: Tensor, length: int, window: int | None) -> Tensor:
    """[..., length] bool: which of the positions 0 ... length - 1 a query at each position sees (itself included)."""
    distance = queries[..., None] - torch.arange(length, device=queries.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class Head:
    """The scores of a layer: softmax(softcap(scale x q.k) + mask); window: tokens a query sees, None for all. sinks:
    [heads], see `softmax_beside`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """The scores are as torch's own attention has them."""
        return self.softcap is None and self.sinks is None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, head: Head) -> Tensor:
    """Masked attention: query [n, h, q, d], key and value [n, h, k, d], mask additive, broadcast to [n, h, q, k].

    Where a kernel knows the scores, it takes them; one head of keys and values may be all heads' there is.
    """
    if head.plain and query.shape[-1] <= KERNEL_DIM:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=head.scale)
    n, heads, width, _ = query.shape
    mask = mask.expand(n, 1, width, key.shape[2])
    rows = max(1, MOST_SCORES // (heads * width * key.shape[2]))
    by_query = head.sinks is None or head.sinks.numel() == heads  # else the queries are heads, too
    most = max(1, MOST_SCORES // (heads * key.shape[2])) if by_query else width
    if n <= rows and width <= most:
        return _by_scores(query, key, value, mask, head)
    out = query.new_empty((n, heads, width, value.shape[-1]))
    for at in range(0, n, rows):
        some, keys, values, seen = (x[at : at + rows] for x in (query, key, value, mask))
        for first in range(0, width, most):
            part = slice(first, first + most)
            out[at : at + rows, :, part] = _by_scores(some[:, :, part], keys, values, seen[:, :, part], head)
    return out


def _by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, head: Head) -> Tensor:
    """`attend` by a matrix of scores."""
    shape = query.shape[:-1]
    if one := key.shape[1] == 1:  # all heads' queries are rows of one product
        query = query.flatten(1, 2)[:, None]
    scores = capped_scores(query, key, head.scale, head.softcap).view(*shape, -1)
    weights = softmax_beside(scores + mask, head.sinks).to(query.dtype)
    return ((weights.flatten(1, 2)[:, None] if one else weights) @ value).view(*shape, -1)


class RolloutPass(Protocol):
    """One forward call's dealings with the cache."""

    @property
    def fresh(self) -> bool:
        """Its tokens see none that were there before: no key is read back."""
        ...

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head, cached: Tensor | None = None
    ) -> Tensor:
        """Store the new keys and values of `layer` and attend. qkv: [n, heads or kv_heads, q, d], d of values perhaps
        another; returns [n, q, heads, d] of it. cached: [n, 1, q, d], what a fresh pass stores in place of them."""
        ...


@dataclass(frozen=True)
class Alike:
    """Sequences of equal tokens, of which one is computed. first: [k] those that are; place: [n] where among them each
    sequence's row is."""

    first: Tensor
    place: Tensor

    @staticmethod
    def of(states: NDArray[np.int64]) -> "Alike | None":
        """states: [n], equal numbers for equal tokens. None where too few are equal to gain by it."""
        distinct, first, place = np.unique(states, return_index=True, return_inverse=True)
        if len(distinct) > _MAX_DISTINCT_SHARE * len(states):
            return None
        return Alike(torch.from_numpy(first), torch.from_numpy(place))


def _places(tables: Tensor, positions: Tensor) -> Tensor:
    """Places in the cache of positions [n, q] of sequences with pages [n, m]: [n, q]."""
    return tables.gather(1, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS


class CacheRows:
    """The rows of a cache, see `KVCache.rows_of`, for tables of pages; where it grows between two layers, anew."""

    def __init__(self, cache: KVCache, tables: Sequence[Tensor]) -> None:
        self._cache, self._tables = cache, tables
        self._epoch, self._rows = cache.epoch, [cache.rows_of(each) for each in tables]

    def now(self) -> list[Tensor]:
        """The rows of each table."""
        if self._epoch != self._cache.epoch:
            self._epoch, self._rows = self._cache.epoch, [self._cache.rows_of(each) for each in self._tables]
        return self._rows


class DecodePass:
    """One new token for each of n sequences.

    tables: [n, m] int64, the pages of each; positions: [n] int64, of the new tokens. segments: (first sequence, end,
    length) triples that cover 0 ... n; a segment's attention reads `length` positions, so that one long sequence does
    not make all rows read as much. Where a kernel reads pages as they lie, each sequence is read to its own end.
    """

    def __init__(
        self, cache: KVCache, tables: Tensor, positions: Tensor, segments: Sequence[tuple[int, int, int]]
    ) -> None:
        self._cache = cache
        self._positions = positions
        self._segments = segments
        self._places = _places(tables, positions[:, None])[:, 0]
        self._tables = tables
        self._rows = None
        if not reads_pages(cache.shape):
            self._rows = CacheRows(cache, [tables[low:high, : pages_for(length)] for low, high, length in segments])
        self._masks: dict[int | None, list[Tensor]] = {}
        self.alike: Alike | None = None

    @property
    def fresh(self) -> bool:
        """See RolloutPass."""
        return False

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head, cached: Tensor | None = None
    ) -> Tensor:
        """See RolloutPass; q = 1. Where sequences are alike, one row for each kind comes in and goes out."""
        assert cached is None, "a pass that reads keys back wants them as they are stored"
        if self.alike is not None:
            query, key, value = (x.index_select(0, self.alike.place) for x in qkv)
            return self._attend(layer, (query, key, value), head).index_select(0, self.alike.first)
        return self._attend(layer, qkv, head)

    def _attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head) -> Tensor:
        query, key, value = qkv
        n, heads, _, dim = query.shape
        self._cache.store(layer, self._places, key, value)
        # query heads of one key head become its queries: no key is repeated
        packed = query.reshape(n, key.shape[1], heads // key.shape[1], dim)
        if self._rows is None:
            pages, shape = self._cache.planes_of(layer), ScoreShape(head.window, head.softcap, head.sinks)
            out = paged_attention(packed, pages, self._tables, self._positions, head.scale, shape)
            return out.reshape(n, 1, heads, -1)
        masks = self._mask(head.window, query.dtype)
        parts = []
        for (low, high, length), rows, mask in zip(self._segments, self._rows.now(), masks, strict=True):
            keys, values = self._cache.load(layer, rows, high - low, length)
            parts.append(attend(packed[low:high], keys, values, mask, head))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(n, 1, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        if window not in self._masks:
            self._masks[window] = [
                _additive(_visible(self._positions[low:high], length, window), dtype)[:, None, None]
                for low, high, length in self._segments
            ]
        return self._masks[window]


class PrefillPass:
    """`counts[i]` tokens from position `starts[i]` on, for each of n sequences; rows are padded at their end.

    pages: those of each, at least as far as its tokens go. The keys and values of padding go to the cache's bin.
    """

    def __init__(
        self, cache: KVCache, pages: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        device = cache.shape.device
        self._cache = cache
        self._length = max(start + count for start, count in zip(starts, counts, strict=True))
        width = pages_for(self._length)
        self._tables = torch.tensor(
            [[*numbers[:width], *[0] * (width - len(numbers))] for numbers in pages], device=device
        )
        first = torch.tensor(starts, device=device)[:, None]
        steps = torch.arange(max(counts), device=device)
        count = torch.tensor(counts, device=device)[:, None]
        # padding repeats the row's last position: no rotary table is asked for a position that does not exist
        self.positions = first + torch.minimum(steps, count - 1)
        self.fresh = not any(starts)
        places = _places(self._tables, self.positions)
        self._places = torch.where(steps < count, places, 0).view(-1)
        self._rows = None if self.fresh else CacheRows(cache, [self._tables])
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head, cached: Tensor | None = None
    ) -> Tensor:
        """See RolloutPass."""
        query, key, value = qkv
        n, _, width, _ = query.shape
        stored = (key, value) if cached is None else (cached, cached)
        self._cache.store(layer, self._places, *(each.transpose(1, 2) for each in stored))
        if self._rows is not None:
            assert cached is None, "a pass that reads keys back wants them as they are stored"
            key, value = self._cache.load(layer, self._rows.now()[0], n, self._length)
        elif head.plain and (head.window is None or width <= head.window):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=head.scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            return out.transpose(1, 2)
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1 and (key.shape[1] > 1 or query.shape[-1] <= KERNEL_DIM):
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mask = self._mask(head.window, key.shape[2], query.dtype)
        return attend(query, key, value, mask, head).transpose(1, 2)

    def _mask(self, window: int | None, length: int, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            self._masks[window] = _additive(_visible(self.positions, length, window), dtype)[:, None]
        return self._masks[window]


def _cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """The form transformers calls (its parameters are not ours to choose): masks are the pass's own."""
    rollout_pass = options["rollout_pass"]
    assert isinstance(rollout_pass, DecodePass | PrefillPass)
    assert attention_mask is None
    scale, window, softcap = options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    sinks = options.get("s_aux")
    head = Head(
        scale=scale if isinstance(scale, float) else query.shape[-1] ** -0.5,
        window=window if isinstance(window, int) else None,
        softcap=softcap if isinstance(softcap, float | int) else None,
        sinks=sinks if isinstance(sinks, Tensor) else None,
    )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return rollout_pass.attend(layer, (query, key, value), head), None


def register_attention() -> None:
    """Make `CACHED_ATTENTION` known to transformers, for this process; doing it twice is harmless."""
    AttentionInterface.register(CACHED_ATTENTION, _cached_attention)
