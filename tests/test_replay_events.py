"""`realgraph replay-events`: what it shows of real and simulated runs, and what it refuses."""

import random
import re
from pathlib import Path

import pytest

from realgraph.commands.replay_events import replay_events_command
from realgraph.graphs.errors import ConfigError
from realgraph.runtime.commands.actions import StepEnded, WorkerLost
from realgraph.runtime.job.rotation import older
from tests.replays import LoggedScheduler, replayed
from tests.runs import GRPO, finish, home, records, write_run
from tests.shapes import Shape, job_of
from tests.simulator import Simulator

__all__ = ["home"]


def test_a_real_run_and_its_resumed_life_replay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(home, "logged", GRPO, {"steps": 2})
    finish(home, "run", str(file), name="logged")
    folder = home / "logged"
    _, events = replayed(folder / "events.log")
    ended = [action.step for one in events for action in one.actions if isinstance(action, StepEnded)]
    assert ended == [record["step"] for record in records(folder, "step")] == [0, 1]
    replay_events_command(folder, 5)
    shown = capsys.readouterr().out
    assert shown.startswith("run 'grpo', workers 0, 1: from its start\n"), shown
    assert f"{len(events)} events replayed: the same commands as in the run; the last 5:" in shown
    assert shown.rstrip().endswith("the end: finished")
    finish(home, "run", "--resume", str(folder), "steps=3", name="logged")
    replay_events_command(folder / "events.log", 1)
    assert f"from the checkpoint {folder}/checkpoints/step-000002 of 2 steps" in capsys.readouterr().out
    assert [one.actions for one in replayed(older(folder / "events.log"))[1]] == [one.actions for one in events]


def stalled(path: Path) -> None:
    """The log of a run that has stopped in the middle of a step."""
    shape = Shape()
    scheduler = LoggedScheduler(path, 10**9, job_of(shape), range(2))
    simulator = Simulator(shape, random.Random(0), scheduler)
    simulator.silent = lambda worker, command: getattr(command, "call", "") == "train" and worker == 1
    while simulator.events or not simulator.actions:
        simulator.run(max_events=simulator.n_events + 1)
    scheduler.log.close()


def test_a_stall_says_what_is_awaited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.log"
    stalled(path)
    replay_events_command(tmp_path, 3)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" +[\d.]+ s  train has ended on worker 0 \(task \d+\) -> nothing", lines[-3]), lines
    assert lines[-2] == "0 steps complete; awaited:"
    assert re.fullmatch(r"  train of step 0 \(task \d+\) on worker 1, since [\d.]+ s, until [\d.]+ s .*", lines[-1])


def test_a_failure_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = LoggedScheduler(tmp_path / "events.log", 10**9, job_of(Shape()), range(2))
    scheduler.start(0.0)
    scheduler.on(WorkerLost(1, "killed by signal 9"), 1.5)
    scheduler.log.close()
    replay_events_command(tmp_path, 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "1.500 s  worker 1 was lost: killed by signal 9 -> the end: worker 1 was lost while it ran rollout" in last


def test_what_is_no_log_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    with pytest.raises(ConfigError, match=r"events\.log: no such file"):
        replay_events_command(tmp_path, 1)
    path.write_text("{}\n" * 100)
    with pytest.raises(ConfigError, match=r"events\.log: record 1 \(byte 0\): does not begin like one"):
        replay_events_command(path, 1)
    stalled(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"events\.log: record \d+ \(byte [\d,]+\): is not what was written"):
        replay_events_command(path, 1)
