"""The fork server of a run's workers, and the guardians of its functions, as forks of the run's own processes, whose
heavy modules are loaded already."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from realgraph.runtime.functions import guardian as guardian_module
from realgraph.runtime.processes import processes

LAST_PRELOADED = "tests.warmed"  # by the fork server of tests
PATIENCE = 180.0  # seconds that anything may take before a test gives up on it


class Forked:
    """A process that is forked from this one, which has its modules already."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else PATIENCE)
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout or PATIENCE)
            else:
                time.sleep(0.005)
        return self._status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self._status is None:
            os.kill(self.pid, sig)


def fork_server(pipe: Any, modules: Sequence[str], threads: int) -> Forked:
    """Stands for `local.open_server`: the server is a fork of this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Forked(pid)
    status = 1
    try:
        keep = os.dup(pipe.fileno())
        _stand_alone((keep,))
        processes.serve(keep, parent, list(modules))
        status = 0
    finally:
        os._exit(status)


def guardian(options: str, fds: tuple[int, int], user_dir: str, env: Mapping[str, str]) -> Forked:
    """Stands for `process.open_guardian`: the guardian is a fork of this process."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        _stand_alone(fds)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(user_dir)
        os.environ.clear()
        os.environ.update(env)
        for name in [name for name in _own_modules() if _lies_in(sys.modules[name], user_dir)]:
            del sys.modules[name]  # an interpreter of its own would not have them
        guardian_module.main(options)
    finally:
        os._exit(1)


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


def _own_modules() -> Iterator[str]:
    """The modules imported since the fork server: a look at the thousands before them would copy all their pages."""
    return takewhile(lambda name: name != LAST_PRELOADED, reversed(sys.modules))


def _lies_in(module: Any, folder: str) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(f"{folder}/")
