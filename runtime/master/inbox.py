"""Everything that reaches the master, in one queue: replies, ends of processes, interrupts. Says who is silent, and
what explains a failure. Decides nothing about the run.
"""

import asyncio
from collections import deque

from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.commands.actions import EngineJoined, Event, StopRequested, Tick, WorkerLost
from realgraph.runtime.commands.failures import workers_text
from realgraph.runtime.job.job import RuntimeSpec
from realgraph.runtime.master.startup import EXPLAIN_SECONDS, WorkerGroup
from realgraph.runtime.master.status import WorkerSigns
from realgraph.runtime.processes.clock import Clock
from realgraph.runtime.processes.launcher import describe_exit
from realgraph.runtime.wire.protocol import Done, Failed, Generated, Heartbeat, Reply


class StopNow(Struct, frozen=True):
    """The user asked a second time: end without finishing anything."""


class Exit(Struct, frozen=True):
    """The process of `worker` has ended."""

    worker: int
    status: int


Happened = Reply | Exit | EngineJoined | StopRequested | StopNow


def _by_our_clock(reply: Reply, ahead: float) -> Reply:
    """The reply of a worker whose clock is so many seconds ahead of ours, in our times."""
    if ahead and isinstance(reply, Done | Generated):
        return replace(reply, started=reply.started - ahead, ended=reply.ended - ahead)
    return reply


class Inbox:
    """Listens to the workers from its start to `close`. `gone`: workers that ended or were given up.

    clock: what deadlines and silences are measured by; it stands still while this process does.
    """

    def __init__(self, workers: WorkerGroup, runtime: RuntimeSpec) -> None:
        self._runtime = runtime
        self._queue: asyncio.Queue[Happened] = asyncio.Queue()
        self.clock = Clock()
        self._heard = dict.fromkeys(workers.ready, self.clock.now())
        self._beats: dict[int, Heartbeat] = {}
        self._fleet = workers.fleet
        self._stopped_seconds = 0.0  # of this process, as far as it is dealt with
        self.gone: set[int] = set()
        self._kept: deque[Happened] = deque()  # heard while a failure was explained
        work = (self._receive(workers), self._exits(workers), self.clock.tick())
        self._tasks = [asyncio.create_task(each) for each in work]

    def put(self, request: StopRequested | StopNow) -> None:
        """Queue what the user wants."""
        self._queue.put_nowait(request)

    def join(self, event: EngineJoined) -> None:
        """New processes stand for workers that were gone: listen to them, and queue the news."""
        self.gone.difference_update(event.workers)
        self._heard |= dict.fromkeys(event.workers, self.clock.now())
        self._queue.put_nowait(event)

    def signs(self) -> dict[int, WorkerSigns]:
        """The signs of life of every worker, as they are now."""
        now, unknown = self.clock.now(), Heartbeat(-1)
        return {
            worker: WorkerSigns(
                now - heard,
                self._beats.get(worker, unknown).host_bytes,
                self._beats.get(worker, unknown).device_bytes,
                self._fleet.host_of(worker),
            )
            for worker, heard in self._heard.items()
        }

    @property
    def idle(self) -> bool:
        """True where nothing waits to be dealt with."""
        return self._queue.empty() and not self._kept

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self, workers: WorkerGroup) -> None:
        while True:
            worker, reply = await workers.socket.receive()
            self._heard[worker] = self.clock.now()
            if isinstance(reply, Heartbeat):
                self._beats[worker] = reply
            self._queue.put_nowait(_by_our_clock(reply, workers.fleet.clock_ahead(worker)))

    async def _exits(self, workers: WorkerGroup) -> None:
        while True:
            worker, status = await workers.fleet.wait_exit()
            self._queue.put_nowait(Exit(worker, status))

    async def next(self, deadline: float | None) -> Event | StopNow:
        """The next thing that happens: a Tick at `deadline` (by the clock), a WorkerLost for who is silent."""
        while True:
            await self._after_a_stop()
            now = self.clock.now()
            wait = self._runtime.heartbeat_seconds
            if self.idle:
                if deadline is not None and now >= deadline:
                    return Tick()
                if (lost := self._silent(self._runtime.lost_after_seconds)) is not None:
                    return lost
                if deadline is not None:
                    wait = min(wait, deadline - now)
            happened = await self.take(wait)
            match happened:
                case None:
                    continue
                case Exit():
                    return self._lost(happened)
                case Failed():
                    return await self.explain(happened)
                case _:
                    return happened

    def _lost(self, ended: Exit) -> WorkerLost:
        host = self._fleet.host_of(ended.worker)
        return WorkerLost(ended.worker, describe_exit(ended.status) + (f", on {host}" if host else ""))

    def _silent(self, most_seconds: float) -> WorkerLost | None:
        """The worker that has been silent the longest, where it has been for more than so many seconds: it is gone."""
        left = self._heard.keys() - self.gone
        if not left:
            return None
        silent = min(sorted(left), key=self._heard.__getitem__)
        seconds = self.clock.now() - self._heard[silent]
        if seconds <= most_seconds:
            return None
        self.gone.add(silent)
        return WorkerLost(silent, self._silence(silent, seconds))

    def _silence(self, worker: int, seconds: float) -> str:
        """Whoever has not been heard of for so long: a worker, or its whole host."""
        host, now = self._fleet.host_of(worker), self.clock.now()
        if not host:
            return f"has not been heard of for {seconds:.0f} s"
        others = [other for other in self._heard if self._fleet.host_of(other) == host]
        if all(now - self._heard[other] > seconds / 2 for other in others):
            return f"{host} with {workers_text(others)} has not been heard of for {seconds:.0f} s"
        return f"has not been heard of for {seconds:.0f} s, on {host}"

    def give_up_silent(self) -> None:
        """Whoever has not been heard of for as long as a worker may be silent counts as gone."""
        now, most = self.clock.now(), self._runtime.lost_after_seconds
        self.gone |= {worker for worker, heard in self._heard.items() if now - heard > most}

    async def take(self, seconds: float) -> Happened | None:
        """The next thing that happens within `seconds`; None if nothing does."""
        if self._kept:
            return self._kept.popleft()
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

        A collective fails on every worker when one has died: its end, or its silence, explains the others' errors. A
        loss that is not finite is noticed by all ranks: the one that has the sample names it. Inputs that could not be
        gathered have been waited for: what explains them has come, and the run goes on where their step was put back.
        """
        if failure.kind not in ("worker", "numerics") or failure.sample >= 0 or failure.worker in self.gone:
            return failure
        if failure.task >= 0:
            return failure
        kept: list[Happened] = [failure] if failure.worker >= 0 else []
        until = self.clock.now() + EXPLAIN_SECONDS
        while (left := until - self.clock.now()) > 0:
            match await self.take(left):
                case Exit() as ended:
                    self._kept.extendleft(reversed(kept))  # the run may go on without that worker
                    return self._lost(ended)
                case Failed(kind=kind, sample=sample, task=-1) as other if kind != "worker" and (
                    failure.kind == "worker" or sample >= 0
                ):
                    return other
                case StopNow() as stop:
                    return stop
                case None:
                    pass
                case other:
                    kept.append(other)
        # A connection may break before the silence of a host that stands still, or is cut off, has lasted long enough.
        suspect = self._silent(self._runtime.lost_after_seconds / 3) if failure.kind == "worker" else None
        self._kept.extendleft(reversed(kept) if suspect is not None else ())
        return suspect or failure
