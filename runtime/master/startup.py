"""Starts workers until all are ready: keys, processes, hand-shakes. Every wait has a deadline. Master side."""

import asyncio
import time
from pathlib import Path
from typing import assert_never

import msgspec

from realgraph.runtime.commands.failures import workers_text
from realgraph.runtime.job.engine_loss import meeting_worker
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.processes.clock import time_limit
from realgraph.runtime.processes.launcher import Fleet, Launcher, WorkerBoot, WorkerProgram, describe_exit
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import (
    Bye,
    Configure,
    Done,
    Failed,
    Generated,
    Heartbeat,
    Hello,
    Loaded,
    Met,
    Peer,
    Ready,
    Shutdown,
)
from realgraph.runtime.wire.sockets import TransportError
from realgraph.runtime.wire.transport import MasterSocket

PROGRAM = WorkerProgram("realgraph.runtime.worker.worker:main", ("torch", "transformers"))
EXPLAIN_SECONDS = 2.0  # how long a failure that may be another one's echo waits for it


class StartError(Exception):
    """The workers did not get ready; `failure` says which and why."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.error)
        self.failure = failure


class WorkerGroup:
    """The workers of a run with the socket that reaches them. `close` ends both, whatever happened before."""

    def __init__(self, fleet: Fleet, socket: MasterSocket) -> None:
        self.fleet, self.socket = fleet, socket
        self.fork_seconds = 0.0  # until the processes ran, their modules loaded
        self.ready: dict[int, Ready] = {}
        self.boots: dict[int, WorkerBoot] = {}  # that they began with
        self.peers: dict[int, Peer] = {}

    async def close(self, grace_seconds: float, *, again: bool = False) -> None:
        """Tell the workers to end, and see to it that they do: after the grace by force. With no grace, at once. again:
        see Fleet."""
        try:
            if grace_seconds > 0:
                await self._shut_down()
        finally:
            await self.fleet.terminate(grace_seconds, again=again)
            await self.socket.close()

    async def _shut_down(self) -> None:
        """One that can't be told is killed: it has not dialled in yet, or is stuck."""
        for worker in sorted(self.fleet.running):
            try:
                await self.socket.send(worker, Shutdown(), deadline_seconds=1.0)
            except TransportError:
                await self.fleet.kill(worker)


async def start_worker_group(job: Job, folder: RunFolder, launcher: Launcher) -> WorkerGroup:
    """Start one worker process per device, where the launcher says. Raises LaunchError."""
    n_workers = job.cluster.n_devices
    opener = meeting_worker(job.graph, job.plan, n_workers)
    master, keys = make_keys(), {worker: make_keys() for worker in range(n_workers)}
    socket = MasterSocket(master, {worker: pair.public for worker, pair in keys.items()}, launcher.interface)
    boots = [
        WorkerBoot(
            worker=worker,
            master=socket.address,
            master_key=master.public,
            keys=keys[worker],
            log=str(folder.logs / f"worker-{worker}.log"),
            threads=job.runtime.threads,
            n_workers=n_workers,
            node=job.cluster.node_of(worker),
            cpu=job.cluster.is_cpu,
            rendezvous=worker == opener,
        )
        for worker in range(n_workers)
    ]
    began = time.monotonic()
    try:
        fleet = await launcher.start(boots, PROGRAM, job.runtime.start_seconds)
    except BaseException:
        await socket.close()
        raise
    workers = WorkerGroup(fleet, socket)
    workers.boots = {boot.worker: boot for boot in boots}
    workers.fork_seconds = time.monotonic() - began
    return workers


async def ready_worker_group(workers: WorkerGroup, job: Job, resume: Path | None) -> None:
    """Hand-shake with every worker and wait until all are ready; `workers.ready` then has their facts.

    Raises StartError naming the worker that failed, ended, or is late.
    """
    missing = set(workers.fleet.workers)
    waiting = asyncio.create_task(_shake_hands(workers, job, resume, missing))
    ended = asyncio.create_task(workers.fleet.wait_exit())
    try:
        async with time_limit(job.runtime.start_seconds):
            done, _ = await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            waiting.result()
            return
        worker, status = ended.result()
        log, host = workers.fleet.last_lines(worker), workers.fleet.host_of(worker)
        on_host = f" on {host}" if host else ""
        text = f"worker {worker}{on_host} {describe_exit(status)} before it was ready"
        raise StartError(Failed(worker, "", text, "start", detail=log))
    except TimeoutError:
        late = workers_text(sorted(missing))
        text = f"{late}: not ready within {job.runtime.start_seconds:g} s (runtime.start_seconds)"
        raise StartError(Failed(min(missing, default=-1), "", text, "start", late=tuple(sorted(missing)))) from None
    finally:
        for task in (waiting, ended):
            task.cancel()
        await asyncio.gather(waiting, ended, return_exceptions=True)


async def _shake_hands(workers: WorkerGroup, job: Job, resume: Path | None, missing: set[int]) -> None:
    hellos: dict[int, Hello] = {}
    while missing:
        worker, reply = await workers.socket.receive()
        match reply:
            case Hello():
                hellos[worker] = reply
                if len(hellos) == len(workers.fleet.workers):
                    await _configure(workers, job, resume, hellos)
            case Ready():
                workers.ready[worker] = reply
                missing.discard(worker)
            case Failed():
                raise StartError(await _explained(workers, reply))
            case Heartbeat():
                pass
            case Met() | Loaded() | Generated() | Done() | Bye():
                text = f"worker {worker} sent {type(reply).__name__} before it was ready"
                raise StartError(Failed(worker, "", text, "start"))
            case _:
                assert_never(reply)


async def _explained(workers: WorkerGroup, failure: Failed) -> Failed:
    """`failure`; where it only says that another worker was missed, what that one says within a moment."""
    if failure.kind != "worker":
        return failure
    try:
        async with asyncio.timeout(EXPLAIN_SECONDS):
            while True:
                _, reply = await workers.socket.receive()
                if isinstance(reply, Failed) and reply.kind != "worker":
                    return reply
    except TimeoutError:
        return failure


async def _configure(workers: WorkerGroup, job: Job, resume: Path | None, hellos: dict[int, Hello]) -> None:
    workers.peers = {worker: hellos[worker].peer for worker in sorted(hellos)}
    command = Configure(
        job=msgspec.json.encode(job),
        peers=tuple(workers.peers.values()),
        collective=next(hello.collective for hello in hellos.values() if hello.collective),
        resume=str(resume) if resume is not None else "",
    )
    await workers.socket.send_to_all(sorted(hellos), command)
