"""Rows of a generation engine: which run together, and how many a graph is for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realgraph.runtime.generate.cached_model import rectangles, segments
from realgraph.runtime.generate.decode_graph import bucket, coarse_bucket


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(0, 5000), st.integers(1, 10_000))
def test_segments_cover_each_sequence_once_and_reach_its_length(lengths: list[int], spare: int, most: int) -> None:
    runs = segments(np.array(lengths), spare, most)
    assert [low for low, _, _ in runs] == [0, *(high for _, high, _ in runs[:-1])]
    assert runs[-1][1] == len(lengths)
    assert all(max(lengths[low:high]) == length for low, high, length in runs)
    assert all((high - low) * length <= most for low, high, length in runs if high - low > 16)


@given(st.integers(1, 1024), st.integers(1, 5000), st.integers(1, 100_000))
def test_rectangles_cover_each_sequence_once_within_their_bound(n: int, length: int, most: int) -> None:
    runs = rectangles(n, length, most)
    assert [low for low, _, _ in runs] == [0, *(high for _, high, _ in runs[:-1])]
    assert runs[-1][1] == n
    assert all(reach == length and ((high - low) * length <= most or high - low == 1) for low, high, reach in runs)


@given(st.integers(1, 2000))
def test_graph_buckets_hold_what_runs_and_are_few(n: int) -> None:
    size = bucket(n)
    assert n <= size < 2 * n
    assert size & (size - 1) == 0
    assert n <= coarse_bucket(n) < 4 * n and coarse_bucket(n) in {4**i for i in range(7)}
