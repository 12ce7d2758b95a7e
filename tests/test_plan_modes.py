"""Modes of `realgraph plan` besides planning one run: explain, sweep, robust, planning problems; and how it ends."""

import json
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.plan import command as plan_command_module
from realgraph.plan.beside import cut_short
from realgraph.plan.command import plan_command
from realgraph.plan.limits import interruptible
from realgraph.plan.options import PlanOptions
from realgraph.plan.session import NoPlanYet
from realgraph.planner.plan.codec import plan_from_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.report.content import Comparison
from realgraph.planner.request.request import PlanRequest
from tests.console_script import typed
from tests.plan_reports import overlapping

RUN = """
graph: grpo
models: {actor: {path: Qwen/Qwen3-1.7B, dtype: bfloat16}}
params: {kl_coef: 0.01}
data: {path: openai/gsm8k, columns: {prompt: question, answer: answer}, max_prompt_tokens: 256}
batch: {groups: 64, max_new_tokens: 512, expected_new_tokens: 200}
cluster: {devices: 8, kind: H100-SXM}
steps: 200
"""
PROBLEM = Path(__file__).parent.parent / "docs" / "planning_problem.json"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


@pytest.mark.slow
def test_other_plans_and_hints_stand_beside_it(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = run_file.with_name("plan.html")
    options = PlanOptions(html=html, trace=run_file.with_name("trace.json"), price=2.0)
    plan = plan_command(run_file, ["allocation.ref_logp={devices: 4}"], options)
    said = capsys.readouterr().out
    for part in ("free choice", "what if", "16 devices", "staleness ", "$2.00 per device"):
        assert part in said, part
        assert part in html.read_text().replace("What if", "what if") or part.startswith("$"), part
    per_step = 8 * 2.0 * plan.period_seconds / 3600
    assert f"${200 * per_step:.2f} for 200 steps" in said
    assert json.loads(run_file.with_name("trace.json").read_text())["traceEvents"]


def test_a_call_is_explained(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_command(run_file, options=PlanOptions(explain="train"))
    said = capsys.readouterr().out
    assert "chosen train" in said and "why not" in said
    plan_command(run_file, options=PlanOptions(explain="train", json_out=True))
    found = json.loads(capsys.readouterr().out)
    assert len(found) > 1
    periods = [one["period_seconds"] for one in found if one["period_seconds"] is not None]
    assert periods == sorted(periods) and all(period >= plan.lower_bound_seconds * 0.999 for period in periods)
    with pytest.raises(ConfigError, match="'reward' holds no devices"):
        plan_command(run_file, options=PlanOptions(explain="reward"))
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        plan_command(run_file, options=PlanOptions(explain="trian"))


def test_a_sweep_names_the_cheapest_size_that_reaches_the_target(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--devices", "2..8")
    assert typed("plan", run_file, *sizes, "--json", monkeypatch=monkeypatch) == 0
    curve = json.loads(capsys.readouterr().out)
    periods = {size["devices"]: size["period_seconds"] for size in curve["sizes"]}
    assert list(periods) == [2, 4, 8] and curve["cheapest"] is None
    assert periods[2] > periods[4] > periods[8]
    target = periods[4] * 1.01
    out = run_file.with_name("plan.json")
    ask = ("plan", run_file, *sizes, "--brief", "--out", out, "--target")
    assert typed(*ask, target, monkeypatch=monkeypatch) == 0
    assert "the least that reaches" in capsys.readouterr().out
    assert len(plan_from_json(out.read_text()).orders) == 4
    assert typed(*ask, periods[8] / 2, monkeypatch=monkeypatch) == 4
    captured = capsys.readouterr()
    assert "cluster sizes" in captured.out and "no size reaches" in captured.err


def test_a_robust_plan_says_what_it_saves(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(run_file, options=PlanOptions(robust=True, brief=True))
    assert "regret" in capsys.readouterr().out


def test_colocated_plans_put_every_call_on_all_devices(run_file: Path) -> None:
    free = plan_command(run_file, options=PlanOptions(json_out=True))
    plan = plan_command(run_file, options=PlanOptions(json_out=True, colocated=True))
    assert {allocation.layout.mesh.n_devices for allocation in plan.allocations.values()} == {8}
    assert plan.period_seconds >= free.lower_bound_seconds


def test_a_bare_problem_is_solved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("plan", "--problem", PROBLEM, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "critical circuit" in said and "timeline of two periods" in said
    assert typed("plan", "--problem", PROBLEM, "--json", monkeypatch=monkeypatch) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["feasible"] and answer["bound"] <= answer["period"]
    assert typed("plan", "--problem", "/nowhere.json", monkeypatch=monkeypatch) == 2


def test_a_bare_problem_without_a_plan_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads(PROBLEM.read_text()) | {"memory": 1000}
    (tmp_path / "small.json").write_text(json.dumps(raw))
    assert typed("plan", "--problem", tmp_path / "small.json", monkeypatch=monkeypatch) == 4
    assert "no plan fits" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_4_and_what_was_not_found_with_5(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_large = "models.actor.path=Qwen/Qwen3-235B-A22B"
    assert typed("plan", run_file, too_large, "--brief", monkeypatch=monkeypatch) == 4
    said = capsys.readouterr().err
    assert said.startswith(f"{run_file}:7: $.cluster: no plan fits") and "hint:" in said
    assert typed("plan", run_file, "--time-limit", "0", "--brief", monkeypatch=monkeypatch) in (0, 5)


def test_ctrl_c_takes_what_was_found(run_file: Path) -> None:
    large = ["cluster={nodes: 128, kind: H100-SXM, devices: 8}", "batch.groups=4096"]
    ring = threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT))
    with interruptible():  # where the plan is found before, the signal shall not end the tests
        ring.start()
        code, plan = 0, None
        try:
            plan = plan_command(run_file, large, PlanOptions(brief=True))
        except NoPlanYet as error:
            code = error.exit_code
        ring.join(20)
    assert code == (0 if plan else 130)
    assert plan is None or plan.stopped in ("interrupted", "proven")
    assert plan is None or 0 < plan.lower_bound_seconds <= plan.period_seconds


def test_lengths_change_what_is_expected(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = run_file.with_name("lengths.txt")
    lengths.write_text("400\n420\n440\n")
    long = plan_command(run_file, options=PlanOptions(lengths=lengths, brief=True))
    said = capsys.readouterr().out
    assert "420 (at most 512) new tokens expected" in said and "lengths of responses" not in said
    assert long.period_seconds > plan_command(run_file, options=PlanOptions(json_out=True)).period_seconds


def test_what_ifs_that_time_was_too_short_for_are_named(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command_module, "BESIDE_SECONDS", 0.0)
    plan_command(run_file)
    said = " ".join(capsys.readouterr().out.split())
    assert "what-ifs cut short by time, inconclusive: 16 devices, " in said
    assert "batch.groups 128" in said and "staleness 4" in said and "what if change" not in said


@pytest.mark.slow
def test_a_mixed_cluster_is_compared_with_rules_on_one_kind(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(run_file, ["cluster.more=[{nodes: 2, kind: A100-80}]"])
    said = " ".join(capsys.readouterr().out.split())
    assert "on 16 A100-80 alone" in said
    assert "none fits" not in said and "--colocated" not in said
    assert "32 devices, 16 of them H100-SXM" in said


def test_a_search_that_ended_too_early_says_so() -> None:
    _, plan = overlapping()
    early = msgspec.structs.replace(plan, stopped="time limit")
    slower, faster = (Comparison("symmetric", factor * plan.period_seconds) for factor in (1.2, 0.5))
    assert "symmetric takes" in cut_short(early, (slower, faster))
    assert not cut_short(early, (slower,)) and not cut_short(plan, (faster,))
    assert not cut_short(early, (Comparison("free choice", 1.0),))


def test_a_simpler_plan_is_told_with_its_cost_unless_the_fastest_is_asked_for(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def simpler_by_one_percent(request: PlanRequest, plan: Plan, limits: Limits) -> Plan:
        exact = plan.period_seconds / 1.01
        return msgspec.structs.replace(plan, exact_seconds=exact, simplified=("train: 1F1B, not interleaved x8",))

    monkeypatch.setattr(plan_command_module, "simplest", simpler_by_one_percent)
    plan_command(run_file, options=PlanOptions(brief=True))
    said = " ".join(capsys.readouterr().out.split())
    assert "simpler, and 1.0 % longer than the best plan found, within the error bar of " in said
    assert "train: 1F1B, not interleaved x8 (--exact for the best)" in said
    assert " of the best plan found, searched for " in said and "what a stream of generation loses" not in said
    assert not plan_command(run_file, options=PlanOptions(brief=True, exact=True)).simplified
    assert "simpler, and" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--robust and --exact say two things"):
        plan_command(run_file, options=PlanOptions(robust=True, exact=True))
