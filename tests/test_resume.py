"""`realgraph run --resume`: a run goes on exactly as if it had never stopped, and as no other run."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.running import CHANGEABLE, prepare_resume
from tests.runs import BASE, GRPO, Running, finish, home, merged, numbers, records, start, stop, write_run
from tests.traces import traces

__all__ = ["home"]

PPO: dict[str, Any] = {
    "graph": "ppo",
    "params": {"actor_lr": 3.0e-3, "critic_lr": 3.0e-3, "minibatches": 2, "group_size": 2},
    "calls": {
        "reward": {"fn": "rewards:score"},
        "advantage": {"steps": {"kl_penalty": {"coef": {"init": 0.1, "target": 0.02, "horizon": 100}}}},
        "train_actor": {"optimizer": {"schedule": "linear", "warmup_steps": 2}},
    },
    "eval": {"every": 2, "data": {**BASE["data"], "path": "test.jsonl"}},
}
STEPS = 6


def copied(home: Path, name: str, target: Path, step: int) -> Path:
    """A copy of a run directory as it was when the checkpoint of `step` was its newest."""
    shutil.copytree(home / name, target, symlinks=True)
    for path in (target / "checkpoints").glob("step-??????"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return target


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A PPO run with every state there is: two roles, an adaptive coefficient, a schedule, evaluations."""
    file = write_run(home, "whole", PPO, {"steps": STEPS, "checkpoint": {"every": 1, "keep": 9}})
    finish(home, "run", str(file), name="whole")
    return home / "whole"


@pytest.mark.parametrize("step", [2, 3], ids=["after an evaluation", "before one"])
def test_a_resumed_run_ends_with_the_same_numbers_and_the_same_bytes(whole: Path, tmp_path: Path, step: int) -> None:
    """An evaluation brings the generator's copy up to date before the checkpoint; else the next step does."""
    folder = copied(whole.parent, "whole", tmp_path / "moved", step)
    (folder / "metrics.jsonl").unlink()
    finish(whole.parent, "run", "--resume", str(folder), name="whole")
    expected = numbers(whole)
    assert numbers(folder) == {number: expected[number] for number in range(step, STEPS)}
    evals = {record["step"]: record["metrics"] for record in records(whole, "eval")}
    assert {record["step"]: record["metrics"] for record in records(folder, "eval")} == {
        number: metrics for number, metrics in evals.items() if number > step
    }
    last = f"checkpoints/step-{STEPS:06d}"
    files = [path.relative_to(whole) for path in (whole / last).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "state.json"}
    for file in files:
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


def test_what_a_resumed_run_may_change(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    allowed = {
        "name": "another",
        "eval.every": 3,
        "checkpoint.keep": 5,
        "outputs.transcripts": 1,
        "runtime.lost_after_seconds": 99,
    }
    assert {name.partition(".")[0] for name in allowed} | {"steps"} == set(CHANGEABLE)
    prepared = prepare_resume(folder, [f"{name}={value}" for name, value in allowed.items()])
    assert (prepared.job.name, prepared.job.runtime.lost_after_seconds) == ("another", 99)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("seed=4", "seed"),
        ("batch.groups=4", "batch"),
        ("data.shuffle=false", "data"),
        ("params.actor_lr=1e-5", "params"),
        ("calls.train_actor.lr=1e-5", "graph"),
        ("staleness=1", "staleness"),
        ("cluster.devices=1", "cluster"),
        ("steps=9", "steps"),
    ],
)
def test_what_would_make_it_another_run_is_refused(whole: Path, tmp_path: Path, change: str, where: str) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    with pytest.raises(ConfigError) as refused:
        prepare_resume(folder, [change])
    texts = [str(problem) for problem in refused.value.problems]
    assert any("can't change" in text and where in text for text in texts), texts


def test_what_can_not_be_resumed_says_why(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run lies here"):
        prepare_resume(tmp_path, [])
    folder = copied(whole.parent, "whole", tmp_path / "bare", 0)
    with pytest.raises(ConfigError, match="no checkpoint to go on from"):
        prepare_resume(folder, [])
    job = (folder / "job.json").read_text()
    (folder / "job.json").write_text(re.sub(r'("format": )\d', r"\g<1>2", job))
    with pytest.raises(ConfigError, match="plan has format 2; this version reads format 4"):
        prepare_resume(folder, [])
    (folder / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="the run can't be read"):
        prepare_resume(folder, [])
    folder = copied(whole.parent, "whole", tmp_path / "torn", 2)
    (folder / "checkpoints/step-000002/state.json").write_text("{")
    run = finish(whole.parent, "run", "--resume", str(folder), name="whole", code=3)
    assert "step-000002 has no readable state" in run.output()
    assert "Traceback" not in run.output()


def test_a_run_directory_belongs_to_one_run(home: Path) -> None:
    file = write_run(home, "one", GRPO, {"steps": 100_000, "checkpoint": {"every": 1}})
    held = traces(home)
    run = start(home, "run", str(file), name="one")
    try:
        run.until_step(2)
        for argv in (["run", str(file)], ["run", "--resume", str(home / "one")]):
            assert "another run is writing to" in finish(home, *argv, name="one", code=2).output()
        run.interrupt()
        assert run.wait() == 130
    finally:
        stop(run)
    held.gone()
    assert "holds a run already" in finish(home, "run", str(file), name="one", code=2).output()
    done = records(home / "one")[-1]["step"] + 1
    for more in (1, 2):  # the second time from where the first one ended, whose length it keeps
        steps = [f"steps={done + 1}"] if more == 1 else []
        finish(home, "run", "--resume", str(home / "one"), *steps, name="one")
    assert [record["first_step"] for record in records(home / "one", "start")] == [0, done, done + 1]
    assert [record["step"] for record in records(home / "one")] == list(range(done + 1))
    assert not list((home / "one/checkpoints").glob("*.partial"))
    assert merged(GRPO)["graph"] in (home / "one/config.yaml").read_text()


@pytest.mark.parametrize("seed", [0])
def test_any_ends_at_any_moment_change_nothing(home: Path, seed: int) -> None:
    """Kills of all sorts at random moments, also while a checkpoint is written: the end is that of an untouched run."""
    rng = random.Random(seed)
    long = {"steps": 16, "checkpoint": {"every": 1}, "eval": {**PPO["eval"], "every": 4}}
    finish(home, "run", str(write_run(home, "untouched", GRPO, long)), name="untouched")
    file, folder = write_run(home, "hunted", GRPO, long), home / "hunted"
    last = "checkpoints/step-000016/actor/model.safetensors"
    for _ in range(4):
        if (folder / last).exists():
            break
        resumes = any(folder.glob("checkpoints/step-??????"))
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)
        held = traces(home)
        run = start(home, "run", *(("--resume", str(folder)) if resumes else (str(file),)), name="hunted")
        run.until(lambda run=run: len(run.workers()) == 2, "workers")  # type: ignore[misc]
        time.sleep(rng.uniform(0.2, 1.5))
        end(run, rng.choice(["group", "worker", "interrupt", "interrupt twice"]))
        assert "Traceback" not in run.output(), run.output()
        held.gone()
    finish(home, "run", "--resume", str(folder), name="hunted")
    assert numbers(folder) == numbers(home / "untouched")
    assert (folder / last).read_bytes() == (home / "untouched" / last).read_bytes()


def end(run: Running, how: str) -> None:
    """End a run that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        match how:
            case "group":
                os.killpg(run.pid, signal.SIGKILL)
            case "worker":
                for pid in list(run.workers().values())[:1]:
                    os.kill(pid, signal.SIGKILL)
            case _:
                run.interrupt()
                if how == "interrupt twice":
                    run.interrupt()
    run.wait()
