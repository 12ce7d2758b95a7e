"""`realgraph run --costs`, and plans made with measured costs that are handed to a run without them."""

import json
from pathlib import Path

import pytest

from realgraph.commands.run import RunOptions, open_run
from realgraph.graphs.errors import ConfigError
from realgraph.plan.command import plan_command
from realgraph.plan.options import PlanOptions
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.cost_table import CostTable, PhaseFactor, costs_to_json
from realgraph.run.running import PreparedRun, prepare

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
    with pytest.raises(ConfigError, match="no file or run directory"):
        open_run(run_file, (), RunOptions(costs_file=run_file.parent / "nowhere")).__enter__()


def test_a_doubt_says_that_a_plans_seconds_are_its_own(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(run_file, table(run_file.parent, 3.0))
    capsys.readouterr()
    plan_command(run_file, options=PlanOptions(edited=run_file.parent / "plan.json", brief=True))
    assert "by a table of measured costs that was not given" in capsys.readouterr().out.replace("\n", " ")
