"""`realgraph run --costs`, `realgraph plan --run`, and plans made with measured costs that are handed to a run without
them."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from realgraph.commands.run import RunOptions, open_run
from realgraph.graphs.errors import ConfigError
from realgraph.plan.command import plan_command
from realgraph.plan.options import PlanOptions
from realgraph.plan.view.measured import read_run
from realgraph.planner.plan.codec import plan_to_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.cost_table import CostTable, PhaseFactor, costs_to_json
from realgraph.run.ending import next_lines
from realgraph.run.running import PreparedRun, prepare
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.master import RunOutcome
from realgraph.runtime.master.observer import PlannedSeconds, RunStarted, StepRecord
from realgraph.runtime.master.records import MetricsFile
from realgraph.runtime.master.step_metrics import planned_of
from realgraph.runtime.wire.metrics import PEAK_BYTES

BRIEF = PlanOptions(brief=True)
RUN = """
graph: grpo
models: {actor: {path: Qwen/Qwen3-1.7B, dtype: bfloat16}}
params: {kl_coef: 0.01}
data: {path: rows.jsonl, columns: {prompt: question, answer: answer}, max_prompt_tokens: 256}
batch: {groups: 64, max_new_tokens: 512, expected_new_tokens: 200}
cluster: {devices: 8, kind: H100-SXM}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"question": "how much", "answer": "4"})] * 64))
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def table(folder: Path, factor: float, name: str = "costs.json") -> Path:
    """Every phase takes so many times what the formulas say."""
    phases = {phase: PhaseFactor(factor) for phase in ("train", "inference", "generate", "reallocate")}
    file = folder / name
    file.write_bytes(costs_to_json(CostTable(kind="H100-SXM", phases=phases)))  # type: ignore[arg-type]
    return file


def planned(run_file: Path, costs: Path | None) -> Plan:
    """The plan file beside the run file, made with the costs."""
    options = PlanOptions(out=run_file.parent / "plan.json", costs=costs, brief=True)
    return plan_command(run_file, options=options)


def seconds(plan: Plan) -> dict[str, float]:
    return {name: allocation.seconds for name, allocation in plan.allocations.items()} | plan.reallocation_seconds


@pytest.mark.slow
def test_a_run_plans_with_the_costs_that_it_is_given(run_file: Path) -> None:
    plain = prepare(run_file, (), None).job.plan
    (run_file.parent / "old").mkdir()
    for costs in (table(run_file.parent, 3.0), table(run_file.parent / "old", 3.0).parent):  # a file, a run directory
        with open_run(run_file, (), RunOptions(costs_file=costs)) as prepared:
            assert prepared.job.plan.period_seconds == pytest.approx(3 * plain.period_seconds, rel=0.1)
            assert prepared.job.plan.hashes.costs and prepared.request.costs.phases["train"].factor == 3.0


def test_a_plan_made_with_costs_keeps_its_seconds_in_a_run_without_them(run_file: Path) -> None:
    plan = planned(run_file, table(run_file.parent, 3.0))
    prepared = prepare(run_file, (), run_file.parent / "plan.json")
    assert seconds(prepared.job.plan) == pytest.approx(seconds(plan))
    assert prepared.job.plan.period_seconds == pytest.approx(plan.period_seconds)
    assert prepared.job.plan.latency_seconds == pytest.approx(plan.latency_seconds)
    assert prepared.job.plan.hashes == plan.hashes
    with_table: PreparedRun = prepare(run_file, (), run_file.parent / "plan.json", run_file.parent / "costs.json")
    assert seconds(with_table.job.plan) == pytest.approx(seconds(plan))


def test_a_plan_made_without_costs_is_judged_by_those_of_the_run(run_file: Path) -> None:
    plan = planned(run_file, None)
    judged = prepare(run_file, (), run_file.parent / "plan.json", table(run_file.parent, 3.0)).job.plan
    assert judged.period_seconds > 2.5 * plan.period_seconds and judged.hashes.costs


def test_costs_that_contradict_the_plan_or_a_resumed_run_are_refused(run_file: Path) -> None:
    planned(run_file, table(run_file.parent, 3.0))
    other = table(run_file.parent, 2.0, "other.json")
    with pytest.raises(ConfigError, match="another table of measured costs"):
        prepare(run_file, (), run_file.parent / "plan.json", other)
    with pytest.raises(ConfigError, match=r"a resumed run keeps its plan(.|\n)*leave out --costs, or add --replan"):
        open_run(None, (), RunOptions(resume=run_file.parent, costs_file=other)).__enter__()
    both = RunOptions(resume=run_file.parent, plan_file=run_file.parent / "plan.json", replan=True)
    with pytest.raises(ConfigError, match="--plan and --replan say two things"):
        open_run(None, (), both).__enter__()
    with pytest.raises(ConfigError, match="no file or run directory"):
        open_run(run_file, (), RunOptions(costs_file=run_file.parent / "nowhere")).__enter__()


FEW = ["cluster.devices=2", "batch.groups=8"]


def finished_run(run_file: Path, factor: float | None) -> Path:
    """The directory of a run whose calls took so many times what was predicted. None: it has left no costs."""
    plan = plan_command(run_file, FEW, BRIEF)
    folder = RunFolder(run_file.parent / "finished")
    folder.root.mkdir()
    folder.plan.write_text(plan_to_json(plan))
    metrics = MetricsFile(folder.metrics)
    for step in range(4):
        taken = {f"{name}/seconds": one.seconds * (factor or 1.0) for name, one in plan.allocations.items()}
        metrics.observe(StepRecord(step, plan.period_seconds * (factor or 1.0), taken))
    metrics.close()
    if factor is not None:
        table(folder.root, factor)
    return folder.root


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The output in one line, its spaces single."""
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_for_a_run_is_made_with_the_costs_that_it_measured(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--costs DIR` does, and with the run's own plan beside what it measured."""
    root = finished_run(run_file, 3.0)
    capsys.readouterr()
    plain, _ = plan_command(run_file, FEW, BRIEF), capsys.readouterr()
    by_costs = plan_command(run_file, FEW, replace(BRIEF, costs=root))
    assert f"costs measured, from {root}" in told(capsys)
    by_run = plan_command(run_file, FEW, replace(BRIEF, run_dir=root))
    said = told(capsys)
    assert by_run.hashes == by_costs.hashes != plain.hashes
    assert seconds(by_run) == seconds(by_costs) and by_run.orders == by_costs.orders
    assert by_run.period_seconds == pytest.approx(3 * plain.period_seconds, rel=0.1)
    assert f"costs measured by the run in {root}" in said
    assert "predicted against measured" in said and "no measured costs" not in said


def test_a_plan_says_that_measured_lengths_take_the_place_of_the_expected_one(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = run_file.parent / "costs.json", run_file.parent / "lengths.json"
    file.write_bytes(costs_to_json(CostTable(kind="H100-SXM", lengths=(100, 300, 900))))
    given.write_text("[50, 60]")
    plan_command(run_file, options=replace(BRIEF, costs=file))
    said = "the measured ones of the costs, 304 tokens on average, not batch.expected_new_tokens, 200 (--lengths)"
    assert said in told(capsys)
    plan_command(run_file, ["batch.expected_new_tokens=null"], replace(BRIEF, costs=file))
    plan_command(run_file, options=replace(BRIEF, costs=file, lengths=given))
    assert "the measured ones of the costs" not in told(capsys)


def test_steps_under_another_plan_and_those_that_warm_up_after_a_resume_do_not_count(run_file: Path) -> None:
    """In the last lines of a run as in `plan --run`: their predictions are of the present plan."""
    prepared = prepare(run_file, [f"outputs.dir={run_file.parent / 'run'}"], None)
    now, before = planned_of(prepared.job), PlannedSeconds(7.0)
    metrics = MetricsFile(prepared.folder.metrics)
    for first, by in ((0, before), (3, now), (6, now)):
        metrics.observe(RunStarted("run", "grpo", 9, first, "", (), planned=by))
        for step in range(first, first + 3):
            seconds = (100.0 if step == first else 9.0) if by == before else (50.0 if step == first else 4.0)
            peak = {f"train/{PEAK_BYTES}": 9e9 if by == before else 2e9, "train/seconds": seconds / 2}
            metrics.observe(StepRecord(step, seconds, peak))
    metrics.close()
    lines = list(next_lines(RunOutcome(9, "finished", saved=run_file.parent), prepared))
    assert lines[0].startswith("  most memory: train 2.0 GB (")
    assert lines[1].startswith("  median time: a whole step 4.00 s (") and ", train 2.00 s (" in lines[1]
    prepared.folder.plan.write_text(plan_to_json(prepared.job.plan))
    assert [step.step for step in read_run(prepared.folder.root).steps] == [4, 5, 7, 8]


def test_a_run_that_only_generates_says_how_to_go_on_where_it_was_stopped(run_file: Path) -> None:
    prepared = prepare(run_file, ["graph=generate", "params=null", f"outputs.dir={run_file.parent / 'run'}"], None)
    stopped = RunOutcome(2, "stopped", interrupted=True, saved=run_file.parent)
    samples = f"  samples: {prepared.folder.samples}"
    assert list(next_lines(stopped, prepared)) == [samples, f"  go on: realgraph run --resume {prepared.folder.root}"]
    for other in (replace(stopped, saved=None), replace(stopped, steps=prepared.job.steps)):
        assert list(next_lines(other, prepared)) == [samples]


def test_given_costs_go_before_those_of_the_run(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = finished_run(run_file, 3.0)
    own = table(run_file.parent, 2.0)
    by_costs = plan_command(run_file, FEW, replace(BRIEF, costs=own))
    capsys.readouterr()
    plan = plan_command(run_file, FEW, replace(BRIEF, costs=own, run_dir=root))
    said = told(capsys)
    assert plan.hashes == by_costs.hashes and seconds(plan) == seconds(by_costs)
    assert f"costs measured, from {own}; the run in {root} is only compared, since --costs is given" in said
    assert "predicted against measured" in said


def test_a_run_that_has_left_no_costs_is_compared_and_no_more(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, or was killed."""
    root = finished_run(run_file, None)
    capsys.readouterr()
    plan = plan_command(run_file, FEW, replace(BRIEF, run_dir=root))
    said = told(capsys)
    assert not plan.hashes.costs
    assert f"costs the shipped ones: the run in {root} has left no costs.json" in said
    assert "predicted against measured" in said


def test_costs_of_a_run_on_another_kind_of_device_are_refused(run_file: Path) -> None:
    root = finished_run(run_file, 3.0)
    with pytest.raises(ConfigError, match=r"measured on H100-SXM, the cluster has A100-80(.|\n)*leave --run out"):
        plan_command(run_file, [*FEW, "cluster.kind=A100-80"], replace(BRIEF, run_dir=root))
    plan = (root / "plan.json").read_bytes()
    (root / "plan.json").write_bytes(b"\xff" + plan)
    with pytest.raises(ConfigError, match=r"no run can be read here: (.|\n)*plan\.json and metrics\.jsonl"):
        plan_command(run_file, FEW, replace(BRIEF, run_dir=root))
    (root / "plan.json").write_bytes(plan)
    (root / "costs.json").write_text("nul")
    with pytest.raises(ConfigError, match=r"costs\.json is no table of costs"):
        plan_command(run_file, FEW, replace(BRIEF, run_dir=root))


def test_a_doubt_says_that_a_plans_seconds_are_its_own(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(run_file, table(run_file.parent, 3.0))
    capsys.readouterr()
    plan_command(run_file, options=PlanOptions(edited=run_file.parent / "plan.json", brief=True))
    assert "by a table of measured costs that was not given" in capsys.readouterr().out.replace("\n", " ")
