"""Ranks that have some columns of the logits each draw from a vocabulary together."""

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realgraph.runtime.generate.cut_sampling import CutVocabulary
from realgraph.runtime.generate.sampling import SamplingSettings, draw
from realgraph.runtime.parallel.groups import Ranks

CPU = torch.device("cpu")


class Together(Ranks):
    """Ranks of one process: a collective adds or gathers over threads that meet in it."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: list[Tensor]) -> None:
        super().__init__(CPU)
        self.rank, self.size, self._meeting, self._table = rank, size, meeting, table

    def gather_rows(self, own: Tensor) -> Tensor:
        """[n, ...] of every rank -> [ranks x n, ...]"""
        self._meeting.wait(20)
        self._table[self.rank] = own
        self._meeting.wait(20)
        return torch.cat(self._table)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's."""
        return self.gather_rows(tensor[None]).sum(0)


def drawn_together(
    logits: Tensor, sizes: Sequence[int], how: tuple[SamplingSettings, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Draws of ranks that have so many columns each."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = tuple((end - size, size) for end, size in zip(ends, sizes, strict=True))
    meeting, table = threading.Barrier(len(sizes)), [torch.zeros(0)] * len(sizes)
    results: list[tuple[Tensor, Tensor]] = [(torch.zeros(0), torch.zeros(0))] * len(sizes)

    def one(rank: int) -> None:
        start, size = spans[rank]
        cut = CutVocabulary(Together(rank, len(sizes), meeting, table), spans)
        results[rank] = cut.draw(logits[:, start : start + size], *how)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@settings(max_examples=30)
@given(st.integers(0, 2**30), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_cut_vocabulary_is_drawn_from_as_if_it_were_whole(
    seed: int, sizes: list[int], greedy: bool, truncated: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [*sizes, 4]
    n = 5
    logits = torch.randn(n, sum(sizes), generator=generator, dtype=torch.float64) * 3
    logits[0] = logits[0].round()  # equal ones
    temperature = torch.tensor([1.0, 0.3, 0.0 if greedy else 1.0, 2.0, 1.0])
    top_k = torch.tensor([0, 3, 0, 2, 0]) if truncated else torch.zeros(n, dtype=torch.int64)
    streams = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    how = SamplingSettings(temperature, torch.ones(n), top_k, streams, True, greedy, truncated)
    positions = torch.arange(n)
    tokens, logprobs = draw(logits, how, positions)
    for found, values in drawn_together(logits, sizes, (how, positions)):
        assert found.tolist() == tokens.tolist()
        assert values.tolist() == pytest.approx(logprobs.tolist(), abs=1e-12)
    logits[3, -1] = torch.nan
    for _, values in drawn_together(logits, sizes, (how, positions)):
        assert values.isnan().tolist() == [False, False, False, True, False]
