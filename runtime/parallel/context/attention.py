"""Attention of a rank's chunks over the samples that they are of. Knows no other rank.

A chunk at tokens [a, b) of a sample sees keys [0, b), its queries being the last b - a of them: what a variable-length
kernel does by itself. Elsewhere a block of queries sees them under a mask, never a chunk all at once, so that masks
stay small and keys behind a block are not computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realgraph.runtime.attention.attention import MAX_SCORE_ENTRIES, Ragged, ScoreShape, rectangle, variable_length
from realgraph.runtime.attention.sinks import Rows
from realgraph.runtime.parallel.context.shares import SampleChunk

BLOCK_QUERIES = 512  # under one mask: more would compute more of what a causal mask hides


class CutSamples(NamedTuple):
    """A rank's chunks, in order of its rows, and the keys [S] of their samples, whole and end to end.

    begins: of each chunk, where its sample's keys begin. copies: [P] int64, the keys that each chunk sees, end to end.
    """

    chunks: tuple[SampleChunk, ...]
    begins: tuple[int, ...]
    copies: Tensor
    ragged: Ragged

    @classmethod
    def of(cls, chunks: Sequence[SampleChunk], lengths: Sequence[int], device: torch.device) -> "CutSamples":
        """lengths: of all samples."""
        begin_of: dict[int, int] = {}
        n_keys = 0
        for sample in sorted({chunk.sample for chunk in chunks}):
            begin_of[sample] = n_keys
            n_keys += lengths[sample]
        begins = tuple(begin_of[chunk.sample] for chunk in chunks)
        seen = [torch.arange(at, at + chunk.stop) for at, chunk in zip(begins, chunks, strict=True)]
        queries, keys = [chunk.stop - chunk.start for chunk in chunks], [chunk.stop for chunk in chunks]
        ragged = Ragged(_offsets(queries, device), max(queries), _offsets(keys, device), max(keys))
        return cls(tuple(chunks), begins, torch.cat(seen).to(device), ragged)

    @property
    def n_rows(self) -> int:
        """Queries."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def _offsets(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)


def cut_attention(rows: Rows, cut: CutSamples, scaling: float, shape: ScoreShape) -> Tensor:
    """[n_rows, heads, dim]. rows: queries [n_rows, heads, dim]; keys and values [S, kv_heads, dim]."""
    query, key, value = rows
    if query.is_cuda:
        seen = (query, key.index_select(0, cut.copies), value.index_select(0, cut.copies))
        out = variable_length(seen, cut.ragged, scaling, shape)
        if out is not None:
            return out
    most = max(1, min(BLOCK_QUERIES, MAX_SCORE_ENTRIES // (query.shape[1] * cut.ragged.longest_keys)))
    blocks = [
        (begin, at, min(at + most, chunk.stop))
        for begin, chunk in zip(cut.begins, cut.chunks, strict=True)
        for at in range(chunk.start, chunk.stop, most)
    ]
    parts = torch.split(query, [last - first for _, first, last in blocks])
    return torch.cat(
        [_block((part, key, value), block, scaling, shape) for block, part in zip(blocks, parts, strict=True)]
    )


def _block(rows: Rows, block: tuple[int, int, int], scaling: float, shape: ScoreShape) -> Tensor:
    """[n, heads, dim] of the queries at tokens first to last of a sample whose keys begin at `begin`."""
    begin, first, last = block
    oldest = 0 if shape.window is None else max(0, first - shape.window + 1)
    query, *seen = (x[None].transpose(1, 2) for x in (rows[0], *(x[begin + oldest : begin + last] for x in rows[1:])))
    step = torch.arange(oldest, last, device=query.device)
    ago = step[first - oldest :, None] - step[None, :]
    mask = ago >= 0 if shape.window is None else (ago >= 0) & (ago < shape.window)
    return rectangle((query, seen[0], seen[1]), scaling, shape, mask[None, None])[0].transpose(0, 1)
