"""Distributions of response lengths: moments, order statistics and continuous batching against direct computation."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realgraph.planner.costs.generate.occupancy import occupancy
from realgraph.planner.costs.lengths import Lengths, lognormal, measured, quantiles

positive = st.floats(1, 30000)


@given(positive, st.integers(1, 30000))
def test_a_log_normal_distribution_has_its_mean_and_stays_within_the_limit(mean: float, longest: int) -> None:
    mean = min(mean, float(longest))
    lengths = lognormal(mean, float(longest))
    assert list(lengths.tokens) == sorted(lengths.tokens)
    assert list(lengths.shares) == sorted(lengths.shares)
    assert lengths.shares[0] == 0 and lengths.shares[-1] == 1
    assert lengths.longest <= longest
    assert lengths.mean == pytest.approx(mean, rel=0.025)
    assert lengths.mean <= math.sqrt(lengths.second_moment) * (1 + 1e-12)


def test_far_from_the_limit_the_999th_thousandth_is_ten_medians() -> None:
    lengths = lognormal(400.0, 1e6)
    assert lengths.quantile(0.999) == pytest.approx(10 * lengths.quantile(0.5), rel=0.02)
    assert lengths.deviation / lengths.mean == pytest.approx(0.86, rel=0.02)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 300))
def test_measured_lengths_keep_their_moments_and_order_statistics(tokens: list[int], samples: int) -> None:
    lengths = measured(tokens)
    assert lengths.mean == pytest.approx(np.mean(tokens), rel=1e-9)
    assert lengths.expected_max(1) == pytest.approx(lengths.mean, rel=1e-9)
    assert lengths.mean <= lengths.expected_max(samples) * (1 + 1e-12) <= max(tokens) * (1 + 1e-9)
    at = np.array([-1.0, 0.0, min(tokens) / 2, max(tokens), 1e9])
    assert np.allclose(lengths.survival(at), [1, 1, 1, 0, 0])
    grid = np.linspace(0, max(tokens), 20001)
    survival = lengths.survival((grid[1:] + grid[:-1]) / 2)
    assert np.all(np.diff(survival) <= 1e-12)
    assert float(survival.sum() * grid[1]) == pytest.approx(lengths.mean, rel=1e-3)


@pytest.mark.parametrize("samples", [1, 7, 100])
def test_the_expected_maximum_is_what_draws_show(samples: int) -> None:
    lengths = lognormal(1000.0, 8000.0)
    rng = np.random.default_rng(samples)
    draws = np.interp(rng.random((4000, samples)), lengths.shares, lengths.tokens).max(axis=1)
    assert lengths.expected_max(samples) == pytest.approx(draws.mean(), rel=0.03)


@given(st.lists(st.integers(1, 10000), min_size=1, max_size=2000))
def test_quantiles_are_few_and_rise(tokens: list[int]) -> None:
    few = quantiles(tokens, 64)
    assert len(few) == min(64, len(tokens)) and list(few) == sorted(few)
    assert min(tokens) <= few[0] and few[-1] <= max(tokens)
    assert len(tokens) > 64 or list(few) == sorted(tokens)


@settings(max_examples=50)
@given(
    st.sampled_from([lognormal(300.0, 4000.0), lognormal(900.0, 1000.0), measured([10, 20, 500]), measured([64])]),
    st.integers(1, 2000),
    st.integers(1, 300),
)
@example(measured([10, 20, 500]), 2, 1)
def test_every_token_is_decoded_by_some_running_sequence(lengths: Lengths, samples: int, slots: int) -> None:
    """Running sequences, summed over the steps of a replica, are all its tokens, and at most one sequence more."""
    shape = occupancy(lengths, float(samples), slots, 1)
    tokens = float(np.dot(shape.alone, shape.running))
    assert tokens >= samples * lengths.mean * 0.95
    assert tokens <= samples * lengths.mean * 1.06 + lengths.longest
    assert float(shape.running.max()) <= max(1, min(samples, slots)) + 1e-9
    assert float(shape.alone.sum()) >= samples * lengths.mean / slots * 0.95


def test_more_replicas_wait_longer() -> None:
    lengths = lognormal(500.0, 10000.0)
    steps = [float(occupancy(lengths, 64.0, 32, n).steps.sum()) for n in (1, 4, 64)]
    assert steps == sorted(steps) and steps[0] < 0.8 * steps[2]
