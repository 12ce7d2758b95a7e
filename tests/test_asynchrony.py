"""Asynchronous runs on real processes in which tokens really get too old, and weight updates that fail."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audit import judge_run
from tests.runs import finish, home, merged, records, start, write_run
from tests.traces import processes_at

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
    "outputs": {"audit": True},
    "staleness": 1,
    "batch": {"max_new_tokens": 32},
    "data": {"shuffle": False},
    "runtime": {"function_processes": 6, "verify_weights": 1},
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
DROP, WAIT, ALLOW = ({"overdue": policy} for policy in ("drop", "wait", "allow"))
RUNS: dict[str, dict[str, Any]] = {
    "twice": merged(GRPO, AGAIN),
    "raft": RAFT,
    "drop": merged(GRPO, DROP, {"allocation": APART}),
    "drop_twice": merged(GRPO, AGAIN, DROP),
    "wait": merged(GRPO, WAIT),
    "wait_twice": merged(GRPO, AGAIN, WAIT, {"allocation": APART}),
    "allow": merged(GRPO, ALLOW),
    "allow_twice": merged(GRPO, AGAIN, ALLOW),
}
AGES = {"twice": 3, "raft": 4}
_done: dict[str, list[dict[str, Any]]] = {}


def steps_of(home: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run's steps; each is run once."""
    if name not in _done:
        (home / "slow.py").write_text(SLOW)
        args = {"run": name, "steps": AGES.get(name, 3), "seconds": 1.0 if name.startswith("wait") else 40.0}
        finish(home, "run", str(write_run(home, name, RUNS[name], {"calls": {"reward": {"args": args}}})), name=name)
        _done[name] = records(home / name)
    return _done[name]


@pytest.mark.slow
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
    update = "again/update_gap" if name == "twice" else "train/update_gap"
    assert any(0 < step.get(update, 0.0) < 1e-3 for step in steps)


def test_overdue_groups_are_dropped(home: Path) -> None:
    steps = [record["metrics"] for record in steps_of(home, "drop")]
    assert max(step["staleness/max"] for step in steps) == 1
    assert sum(step["batch/dropped_groups"] for step in steps) > 0


@pytest.mark.slow
def test_batches_wait_for_groups_that_would_be_overdue(home: Path) -> None:
    found = steps_of(home, "wait")
    assert max(record["metrics"]["staleness/max"] for record in found) == 1
    scored = [float(line) for line in (home / "wait-scored").read_text().split()]
    assert max(scored[:4]) < found[1]["time"]  # the late group of step 0 is of version 0


# --- what every loss has used -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_audit_shows_the_bound_in_every_loss(home: Path, name: str) -> None:
    """By what the trainers wrote of their losses, and not by what the scheduler meant: under `allow` it shows no bound.

    Shares of tokens by age are those of the metrics, under every policy; so is that of older ones, which losses have
    left out.
    """
    steps = steps_of(home, name)
    found = judge_run(home / name)
    assert found.problems == ()
    calls = ("train", "again") if "twice" in name else ("train",)
    assert set(found.ages) == set(calls)
    for call in calls:
        assert max(found.ages[call]) > 1 if "allow" in name else max(found.ages[call]) == 1, found.ages
        n_old = sum(n for age, n in found.left_out[call].items() if age > 1)
        assert (n_old > 0) == (name in ("twice", "raft")) or "allow" in name

        def tokens(metric: str, call: str = call) -> float:
            return sum(step["metrics"][f"{call}/{metric}"] * step["metrics"]["batch/new_tokens"] for step in steps)

        if name in ("twice", "raft"):
            assert n_old == pytest.approx(tokens("overdue"))
        both = Counter(found.ages[call]) + Counter(found.left_out[call])
        n_older = both.total() - both[0] - both[1]
        assert [tokens(f"age_{age}") for age in (0, 1, "older")] == pytest.approx([both[0], both[1], n_older], abs=1e-6)


LATER = '''
from dataclasses import replace

def later(batch, outputs):
    """A loss term of 0 that takes the trainer's age bound away from the next mini-batch on."""
    from realgraph.runtime.train.passes import ModelPasses

    fresh = ModelPasses._fresh

    def late(passes, *rest):
        passes.settings = replace(passes.settings, max_age=99)
        return fresh(passes, *rest)

    if fresh.__name__ != "late":
        ModelPasses._fresh = late
    return outputs.logprobs * 0.0
'''


@pytest.mark.slow
def test_the_audit_names_the_samples_of_a_trainer_with_another_bound(home: Path) -> None:
    """The scheduler knows nothing of it, and no metric tells: only the tokens of the loss do."""
    (home / "slow.py").write_text(SLOW)
    (home / "later.py").write_text(LATER)
    terms = {"later": {"kind": "apply", "fn": "later:later"}}
    args = {"run": "later", "steps": 3, "seconds": 40.0}
    calls = {"reward": {"args": args}, "train": {"loss": {"terms": terms}}}
    finish(home, "run", str(write_run(home, "later", GRPO, {"calls": calls})), name="later")
    found = judge_run(home / "later")
    assert found.problems and max(found.ages["train"]) >= 2
    for problem in found.problems:
        assert re.fullmatch(r"train of step \d: \d+ tokens of sample \d+ are [2-9] steps old, 1 are allowed", problem)


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

        local_parts = TorchTrainEngine.local_parts

        def forget(engine, parts):
            for _ in parts:
                pass

        @contextmanager
        def wrong(engine):
            """What others read is no longer what is trained."""
            for parameter in engine.model.parameters():
                parameter.data = parameter.data * 1.2
            with local_parts(engine) as parts:
                yield parts

        prepare = TorchRolloutEngine.prepare

        def scaled(engine, parts):
            prepare(engine, (part._replace(values=part.values * 1.2) for part in parts))

        if how == "send":
            TorchTrainEngine.local_parts = wrong
        elif how == "scale":
            TorchRolloutEngine.prepare = scaled
        else:
            TorchRolloutEngine.prepare = forget
    return outputs.logprobs * 0.0
'''
TWO_ENGINES = {"train": {"first": 0, "devices": 1}, "rollout": {"first": 0, "devices": 2, "dp": 2}}
SHARDED = {"train": {"sharding": "fsdp", "devices": 2}}
FAILED: dict[str, tuple[str, dict[str, Any]]] = {
    "late_send": ("send", merged(GRPO, {"staleness": 2, "allocation": APART})),
    "late_load": ("load", merged(GRPO, {"allocation": SHARDED, "runtime": {"verify_weights": 0}})),  # or that finds it
    # the one of two engines that is on the trainer's worker
    "late_load_one": ("load", merged(GRPO, {"allocation": TWO_ENGINES, "runtime": {"verify_weights": 0}})),
    "raft_send": ("send", merged(RAFT, {"staleness": 0})),
    "grpo_send": ("send", merged(GRPO, {"staleness": 0, "allocation": APART})),
    "grpo_scale_one": (
        "scale",
        merged(GRPO, {"staleness": 0, "allocation": TWO_ENGINES, "runtime": {"verify_weights": 0}}),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILED)
def test_a_weight_update_that_fails_later_stops_the_run_with_its_engine_and_both_figures(home: Path, name: str) -> None:
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
    where = {"late": "(?:in|after the weight update of) step", "grpo": "in step"}.get(
        name[:4], "after the weight update of step"
    )
    call = "rollout" if name == "raft_send" else "train"  # a stream's trainer looks before it trains
    one = r"the generator's log-probabilities"  # of a train call's own samples
    engine = r"the log-probabilities of the engine of worker (\d), which has the weights of version \d+,"
    gap = r"are (\S+) nats away from the trainer's on average, 0\.001 are allowed"
    found = re.search(rf"call '{call}', worker [01]: {where} (\d+) (?:{one}|{engine}) {gap}", line)
    assert found, line
    assert abs(int(found[1]) - len(records(home / name))) <= 1
    assert float(found[3]) > 0.001
    if "after" in line or name.startswith("grpo"):
        assert found[2] == {"late_load_one": "0", "grpo_scale_one": "0", "late_load": found[2]}.get(name, "1")
    for record in records(home / name):
        gaps = [value for metric, value in record["metrics"].items() if metric.endswith("_gap")]
        assert all(value < 0.001 for value in gaps)
    if not name.startswith("grpo"):
        update = "train/update_gap" if name.startswith("late") else "reallocate/update_gap"
        assert any(update in record["metrics"] for record in records(home / name))


# --- workers that end in an update ------------------------------------------------------------------------------------

ENDED = '''
import os, signal
from pathlib import Path

HERE = Path(__file__).parent

def spoil(batch, outputs, run):
    """A loss term of 0 after which a worker is killed as soon as new weights are there to be read."""
    if (HERE / f"{run}-break").exists():
        from realgraph.runtime.parallel.mapped import MappedRoute

        hear = MappedRoute._hear

        def killing(route, first):
            os.kill(int((HERE / f"{run}-break").read_text()), signal.SIGKILL)
            hear(route, first)

        MappedRoute._hear = killing
    return outputs.logprobs * 0.0
'''


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1], ids=["trainer", "engine"])
def test_a_worker_that_is_killed_in_an_update_is_named_and_training_loses_no_step(home: Path, worker: int) -> None:
    """The trained role lies on worker 0 alone: without it the newest checkpoint is what is left."""
    name = f"ended_{worker}"
    (home / "slow.py").write_text(SLOW)
    (home / "ended.py").write_text(ENDED)
    terms = {"spoil": {"kind": "apply", "fn": "ended:spoil", "args": {"run": name}}}
    calls = {"reward": {"args": {"run": name, "steps": 0, "seconds": 0.0}}, "train": {"loss": {"terms": terms}}}
    config = merged(GRPO, {"allocation": APART, "checkpoint": {"every": 1000}})
    run = start(home, "run", str(write_run(home, name, config, {"steps": 1000, "calls": calls})), name=name)
    run.until_step(2)
    (home / f"{name}-pid").write_text(str(run.workers()[worker]))
    (home / f"{name}-pid").rename(home / f"{name}-break")
    assert run.wait() == 3
    (line,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    assert re.search(rf"worker {worker} was lost .*: was killed by SIGKILL", line), line
    assert processes_at(home) == []
    saved = [int(folder.name.removeprefix("step-")) for folder in (home / name / "checkpoints").glob("step-*")]
    assert saved == ([] if worker == 0 else [len(records(home / name))])
