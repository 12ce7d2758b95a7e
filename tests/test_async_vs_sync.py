"""The benchmark of asynchronous against synchronous training: its lengths, and what follows from its rows."""

from dataclasses import replace

import pytest

from benchmarks.async_vs_sync import ALONE, MODES, STALENESS, Measured, Rounds, measured, report
from benchmarks.long_tail import LEAST_RATIO, STATES, hazards, length_shares, mean_length


def test_lengths_are_a_distribution_with_a_long_tail() -> None:
    shares = length_shares()
    assert len(shares) == STATES
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0
    below, median = 0.0, 0
    while below < 0.5:
        below, median = below + shares[median], median + 1
    assert LEAST_RATIO * median <= STATES
    left, mean = 1.0, 0.0
    for n, ends in enumerate(hazards(), 1):
        mean, left = mean + n * left * ends, left * (1 - ends)
    assert mean == pytest.approx(mean_length())
    assert left == pytest.approx(0.0, abs=1e-9)


def test_only_tokens_that_a_loss_used_count() -> None:
    metrics = {"batch/new_tokens": 100.0, "train/overdue": 0.1, "train/masked_share": 0.15, "train/seconds": 0.5}
    found = measured("x", [{"metrics": metrics, "seconds": 2.0, "lengths": [1, 9]}] * 3)
    assert found.tokens_per_s == pytest.approx(37.5)
    assert found.train_tokens_per_s == pytest.approx(150.0)
    assert found.unused_share == pytest.approx(0.25)
    assert found.steps == 3


def test_claims_are_held_against_the_better_synchronous_plan_and_the_slower_call() -> None:
    speeds = {mode.name: 100.0 for mode in MODES} | {"colocated": 40.0, "apart": 50.0, ALONE: 125.0}
    speeds |= {"colocated, slow rewards": 50.0, "apart, slow rewards": 40.0, "asynchronous, wait": 80.0}
    rows = [Measured(name, 9, speed, 110.0, 1.0, STALENESS, 0.0, 0.0) for name, speed in speeds.items()]
    values = [value for _, value, _ in Rounds(rows).lines()]
    assert values == pytest.approx([100 / 110, 2.0, 2.0, 1.25, 1.0])
    assert report(rows)
    assert not report([replace(row, tokens_per_s=90.0) if row.mode == "asynchronous" else row for row in rows])
