"""Whole runs that generate on SGLang servers (the stand-in): synchronous and ahead of training, and with a server's
death."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audit import judge_run
from tests.runs import assert_gaps, finish, home, logs, merged, records, start, write_run
from tests.sglang_server import interpreter, servers_at, standin
from tests.test_engine_loss_runs import SLOW, lose_engine
from tests.test_engine_replacement_runs import until_replaced
from tests.test_evaluation_beside_runs import EVAL, write_held_out
from tests.test_evaluation_beside_runs import RUN as BESIDE
from tests.test_expert_runs import write_mixture

pytest.importorskip("torch")
__all__ = ["home"]

STEPS = 5
REWARD = """def score(text: str, answer: str) -> float:
    return sum(map(ord, text)) % 7 / 7  # a gradient for any text
"""
GRPO: dict[str, Any] = {
    "graph": "grpo",
    "params": {"group_size": 4, "lr": 3.0e-3},
    "steps": STEPS,
    "batch": {"max_new_tokens": 8},
    "allocation": {"rollout": {"first": 1, "devices": 1}},
    "calls": {
        "reward": {"fn": "any_text:score"},
        "train": {"loss": {"terms": {"policy_gradient": {"off_policy": {"kind": "decoupled"}}}}},
    },
}


def spec(home: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    (home / "any_text.py").write_text(REWARD)
    return merged(GRPO, {"rollout": {"engine": "sglang", "python": str(interpreter(tmp_path))}}, more)


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "tp", "ep"), [(0, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_a_run_generates_on_a_server(home: Path, tmp_path: Path, staleness: int, tp: int, ep: int) -> None:
    """Each update reaches it, and the gate finds its log-probabilities to be the trainer's. With ep a mixture's."""
    name = f"sglang-{staleness}"
    pin = {"first": 2 - tp, "devices": tp, "tp": tp, "ep": ep}
    machine = {"cluster": {"devices": 2 * tp}, "allocation": {"rollout": pin}}
    checked: dict[str, Any] = {"runtime": {"verify_weights": 1}, **machine}
    if ep > 1:
        write_mixture(home)
        checked["models"] = {"actor": {"path": "moe"}}
    finish(home, "run", str(write_run(home, name, spec(home, tmp_path, staleness=staleness, **checked))), name=name)
    steps = records(home / name)
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert all(0 <= step["metrics"]["staleness/max"] <= staleness for step in steps)
    assert_gaps((step["metrics"] for step in steps), STEPS, staleness)
    assert not list((home / name).rglob("*-weights-*"))
    assert len(list((home / name / "logs").glob("sglang-*.log"))) == 1


@pytest.mark.slow
def test_broadcasts_reach_no_server_that_keeps_its_weights(home: Path, tmp_path: Path) -> None:
    """One of two servers evaluates the weights of a step, while the other takes new ones: by disk, since a broadcast is
    for all. Those that come to both are broadcast."""
    write_held_out(home)
    served = {"rollout": {"weights": "broadcast"}, "runtime": {"verify_weights": 1}, "steps": 16}
    beside = {"eval": {**EVAL, "on": "engine"}}
    file = write_run(home, "beside", spec(home, tmp_path), BESIDE, beside, served)
    finish(home, "run", str(file), name="beside")
    evaluated = [record["step"] for record in records(home / "beside", "eval")]
    assert evaluated[0] == 0 and evaluated[-1] == 16
    gaps = [value for step in records(home / "beside") for key, value in step["metrics"].items() if "update_gap" in key]
    assert gaps and max(gaps) < 1e-3
    served_logs = [(home / "beside" / "logs" / f"sglang-rollout-{i}.log").read_text() for i in range(2)]
    by_disk, by_broadcast = (
        [text.count(f'"POST /update_weights_from_{way} HTTP/1.1" 200') for text in served_logs]
        for way in ("disk", "distributed")
    )
    assert by_broadcast[0] == by_broadcast[1] > 0
    assert sum(by_disk) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nothing", "no_update"])
def test_a_given_server_that_goes_silent_is_named_within_two_deadlines_of_the_run(
    home: Path, tmp_path: Path, fault: str
) -> None:
    """Those that its run file sets: it does not stream, and no deadline of its own would end before an hour."""
    (home / "any_text.py").write_text(REWARD)
    deadline = 30.0
    with standin(home / "model", tmp_path) as server:
        served = {"rollout": {"engine": "sglang", "urls": [server.url]}, "runtime": {"min_deadline_seconds": deadline}}
        file = write_run(home, fault, merged(GRPO, served, {"steps": 1000}))
        run = start(home, "run", str(file), name=fault)
        run.until_step(2)
        server.fault(fault)
        began = time.monotonic()
        assert run.wait() == 3
        assert time.monotonic() - began < 2 * deadline
    (line,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    asked = {"nothing": "/generate", "no_update": "/update_weights_from_disk"}[fault]
    assert f"SGLang server {server.url} {asked}: no answer in" in line, line


@pytest.mark.slow
def test_a_run_outlives_its_server(home: Path, tmp_path: Path) -> None:
    """A server that is killed is started again, and every step has its samples."""
    file = write_run(home, "killed", spec(home, tmp_path, staleness=1, steps=12, batch={"max_new_tokens": 24}))
    run = start(home, "run", str(file), name="killed")
    run.until_step(3)
    (server,) = servers_at(run.home)
    os.kill(server, signal.SIGKILL)
    run.until(lambda: servers_at(run.home) not in ([], [server]), "another server")
    assert run.wait() == 0, run.output() + logs(run.folder)
    steps = run.records()
    assert [step["step"] for step in steps] == list(range(12))
    assert (run.folder / "logs" / "sglang-rollout-0.log").read_text().count("fired up") == 2
    assert not servers_at(run.home)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "weights"), [(1, "broadcast"), (2, "disk")])
def test_a_worker_that_is_killed_is_replaced_with_its_server(home: Path, tmp_path: Path, tp: int, weights: str) -> None:
    """The new one reads the newest weights from disk, and its log-probabilities are the trainer's. The other's are
    broadcast no more, since that is for all."""
    name = f"worker-{tp}"
    (home / "slow.py").write_text(SLOW)
    cluster, rollout = {"devices": 2 * tp + 2}, {"first": 0, "devices": 2 * tp, "dp": 2, "tp": tp}
    split = {"cluster": cluster, "allocation": {"rollout": rollout, "train": {"first": 2 * tp, "devices": 2}}}
    more = {"calls": {"reward": {"fn": "slow:score", "timeout_seconds": 60}}, "runtime": {"verify_weights": 1}}
    long = {"steps": 100_000, "outputs": {"audit": True}, "rollout": {"weights": weights}}
    file = write_run(home, name, spec(home, tmp_path, staleness=1), split, more, long)
    run = start(home, "run", str(file), name=name)
    run.until_step(3)
    lose_engine(home, run, tp - 1)
    until_replaced(run, 1)
    run.until_step(len(run.records()) + 4)
    assert len(servers_at(run.home)) == 2
    run.interrupt()
    assert run.wait() == 130, run.output() + logs(run.folder)
    assert judge_run(run.folder).problems == ()
    steps = run.records()
    assert steps[-1]["metrics"]["rollout/engines"] == 2.0
    gaps = [value for step in steps for key, value in step["metrics"].items() if key.endswith("update_gap")]
    assert len(gaps) >= 4 and max(gaps) < 1e-3
    assert (run.folder / "logs" / "sglang-rollout-0.log").read_text().count(
        "fired up"
    ) >= 2  # a busy machine may give up one more
    assert not servers_at(run.home)


@pytest.mark.slow
def test_weights_are_broadcast_to_all_servers_and_one_dies_in_it(home: Path, tmp_path: Path) -> None:
    """The gate finds the log-probabilities of every update to be the trainer's, those of the failed broadcast too."""
    fault = tmp_path / "fault"
    python = str(interpreter(tmp_path, SGLANG_STANDIN_FAULT=str(fault)))
    served = {"rollout": {"python": python, "weights": "broadcast"}, "runtime": {"verify_weights": 1}}
    split = {"cluster": {"devices": 3}, "allocation": {"rollout": {"first": 0, "devices": 2, "dp": 2}}, "steps": 8}
    file = write_run(home, "broadcast", merged(spec(home, tmp_path / "other", staleness=1, **served), split))
    run = start(home, "run", str(file), name="broadcast")
    run.until_step(3)
    fault.write_text("broadcast")
    assert run.wait() == 0, run.output() + logs(run.folder)
    assert not fault.exists()
    steps = run.records()
    assert [step["step"] for step in steps] == list(range(8))
    gaps = [value for step in steps for key, value in step["metrics"].items() if key.endswith("update_gap")]
    assert len(gaps) >= 5 and max(gaps) < 1e-3  # of 7 updates; how many have probes depends on when the server dies
    served_logs = [(run.folder / "logs" / f"sglang-rollout-{i}.log").read_text() for i in range(2)]
    assert sum(text.count("fired up") for text in served_logs) >= 3  # a busy machine may give up one more
    assert logs(run.folder).count("no broadcast") == 1
    assert not list(run.folder.rglob("*-weights-*"))
