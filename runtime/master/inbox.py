"""Everything that reaches the master, in one queue: replies, ends of processes, interrupts. Says who is silent, and
what explains a failure. Decides nothing about the run.
"""

import asyncio

from msgspec import Struct

from realgraph.runtime.commands.actions import StopRequested, Tick, WorkerLost
from realgraph.runtime.job.job import RuntimeSpec
from realgraph.runtime.master.startup import EXPLAIN_SECONDS, WorkerGroup
from realgraph.runtime.processes.clock import Clock
from realgraph.runtime.processes.launcher import describe_exit
from realgraph.runtime.wire.protocol import Failed, Reply


class StopNow(Struct, frozen=True):
    """The user asked a second time: end without finishing anything."""


class Exit(Struct, frozen=True):
    """The process of `worker` has ended."""

    worker: int
    status: int


Happened = Reply | Exit | StopRequested | StopNow


class Inbox:
    """Listens to the workers from its start to `close`. `gone`: workers that ended or were given up.

    clock: what deadlines and silences are measured by; it stands still while this process does.
    """

    def __init__(self, workers: WorkerGroup, runtime: RuntimeSpec) -> None:
        self._runtime = runtime
        self._queue: asyncio.Queue[Happened] = asyncio.Queue()
        self.clock = Clock()
        self._heard = dict.fromkeys(workers.ready, self.clock.now())
        self._stopped_seconds = 0.0  # of this process, as far as it is dealt with
        self.gone: set[int] = set()
        work = (self._receive(workers), self._exits(workers), self.clock.tick())
        self._tasks = [asyncio.create_task(each) for each in work]

    def put(self, request: StopRequested | StopNow) -> None:
        """Queue what the user wants."""
        self._queue.put_nowait(request)

    @property
    def idle(self) -> bool:
        """True where nothing waits to be dealt with."""
        return self._queue.empty()

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self, workers: WorkerGroup) -> None:
        while True:
            worker, reply = await workers.socket.receive()
            self._heard[worker] = self.clock.now()
            self._queue.put_nowait(reply)

    async def _exits(self, workers: WorkerGroup) -> None:
        while True:
            worker, status = await workers.fleet.wait_exit()
            self._queue.put_nowait(Exit(worker, status))

    async def next(self, deadline: float | None) -> Reply | WorkerLost | StopRequested | Tick | StopNow:
        """The next thing that happens: a Tick at `deadline` (by the clock), a WorkerLost for who is silent."""
        while True:
            await self._after_a_stop()
            now = self.clock.now()
            wait = self._runtime.heartbeat_seconds
            if self._queue.empty():
                if deadline is not None and now >= deadline:
                    return Tick()
                silent = min(self._heard, key=self._heard.__getitem__)
                seconds = now - self._heard[silent]
                if seconds > self._runtime.lost_after_seconds:
                    self.gone.add(silent)
                    return WorkerLost(silent, f"has not been heard of for {seconds:.0f} s")
                if deadline is not None:
                    wait = min(wait, deadline - now)
            happened = await self.take(wait)
            match happened:
                case None:
                    continue
                case Exit(worker=worker, status=status):
                    return WorkerLost(worker, describe_exit(status))
                case Failed():
                    return await self.explain(happened)
                case _:
                    return happened

    async def take(self, seconds: float) -> Happened | None:
        """The next thing that happens within `seconds`; None if nothing does."""
        try:
            async with asyncio.timeout(seconds):
                happened = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(happened, Exit):
            self.gone.add(happened.worker)
        return happened

    async def _after_a_stop(self) -> None:
        """Hears the workers first where this process itself has been stopped (Ctrl-Z), perhaps with them."""
        self.clock.now()
        if self.clock.stopped_seconds > self._stopped_seconds:
            self._stopped_seconds = self.clock.stopped_seconds
            await asyncio.sleep(2 * self._runtime.heartbeat_seconds)
            self._heard = dict.fromkeys(self._heard, self.clock.now())

    async def explain(self, failure: Failed) -> Failed | WorkerLost | StopNow:
        """`failure`, or what comes within a moment and tells more.

        A collective fails on every worker when one has died: its end explains the others' errors. A loss that is not
        finite is noticed by all ranks: the one that has the sample names it.
        """
        if failure.kind not in ("worker", "numerics") or failure.sample >= 0:
            return failure
        until = self.clock.now() + EXPLAIN_SECONDS
        while (left := until - self.clock.now()) > 0:
            match await self.take(left):
                case Exit(worker=worker, status=status):
                    return WorkerLost(worker, describe_exit(status))
                case Failed(kind=kind, sample=sample) as other if kind != "worker" and (
                    failure.kind == "worker" or sample >= 0
                ):
                    return other
                case StopNow() as stop:
                    return stop
                case _:
                    pass  # the run ends: what else was under way no longer counts
        return failure
