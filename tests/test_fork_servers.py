"""Fork servers: kept for several runs, started ahead of one, and ended in every way."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from realgraph.runtime.processes import processes
from realgraph.runtime.processes.launcher import LaunchError, WorkerProgram
from realgraph.runtime.processes.local import KILL_SECONDS, KeptLauncher, LocalLauncher, open_server
from realgraph.runtime.wire.frames import cut
from tests.launches import SLEEP, alive_with, boots_in, children, start_entry
from tests.traces import parent_of
from tests.waiting import becomes_true, until


def _note(payload: bytes) -> None:
    Path(payload.decode()).write_text(str(os.getppid()))


def _fail(payload: bytes) -> None:
    raise ValueError(payload.decode())


def test_a_kept_launcher_has_one_fork_server_for_all_runs_and_leaves_nothing(tmp_path: Path) -> None:
    """Workers that end by themselves and workers that are killed, one run after the other, in event loops of their own,
    and what else runs there."""
    log, servers = tmp_path / "call.log", set[int]()
    program = WorkerProgram(SLEEP)

    async def run(folder: Path) -> None:
        fleet = await launcher.start(boots_in(folder, 2), program, 60)
        servers.update(parent_of(handle.pid) for handle in fleet.handles.values())
        await fleet.terminate(0)
        assert not fleet.running
        await becomes_true(lambda: not alive_with(str(folder)))  # the workers' own children follow them

    with closing(KeptLauncher(program, 1)) as launcher:
        asyncio.run(launcher.call(_note, str(tmp_path / "called").encode(), log))
        servers.add(int((tmp_path / "called").read_text()))
        asyncio.run(run(tmp_path / "one"))
        with pytest.raises(LaunchError, match=r"ended with exit code 1[^$]*ValueError: this went wrong"):
            asyncio.run(launcher.call(_fail, b"this went wrong", log))
        asyncio.run(run(tmp_path / "two"))
        (server,) = servers
        assert parent_of(server) == os.getpid()
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons are out of reach")
@pytest.mark.parametrize("of", ["one worker", "all"])
def test_what_a_worker_leaves_behind_has_a_moment_to_end_by_itself(tmp_path: Path, of: str) -> None:
    """A guardian that is killed at once leaves what it guards, if the fork server is killed then."""

    async def end() -> None:
        fleet = await start_entry(tmp_path, 1, "leaving")
        if of == "one worker":
            await fleet.kill(0)
            await becomes_true(lambda: not alive_with(str(tmp_path)))
        await fleet.terminate(0)

    asyncio.run(end())
    assert (tmp_path / "logs" / "0.orderly").read_text() == "ended by itself"
    assert not alive_with(str(tmp_path))


def test_what_is_loaded_ahead_serves_the_next_start_alone_and_ends_where_none_comes(tmp_path: Path) -> None:
    launcher, program = LocalLauncher(), WorkerProgram(SLEEP)

    async def server_of_a_start(name: str) -> int:
        fleet = await launcher.start(boots_in(tmp_path / name, 1), program, 60)
        server = parent_of(fleet.handles[0].pid)
        await fleet.terminate(0)
        return server

    before = children()
    with launcher.loading(program, 1):
        (ahead,) = children() - before
        assert asyncio.run(server_of_a_start("one")) == ahead
        assert asyncio.run(server_of_a_start("two")) != ahead
    with launcher.loading(program, 1):
        assert len(children() - before) == 1
    assert not children() - before


def test_a_kept_launcher_ends_its_fork_server_in_the_middle_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import_8.py").write_text("import time; time.sleep(1000)")
    sys.path.insert(0, str(tmp_path))
    try:
        launcher = KeptLauncher(WorkerProgram(SLEEP, ("slow_to_import_8",)), 1)
    finally:
        sys.path.remove(str(tmp_path))
    began = time.monotonic()
    launcher.close()
    assert time.monotonic() - began < KILL_SECONDS
    assert not [pid for pid in alive_with("realgraph fork server") if parent_of(pid) == os.getpid()]


@pytest.mark.parametrize(("entry", "status"), [("quitting", 7), ("stubborn", -signal.SIGKILL)])
def test_a_fork_server_needs_nothing_that_macos_lacks(tmp_path: Path, entry: str, status: int) -> None:
    """Python before 3.13 has no `os.waitid` there, and no system but Linux gives orphans to who adopts them."""
    (tmp_path / "as_on_macos.py").write_text("import os, sys\nsys.platform = 'darwin'\ndel os.waitid, os.pidfd_open\n")
    sys.path.insert(0, str(tmp_path))

    async def ends() -> set[tuple[int, int]]:
        program = WorkerProgram(f"tests.launches:{entry}", ("as_on_macos",))
        fleet = await LocalLauncher().start(boots_in(tmp_path, 2), program, 60)
        if status < 0:
            await fleet.kill(0)
            await fleet.kill(1)
        found = {await fleet.wait_exit() for _ in range(2)}
        await fleet.terminate(0)
        return found

    try:
        assert asyncio.run(asyncio.wait_for(ends(), 60)) == {(0, status), (1, status)}
    finally:
        sys.path.remove(str(tmp_path))
    assert not alive_with(str(tmp_path))


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


SLOW_TO_LOAD = """
from pathlib import Path
from tests.waiting import until
Path(__file__).with_name("loading").touch()
until(Path(__file__).with_name("alone").exists)
"""


def test_a_fork_server_ends_without_a_word_when_its_owner_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = socket.socketpair()
    (tmp_path / "slow_to_load.py").write_text(SLOW_TO_LOAD)
    with theirs, (tmp_path / "stderr").open("w") as stderr:
        command = processes.command_line(theirs.fileno(), ("slow_to_load",))
        server = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=stderr)
    assert until((tmp_path / "loading").exists)
    ours.close()
    (tmp_path / "alone").touch()
    assert server.wait(30) == 0
    assert not (tmp_path / "stderr").read_text()
