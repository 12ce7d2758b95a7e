"""Runs of the library's graphs on real processes, seconds long, and everything that they write."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forked import PATIENCE
from tests.runs import BASE, GRPO, finish, home, merged, records, start, write_run
from tests.traces import traces
from tests.waiting import killed

__all__ = ["home"]

HELD_OUT = {**BASE["data"], "path": "test.jsonl"}
EVAL: dict[str, Any] = {"eval": {"every": 2, "data": HELD_OUT, "limit": 10}}
LONG = merged(EVAL, {"eval": {"every": 1}, "batch": {"max_new_tokens": 48}})  # evaluations come while samples are made
FROM_DATA = {"columns": {"prompt": "prompt", "response": "answer", "answer": None}}
CRITIC_APART = {
    **{name: {"first": 1, "devices": 1} for name in ("values", "train_critic")},
    **{name: {"first": 0, "devices": 1} for name in ("rollout", "ref_logp", "train_actor")},
}
READS_PROMPT = {"fn": "rewards:with_prompt", "reads": ["text", "answer", "prompt"], "ids": ["prompt"]}
STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"graph": "sft", "params": {"lr": 3e-3, "minibatches": 2}, "data": FROM_DATA},
    "grpo": merged(GRPO, {"eval": {**EVAL["eval"], "n": 2, "k": [1, 2], "temperature": 1.0}}),
    "ppo": merged({"graph": "ppo", "params": {"actor_lr": 3e-3}, "batch": {"groups": 16}}, EVAL),
    "raft": {"graph": "raft", "params": {"group_size": 4}, "calls": {"reward": {"fn": "rewards:score"}}},
    "generate": {"graph": "generate", "params": {"n": 2}, "batch": {"expected_new_tokens": 2, "max_new_tokens": 48}},
    "fsdp": merged(GRPO, {"allocation": {"train": {"sharding": "fsdp", "devices": 2}}}),
    "apart": merged(GRPO, {"allocation": {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}}),
    "one": merged(GRPO, {"cluster": {"devices": 1}, "calls": {"reward": READS_PROMPT}}, EVAL),
    "late": merged(GRPO, LONG, {"staleness": 1}),
    "late_apart": merged(
        GRPO,
        LONG,
        {"staleness": 2, "allocation": {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}},
    ),
}
TRAINED = {"sft": "actor", "grpo": "actor", "ppo": "actor critic", "raft": "actor", "fsdp": "actor", "apart": "actor"}
TRAINED |= {"late": "actor", "late_apart": "actor"}

_done: dict[str, Path] = {}


def ran(home: Path, name: str) -> Path:
    """The directory of a run that has ended well; each is run once, when it is first asked for."""
    if name not in _done:
        held = traces(home)
        finish(home, "run", str(write_run(home, name, RUNS[name], {"steps": STEPS})), name=name)
        held.gone()
        _done[name] = home / name
    return _done[name]


def events(folder: Path) -> list[dict[str, Any]]:
    """The slices of a trace."""
    found = json.loads((folder / "trace.json").read_text() + "]")
    return [event for event in found if event["ph"] == "X"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_records_what_it_did(home: Path, name: str) -> None:
    folder = ran(home, name)
    (began,), (ended,) = records(folder, "start"), records(folder, "end")
    assert (began["first_step"], began["steps"], ended["step"], ended["ok"]) == (0, STEPS, STEPS, True)
    assert 0 < began["facts"]["fork_seconds"] < began["facts"]["start_seconds"]
    steps = records(folder)
    assert [record["step"] for record in steps] == list(range(STEPS))
    calls, streams = set(began["calls"]), RUNS[name].get("staleness", 0) > 0
    timed: set[str] = set()
    plan = json.loads((folder / "plan.json").read_text())
    allocations, planned = plan["allocations"], began["planned"]
    assert planned["step"] == plan["period_seconds"] > 0
    assert {*planned["calls"]} - {"reallocate"} == allocations.keys()
    for record in steps:
        metrics = record["metrics"]
        assert all(math.isfinite(value) for value in metrics.values())
        here = {key.partition("/")[0] for key in metrics if key.endswith("/seconds")} - {"reallocate"}
        assert here <= calls if streams else here == calls  # a stream may have made a batch while another was trained
        timed |= here
        for call in here & allocations.keys():
            assert metrics[f"{call}/planned_bytes"] == allocations[call]["peak_bytes"] > 0
            own = allocations[call]["seconds"] - allocations[call]["step_end_seconds"]
            assert metrics[f"{call}/planned_seconds"] == own > 0
            assert metrics[f"{call}/peak_bytes"] > 1e6
        assert metrics["batch/groups"] == merged(BASE, RUNS[name])["batch"]["groups"]
    assert timed == calls
    if name == "generate":  # samples are longer than expected: the cache has what the plan keeps for that
        free = max(record["metrics"]["rollout/free_cache_tokens"] for record in steps)
        assert free > allocations["rollout"]["kv_cache_tokens"]
        assert allocations["rollout"]["spare_cache_tokens"] > 0
    for role in TRAINED.get(name, "").split():
        assert [record["metrics"][f"version/{role}"] for record in steps] == [1, 2, 3]
        call = "train" if TRAINED[name] == "actor" else f"train_{role}"
        assert all(record["metrics"][f"{call}/grad_norm"] > 0 for record in steps)
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "job.json", "plan.json", "logs", "checkpoints"}


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_has_every_call_inside_the_run(home: Path, name: str) -> None:
    folder = ran(home, name)
    found = events(folder)
    assert {event["name"] for event in found} >= set(records(folder, "start")[0]["calls"])
    first, last = (records(folder, kind)[0]["time"] * 1e6 for kind in ("start", "end"))
    for event in found:
        assert first - 5e6 < event["ts"] <= event["ts"] + event["dur"] < last + 5e6


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output(home: Path) -> None:
    """`realgraph run FILE | head -1`, without the shortcut of the other tests: an interpreter of its own."""
    file = write_run(home, "unread", RUNS["sft"], {"steps": STEPS})
    command = [sys.executable, "-m", "realgraph.cli", "run", str(file)]
    with killed(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=home)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: 300 rows")
        process.stdout.close()
        assert process.communicate(timeout=PATIENCE)[1] == b""
    assert process.returncode == 0
    assert [record["ok"] for record in records(home / "unread", "end")] == [True]


@pytest.mark.parametrize("name", ["grpo", "ppo", "late", "late_apart"])
def test_evaluations_come_when_they_are_due_with_samples(home: Path, name: str) -> None:
    folder = ran(home, name)
    evals = records(folder, "eval")
    every = RUNS[name]["eval"]["every"]
    assert [record["step"] for record in evals] == [*range(0, STEPS, every), STEPS]
    for record in evals:
        assert {"accuracy", "reward", "new_tokens"} <= record["metrics"].keys()
    if name == "grpo":
        assert all(record["metrics"]["pass@1"] <= record["metrics"]["pass@2"] for record in evals)
    shown = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert {(line["split"], line["step"]) for line in shown} >= {
        *(("eval", record["step"]) for record in evals),
        ("train", 0),
    }
    assert all(re.match(r"\d\d\+\d\d=", line["text"]) for line in shown)


@pytest.mark.slow
def test_the_best_evaluation_keeps_its_weights(home: Path) -> None:
    """Rewards of one constant answer: a model that only has to learn one text gets better all the time."""
    (home / "constant.py").write_text("def score(text: str) -> float:\n    return text.count('7') / 4\n")
    changes = {
        "params": {"lr": 1e-2},
        "calls": {"reward": {"fn": "constant:score", "reads": ["text"]}, "train": {"loss": {"terms": {"spoil": None}}}},
        "eval": {**EVAL["eval"], "every": 1, "temperature": 1.0, "call": "reward", "threshold": 0.5},
        "checkpoint": {"keep": 1},
        "steps": 5,
    }
    finish(home, "run", str(write_run(home, "best", GRPO, changes)), name="best")
    evals = [record for record in records(home / "best", "eval") if record["best"] and record["step"]]
    assert evals, records(home / "best", "eval")
    best = home / "best/checkpoints/best"
    assert best.resolve().name == f"step-{evals[-1]['step']:06d}"
    assert AutoModelForCausalLM.from_pretrained(best / "actor") is not None
    assert len(list((home / "best/checkpoints").glob("step-??????"))) <= 2


@pytest.mark.parametrize("name", TRAINED)
def test_checkpoints_are_models_for_transformers(home: Path, name: str) -> None:
    checkpoint = ran(home, name) / "checkpoints" / f"step-{STEPS:06d}"
    before = AutoModelForCausalLM.from_pretrained(home / "model")
    after = AutoModelForCausalLM.from_pretrained(checkpoint / "actor")
    text = AutoTokenizer.from_pretrained(checkpoint / "actor")("12+34=", return_tensors="pt").input_ids
    assert not torch.allclose(before(text).logits, after(text).logits, atol=1e-3)
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        [*TRAINED[name].split(), "manifest.json", "state.json"]
    )


@pytest.mark.parametrize("name", ["fsdp", "apart", "one"])
def test_another_layout_learns_the_same(home: Path, name: str) -> None:
    """Sharded, on meshes of their own with reallocation between them, on one device: the same samples and losses."""
    for record, other in zip(records(ran(home, "grpo")), records(ran(home, name)), strict=True):
        for key in ("rollout/new_tokens", "reward/reward", "train/loss", "train/grad_norm", "train/entropy"):
            assert other["metrics"][key] == pytest.approx(record["metrics"][key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
def test_an_edited_plan_runs_calls_on_disjoint_devices_at_once(home: Path) -> None:
    file = write_run(home, "edited", RUNS["ppo"], {"steps": 6, "eval": None})
    finish(home, "plan", str(file), "--out", "plan.json")
    plan = json.loads((home / "plan.json").read_text())
    for name, allocation in plan["allocations"].items():
        first = 1 if name in ("values", "train_critic") else 0
        allocation["layout"] |= {"dp": 1, "mesh": {"first": first, "n_devices": 1}}
    for device in plan["orders"]:
        here = [call for call, a in plan["allocations"].items() if a["layout"]["mesh"]["first"] == int(device)]
        plan["orders"][device] = [{"call": call} for call in here]
    (home / "plan.json").write_text(json.dumps(plan))
    finish(home, "run", str(file), "--plan", "plan.json", name="edited")
    spans: dict[str, dict[int, dict[str, Any]]] = {"train_actor": {}, "train_critic": {}}
    for event in events(home / "edited"):
        if event["name"] in spans:
            assert event["tid"] == (1 if event["name"] == "train_actor" else 2)
            spans[event["name"]][event["args"]["step"]] = event
    both = [(spans["train_actor"][step], spans["train_critic"][step]) for step in range(6)]
    assert any(max(a["ts"], c["ts"]) < min(a["ts"] + a["dur"], c["ts"] + c["dur"]) for a, c in both), both


@pytest.mark.slow
def test_a_stream_runs_more_at_once_than_its_plan_expects_where_the_plan_has_room_for_them(home: Path) -> None:
    """Groups of four samples: of a plan for fewer at once, whose spare sequences are what lets a group run together."""
    file = write_run(home, "roomy", RUNS["late_apart"], {"steps": STEPS, "eval": None})
    finish(home, "plan", str(file), "--out", "roomy.json")
    plan = json.loads((home / "roomy.json").read_text())
    plan["allocations"]["rollout"] |= {"kv_cache_tokens": 64, "spare_cache_tokens": 1024, "spare_running": 30}
    (home / "roomy.json").write_text(json.dumps(plan))
    finish(home, "run", str(file), "--plan", "roomy.json", name="roomy")
    planned = json.loads((home / "roomy" / "plan.json").read_text())["allocations"]["rollout"]
    assert (planned["spare_cache_tokens"], planned["spare_running"]) == (1024, 30)
    # a step in which no group has ended has none
    running = [record["metrics"].get("rollout/running", 0.0) for record in records(home / "roomy")]
    assert planned["running"] < max(running)


@pytest.mark.slow
def test_a_plan_that_would_deadlock_is_refused_with_its_circuit(home: Path) -> None:
    file = write_run(home, "circuit", RUNS["grpo"], {"steps": 1})
    finish(home, "plan", str(file), "--out", "circuit.json")
    plan = json.loads((home / "circuit.json").read_text())
    plan["orders"] = {device: list(reversed(turns)) for device, turns in plan["orders"].items()}
    (home / "circuit.json").write_text(json.dumps(plan))
    output = finish(home, "run", str(file), "--plan", "circuit.json", name="circuit", code=2).output()
    assert re.search(r"circuit|order", output), output
    assert "train" in output
    assert "rollout" in output
    assert not (home / "circuit").exists()


def test_a_dry_run_starts_nothing(home: Path) -> None:
    running = finish(home, "run", str(write_run(home, "dry", RUNS["grpo"], {"steps": 1})), "--dry-run", name="dry")
    output = running.output()
    assert "dry run: nothing was started" in output
    assert "rewards:score: reward" in output
    assert not (home / "dry").exists()


def test_a_trained_model_answers(home: Path) -> None:
    folder = ran(home, "grpo")
    output = finish(home, "generate", str(folder), "12+34=", "--max-new-tokens", "4").output()
    assert re.fullmatch(r"12\+34=.{0,4}\n?", output.strip("\n")), output
    several = finish(home, "generate", str(folder), "12+34=", "1+1=", "--n", "2", "--temperature", "1").output()
    assert several.count("'12+34=' -> ") == several.count("'1+1=' -> ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("run", ["grpo", "late", "late_apart"])
def test_eval_scores_a_checkpoint_without_training(home: Path, run: str) -> None:
    """The same score that the run itself gave these weights, in a directory of its own; asynchronous runs, too, are
    evaluated under the weights of their step. To rounding: its plan may divide the samples among other engines, and
    sums of parts round otherwise."""
    folder = ran(home, run)
    expected = next(record["metrics"] for record in records(folder, "eval") if record["step"] == STEPS)
    checkpoint = folder / "checkpoints" / f"step-{STEPS:06d}"
    for name in (f"{run}-eval", f"{run}-eval-2")[: 2 if run == "grpo" else 1]:
        finish(home, "eval", str(home / f"{run}.yaml"), "--checkpoint", str(checkpoint), name=name)
        (found,) = records(home / name, "eval")
        assert found["metrics"] == pytest.approx(expected, rel=1e-12)
        assert not records(home / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"calls": {"reward": {"fn": "absent:score"}}}, 2, r"can't find the module of 'absent:score'"),
        ({"models": {"actor": {"path": "torn"}}}, 2, r"torn/model\.safetensors is cut short"),
        ({"models": {"actor": {"path": "lacking"}}}, 3, r"worker [01]: .*lacking"),
        ({"calls": {"train": {"loss": {"terms": {"spoil": {"fn": "rewards:absent"}}}}}}, 2, r"defines no 'absent'"),
        ({"runtime": {"start_seconds": 0.05}}, 3, r"were not started within 0.05 s|not ready within 0.05 s"),
        ({"outputs": {"dir": "/proc/nowhere"}}, 2, r"the run directory /proc/nowhere can't be written to"),
    ],
)
def test_what_fails_before_the_first_step_is_said_once(
    home: Path, changes: dict[str, Any], code: int, says: str
) -> None:
    if not (home / "torn").exists():
        shutil.copytree(home / "model", home / "torn")
        os.truncate(home / "torn/model.safetensors", 20_000)
        shutil.copytree(home / "model", home / "lacking")
        tensors = load_file(home / "lacking/model.safetensors")
        save_file(dict([*tensors.items()][1:]), home / "lacking/model.safetensors")
    held = traces(home)
    name = f"bad-{abs(hash(says))}"
    run = start(home, "run", str(write_run(home, name, GRPO, {"steps": 1}, changes)), name=name)
    assert run.wait() == code, run.output()
    output = run.output()
    held.gone()
    assert "Traceback" not in output, output
    wrong = [line for line in output.splitlines() if re.search(says, line) and not line.startswith("ended")]
    assert len(wrong) == 1, output
