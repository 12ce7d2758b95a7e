"""Runs one SGLang server for the process on the other end of an inherited socket, and ends it whole with that process.

A script for the interpreter that has SGLang, which has nothing of ours: the standard library alone, Python 3.10. The
first line on the socket is the order, as JSON; the API key comes in it, so that it is on no command line and in no
environment. SGLang writes its arguments to its log, the key among them: the log is written here, without it.
"""

import contextlib
import ctypes
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HIDDEN = b"[key]"
LONGEST_LINE = 1 << 16
LINE_ENDS = (b"\n", b"\r")  # progress bars end in the latter
SHARED = "/dev/shm"
KINDS = ("sglang_", "sgl_", "sem.mp-", "psm_")  # of SGLang, and of Python's multiprocessing
LOOK_SECONDS = 1.0  # from one look at the server's shared memory to the next
KILL_SECONDS = 10.0  # for the kernel to let go of what is killed


class Log:
    """A file that never gets to see the key, whichever pieces it comes in."""

    def __init__(self, path: str, key: bytes) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._key = key
        self._rest = b""  # of a line that goes on

    def write(self, piece: bytes) -> None:
        """Append what is whole: lines; and of a very long one all that can't be the beginning of the key."""
        text = self._rest + piece
        end = max(text.rfind(mark) for mark in LINE_ENDS) + 1
        if len(text) - end > LONGEST_LINE:
            text, end = text.replace(self._key, HIDDEN), len(text)
            end = len(text) - len(self._key)
        self._append(text[:end])
        self._rest = text[end:]

    def close(self) -> None:
        """Append the rest."""
        self._append(self._rest)

    def _append(self, text: bytes) -> None:
        text = text.replace(self._key, HIDDEN)
        while text:
            text = text[os.write(self._file, text) :]


def control(option: int, value: int) -> None:
    """prctl. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def receive_order(owner: socket.socket) -> dict[str, Any]:
    """The line that the owner sends first. Raises EOFError where it has ended before."""
    line = b""
    while not line.endswith(b"\n"):
        piece = owner.recv(1 << 16)
        if not piece:
            raise EOFError("the owner has ended")
        line += piece
    order: dict[str, Any] = json.loads(line)
    return order


def serve(guardian: int) -> None:
    """The server's process: `python -m sglang.launch_server` with the arguments on stdin, and the key besides.

    It ends with its guardian.
    """
    control(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        sys.exit(1)
    order = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    from sglang.srt import server_args  # type: ignore[import-not-found]  # of this interpreter's environment

    prepare = server_args.prepare_server_args

    def prepare_with_key(argv: list[str]) -> Any:
        prepared = prepare(argv)
        prepared.api_key = order["key"]
        return prepared

    server_args.prepare_server_args = prepare_with_key
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def parents() -> dict[int, int]:
    """Process -> its parent, of all that there are, zombies too."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            continue
    return found


def kill_all() -> None:
    """Kill and reap everything below this process; what was below a killed one is below this one then."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in [pid for pid, parent in parents().items() if parent == os.getpid()]:
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def shared_files() -> set[str]:
    """Files in shared memory of the kinds that SGLang makes, which a process below this one has mapped.

    They are known by their inode: a semaphore is mapped before it gets its name.
    """
    family, grown, mapped = {os.getpid()}, -1, set()
    while grown != len(family):
        grown = len(family)
        family |= {pid for pid, parent in parents().items() if parent in family}
    for pid in family:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as file:
                mapped |= {int(line.split(maxsplit=5)[4]) for line in file if SHARED in line}
        except OSError:  # it has ended
            continue
    with os.scandir(SHARED) as entries:
        return {entry.path for entry in entries if entry.inode() in mapped and entry.name.startswith(KINDS)}


def start_server(order: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """The server's process, in our process group, with its output in a pipe."""
    server = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "serve", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert server.stdin is not None
    try:
        server.stdin.write(json.dumps(order).encode())
        server.stdin.close()
    except BrokenPipeError:  # it has ended; its output says why
        pass
    return server


class ServerGuardian:
    """Waits for the end of the owner, or of the server, and leaves nothing of the server behind."""

    def __init__(self, owner: socket.socket, order: dict[str, Any]) -> None:
        self._owner = owner
        self._parent: int = order["parent"]
        self._log = Log(order["log"], order["key"].encode())
        self._folder: str = order["folder"]
        self._server = start_server(order)
        assert self._server.stdout is not None
        self._output = self._server.stdout.fileno()
        os.set_blocking(self._output, False)
        self._watched = {self._output, owner.fileno()}
        self._shared: set[str] = set()
        self._to_look, self._next_look = False, 0.0  # it has printed something since the last look

    def run(self, wake: int) -> int:
        """Returns the exit status of the server: its code, 128 + N where signal N ended it."""
        status = None
        while status is None:
            ready = select.select([wake, *self._watched], [], [], self._until_look)[0]
            if wake in ready:
                os.read(wake, 4096)
            if self._output in ready:
                self._copy()
                self._to_look = True
            self._look()
            if self._owner_ended(ready):
                self._shared |= shared_files()
                os.kill(self._server.pid, signal.SIGKILL)
                self._watched.discard(self._owner.fileno())
            status = self._reap()
        self._shared |= shared_files()  # of what is left below it
        kill_all()
        self._copy()
        self._log.close()
        self._clear()
        return status

    def _copy(self) -> None:
        """Append to the log what the server has printed."""
        try:
            while piece := os.read(self._output, 1 << 16):
                self._log.write(piece)
        except BlockingIOError:
            return
        self._watched.discard(self._output)  # nobody has its other end

    def _look(self) -> None:
        """Note its shared memory while it lives: a server that is killed leaves that behind."""
        if self._to_look and time.monotonic() >= self._next_look:
            self._shared |= shared_files()
            self._to_look, self._next_look = False, time.monotonic() + LOOK_SECONDS

    @property
    def _until_look(self) -> float | None:
        """Seconds until its shared memory is to be looked at; None: only if it prints something."""
        return max(0.0, self._next_look - time.monotonic()) if self._to_look else None

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in self._shared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def _owner_ended(self, ready: list[int]) -> bool:
        if os.getppid() != self._parent:
            return True
        try:
            return self._owner.fileno() in ready and not self._owner.recv(4096)
        except ConnectionResetError:
            return True

    def _reap(self) -> int | None:
        """Reap what has ended; the server's exit status once it has."""
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == self._server.pid:
                code = self._server.returncode = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
        return None


def watch(descriptor: int) -> int:
    """The guardian's life. The kernel wakes it where its parent ends, even if somebody has stopped it."""
    owner = socket.socket(fileno=descriptor)
    order = receive_order(owner)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGCHLD, signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the owner answers them; the server starts with them
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    control(PR_SET_CHILD_SUBREAPER, 1)
    control(PR_SET_PDEATHSIG, signal.SIGCONT)
    return ServerGuardian(owner, order).run(read_end)


def main() -> None:
    """`launcher.py watch DESCRIPTOR`, and of the process that this starts, `launcher.py serve PID`."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]  # its files are none of SGLang's
    task, number = sys.argv[1], int(sys.argv[2])
    if task == "watch":
        sys.exit(watch(number))
    serve(number)


if __name__ == "__main__":
    main()
