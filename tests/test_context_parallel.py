"""A context-parallel rank's part of a batch: every token once, even parts, and attention as over the whole batch."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realgraph.runtime.attention.attention import ScoreShape, attend
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.parallel.context import attention as context_attention
from realgraph.runtime.parallel.context.segments import ContextSegments
from realgraph.runtime.parallel.context.shares import IMBALANCE, chunks_of, shares_of
from realgraph.runtime.parallel.groups import Ranks

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40)
RANKS = st.sampled_from((2, 3, 4, 8))


@given(LENGTHS, RANKS)
def test_every_token_is_on_one_rank_once(lengths: list[int], ranks: int) -> None:
    found = []
    for share in shares_of(lengths, ranks):
        found += [(i, at) for i in share.whole for at in range(lengths[i])]
        found += [(c.sample, at) for c in share.chunks for at in range(c.start, c.stop)]
        assert len(found) == len(set(found))
        assert share.n_tokens(lengths) == sum(lengths[i] for i in share.whole) + share.n_cut_tokens
    assert sorted(found) == [(i, at) for i, n in enumerate(lengths) for at in range(n)]


@given(LENGTHS, RANKS)
def test_a_sample_is_cut_into_a_chunk_from_each_end_for_every_rank_or_lies_whole(
    lengths: list[int], ranks: int
) -> None:
    shares = shares_of(lengths, ranks)
    whole = {i for share in shares for i in share.whole}
    cut = {chunk.sample for share in shares for chunk in share.chunks}
    assert whole | cut == set(range(len(lengths))) and not whole & cut
    assert all(lengths[i] >= 2 * ranks for i in cut)
    for rank, share in enumerate(shares):
        assert share.chunks == tuple(chunk for i in sorted(cut) for chunk in chunks_of(i, lengths[i], ranks, rank))
        for first, last in zip(share.chunks[::2], share.chunks[1::2], strict=True):
            assert first.sample == last.sample and 0 < first.stop <= last.start < last.stop
            n = lengths[first.sample]
            assert abs(first.start - (n - last.stop)) <= 1  # as far from the one end as from the other


@given(LENGTHS, RANKS)
def test_ranks_have_about_as_many_tokens(lengths: list[int], ranks: int) -> None:
    shares = shares_of(lengths, ranks)
    loads = [share.n_tokens(lengths) for share in shares]
    longest_whole = max((lengths[i] for share in shares for i in share.whole), default=0)
    n_cut = len(shares[0].chunks) // 2
    mean = sum(lengths) / ranks
    assert max(loads) <= mean + max(longest_whole, 2 * n_cut)
    bound = max(IMBALANCE * mean, 2 * ranks, 2 * n_cut)  # what can't be cut, and what is not worth it
    assert max(loads) <= mean + bound


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_meet_about_as_many_pairs_of_tokens(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(6, 1)) + 1 for _ in range(100)]
    pairs = []
    for share in shares_of(lengths, ranks):
        spans = [(0, lengths[i]) for i in share.whole] + [(c.start, c.stop) for c in share.chunks]
        pairs.append(sum(b * (b + 1) // 2 - a * (a + 1) // 2 for a, b in spans))
    assert max(pairs) <= (1 + IMBALANCE + 0.01) * sum(pairs) / ranks


def test_nothing_is_cut_where_whole_samples_are_even() -> None:
    for share in shares_of([100] * 8, 4):
        assert not share.chunks and len(share.whole) == 2


# --- attention --------------------------------------------------------------------------------------------------------


class Seat(Ranks):
    """One of several ranks, seen in one process: rows of the others are given."""

    def __init__(self, rank: int, size: int, others: list[Tensor] | None = None) -> None:
        super().__init__(CPU)
        self.rank, self.size, self.others = rank, size, others or []

    def gather_rows(self, own: Tensor) -> Tensor:
        """Takes the place of the own rows among the others'."""
        most = len(own)
        padded = [torch.cat([x.detach(), x.new_zeros(most - len(x), *x.shape[1:])]) for x in self.others]
        return torch.cat([own if rank == self.rank else rows for rank, rows in enumerate(padded)])


@pytest.mark.parametrize("seed", range(16))
def test_chunks_attend_as_they_do_in_the_whole_row(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_attention, "BLOCK_QUERIES", 1 + seed % 5 * 4)
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    lengths = [rng.choice([1, 2, 3, 7, 30, 60]) for _ in range(rng.randint(1, 7))]
    window, softcap = rng.choice([None, 1, 4, 20]), rng.choice([None, None, 1.5])
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (2, 1)])
    draw = torch.Generator().manual_seed(seed)
    sinks = rng.choice([None, torch.randn(heads, dtype=torch.float64, generator=draw)])
    shape = ScoreShape(window, softcap, sinks)
    rows: Any = tuple(
        torch.randn(sum(lengths), n, 8, dtype=torch.float64, generator=draw) for n in (heads, kv_heads, kv_heads)
    )
    whole = attend(rows, Segments(lengths, CPU), 0.3, shape)
    parts = [ContextSegments(lengths, Seat(rank, ranks), CPU) for rank in range(ranks)]
    cut_rows = [
        torch.cat([x[part.run].flatten(1) for x in rows[1:]], 1)[part.n_rows - share.n_cut_tokens :]
        for part, share in zip(parts, shares_of(lengths, ranks), strict=True)
    ]
    for rank in range(ranks):
        part = ContextSegments(lengths, Seat(rank, ranks, cut_rows), CPU)
        found = part.attend((rows[0][part.run], rows[1][part.run], rows[2][part.run]), 0.3, shape)
        torch.testing.assert_close(found, whole[part.run], rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 50])
def test_variable_length_kernels_see_a_chunks_last_queries_last(window: int | None) -> None:
    lengths, ranks, gpu = [700, 3, 90, 1500, 41], 2, torch.device("cuda")
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(lengths), n, 64, generator=draw).bfloat16() for n in (8, 2, 2)]
    whole = attend((rows[0].float(), rows[1].float(), rows[2].float()), Segments(lengths, CPU), 0.1, ScoreShape(window))
    shares = shares_of(lengths, ranks)
    parts = [ContextSegments(lengths, Seat(rank, ranks), gpu) for rank in range(ranks)]
    query, key, value = (x.cuda() for x in rows)
    cut_rows = [
        torch.cat([x[part.run].flatten(1) for x in (key, value)], 1)[part.n_rows - share.n_cut_tokens :]
        for part, share in zip(parts, shares, strict=True)
    ]
    for rank in range(ranks):
        part = ContextSegments(lengths, Seat(rank, ranks, cut_rows), gpu)
        found = part.attend((query[part.run], key[part.run], value[part.run]), 0.1, ScoreShape(window))
        torch.testing.assert_close(found.float().cpu(), whole[part.run.cpu()], rtol=2e-2, atol=2e-2)


@given(LENGTHS, RANKS)
def test_results_come_back_in_the_order_that_they_were_asked_in(lengths: list[int], ranks: int) -> None:
    rng = random.Random(sum(lengths))
    at = torch.tensor(sorted(rng.sample(range(sum(lengths)), rng.randint(0, sum(lengths)))), dtype=torch.int64)
    parts = [ContextSegments(lengths, Seat(rank, ranks), CPU) for rank in range(ranks)]
    own = [part.run[part.asked(at).rows].double() for part in parts]  # the state of a token is its position
    for rank in range(ranks):
        joined = ContextSegments(lengths, Seat(rank, ranks, own), CPU).asked(at).join(own[rank])
        assert torch.equal(joined, at.double())
