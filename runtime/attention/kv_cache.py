"""Keys and values of the running sequences, by page. Knows no sequence and no attention."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from realgraph.runtime.attention.pages import PAGE_TOKENS


@dataclass(frozen=True)
class CacheShape:
    """The room of one token: `layers` x 2 x `kv_heads` x `head_dim` numbers of `dtype`. value_dim: where values are no
    others than the first so many numbers of the keys, which then are all there is."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None

    @property
    def planes(self) -> int:
        """Keys and values apart, or keys alone."""
        return 2 if self.value_dim is None else 1

    @property
    def bytes_per_token(self) -> int:
        return self.planes * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def cache_shape(config: PretrainedConfig, attention: Any, weight: Tensor) -> CacheShape:
    """The cache a decoder needs. attention: of any layer, with the KV heads that lie here. weight: any of the model's.
    Raises ValueError for attention other than causal, full or sliding."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown or getattr(config, "use_bidirectional_attention", False):
        what = ", ".join(sorted(unknown)) or "bidirectional attention"
        raise ValueError(f"the generation engine can't run {config.model_type}: it has {what}")
    rest = {"layers": config.num_hidden_layers, "dtype": weight.dtype, "device": weight.device}
    if (widths := getattr(attention, "cache_widths", None)) is not None:
        return CacheShape(kv_heads=1, head_dim=widths[0], value_dim=widths[1], **rest)
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheShape(kv_heads=len(attention.k_proj.weight) // head_dim, head_dim=head_dim, **rest)


def _zeros(size: tuple[int, ...], shape: CacheShape) -> Tensor:
    """Zeros, not empty: what was never written is read under a mask, and 0 x NaN would be NaN.

    On the host numpy asks the system for zero pages, so that only what is used costs memory and time.
    """
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    return torch.from_numpy(np.zeros(math.prod(size) * shape.dtype.itemsize, np.uint8)).view(shape.dtype).view(size)


class KVCache:
    """Per layer one tensor [2, pages, PAGE_TOKENS x kv_heads x head_dim]: keys and values by page, in a page token by
    token; [1, ...] where values are of the keys. Page 0 is a bin: padding is written there, and read under masks only.

    `epoch` counts reallocations, which move every address.
    """

    def __init__(self, shape: CacheShape, numbers: Sequence[int] | None = None) -> None:
        """numbers: of the layers, where they are not those from 0 on."""
        self.shape = shape
        self._place = {number: i for i, number in enumerate(range(shape.layers) if numbers is None else numbers)}
        self.pages = 0
        self.epoch = 0
        self.layers: list[Tensor] = []
        self._scratch = self._empty()

    @property
    def _page_numbers(self) -> int:
        return PAGE_TOKENS * self.shape.kv_heads * self.shape.head_dim

    def _empty(self) -> Tensor:
        return torch.empty((0, self._page_numbers), dtype=self.shape.dtype, device=self.shape.device)

    @property
    def nbytes(self) -> int:
        return self.pages * PAGE_TOKENS * self.shape.bytes_per_token

    def reserve(self, total: int) -> None:
        """Room for pages 0 ... `total`; what there is survives. Layer by layer, so that the peak is one layer above
        the larger of the two sizes."""
        if total < self.pages:
            return
        shape, kept = self.shape, self.pages
        for layer in range(shape.layers):
            fresh = _zeros((shape.planes, total + 1, self._page_numbers), shape)
            if kept:
                fresh[:, :kept] = self.layers[layer]
                self.layers[layer] = fresh
            else:
                self.layers.append(fresh)
        self.pages = total + 1
        self.epoch += 1

    def release(self) -> None:
        """Give all memory back; nothing survives."""
        self.layers.clear()
        self._scratch = self._empty()
        self.pages = 0
        self.epoch += 1

    def copy(self, to: Sequence[int], source: Sequence[int], numbers: Iterable[int] | None = None) -> None:
        """Pages `to` take what pages `source` hold. numbers: of the layers, where they are not all."""
        into = torch.tensor(to, device=self.shape.device)
        start = torch.tensor(source, device=self.shape.device)
        for layer in self.layers if numbers is None else [self.layers[self._place[number]] for number in numbers]:
            layer[:, into] = layer[:, start]

    def store(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values, each [n, q, kv_heads, head_dim], to places [n x q]: page x PAGE_TOKENS + position in
        the page."""
        shape = self.shape
        rows = self.layers[self._place[layer]].view(shape.planes, -1, shape.kv_heads * shape.head_dim)
        for plane, values in zip(rows, (key, value), strict=False):
            plane.index_copy_(0, places, values.reshape(len(places), -1))

    def planes_of(self, layer: int) -> Tensor:
        """The pages of a layer: [2 or 1, pages, PAGE_TOKENS x kv_heads x head_dim]."""
        return self.layers[self._place[layer]]

    def rows_of(self, tables: Tensor) -> Tensor:
        """The rows that `load` reads, [2 x n x m] (keys alone: [n x m]), for the pages [n, m] of n sequences."""
        flat = tables.reshape(-1)
        return torch.cat([flat + plane * self.pages for plane in range(self.shape.planes)])

    def load(self, layer: int, rows: Tensor, n: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, length, head_dim or value_dim] of the first `length` positions of n sequences,
        whose pages are `rows`. On a host they lie in memory that the next call takes again."""
        shape = self.shape
        flat = self.layers[self._place[layer]].view(shape.planes * self.pages, self._page_numbers)
        if shape.device.type == "cpu":
            if len(self._scratch) < len(rows):
                self._scratch = _zeros((len(rows), self._page_numbers), shape)
            found = torch.index_select(flat, 0, rows, out=self._scratch[: len(rows)])
        else:
            found = flat.index_select(0, rows)
        both = found.view(shape.planes, n, -1, shape.kv_heads, shape.head_dim)[:, :, :length].transpose(2, 3)
        return both[0], both[1] if shape.value_dim is None else both[0, ..., : shape.value_dim]
