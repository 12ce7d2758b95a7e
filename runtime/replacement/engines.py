"""Starts new processes in the place of each engine that is lost: on the same hosts, under new keys, as often as
`rollout.replacements` allows. Master side. When they are ready and their peers know them, the Scheduler is told.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from realgraph.graphs.errors import reason
from realgraph.runtime.commands.actions import EngineJoined
from realgraph.runtime.commands.failures import workers_text
from realgraph.runtime.job.job import Job
from realgraph.runtime.processes.clock import time_limit
from realgraph.runtime.processes.launcher import Fleet, LaunchError, WorkerBoot
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import Configure, Failed, Hello, Meet, Met, Peer, Ready
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
    """Those of one run. joined: called, with the event for the Scheduler, where an engine is ready. note: shows a
    line."""

    def __init__(self, job: Job, workers: RunWorkers, joined: Callable[[EngineJoined], None], note: Note) -> None:
        self._job, self._joined, self._note = job, joined, note
        self._fleet, self._socket, self._boots, self._peers = workers
        self.n_started = 0  # engines
        self.ending: set[int] = set()  # workers whose processes end by our doing, and may begin anew
        self._processes: Counter[tuple[int, ...]] = Counter()  # that were started in each place of an engine
        self._one = asyncio.Lock()  # at a time: whoever starts knows all that have
        self._heard: dict[int, asyncio.Queue[Hello | Ready | Failed]] = {}
        self._unmet: set[Met] = set()  # answers that are awaited
        self._tasks: set[asyncio.Task[None]] = set()

    async def lost(self, engine: tuple[int, ...]) -> None:
        """An engine is lost, and the run goes on: end what is left of it, and begin to replace it, where the run allows
        that. engine: its workers, ascending."""
        self.ending.update(engine)
        for worker in engine:
            await self._fleet.kill(worker)
        if self._job.rollout.replacements:
            task = asyncio.create_task(self._replace(engine))
            self._tasks.add(task)

    def hear(self, reply: Hello | Ready | Met | Failed) -> None:
        """A message of a worker, which may be one that starts, or that has met one."""
        if isinstance(reply, Met):
            self._unmet.discard(reply)
        elif reply.worker in self._heard:
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

    async def _replace(self, engine: tuple[int, ...]) -> None:
        limit, place = self._job.rollout.replacements, f"the place of {workers_text(engine)}"
        async with self._one:
            while self.n_started < limit:
                self.n_started += 1
                self._processes[engine] += 1
                try:
                    await self._started(engine)
                except LaunchError as error:
                    self.n_started -= 1
                    self._note(f"{place} stays empty: {error}", "warning")
                    return
                except NotReady as error:
                    new = "the new process" if len(engine) == 1 else "an engine of new processes"
                    self._note(f"{new} in {place} is not ready: {error}", "warning")
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    self.ending.difference_update(engine)
                    self._joined(EngineJoined(engine, self._processes[engine]))
                    return
        self._note(f"{place} stays empty: all {limit} of rollout.replacements were made", "warning")

    async def _started(self, engine: tuple[int, ...]) -> None:
        """Start processes for the workers of an engine that are gone, and return when all are ready and all others know
        them. Raises NotReady, with nothing of them left running; LaunchError where a host of theirs is gone."""
        self._heard |= {worker: asyncio.Queue() for worker in engine}
        try:
            async with time_limit(self._job.runtime.start_seconds):
                while not self._fleet.running.isdisjoint(engine):  # those that were silent have been killed
                    await asyncio.sleep(LOOK_SECONDS)
                for worker in engine:
                    keys = make_keys()
                    self._socket.replace_key(worker, keys.public)
                    first = len(engine) > 1 and worker == min(engine)
                    number = self._processes[engine]
                    await self._fleet.restart(replace(self._boots[worker], keys=keys, process=number, rendezvous=first))
                await self._shake_hands(engine)
        except (TimeoutError, NotReady, LaunchError, TransportError, OSError) as error:
            for worker in engine:
                await self._fleet.kill(worker)
            if isinstance(error, LaunchError):
                raise
            seconds = self._job.runtime.start_seconds
            late = f"it has taken {seconds:g} s (runtime.start_seconds)"
            text = (
                late if isinstance(error, TimeoutError) else reason(error) if isinstance(error, OSError) else str(error)
            )
            raise NotReady(text) from error
        finally:
            for worker in engine:
                del self._heard[worker]

    async def _shake_hands(self, engine: tuple[int, ...]) -> None:
        hellos: dict[int, Hello] = {}
        for worker in engine:
            while not isinstance(reply := await self._next(worker, engine), Hello):
                pass  # the last words of the process before, which came late
            hellos[worker] = reply
        peers = self._peers | {worker: hello.peer for worker, hello in hellos.items()}
        in_order = tuple([peers[number] for number in sorted(peers)])
        command = Configure(
            msgspec.json.encode(self._job), in_order, collective=hellos[min(engine)].collective, engine=engine
        )
        await self._socket.send_to_all(engine, command)
        for worker in engine:
            reply = await self._next(worker, engine)
            if isinstance(reply, Failed):
                raise NotReady(reply.error)
            assert isinstance(reply, Ready), f"{type(reply).__name__} before Ready"
        self._peers.update(peers)
        await self._introduce([hello.peer for hello in hellos.values()], self._processes[engine])
        self._all_run(engine)

    async def _introduce(self, peers: Sequence[Peer], process: int) -> None:
        """Return when all other workers that run know the new processes: they refuse strangers."""
        new = {peer.worker for peer in peers}
        self._unmet = {
            Met(other, peer.worker, process) for other in self._fleet.running.difference(new) for peer in peers
        }
        for other in sorted({met.worker for met in self._unmet}):
            try:
                for peer in peers:
                    await self._socket.send(other, Meet(peer, process))
            except TransportError:
                continue  # it has just ended, or is silent: its own loss is on its way
        while any(met.worker in self._fleet.running for met in self._unmet):
            await asyncio.sleep(LOOK_SECONDS)
            self._all_run(new)

    async def _next(self, worker: int, engine: Sequence[int]) -> Hello | Ready | Failed:
        """The next message of a worker. Raises NotReady where there is none, or another of its engine has ended."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    return await self._heard[worker].get()
            except TimeoutError:
                self._all_run(engine)

    def _all_run(self, engine: Collection[int]) -> None:
        for worker in engine:
            if worker not in self._fleet.running:
                last = self._fleet.last_lines(worker, 1).strip()
                raise NotReady(f"it has ended{f': {last}' if last else ''}")
