"""The edges between what every tensor-parallel rank computes and what it computes its part of, with their gradients.

Inside an attention or an MLP a rank has all tokens and its heads or its width; outside, between them, all ranks have
the same states ("plain"), or each its own rows of them ("sequence parallel", arXiv:2205.05198, sec. 4.2.2). Row counts
that the ranks do not divide are padded here, so that nobody else sees dead rows.
"""

from typing import Any, cast

import torch
from torch import Tensor

from realgraph.runtime.parallel.groups import Ranks

MIN_CUT_ROWS = 256  # fewer rows in a pass without gradients: one all-reduce costs less than two collectives of parts


class Edges:
    """The edges of one network. n_rows: of the pass in hand; cut: each rank has its own part of the rows."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.n_rows = 0
        self.cut = False

    def begin(self, n_rows: int) -> None:
        """A pass over `n_rows` rows begins, and its backward pass with it.

        With gradients rows are always cut, so that what a rank adds to the gradient of a shared parameter is its own
        rows' or heads' part in every pass.
        """
        self.n_rows = n_rows
        self.cut = self._cuts(n_rows)

    def own_rows(self, n_rows: int) -> int:
        """Rows that each rank has, padding included, between the layers of such a pass."""
        return -(-n_rows // self.ranks.size) if self._cuts(n_rows) else n_rows

    def _cuts(self, n_rows: int) -> bool:
        return torch.is_grad_enabled() or n_rows >= MIN_CUT_ROWS

    def begin_plain(self) -> None:
        """A pass begins in which all ranks have all rows."""
        self.cut = False

    def live_rows(self, n: int) -> int:
        """Those of this rank's `n` rows that are no padding, which comes last."""
        return min(max(self.n_rows - n * self.ranks.rank, 0), n) if self.cut else n

    def own_part(self, x: Tensor, dead: int) -> Tensor:
        """[all rows, ...] -> [own rows, ...] of the pass in hand. dead: what padding has."""
        if not self.cut:
            return x
        missing = -len(x) % self.ranks.size
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), dead)]).chunk(self.ranks.size)[self.ranks.rank]

    def own_share(self, n: int) -> slice:
        """The part of this rank's `n` rows that it computes, where rows are computed apart; where all ranks have all
        of them each computes its share."""
        if self.cut:
            return slice(n)
        each = -(-n // self.ranks.size)
        return slice(each * self.ranks.rank, each * (self.ranks.rank + 1))

    def join_shares(self, rows: Tensor, n: int) -> Tensor:
        """The `n` rows of which this rank has computed those of `own_share`; in passes without gradients."""
        if self.cut:
            return rows
        each = -(-n // self.ranks.size)
        padded = torch.cat([rows, rows.new_zeros((each - len(rows), *rows.shape[1:]))])
        return self.ranks.gather_rows(padded)[:n]

    def enter(self, x: Tensor) -> Tensor:
        """[1, own rows, ...] -> [1, all rows, ...]; the gradient is the ranks' sum, as each has a part of it."""
        if not self.cut:
            return x
        return cast(Tensor, _Gather.apply(x[0], self.ranks, self.n_rows, True))[None]  # type: ignore[no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """[1, all rows, ...], a part of a sum -> [1, own rows, ...] of the sum over the ranks."""
        if not self.cut:
            return self.ranks.add(x.contiguous())
        return cast(Tensor, _Scatter.apply(x[0], self.ranks))[None]  # type: ignore[no-untyped-call]

    def gather(self, x: Tensor) -> Tensor:
        """[own rows, ...] -> [all rows, ...] for what every rank does alike: the gradient is its own rows of any
        rank's."""
        if not self.cut:
            return x
        return cast(Tensor, _Gather.apply(x, self.ranks, self.n_rows, False))  # type: ignore[no-untyped-call]


def _padded(x: Tensor, ranks: Ranks) -> Tensor:
    """[n, ...] -> [n, and as many zero rows as it takes for the ranks to divide it, ...]."""
    missing = -len(x) % ranks.size
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


def _own_rows(x: Tensor, ranks: Ranks) -> Tensor:
    return _padded(x, ranks).chunk(ranks.size)[ranks.rank]


class _Gather(torch.autograd.Function):
    """[n / ranks, ...] -> [n, ...]. Backward: own rows, of the ranks' sum where each adds a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, n_rows: int, parts: bool) -> Tensor:
        ctx.ranks, ctx.parts = ranks, parts
        return ranks.gather_rows(x)[:n_rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        own = ctx.ranks.scatter_rows(_padded(grads[0], ctx.ranks)) if ctx.parts else _own_rows(grads[0], ctx.ranks)
        return own, None, None, None


class _Scatter(torch.autograd.Function):
    """[n, ...], a part of a sum -> [n / ranks, ...]: own rows of the sum. Backward: all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.n_rows = ranks, len(x)
        return ranks.scatter_rows(_padded(x, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather_rows(grads[0])[: ctx.n_rows], None
