"""Workers start fast, end in every way they can be ended, and never outlive the master."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from realgraph.runtime.processes import processes
from realgraph.runtime.processes.launcher import LaunchError, WorkerProgram, describe_exit
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.wire.frames import cut
from tests.launches import SLEEP, alive_with, boots_in, start_entry
from tests.traces import parent_of, shared_memory
from tests.waiting import becomes_true, killed


def test_exit_codes_and_logs_are_each_workers_own(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 3, "speak", threads=2)
        assert sorted(fleet.handles) == [0, 1, 2]
        exits = sorted([await asyncio.wait_for(fleet.wait_exit(), 20) for _ in range(3)])
        assert exits == [(0, 0), (1, 1), (2, 2)]
        assert not fleet.running
        for worker, handle in fleet.handles.items():
            assert f"worker {worker} of tcp://127.0.0.1:9: 2 threads" in handle.last_lines()
            assert "straight to the descriptor" in handle.last_lines()
        await fleet.terminate(1)

    asyncio.run(run())


def test_an_exception_ends_a_worker_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 1, "fail")
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, 1)
        assert "RuntimeError: worker 0 is unwell" in fleet.handles[0].last_lines(2)
        await fleet.terminate(1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("entry", "status"), [("sleep", -signal.SIGKILL), ("stubborn", -signal.SIGKILL), ("quitting", 7)]
)
def test_terminate_leaves_nothing(tmp_path: Path, entry: str, status: int) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 2, entry)
        assert len(alive_with(str(tmp_path))) >= 2
        await fleet.terminate(0.3 if entry != "quitting" else 20.0)
        assert sorted([await fleet.wait_exit() for _ in range(2)]) == [(0, status), (1, status)]
        await becomes_true(lambda: not alive_with(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_killed_worker_is_reported_at_once_with_its_family_gone(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 2, "sleep")
        before = len(alive_with(str(tmp_path)))
        os.kill(fleet.handles[1].pid, signal.SIGKILL)
        start = time.monotonic()
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (1, -signal.SIGKILL)
        assert time.monotonic() - start < 2
        assert fleet.running == {0}
        await becomes_true(lambda: len(alive_with(str(tmp_path))) == before // 2, 5)
        await fleet.terminate(0)
        await becomes_true(lambda: not alive_with(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_worker_that_has_ended_is_started_anew(tmp_path: Path) -> None:
    """Under its number, several times; its log goes on, and the others are left alone."""

    async def run() -> None:
        fleet = await start_entry(tmp_path, 2, "stubborn")
        other = fleet.handles[0].pid

        def is_another(before: int) -> bool:
            return fleet.handles[1].pid != before

        for _ in range(3):
            before = fleet.handles[1].pid
            await fleet.kill(1)
            assert await asyncio.wait_for(fleet.wait_exit(), 20) == (1, -signal.SIGKILL)
            (tmp_path / "logs" / "1.ready").unlink()
            await fleet.restart(boots_in(tmp_path, 2)[1])
            assert fleet.running == {0, 1}
            await becomes_true(lambda: (tmp_path / "logs" / "1.ready").exists())
            await becomes_true(partial(is_another, before))  # it may be ready before its start is heard of
        assert fleet.handles[0].pid == other
        await fleet.terminate(0)
        await becomes_true(lambda: not alive_with(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_worker_that_can_not_be_started_anew_ends(tmp_path: Path) -> None:
    """As it does where the fork server is gone."""

    async def run() -> None:
        fleet = await start_entry(tmp_path, 1, "stubborn")
        os.kill(parent_of(fleet.handles[0].pid), signal.SIGKILL)
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, -signal.SIGKILL)
        await fleet.restart(boots_in(tmp_path, 1)[0])
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, -signal.SIGKILL)
        await fleet.terminate(0)

    asyncio.run(run())


def test_a_killed_fork_server_takes_the_workers_with_it_and_is_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 2, "stubborn")
        os.kill(parent_of(fleet.handles[0].pid), signal.SIGKILL)
        exits = sorted([await asyncio.wait_for(fleet.wait_exit(), 20) for _ in range(2)])
        assert exits == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)]
        await becomes_true(lambda: not alive_with(str(tmp_path)), 5)
        await fleet.terminate(1)

    asyncio.run(run())


_MASTER = """
import asyncio, importlib, sys
from pathlib import Path
sys.path[:] = {path!r}
start_entry = importlib.import_module("tests.launches").start_entry
importlib.import_module("tests.traces").enter_shared_memory(Path({folder!r}))
async def run():
    fleet = await start_entry(Path({folder!r}), 3, {entry!r})
    print("started", flush=True)
    await fleet.wait_exit()
asyncio.run(run())
"""


@contextmanager
def _killed_master(folder: Path, entry: str) -> Iterator[subprocess.Popen[bytes]]:
    """A master with three workers, to be killed within; all that it has started must end soon after."""
    code = _MASTER.format(path=sys.path, folder=str(folder), entry=entry)
    command = [sys.executable, "-c", code]
    with killed(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)) as master:
        assert master.stdout is not None
        assert master.stdout.readline() == b"started\n"
        yield master
        master.wait(10)
        deadline = time.monotonic() + 10
        while alive_with(str(folder)):
            assert time.monotonic() < deadline, alive_with(str(folder))
            time.sleep(0.02)


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("entry", ["sleep", "stubborn"])
def test_nothing_outlives_a_killed_master(tmp_path: Path, entry: str, whole_group: bool) -> None:
    shared = shared_memory(tmp_path)
    with _killed_master(tmp_path, entry) as master:
        assert len(alive_with(str(tmp_path))) >= 4
        if whole_group:
            os.killpg(master.pid, signal.SIGKILL)
        else:
            master.kill()
    assert not shared.left()


@pytest.mark.parametrize("number", processes.END_SIGNALS)
def test_an_interrupt_reaches_the_master_only(tmp_path: Path, number: signal.Signals) -> None:
    async def run() -> None:
        fleet = await start_entry(tmp_path, 1, "sleep")
        os.kill(fleet.handles[0].pid, number)
        os.kill(parent_of(fleet.handles[0].pid), number)
        await asyncio.sleep(0.3)
        assert fleet.running == {0}
        assert os.getsid(fleet.handles[0].pid) == fleet.handles[0].pid
        await fleet.terminate(0)

    asyncio.run(run())


@pytest.mark.parametrize("stopped", ["server", "workers", "all"])
def test_nothing_outlives_a_killed_master_though_it_is_stopped(tmp_path: Path, stopped: str) -> None:
    with _killed_master(tmp_path, "sleep") as master:
        workers = [pid for pid in alive_with(str(tmp_path)) if os.getsid(pid) == pid and pid != master.pid]
        server = parent_of(workers[0])
        chosen = {"server": [server], "workers": workers, "all": [server, *workers]}[stopped]
        for pid in chosen:
            os.kill(pid, signal.SIGSTOP)
        master.kill()


@pytest.mark.parametrize("entry", ["no_such_module_at_all:main", f"{__name__}:no_such_function"])
def test_a_wrong_entry_point_is_said(tmp_path: Path, entry: str) -> None:
    async def run() -> None:
        if entry.startswith("no_such"):
            with pytest.raises(LaunchError, match="No module named 'no_such_module_at_all'"):
                await LocalLauncher().start(boots_in(tmp_path, 1), WorkerProgram(entry))
            return
        fleet = await LocalLauncher().start(boots_in(tmp_path, 1), WorkerProgram(entry))
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, 1)
        assert "no_such_function" in fleet.handles[0].last_lines()
        await fleet.terminate(1)

    asyncio.run(run())


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import_7.py").write_text("import time; time.sleep(1000)")

    async def run() -> None:
        program = WorkerProgram(SLEEP, ("slow_to_import_7",))
        with pytest.raises(LaunchError, match=r"not started within 0\.5 s"):
            await LocalLauncher().start(boots_in(tmp_path, 1), program, deadline_seconds=0.5)
        assert not [pid for pid in alive_with("realgraph fork server") if parent_of(pid) == os.getpid()]

    sys.path.insert(0, str(tmp_path))
    try:
        asyncio.run(run())
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("seed", range(20))
def test_frames_survive_any_cutting(seed: int) -> None:
    rng = random.Random(seed)
    events = [processes.Exited(rng.randint(0, 9), rng.randint(-15, 255)) for _ in range(rng.randint(0, 20))]
    wire, buffer, got = b"".join(map(processes.frame, events)), bytearray(), []
    while wire:
        n = rng.randint(1, 12)
        buffer += wire[:n]
        wire = wire[n:]
        while (body := cut(buffer)) is not None:
            got.append(processes.decode_event(body))
    assert got == events
    assert not buffer


def test_statuses_read_as_sentences() -> None:
    assert describe_exit(0) == "ended with exit code 0"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-63) == "was killed by signal 63"
