"""The tokens of a packed micro-batch that each context-parallel rank computes. Pure; knows no tensor and no model.

A sample that is cut has 2 x ranks chunks, and rank r takes chunks r and 2 x ranks - 1 - r: one from each end, so that
under causal attention all ranks meet as many pairs of tokens (as in arXiv:2407.21783, sec. 3.3.2). Cutting costs a
gather of keys and values, so only as many samples are cut, longest first, as balance takes; the others lie whole on a
rank and see nothing of anybody else.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

IMBALANCE = 1 / 8  # of the busiest rank over the mean, in tokens and in pairs of tokens: less is worth no further cut


class SampleChunk(NamedTuple):
    """Tokens `start` to `stop` of a sample that is cut; they see the sample's tokens from its first on."""

    sample: int
    start: int
    stop: int


class ContextShare(NamedTuple):
    """One rank's part: samples that lie whole here, and chunks of those that are cut, both in the batch's order."""

    whole: tuple[int, ...]
    chunks: tuple[SampleChunk, ...]

    def n_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the part."""
        return sum(lengths[i] for i in self.whole) + self.n_cut_tokens

    @property
    def n_cut_tokens(self) -> int:
        """Tokens of chunks."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def chunks_of(sample: int, length: int, ranks: int, rank: int) -> tuple[SampleChunk, SampleChunk]:
    """A rank's two chunks of a sample of at least 2 x ranks tokens; chunks differ by one token at most."""
    n = 2 * ranks
    first, last = (SampleChunk(sample, length * at // n, length * (at + 1) // n) for at in (rank, n - 1 - rank))
    return first, last


def shares_of(lengths: Sequence[int], ranks: int) -> tuple[ContextShare, ...]:
    """Every rank's part of samples of these lengths: each token once.

    The fewest longest samples are cut that leave the busiest rank within 1 + IMBALANCE of the mean, in tokens and in
    pairs of tokens; samples of fewer than 2 x ranks tokens never are. So a rank has at most
    max(longest whole sample, 2 x number of cut samples) tokens more than the mean.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # a sample that is shorter than the imbalance allows is no reason to cut: at most so many are longer
    most = sum(lengths[i] * ranks > IMBALANCE * sum(lengths) and lengths[i] >= 2 * ranks for i in order)
    even = (n for n in range(most) if _even(lengths, order[:n], _deal(order, lengths, ranks, n)))
    n_cut = next(even, most)
    cut, dealt = order[:n_cut], _deal(order, lengths, ranks, n_cut)
    return tuple(
        ContextShare(
            tuple(sorted(dealt[rank])),
            tuple(chunk for i in sorted(cut) for chunk in chunks_of(i, lengths[i], ranks, rank)),
        )
        for rank in range(ranks)
    )


def _deal(order: Sequence[int], lengths: Sequence[int], ranks: int, n_cut: int) -> list[list[int]]:
    """The samples that are not cut, longest first, each to the rank with the fewest tokens (LPT, Graham 1969)."""
    loads = [(sum(size for size, _ in _costs(order[:n_cut], lengths, ranks, rank)), rank) for rank in range(ranks)]
    heapq.heapify(loads)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in order[n_cut:]:
        load, rank = loads[0]
        dealt[rank].append(i)
        heapq.heapreplace(loads, (load + lengths[i], rank))
    return dealt


def _even(lengths: Sequence[int], cut: Sequence[int], dealt: Sequence[Sequence[int]]) -> bool:
    """True where no rank has much more than the mean."""
    ranks = len(dealt)
    loads = []
    for rank, whole in enumerate(dealt):
        costs = [*_costs(cut, lengths, ranks, rank), *((lengths[i], lengths[i] ** 2) for i in whole)]
        loads.append((sum(tokens for tokens, _ in costs), sum(pairs for _, pairs in costs)))
    return all(max(each) * ranks <= (1 + IMBALANCE) * sum(each) for each in zip(*loads, strict=True))


def _costs(cut: Sequence[int], lengths: Sequence[int], ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """(tokens, twice the pairs) of a rank's chunks of each sample that is cut."""
    for i in cut:
        chunks = chunks_of(i, lengths[i], ranks, rank)
        yield sum(c.stop - c.start for c in chunks), sum(c.stop**2 - c.start**2 for c in chunks)
