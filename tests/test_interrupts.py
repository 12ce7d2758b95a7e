"""Runs that are asked to end, stopped or hung up on: each ends in order, saves, and says what comes next."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.broken_runs import STEPS, Broken, broken, own, reference
from tests.runs import (
    BASE,
    GRPO,
    Special,
    home,
    records,
    set_fault,
    start,
    write_run,
)
from tests.traces import processes_at, title_of

__all__ = ["broken", "home", "own", "reference"]


@pytest.mark.slow
def test_the_first_interrupt_ends_the_step_and_saves(broken: Broken, reference: dict[int, dict[str, float]]) -> None:
    os.kill(broken.at_step(2).running.pid, signal.SIGINT)
    output = broken.ends(130)
    assert "stopping after this step" in output
    assert f"go on: realgraph run --resume {broken.running.folder}\n" in output
    assert f"saved: {broken.running.folder}/checkpoints/step-{broken.saved:06d}\n" in output
    assert f'try it: realgraph generate {broken.running.folder} "..."\n' in output
    assert output.count(f"after step {broken.saved}\n") + output.count(f"after step {broken.saved}:") == 1
    assert broken.saved == records(broken.running.folder)[-1]["step"] + 1
    assert records(broken.running.folder, "end")[-1]["reason"] == "stopped"
    broken.goes_on_like(reference)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_is_one_interrupt(
    broken: Broken, reference: dict[int, dict[str, float]], number: signal.Signals
) -> None:
    """Systemd, batch systems and closed terminals signal every process, more than once at that."""
    broken.at_step(2)
    for _ in range(2):
        for pid in processes_at(broken.home):
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, number)
    broken.ends(130)
    assert broken.saved == records(broken.running.folder)[-1]["step"] + 1
    assert records(broken.running.folder, "end")[-1]["reason"] == "stopped"
    broken.goes_on_like(reference)


def test_a_hangup_that_is_ignored_stays_so(own: Path) -> None:
    """Started under nohup."""
    run = Broken(own, special=Special(ignored=signal.SIGHUP))
    os.kill(run.at_step(1).running.pid, signal.SIGHUP)
    run.at_step(len(run.running.records()) + 3)
    os.kill(run.running.pid, signal.SIGTERM)
    run.ends(130)


def test_a_run_whose_terminal_is_closed_ends_in_order(own: Path, reference: dict[int, dict[str, float]]) -> None:
    ours, theirs = pty.openpty()
    run = Broken(own, special=Special(terminal=os.ttyname(theirs)))
    over = threading.Event()
    reader = threading.Thread(target=drain, args=(ours, over))
    reader.start()
    try:
        run.at_step(2)
    finally:
        over.set()
        reader.join(20)
        os.close(theirs)
        os.close(ours)
    run.ends(130)
    assert run.saved == records(run.running.folder)[-1]["step"] + 1
    run.goes_on_like(reference)


def drain(descriptor: int, over: threading.Event) -> None:
    """Read what is shown on a terminal."""
    while not over.is_set():
        if select.select([descriptor], [], [], 0.02)[0]:
            os.read(descriptor, 1 << 16)


def test_the_second_interrupt_ends_the_run_at_once(own: Path) -> None:
    run = Broken(own, {"calls": {"reward": {"timeout_seconds": 600}}})
    run.at_step(2)
    set_fault(own, hang=True)
    run.running.interrupt()
    run.running.until(lambda: "stopping" in run.running.output(), "the first interrupt")
    run.running.interrupt()
    run.ends(130, 15)


def test_an_interrupt_while_starting_ends_the_run(own: Path) -> None:
    run = Broken(own)
    run.running.until(lambda: len(run.running.workers()) == 2, "workers")
    run.running.interrupt()
    run.ends(130, 15)


SHORT: dict[str, float] = {"wire.curve.PING_SECONDS": 1, "wire.curve.SILENT_SECONDS": 1}  # connections to hosts


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["master and worker 1", "all"])
def test_a_master_that_was_stopped_goes_on(own: Path, reference: dict[int, dict[str, float]], stopped: str) -> None:
    """Ctrl-Z, and fg after longer than any of these may be silent or any call may take: nothing had run meanwhile."""
    limits = {"heartbeat_seconds": 0.2, "lost_after_seconds": 2.5, "min_deadline_seconds": 3.0}
    run = Broken(own, {"runtime": limits}, special=Special(limits=SHORT))
    run.at_step(2)
    pids = [run.running.pid, *([run.running.workers()[1]] if "1" in stopped else [])]
    chosen = processes_at(own) if stopped == "all" else pids
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.5)
    step = len(run.running.records())
    for pid in chosen:
        os.kill(pid, signal.SIGCONT)
    run.running.until_step(step + 3)
    run.running.interrupt()
    run.ends(130)
    run.goes_on_like(reference)


def test_an_interrupt_before_anything_has_started_is_no_traceback(own: Path) -> None:
    set_fault(own, sleep=30)
    run = Broken(own, {"calls": {"reward": {"timeout_seconds": 600}}})
    run.running.until(lambda: list(processes_at(own)), "the process")
    time.sleep(0.5)
    run.running.interrupt()
    run.ends(130, 15)


LOSES = """
import os, signal, time
from realgraph.runtime.processes.early_interrupts import raise_interrupts

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

raise_interrupts()
Dying()
time.sleep(60)
"""


def test_an_interrupt_that_a_destructor_loses_comes_again() -> None:
    ended = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == -signal.SIGINT, ended
    assert "Exception ignored" not in ended.stderr
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_an_evaluation_that_is_interrupted_says_so_by_its_exit_code(own: Path) -> None:
    held_out = {"eval": {"data": {**BASE["data"], "path": "test.jsonl"}}}
    set_fault(own, sleep=0.5)  # a score: the evaluation does not end before its workers are seen
    running = start(own, "eval", str(write_run(own, "run", GRPO, held_out)), name="run-eval")
    running.until(lambda: len(running.workers()) == 2, "workers")
    running.interrupt()
    assert running.wait(30) == 130, running.output()
    assert "Traceback" not in running.output()


def test_the_end_of_a_run_names_its_checkpoint_and_what_comes_next(
    home: Path, reference: dict[int, dict[str, float]]
) -> None:
    assert len(reference) == STEPS
    (output,) = [path.read_text() for path in home.glob("reference-*.out")]
    folder = home / "reference"
    lines = output.splitlines()[-6:]
    amount, seconds = r"[\d.]+ [MG]B", r"[\d,.]+ (s|ms|us)"
    assert re.fullmatch(
        rf"  most memory: rollout {amount} \({amount} planned\), train {amount} \({amount} planned\)", lines.pop(1)
    )
    times = [rf"{name} {seconds} \({seconds} planned\)" for name in ("a whole step", "rollout", "train")]
    assert re.fullmatch(rf"  median time: {', '.join(times)}", lines.pop(1))
    assert lines == [
        f"finished after step {STEPS}",
        f"  saved: {folder}/checkpoints/step-{STEPS:06d}",
        f"  go on: realgraph run --resume {folder} steps={2 * STEPS}",
        f'  try it: realgraph generate {folder} "..."',
    ]


def test_the_list_of_processes_says_what_each_one_is(own: Path) -> None:
    run = Broken(own, overrides=("name=hidden",))
    run.at_step(1)
    titles = {title_of(pid) for pid in processes_at(own)}
    assert all(title.startswith("realgraph ") and "hidden" not in title for title in titles), titles
    names = {"fork server", "functions", f"run {own / 'run.yaml'}", "worker 0", "worker 1"}
    assert {f"realgraph {name}" for name in names} <= titles
    run.running.interrupt()
    run.ends(130)
