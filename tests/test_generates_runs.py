"""Real runs of graphs that generate more than once: the same numbers in any layout, after a resume, and at a bound."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from realgraph.runtime.scheduler.collection import DISCARDED_BATCHES
from tests.runs import BASE, copy_home, finish, home, numbers, records, write_run

pytest.importorskip("torch")
__all__ = ["home"]

FUNCTIONS = '''
def ask(prompt: str, text: str, template: str) -> str:
    """In the vocabulary of the tests: digits, + and =."""
    return f"{text[:2]}+{text[-2:]}="

def read(text: str, low: float, high: float) -> float:
    return sum(int(character) for character in text if character.isdigit()) % 7 / 7
'''
EVAL = {"every": 2, "data": {**BASE["data"], "path": "test.jsonl"}}
REMAX: dict[str, Any] = {
    "graph": "remax",
    "params": {"reward_fn": "rewards:score", "lr": 3.0e-3, "group_size": 2, "kl_coef": 0.05},
    "eval": EVAL,
}
JUDGE: dict[str, Any] = {
    "graph": "judge",
    "models": {"judge": {"path": "model"}},
    "params": {"lr": 3.0e-3, "group_size": 4, "judge_tokens": 3},
    "calls": {"question": {"fn": "judging:ask"}, "reward": {"fn": "judging:read"}},
}
GRAPHS = {"remax": REMAX, "judge": JUDGE}
APART = {"rollout": {"first": 0, "devices": 1}, "train": {"first": 0, "devices": 1}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"cluster": {"devices": 1}},
    "all": {"allocation": {name: {"first": 0, "devices": 2} for name in ("rollout", "LATER", "train")}},
    "apart": {"allocation": APART | {"LATER": {"first": 1, "devices": 1}}},
    "tensor": {"allocation": {name: {"devices": 2, "tp": 2} for name in ("rollout", "LATER", "train")}},
    "staged": {"allocation": {name: {"devices": 2, "pp": 2} for name in ("rollout", "LATER", "train")}},
}


def file_of(home: Path, name: str, graph: str, *parts: dict[str, Any]) -> Path:
    """The file of a run of one of GRAPHS."""
    (home / "judging.py").write_text(FUNCTIONS)
    file = write_run(home, name, GRAPHS[graph], {"steps": 4, "checkpoint": {"every": 2, "keep": 9}}, *parts)
    text = file.read_text().replace('"LATER"', '"greedy"' if graph == "remax" else '"judge"')
    run = json.loads(text)
    if graph == "judge":
        del run["data"]["columns"]["answer"]
    file.write_text(json.dumps(run))
    return file


def run_of(home: Path, name: str, graph: str, *parts: dict[str, Any]) -> Path:
    """A finished run of one of GRAPHS."""
    finish(home, "run", str(file_of(home, name, graph, *parts)), name=name)
    return home / name


def lasting(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers of a run's steps, but for weights that are brought to copies: a resumed run loads these."""
    steps = numbers(folder)
    return {
        step: {n: value for n, value in found.items() if not n.startswith("reallocate")}
        for step, found in steps.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_run_has_the_same_numbers_wherever_its_calls_lie(home: Path, graph: str) -> None:
    runs = {layout: numbers(run_of(home, f"{graph}-{layout}", graph, LAYOUTS[layout])) for layout in LAYOUTS}
    for layout, steps in runs.items():
        assert sorted(steps) == [0, 1, 2, 3]
        for step, metrics in runs["one"].items():
            assert steps[step]["reward/reward"] == metrics["reward/reward"], (layout, step)
            assert steps[step]["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-5), (layout, step)


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_resumed_run_ends_with_the_same_numbers_and_the_same_bytes(home: Path, tmp_path: Path, graph: str) -> None:
    whole = run_of(home, f"{graph}-whole", graph, LAYOUTS["apart"])
    folder = tmp_path / "run"
    shutil.copytree(whole, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    (folder / "metrics.jsonl").unlink()
    finish(home, "run", "--resume", str(folder), name=f"{graph}-whole")
    found, expected = lasting(folder), lasting(whole)
    assert found == {step: expected[step] for step in (2, 3)}
    last = whole / "checkpoints" / "step-000004"
    files = [path.relative_to(whole) for path in last.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["recompute", "wait"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_run_within_a_bound_trains_on_no_older_samples_than_it_allows(home: Path, graph: str, interrupt: str) -> None:
    stale = {"staleness": 1, "overdue": "drop", "rollout": {"interrupt": interrupt}}
    folder = run_of(home, f"{graph}-{interrupt}", graph, stale, LAYOUTS["apart"] if interrupt == "wait" else {})
    assert max(metrics["staleness/max"] for metrics in numbers(folder).values()) <= 1


DEBATERS = ("pro", "con")


def debate_of(home: Path, name: str, *parts: dict[str, Any]) -> dict[int, dict[str, float]]:
    """The numbers of a finished run of the debate in the documents, with texts and rewards for this model."""
    page = (Path(__file__).parent.parent / "docs/graphs.md").read_text()
    graph = re.search(r"```yaml\n(# debate\.yaml.*?)```", page, re.DOTALL)
    assert graph is not None
    (home / "arguing.yaml").write_text(graph[1])
    (home / "judging.py").write_text(FUNCTIONS)
    scored = {f"{role}_reward": {"fn": "rewards:score"} for role in DEBATERS}
    debate = {
        "graph": "arguing.yaml",
        "models": {role: {"path": "model"} for role in DEBATERS},
        "params": {"lr": 3.0e-3, "group_size": 4},
        "calls": {"ask": {"fn": "judging:ask"}, **scored},
        "steps": 3,
        "checkpoint": {"every": 3},
    }
    run = json.loads(write_run(home, name, debate, *parts).read_text())
    del run["models"]["actor"]
    run["params"] = debate["params"]
    (home / f"{name}.yaml").write_text(json.dumps(run))
    finish(home, "run", str(home / f"{name}.yaml"), name=name)
    return numbers(home / name)


@pytest.mark.slow
def test_a_debate_trains_both_actors_alike_wherever_they_lie(home: Path) -> None:
    """Their rewards are each other's baselines: what one gains the other loses."""
    own = {call: {"first": 0, "devices": 1} for call in ("first", "pro_train")}
    others = {call: {"first": 1, "devices": 1} for call in ("second", "con_train")}
    one = debate_of(home, "debate", {"cluster": {"devices": 1}})
    apart = debate_of(home, "debate-apart", {"allocation": own | others})
    late = {"staleness": 1, "overdue": "drop"}
    stale = debate_of(home, "debate-stale", {"allocation": own | others}, late)
    assert [*one] == [*apart] == [*stale] == [0, 1, 2]
    for step, metrics in one.items():
        assert metrics["batch/trained_tokens"] == sum(metrics[f"{role}_train/n_tokens"] for role in DEBATERS)
        for role in DEBATERS:
            assert metrics[f"{role}_train/grad_norm"] > 0
            for name in (f"{role}_reward/{role}_reward", f"{role}_train/loss", f"{role}_train/grad_norm"):
                assert apart[step][name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), (step, name)
    assert max(metrics["staleness/max"] for metrics in stale.values()) <= 1
    trained = [home / "debate/checkpoints/step-000003" / role / "model.safetensors" for role in DEBATERS]
    contents = {path.read_bytes() for path in (*trained, home / "model/model.safetensors")}
    assert len(contents) == 3  # each has learnt something of its own


def test_a_greedy_baseline_is_the_reward_of_the_greedy_response(home: Path) -> None:
    """It is the same for the same prompt and weights: the evaluation, which decodes greedily, sees the very rewards."""
    held_out = {**EVAL, "at_start": True, "data": {**BASE["data"], "path": "train.jsonl"}, "limit": 8}
    folder = run_of(home, "remax-greedy", "remax", {"eval": held_out, "data": {"shuffle": False}, "steps": 1})
    first = {record["step"]: record["metrics"] for record in records(folder, "eval")}[0]
    assert numbers(folder)[0]["baseline/baseline"] == pytest.approx(first["reward"])
    metrics = records(folder)[0]["metrics"]
    tokens = {
        name: round(metrics[f"{name}/tokens_per_second"] * metrics[f"{name}/seconds"])
        for name in ("rollout", "greedy", "ref_logp", "train")
    }
    assert tokens["rollout"] == metrics["batch/new_tokens"] == 16 * metrics["rollout/new_tokens"]
    assert tokens["greedy"] == 8 * metrics["greedy/new_tokens"]
    assert tokens["ref_logp"] == tokens["train"] == metrics["batch/tokens"] == metrics["batch/trained_tokens"]


TUTOR = """
name: tutor
inputs: {prompt: group tokens, answer: group text}
models: {actor: {trainable: true}, tutor: {}}
calls:
  rollout: {kind: generate, model: actor, n: 2}
  hint: {kind: generate, model: tutor, reads: [prompt], temperature: 0}
  reward:
    {kind: function, fn: "rewards:score", reads: {text: rollout.text, answer: answer}, writes: {reward: sample float32}}
  hinted:
    kind: function
    fn: "rewards:score"
    over: group
    reads: {text: hint.text, answer: answer}
    writes: {hinted: group float32}
  advantage: {kind: advantage, reads: [reward], steps: {center: {by: key, key: hinted}}}
  train: {kind: train, model: actor, lr: 1.0e-3, loss: {terms: {policy: {kind: policy_gradient}}}}
"""


def test_a_checkpoint_is_evaluated_though_a_frozen_role_generates_too(home: Path, tmp_path: Path) -> None:
    """It has no model of that role, and an evaluation asks for none."""
    (home / "tutored.yaml").write_text(TUTOR)
    shutil.copytree(home / "model", tmp_path / "step-000007/actor")
    parts = {"graph": "tutored.yaml", "models": {"tutor": {"path": "model"}}, "eval": {**EVAL, "limit": 4}}
    file = write_run(home, "tutor", parts, {"cluster": {"devices": 1}})
    running = finish(home, "eval", str(file), "--checkpoint", str(tmp_path / "step-000007"), name="tutor")
    assert "after step 7: accuracy" in running.output()


def test_prompts_of_a_call_that_are_all_too_long_end_the_run_with_its_limit(home: Path) -> None:
    file = file_of(home, "long", "judge", {"calls": {"judge": {"max_prompt_tokens": 1}}})
    running = finish(home, "run", str(file), name="long", code=3)
    limits = "data.max_prompt_tokens or calls.judge.max_prompt_tokens"
    said = rf"the last (\d+) prompt groups in a row were all left out \(\1 with prompts over {limits}, 0 filtered out\)"
    found = re.search(said, running.output())  # groups come in replies of several
    assert found is not None and int(found[1]) >= DISCARDED_BATCHES * BASE["batch"]["groups"], running.output()


def test_a_prompt_that_can_not_be_used_is_named(home: Path, tmp_path: Path) -> None:
    own = copy_home(home, tmp_path / "home")
    (own / "judging.py").write_text(FUNCTIONS.replace('f"{text[:2]}+{text[-2:]}="', '""'))
    file = write_run(own, "empty", JUDGE, {"steps": 1})
    run = json.loads(file.read_text())
    del run["data"]["columns"]["answer"]
    file.write_text(json.dumps(run))
    running = finish(own, "run", str(file), name="empty", code=3)
    assert "the prompt of 'judge' for sample" in running.output()
    assert "the prompt is empty" in running.output()
