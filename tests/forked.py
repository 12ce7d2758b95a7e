"""The fork server of a run's workers, and the guardians of its functions, as forks of a process that has their heavy
modules already."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn

from realgraph.runtime.functions import guardian, process
from realgraph.runtime.processes import local, processes
from realgraph.runtime.processes.titles import set_title

PATIENCE = 180.0  # seconds that anything may take before a test gives up on it
_ANSWER_BYTES = 12  # of a number in an answer


class Forked:
    """A process that `start_forks` has forked."""

    def __init__(self, asked: socket.socket, pid: int) -> None:
        self.pid = pid
        self._asked = asked
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            self._asked.settimeout(timeout if timeout is not None else PATIENCE)
            try:
                self._status = int(self._asked.recv(_ANSWER_BYTES) or 1)  # nothing: the run has ended
            except TimeoutError as error:
                raise subprocess.TimeoutExpired("forked process", timeout or PATIENCE) from error
            self._asked.close()
        return self._status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):  # it is reaped already, by its parent
                os.kill(self.pid, sig)


def start_forks() -> None:
    """From here on the fork server and the guardians of this process and of its forks are forks too.

    This process must have no threads yet. Forks come from one that never has any: in a fork of a process with threads,
    a lock that another thread held, such as that of the standard error output, is held for ever.
    """
    parent = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    address = listener.getsockname()
    local.open_server = partial(_open_server, address)
    process.open_guardian = partial(_open_guardian, address)  # in the workers too, which are forks of the other one
    if os.fork():
        listener.close()
        return
    try:
        _stand_alone((listener.fileno(),))
        processes.die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        _serve(listener)
    finally:
        os._exit(1)


def _open_server(address: bytes, pipe: socket.socket, modules: Sequence[str], threads: int) -> Forked:
    """Stands for `local.open_server`."""
    return _ask(address, [list(modules)], [pipe.fileno()])


def _open_guardian(address: bytes, options: str, fds: tuple[int, int], user_dir: str, env: Mapping[str, str]) -> Forked:
    """Stands for `process.open_guardian`."""
    return _ask(address, [json.loads(options)[len(fds) :], user_dir, dict(env)], fds)


def _ask(address: bytes, order: list[Any], fds: Sequence[int]) -> Forked:
    asked = socket.socket(socket.AF_UNIX)
    asked.settimeout(PATIENCE)
    asked.connect(address)
    socket.send_fds(asked, [json.dumps(order).encode()], [1, 2, *fds])
    return Forked(asked, int(asked.recv(_ANSWER_BYTES)))


def _serve(listener: socket.socket) -> NoReturn:
    """Fork a process for everybody who connects, and give its number at once and its exit code at its end."""
    forked: dict[int, tuple[int, socket.socket]] = {}  # the descriptor of a process -> its number, and who asked
    while True:
        for ready in wait([listener, *forked]):
            if isinstance(ready, int):
                answer, connection = forked.pop(ready)
                os.close(ready)
                answer = os.waitstatus_to_exitcode(os.waitpid(answer, 0)[1])
            else:
                connection, _ = listener.accept()
                answer = os.fork()
                if answer == 0:
                    _obey(connection)
                forked[os.pidfd_open(answer)] = (answer, connection)
            with contextlib.suppress(OSError):  # who asked has ended
                connection.sendall(b"%*d" % (_ANSWER_BYTES, answer))


def _obey(connection: socket.socket) -> NoReturn:
    """Be the process that is asked for."""
    status = 1
    try:
        parent = os.getppid()
        order, (out, error, *fds), _, _ = socket.recv_fds(connection, 1 << 20, 4)
        os.dup2(out, 1)
        os.dup2(error, 2)
        _stand_alone(fds)
        match json.loads(order):
            case [modules]:
                processes.serve(fds[0], parent, modules)
            case [options, user_dir, env]:
                set_title("realgraph function guardian")  # first: it is written where the environment of now lies
                os.chdir(user_dir)
                os.environ.clear()
                os.environ.update(env)
                guardian.main(json.dumps([*fds, *options]))
        status = 0
    finally:
        os._exit(status)


def _stand_alone(fds: Sequence[int]) -> None:
    """A session of its own, default signals, and no open files but these and the standard ones."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    first = 3
    for fd in sorted(fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 4096)
