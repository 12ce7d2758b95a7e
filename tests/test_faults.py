"""Runs that are broken for real: each ends with one readable error, saves what it can, and leaves nothing behind."""

import json
import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import Broken, broken, own, reference
from tests.runs import (
    Special,
    finish,
    home,
    logs,
    numbers,
    records,
    set_fault,
)

__all__ = ["broken", "home", "own", "reference"]

SHORT_GRACE = Special(limits={"master.master.GRACE_SECONDS": 1.0})  # for workers that will not end by themselves


@pytest.mark.parametrize("training", [False, True], ids=["anywhere", "in a collective"])
def test_a_killed_worker_is_named_and_the_run_goes_on_from_its_last_step(
    broken: Broken, reference: dict[int, dict[str, float]], training: bool
) -> None:
    """Also where the other worker is the first to notice, by a collective that breaks."""
    broken.at_step(3)
    if training:
        broken.slow_training()
    os.kill(broken.running.workers()[1], signal.SIGKILL)
    error = broken.error()
    assert re.search(r"worker 1 was lost (while it ran|between).*: was killed by SIGKILL", error), error
    assert ("while it ran train of step" in error) or not training
    assert broken.saved == records(broken.running.folder)[-1]["step"] + 1
    broken.goes_on_like(reference)


def test_a_worker_that_ends_before_it_is_ready_is_named(own: Path) -> None:
    run = Broken(own)
    run.running.until(lambda: len(run.running.workers()) == 2, "workers")
    os.kill(run.running.workers()[1], signal.SIGKILL)
    assert "worker 1: worker 1 was killed by SIGKILL before it was ready" in run.error()


@pytest.mark.slow
def test_workers_that_are_not_ready_in_time_are_shown_where_they_are(own: Path) -> None:
    """Worker 0 waits for worker 1, which is stopped, when all meet; or is ready, where they have met before."""
    run = Broken(own, {"runtime": {"start_seconds": 6}}, special=SHORT_GRACE)
    run.running.until(lambda: len(run.running.workers()) == 2, "workers")
    stopped = run.running.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    late = re.search(r"workers? (1|0, 1): not ready within 6 s \(runtime.start_seconds\)", run.error())
    assert late is not None, run.running.output()
    assert "no stack of worker 1: it is stopped" in run.running.output()
    waits = "worker 0 is here (most recent call first):" in run.running.output()
    assert waits == (late[1] == "0, 1"), run.running.output()


def test_nothing_outlives_a_killed_group(broken: Broken) -> None:
    os.killpg(broken.at_step(2).running.pid, signal.SIGKILL)
    broken.running.wait()
    broken.traces.gone()
    events = json.loads((broken.running.folder / "trace.json").read_text() + "]")
    assert {event["name"] for event in events} >= {"rollout", "reward", "train"}


@pytest.mark.slow
def test_a_silent_worker_is_given_up(own: Path, reference: dict[int, dict[str, float]]) -> None:
    run = Broken(own, {"runtime": {"heartbeat_seconds": 0.2, "lost_after_seconds": 2.5}})
    run.at_step(2).slow_training()  # so that the other one is stuck, in a collective with it
    os.kill(run.running.workers()[0], signal.SIGSTOP)
    assert re.search(r"worker 0 was lost while it ran train .*: has not been heard of for \d+ s", run.error())
    assert "no stack of worker 0: it is stopped (SIGSTOP, or a debugger)" in run.running.output()
    run.goes_on_like(reference)


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_c_is_given_up_with_its_stack(own: Path) -> None:
    """The interpreter's lock is held: no thread of it runs any more, so it does not beat either."""
    run = Broken(own, {"runtime": {"heartbeat_seconds": 0.2, "lost_after_seconds": 2.5}}, special=SHORT_GRACE)
    run.at_step(2)
    set_fault(own, stuck=True)
    error, output = run.error(), run.running.output()
    assert re.search(r"worker [01] was lost while it ran train .*: has not been heard of for \d+ s", error), error
    assert re.search(r"worker [01] is here \(most recent call first\):\n +.*/re/.* in match\n", output), output
    assert re.search(r"/rewards.py:\d+ in spoil\n", output), output
    assert '/re/__init__.py", line' in (run.running.folder / "logs/failure.txt").read_text()


@pytest.mark.slow
def test_a_call_past_its_deadline_is_named(own: Path, reference: dict[int, dict[str, float]]) -> None:
    """Its threads are stuck for good: saving and ending do without them."""
    run = Broken(own, {"runtime": {"min_deadline_seconds": 5}})
    run.at_step(2)
    set_fault(own, compute_sleep=1000)
    error = run.error(20)
    assert re.search(r"call 'train', worker 0: train of step \d+ has not ended on workers 0, 1 after ", error), error
    assert run.saved == records(run.running.folder)[-1]["step"] + 1
    here = r"workers? [01, ]+ (is|are) here \(most recent call first\):\n    .*/rewards.py:\d+ in spoil\n"
    assert re.search(here, run.running.output()), run.running.output()
    detail = (run.running.folder / "logs/failure.txt").read_text()
    assert all(f"stacks of worker {worker}:\n" in detail for worker in (0, 1))
    assert "in spoil" in detail
    assert "/runtime/worker/worker.py" in detail, "every thread's stack is there"
    run.goes_on_like(reference)
    assert not list(run.running.folder.glob("logs/*.stacks.txt")) or all(
        file.stat().st_size for file in run.running.folder.glob("logs/*.stacks.txt")
    ), "files of stacks that nobody asked for are gone"


LEFT: dict[str, tuple[dict[str, Any], str]] = {  # how the weights lie, and what fails
    "fsdp, a reward": ({"sharding": "fsdp", "devices": 2}, "reward"),
    "dp x tp, a worker": ({"dp": 2, "tp": 2, "devices": 4}, "worker"),  # whose rows of the moments nobody else has
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_divided_weights_are_saved_where_all_their_parts_are_left(
    own: Path, home: Path, name: str, reference: dict[int, dict[str, float]]
) -> None:
    """No collective is needed for that: the groups of a lost worker are broken, and its peers may be stuck in one."""
    layout, fault = LEFT[name]
    devices = layout["devices"]
    run = Broken(own, {"cluster": {"devices": devices}, "allocation": {"train": layout}})
    run.at_step(2)
    if fault == "worker":
        run.slow_training()
        os.kill(run.running.workers()[1], signal.SIGKILL)
    else:
        set_fault(own, **{"raise": ""})
    error = run.error()
    assert fault == "reward" or "worker 1 was lost" in error
    output = run.running.output()
    if fault == "worker":
        lost = r"not saved: worker \d: a part of 'actor' is gone: no worker holds \[.*\] of 'model"
        assert re.search(lost, output), output
        assert run.saved == 0
        return
    assert run.saved == records(run.running.folder)[-1]["step"] + 1, output
    set_fault(own)
    finish(own, "run", "--resume", str(own / "run"), f"steps={run.saved + 2}")
    for step, found in numbers(own / "run").items():
        assert found["train/loss"] == pytest.approx(reference[step]["train/loss"], rel=1e-3, abs=1e-5)


def test_a_reward_that_raises_names_the_sample_and_the_line(
    broken: Broken, reference: dict[int, dict[str, float]]
) -> None:
    broken.at_step(2)
    set_fault(broken.home, **{"raise": ""})
    error = broken.error()
    assert re.search(r"call 'reward', worker [01], sample \d+: .*KeyError.*no score for.*\(rewards.py:\d+\)", error), (
        error
    )
    assert "raise KeyError" in (broken.running.folder / "logs/failure.txt").read_text()
    broken.goes_on_like(reference)


def test_errors_that_are_scored_keep_the_run_going(own: Path) -> None:
    run = Broken(own, {"calls": {"reward": {"on_error": "score"}}, "steps": 4})
    set_fault(own, **{"raise": "5"})
    run.ends(0)
    failed = [
        record["metrics"]["reward/failed"] for record in run.running.records() if "reward/failed" in record["metrics"]
    ]
    assert any(failed)
    assert all(0 <= share < 1 for share in failed)
    assert "of the executions of reward failed and have its `error_value`" in run.running.output()
    assert "KeyError" in logs(run.running.folder) and "raise KeyError" in logs(run.running.folder)


def test_a_reward_that_never_returns_ends_within_its_limit(own: Path, reference: dict[int, dict[str, float]]) -> None:
    run = Broken(own, {"calls": {"reward": {"timeout_seconds": 1.0}}})
    run.at_step(2)
    set_fault(own, hang=True)
    error = run.error(20)
    assert re.search(r"call 'reward', worker [01], sample \d+: .*took more than 1 s", error), error
    run.goes_on_like(reference)


def test_a_loss_that_is_not_finite_names_a_sample(broken: Broken, reference: dict[int, dict[str, float]]) -> None:
    broken.at_step(2)
    set_fault(broken.home, nan=True)
    error = broken.error()
    assert re.search(r"call 'train', worker [01], sample \d+: the loss is nan", error), error
    broken.goes_on_like(reference)


@pytest.mark.slow
def test_an_unreadable_row_is_named_and_may_be_fixed(own: Path, reference: dict[int, dict[str, float]]) -> None:
    """Row 290 is past those that are looked at before the start, and comes up within the first pass over the data."""
    file = own / "train.jsonl"
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join([*lines[:289], '{"prompt": "12+\n', *lines[290:]]))
    run = Broken(own)
    error = run.error()
    assert re.search(r"call 'rollout', worker [01]: .*train.jsonl:290", error), error
    file.write_text(whole)
    refused = finish(own, "run", "--resume", str(own / "run"), code=2).output()
    assert f"{file} has changed since the run began" in refused
    assert "--new-data" in refused
    run.goes_on_like(reference, 3, "--new-data")


@pytest.mark.slow
def test_a_long_call_is_no_silence(own: Path) -> None:
    """Workers beat while their compute thread is in a call that takes longer than a worker may be silent."""
    short = {"params": {"minibatches": 1}, "steps": 2}
    run = Broken(own, {"runtime": {"heartbeat_seconds": 0.2, "lost_after_seconds": 2.5}}, short)
    set_fault(own, compute_sleep=3.5)
    run.running.until((own / "computing").exists, "the long call")
    set_fault(own)
    run.ends(0)


def test_a_full_disk_under_a_checkpoint(own: Path, reference: dict[int, dict[str, float]]) -> None:
    run = Broken(own, {"checkpoint": {"every": 2}})
    run.at_step(3)
    for pid in run.running.workers().values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    error = run.error()
    assert re.search(r"call 'save', worker [01]: File too large", error), error
    assert not list((own / "run/checkpoints").glob("*.partial"))
    run.goes_on_like(reference)


def test_a_full_disk_under_the_master(broken: Broken, reference: dict[int, dict[str, float]]) -> None:
    broken.at_step(3)
    size = (broken.running.folder / "metrics.jsonl").stat().st_size
    resource.prlimit(broken.running.pid, resource.RLIMIT_FSIZE, (size + 300, resource.RLIM_INFINITY))
    assert re.search(
        r"the master could not write: File too large: .*/(metrics.jsonl|trace.json|events.log)", broken.error()
    )
    broken.goes_on_like(reference)


def fill_disk(file: Path) -> None:
    """Write until there is no room. Raises OSError."""
    with file.open("wb", buffering=0) as filler:
        while filler.write(bytes(1000)):
            pass


def test_a_disk_that_is_really_full(own: Path, reference: dict[int, dict[str, float]]) -> None:
    """Everything that the run writes lies on a disk of 3 MB that something else fills up."""
    (own / "run").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "realgraph-test", str(own / "run")]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts disks")
    try:
        run = Broken(own, {"checkpoint": {"every": 2, "keep": 1}})
        run.at_step(3)
        with pytest.raises(OSError, match="No space left"):
            fill_disk(own / "run/filler")
        error = run.error()
        assert "No space left on device" in error, error
        assert run.saved >= 2
        (own / "run/filler").unlink()
        run.goes_on_like(reference)
    finally:
        subprocess.run(["umount", "--lazy", str(own / "run")], check=True)
