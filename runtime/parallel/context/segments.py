"""One rank's part of a packed row: the tokens that it runs, what they see, and the way of its results to all ranks.

A rank's rows are its whole samples, then its chunks of those that are cut. A layer's keys and values of cut samples are
gathered from all ranks at once (their gradients are summed back in one reduce-scatter); they stay for the backward
pass, where whole samples leave only their own. Results come back to every rank, in the batch's order, so that each
computes the same loss over the whole micro-batch: T numbers an output, which costs less than to cut losses that compare
tokens, samples and groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.attention import attention
from realgraph.runtime.attention.attention import ScoreShape
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sinks import Rows
from realgraph.runtime.parallel.context.attention import CutSamples, cut_attention
from realgraph.runtime.parallel.context.gather import gather_alike, gather_parts
from realgraph.runtime.parallel.context.shares import ContextShare, shares_of
from realgraph.runtime.parallel.groups import Ranks

Ints = NDArray[np.int64]


class ContextSegments:
    """The segments of one rank. lengths: of all samples of the row, T tokens; every rank passes the same.

    run: [n_rows] int64, the packed positions of its rows. idle: the batch has no token for this rank; it runs the first
    one, and nobody takes its result.
    """

    def __init__(self, lengths: Sequence[int], ranks: Ranks, device: torch.device) -> None:
        shares = shares_of(lengths, ranks.size)
        own = shares[ranks.rank]
        starts = (np.cumsum(lengths) - np.array(lengths)).astype(np.int64)
        owner, row = _places(lengths, starts, shares)
        mine = np.flatnonzero(owner == ranks.rank)
        run = mine[np.argsort(row[mine])] if len(mine) else np.zeros(1, np.int64)
        n_cut = [share.n_cut_tokens for share in shares]
        self.longest = max(lengths)
        self.offsets = torch.from_numpy(np.append(starts, sum(lengths))).to(device)
        self.n_rows, self.idle = len(run), not len(mine)
        self.run = torch.from_numpy(run).to(device)
        self._ranks, self._most_cut = ranks, max(n_cut)
        self._owner, self._row = torch.from_numpy(owner).to(device), torch.from_numpy(row).to(device)
        self._whole = Segments([lengths[i] for i in own.whole] or [1], device) if own.whole or not len(mine) else None
        self._cut: CutSamples | None = None
        if self._most_cut:
            cut = sorted({chunk.sample for chunk in own.chunks})
            at = np.concatenate([starts[i] + np.arange(lengths[i]) for i in cut])
            ahead = np.array(
                [share.n_tokens(lengths) - share.n_cut_tokens for share in shares]
            )  # rows of whole samples
            order = owner[at] * self._most_cut + row[at] - ahead[owner[at]]
            self._cut = CutSamples.of(own.chunks, lengths, device)
            self._order = torch.from_numpy(order).to(device)

    @property
    def n_tokens(self) -> int:
        """Tokens of the packed row."""
        return len(self._owner)

    def attend(self, rows: Rows, scaling: float, shape: ScoreShape) -> Tensor:
        """[n_rows, heads, dim]: its queries over all that they may see. Collective where a sample is cut."""
        if self._cut is None:
            assert self._whole is not None
            return attention.attend(rows, self._whole, scaling, shape)
        n_whole = self.n_rows - self._cut.n_rows
        whole, (query, *own) = zip(*(torch.split(x, [n_whole, self._cut.n_rows]) for x in rows), strict=True)
        widths = [x[0].numel() for x in own]
        both = torch.cat([x.flatten(1) for x in own], 1)
        keys, values = torch.split(gather_parts(both, self._order, self._ranks, self._most_cut), widths, 1)
        seen = (query, keys.view(-1, *own[0].shape[1:]), values.view(-1, *own[1].shape[1:]))
        out = cut_attention(seen, self._cut, scaling, shape)
        if self._whole is None:
            return out
        return torch.cat([attention.attend(whole, self._whole, scaling, shape), out])

    def asked(self, at: Tensor) -> "Asked":
        """The way of results for the states of the packed positions `at` ([n] int64, alike on every rank)."""
        owner = self._owner[at]
        by_rank = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self._ranks.size)
        most = max(1, int(counts.max()))
        place = torch.empty_like(owner)
        first = counts.cumsum(0) - counts
        sorted_owner = owner[by_rank]
        place[by_rank] = sorted_owner * most + torch.arange(len(at), device=at.device) - first[sorted_owner]
        which = (owner == self._ranks.rank).nonzero().squeeze(-1)
        return Asked(which, self._row[at[which]], place, most, self._ranks)


class Asked(NamedTuple):
    """Results that are asked for. which: [m] int64, those whose states this rank has. rows: [m] int64, of its own."""

    which: Tensor
    rows: Tensor
    place: Tensor
    most: int
    ranks: Ranks

    def join(self, own: Tensor) -> Tensor:
        """[m] of this rank -> [n] of all, on every rank. Collective."""
        return gather_alike(own, self.place, self.ranks, self.most)


def _places(lengths: Sequence[int], starts: Ints, shares: Sequence[ContextShare]) -> tuple[Ints, Ints]:
    """[T] the rank that runs each packed position, and [T] its row there."""
    owner, row = np.empty(sum(lengths), np.int64), np.empty(sum(lengths), np.int64)
    for rank, share in enumerate(shares):
        spans = [(starts[i], starts[i] + lengths[i]) for i in share.whole]
        spans += [(starts[c.sample] + c.start, starts[c.sample] + c.stop) for c in share.chunks]
        n = 0
        for first, last in spans:
            owner[first:last] = rank
            row[first:last] = np.arange(n, n + last - first)
            n += last - first
    return owner, row
