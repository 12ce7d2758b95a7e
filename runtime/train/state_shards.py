"""Optimizer states cut over the workers that hold the same parameters (ZeRO-1, arXiv:1910.02054).

Of each parameter a worker has the rows of masters and moments that FSDP2 would leave it: gradients are
reduce-scattered, the worker's rows are stepped, and the new rows are all-gathered. Knows no model and no optimizer.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realgraph.runtime.parallel.cuts import Box, rows
from realgraph.runtime.parallel.groups import FLAT_BYTES, Ranks


class StateShards:
    """The rows of one rank. pieces: the parameters as they lie here. holders: of each, the ranks that hold the same."""

    def __init__(self, pieces: Sequence[Tensor], holders: Sequence[Ranks]) -> None:
        self._holders = tuple(holders)
        shapes = [tuple(piece.shape) for piece in pieces]
        self._boxes = [
            rows(shape, ranks.size, ranks.rank) or Box((0,) * len(shape), (0, *shape[1:]))
            for shape, ranks in zip(shapes, self._holders, strict=True)
        ]

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of tensors that lie like the parameters: views."""
        return [tensor[box.slices] for tensor, box in zip(tensors, self._boxes, strict=True)]

    def boxes(self) -> tuple[Box, ...]:
        """Those rows, within the pieces that lie here."""
        return tuple(self._boxes)

    @torch.no_grad()
    def sum_own(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the ranks, in place, each rank its own rows only; the others are left as they are. Collective."""
        for ranks, bucket in self._buckets(tensors):
            places, width = _places(bucket, ranks.size)
            table = bucket[0].new_zeros(ranks.size, width)
            for tensor, place in zip(bucket, places, strict=True):
                for at, values in place.blocks(table, tensor):
                    at.copy_(values)
            summed = ranks.scatter_rows(table.view(-1))
            for tensor, place in zip(bucket, places, strict=True):
                own = place.own(tensor, ranks.rank)
                own.copy_(summed[place.start : place.start + own.numel()].view_as(own))

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Take the rows of the others from them, in place. Collective."""
        for ranks, bucket in self._buckets(tensors):
            places, width = _places(bucket, ranks.size)
            mine = bucket[0].new_zeros(width)
            for tensor, place in zip(bucket, places, strict=True):
                own = place.own(tensor, ranks.rank)
                mine[place.start : place.start + own.numel()].copy_(own.reshape(-1))
            table = ranks.gather_rows(mine).view(ranks.size, width)
            for tensor, place in zip(bucket, places, strict=True):
                for at, values in place.blocks(table, tensor):
                    values.copy_(at)

    def _buckets(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Ranks, list[Tensor]]]:
        """Neighbours with the same holders, of about `FLAT_BYTES` together at most."""
        bucket: list[Tensor] = []
        holders, n_bytes = self._holders[0], 0
        for tensor, ranks in zip(tensors, self._holders, strict=True):
            if bucket and (ranks is not holders or n_bytes + tensor.nbytes > FLAT_BYTES):
                yield holders, bucket
                bucket, n_bytes = [], 0
            if ranks.size > 1 and tensor.numel():
                bucket.append(tensor)
                holders, n_bytes = ranks, n_bytes + tensor.nbytes
        if bucket:
            yield holders, bucket


class _Place(NamedTuple):
    """A tensor's columns in a table with a line for each rank: its rows, `each` of them at most, one behind the
    other."""

    start: int
    each: int
    row: int  # elements

    def own(self, tensor: Tensor, rank: int) -> Tensor:
        """The rows of one rank, of the last ones perhaps none."""
        return tensor[rank * self.each : (rank + 1) * self.each]

    def blocks(self, table: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the table and of the tensor with the same elements: of the ranks with all their rows, and of the
        one with fewer."""
        full, rest = divmod(tensor.shape[0], self.each)
        if full:
            width = self.each * self.row
            yield table[:full, self.start : self.start + width], tensor[: full * self.each].view(full, width)
        if rest:
            yield table[full, self.start : self.start + rest * self.row], tensor[full * self.each :].view(-1)


def _places(bucket: Sequence[Tensor], n_ranks: int) -> tuple[list[_Place], int]:
    """The place of each tensor, and the columns of all."""
    places, start = [], 0
    for tensor in bucket:
        each, row = math.ceil(tensor.shape[0] / n_ranks), tensor[0].numel()
        places.append(_Place(start, each, row))
        start += each * row
    return places, start
