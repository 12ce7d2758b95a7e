"""Starts a new process in the place of each engine that is lost: on the same host, under a new key, as often as
`rollout.replacements` allows. Master side. When the process is ready and its peers know it, the Scheduler is told.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from realgraph.graphs.errors import reason
from realgraph.planner.request.engine_support import SGLANG_KIND
from realgraph.runtime.commands.actions import EngineJoined
from realgraph.runtime.job.job import Job
from realgraph.runtime.processes.clock import time_limit
from realgraph.runtime.processes.launcher import Fleet, LaunchError, WorkerBoot
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import Configure, Failed, Hello, Meet, Peer, Ready
from realgraph.runtime.wire.sockets import TransportError
from realgraph.runtime.wire.transport import MasterSocket

LOOK_SECONDS = 0.1  # between two looks at whether a process has ended
PAUSE_SECONDS = 1.0  # after one that did not get ready


Note = Callable[[str, Literal["info", "warning"]], None]


class RunWorkers(NamedTuple):
    """The workers of a run. boots: that they began with. In peers a new process takes the place of the one before."""

    fleet: Fleet
    socket: MasterSocket
    boots: Mapping[int, WorkerBoot]
    peers: dict[int, Peer]


class NotReady(Exception):
    """A process did not get ready; the text says why."""


class EngineReplacements:
    """Those of one run. joined: called, with the event for the Scheduler, where a process is ready. note: shows a
    line."""

    def __init__(self, job: Job, workers: RunWorkers, joined: Callable[[EngineJoined], None], note: Note) -> None:
        self._job, self._joined, self._note = job, joined, note
        self._fleet, self._socket, self._boots, self._peers = workers
        self.possible = job.rollout.engine != SGLANG_KIND
        self.n_started = 0
        self.replacing: set[int] = set()  # workers whose processes end and begin by our doing
        self._processes: Counter[int] = Counter()  # that were started in the place of each worker
        self._one = asyncio.Lock()  # at a time: whoever starts knows all that have
        self._heard: dict[int, asyncio.Queue[Hello | Ready | Failed]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def lost(self, worker: int) -> None:
        """An engine is lost, and the run goes on: begin to replace it, where that is possible."""
        if self.possible and self._job.rollout.replacements:
            self.replacing.add(worker)
            task = asyncio.create_task(self._replace(worker))
            self._tasks.add(task)

    def hear(self, reply: Hello | Ready | Failed) -> None:
        """A message of a worker, which may be one that starts."""
        if reply.worker in self._heard:
            self._heard[reply.worker].put_nowait(reply)

    def check(self) -> None:
        """Raise what has gone wrong in a replacement, if anything: a bug of ours."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()

    async def close(self) -> None:
        """Replace nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _replace(self, worker: int) -> None:
        limit = self._job.rollout.replacements
        async with self._one:
            while self.n_started < limit:
                self.n_started += 1
                self._processes[worker] += 1
                try:
                    await self._started(worker)
                except LaunchError as error:
                    self.n_started -= 1
                    self.replacing.remove(worker)
                    self._note(f"the place of worker {worker} stays empty: {error}", "warning")
                    return
                except NotReady as error:
                    self._note(f"the new process in the place of worker {worker} is not ready: {error}", "warning")
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    self.replacing.remove(worker)
                    self._joined(EngineJoined(worker, self._processes[worker]))
                    return
            self.replacing.remove(worker)
        self._note(
            f"the place of worker {worker} stays empty: all {limit} of rollout.replacements were made", "warning"
        )

    async def _started(self, worker: int) -> None:
        """Start a process for a worker that is gone, and return when it is ready and all others know it. Raises
        NotReady, with nothing of it left running; LaunchError where its host is gone."""
        self._heard[worker] = asyncio.Queue()
        try:
            async with time_limit(self._job.runtime.start_seconds):
                while worker in self._fleet.running:  # one that was silent has been killed
                    await asyncio.sleep(LOOK_SECONDS)
                keys = make_keys()
                self._socket.replace_key(worker, keys.public)
                await self._fleet.restart(replace(self._boots[worker], keys=keys))
                await self._shake_hands(worker)
        except (TimeoutError, NotReady, TransportError, OSError) as error:
            await self._fleet.kill(worker)
            seconds = self._job.runtime.start_seconds
            late = f"it has taken {seconds:g} s (runtime.start_seconds)"
            text = (
                late if isinstance(error, TimeoutError) else reason(error) if isinstance(error, OSError) else str(error)
            )
            raise NotReady(text) from error
        finally:
            del self._heard[worker]

    async def _shake_hands(self, worker: int) -> None:
        hello = await self._next(worker)
        assert isinstance(hello, Hello), f"{type(hello).__name__} before Hello"
        peers = {**self._peers, worker: hello.peer}
        in_order = tuple([peers[number] for number in sorted(peers)])
        await self._socket.send(worker, Configure(msgspec.json.encode(self._job), in_order, collective="", joined=True))
        ready = await self._next(worker)
        assert isinstance(ready, Ready), f"{type(ready).__name__} before Ready"
        self._peers[worker] = hello.peer
        for other in sorted(self._fleet.running - {worker}):
            try:
                await self._socket.send(other, Meet(hello.peer, self._processes[worker]))
            except TransportError:
                continue  # it has just ended, or is silent: its own loss is on its way
        if worker not in self._fleet.running:
            raise NotReady(self._ended(worker))

    async def _next(self, worker: int) -> Hello | Ready:
        """The next message of the new process. Raises NotReady where there is none."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    reply = await self._heard[worker].get()
            except TimeoutError:
                if worker in self._fleet.running:
                    continue
                raise NotReady(self._ended(worker)) from None
            if isinstance(reply, Failed):
                raise NotReady(reply.error)
            return reply

    def _ended(self, worker: int) -> str:
        last = self._fleet.last_lines(worker, 1).strip()
        return f"it has ended{f': {last}' if last else ''}"
