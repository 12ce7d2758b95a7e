"""The spread of measured seconds: what is learnt covers what it must and is no wider, and is what plans print."""

import json
import math
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.cost_model import bar_targets
from benchmarks.published_errors import (
    GRID,
    Residual,
    coverage,
    coverage_by_others,
    covered,
    learnt,
    of_regime,
    own_residuals,
    with_one,
)
from realgraph.planner.costs.spread import BAR_SHARE, SPREADS, SpreadPhase, SpreadRegime, bar_of, half_width
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.plan.codec import plan_from_json, plan_to_json
from realgraph.planner.request.cost_table import CostTable, Phase, PhaseFactor
from realgraph.planner.search.period_error import calls_error, period_bar, period_error
from realgraph.planner.search.search import reprice, search
from tests.planner_cases import cluster, grpo, request

CPU = device_kind("cpu").costs
SMALL = Workload(8, 8, 16, 32, 16.0)
PHASES: tuple[tuple[SpreadPhase, tuple[SpreadRegime, ...]], ...] = (
    ("train", ("plain",)),
    ("train", ("plain", "experts")),
    ("generate", ("plain", "cut")),
    ("reallocate", ("plain",)),
    ("step", ("plain",)),
    ("train", ("profiled cpu",)),
)


def drawn(seed: int, n: int = 120) -> list[Residual]:
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        phase, regimes = rng.choice(PHASES)
        value = rng.gauss(0.0, 0.1 + 0.1 * len(regimes))
        rows.append(Residual(phase, regimes, value, rng.choice("AB"), rng.choice((0.0, 0.1)) * (phase == "step")))
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_what_is_learnt_covers_80_percent_and_no_less_would(seed: int) -> None:
    rows = drawn(seed)
    found = learnt(rows)
    for phase, regimes in found.items():
        for regime, deviation in regimes.items():
            own = of_regime(rows, phase, regime)
            if not own:
                assert deviation == 0
                continue
            assert covered(own, found) >= BAR_SHARE
            less = with_one(found, phase, regime, deviation - GRID[1])
            assert deviation == 0 or covered(own, less) < BAR_SHARE or len(own) < 5


def test_a_normal_spread_is_found_again() -> None:
    rng = random.Random(1)
    rows = [Residual("train", ("plain",), rng.gauss(0.0, 0.2), "A") for _ in range(4000)]
    assert learnt(rows)["train"]["plain"] == pytest.approx(0.2, abs=0.02)
    assert half_width(0.2) == pytest.approx(1.2816 * 0.2, rel=1e-3)
    low, high = bar_of(10.0, 0.2)
    assert low * high == pytest.approx(100.0) and low < 10 < high


def test_a_system_is_told_by_the_others_alone() -> None:
    near = [Residual("train", ("plain",), 0.01, "A") for _ in range(20)]
    far = [Residual("train", ("plain",), 0.5, "B") for _ in range(20)]
    lone = [Residual("inference", ("plain",), 0.5, "B")]
    found = coverage_by_others([*near, *far, *lone])
    assert (found["A"].within, found["B"].within, found["all"].within) == (1.0, 0.0, 0.5)
    assert found["B"].rows == 20  # nobody else tells of inference
    assert coverage([*near, *far], {**SPREADS, "train": {"plain": 0.1}})["all published"].within == 0.5


def test_the_claim_fails_where_bars_are_too_narrow() -> None:
    rows = [Residual("train", ("plain",), 0.5, "A") for _ in range(10)]
    claims = {claim.name: claim.met for claim in bar_targets(rows)}
    assert claims["bars: share of 10 rows within"] is False
    assert claims["bars: regimes whose shipped deviation is the one learnt"] is False


def test_own_runs_tell_the_deviations_of_cpus(tmp_path: Path) -> None:
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps({"rows": [{"call": "train", "measured": 2.0, "predicted": 1.0, "shipped": 4.0}]}))
    values = {row.regimes: row.value for row in own_residuals((file,))}
    assert values == {
        ("shipped cpu",): pytest.approx(-0.693, abs=1e-3),
        ("profiled cpu",): pytest.approx(0.693, abs=1e-3),
    }
    found = learnt(own_residuals())
    for phase in ("train", "inference", "generate"):
        for regime in ("shipped cpu", "profiled cpu"):
            assert found[phase][regime] == SPREADS[phase][regime], (phase, regime)


def test_a_plan_has_the_bar_of_its_period_in_text_and_file() -> None:
    asked = request(grpo())
    plan = search(asked)
    assert plan.period_bar_seconds == period_bar(asked, plan)
    low, high = plan.period_bar_seconds
    assert high / plan.period_seconds == pytest.approx(plan.period_seconds / low)
    assert period_error(asked, plan) > calls_error(asked, plan) > 0
    assert plan_from_json(plan_to_json(plan)).period_bar_seconds == plan.period_bar_seconds
    assert reprice(asked, plan).period_bar_seconds == pytest.approx(plan.period_bar_seconds)


def test_what_was_measured_has_the_bar_that_measurements_tell() -> None:
    asked = request(grpo())
    shipped = period_error(asked, search(asked))
    phases: dict[Phase, PhaseFactor] = {
        "train": PhaseFactor(error=0.01, count=9),
        "generate": PhaseFactor(error=0.01, count=9),
    }
    measured = replace(asked, costs=CostTable(phases=phases))
    step, plain = SPREADS["step"]["plain"], SPREADS["train"]["plain"]
    assert step < period_error(measured, search(measured)) < math.hypot(step, SPREADS["generate"]["plain"]) + 1e-9
    assert period_error(measured, search(measured)) <= shipped
    assert search(measured).allocations["train"].error == plain  # not 0.01: another run would differ by more
    wide = replace(asked, costs=CostTable(phases={"train": PhaseFactor(error=0.5, count=9)}))
    assert search(wide).allocations["train"].error == 0.5
    cpu = request(grpo("bfloat16"), machine=cluster("cpu", 2), model="Qwen/Qwen3-0.6B", workload=SMALL)
    cpu = replace(cpu, models={"actor": replace(cpu.models["actor"], layers=2, vocab=1024)})
    guessed = search(cpu).allocations["train"].error
    profiled = search(replace(cpu, costs=CostTable(factors=CPU))).allocations["train"].error
    assert (guessed, profiled) == (SPREADS["train"]["shipped cpu"], SPREADS["train"]["profiled cpu"])
