"""Benchmarks of asynchronous against synchronous training: lengths, and what follows from their rows."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.async_learning import LOSSES, RESULTS, interval
from benchmarks.async_vs_sync import ALONE, MODES, STALENESS, Measured, Rounds, measured, report
from benchmarks.long_tail import LEAST_RATIO, STATES, hazards, length_shares, mean_length
from benchmarks.staleness_runs import mode_of, row_of


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


def test_the_limit_of_work_in_flight_passes_by_its_masked_share_and_its_speed_round_by_round() -> None:
    rule = [Measured("rule", 9, speed, 0.0, 30.0, 1.9, 0.25, 0.0) for speed in (100.0, 200.0, 50.0)]
    limited = [Measured("limited", 9, speed, 0.0, 20.0, 1.2, 0.04, 0.0) for speed in (97.0, 150.0, 60.0)]
    row = row_of((2, 8, 1), rule, limited)
    assert (row.ratio, row.masked, row.rule_masked, row.running) == (0.97, 0.04, 0.25, 20.0)
    assert row.passed
    assert not row_of((2, 8, 1), rule, [replace(one, unused_share=0.06) for one in limited]).passed
    assert not row_of((2, 8, 1), rule, [replace(one, tokens_per_s=0.9 * one.tokens_per_s) for one in limited]).passed


def test_the_rule_alone_has_room_for_all_that_it_lets_in() -> None:
    assert mode_of((2, 8, 1), limited=False).parts["rollout"]["max_running"] == 3 * 8 * 4
    assert "rollout" not in mode_of((2, 8, 1), limited=True).parts


# --- learning under staleness -----------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "async.md").read_text()


def accuracies(staleness: int, loss: str, *, late: bool) -> list[float]:
    """Those of all seeds, in the order of these."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    found = {row["case"][0]: row["accuracy"] for row in rows if row["case"][1:] == [staleness, loss, late]}
    return [found[seed] for seed in sorted(found)]


def shown(values: list[float]) -> str:
    mean, width = interval(values)
    return f"{mean:.3f} ± {width:.3f}"


def test_the_table_of_learning_under_staleness_is_the_record() -> None:
    """Means with their intervals, and ages over all runs of both losses."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    table = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [int(bound) for bound, _ in table] == sorted({row["case"][1] for row in rows} - {0})
    for bound, cells in table:
        expected = list[str]()
        for late in (False, True):
            ages = [row["age"] for row in rows if row["case"][1] == int(bound) and row["case"][3] == late]
            expected += [
                f"{statistics.fmean(ages):.1f}",
                *(shown(accuracies(int(bound), one, late=late)) for one in LOSSES),
            ]
        assert cells.split(" | ") == expected
    assert f"Synchronous training reaches {shown(accuracies(0, 'decoupled', late=False))}." in PAGE


def test_the_losses_part_where_the_page_says_so() -> None:
    """Seed by seed: the decoupled loss ends above the naive one. By their intervals nowhere."""
    elsewhere, words = list[float](), " ".join(PAGE.split())
    for staleness in (1, 2, 4, 8, 16):
        for late in (False, True):
            naive, decoupled = (accuracies(staleness, loss, late=late) for loss in LOSSES)
            (low, width), (high, other) = interval(naive), interval(decoupled)
            assert low + width > high - other
            gains = [b - a for a, b in zip(naive, decoupled, strict=True)]
            if not late or staleness < 4:
                elsewhere += gains
                continue
            assert min(gains) > 0
            *first, last = [f"{gain:.3f}" for gain in gains]
            assert f"at {staleness} by {', '.join(first)} and {last}" in words
    assert min(elsewhere) < 0
    assert f"differ by at most {max(map(abs, elsewhere)):.3f}," in words
