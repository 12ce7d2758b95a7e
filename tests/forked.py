"""The fork server of a run's workers as a fork of the run's own process, whose heavy modules are loaded already."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from realgraph.runtime.processes import processes

PATIENCE = 90.0  # seconds that anything may take before a test gives up on it


class Forked:
    """A fork server that is forked from this process, which has its modules already."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else PATIENCE)
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or PATIENCE)
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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        keep = os.dup(pipe.fileno())
        first = max(3, keep)
        os.closerange(3, first)
        os.closerange(first + 1, 4096)
        processes.serve(keep, parent, list(modules))
        status = 0
    finally:
        os._exit(status)
