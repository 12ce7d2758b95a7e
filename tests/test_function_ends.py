"""Processes that user functions start end with their own, its guardian, a worker, the fork server or the master."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit, UnitResult
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.functions.pool import FunctionPool
from realgraph.runtime.functions.process import Bounds
from realgraph.runtime.processes.launcher import WorkerBoot, WorkerProgram
from realgraph.runtime.processes.local import LocalFleet, LocalLauncher
from realgraph.runtime.wire.curve import make_keys
from tests.traces import parent_of
from tests.waiting import killed, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons are out of reach")

MARK = "TEST_FUNCTION_ENDS"
REWARD = {"reward": "sample float32"}
SPREADS = '''
import os, subprocess, sys, time

MOST = 400  # a test that fails leaves no more than these

def daemon(text):
    """Starts a program twice over: in a session of its own, and one that its parent has left."""
    subprocess.Popen(["sleep", "120"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "120"])
        os._exit(0)
    if text == "hang":
        time.sleep(120)
    return 1.0

def bomb(text):
    """Forks as fast as it can, every process in a session of its own."""
    left, leave = os.pipe2(os.O_NONBLOCK)
    os.write(leave, bytes(MOST))
    os.close(leave)
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if os.read(left, 1):  # each byte is one process's, whoever is first
            if os.fork() == 0 and text == "sessions":
                os.setsid()
        elif text == "quietly":
            time.sleep(1)
    os._exit(0)

def relay(text):
    """Never more than one process besides this one, each with a life of its own of a moment."""
    if os.fork() == 0:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            if os.fork() > 0:
                os._exit(0)
            os.setsid()
    time.sleep(120)

def copies(text):
    os.fork()
    return 1.0

def terminated(text):
    """The share of copies that end when they are asked to as they begin."""
    ended = 0
    for _ in range(20):
        copy = os.fork()
        if copy == 0:
            time.sleep(60)
        os.kill(copy, 15)
        last = time.monotonic() + 2
        while time.monotonic() < last and not (done := os.waitpid(copy, os.WNOHANG)[0]):
            time.sleep(0.01)
        ended += done == copy
        if done != copy:
            os.kill(copy, 9)
    return ended / 20
'''


def marked(mark: str) -> list[int]:
    """Processes, zombies left out, that were started with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A value that only processes of this test have in their environment; they are killed after it in any case."""
    value = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(MARK, value)
    yield value
    while left := marked(value):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spreads.py").write_text(SPREADS)
    return tmp_path


def call(fn: str, seconds: float = 60.0) -> Function:
    return Function(f"spreads:{fn}", ("text",), REWARD, timeout_seconds=seconds, on_error="score", env=(MARK,))


def unit(text: str) -> list[Unit]:
    return [Unit((0,), {"text": text})]


def test_daemons_end_with_an_orderly_end(folder: Path, mark: str) -> None:
    with FunctionHost(str(folder)) as host:
        assert host.run("r", call("daemon"), unit("go"))[0].values == {"reward": 1.0}
        assert until(lambda: len(marked(mark)) == 4)  # guardian, functions, two daemons
    assert marked(mark) == []


def test_daemons_end_with_a_time_limit_and_with_their_process(folder: Path, mark: str) -> None:
    with FunctionHost(str(folder)) as host:
        assert "took more than 1 s" in host.run("r", call("daemon", 1.0), unit("hang"))[0].error
        assert marked(mark) == []
        thread = threading.Thread(target=host.run, args=("r", call("daemon"), unit("hang")))
        thread.start()
        assert until(lambda: len(marked(mark)) == 4 and sum(map(sleeps, marked(mark))) == 2)  # each runs what it is for
        (functions,) = [pid for pid in marked(mark) if parent_of(pid) == host.pids()[0] and not sleeps(pid)]
        os.kill(functions, signal.SIGSEGV)
        thread.join(20)
        assert until(lambda: marked(mark) == [], 5)


@pytest.mark.parametrize("victim", ["guardian", "functions"])
def test_what_is_killed_from_outside_is_run_again_once(folder: Path, mark: str, victim: str) -> None:
    results: list[UnitResult] = []
    with FunctionHost(str(folder)) as host:
        thread = threading.Thread(target=lambda: results.extend(host.run("r", call("daemon"), unit("hang"))))
        thread.start()
        before: set[int] = set()
        for _ in range(2):
            assert until(lambda: sum(sleeps(pid) for pid in set(marked(mark)) - before) == 2)
            before.update(marked(mark))  # a guardian that is killed leaves daemons
            (guardian,) = host.pids()
            (functions,) = [pid for pid in marked(mark) if parent_of(pid) == guardian and not sleeps(pid)]
            os.kill(guardian if victim == "guardian" else functions, signal.SIGKILL)
        thread.join(20)
        assert "killed by SIGKILL" in results[0].error
        assert results[0].values == {"reward": 0.0}  # of `on_error: score`


def sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended


@pytest.mark.parametrize("text", ["one session", "sessions", "quietly"])
def test_a_function_that_forks_without_end_is_ended_by_the_number(folder: Path, mark: str, text: str) -> None:
    with FunctionHost(str(folder), max_processes=40) as host:
        host.check("r", call("bomb"))
        before = time.monotonic()
        error = host.run("r", call("bomb"), unit(text))[0].error
        assert time.monotonic() - before < 15
        assert "processes running, more than the 40 allowed, and all were killed" in error
        assert error.startswith("r: spreads:bomb on sample 0: had ")
        assert marked(mark) == []


@pytest.mark.parametrize("fn", ["bomb", "relay"])
def test_a_function_that_forks_without_end_is_ended_by_its_time_limit(folder: Path, mark: str, fn: str) -> None:
    with FunctionHost(str(folder), max_processes=10_000) as host:
        host.check("r", call(fn))
        before = time.monotonic()
        assert "took more than 1 s" in host.run("r", call(fn, 1.0), unit("sessions"))[0].error
        assert time.monotonic() - before < 15
        assert marked(mark) == []


def test_a_copy_of_the_process_answers_nothing(folder: Path, mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    with FunctionHost(str(folder)) as host:
        for _ in range(3):
            assert host.run("r", call("copies"), unit("go"))[0].values == {"reward": 1.0}
        assert until(lambda: len(marked(mark)) == 2, 5)
    assert "a copy of the functions' process, made by os.fork, has returned" in capfd.readouterr().out


def test_a_copy_that_is_asked_to_end_as_it_begins_ends(folder: Path, mark: str) -> None:
    with FunctionHost(str(folder)) as host:
        assert host.run("r", call("terminated"), unit("go"))[0].values == {"reward": 1.0}


# --- the whole tree of a run ------------------------------------------------------------------------------------------


def functions_of(worker: int, mark: str) -> tuple[int, int]:
    """The guardian of a worker's functions, and their process."""
    guardian = min(marked(mark), key=lambda pid: (parent_of(pid) != worker, pid))
    functions = min(marked(mark), key=lambda pid: (parent_of(pid) != guardian, sleeps(pid), pid))
    assert not sleeps(functions)
    return guardian, functions


def work(boot: WorkerBoot) -> None:
    """A worker whose function has started daemons and does not return."""
    folder = Path(boot.log).parent
    os.environ[MARK] = (folder / "mark").read_text()  # from here on: what this worker starts has it
    with FunctionHost(str(folder)) as host:
        host.run("r", call("daemon", 120.0), unit("hang"))


async def start(folder: str) -> LocalFleet:
    boot = WorkerBoot(0, "tcp://127.0.0.1:9", make_keys().public, make_keys(), str(Path(folder) / "0.log"))
    return await LocalLauncher().start([boot], WorkerProgram(f"{__name__}:work"), 60)


MASTER = """
import asyncio, importlib, sys
sys.path[:] = {path!r}
async def run():
    fleet = await importlib.import_module({module!r}).start({folder!r})
    print(fleet.handles[0].pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await fleet.terminate(0)
    print("ended", flush=True)
    sys.stdin.readline()
asyncio.run(run())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["nobody", "master", "fork server", "worker", "guardian", "functions", "all of them"]
)
def test_nothing_that_functions_started_outlives_anybody(folder: Path, victim: str) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    (folder / "mark").write_text(mark)
    code = textwrap.dedent(MASTER).format(path=sys.path, module=__name__, folder=str(folder))
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with killed(subprocess.Popen([sys.executable, "-c", code], **pipes, start_new_session=True)) as master:
        assert master.stdout is not None
        assert master.stdin is not None
        worker = int(master.stdout.readline())
        assert until(lambda: sum(map(sleeps, marked(mark))) == 2), (folder / "0.log").read_text()
        guardian, functions = functions_of(worker, mark)
        before = set(marked(mark))
        whom = {
            "nobody": [],
            "master": [master.pid],
            "fork server": [parent_of(worker)],
            "worker": [worker],
            "guardian": [guardian],
            "functions": [functions],
            "all of them": [master.pid, parent_of(worker), worker],
        }[victim]
        for pid in whom:
            with contextlib.suppress(ProcessLookupError):  # it has ended with the one before it
                os.kill(pid, signal.SIGKILL)
        if victim in ("guardian", "functions"):  # what they ran runs again, once
            assert until(lambda: sum(sleeps(pid) for pid in set(marked(mark)) - before) == 2)
            os.kill(functions_of(worker, mark)[victim == "functions"], signal.SIGKILL)
        if not whom:
            master.stdin.write("end\n")
            master.stdin.flush()
            assert master.stdout.readline() == "ended\n"
            assert marked(mark) == []
        gone = until(lambda: marked(mark) == [], 60)
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        assert gone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pool_that_has_failed_says_why_to_whoever_comes_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pool: FunctionPool) -> None:
        raise NameError("a mistake of ours")

    monkeypatch.setattr(FunctionPool, "_dispatch", fails)
    pool = FunctionPool(str(folder), 1, Bounds(1 << 30, 64), 10.0)
    assert until(lambda: not pool._thread.is_alive())
    with pytest.raises(RuntimeError, match=r"takes no more work(.|\n)*NameError: a mistake of ours"):
        pool.submit([])
