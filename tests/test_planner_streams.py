"""The benchmark of plans with staleness: which cases it has, and what it claims."""

import json

import pytest

from benchmarks.planner import run_file
from benchmarks.planner_streams import CASES, MOST_GAP, StreamRow, line, verdict


def row(case: str, gap: float) -> StreamRow:
    return StreamRow(case, 10.0 * (1 + gap), 10.0, gap, 1, 1.0, 1.0, "proven")


def test_both_algorithms_and_sizes_have_every_staleness_up_to_1024_devices() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 28
    assert all(json.loads(run_file(case))["staleness"] == case.staleness > 0 for case in CASES)
    for algorithm in ("ppo", "grpo"):
        for model in ("8B", "70B"):
            own = [case for case in CASES if (case.algorithm, case.model) == (algorithm, model)]
            assert max(case.devices for case in own) == 1024
            assert {case.staleness for case in own if case.devices == 1024} == {1, 4}


@pytest.mark.parametrize(("widest", "says"), [(MOST_GAP, "PASS"), (0.0123, "FAIL")])
def test_the_widest_gap_decides(widest: float, says: str) -> None:
    rows = [row("a", 0.001), row("b", widest)]
    assert verdict(rows).startswith(f"{says}: gap of streams <= 1%: at most {widest:.2%} of 2 cases (b)")
    assert ("above 1%" in line(rows[1])) == (says == "FAIL")
