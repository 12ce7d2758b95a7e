"""Asynchronous runs on real processes in which tokens really get too old, and weight updates that fail."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.runs import finish, home, merged, records, start, write_run

pytest.importorskip("torch")
__all__ = ["home"]

STEPS = 7
SLOW = '''
import json, time
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [json.loads(line)["answer"] for line in (HERE / "train.jsonl").read_text().splitlines()][:120]
FIRST = next(row for row in ROWS[:8] if ROWS.count(row) == 1)

def score(text: str, answer: str, run: str, steps: int, seconds: float) -> float:
    """A group of the first ones is scored after so many steps, or seconds."""
    file, deadline = HERE / run / "metrics.jsonl", time.monotonic() + seconds
    late = answer == FIRST and file.exists()  # it does not yet where the function is tried before the run
    while late and time.monotonic() < deadline and file.read_text().count('"type":"step"') < steps:
        time.sleep(0.01)
    if late:
        (HERE / f"{run}-scored").open("a").write(f"{time.time()}\\n")
    return sum(map(int, text)) % 7 / 7 if text.isdigit() else 0.0

def select(reward: list[float]) -> list[float]:
    return [float(one == max(reward)) for one in reward]
'''
APART = {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}
BASE: dict[str, Any] = {
    "steps": STEPS,
    "staleness": 1,
    "batch": {"max_new_tokens": 32},
    "data": {"shuffle": False},
    "runtime": {"function_processes": 6},
    "calls": {"reward": {"fn": "slow:score", "timeout_seconds": 60}},
}
GRPO = merged(BASE, {"graph": "grpo", "params": {"group_size": 4, "lr": 3.0e-3}})
LATE = {"policy_gradient": {"off_policy": {"kind": "decoupled"}}}
AGAIN = {"calls": {"again": {"kind": "train", "model": "actor", "lr": 3.0e-3, "loss": {"terms": LATE}}}}
RAFT = merged(
    BASE,
    {"graph": "raft", "params": {"group_size": 4, "lr": 3.0e-3}, "allocation": APART},
    {"calls": {"select": {"fn": "slow:select", "args": None}}},
)
RUNS: dict[str, dict[str, Any]] = {
    "twice": merged(GRPO, AGAIN),
    "raft": RAFT,
    "drop": merged(GRPO, {"overdue": "drop", "allocation": APART}),
    "wait": merged(GRPO, {"overdue": "wait"}),
}
AGES = {"twice": 3, "raft": 4}
_done: dict[str, list[dict[str, Any]]] = {}


def steps_of(home: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run's steps; each is run once."""
    if name not in _done:
        (home / "slow.py").write_text(SLOW)
        args = {"run": name, "steps": AGES.get(name, 3), "seconds": 2.0 if name == "wait" else 40.0}
        finish(home, "run", str(write_run(home, name, RUNS[name], {"calls": {"reward": {"args": args}}})), name=name)
        _done[name] = records(home / name)
    return _done[name]


@pytest.mark.parametrize("name", ["twice", "raft"])
def test_tokens_beyond_the_bound_are_masked_in_every_loss_and_no_others(home: Path, name: str) -> None:
    """A step has masked tokens exactly where its oldest token is older than the bound, in each of its train calls."""
    steps = [record["metrics"] for record in steps_of(home, name)]
    assert max(step["staleness/max"] for step in steps) >= AGES[name]
    for step in steps:
        for call in ("train", "again") if name == "twice" else ("train",):
            assert (step[f"{call}/overdue"] > 0) == (step["staleness/max"] > 1), (call, step)
            assert (step[f"{call}/grad_norm"] > 0) == (step[f"{call}/overdue"] < 1)
    assert sum(step["train/overdue"] < 0.5 for step in steps) > STEPS / 2
    # the generator reads the trained weights in place in the one run, and a copy of them in the other
    update = "again/update_gap" if name == "twice" else "reallocate/update_gap"
    assert any(0 < step.get(update, 0.0) < 1e-3 for step in steps)


def test_overdue_groups_are_dropped(home: Path) -> None:
    steps = [record["metrics"] for record in steps_of(home, "drop")]
    assert max(step["staleness/max"] for step in steps) == 1
    assert sum(step["batch/dropped_groups"] for step in steps) > 0


def test_batches_wait_for_groups_that_would_be_overdue(home: Path) -> None:
    found = steps_of(home, "wait")
    assert max(record["metrics"]["staleness/max"] for record in found) == 1
    scored = [float(line) for line in (home / "wait-scored").read_text().split()]
    assert max(scored[:4]) < found[1]["time"]  # the late group of step 0 is of version 0


# --- weight updates that fail -----------------------------------------------------------------------------------------

BROKEN = '''
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent

def spoil(batch, outputs, run, how):
    """A loss term of 0 that makes every later weight update of this process fail in silence."""
    if (HERE / f"{run}-break").exists():
        from realgraph.runtime.generate.engine import TorchRolloutEngine
        from realgraph.runtime.train.engine import TorchTrainEngine

        held_parts = TorchTrainEngine.held_parts

        def forget(engine, parts):
            for _ in parts:
                pass

        @contextmanager
        def wrong(engine):
            with held_parts(engine) as parts:
                yield {name: part._replace(values=part.values * 1.2) for name, part in parts.items()}

        if how == "send":
            TorchTrainEngine.held_parts = wrong
        else:
            TorchRolloutEngine.prepare = forget
    return outputs.logprobs * 0.0
'''
SHARDED = {"train": {"sharding": "fsdp", "devices": 2}}
FAILED: dict[str, tuple[str, dict[str, Any]]] = {
    "late_send": ("send", merged(GRPO, {"staleness": 2, "allocation": APART})),
    "late_load": ("load", merged(GRPO, {"allocation": SHARDED})),
    "raft_send": ("send", merged(RAFT, {"staleness": 0})),
    "grpo_send": ("send", merged(GRPO, {"staleness": 0, "allocation": APART})),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_weight_update_that_fails_later_stops_the_run_with_both_figures(home: Path, name: str) -> None:
    how, config = FAILED[name]
    (home / "slow.py").write_text(SLOW)
    (home / "broken.py").write_text(BROKEN)
    terms = {"spoil": {"kind": "apply", "fn": "broken:spoil", "args": {"run": name, "how": how}}}
    calls = {"reward": {"args": {"run": name, "steps": 0, "seconds": 0.0}}, "train": {"loss": {"terms": terms}}}
    run = start(home, "run", str(write_run(home, name, config, {"steps": 1000, "calls": calls})), name=name)
    run.until_step(3)
    (home / f"{name}-break").touch()
    assert run.wait() == 3
    (line,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    where = "in step" if name == "grpo_send" else "after the weight update of step"
    call = "train" if name == "grpo_send" else "rollout"
    gap = r"the generator's log-probabilities are (\S+) nats away from the trainer's on average, 0\.001 are allowed"
    found = re.search(rf"call '{call}', worker [01]: {where} (\d+) {gap}", line)
    assert found, line
    assert abs(int(found[1]) - len(records(home / name))) <= 1
    assert float(found[2]) > 0.001
    for record in records(home / name):
        gaps = [value for metric, value in record["metrics"].items() if metric.endswith("_gap")]
        assert all(value < 0.001 for value in gaps)
    if name != "grpo_send":
        assert any("reallocate/update_gap" in record["metrics"] for record in records(home / name))
