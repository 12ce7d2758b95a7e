"""Slots of a generation engine: which rows run together, who moves where one has ended, how many a graph is for."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realgraph.runtime.generate.cached_model import segments
from realgraph.runtime.generate.decode_graph import bucket
from realgraph.runtime.generate.slots import fill_gaps


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(0, 5000))
def test_segments_cover_each_slot_once_and_reach_its_length(lengths: list[int], spare: int) -> None:
    runs = segments(np.array(lengths), spare)
    assert [low for low, _, _ in runs] == [0, *(high for _, high, _ in runs[:-1])]
    assert runs[-1][1] == len(lengths)
    assert all(max(lengths[low:high]) == length for low, high, length in runs)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=90), st.data(), st.sampled_from([None, 1, 4, 32]))
def test_gaps_are_filled_by_those_that_live_on(lengths: list[int], data: st.DataObject, block: int | None) -> None:
    """Whoever lives on has one slot; the longer stay before the shorter, block by block, where they were so before."""
    lengths = sorted(lengths, reverse=True)
    gaps = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    moved = np.array(lengths)
    held = fill_gaps(moved, gaps, block)[: len(lengths) - len(gaps)]
    assert sorted(held) == sorted(set(range(len(lengths))) - set(gaps))
    assert [lengths[source] for source in held] == moved[: len(held)].tolist()
    if block is not None:
        starts = range(0, len(held), block)
        parts = [[lengths[source] for source in held[start : start + block]] for start in starts]
        assert all(min(a) >= max(b) for a, b in pairwise(parts))


@given(st.integers(1, 600), st.integers(1, 600))
def test_graph_buckets_hold_what_runs_and_are_few(n: int, most: int) -> None:
    size = bucket(min(n, most), most)
    assert min(n, most) <= size <= most
    assert size == most or size & (size - 1) == 0
