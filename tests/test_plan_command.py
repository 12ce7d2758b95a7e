"""`realgraph plan` from a run file to a table, JSON, an edited plan, and its refusals; without torch or network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.plan.command import plan_command
from realgraph.plan.options import PlanOptions
from realgraph.planner.plan.codec import plan_from_json, plan_to_json
from realgraph.run.planning import plan_for, read_plan
from realgraph.run.requests import hub_cache_folder, request_for
from realgraph.run_file.compose import check_run

RUN = """
graph: grpo
models: {actor: {path: Qwen/Qwen3-1.7B, dtype: bfloat16}}
params: {kl_coef: 0.01}
data: {path: rows.jsonl, columns: {prompt: question, answer: answer}, max_prompt_tokens: 256}
batch: {groups: 64, max_new_tokens: 512, expected_new_tokens: 200}
cluster: {devices: 8, kind: H100-SXM}
allocation: {ref_logp: {devices: 4, max_tokens_per_microbatch: 4000}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [{"question": "how much is " + "x" * 40 * (i % 3), "answer": "4"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def test_the_table_says_what_runs_where_and_what_bounds_it(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_command(run_file, options=PlanOptions(brief=True))
    said = capsys.readouterr().out
    for part in (
        "8 H100-SXM",
        "lower bound",
        "proven",
        "rollout",
        "ref_logp",
        "0-3",
        "x 4,000",
        "dp/tp/pp",
        "timeline of two periods",
        "critical circuit",
        "memory at the worst moment",
        "bottleneck",
        "200 (at",
    ):
        assert part in said, said
    assert set(plan.allocations) == {"rollout", "ref_logp", "train"}


@pytest.mark.parametrize(("path", "devices"), [("openai/gpt-oss-20b", 8), ("deepseek-ai/DeepSeek-V3", 256)])
def test_mixtures_of_other_shapes_are_planned_for_the_engines(path: str, devices: int, run_file: Path) -> None:
    run_file.write_text(RUN.replace("allocation: {ref_logp", "# {ref_logp"))
    free = [f"models.actor.path={path}", *([f"cluster.nodes={devices // 8}"] if devices > 8 else [])]
    plan = plan_command(run_file, free, PlanOptions(brief=True, exact=True))
    assert sum(allocation.layout.ep > 1 for allocation in plan.allocations.values()) > 0  # experts are spread


def test_json_goes_out_comes_back_and_can_be_edited(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_file.parent / "plan.json"
    plan = plan_command(run_file, options=PlanOptions(json_out=True, out=out))
    assert plan_from_json(capsys.readouterr().out) == plan
    assert plan_from_json(out.read_text()) == plan
    raw = json.loads(out.read_text())
    raw["allocations"]["train"]["max_tokens_per_microbatch"] = 2048
    out.write_text(json.dumps(raw))
    taken = plan_command(run_file, options=PlanOptions(edited=out, brief=True))
    assert taken.allocations["train"].max_tokens_per_microbatch == 2048
    assert taken.allocations["train"].peak_bytes != plan.allocations["train"].peak_bytes  # predicted anew
    with pytest.raises(ConfigError, match="made for another batch"):
        plan_command(run_file, ["batch.groups=32"], PlanOptions(edited=out))
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        plan_command(run_file, options=PlanOptions(edited=run_file.parent / "nowhere.json"))


def test_a_plan_does_not_depend_on_learning_rates_or_expected_lengths(run_file: Path) -> None:
    first = check_run(run_file)
    plan = plan_for(first, request_for(first))
    (run_file.parent / "plan.json").write_text(plan_to_json(plan))
    other = check_run(run_file, ["calls.train.lr=1e-3", "batch.expected_new_tokens=100"])
    assert read_plan(run_file.parent / "plan.json", request_for(other)).hashes == plan.hashes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["models.actor.path=Qwen/Qwen3-1.7b"], "did you mean 'Qwen/Qwen3-1.7B'"),
        (["cluster.kind=H100SXM"], "did you mean 'H100-SXM'"),
        (["allocation.train={tp: 3}"], "8 devices"),
        (["batch.max_new_tokens=50000"], "40960 positions"),
        (["models.actor.path=Qwen/Qwen3-235B-A22B"], "no plan fits"),
    ],
)
def test_a_run_that_cannot_be_planned_is_refused(run_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_command(run_file, overrides)


def test_what_engines_lack_is_refused_where_they_are_asked_for(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="context parallelism"):
        plan_command(run_file, ["allocation.rollout={cp: 2}"])


def test_a_problem_of_the_planner_has_its_line_in_the_run_file(run_file: Path) -> None:
    run_file.write_text(RUN.replace("devices: 4", "devices: 3"))
    with pytest.raises(ConfigError) as caught:
        plan_command(run_file)
    assert caught.value.problems[0].where.line == 8


def test_the_mean_prompt_is_guessed_from_the_data(run_file: Path) -> None:
    request = request_for(check_run(run_file))
    assert request.workload.prompt_tokens == 256
    assert request.workload.mean_prompt_tokens == pytest.approx((12 + 40) / 4, abs=1)
    (run_file.parent / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n{"quest\n' * 99)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 is not JSON"):
        request_for(check_run(run_file))


@pytest.mark.parametrize(
    "environment",
    [{}, {"HF_HOME": "/a"}, {"XDG_CACHE_HOME": "/b"}, {"HF_HOME": "/a", "HF_HUB_CACHE": "/c"}],
    ids=lambda environment: "+".join(environment) or "none",
)
def test_the_hub_cache_is_where_huggingface_hub_has_it(environment: dict[str, str]) -> None:
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_", "XDG_"))} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean, check=True
    )
    assert done.stdout.strip() == str(hub_cache_folder(environment))


def test_planning_imports_no_torch(run_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from realgraph.plan.command import PlanOptions, plan_command; "
        f"plan_command(Path({str(run_file)!r}), options=PlanOptions(brief=True)); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("[]")
