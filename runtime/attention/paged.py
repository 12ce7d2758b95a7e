"""Attention of one new token of each sequence over a paged cache, as one Triton kernel: nothing is gathered first.

The pages of a sequence are read where they lie, and only as far as the sequence goes. A long one is read in parts by
several programs, whose partial softmaxes a second kernel joins (Flash-Decoding; the online softmax is arXiv:2205.14135,
algorithm 1). The query heads of one key head are the rows of one product. Triton comes with torch's CUDA builds.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realgraph.runtime.attention.attention import ScoreShape
from realgraph.runtime.attention.kv_cache import CacheShape
from realgraph.runtime.attention.pages import PAGE_TOKENS

PART_TOKENS = 256  # least length of a part: a shorter one costs more to join than it saves
PROGRAMS = 512  # at which a GPU is busy: some four for each multiprocessor
WIDEST_HEAD = 512  # bytes: what of it waits in shared memory, 99 KB of every GPU, is 78 KB then
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@lru_cache
def has_triton() -> bool:
    """Triton is there."""
    return find_spec("triton") is not None


def reads_pages(shape: CacheShape) -> bool:
    """The kernel takes such a cache, and runs where it lies."""
    known = shape.planes == 2 and shape.head_dim * shape.dtype.itemsize <= WIDEST_HEAD and shape.dtype in DTYPES
    return known and shape.device.type == "cuda" and has_triton()


def n_parts(n: int, kv_heads: int, length: int) -> int:
    """Parts in which the longest of n sequences is read."""
    wanted = -(-PROGRAMS // (n * kv_heads))
    return max(1, min(wanted, -(-length // PART_TOKENS)))


def paged_attention(
    query: Tensor, pages: Tensor, tables: Tensor, positions: Tensor, scaling: float, shape: ScoreShape
) -> Tensor:
    """[n, kv_heads, group, d], of the query's dtype: attention of each query to its sequence up to its own position.

    query: [n, kv_heads, group, d]; pages: [2, pages, PAGE_TOKENS x kv_heads x d], see `KVCache`; tables: [n, m] int64,
    the pages of each sequence, m enough for the longest; positions: [n] int64.
    """
    kernels = _kernels()
    n, kv_heads, group, dim = query.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    parts = n_parts(n, kv_heads, tables.shape[1] * PAGE_TOKENS)
    single, sinks = parts == 1 and shape.sinks is None, shape.sinks  # sinks are joined like one more part
    partial = out if single else query.new_empty((parts, n, kv_heads, group, dim), dtype=torch.float32)
    sums = query.new_empty((parts, n, kv_heads, group), dtype=torch.float32)
    width = kernels.next_power_of_2(dim)
    padded = max(16, kernels.next_power_of_2(group))  # rows that a product of the matrix units has at least
    kernels.part[(n, kv_heads, parts)](
        query,
        pages,
        tables,
        positions,
        partial,
        sums,
        scaling,
        shape.softcap or 0.0,
        pages.stride(0),
        tables.stride(0),
        n,
        parts,
        WINDOW=shape.window or 0,
        CAPPED=shape.softcap is not None,
        SINGLE=single,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        ROWS=padded,
        WIDTH=width,
    )
    if not single:
        kernels.join[(n, kv_heads * group)](
            partial,
            sums,
            sums if sinks is None else sinks,
            out,
            n,
            parts,
            SINKS=sinks is not None,
            HEADS=kv_heads * group,
            DIM=dim,
            WIDTH=width,
        )
    return out


class _Kernels(NamedTuple):
    part: Any
    join: Any
    next_power_of_2: Any


@lru_cache
def _kernels() -> _Kernels:
    """The kernels, compiled when first run: Triton is imported only where they are."""
    import triton

    from realgraph.runtime.attention import paged_kernels

    return _Kernels(paged_kernels.attend_part, paged_kernels.join_parts, triton.next_power_of_2)
