"""`realgraph run --resume` after ends of every kind: a directory is one run's, and what was killed changes nothing."""

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from realgraph.commands.run import RunOptions, run_command
from realgraph.graphs.errors import ConfigError
from realgraph.runtime.job.run_folder import RunFolder, exclusive
from tests.runs import BASE, GRPO, Running, finish, home, merged, numbers, records, start, stop, write_run
from tests.traces import traces

__all__ = ["home"]


@pytest.mark.slow
def test_a_run_directory_belongs_to_one_run(home: Path) -> None:
    file = write_run(home, "one", GRPO, {"steps": 100_000, "checkpoint": {"every": 1}})
    held = traces(home)
    run = start(home, "run", str(file), name="one")
    try:
        run.until_step(2)
        for argv in (["run", str(file)], ["run", "--resume", str(home / "one")]):
            refused = finish(home, *argv, name="one", code=2).output()
            assert "$.outputs.dir: another run is writing to" in refused
            assert ("one.yaml:1: " in refused) == (argv[1] != "--resume")
        run.interrupt()
        assert run.wait() == 130
    finally:
        stop(home)
    held.gone()
    refused = finish(home, "run", str(file), name="one", code=2).output()
    assert "one.yaml:1: $.outputs.dir: " in refused and "holds a run already" in refused
    done = records(home / "one")[-1]["step"] + 1
    for more in (1, 2):  # the second time from where the first one ended, whose length it keeps
        steps = [f"steps={done + 1}"] if more == 1 else []
        finish(home, "run", "--resume", str(home / "one"), *steps, name="one")
    assert [record["first_step"] for record in records(home / "one", "start")] == [0, done, done + 1]
    assert [record["step"] for record in records(home / "one")] == list(range(done + 1))
    assert not list((home / "one/checkpoints").glob("*.partial"))
    assert merged(GRPO)["graph"] in (home / "one/config.yaml").read_text()


def test_a_taken_directory_is_refused_before_the_search_for_a_plan(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("a plan was searched for")

    monkeypatch.setattr("realgraph.run.running.plan_for", searched)
    file = write_run(home, "taken", GRPO)
    (home / "taken").mkdir()
    (home / "taken/job.json").touch()
    (home / "taken/metrics.jsonl").write_text('{"type":"start"}\n')
    with pytest.raises(ConfigError, match=r"outputs\.dir: .* holds a run already"):
        run_command(file, (), RunOptions())
    with (
        exclusive(RunFolder(home / "taken")),
        pytest.raises(ConfigError, match=r"outputs\.dir: another run is writing"),
    ):
        run_command(file, (), RunOptions())
    for options in (RunOptions(dry_run=True), RunOptions(no_train=True)):  # they write nothing there
        with pytest.raises(AssertionError):
            run_command(file, (), options)


@pytest.mark.parametrize("seed", [0])
def test_any_ends_at_any_moment_change_nothing(home: Path, seed: int) -> None:
    """Kills of all sorts at random moments, also while a checkpoint is written: the end is that of an untouched run."""
    rng = random.Random(seed)
    long = {
        "steps": 16,
        "checkpoint": {"every": 1},
        "eval": {"every": 4, "data": {**BASE["data"], "path": "test.jsonl"}},
    }
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
