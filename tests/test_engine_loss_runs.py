"""A real asynchronous run whose engines are killed: it goes on without the first, from its tokens, and not without the
last."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.audit import judge_run
from tests.runs import GRPO, Running, Special, finish, home, merged, records, start, write_run

pytest.importorskip("torch")
__all__ = ["home"]

KEEP_SECONDS = 0.25  # between two messages of an engine to its peers
SLACK_SECONDS = 0.5  # for what engines tell to arrive
KEEPING = Special(limits={"drawn.sharing.KEEP_SECONDS": KEEP_SECONDS})
SLOW = """
import time
from pathlib import Path

from rewards import score as quick

HOLD = Path(__file__).parent / "hold"

def score(text: str, answer: str) -> float:
    while HOLD.exists():
        time.sleep(0.05)
    time.sleep(0.05)
    return quick(text, answer)
"""
SHAPED = """
import time
from pathlib import Path

HOLD = Path(__file__).parent / "hold_shape"

def shape(text: str, reward: float, ref_logprobs: list[float]) -> float:
    while HOLD.exists():
        time.sleep(0.05)
    return reward + 0.001 * sum(ref_logprobs)
"""
RUN = merged(
    GRPO,
    {
        "steps": 100_000,
        "staleness": 2,
        "cluster": {"devices": 3},
        "allocation": {"rollout": {"first": 0, "devices": 2, "dp": 2}, "train": {"first": 2, "devices": 1}},
        "batch": {"max_new_tokens": 24},
        "outputs": {"audit": True},
        "rollout": {"replacements": 0},
        "calls": {"reward": {"fn": "slow:score", "timeout_seconds": 60}},
    },
)


@contextmanager
def holding(home: Path, name: str = "hold") -> Iterator[None]:
    """No reward is there any more meanwhile; name: of the file for which another function waits."""
    (home / name).touch()
    try:
        yield
    finally:
        (home / name).unlink()


def until_still(running: Running) -> None:
    """Wait until no step has ended for so long that engines have told each other twice what they have drawn."""
    n_steps, since = -1, 0.0

    def stands_still() -> bool:
        nonlocal n_steps, since
        now, before = time.monotonic(), n_steps
        n_steps = len(running.records())
        since = since if n_steps == before else now
        return now > since + 2 * KEEP_SECONDS + SLACK_SECONDS

    running.until(stands_still, "the last step whose rewards are there")


def lose_engine(
    home: Path, running: Running, worker: int, by: signal.Signals = signal.SIGKILL, held: str = "hold"
) -> None:
    """End an engine while all groups wait for their rewards, or for another function that is held: others know its
    tokens, and no step has begun that needs what it has."""
    before = running.output().count(" was lost: ")
    with holding(home, held):
        until_still(running)
        os.kill(running.workers()[worker], by)
        running.until(lambda: running.output().count(" was lost: ") > before, "the loss")


def test_a_run_goes_on_without_an_engine_that_is_killed_and_ends_with_the_last(home: Path) -> None:
    """Worker 0 goes first, rank 0 of the group of all workers; what is trained is audited sample by sample."""
    (home / "slow.py").write_text(SLOW)
    running = start(home, "run", str(write_run(home, "loss", RUN)), name="loss", special=KEEPING)
    running.until_step(3)
    lose_engine(home, running, 0)
    assert "The run goes on with 1 of 2 engines" in running.output()
    seen = len(records(home / "loss"))
    running.until_step(seen + 6)
    assert "worker 0 was lost: was killed by SIGKILL" in running.output()
    assert " 0 are made again" in running.output()
    assert any(record["metrics"].get("rollout/moved_tokens", 0.0) > 0 for record in records(home / "loss"))
    os.kill(running.workers()[1], signal.SIGKILL)
    assert running.wait() == 3, running.output()
    assert "worker 1 was lost" in running.output()
    n_steps = len(records(home / "loss"))
    finish(home, "run", "--resume", str(home / "loss"), f"steps={n_steps + 3}", name="loss")
    steps = records(home / "loss")
    assert sorted({record["step"] for record in steps}) == list(range(n_steps + 3))
    assert all(record["metrics"].get("train/update_gap", 0.0) < 1e-3 for record in steps)
    judged = judge_run(home / "loss")
    assert judged.problems == ()


@pytest.mark.slow
def test_a_begun_step_whose_functions_need_its_results_needs_no_engine(home: Path) -> None:
    """The engine is killed while a function over samples waits that has read the reference's log-probabilities."""
    (home / "slow.py").write_text(SLOW)
    (home / "shaped.py").write_text(SHAPED)
    shape = {
        "kind": "function",
        "fn": "shaped:shape",
        "over": "sample",
        "reads": ["text", "reward", "ref_logprobs"],
        "writes": {"shaped": "sample float32"},
        "timeout_seconds": 60,
    }
    changes = {
        "params": {"kl_coef": 0.01},
        "allocation": {"ref_logp": {"first": 2, "devices": 1}},
        "calls": {"shape": shape, "advantage": {"reads": ["shaped"]}},
        "outputs": {"transcripts_every": 1},
    }
    running = start(home, "run", str(write_run(home, "shaped", merged(RUN, changes))), name="shaped", special=KEEPING)
    running.until_step(3)
    lose_engine(home, running, 0, held="hold_shape")
    assert "The run goes on with 1 of 2 engines" in running.output()
    running.until_step(len(records(home / "shaped")) + 4)
    running.interrupt()
    assert running.wait() == 130, running.output()
    shown = [json.loads(line)["text"] for line in (home / "shaped" / "transcripts.jsonl").read_text().splitlines()]
    scored = [text for text in shown if "[shaped" in text]
    assert scored and all(re.match(r"\d\d\+\d\d=", text) for text in scored), shown[:3]
    judged = judge_run(home / "shaped")
    assert judged.problems == ()
