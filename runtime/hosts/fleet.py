"""The workers of all hosts of a run as one fleet, known by what their agents say. Master side."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from realgraph.runtime.files.server import FileServer
from realgraph.runtime.hosts.host_logs import add_lines, record_place
from realgraph.runtime.hosts.hub import Hub
from realgraph.runtime.hosts.messages import (
    BEAT_SECONDS,
    AgentMessage,
    DumpStacks,
    EndHost,
    HostEnded,
    HostFacts,
    HostFailed,
    HostLeaves,
    HostStarted,
    Join,
    KillWorker,
    Looked,
    MasterBeat,
    MasterMessage,
    Refuse,
    RestartWorker,
    StacksDumped,
    WorkerEnded,
)
from realgraph.runtime.job.rotation import last_lines
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerStacks
from realgraph.runtime.processes.local import KILL_SECONDS
from realgraph.runtime.processes.stacks import DUMP_SECONDS
from realgraph.runtime.wire.sockets import TransportError

SILENT_SECONDS = 5.0
LOOK_SECONDS = 0.4  # between two looks at who is connected; the ends of workers explain failures that follow from them
ANSWER_SECONDS = 1.0  # beyond what a worker may take, for its agent to pass on the stacks
REPLY_SECONDS = 5.0  # beyond a grace, for an agent to answer


class RemoteHost:
    """One host of the run, as its agent has described it, and what it has answered so far."""

    def __init__(self, agent: bytes, facts: HostFacts) -> None:
        self.agent, self.facts = agent, facts
        self.looked: Looked | None = None
        self.asked = 0.0  # when it was told to look, Unix seconds of the master
        self.clock_ahead = 0.0  # seconds by which its clock is ahead of the master's
        self.started = False
        self.failed = ""
        self.ended = False
        self.answered = False  # by HostEnded
        self.missed = 0  # times in a row that it was not connected
        self.reason = ""  # for its end, where the master had not asked for it
        self.logs = ""  # the folder on it that its workers print to, '' where that is the run's
        self._heard = time.monotonic()

    def speaks(self) -> None:
        """A message of its agent has come."""
        self._heard = time.monotonic()

    @property
    def silent(self) -> bool:
        """True where its agent, which beats every second, has not been heard of for several."""
        return time.monotonic() - self._heard > SILENT_SECONDS

    @property
    def text(self) -> str:
        """`host b (10.0.0.2)`."""
        return f"host {self.facts.name} ({self.facts.address})"


def clock_ahead(question: tuple[float, float], answer: tuple[float, float]) -> float:
    """Seconds by which another clock is ahead, where both ways take equally long (RFC 5905, sec. 8: theta). question:
    when it was sent by this clock, and came by the other; answer: when it was sent by the other, and came by this."""
    return ((question[1] - question[0]) + (answer[0] - answer[1])) / 2


class HostsOwner(Protocol):
    """Says which hosts a run wants, and hears of them: the launcher."""

    @property
    def n_hosts(self) -> int:
        """The hosts of its plan."""
        ...

    @property
    def n_spare(self) -> int:
        """More that may join, and wait for another start of the run."""
        ...

    def welcome(self, host: RemoteHost, n_joined: int) -> None:
        """A host has joined; so many are there."""
        ...

    def invite_again(self, grace_seconds: float) -> EndHost:
        """The message that has hosts end their workers, and join another start of the run."""
        ...

    async def ended(self, n_coming: int) -> None:
        """All hosts have ended their workers, as far as they can be reached; so many join again."""
        ...


class HostsFleet:
    """Implements `launcher.Fleet` for the workers of several hosts. Made by `HostsLauncher`, which lets hosts join."""

    def __init__(self, hub: Hub, owner: HostsOwner) -> None:
        self._hub, self._owner = hub, owner
        self.files: FileServer | None = None  # for hosts that do not see the run directory
        self._spares: dict[bytes, RemoteHost] = {}
        self.hosts: dict[bytes, RemoteHost] = {}
        self._boots: dict[int, WorkerBoot] = {}
        self._host_of: dict[int, RemoteHost] = {}
        self._running: set[int] = set()
        self._lines: dict[int, str] = {}
        self._stacks: dict[int, WorkerStacks] = {}
        self._exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())
        self._watching = asyncio.create_task(self._watch())

    @property
    def workers(self) -> tuple[int, ...]:
        """All that were started, in order."""
        return tuple(sorted(self._boots))

    @property
    def running(self) -> frozenset[int]:
        """Those that have not ended."""
        return frozenset(self._running)

    def place(self, host: RemoteHost, boots: Sequence[WorkerBoot]) -> None:
        """These workers are on that host, and run from now on as far as is known."""
        for boot in boots:
            self._boots[boot.worker], self._host_of[boot.worker] = boot, host
            self._running.add(boot.worker)

    def _workers_of(self, host: RemoteHost) -> list[int]:
        return [worker for worker, its in self._host_of.items() if its is host]

    def last_lines(self, worker: int, n_lines: int = 20) -> str:
        """The end of a worker's log; '' where there is none yet."""
        relayed = "".join(self._lines.get(worker, "").splitlines(keepends=True)[-n_lines:])
        here = "" if self._host_of[worker].logs else last_lines(Path(self._boots[worker].log), n_lines)
        return here or relayed

    def host_of(self, worker: int) -> str:
        """`host b (10.0.0.2)`, and why it leaves the run, where it does."""
        host = self._host_of[worker]
        return host.text + (f", which leaves: {host.reason}" if host.reason else "")

    def clock_ahead(self, worker: int) -> float:
        """Seconds by which the clock of a worker's host is ahead of this host's."""
        return self._host_of[worker].clock_ahead

    async def wait_exit(self) -> tuple[int, int]:
        """The next worker that ended, each once, and its exit status."""
        return await self._exits.get()

    async def dump_stacks(self, worker: int) -> WorkerStacks:
        """See Fleet."""
        host = self._host_of[worker]
        self._stacks.pop(worker, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DUMP_SECONDS + ANSWER_SECONDS):
                if await self.send(host, DumpStacks(worker)):
                    await self.until(lambda: worker in self._stacks or host.ended, DUMP_SECONDS + ANSWER_SECONDS)
        return self._stacks.pop(worker, None) or WorkerStacks(worker, missing=f"{host.text} does not answer")

    async def kill(self, worker: int) -> None:
        """End one worker at once, with all that it started; nothing happens where it has ended."""
        if worker in self._running:
            await self.send(self._host_of[worker], KillWorker(worker))

    async def restart(self, boot: WorkerBoot) -> None:
        """See Fleet. Raises LaunchError where its host has left the run."""
        worker, host = boot.worker, self._host_of[boot.worker]
        assert worker not in self._running, f"worker {worker} has not ended"
        new = {"keys": boot.keys, "process": boot.process, "rendezvous": boot.rendezvous}
        self._boots[worker] = replace(self._boots[worker], **new)
        self._lines.pop(worker, None)
        self._running.add(worker)  # before its end can be told
        if host.ended or not await self.send(host, RestartWorker(self._boots[worker])):
            self._running.discard(worker)
            raise LaunchError(f"{self.host_of(worker)} is gone")

    async def terminate(self, grace_seconds: float = 5.0, *, again: bool = False) -> None:
        """See Fleet. An agent that can't be reached ends its workers by itself once it has missed the master for
        long."""
        end = self._owner.invite_again(grace_seconds) if again else EndHost(grace_seconds)
        living = [host for host in (*self.hosts.values(), *self._spares.values()) if not host.ended]
        for host in living:
            await self.send(host, end)
        last = time.monotonic() + grace_seconds + KILL_SECONDS + REPLY_SECONDS
        while time.monotonic() < last and not all(host.ended or host.silent for host in living):
            with contextlib.suppress(TimeoutError):
                await self.until(lambda: all(host.ended for host in living), BEAT_SECONDS)
        for task in (self._listening, self._watching):
            task.cancel()
        await asyncio.gather(self._listening, self._watching, return_exceptions=True)
        await self._hub.close()
        if self.files is not None:
            await self.files.close()
        await self._owner.ended(sum(host.answered for host in living) if again else 0)

    async def send(self, host: RemoteHost, message: MasterMessage) -> bool:
        """Send to a host's agent; False where it is not connected."""
        try:
            await self._hub.send(host.agent, message, host.text)
        except TransportError:
            return False
        return True

    async def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds that agents bring about. Raises TimeoutError, and what their messages raise."""
        async with asyncio.timeout(seconds):
            while not holds():
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait((changed, self._listening), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if self._listening.done():
                    self._listening.result()

    async def _listen(self) -> None:
        while True:
            agent, message = await self._hub.receive()
            host = self.hosts.get(agent) or self._spares.get(agent)
            if host is not None:
                host.speaks()
                self._note(host, message)
            elif isinstance(message, Join):
                await self._take_in(RemoteHost(agent, message.facts))
            self._changed.set()

    async def _watch(self) -> None:
        """An agent that has hung up, and does not dial in again at once, is gone, and its workers with it."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for host in [host for host in self.hosts.values() if host.started and not host.ended]:
                host.missed = 0 if await self.send(host, MasterBeat()) else host.missed + 1
                if host.missed > 1:
                    host.reason = host.reason or "its agent is gone"
                    self._ended(host)

    async def _take_in(self, host: RemoteHost) -> None:
        if not self._boots:
            for other in [other for other in self.hosts.values() if other.silent]:
                del self.hosts[other.agent]  # its agent was killed, and may have been started again
            if len(self.hosts) < self._owner.n_hosts:
                self.hosts[host.agent] = host
                self._owner.welcome(host, len(self.hosts))
                return
        for other in [other for other in self._spares.values() if other.silent]:
            del self._spares[other.agent]
        if len(self._spares) < self._owner.n_spare:
            self._spares[host.agent] = host
            self._owner.welcome(host, len(self.hosts) + len(self._spares))
            return
        names = ", ".join(sorted(other.facts.name for other in self.hosts.values()))
        await self.send(host, Refuse(f"the run has its {self._owner.n_hosts} hosts: {names}"))

    def _note(self, host: RemoteHost, message: AgentMessage) -> None:
        match message:
            case Looked():
                host.looked = message
                host.clock_ahead = clock_ahead((host.asked, message.asked), (message.answered, time.time()))
            case HostStarted(logs=logs):
                host.started, host.logs = True, logs
                for worker in self._workers_of(host) if logs else ():
                    record_place(Path(self._boots[worker].log), host.text, logs)
            case HostFailed(error=error):
                host.failed = error
            case WorkerEnded(worker=worker, status=status) if self._host_of.get(worker) is host:
                self._lines[worker] = message.last_lines
                if host.logs:
                    add_lines(Path(self._boots[worker].log), message.last_lines)
                self._end(worker, status)
            case StacksDumped(stacks=stacks) if self._host_of.get(stacks.worker) is host:
                self._stacks[stacks.worker] = stacks
            case HostEnded() if host.agent in self._spares:
                del self._spares[host.agent]
                host.ended = host.answered = True
            case HostEnded() if not self._boots:  # it has left before the run began: another may come
                del self.hosts[host.agent]
                host.ended = True
            case HostLeaves(reason=reason):
                host.reason = reason
            case HostEnded():
                host.answered = True
                self._ended(host)
            case _:
                pass  # a second Join of an agent that has reconnected, or of a worker that is not its own

    def _ended(self, host: RemoteHost) -> None:
        host.ended = True
        for worker in [worker for worker in self._running if self._host_of[worker] is host]:
            self._end(worker, -signal.SIGKILL)

    def _end(self, worker: int, status: int) -> None:
        if worker in self._running:
            self._running.remove(worker)
            self._exits.put_nowait((worker, status))
