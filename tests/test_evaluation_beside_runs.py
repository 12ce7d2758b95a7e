"""Real asynchronous runs that go on while engines evaluate, and one that could not."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.runs import GRPO, finish, home, merged, records, write_run

pytest.importorskip("torch")
__all__ = ["home"]

STEPS, SLOW_SECONDS = 6, 0.4
SLOW = f"""
import time
from pathlib import Path

from rewards import score as quick

HERE = Path(__file__).parent

def score(text: str, answer: str) -> float:
    if answer.startswith("held "):  # of an evaluation, which so takes long
        time.sleep({SLOW_SECONDS})
        return float(len(text) % 2)
    return quick(text, answer)
"""
RUN = merged(
    GRPO,
    {
        "steps": STEPS,
        "staleness": 1,
        "cluster": {"devices": 3},
        "allocation": {"rollout": {"first": 0, "devices": 2, "dp": 2}, "train": {"first": 2, "devices": 1}},
        "batch": {"max_new_tokens": 24},
        "calls": {"reward": {"fn": "slow:score", "timeout_seconds": 60}},
        "checkpoint": {"every": 2},
    },
)
EVAL: dict[str, Any] = {
    "every": 2,
    "data": {"path": "held.jsonl"},
    "n": 2,
    "k": [1, 2],
    "temperature": 1.0,
}


def write_held_out(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()][:6]
    held = [json.dumps({**row, "answer": f"held {row['answer']}"}) + "\n" for row in rows]
    (home / "held.jsonl").write_text("".join(held))
    (home / "slow.py").write_text(SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["engine", "interleaved"])
def test_training_goes_on_while_engines_evaluate_one_version(
    home: Path, mode: Literal["engine", "interleaved"]
) -> None:
    """Scores take seconds, during which steps end; workers refuse samples of other weights than those asked for."""
    write_held_out(home)
    finish(home, "run", str(write_run(home, mode, RUN, {"eval": {**EVAL, "on": mode}})), name=mode)
    lines = [json.loads(line) for line in (home / mode / "metrics.jsonl").read_text().splitlines()]
    evals = records(home / mode, "eval")
    found = [record["step"] for record in evals]
    assert found[0] == 0
    assert found[-1] == STEPS
    assert found == sorted(set(found))
    assert all(record["metrics"]["pass@1"] <= record["metrics"]["pass@2"] for record in evals)
    kinds = [line["type"] for line in lines if line["type"] in ("step", "eval")]
    assert kinds[0] == "step", "training has begun before the first evaluation has ended"
    steps = [record["metrics"] for record in records(home / mode)]
    assert max(step["staleness/max"] for step in steps) <= 2
    assert all(step.get("train/update_gap", 0.0) < 1e-3 for step in steps)


@pytest.mark.slow
def test_checkpoints_are_evaluated_from_their_files_while_training_goes_on(home: Path) -> None:
    """The worker refuses samples of other weights than the checkpoint's."""
    write_held_out(home)
    evaluated = {"eval": {**EVAL, "every": 0, "on": "checkpoint"}, "checkpoint": {"every": 4}, "steps": 16}
    finish(home, "run", str(write_run(home, "saved", RUN, evaluated)), name="saved")
    lines = [json.loads(line) for line in (home / "saved" / "metrics.jsonl").read_text().splitlines()]
    found = [record["step"] for record in records(home / "saved", "eval")]
    assert found[-1] == 16
    assert found == sorted(set(found))
    assert set(found) <= {4, 8, 12, 16}
    assert len(found) > 1, "none was evaluated while training went on"
    kinds = [line["type"] for line in lines if line["type"] in ("step", "eval")]
    assert kinds[: kinds.index("eval")].count("step") > found[0], "training went on meanwhile"
    assert all(record["metrics"]["pass@1"] <= record["metrics"]["pass@2"] for record in records(home / "saved", "eval"))
    steps = [record["metrics"] for record in records(home / "saved")]
    assert max(step["staleness/max"] for step in steps) <= 2
    assert all(step.get("train/update_gap", 0.0) < 1e-3 for step in steps)


def test_evaluations_of_checkpoints_that_are_not_there_are_refused(home: Path) -> None:
    write_held_out(home)
    changes = {"eval": {**EVAL, "on": "checkpoint"}, "checkpoint": {"every": 0, "minutes": 0, "keep": 1}}
    output = finish(home, "run", str(write_run(home, "unsaved", RUN, changes)), name="unsaved", code=2).output()
    assert "$.eval.on: no checkpoint is saved before the end of the run" in output
    assert "set checkpoint.every or checkpoint.minutes" in output
    assert "$.eval.every: eval.on: checkpoint evaluates whenever a checkpoint is saved" in output
    assert "$.checkpoint.keep: a checkpoint that waits for its evaluation is deleted" in output
    assert output.count("unsaved.yaml:") >= 3


def test_one_engine_can_not_be_set_aside(home: Path) -> None:
    write_held_out(home)
    alone = {"allocation": {"rollout": {"first": 0, "devices": 1, "dp": None}}}
    file = write_run(home, "alone", RUN, alone, {"eval": {**EVAL, "on": "engine"}})
    output = finish(home, "run", str(file), name="alone", code=2).output()
    assert "$.eval.on: 'rollout' has one engine, which can't be set aside" in output
    assert "alone.yaml:" in output
    assert "set eval.on to interleaved" in output
