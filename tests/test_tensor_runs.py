"""Runs whose calls are tensor- or context-parallel: the numbers of one device, checkpoints, resume, streams, lost
workers."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import Broken, own
from tests.layout_runs import STEPS, LayoutRun, check_numbers, check_resume, ran
from tests.runs import BASE, GRPO, finish, home, records, write_run

__all__ = ["home", "own"]

ROLLOUT = {"rollout": {"devices": 2}}
BOTH = {"devices": 2, "tp": 2}
FOUR = {"devices": 4, "dp": 2, "tp": 2}
STAGED = {"devices": 4, "tp": 2, "pp": 2}
MIXED = {"devices": 4, "dp": 2, "cp": 2, "max_tokens_per_microbatch": 24}  # few samples at once: some are cut
PPO_CALLS = ("train_actor", "train_critic", "ref_logp", "values")
RUNS = [
    LayoutRun("grpo_saving", "grpo", 2, {"train": {**BOTH, "recompute": "full", "residency": "offloaded"}, **ROLLOUT}),
    LayoutRun("grpo_apart", "grpo", 4, {"train": {"first": 0, **BOTH}, "rollout": {"first": 2, "devices": 2}}),
    LayoutRun("grpo_all_dp_tp", "grpo", 4, {"train": FOUR, "rollout": FOUR}),
    LayoutRun("ppo_dp_tp", "ppo", 4, {**dict.fromkeys(PPO_CALLS, FOUR), "train_critic": {**FOUR, "sharding": "fsdp"}}),
    LayoutRun(
        "ppo_dp_cp", "ppo", 4, {**dict.fromkeys(PPO_CALLS, MIXED), "train_critic": {**MIXED, "sharding": "fsdp"}}
    ),
    LayoutRun("sft_cp_tp", "sft", 4, {"train": {"devices": 4, "cp": 2, "tp": 2, "max_tokens_per_microbatch": 24}}),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_whose_calls_are_cut_has_the_numbers_of_one_device(home: Path, run: LayoutRun) -> None:
    check_numbers(home, run)
    if run.name == "grpo_apart":
        log = (ran(home, run) / "logs" / "worker-2.log").read_text()
        assert "weights of workers 0, 1 are read where they lie" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [run for run in RUNS if run.name in ("grpo_saving", "ppo_dp_tp")], ids=lambda run: run.name
)
def test_a_run_whose_calls_are_cut_goes_on_as_if_it_had_not_stopped(home: Path, tmp_path: Path, run: LayoutRun) -> None:
    check_resume(home, tmp_path / "moved", run)


MOVED = {"train": {"first": 0, "devices": 2, "tp": 1}, "rollout": {"first": 2, **BOTH}}
LATE: dict[str, Any] = {
    "staleness": 1,
    "steps": STEPS,
    "batch": {"max_new_tokens": 48},
    "eval": {"every": 1, "data": {**BASE["data"], "path": "test.jsonl"}, "limit": 10},
}


LATE_RUNS: dict[str, dict[str, Any]] = {
    "late": {"train": STAGED, "rollout": STAGED},
    # caches that leave no room for anything else on a device
    "late_to_dp": {"train": BOTH, "rollout": {"devices": 2, "kv_cache_tokens": 2_463_000}},
    "late_apart": MOVED,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE_RUNS)
def test_a_stream_of_a_replica_of_several_workers_gives_way_and_goes_on(home: Path, name: str) -> None:
    """Training, evaluations and new weights come while samples are made, and both sides agree about the model. Caches
    are given up where the plan says that they have no room beside training."""
    n_devices = 2 if name == "late_to_dp" else 4
    machine: dict[str, Any] = {"cluster": {"devices": n_devices, "memory_gb": 2.0}, "allocation": LATE_RUNS[name]}
    machine["memory"] = {"quantile": 0.5}  # caches that leave no room at all
    folder = finish(home, "run", str(write_run(home, f"tensor_{name}", GRPO, LATE, machine)), name=f"tensor_{name}")
    plan = json.loads((folder.folder / "plan.json").read_text())["allocations"]
    assert json.loads((folder.folder / "job.json").read_text())["gives_up_caches"] == (name == "late_to_dp")
    for axis in ("tp", "pp"):
        assert plan["rollout"]["layout"][axis] == LATE_RUNS[name]["rollout"].get(axis, 1)
    assert [record["step"] for record in records(folder.folder, "eval")] == list(range(STEPS + 1))
    steps = [record["metrics"] for record in records(folder.folder)]
    assert max(step["staleness/max"] for step in steps) >= 1
    gaps = [value for step in steps for name, value in step.items() if name.endswith("update_gap")]
    assert gaps
    assert max(gaps) < 1e-4
    assert all(step["train/logprob_gap"] < 1e-4 for step in steps[:1])


MEETING = '''
import os, time
from pathlib import Path
from rewards import score

def meet(text: str, answer: str) -> float:
    """`score`, once two processes have been here."""
    if answer in FIRST:  # tried before the run, in one process
        return score(text, answer)
    folder = Path("met")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    due = time.monotonic() + 20
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > due:
            raise TimeoutError("nobody else is here")
        time.sleep(0.01)
    return score(text, answer)
'''


def test_functions_of_a_replica_run_in_the_subprocesses_of_all_its_workers(home: Path) -> None:
    """There are two workers, and each has one subprocess."""
    first = [json.loads(line)["answer"] for line in (home / "train.jsonl").read_text().splitlines()[:4]]
    (home / "meeting.py").write_text(MEETING.replace("FIRST", repr(first)))
    changes = {"steps": 1, "calls": {"reward": {"fn": "meeting:meet"}}, "allocation": {"train": BOTH, "rollout": BOTH}}
    folder = finish(home, "run", str(write_run(home, "meeting", GRPO, changes)), name="meeting")
    assert len(records(folder.folder)) == 1
    assert len(list((home / "met").iterdir())) == 2


def test_a_killed_follower_of_a_replica_is_named(own: Path) -> None:
    """The head is on the last stage."""
    stages = {"devices": 2, "pp": 2}
    run = Broken(own, {"allocation": {"train": stages, "rollout": stages}})
    run.at_step(2)
    os.kill(run.running.workers()[0], signal.SIGKILL)
    error = run.error()
    assert re.search(r"worker 0 was lost (while it ran|between).*: was killed by SIGKILL", error), error
