"""Keys and values of the running sequences, and attention over them. Knows slots and positions, no request.

transformers' models call the attention function that their config names; `CACHED_ATTENTION` is registered once and
hands each layer's query, key and value to the pass (`DecodePass`, `PrefillPass`) that came in with the forward call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

CACHED_ATTENTION = "realgraph_cached"
_MAX_DISTINCT_SHARE = 0.8  # share of slots computed above which finding their rows costs what it saves


@dataclass(frozen=True)
class CacheShape:
    """The room of one token: `layers` x 2 x `kv_heads` x `head_dim` numbers of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def cache_shape(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> CacheShape:
    """The cache a decoder needs. Raises ValueError for attention other than causal, full or sliding."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown or getattr(config, "use_bidirectional_attention", False):
        what = ", ".join(sorted(unknown)) or "bidirectional attention"
        raise ValueError(f"the generation engine can't run {config.model_type}: it has {what}")
    heads: int = config.num_attention_heads
    head_dim: int | None = getattr(config, "head_dim", None)
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim or config.hidden_size // heads,
        dtype=dtype,
        device=device,
    )


def _zeros(size: tuple[int, ...], shape: CacheShape) -> Tensor:
    """Zeros, not empty: what was never written is read under a mask, and 0 x NaN would be NaN.

    On the host numpy asks the system for zero pages, so that only what is used costs memory and time.
    """
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    return torch.from_numpy(np.zeros(math.prod(size) * shape.dtype.itemsize, np.uint8)).view(shape.dtype).view(size)


class KVCache:
    """Per layer one tensor [2, slots, kv_heads, length, head_dim]: keys and values by slot and position.

    The last position of a slot is a bin: padding is written there, and nobody reads it. So a cache of `length` holds
    sequences of at most length - 1 tokens. `epoch` counts reallocations, which move every address.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.slots = 0
        self.length = 0
        self.epoch = 0
        self.layers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self.slots * self.length * self.shape.bytes_per_token

    def resize(self, slots: int, length: int, keep_slots: int, keep_length: int) -> None:
        """Take this size; the first keep_slots x keep_length entries survive. Layer by layer, so that the peak is one
        layer above the larger of the two sizes."""
        shape = self.shape
        for layer in range(shape.layers):
            fresh = _zeros((2, slots, shape.kv_heads, length, shape.head_dim), shape)
            if self.layers and layer < len(self.layers):
                kept = fresh[:, :keep_slots, :, :keep_length]
                kept.copy_(self.layers[layer][:, :keep_slots, :, :keep_length])
                self.layers[layer] = fresh
            else:
                self.layers.append(fresh)
        self.slots, self.length = slots, length
        self.epoch += 1

    def release(self) -> None:
        """Give all memory back; nothing survives."""
        self.layers.clear()
        self.slots = self.length = 0
        self.epoch += 1

    def copy(self, to: Sequence[int], source: Sequence[int], length: int) -> None:
        """Slots `to` take what the first `length` positions of slots `source` held before, all at once."""
        if len(to) == 1:
            for layer in self.layers:
                layer[:, to[0], :, :length] = layer[:, source[0], :, :length]
            return
        into = torch.tensor(to, device=self.shape.device)
        start = torch.tensor(source, device=self.shape.device)
        for layer in self.layers:
            part = layer[:, :, :, :length]
            part[:, into] = part[:, start]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """True -> 0, False -> -inf: the mask form that attention adds, made once for all layers."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _visible(queries: Tensor, length: int, window: int | None) -> Tensor:
    """[..., length] bool: which of the positions 0 ... length - 1 a query at each position sees (itself included)."""
    distance = queries[..., None] - torch.arange(length, device=queries.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class Head:
    """The scores of a layer: softmax(softcap(scale x q.k) + mask); window: tokens a query sees, None for all."""

    scale: float
    window: int | None
    softcap: float | None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, head: Head) -> Tensor:
    """Masked attention: query [n, h, q, d], key and value [n, h, k, d], mask additive, broadcast to [n, h, q, k].

    With a soft cap the scores are cap x tanh(score / cap) before the mask (Gemma 2, arXiv:2408.00118, sec. 2).
    """
    if head.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=head.scale)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (head.scale / head.softcap)) * head.softcap + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


class RolloutPass(Protocol):
    """One forward call's dealings with the cache."""

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head) -> Tensor:
        """Store the new keys and values of `layer` and attend. qkv: [n, heads or kv_heads, q, d]; returns
        [n, q, heads, d]."""
        ...


@dataclass(frozen=True)
class Alike:
    """Slots that hold equal tokens, of which one is computed. first: [k] the computed slots; place: [n] where among
    them each slot's row is."""

    first: Tensor
    place: Tensor

    @staticmethod
    def of(states: NDArray[np.int64]) -> "Alike | None":
        """states: [n], equal numbers for equal tokens. None where too few are equal to gain by it."""
        found, first, place = np.unique(states, return_index=True, return_inverse=True)
        if len(found) > _MAX_DISTINCT_SHARE * len(states):
            return None
        return Alike(torch.from_numpy(first), torch.from_numpy(place))


class DecodePass:
    """One new token for each of the first n slots.

    positions: [n] int64, of the new tokens. segments: (first slot, end, length) triples that cover 0 ... n; a
    segment's attention reads `length` positions, so that one long sequence does not make all rows read as much.
    """

    def __init__(self, cache: KVCache, positions: Tensor, segments: Sequence[tuple[int, int, int]]) -> None:
        self._cache = cache
        self._positions = positions
        self._segments = segments
        heads, n = cache.shape.kv_heads, positions.shape[0]
        slot_heads = torch.arange(n * heads, device=positions.device).view(n, heads)
        self._index = (slot_heads * cache.length + positions[:, None]).view(-1)
        self._masks: dict[int | None, list[Tensor]] = {}
        self.alike: Alike | None = None

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head) -> Tensor:
        """See Pass; q = 1. Where slots are alike, one row for each kind comes in and goes out."""
        if self.alike is not None:
            query, key, value = (x.index_select(0, self.alike.place) for x in qkv)
            return self._attend(layer, (query, key, value), head).index_select(0, self.alike.first)
        return self._attend(layer, qkv, head)

    def _attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head) -> Tensor:
        query, key, value = qkv
        n, heads, _, dim = query.shape
        keys, values = self._cache.layers[layer].unbind(0)
        keys.view(-1, dim).index_copy_(0, self._index, key.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._index, value.reshape(-1, dim))
        # query heads of one key head become its queries: no key is repeated
        packed = query.reshape(n, keys.shape[1], heads // keys.shape[1], dim)
        parts = [
            attend(packed[low:high], keys[low:high, :, :length], values[low:high, :, :length], mask, head)
            for (low, high, length), mask in zip(self._segments, self._mask(head.window, query.dtype), strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(n, 1, heads, dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        if window not in self._masks:
            self._masks[window] = [
                _additive(_visible(self._positions[low:high], length, window), dtype)[:, None, None]
                for low, high, length in self._segments
            ]
        return self._masks[window]


class PrefillPass:
    """`counts[i]` tokens from position `starts[i]` on, for each of the given slots; rows are padded at their end.

    slots, starts, counts: n ints each. The keys and values of padding go to the cache's bin.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        device = cache.shape.device
        self._cache = cache
        self._slots = torch.tensor(slots, device=device)
        first = torch.tensor(starts, device=device)[:, None]
        steps = torch.arange(max(counts), device=device)
        count = torch.tensor(counts, device=device)[:, None]
        # padding repeats the row's last position: no rotary table is asked for a position that does not exist
        self.positions = first + torch.minimum(steps, count - 1)
        self._fresh = not any(starts)
        self._length = max(start + count for start, count in zip(starts, counts, strict=True))
        self._contiguous = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self._low, self._high = slots[0], slots[0] + len(slots)
        kv_heads = cache.shape.kv_heads
        slot_heads = self._slots[:, None] * kv_heads + torch.arange(kv_heads, device=device)
        written = torch.where(steps < count, self.positions, cache.length - 1)
        self._index = (slot_heads[:, :, None] * cache.length + written[:, None]).view(-1)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], head: Head) -> Tensor:
        """See Pass."""
        query, key, value = qkv
        width, dim = query.shape[2], query.shape[3]
        keys, values = self._cache.layers[layer].unbind(0)
        keys.view(-1, dim).index_copy_(0, self._index, key.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._index, value.reshape(-1, dim))
        if not self._fresh:
            key, value = self._stored(keys), self._stored(values)
        elif head.softcap is None and (head.window is None or width <= head.window):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=head.scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            return out.transpose(1, 2)
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mask = self._mask(head.window, key.shape[2], query.dtype)
        return attend(query, key, value, mask, head).transpose(1, 2)

    def _stored(self, entries: Tensor) -> Tensor:
        if self._contiguous:
            return entries[self._low : self._high, :, : self._length]
        return entries[:, :, : self._length].index_select(0, self._slots)

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
    if options.get("s_aux") is not None:
        raise ValueError("the generation engine knows no attention sinks")
    scale, window, softcap = options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    head = Head(
        scale=scale if isinstance(scale, float) else query.shape[-1] ** -0.5,
        window=window if isinstance(window, int) else None,
        softcap=softcap if isinstance(softcap, float | int) else None,
    )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return rollout_pass.attend(layer, (query, key, value), head), None


def register_attention() -> None:
    """Make `CACHED_ATTENTION` known to transformers, for this process; doing it twice is harmless."""
    AttentionInterface.register(CACHED_ATTENTION, _cached_attention)
