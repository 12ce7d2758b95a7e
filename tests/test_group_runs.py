"""Real runs in which a function leaves samples of groups out: what trainers get, what is made again, and resumes."""

import contextlib
import json
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audit import judge_run
from tests.runs import GRPO, copy_home, finish, home, numbers, records, start, write_run
from tests.traces import traces

pytest.importorskip("torch")
__all__ = ["home"]

FILTERS = '''
import json
from pathlib import Path

def better(reward: list[float]) -> list[bool]:
    """All but the worst of a group, where two are better."""
    kept = [one > min(reward) for one in reward]
    return kept if sum(kept) >= 2 else [True] * len(reward)

def good(reward: float) -> bool:
    return reward > 0.2

def scored(text: str, answer: str) -> dict:
    """No score for every third text: such samples are left out."""
    if sum(map(ord, text)) % 3 == 0:
        raise ValueError(f"no score for {text!r}")
    return {"reward": len(text) / 9 + sum(map(ord, text)) % 7 / 7, "keep": True}

def noted(batch, running, run):
    """Writes down what a training step works on; nothing of what is tried before the run."""
    if len(set(batch.groups)) == 8:
        told = {"groups": batch.groups, "rewards": batch.sample_keys["reward"].tolist(), "advantages": running.tolist()}
        with (Path(__file__).parent / f"{run}.jsonl").open("a") as file:
            file.write(json.dumps(told) + chr(10))
    return running
'''
KEEP: dict[str, Any] = {"kind": "function", "reads": ["reward"], "writes": {"keep": "sample bool"}}
BETTER = {"calls": {"filter": {**KEEP, "fn": "filters:better", "over": "group"}}}
GOOD = {"calls": {"filter": {**KEEP, "fn": "filters:good"}}}
SCORED = {
    "calls": {
        "reward": {
            "fn": "filters:scored",
            "writes": {"reward": "sample float32", "keep": "sample bool"},
            "on_error": "score",
        }
    }
}
APART = {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}
LAST = "checkpoints/step-000006/actor"


@pytest.fixture(scope="module")
def filtering(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with functions that leave samples out."""
    own = copy_home(home, tmp_path_factory.mktemp("filtering") / "home")
    (own / "filters.py").write_text(FILTERS)
    return own


def noting(run: str) -> dict[str, Any]:
    """An advantage whose last step writes down what it gets."""
    step = {"kind": "apply", "fn": "filters:noted", "args": {"run": run}}
    return {"calls": {"advantage": {"steps": {"noted": step}}}}


def batches(home: Path, run: str) -> Iterator[dict[int, list[tuple[float, float]]]]:
    """group -> (reward, advantage) of each of its samples, of every batch."""
    for line in (home / f"{run}.jsonl").read_text().splitlines():
        told = json.loads(line)
        found: dict[int, list[tuple[float, float]]] = {}
        for group, reward, advantage in zip(told["groups"], told["rewards"], told["advantages"], strict=True):
            found.setdefault(group, []).append((reward, advantage))
        yield found


@pytest.mark.slow
def test_a_run_of_unequal_groups_trains_what_is_left_and_resumes_to_the_last_bit(filtering: Path) -> None:
    long = {"steps": 6, "checkpoint": {"every": 1, "keep": 9}, "outputs": {"audit": True}}
    finish(filtering, "run", str(write_run(filtering, "whole", GRPO, BETTER, long, noting("whole"))), name="whole")
    steps = [record["metrics"] for record in records(filtering / "whole")]
    assert all(step["batch/samples"] == 32 - step["batch/dropped_samples"] for step in steps)
    assert all(step["batch/groups"] == 8 and step["batch/dropped_groups"] == 0 for step in steps)
    assert sum(step["batch/dropped_samples"] for step in steps) > 0
    assert all(step["filter/keep"] == step["batch/samples"] / 32 for step in steps)
    sizes = set[int]()
    for step, groups in zip(steps, batches(filtering, "whole"), strict=True):
        assert sum(map(len, groups.values())) == step["batch/samples"]
        for own in groups.values():
            rewards = [reward for reward, _ in own]
            mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
            expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
            assert [advantage for _, advantage in own] == pytest.approx(expected, abs=1e-4)
            sizes.add(len(own))
    assert len(sizes) > 1 and min(sizes) >= 2
    assert judge_run(filtering / "whole").problems == ()

    held = traces(filtering)
    file = write_run(filtering, "cut", GRPO, BETTER, long, noting("cut"))
    run = start(filtering, "run", str(file), name="cut")
    run.until_step(3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    held.gone()
    finish(filtering, "run", "--resume", str(filtering / "cut"), name="cut")
    assert numbers(filtering / "cut") == numbers(filtering / "whole")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (filtering / "cut" / LAST / name).read_bytes() == (filtering / "whole" / LAST / name).read_bytes()
    assert judge_run(filtering / "cut").problems == ()


@pytest.mark.parametrize(("staleness", "name"), [(0, "good"), (2, "scored")])
def test_groups_with_too_few_samples_are_made_up_for(filtering: Path, staleness: int, name: str) -> None:
    more = {"steps": 5, "outputs": {"audit": True}, "staleness": staleness, "allocation": APART}
    file = write_run(filtering, name, GRPO, GOOD if name == "good" else SCORED, more)
    finish(filtering, "run", str(file), name=name)
    steps = [record["metrics"] for record in records(filtering / name)]
    assert len(steps) == 5
    assert all(step["batch/groups"] == 8 for step in steps)
    assert all(16 <= step["batch/samples"] == 32 - step["batch/dropped_samples"] for step in steps)
    assert sum(step["batch/dropped_groups"] for step in steps) > 0
    assert sum(step["batch/dropped_samples"] for step in steps) > 0
    assert judge_run(filtering / name).problems == ()
    if name == "scored":
        assert any(step["reward/failed"] > 0 for step in steps)
        assert all(step["reward/failed"] == pytest.approx(1 - step["reward/keep"]) for step in steps)


def test_what_is_measured_of_groups_counts_for_the_step_that_trains_them(filtering: Path) -> None:
    """Two steps ahead of training, groups are scored long before, and not in the order in which they are trained."""
    more = {"steps": 6, "staleness": 2, "allocation": APART}
    finish(filtering, "run", str(write_run(filtering, "ahead", GRPO, more, noting("ahead"))), name="ahead")
    steps = [record["metrics"] for record in records(filtering / "ahead")]
    for step, groups in zip(steps, batches(filtering, "ahead"), strict=True):
        rewards = [reward for own in groups.values() for reward, _ in own]
        assert len(rewards) == step["batch/samples"] == 32
        assert step["reward/reward"] == pytest.approx(statistics.fmean(rewards))
        assert step["rollout/new_tokens"] == step["batch/new_tokens"] / 32
    assert len({step["reward/reward"] for step in steps}) > 1
