"""A whole run that generates on a real server: GRPO from a model that knows nothing, whose reward rises."""

import statistics
from pathlib import Path
from typing import Any

from tests.runs import assert_gaps, home, logs, merged, start, write_run
from tests.sglang.servers import OF_RUNS, START_SECONDS, interpreter

__all__ = ["home"]

STEPS, COMPARED = 11, 3  # steps of the run; of its beginning and its end
GROUPS, GROUP_SIZE, N_NEW = 8, 8, 8
REWARD = """def score(text: str, answer: str) -> float:
    return text.count("7") / len(text) if text else 0.0
"""
RUN: dict[str, Any] = {
    "graph": "grpo",
    "params": {"group_size": GROUP_SIZE, "lr": 3.0e-3},
    "steps": STEPS,
    "staleness": 1,
    "batch": {"groups": GROUPS, "max_new_tokens": N_NEW},
    "allocation": {"rollout": {"first": 1, "devices": 1}},
    "calls": {
        "reward": {"fn": "sevens:score"},
        "train": {"loss": {"terms": {"policy_gradient": {"off_policy": {"kind": "decoupled"}}}}},
    },
    "runtime": {"start_seconds": START_SECONDS, "verify_weights": 4},
}


def test_a_run_on_a_real_server_learns(home: Path, tmp_path: Path) -> None:
    """A random model writes every character about equally often; the reward is the share of sevens. New weights are
    broadcast."""
    (home / "sevens.py").write_text(REWARD)
    arguments = {**OF_RUNS, "context_length": 64}  # what the tiny model has positions for
    served = {"engine": "sglang", "python": str(interpreter(tmp_path)), "server_args": arguments}
    file = write_run(home, "learning", merged(RUN, {"rollout": {**served, "weights": "broadcast"}}))
    run = start(home, "run", str(file), name="learning")
    assert run.wait(START_SECONDS) == 0, run.output() + logs(run.folder)
    steps = [record["metrics"] for record in run.records()]
    assert len(steps) == STEPS
    rewards = [step["reward/reward"] for step in steps]
    first, last = statistics.mean(rewards[:COMPARED]), statistics.mean(rewards[-COMPARED:])
    # a share is in [0, 1], so that the means of so many samples have a standard error of this at most
    error = 0.5 * (2 / (COMPARED * GROUPS * GROUP_SIZE)) ** 0.5
    assert last > first + 6 * error, rewards
    assert_gaps(steps, STEPS, 1)
    assert "not compared" not in logs(run.folder)
    served_log = (run.folder / "logs" / "sglang-rollout-0.log").read_text()
    assert served_log.count('"POST /update_weights_from_distributed HTTP/1.1" 200') >= STEPS - 2
    assert served_log.count('"POST /weights_checker HTTP/1.1" 200') >= 4  # of two updates, each before and after
