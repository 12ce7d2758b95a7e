"""Starting workers wherever they are to run: the interface of a launcher, and what a worker is given. Any side.

Knows no host, no fork and no socket: `local.py` is the launcher of this host.
"""

import signal
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from realgraph.runtime.wire.curve import KeyPair


class LaunchError(Exception):
    """Workers could not be started; the text says why."""


class WorkerBoot(Struct, frozen=True):
    """All that a worker knows before its first message."""

    worker: int
    master: str  # whom to dial
    master_key: str  # and what key to expect there
    keys: KeyPair  # of this worker, for the master and for its peers
    log: str  # the file that it prints to, as its own host names it
    threads: int = 1  # of one operation on a CPU; set through the environment before the worker runs
    process: int = 0  # its number in the worker's place: from 1 where it stands for a lost one
    n_workers: int = 1
    node: int = 0  # of the plan's cluster: workers of one node share memory
    cpu: bool = False  # leave the host's GPUs alone
    rendezvous: bool = False  # it opens the store through which workers meet that form process groups
    interface: str = ""  # the address its data plane listens on; the launcher's to say
    owner_pid: int = 0  # of the process that ends the workers of this host with the run; the launcher's to say
    files: str = ""  # where this host does not see the run directory: who reads and writes it; the launcher's to say
    files_key: str = ""  # and what key to expect there


class WorkerProgram(Struct, frozen=True):
    """The program that every worker of a launch runs."""

    entry: str  # `module:function`, called with its WorkerBoot in the worker's process
    preload: tuple[str, ...] = ()  # modules worth loading once for all workers of a host; the entry's own is added


class WorkerStacks(Struct, frozen=True):
    """The stacks of a worker's threads, as faulthandler writes them, or why there are none."""

    worker: int
    text: str = ""
    missing: str = ""


class Fleet(Protocol):
    """Workers that run, wherever. To be ended by `terminate` in every case."""

    @property
    def workers(self) -> tuple[int, ...]:
        """All that were started, in order."""
        ...

    @property
    def running(self) -> frozenset[int]:
        """Those that have not ended."""
        ...

    def last_lines(self, worker: int, n_lines: int = 20) -> str:
        """The end of a worker's log, for an error message; '' where there is none yet."""
        ...

    def host_of(self, worker: int) -> str:
        """The host of a worker for an error message, such as `host b (10.0.0.2)`; '' where there is only this one."""
        ...

    def clock_ahead(self, worker: int) -> float:
        """Seconds by which the clock of a worker's host is ahead of this host's."""
        ...

    async def wait_exit(self) -> tuple[int, int]:
        """The next worker that ended, each once, and its exit status: the code, or -N where signal N killed it.

        Waits as long as workers live; for one task at a time.
        """
        ...

    async def dump_stacks(self, worker: int) -> WorkerStacks:
        """The places where a worker's threads are right now; within a few seconds, however stuck it is."""
        ...

    async def kill(self, worker: int) -> None:
        """End one worker at once, with all that it started; nothing happens where it has ended."""
        ...

    async def restart(self, boot: WorkerBoot) -> None:
        """Start a new process for a worker that has ended, on the same host. Its end is told as that of any other, also
        where it could not begin. Raises LaunchError where that host is gone."""
        ...

    async def terminate(self, grace_seconds: float = 5.0, *, again: bool = False) -> None:
        """End what still runs, after a grace by force, and return when nothing is left. again: the run is to start once
        more, on hosts that wait for it."""
        ...


class Launcher(Protocol):
    """Starts workers on the hosts that it knows."""

    @property
    def interface(self) -> str:
        """The address of this host that a master listens on for all workers to reach it."""
        ...

    async def start(self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float) -> Fleet:
        """Start one process per boot, and return once each has its process. Raises LaunchError, with nothing left
        running."""
        ...


def describe_exit(status: int) -> str:
    """`ended with exit code 1`, `was killed by SIGKILL`."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
