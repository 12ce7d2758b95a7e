"""The gather of rows over the ranks that share a batch, as many of each as it has, and its gradient."""

from typing import Any, cast

import torch
from torch import Tensor

from realgraph.runtime.parallel.groups import Ranks


class _GatherUneven(torch.autograd.Function):
    """[own, ...] of every rank, padded to `most` -> [n, ...], the rows `order` of all of them, end to end. Backward:
    own rows of the gradient, of the ranks' sum where each adds a part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor, ranks: Ranks, most: int, parts: bool) -> Tensor:
        ctx.ranks, ctx.most, ctx.parts, ctx.n_own = ranks, most, parts, len(own)
        ctx.save_for_backward(order)
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: len(own)] = own
        return ranks.gather_rows(padded).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        ranks, most = ctx.ranks, ctx.most
        spread = grads[0].new_zeros((ranks.size * most, *grads[0].shape[1:]))
        spread.index_copy_(0, ctx.saved_tensors[0], grads[0])
        own = ranks.scatter_rows(spread) if ctx.parts else spread[ranks.rank * most :]
        return own[: ctx.n_own], None, None, None, None


def gather_parts(own: Tensor, order: Tensor, ranks: Ranks, most: int) -> Tensor:
    """[n, ...] on every rank, which each then uses in its own way: the gradient of a row is the sum of what the ranks
    add. own: [at most `most`, ...]; order: [n] int64, places in [ranks x most], each at most once. Collective."""
    return cast(Tensor, _GatherUneven.apply(own, order, ranks, most, True))  # type: ignore[no-untyped-call]


def gather_alike(own: Tensor, order: Tensor, ranks: Ranks, most: int) -> Tensor:
    """The same for rows with which every rank does the same: each knows the whole gradient of its own, and nothing is
    counted twice."""
    return cast(Tensor, _GatherUneven.apply(own, order, ranks, most, False))  # type: ignore[no-untyped-call]
