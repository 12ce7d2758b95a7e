"""Mistaken and malicious inputs of `realgraph plan` end in an error that names them, never in a traceback."""

import json
from pathlib import Path

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.plan.command import plan_command
from realgraph.plan.diff import diff_command
from realgraph.plan.options import PlanOptions
from realgraph.plan.problem import problem_command
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.plan.codec import plan_to_json
from realgraph.run_file.compose import check_run

RUN = """
graph: grpo
models: {actor: {path: Qwen/Qwen3-0.6B, dtype: bfloat16}}
data: {path: rows.jsonl, columns: {prompt: question, answer: answer}, max_prompt_tokens: 64}
batch: {groups: 8, max_new_tokens: 64, expected_new_tokens: 40}
cluster: {devices: 2, kind: H100-SXM}
"""
PROBLEM = Path(__file__).parent.parent / "docs" / "planning_problem.json"
DEEP = "[" * 100_000 + "]" * 100_000
BRIEF = PlanOptions(brief=True)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "required, but not given"),
        (b"a: " + b"[" * 20_000 + b"]" * 20_000, "nested more than 32 deep"),
        (b"graph: grpo\ngraph: ppo\n", "given twice"),
        (b"- a\n", "expected a mapping"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"a: &a [*a]\n", "alias inside its own anchor"),
    ],
)
def test_a_file_that_is_no_run_file_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        plan_command(file)


@pytest.mark.parametrize(
    "content", [DEEP, '{"format": 2, "x": ' + DEEP + "}", '{"format": 2, "phases": []}', "", "nul"]
)
@pytest.mark.parametrize("what", ["costs", "lengths", "edited"])
def test_a_file_of_another_sort_is_named(what: str, content: str, run_file: Path) -> None:
    file = run_file.parent / "odd.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"odd\.json"):
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, **{what: file}))


@pytest.mark.parametrize(
    "phase",
    [
        {"factor": 0},
        {"factor": -3},
        {"factor": 1e300},
        {"factor": 1e-300},
        {"constant_seconds": -1},
        {"constant_seconds": 1e300},
    ],
)
def test_impossible_costs_are_refused_before_a_search(phase: dict[str, float], run_file: Path) -> None:
    table = run_file.parent / "costs.json"
    table.write_bytes(msgspec.json.encode({"format": 2, "phases": {"train": phase}}))
    with pytest.raises(ConfigError, match="no table of costs"):
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, costs=table))


def test_costs_of_another_kind_are_named_with_file_and_line(run_file: Path) -> None:
    table = run_file.parent / "costs.json"
    table.write_bytes(msgspec.json.encode({"format": 2, "kind": "A100-80"}))
    with pytest.raises(ConfigError, match=r"costs\.json.*measured on A100-80, the cluster has H100-SXM") as caught:
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, costs=table))
    assert caught.value.problems[0].where.line == 6


@pytest.mark.parametrize("cluster", ["{nodes: 100000000, devices: 8}", "{devices: 100000}"])
def test_a_cluster_beyond_all_clusters_is_refused_at_once(cluster: str, run_file: Path) -> None:
    with pytest.raises(ConfigError, match="at most 65,536"):
        plan_command(run_file, [f"cluster={cluster}", "cluster.kind=H100-SXM"])


@pytest.mark.parametrize("mesh", [{"n_devices": 10**30}, {"n_devices": 10**7}, {"n_devices": 0}, {"first": -1}])
def test_a_mesh_beyond_all_clusters_is_refused_at_once(mesh: dict[str, int], run_file: Path) -> None:
    plan = plan_command(run_file, options=BRIEF)
    good, odd = run_file.parent / "good.json", run_file.parent / "odd.json"
    good.write_text(plan_to_json(plan))
    raw = msgspec.json.decode(good.read_bytes())
    raw["allocations"]["train"]["layout"]["mesh"].update(mesh)
    odd.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"allocations\.train\.layout\.mesh"):
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, edited=odd))
    with pytest.raises(ConfigError, match=r"allocations\.train\.layout\.mesh"):
        diff_command(good, odd)


def test_a_difference_takes_run_directories_for_their_plans(run_file: Path) -> None:
    run = run_file.parent / "run"
    run.mkdir()
    with pytest.raises(ConfigError, match=r"run/plan\.json: .*can't be read(.|\n)*or a run directory's"):
        diff_command(run, run)
    (run / "plan.json").write_text(plan_to_json(plan_command(run_file, options=BRIEF)))
    assert diff_command(run / "plan.json", run) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.groups=1"],
        ["batch.max_new_tokens=1", "batch.expected_new_tokens=1"],
        ["data.max_prompt_tokens=1"],
        ["cluster.devices=1"],
        ["cluster={nodes: 3, devices: 6, kind: H100-SXM}"],
        ["staleness=100"],
        [
            "params.group_size=2",
            "batch.groups=1",
            "batch.max_new_tokens=1",
            "batch.expected_new_tokens=1",
            "staleness=1",
        ],
    ],
)
def test_extremes_have_a_plan(overrides: list[str], run_file: Path) -> None:
    plan = plan_command(run_file, overrides, BRIEF)
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds * 1.000001


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"edited": Path("a"), "robust": True}, "--plan and --robust"),
        ({"edited": Path("a"), "devices": "8..16"}, "--plan and --devices"),
        ({"robust": True, "devices": "8..16"}, "--robust and --devices"),
        ({"target": 3.0}, "add --devices"),
        ({"explain": "trian"}, "did you mean 'train'"),
        ({"out": Path("/nowhere/at/all.json")}, "there is no directory /nowhere/at"),
        ({"html": Path("/tmp")}, "it is a directory"),
    ],
)
def test_what_can_not_be_done_is_said_before_any_search(
    options: dict[str, object], says: str, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realgraph.plan.command.session", lambda *_: pytest.fail("a search began"))
    with pytest.raises(ConfigError, match=says):
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, **options))


def test_options_that_a_bare_problem_has_no_use_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="--problem takes no --explain, --html, --robust, --brief"):
        problem_command(PROBLEM, msgspec.structs.replace(BRIEF, html=Path("x.html"), explain="train", robust=True))


@pytest.mark.parametrize(
    "override", ["constraints.memory_gb=1e308", "constraints.host_memory_gb=1e30", "cluster.memory_gb=1e9"]
)
def test_memory_beyond_all_devices_is_refused(override: str, run_file: Path) -> None:
    with pytest.raises(ConfigError, match="<= 1,000,000"):
        plan_command(run_file, [override], BRIEF)


@pytest.mark.parametrize("factor", [{"kv": 1e-320}, {"gemm": 0.0}, {"step_seconds": 1e9}, {"optimizer": 1e-320}])
def test_impossible_factors_are_refused(factor: dict[str, float], run_file: Path) -> None:
    table = run_file.parent / "costs.json"
    factors = msgspec.to_builtins(device_kind("H100-SXM").costs) | factor
    table.write_bytes(msgspec.json.encode({"format": 2, "factors": factors}))
    with pytest.raises(ConfigError, match=next(iter(factor))):
        plan_command(run_file, options=msgspec.structs.replace(BRIEF, costs=table))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("devices",), 10**30),
        (("reallocations", 0, "distance"), 2**63),
        (("calls", 0, "options", 0, "seconds"), 1e308),
        (("calls", 0, "options", 0, "mesh"), [0, 10**20]),
    ],
)
def test_a_bare_problem_beyond_all_machines_is_refused(
    path: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    raw = json.loads(PROBLEM.read_text())
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=str(path[-1])):
        problem_command(file, PlanOptions())


@pytest.mark.filterwarnings("error")
def test_devices_without_memory_are_no_division_by_zero(tmp_path: Path) -> None:
    options = [{"mesh": [0, 2], "seconds": 1, "resident": 0, "active": 0}]
    file = tmp_path / "problem.json"
    file.write_text(json.dumps({"devices": 2, "memory": 0, "calls": [{"name": "a", "options": options}]}))
    assert problem_command(file, PlanOptions()).period == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("batch.groups=1000000000000", "can be planned"),
        ("params.group_size=1000000000", "<= 10,000"),
        ("params.group_size=10000 batch.groups=1000000", "can be planned"),
        ("staleness=1000000000000000000000", "whole numbers end at"),
    ],
)
def test_a_step_beyond_all_clusters_is_refused(override: str, says: str, run_file: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_command(run_file, [*override.split(), "data.path=openai/gsm8k", "data.subset=main"], BRIEF)


def test_a_sweep_of_a_mixed_cluster_says_which_devices_it_counts(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = msgspec.structs.replace(BRIEF, devices="1,2")
    plan_command(run_file, ["cluster.more=[{nodes: 1, kind: A100-80}]"], options)
    assert "sizes are of H100-SXM alone" in capsys.readouterr().out


def test_a_folder_with_a_config_alone_is_planned_but_not_run(run_file: Path) -> None:
    """No tokenizer, no weights: shapes are all that a plan needs."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 3072,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    folder = run_file.parent / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    plan = plan_command(run_file, [f"models.actor.path={folder}"], BRIEF)
    assert plan.period_seconds > 0
    with pytest.raises(ConfigError, match="has no weights"):
        check_run(run_file, [f"models.actor.path={folder}"])


def test_a_model_that_is_missing_is_told_once_however_many_roles_start_from_it(run_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_command(run_file, ["models.actor.path=modle", "params.kl_coef=0.1"])
    (problem,) = caught.value.problems
    assert problem.where.path == "$.models.actor.path" and "no directory 'modle'" in problem.text
