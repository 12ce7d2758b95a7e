"""The guardian of one process of user functions: `python -m realgraph.runtime.functions.guardian OPTIONS`.

It forks the process that runs the functions, and sees to it that nothing the functions have started outlives that
process, its owner, or their limit in number: daemons in sessions of their own included (Linux; elsewhere the process
group). It ends when its owner does, in whatever way, since the socket between them ends then; the functions' process
ends with it through the kernel. It imports next to nothing, so it takes little time and memory.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from realgraph.runtime.processes.descendants import adopt_orphans, count_descendants, kill_descendants, newest_number
from realgraph.runtime.processes.titles import set_title

LOOK_SECONDS = 0.1  # between two looks at what the functions have started
FULL_LOOK_SECONDS = 2.0  # a count that trusts no shortcut
END_SECONDS = 0.5  # for a process that has closed its end of the calls to end: then it is killed
LINUX = sys.platform == "linux"


def main(options: str) -> None:
    """The guardian's whole life. options: JSON of [control fd, calls fd, user_dir, memory bytes, process limit]."""
    control_fd, calls_fd, user_dir, memory_bytes, limit = json.loads(options)
    set_title("realgraph function guardian")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its owner
    if LINUX:
        adopt_orphans()
        with contextlib.suppress(PermissionError):  # where it may, it comes before all that functions have started
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    control = socket.socket(fileno=control_fd)
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        control.close()
        _become_child(calls_fd, guardian, user_dir, memory_bytes)
    os.close(calls_fd)
    report = Guard(control, child, limit).watch()
    if LINUX:
        kill_descendants()
    with contextlib.suppress(OSError):  # the owner has ended
        control.sendall(report.encode())
    os._exit(0)


def _become_child(calls_fd: int, guardian: int, user_dir: str, memory_bytes: int) -> NoReturn:
    """The functions' process, in a session of its own."""
    os.setsid()
    del sys.argv[1:]  # they are the guardian's: a module of the user's may parse its own
    from realgraph.runtime.functions.child import main as run  # late: the guardian itself needs none of it

    run(calls_fd, guardian, user_dir, memory_bytes)
    raise AssertionError("the functions' process does not return")


class Guard:
    """Waits for a reason to kill the functions' process and everything below it."""

    def __init__(self, control: socket.socket, child: int, limit: int) -> None:
        self._control, self._child, self._limit = control, child, limit
        self._status: int | None = None
        self._counted, self._newest, self._counted_at = 1, newest_number() if LINUX else 0, time.monotonic()

    def watch(self) -> str:
        """Returns the reason, with the functions' process dead: `exit STATUS`, `closed`, `limit COUNT`, or `stopped`.

        exit: it ended by itself. closed: it lived on without its end of the calls. stopped: the owner wished it.
        """
        while True:
            ready, _, _ = select.select([self._control], [], [], LOOK_SECONDS)
            if ready:
                asked = self._control.recv(64)  # nothing: the owner has hung up, or ended
                reason = self._after_close() if asked else "stopped"
            elif self._has_ended():
                reason = f"exit {self._status}"
            elif (count := self._crowd()) > self._limit:
                reason = f"limit {count}"
            else:
                continue
            self._kill()
            return reason

    def _after_close(self) -> str:
        deadline = time.monotonic() + END_SECONDS
        while not self._has_ended():
            if time.monotonic() > deadline:
                return "closed"
            time.sleep(0.002)
        return f"exit {self._status}"

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def _crowd(self) -> int:
        """Processes below us, or fewer where a bound shows that they are within the limit."""
        if not LINUX:
            return 0
        newest, now = newest_number(), time.monotonic()
        started = newest - self._newest
        if 0 <= started <= self._limit - self._counted and now - self._counted_at < FULL_LOOK_SECONDS:
            return self._counted
        self._counted, self._newest, self._counted_at = count_descendants(), newest, now
        return self._counted

    def _kill(self) -> None:
        """The functions' process and its group at once; what else there is falls to `kill_descendants`."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet; (macOS) only zombies in it
                os.killpg(self._child, signal.SIGKILL)
            os.kill(self._child, signal.SIGKILL)
        elif not LINUX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
