"""A real asynchronous run whose engines are killed: new processes take their places, and generate under the newest
weights."""

import os
import re
import signal
from pathlib import Path

import pytest

from benchmarks.audit import judge_run
from realgraph.commands.replay_events import replay_events_command
from realgraph.commands.status import _lines
from realgraph.runtime.commands.actions import EngineJoined, Send
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.event_log import Replay
from realgraph.runtime.master.status import RunStatus, read_status
from realgraph.runtime.wire.protocol import Done, Generated, Reallocate, Submit
from tests.host_runs import Hosts
from tests.runs import Running, home, merged, records, start, write_run
from tests.test_engine_loss_runs import KEEPING, RUN, SLOW, holding, lose_engine, until_still
from tests.test_expert_runs import write_mixture

pytest.importorskip("torch")
__all__ = ["home"]

REPLACED = merged(RUN, {"rollout": {"replacements": 3}, "runtime": {"verify_weights": 1}})


@pytest.mark.slow
def test_a_new_process_takes_the_place_of_an_engine_that_is_killed(home: Path) -> None:
    """Twice the same one, then the other, which leaves none of those that the run began with."""
    (home / "slow.py").write_text(SLOW)
    running = start(home, "run", str(write_run(home, "back", REPLACED)), name="back", special=KEEPING)
    running.until_step(3)
    for n, victim in enumerate((0, 0, 1), 1):
        lose_engine(home, running, victim)
        until_replaced(running, n)
        assert f"has taken the place of worker {victim}: the run has 2 of 2 engines" in running.output()
        running.until_step(len(records(home / "back")) + 5)
    lose_engine(home, running, 1)
    running.until(lambda: "all 3 of rollout.replacements were made" in running.output(), "the last loss")
    running.until_step(len(records(home / "back")) + 2)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130, running.output()
    steps = records(home / "back")
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert {record["metrics"]["rollout/engines"] for record in steps} == {1.0, 2.0}
    assert all(record["metrics"].get("train/update_gap", 0.0) < 1e-3 for record in steps)
    assert judge_run(home / "back").problems == ()
    assert_used(home / "back")


@pytest.mark.slow
def test_an_engine_that_stands_still_is_killed_and_replaced(home: Path) -> None:
    """It wakes up no more; the status says what has become of it."""
    (home / "slow.py").write_text(SLOW)
    parts = merged(REPLACED, {"runtime": {"lost_after_seconds": 10.0, "heartbeat_seconds": 0.2}})
    running = start(home, "run", str(write_run(home, "still", parts)), name="still", special=KEEPING)
    running.until_step(3)
    before = running.workers()[1]
    lose_engine(home, running, 1, signal.SIGSTOP)
    until_replaced(running, 1)
    assert "worker 1 was lost: has not been heard of for" in running.output()
    assert running.workers()[1] != before
    running.until(lambda: statuses(home / "still")[0].replaced == (1,), "its status")
    running.until_step(len(records(home / "still")) + 5)
    status, lines = statuses(home / "still")
    assert (status.lost, status.replaced) == ((), (1,))
    assert "a new process is in the place of worker 1" in lines
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130, running.output()
    assert judge_run(home / "still").problems == ()
    assert any(isinstance(one.event, EngineJoined) for one in Replay(home / "still" / "events.log").events())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "interrupt"), [({"sharding": "fsdp"}, "keep_kv"), ({"tp": 2}, "wait")], ids=["fsdp", "tp"]
)
def test_trainers_that_divide_the_weights_bring_them_together(
    home: Path, train: dict[str, object], interrupt: str
) -> None:
    """At every update all weights of the new process have the checksums of theirs, or the run ends."""
    (home / "slow.py").write_text(SLOW)
    engines, trainers = RUN["allocation"]["rollout"], {"first": 2, "devices": 2, **train}
    several = {"cluster": {"devices": 4}, "allocation": {"rollout": engines, "train": trainers}}
    parts = merged(REPLACED, several, {"rollout": {"interrupt": interrupt}})
    name = f"divided-{interrupt}"
    running = start(home, "run", str(write_run(home, name, parts)), name=name, special=KEEPING)
    running.until_step(2)
    lose_engine(home, running, 0)
    until_replaced(running, 1)
    running.until_step(len(records(home / name)) + 5)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130, running.output()
    fetched = [
        one.command
        for replayed in Replay(home / name / "events.log").events()
        for one in replayed.actions
        if isinstance(one, Send) and one.worker == 0 and isinstance(one.command, Reallocate) and one.command.joined
    ]
    assert len(fetched) >= 3
    assert judge_run(home / name).problems == ()
    gaps = [record["metrics"].get("train/update_gap", 0.0) for record in records(home / name)]
    assert max(gaps) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "interrupt"),
    [({"dp": 2, "tp": 2}, "recompute"), ({"dp": 2, "pp": 2}, "keep_kv"), ({"dp": 4, "ep": 2}, "wait")],
    ids=["tp", "pp", "ep"],
)
def test_an_engine_of_several_workers_is_replaced_whole(home: Path, cut: dict[str, int], interrupt: str) -> None:
    """Whichever of its workers is killed, with ep either of two that take groups. At every update the parts of each new
    process have the checksums of the trainers', or the run ends."""
    (home / "slow.py").write_text(SLOW)
    allocation = {"rollout": {"first": 0, "devices": 4, **cut}, "train": {"first": 4, "devices": 2}}
    parts = merged(REPLACED, {"cluster": {"devices": 6}, "allocation": allocation})
    if "ep" in cut:
        write_mixture(home)
        parts = merged(parts, {"models": {"actor": {"path": "moe"}}})
    name = f"several-{interrupt}"
    file = write_run(home, name, parts, {"rollout": {"interrupt": interrupt}})
    running = start(home, "run", str(file), name=name, special=KEEPING)
    running.until_step(2)
    for n, victim in enumerate((1, 3), 1):
        lose_engine(home, running, victim)
        until_replaced(running, n)
        running.until_step(len(records(home / name)) + 4)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130, running.output()
    assert judge_run(home / name).problems == ()
    steps = records(home / name)
    assert {record["metrics"]["rollout/engines"] for record in steps} <= {1.0, 2.0}
    assert steps[-1]["metrics"]["rollout/engines"] == 2.0
    assert max(record["metrics"].get("train/update_gap", 0.0) for record in steps) < 1e-3
    replay_events_command(home / name, 3)


def statuses(folder: Path) -> tuple[RunStatus, list[str]]:
    """The status that a run which lives has written last, and how that is shown."""
    status = read_status(RunFolder(folder).status)
    assert status is not None
    return status, list(_lines(status, status.time))


def until_replaced(running: Running, n: int) -> None:
    """So many new processes are ready."""
    running.until(
        lambda: len(re.findall("ha(s|ve) taken the place of worker", running.output())) == n, "the new process"
    )


def assert_used(folder: Path) -> None:
    """By the log of its events, which replays to the very commands that it gave: each new process first got weights,
    those that the trainer had then, and groups only after that."""
    process, version, moved = dict[int, int](), dict[int, int](), dict[int, Reallocate]()
    n_updates, n_made, newest = 0, 0, 0
    for replayed in Replay(folder / "events.log").events():
        match replayed.event:
            case EngineJoined(workers=workers, process=number):
                process |= dict.fromkeys(workers, number)
                version |= dict.fromkeys(workers, 0)
            case Done(worker=worker, task=task) if task in moved and worker in moved[task].joined:
                version[worker] = moved[task].version
                n_updates += 1
            case Done(call="train"):
                newest += 1
            case Generated(worker=worker, samples=samples) if worker in process:
                n_made += len(samples)
        for action in replayed.actions:
            match action:
                case Send(worker=worker, command=Reallocate() as command):
                    assert command.version == newest
                    assert command.joined == {one: process[one] for one in command.receivers if one in process}
                    moved[command.task] = command
                case Send(worker=worker, command=Submit() as command) if worker in process:
                    assert version[worker] >= command.version > 0
    assert process == {0: 2, 1: 1}
    assert n_updates >= 12
    assert n_made > 20
    replay_events_command(folder, 3)


@pytest.mark.slow
def test_an_engine_on_another_host_is_replaced_while_that_host_is_there(home: Path) -> None:
    """That host does not see the run directory, so the new process's log stays there, too."""
    (home / "slow.py").write_text(SLOW)
    engines = {"rollout": {"first": 1, "devices": 2, "dp": 2}, "train": {"first": 0, "devices": 1}}
    parts = merged(REPLACED, {"allocation": engines, "cluster": {"nodes": 3, "devices": 1}})
    hosts = Hosts(home, parts, names="abc", apart="bc", limits=KEEPING.limits, special=KEEPING)
    running = hosts.running
    try:
        hosts.at_step(3)
        before = running.workers()[2]
        lose_engine(home, running, 2)
        until_replaced(running, 1)
        running.until_step(len(records(home / "run")) + 5)
        assert running.workers()[2] != before
        (name,) = (name for name, one in hosts.agents.items() if "starting worker 2 again" in one.output())
        assert records(home / "run")[-1]["metrics"]["rollout/engines"] == 2.0
        with holding(home):
            until_still(running)
            os.kill(hosts.agents[name].pid, signal.SIGKILL)
            running.until(lambda: f"worker 2 stays empty: host {name}" in running.output(), "the loss of its host")
        running.until_step(len(records(home / "run")) + 3)
        assert records(home / "run")[-1]["metrics"]["rollout/engines"] == 1.0
        running.interrupt()
        hosts.ends(130)
    finally:
        hosts.close()
    assert judge_run(home / "run").problems == ()
    gaps = [record["metrics"].get("train/update_gap", 0.0) for record in records(home / "run")]
    assert max(gaps) < 1e-3
