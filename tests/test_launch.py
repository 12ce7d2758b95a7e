"""Workers start fast, end in every way they can be ended, and never outlive the master."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from realgraph.runtime.processes import processes
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerProgram, describe_exit
from realgraph.runtime.processes.local import KILL_SECONDS, KeptLauncher, LocalFleet, LocalLauncher, open_server
from realgraph.runtime.processes.processes import die_with_parent
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.frames import cut
from tests.traces import shared_memory
from tests.waiting import becomes_true, killed

# --- entry points, which run in the workers ---------------------------------------------------------------------------


def speak(boot: WorkerBoot) -> None:
    print(f"worker {boot.worker} of {boot.master}: {os.environ['OMP_NUM_THREADS']} threads")
    os.write(2, b"straight to the descriptor\n")
    assert boot.keys.secret
    assert boot.keys.secret not in "".join([*os.environ, *os.environ.values(), *sys.argv])
    raise SystemExit(boot.worker)


def fail(boot: WorkerBoot) -> None:
    raise RuntimeError(f"worker {boot.worker} is unwell")


def sleep(boot: WorkerBoot) -> None:
    """Sleep with a child, like a function's subprocess, and a grandchild that has forgotten its parent."""
    parent = os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        if os.fork() == 0:
            _mark(boot)
            time.sleep(1000)
        time.sleep(1000)
    time.sleep(1000)


def stubborn(boot: WorkerBoot) -> None:
    _mark(boot)
    while True:
        time.sleep(0.1)


def quitting(boot: WorkerBoot) -> None:
    """Ends by itself within the grace of a terminated fleet."""
    _mark(boot)
    time.sleep(0.5)
    sys.exit(7)


def _mark(boot: WorkerBoot) -> None:
    Path(boot.log).with_suffix(".ready").write_text("ready")


# --- helpers ----------------------------------------------------------------------------------------------------------


def _boots(folder: Path, n: int, threads: int = 1) -> list[WorkerBoot]:
    return [
        WorkerBoot(i, "tcp://127.0.0.1:9", make_keys().public, make_keys(), str(folder / "logs" / f"{i}.log"), threads)
        for i in range(n)
    ]


async def _start(folder: Path, n: int, entry: str, threads: int = 1) -> LocalFleet:
    fleet = await LocalLauncher().start(_boots(folder, n, threads), WorkerProgram(f"{__name__}:{entry}"), 60)
    if entry in ("sleep", "stubborn", "quitting"):
        await becomes_true(lambda: all((folder / "logs" / f"{i}.ready").exists() for i in range(n)))
    return fleet


def _children() -> set[int]:
    """Processes that this one has started."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has just ended
            if entry.name.isdigit() and _parent(int(entry.name)) == os.getpid():
                found.add(int(entry.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _alive(marker: str) -> list[int]:
    """Processes, zombies left out, with `marker` among what they were started with or where they print to."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                links = [os.readlink(entry / "fd" / "1")]
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and (marker in command or any(marker in link for link in links)):
                found.append(int(entry.name))
    return found


# --- tests ------------------------------------------------------------------------------------------------------------


def test_exit_codes_and_logs_are_each_workers_own(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 3, "speak", threads=2)
        assert sorted(fleet.handles) == [0, 1, 2]
        exits = sorted([await asyncio.wait_for(fleet.wait_exit(), 20) for _ in range(3)])
        assert exits == [(0, 0), (1, 1), (2, 2)]
        assert not fleet.running
        for worker, handle in fleet.handles.items():
            assert f"worker {worker} of tcp://127.0.0.1:9: 2 threads" in handle.last_lines()
            assert "straight to the descriptor" in handle.last_lines()
        await fleet.terminate(1)

    asyncio.run(run())


def _note(payload: bytes) -> None:
    Path(payload.decode()).write_text(str(os.getppid()))


def _fail(payload: bytes) -> None:
    raise ValueError(payload.decode())


def test_a_kept_launcher_has_one_fork_server_for_all_runs_and_leaves_nothing(tmp_path: Path) -> None:
    """Workers that end by themselves and workers that are killed, one run after the other, in event loops of their own,
    and what else runs there."""
    log, servers = tmp_path / "call.log", set[int]()
    program = WorkerProgram(f"{__name__}:sleep")

    async def run(folder: Path) -> None:
        fleet = await launcher.start(_boots(folder, 2), program, 60)
        servers.update(_parent(handle.pid) for handle in fleet.handles.values())
        await fleet.terminate(0)
        assert not fleet.running
        await becomes_true(lambda: not _alive(str(folder)))  # the workers' own children follow them

    with closing(KeptLauncher(program, 1)) as launcher:
        asyncio.run(launcher.call(_note, str(tmp_path / "called").encode(), log))
        servers.add(int((tmp_path / "called").read_text()))
        asyncio.run(run(tmp_path / "one"))
        with pytest.raises(LaunchError, match=r"ended with exit code 1[^$]*ValueError: this went wrong"):
            asyncio.run(launcher.call(_fail, b"this went wrong", log))
        asyncio.run(run(tmp_path / "two"))
        (server,) = servers
        assert _parent(server) == os.getpid()
    assert not Path(f"/proc/{server}").exists()


def test_what_is_loaded_ahead_serves_the_next_start_alone_and_ends_where_none_comes(tmp_path: Path) -> None:
    launcher, program = LocalLauncher(), WorkerProgram(f"{__name__}:sleep")

    async def server_of_a_start(name: str) -> int:
        fleet = await launcher.start(_boots(tmp_path / name, 1), program, 60)
        server = _parent(fleet.handles[0].pid)
        await fleet.terminate(0)
        return server

    before = _children()
    with launcher.loading(program, 1):
        (ahead,) = _children() - before
        assert asyncio.run(server_of_a_start("one")) == ahead
        assert asyncio.run(server_of_a_start("two")) != ahead
    with launcher.loading(program, 1):
        assert len(_children() - before) == 1
    assert not _children() - before


def test_a_kept_launcher_ends_its_fork_server_in_the_middle_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import_8.py").write_text("import time; time.sleep(1000)")
    sys.path.insert(0, str(tmp_path))
    try:
        launcher = KeptLauncher(WorkerProgram(f"{__name__}:sleep", ("slow_to_import_8",)), 1)
    finally:
        sys.path.remove(str(tmp_path))
    began = time.monotonic()
    launcher.close()
    assert time.monotonic() - began < KILL_SECONDS
    assert not [pid for pid in _alive("realgraph fork server") if _parent(pid) == os.getpid()]


def test_an_exception_ends_a_worker_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 1, "fail")
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, 1)
        assert "RuntimeError: worker 0 is unwell" in fleet.handles[0].last_lines(2)
        await fleet.terminate(1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("entry", "status"), [("sleep", -signal.SIGKILL), ("stubborn", -signal.SIGKILL), ("quitting", 7)]
)
def test_terminate_leaves_nothing(tmp_path: Path, entry: str, status: int) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 2, entry)
        assert len(_alive(str(tmp_path))) >= 2
        await fleet.terminate(0.3 if entry != "quitting" else 20.0)
        assert sorted([await fleet.wait_exit() for _ in range(2)]) == [(0, status), (1, status)]
        await becomes_true(lambda: not _alive(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_killed_worker_is_reported_at_once_with_its_family_gone(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 2, "sleep")
        before = len(_alive(str(tmp_path)))
        os.kill(fleet.handles[1].pid, signal.SIGKILL)
        start = time.monotonic()
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (1, -signal.SIGKILL)
        assert time.monotonic() - start < 2
        assert fleet.running == {0}
        await becomes_true(lambda: len(_alive(str(tmp_path))) == before // 2, 5)
        await fleet.terminate(0)
        await becomes_true(lambda: not _alive(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_worker_that_has_ended_is_started_anew(tmp_path: Path) -> None:
    """Under its number, several times; its log goes on, and the others are left alone."""

    async def run() -> None:
        fleet = await _start(tmp_path, 2, "stubborn")
        other = fleet.handles[0].pid
        for _ in range(3):
            before = fleet.handles[1].pid
            await fleet.kill(1)
            assert await asyncio.wait_for(fleet.wait_exit(), 20) == (1, -signal.SIGKILL)
            (tmp_path / "logs" / "1.ready").unlink()
            await fleet.restart(_boots(tmp_path, 2)[1])
            assert fleet.running == {0, 1}
            await becomes_true(lambda: (tmp_path / "logs" / "1.ready").exists())
            assert fleet.handles[1].pid != before
        assert fleet.handles[0].pid == other
        await fleet.terminate(0)
        await becomes_true(lambda: not _alive(str(tmp_path)), 5)

    asyncio.run(run())


def test_a_worker_that_can_not_be_started_anew_ends(tmp_path: Path) -> None:
    """As it does where the fork server is gone."""

    async def run() -> None:
        fleet = await _start(tmp_path, 1, "stubborn")
        os.kill(_parent(fleet.handles[0].pid), signal.SIGKILL)
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, -signal.SIGKILL)
        await fleet.restart(_boots(tmp_path, 1)[0])
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, -signal.SIGKILL)
        await fleet.terminate(0)

    asyncio.run(run())


def test_a_killed_fork_server_takes_the_workers_with_it_and_is_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 2, "stubborn")
        os.kill(_parent(fleet.handles[0].pid), signal.SIGKILL)
        exits = sorted([await asyncio.wait_for(fleet.wait_exit(), 20) for _ in range(2)])
        assert exits == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)]
        await becomes_true(lambda: not _alive(str(tmp_path)), 5)
        await fleet.terminate(1)

    asyncio.run(run())


_MASTER = """
import asyncio, importlib, sys
from pathlib import Path
sys.path[:] = {path!r}
_start = importlib.import_module({module!r})._start
importlib.import_module("tests.traces").enter_shared_memory(Path({folder!r}))
async def run():
    fleet = await _start(Path({folder!r}), 3, {entry!r})
    print("started", flush=True)
    await fleet.wait_exit()
asyncio.run(run())
"""


@contextmanager
def _killed_master(folder: Path, entry: str) -> Iterator[subprocess.Popen[bytes]]:
    """A master with three workers, to be killed within; all that it has started must end soon after."""
    code = _MASTER.format(path=sys.path, module=__name__, folder=str(folder), entry=entry)
    command = [sys.executable, "-c", code]
    with killed(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)) as master:
        assert master.stdout is not None
        assert master.stdout.readline() == b"started\n"
        yield master
        master.wait(10)
        deadline = time.monotonic() + 10
        while _alive(str(folder)):
            assert time.monotonic() < deadline, _alive(str(folder))
            time.sleep(0.02)


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("entry", ["sleep", "stubborn"])
def test_nothing_outlives_a_killed_master(tmp_path: Path, entry: str, whole_group: bool) -> None:
    shared = shared_memory(tmp_path)
    with _killed_master(tmp_path, entry) as master:
        assert len(_alive(str(tmp_path))) >= 4
        if whole_group:
            os.killpg(master.pid, signal.SIGKILL)
        else:
            master.kill()
    assert not shared.left()


@pytest.mark.parametrize("number", processes.END_SIGNALS)
def test_an_interrupt_reaches_the_master_only(tmp_path: Path, number: signal.Signals) -> None:
    async def run() -> None:
        fleet = await _start(tmp_path, 1, "sleep")
        os.kill(fleet.handles[0].pid, number)
        os.kill(_parent(fleet.handles[0].pid), number)
        await asyncio.sleep(0.3)
        assert fleet.running == {0}
        assert os.getsid(fleet.handles[0].pid) == fleet.handles[0].pid
        await fleet.terminate(0)

    asyncio.run(run())


@pytest.mark.parametrize("number", processes.END_SIGNALS)
def test_no_interrupt_ends_a_fork_server_not_even_while_it_starts(number: signal.Signals) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = open_server(theirs, (), 1)
        assert isinstance(server, subprocess.Popen)
        server.send_signal(number)  # its interpreter has only just begun
        ours.settimeout(30)
        buffer = bytearray()
        while (body := cut(buffer)) is None:
            piece = ours.recv(1 << 16)
            assert piece, f"the fork server ended: {server.wait(5)}"
            buffer += piece
        assert processes.decode_event(body) == processes.Preloaded("")
        server.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.2)
    assert server.wait(10) == 0


@pytest.mark.parametrize("stopped", ["server", "workers", "all"])
def test_nothing_outlives_a_killed_master_though_it_is_stopped(tmp_path: Path, stopped: str) -> None:
    with _killed_master(tmp_path, "sleep") as master:
        workers = [pid for pid in _alive(str(tmp_path)) if os.getsid(pid) == pid and pid != master.pid]
        server = _parent(workers[0])
        chosen = {"server": [server], "workers": workers, "all": [server, *workers]}[stopped]
        for pid in chosen:
            os.kill(pid, signal.SIGSTOP)
        master.kill()


@pytest.mark.parametrize("entry", ["no_such_module_at_all:main", f"{__name__}:no_such_function"])
def test_a_wrong_entry_point_is_said(tmp_path: Path, entry: str) -> None:
    async def run() -> None:
        if entry.startswith("no_such"):
            with pytest.raises(LaunchError, match="No module named 'no_such_module_at_all'"):
                await LocalLauncher().start(_boots(tmp_path, 1), WorkerProgram(entry))
            return
        fleet = await LocalLauncher().start(_boots(tmp_path, 1), WorkerProgram(entry))
        assert await asyncio.wait_for(fleet.wait_exit(), 20) == (0, 1)
        assert "no_such_function" in fleet.handles[0].last_lines()
        await fleet.terminate(1)

    asyncio.run(run())


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import_7.py").write_text("import time; time.sleep(1000)")

    async def run() -> None:
        program = WorkerProgram(f"{__name__}:sleep", ("slow_to_import_7",))
        with pytest.raises(LaunchError, match=r"not started within 0\.5 s"):
            await LocalLauncher().start(_boots(tmp_path, 1), program, deadline_seconds=0.5)
        assert not [pid for pid in _alive("realgraph fork server") if _parent(pid) == os.getpid()]

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
