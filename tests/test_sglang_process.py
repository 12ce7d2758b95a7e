"""SGLang servers as processes: how they get their arguments, ports and keys, and that nothing of them is ever left.

The server is a small program under SGLang's name, since what is tested is what is around it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from realgraph.runtime.rollout.errors import ServerNotStarted
from realgraph.runtime.rollout.launcher import HIDDEN, LONGEST_LINE, LOOK_SECONDS, Log
from realgraph.runtime.rollout.server import Argument, ServerProcess, ServerSpec, command_arguments, hold_port
from tests.sglang_server import wait_ready
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ARGUMENTS = """
import argparse

def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--weight-version", "--mode"):
        parser.add_argument(name)
    for name in ("--port", "--nccl-port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--numbers", nargs="*", type=int)
    parser.add_argument("--flag", action="store_true")
    return parser.parse_args(argv)
"""
WORKER = """
import os, signal, time

def wait(stubborn):
    if stubborn:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
"""
LAUNCH = """
import http.server, mmap, multiprocessing, socket, subprocess, sys, time
from sglang.srt.server_args import prepare_server_args
from sglang.srt.worker import wait

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer " + Handler.key
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

if __name__ == "__main__":
    args = prepare_server_args(sys.argv[1:])
    print("server_args=" + repr(vars(args)), flush=True)
    if args.mode == "fails":
        raise SystemExit("no such model: " + args.model_path)
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=wait, args=(stubborn,)) for stubborn in (False, True)]
    lock = context.Lock()
    shared = open("/dev/shm/sglang_of_a_test_%d" % args.port, "w+b")
    shared.truncate(4096)
    memory = mmap.mmap(shared.fileno(), 4096)
    for child in children:
        child.start()
    print("has started", flush=True)
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True)
    rendezvous = socket.create_server((args.host, args.nccl_port))
    if args.mode == "hangs":
        time.sleep(600)
    Handler.key = args.api_key
    http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `sglang` is."""
    home = tmp_path_factory.mktemp("package")
    inner = home / "sglang" / "srt"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "server_args.py").write_text(ARGUMENTS)
    (inner / "worker.py").write_text(WORKER)
    (inner.parent / "launch_server.py").write_text(LAUNCH)
    return home


@pytest.fixture
def spec(package: Path, tmp_path: Path) -> Callable[..., ServerSpec]:
    def make(mode: str = "serves", start_seconds: float = 60.0) -> ServerSpec:
        arguments: dict[str, Argument] = {"mode": mode, "numbers": [1, 2], "flag": True}
        environment = {"PYTHONPATH": str(package)}
        log = str(tmp_path / "server.log")
        return ServerSpec(sys.executable, "/models/small", 7, log, arguments, environment, start_seconds=start_seconds)

    return make


@pytest.fixture
def process(spec: Callable[..., ServerSpec]) -> Iterator[ServerProcess]:
    """A server that is ready."""
    one = ServerProcess(spec())
    try:
        wait_ready(one)
        yield one
    finally:
        one.stop()


def family(pid: int) -> set[int]:
    """A process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that run; a zombie does not."""
    return {pid for pid in pids if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def shared_names(process: ServerProcess) -> set[str]:
    """Its files in shared memory: one of SGLang's name, and the semaphore of its lock."""
    mapped = set()
    for pid in family(process.pid):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in mapped}


def assert_free(url: str) -> None:
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass


# --- arguments and keys -----------------------------------------------------------------------------------------------


def test_arguments_are_those_of_the_command_line() -> None:
    given: dict[str, Argument] = {"tp_size": 2, "cuda-graph-bs": [1, 2], "flag": True, "no": False, "none": None}
    given |= {"map": {"a": 1}, "low": -1}
    expected = ["--tp-size=2", "--cuda-graph-bs", "1", "2", "--flag", "--map", '{"a":1}', "--low=-1"]
    assert list(command_arguments(given)) == expected
    for reserved in ("api_key", "--api-key", "port", "weight-version"):
        with pytest.raises(ValueError, match="is set by realgraph"):
            list(command_arguments({reserved: "x"}))


def test_the_key_reaches_the_server_and_nothing_that_others_can_read(process: ServerProcess) -> None:
    below = family(process.pid)
    assert len(below) >= 7  # guardian, server, a resource tracker, two workers, a shell and its two
    for pid in below:
        for name in ("cmdline", "environ"):
            assert process.key.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    log = Path(process.spec.log)
    text = log.read_bytes()
    assert process.key.encode() not in text
    assert b"'api_key': '[key]'" in text and b"'weight_version': '7'" in text and b"'numbers': [1, 2]" in text
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("size", [11, 997, 10**6])
def test_a_log_has_no_key_whichever_pieces_it_comes_in(size: int, tmp_path: Path) -> None:
    key = b"secret-of-the-server"
    text = b"first\n" + key + b"\nin the middle of " + key + b" a line\r" + b"x" * (3 * LONGEST_LINE) + key + b"y" * 100
    log = Log(str(tmp_path / "log"), key)
    for start in range(0, len(text), size):
        log.write(text[start : start + size])
    log.close()
    assert (tmp_path / "log").read_bytes() == text.replace(key, HIDDEN)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_stopped_leaves_no_process_port_or_folder(process: ServerProcess) -> None:
    below = family(process.pid)
    folder = next(
        Path(entry.removeprefix(b"TMPDIR=").decode())
        for entry in Path(f"/proc/{max(below)}/environ").read_bytes().split(b"\0")
        if entry.startswith(b"TMPDIR=")
    )
    shared = shared_names(process)
    assert folder.exists() and len(shared) == 2, shared
    process.stop()
    assert not shared & set(os.listdir("/dev/shm"))
    assert process.status is not None
    assert alive(below) == set() and not folder.exists()
    assert_free(process.url)


def test_a_server_that_is_killed_takes_all_below_it_along(process: ServerProcess) -> None:
    time.sleep(2 * LOOK_SECONDS)  # its guardian looks so often at the shared memory that it leaves when it is killed
    below, shared = family(process.pid), shared_names(process)
    server = min(below - {process.pid})
    os.kill(server, signal.SIGKILL)
    assert until(lambda: process.status is not None)
    assert process.status == 128 + signal.SIGKILL
    assert alive(below) == set()
    assert shared and not shared & set(os.listdir("/dev/shm"))


OWNER = """
import sys, time
from realgraph.runtime.rollout.server import ServerProcess, ServerSpec
process = ServerProcess(ServerSpec(sys.executable, "/models/small", 7, sys.argv[1], {"mode": "hangs"},
                                   {"PYTHONPATH": sys.argv[2]}))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["", "while its guardian is stopped"])
def test_a_server_ends_with_the_process_that_started_it(stopped: bool, package: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), str(package)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        guardian = int(owner.stdout.readline())
        assert until(lambda: len(family(guardian)) >= 7, 60)
        below = family(guardian)
        if stopped:
            os.kill(guardian, signal.SIGSTOP)
    finally:
        owner.kill()
        owner.wait(20)
    assert until(lambda: not alive(below)), alive(below)


def test_a_server_outlives_the_thread_that_started_it(spec: Callable[..., ServerSpec]) -> None:
    started: list[ServerProcess] = []
    thread = threading.Thread(target=lambda: started.append(ServerProcess(spec())))
    thread.start()
    thread.join(20)
    try:
        wait_ready(started[0])
    finally:
        started[0].stop()


def test_a_server_that_fails_shows_the_end_of_its_log(spec: Callable[..., ServerSpec]) -> None:
    process = ServerProcess(spec("fails"))
    with pytest.raises(ServerNotStarted, match="ended with status 1 before it was ready") as caught:
        wait_ready(process)
    process.stop()
    assert "no such model: /models/small" in str(caught.value) and process.key not in str(caught.value)


def test_a_server_that_never_answers_is_given_up_in_time(spec: Callable[..., ServerSpec]) -> None:
    process = ServerProcess(spec("hangs", start_seconds=3.0))
    began = time.monotonic()
    with pytest.raises(ServerNotStarted, match=r"was not ready within 3 s; the end of .*server\.log:\nserver_args="):
        wait_ready(process)
    assert time.monotonic() - began < 30
    process.stop()


def test_an_interpreter_without_sglang_says_so(spec: Callable[..., ServerSpec], tmp_path: Path) -> None:
    bare = ServerSpec(sys.executable, "/models/small", 7, str(tmp_path / "log"), {}, {"PYTHONPATH": str(tmp_path)})
    process = ServerProcess(bare)
    with pytest.raises(ServerNotStarted, match="No module named 'sglang'"):
        wait_ready(process)
    process.stop()


def test_an_interpreter_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ServerProcess(ServerSpec(str(tmp_path / "python"), "/models/small", 7, str(tmp_path / "log")))
    assert len(os.listdir("/proc/self/fd")) == before


# --- ports ------------------------------------------------------------------------------------------------------------


def listen_as_a_server_does(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # uvicorn, uvloop and torch's store do
        listener.bind(("127.0.0.1", port))
        listener.listen()
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_ports_that_are_held_go_to_nobody_else() -> None:
    """8 servers at a time, 104 starts, beside processes that take any free port."""
    done = threading.Event()

    def take_ports() -> int:
        taken, count = [], 0
        while not done.is_set():
            one = socket.create_server(("127.0.0.1", 0))
            taken.append(one)
            count += 1
            if len(taken) > 200:
                taken.pop(0).close()
        for each in taken:
            each.close()
        return count

    def start() -> int:
        with hold_port("127.0.0.1") as holder:
            time.sleep(0.05)  # the start of a server
            listen_as_a_server_does(holder.getsockname()[1])
            listen_as_a_server_does(holder.getsockname()[1])  # and again, after a restart
            return int(holder.getsockname()[1])

    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(take_ports) for _ in range(2)]
        for _ in range(13):
            ports = [future.result() for future in [pool.submit(start) for _ in range(8)]]
            assert len(set(ports)) == 8
        done.set()
        assert sum(other.result() for other in others) > 100
