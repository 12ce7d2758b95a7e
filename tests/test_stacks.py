"""Stacks of processes that are late: what a stuck, a stopped and an ended worker give, and what is shown of many."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerProgram, WorkerStacks
from realgraph.runtime.processes.local import LocalFleet, LocalLauncher
from realgraph.runtime.processes.stacks import (
    DUMP_SECONDS,
    Frame,
    late_thread,
    shown,
    stacks_file,
    stacks_of,
    threads,
    with_stacks,
    written,
)
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import Failed

STUCK = """
import threading, time

def inner(seconds):
    time.sleep(seconds)

def main(boot):
    threading.Thread(target=inner, args=(1000,), daemon=True).start()
    print("here", flush=True)
    inner(0.0 if boot.worker == 2 else 1000)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerProgram:
    (tmp_path / "stuck_program.py").write_text(STUCK)
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return WorkerProgram("stuck_program:main")


def boots(folder: Path, n_workers: int) -> list[WorkerBoot]:
    keys = make_keys()
    return [
        WorkerBoot(worker=i, master="", master_key="", keys=keys, log=str(folder / f"logs/worker-{i}.log"))
        for i in range(n_workers)
    ]


@pytest.mark.slow
def test_a_worker_that_hangs_one_that_is_stopped_and_one_that_has_ended(tmp_path: Path, program: WorkerProgram) -> None:
    async def look(fleet: LocalFleet) -> None:
        assert (await fleet.wait_exit())[0] == 2
        while any("here" not in fleet.last_lines(worker) for worker in (0, 1)):
            await asyncio.sleep(0.02)
        os.kill(fleet.handles[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        hung, stopped = await stacks_of(fleet, (0, 1, 2))
        assert time.monotonic() - began < DUMP_SECONDS + 2.0
        assert [(one[0].function, one[-1].function) for one in threads(hung.text)] == [
            ("inner", "_bootstrap"),
            ("inner", threads(hung.text)[1][-1].function),
        ]
        assert [frame.function for frame in late_thread(hung.text)][:2] == ["inner", "main"]
        assert (stopped.text, stopped.missing) == ("", "it is stopped (SIGSTOP, or a debugger)")
        assert (await fleet.dump_stacks(2)).missing == "it does not run"
        again = await fleet.dump_stacks(0)
        assert len(threads(again.text)) == 2, "only what was asked for now"
        failed = await with_stacks(Failed(0, "train", "late", "deadline", detail="before", late=(0, 1)), fleet)
        assert failed.detail.startswith("before\n\nstacks of worker 0:\n")
        assert failed.frames[0] == "worker 0 is here (most recent call first):"
        assert failed.frames[-1].startswith("no stack of worker 1: it is stopped")
        nobody = Failed(0, "train", "no deadline")
        assert await with_stacks(nobody, fleet) is nobody

    async def run() -> None:
        fleet = await LocalLauncher().start(boots(tmp_path, 3), program, 60.0)
        try:
            await look(fleet)
        finally:
            await fleet.terminate(0)

    asyncio.run(run())
    left = [stacks_file(tmp_path / f"logs/worker-{i}.log").exists() for i in range(3)]
    assert left == [True, False, False], "a file that nothing was written to is gone"


@pytest.mark.slow
def test_a_start_that_hangs_in_an_import_says_where(
    tmp_path: Path, program: WorkerProgram, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = WorkerProgram(program.entry, ("slow_import",))
    with pytest.raises(LaunchError, match="not started within 4 s; where that stands is above"):
        asyncio.run(LocalLauncher().start(boots(tmp_path, 1), slow, 4.0))
    assert 'slow_import.py", line 2 in <module>' in capfd.readouterr().err


def test_a_peer_that_is_slow_to_answer_is_late() -> None:
    """Its stack says more than that of whoever waits for it."""
    from realgraph.runtime.store.bundle import AbsentError, Deadline
    from realgraph.runtime.worker.failures import failure

    late = failure(0, "train", Deadline(5.0).slow(3, "send all values"))
    assert (late.worker, late.late) == (0, (3,))
    assert "worker 3 did not send all values within 5 s" in late.error
    assert failure(0, "train", AbsentError(3, "tokens", 7)).late == ()


def dump(frames: list[Frame]) -> str:
    """As faulthandler writes the stacks of an idle thread, one that computes, and the main thread."""
    idle = [Frame("/lib/concurrent/futures/thread.py", "81", "_worker")]
    compute = [*frames, Frame("/realgraph/runtime/worker/compute.py", "190", "_serve")]
    main = [Frame("/lib/selectors.py", "468", "select"), Frame("/realgraph/runtime/worker/worker.py", "53", "main")]
    parts = []
    for head, each in (("Thread", idle), ("Thread", compute), ("Current thread", main)):
        lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in each]
        parts.append("\n".join([f"{head} 0x00007f35937fe6c0 (most recent call first):", *lines]))
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("seed", range(100))
def test_every_late_worker_is_named_once_and_those_that_are_alone_first(seed: int) -> None:
    rng = random.Random(seed)
    places = [[Frame("/site/c10d.py", "9", "all_reduce")], [Frame("/home/rewards.py", str(seed), "spoil")], []]
    stacks = []
    for worker in range(rng.randint(1, 7)):
        kind = rng.choice((0, 0, 0, 1, 2, 3))
        stacks.append(
            WorkerStacks(worker, missing="it is stopped") if kind == 3 else WorkerStacks(worker, dump(places[kind]))
        )
    lines = list(shown(stacks))
    heads = [line for line in lines if not line.startswith("  ")]
    named = [[int(word.strip(",:")) for word in head.split() if word.strip(",:").isdigit()] for head in heads]
    assert sorted(worker for workers in named for worker in workers) == list(range(len(stacks)))
    sizes = [len(workers) for head, workers in zip(heads, named, strict=True) if "no stack" not in head]
    assert sizes == sorted(sizes)
    for head, workers in zip(heads, named, strict=True):
        texts = {stacks[worker].text for worker in workers}
        assert len(texts) == 1, "workers that are named together are at the same place"
        first = late_thread(stacks[workers[0]].text)
        assert not first or f"  {first[0].text}" == lines[lines.index(head) + 1]
    whole = "\n".join(written(stacks))
    assert all(stack.text.rstrip() in whole for stack in stacks)


def test_an_idle_compute_thread_leaves_the_word_to_the_main_thread() -> None:
    assert late_thread(dump([]))[0].function == "select"
    assert late_thread(dump([Frame("/x.py", "1", "f")]))[0].function == "f"
    assert (late_thread("Fatal: no stacks\n"), threads("")) == ([], [])
