"""Rows sent to the workers of their experts, and back: uneven all-to-all exchanges with gradients.

Every worker of a group takes part in each exchange, with rows or without. Source of the scheme: GShard,
arXiv:2006.16668, sec. 3.2, without its capacities.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from realgraph.runtime.parallel.cuts import split
from realgraph.runtime.parallel.groups import Ranks


class Dispatch:
    """One layer's exchange. received: rows that each of this worker's experts gets, over all senders."""

    def __init__(self, counts: Tensor, ranks: Ranks) -> None:
        """counts: [experts] int64, this worker's rows for each. Collective."""
        self._ranks = ranks
        spans = [split(len(counts), ranks.size, rank) for rank in range(ranks.size)]
        n_own = spans[ranks.rank][1]
        sizes = [size for _, size in spans]
        arriving = ranks.exchange_rows(counts, sizes, [n_own] * ranks.size).view(ranks.size, n_own)  # by sender
        per_rank = torch.stack([part.sum() for part in torch.split(counts, sizes)])
        known = torch.cat([per_rank, arriving.sum(1), arriving.sum(0)]).tolist()  # one transfer from the device
        self._out, self._into = known[: ranks.size], known[ranks.size : 2 * ranks.size]
        self.received: list[int] = known[2 * ranks.size :]
        # rows come by sender and, of one, by expert; experts want theirs together
        expert = torch.arange(n_own, device=counts.device).repeat(ranks.size)
        self._by_expert = torch.repeat_interleave(expert, arriving.reshape(-1)).argsort(stable=True)

    def send(self, rows: Tensor) -> Tensor:
        """[own rows, hidden], sorted by expert -> [rows for own experts, hidden], sorted by expert. Collective, and so
        is its backward."""
        return _exchange(rows, self._out, self._into, self._ranks).index_select(0, self._by_expert)

    def give_back(self, rows: Tensor) -> Tensor:
        """The inverse of `send`, of as many rows of any width. Collective, and so is its backward."""
        place = torch.empty_like(self._by_expert)
        place[self._by_expert] = torch.arange(len(place), device=place.device)
        return _exchange(rows.index_select(0, place), self._into, self._out, self._ranks)


def _exchange(rows: Tensor, out: Sequence[int], into: Sequence[int], ranks: Ranks) -> Tensor:
    return cast(Tensor, _Exchange.apply(rows, out, into, ranks))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """[sum of out, ...] -> [sum of into, ...]; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: Sequence[int], into: Sequence[int], ranks: Ranks) -> Tensor:
        ctx.way_back = (into, out, ranks)
        return ranks.exchange_rows(rows, out, into)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        into, out, ranks = ctx.way_back
        return ranks.exchange_rows(grads[0], into, out), None, None, None
