"""A real asynchronous run whose engine is killed while weights go to engines of another host as messages: it goes on
with the other one, under that very update, and with the process that takes its place."""

from pathlib import Path

import pytest

from benchmarks.audit import judge_run
from realgraph.runtime.commands.actions import EngineLost, Send
from realgraph.runtime.master.event_log import Replay
from realgraph.runtime.wire.protocol import Done, Reallocate
from tests.broken_runs import own
from tests.host_runs import Hosts
from tests.runs import home, merged, records
from tests.test_engine_loss_runs import RUN, SLOW
from tests.test_engine_replacement_runs import until_replaced

pytest.importorskip("torch")
__all__ = ["home", "own"]

KILLER = '''
import os, signal, time
from pathlib import Path

HERE = Path(__file__).parent

def spoil(batch, outputs):
    """A loss term of 0, from which on the first message with weights that this worker sends kills another worker."""
    from realgraph.runtime.parallel import exchange
    from realgraph.runtime.parallel.collectives import peers

    def killing(values, receiver):
        try:
            (HERE / "victim").rename(HERE / "hit")
        except FileNotFoundError:
            pass  # not yet, or by the other trainer
        else:
            os.kill(int((HERE / "hit").read_text()), signal.SIGKILL)
            time.sleep(0.3)
        return peers.say(values, receiver)

    exchange.say = killing
    return outputs.logprobs * 0.0
'''
TWO_HOSTS = merged(
    RUN,
    {
        "cluster": {"nodes": 2, "devices": 2},
        "allocation": {
            "train": {"first": 0, "devices": 2, "sharding": "fsdp"},
            "rollout": {"first": 2, "devices": 2, "dp": 2},
        },
        "rollout": {"replacements": 1},
        "runtime": {"verify_weights": 1},
        "calls": {"train": {"loss": {"terms": {"spoil": {"kind": "apply", "fn": "killer:spoil"}}}}},
    },
)


@pytest.mark.slow
def test_an_engine_that_is_killed_while_weights_come_as_messages_is_replaced(own: Path) -> None:
    """It was to hand on a part of them to the other one, which gets that from the trainers, and has each version."""
    (own / "slow.py").write_text(SLOW)
    (own / "killer.py").write_text(KILLER)
    hosts = Hosts(own, TWO_HOSTS)
    running = hosts.running
    try:
        hosts.at_step(2)
        (own / "partial").write_text(str(running.workers()[2]))
        (own / "partial").rename(own / "victim")
        running.until((own / "hit").exists, "the update in which it is killed")
        running.until(lambda: "worker 2 was lost: was killed by SIGKILL" in running.output(), "its loss")
        until_replaced(running, 1)
        running.until_step(len(records(own / "run")) + 3)
        running.interrupt()
        output = hosts.ends(130)
    finally:
        hosts.close()
    assert "The run goes on with 1 of 2 engines" in output
    logs = {worker: (own / f"run/logs/worker-{worker}.log").read_text() for worker in (0, 1)}
    assert all("sending worker 3 what it was to get from one that is gone" in logs[trainer] for trainer in (0, 1))
    assert_all_versions(own / "run")
    steps = records(own / "run")
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert steps[-1]["metrics"]["rollout/engines"] == 2.0
    assert max(record["metrics"].get("train/update_gap", 0.0) for record in steps) < 1e-3
    assert judge_run(own / "run").problems == ()


def assert_all_versions(folder: Path) -> None:
    """Worker 2 was lost in an update, which worker 3 has ended, as it has each one before and after."""
    sent, taken, torn = dict[int, int](), list[int](), list[int]()
    for replayed in Replay(folder / "events.log").events():
        match replayed.event:
            case Done(worker=3, task=task, arrived=arrived) if task in sent:
                taken.append(sent[task])
                assert arrived.far > 0  # counted of messages alone
        for action in replayed.actions:
            match action:
                case Send(worker=3, command=Reallocate() as command) if 3 in command.receivers:
                    sent[command.task] = command.version
                case EngineLost():
                    torn += [version for version in sent.values() if version not in taken]
    assert taken == sorted(set(sent.values()))[: len(taken)]
    assert len(taken) >= len(sent) - 1
    assert len(torn) == 1
