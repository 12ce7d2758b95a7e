"""A model worker: one process, one device. A control loop that never waits for an engine, and a thread that computes.

The control loop answers the master, beats, and rescues; commands that need models queue for the compute thread; rollout
engines generate beside it, and functions run in threads of their own. Whatever fails becomes one `Failed` message.
"""

import asyncio
import logging
import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from realgraph.graphs.spec import Function
from realgraph.runtime.functions.pool import MAX_COROUTINES
from realgraph.runtime.job.rotation import MEGABYTE, limit_log
from realgraph.runtime.processes.launcher import WorkerBoot
from realgraph.runtime.processes.processes import Watched
from realgraph.runtime.wire.protocol import (
    PREFETCH,
    RESCUE_CALL,
    Abort,
    Bye,
    Command,
    Configure,
    Done,
    Drop,
    EndSession,
    Evaluate,
    Execute,
    Forget,
    Heartbeat,
    Hello,
    Keep,
    Load,
    Meet,
    Met,
    Prefetch,
    Reallocate,
    Reply,
    Rescue,
    Save,
    Shutdown,
    Submit,
)
from realgraph.runtime.wire.sockets import TransportError
from realgraph.runtime.wire.transport import WorkerSocket
from realgraph.runtime.worker.compute import Compute
from realgraph.runtime.worker.failures import failure
from realgraph.runtime.worker.resources import Resources

LOSS_PATIENCE = 3.0  # times as long as it may take to find that a worker is lost, an unreachable one is asked again
log = logging.getLogger(__name__)


def main(boot: WorkerBoot) -> None:
    """The worker's process, from its first to its last line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(asyncio.run(Worker(boot).serve()))


class Worker:
    """The control loop of one worker."""

    def __init__(self, boot: WorkerBoot) -> None:
        self._boot, self.number = boot, boot.worker
        self._resources: Resources | None = None
        self._compute: Compute | None = None
        self._functions: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = False
        self._owner = Watched(boot.owner_pid)

    async def serve(self) -> int:
        """Answer the master until Shutdown. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._socket = WorkerSocket(self.number, self._boot.master, self._boot.keys, self._boot.master_key)
        beats = asyncio.create_task(self._beat())
        beats.add_done_callback(_end_if_broken)
        try:
            self._resources = await asyncio.to_thread(Resources, self._boot)
            await self._send(Hello(self.number, os.getpid(), self._resources.peer, self._resources.collective_address))
            while True:
                command = await self._socket.receive()
                if isinstance(command, Shutdown):
                    await self._send(Bye(self.number))
                    return 0
                await self._take(command)
        except TransportError as error:
            log.error("%s", error)
            return 1
        finally:
            beats.cancel()
            await self._close()

    async def _close(self) -> None:
        """Give everything back. A thread that is stuck in a call, such as a collective whose peer is gone, is left to
        the end of the process, with what it may be using."""
        stuck = bool(self._opening)
        if self._compute is not None:
            stuck = not await asyncio.to_thread(self._compute.close)
        if self._functions is not None:
            self._functions.shutdown(wait=False, cancel_futures=True)
        if self._resources is not None and not stuck:
            await asyncio.to_thread(self._resources.close)
        await self._socket.close()
        if stuck:
            log.warning("a call has not ended: leaving it")
            logging.shutdown()
            os._exit(0)

    async def _beat(self) -> None:
        """Heartbeats; and the end of this process where the master is gone."""
        seconds = 1.0
        while True:
            compute = self._compute
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
            device = compute.device_bytes() if compute is not None else 0
            await self._send(Heartbeat(self.number, peak, device))
            if self._owner.ended():  # one that is stopped (Ctrl-Z) is waited for, however long
                log.error("the master is gone: ending")
                os._exit(1)
            if compute is not None:
                seconds = compute.job.runtime.heartbeat_seconds
                await self._limit_log(compute.job.outputs.rotate_mb * MEGABYTE)
            await asyncio.sleep(seconds)

    async def _send(self, reply: Reply) -> None:
        """Send to the master. A stopped one takes nothing when its queue is full: it will. Raises TransportError."""
        while True:
            try:
                await self._socket.send(reply)
            except TransportError:
                if self._owner.ended():
                    raise
            else:
                return

    async def _limit_log(self, most_bytes: int) -> None:
        try:
            await asyncio.to_thread(limit_log, Path(self._boot.log), most_bytes)
        except OSError as error:
            log.warning("the log up to here could not be kept: %s", error)

    async def _take(self, command: Command) -> None:
        """One command. Nothing here waits for an engine."""
        match command:
            case Configure():
                self._spawn(self._configure(command))
            case Execute(call=call) if isinstance(self._ready.job.graph.calls[call], Function):
                self._spawn(self._run_function(command))
            case Load() | Submit() | Execute() | Reallocate() | Save() | Evaluate() | Abort() | EndSession():
                self._ready.queue(command)
            case Forget(worker=worker):
                self._here.mail.give_up(worker)
                self._ready.queue(command)
            case Keep():
                self._ready.queue(command)
            case Meet(peer=peer, process=process):
                self._here.meet(peer, process)
                self._spawn(self._send(Met(self.number, peer.worker, process)))
            case Drop(groups=groups):
                self._ready.drop(groups)
            case Prefetch():
                self._spawn(self._prefetch(command))
            case Rescue():
                self._spawn(self._rescue(command))
            case Shutdown():
                raise AssertionError("handled by serve")

    @property
    def _here(self) -> Resources:
        assert self._resources is not None, "a command before Hello"
        return self._resources

    @property
    def _ready(self) -> Compute:
        assert self._compute is not None, "a call before Ready"
        return self._compute

    def _spawn(self, work: "asyncio.coroutines.Coroutine[None, None, None]") -> None:  # type: ignore[name-defined]
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _configure(self, command: Configure) -> None:
        assert self._resources is not None
        began = time.monotonic()
        self._opening = True
        try:
            compute = Compute(self._resources, command, self._post)
            ready = await asyncio.to_thread(compute.open)
        except Exception as error:
            log.exception("this worker can't start")
            await self._send(failure(self.number, "", error))
            return
        finally:
            self._opening = False
        self._compute = compute
        # as many calls as its processes take; of functions that are no coroutines, most wait for a process
        most = MAX_COROUTINES * compute.job.function_processes(self.number)
        self._functions = ThreadPoolExecutor(most, "functions")
        log.info("ready after %.1f s", time.monotonic() - began)
        await self._send(ready)

    def _post(self, reply: Reply) -> None:
        """Send from another thread."""
        asyncio.run_coroutine_threadsafe(self._send(reply), self._loop)

    async def _run_function(self, command: Execute) -> None:
        assert self._functions is not None
        try:
            done = await self._loop.run_in_executor(self._functions, self._ready.functions.run, command)
        except Exception as error:
            await self._send(failure(self.number, command.call, error))
        else:
            await self._send(done)

    async def _prefetch(self, command: Prefetch) -> None:
        began, name = time.time(), f"{PREFETCH}{command.call}"
        patience = LOSS_PATIENCE * self._ready.job.runtime.lost_after_seconds
        try:
            if await self._ready.inputs.prefetch(command, patience):
                await self._send(Done(self.number, command.task, name, started=began, ended=time.time()))
        except Exception as error:
            failed = failure(self.number, command.call, error)
            await self._send(msgspec.structs.replace(failed, task=command.task))

    async def _rescue(self, command: Rescue) -> None:
        began = time.time()
        try:
            await asyncio.to_thread(self._ready.rescue, command)
        except Exception as error:
            await self._send(failure(self.number, RESCUE_CALL, error))
        else:
            await self._send(Done(self.number, command.task, RESCUE_CALL, started=began, ended=time.time()))


def _end_if_broken(beats: asyncio.Task[None]) -> None:
    """A worker that can't beat is lost to the master: it ends at once, and its log says why."""
    if not beats.cancelled() and (error := beats.exception()) is not None:
        log.error("heartbeats ended", exc_info=error)
        logging.shutdown()
        os._exit(1)
