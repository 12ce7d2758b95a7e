"""Hosts that are simulated, many to a process: real agents and real sockets, workers that answer at once and hold
nothing. Beside them the process of the real master that they work for.
"""

import asyncio
import os
import random
import resource
import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.scheduler import answer
from realgraph.planner.inputs.cluster import Cluster
from realgraph.runtime.commands.actions import Send
from realgraph.runtime.hosts.agent import HostAgent
from realgraph.runtime.hosts.join_key import parse_join_key
from realgraph.runtime.hosts.launcher import HostsLauncher, JoinTerms, Needed
from realgraph.runtime.hosts.starter import Invitation
from realgraph.runtime.job.job import RuntimeSpec
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.master import Master
from realgraph.runtime.master.observer import Observers, RunRecord, RunStarted, Span, StepRecord
from realgraph.runtime.processes.launcher import Fleet, LaunchError, WorkerBoot, WorkerProgram, WorkerStacks
from realgraph.runtime.wire.protocol import Bye, Configure, Done, Generated, Heartbeat, Hello, Peer, Ready, Shutdown
from realgraph.runtime.wire.sockets import SecureClient
from realgraph.runtime.wire.transport import WorkerSocket
from tests.namespaces import enter_namespace
from tests.shapes import Shape, job_of

SAMPLES = 8  # of a group, and groups of a worker: one
N_ROWS = 10**6


# --- hosts ------------------------------------------------------------------------------------------------------------


async def serve_worker(boot: WorkerBoot) -> None:
    """A worker that has an answer to everything at once, until Shutdown."""
    number, rng = boot.worker, random.Random(boot.worker)
    socket = WorkerSocket(number, boot.master, boot.keys, boot.master_key)
    beats = asyncio.create_task(_beat(socket, number))
    try:
        peer = Peer(number, f"node {boot.node}", "", f"tcp://{boot.interface}:1", boot.keys.public)
        await socket.send(Hello(number, os.getpid(), peer))
        while True:
            match command := await socket.receive():
                case Configure():
                    await socket.send(Ready(number, N_ROWS))
                case Shutdown():
                    await socket.send(Bye(number))
                    return
                case _:
                    now = time.time()
                    reply = answer(Send(number, command), SAMPLES, rng)
                    if isinstance(reply, Done | Generated):
                        await socket.send(replace(reply, started=now, ended=time.time()))
    finally:
        beats.cancel()
        await socket.close()


async def _beat(socket: WorkerSocket, number: int) -> None:
    while True:
        await socket.send(Heartbeat(number))
        await asyncio.sleep(1.0)


class SimulatedFleet:
    """Implements `launcher.Fleet` by tasks of this process."""

    def __init__(self, boots: Sequence[WorkerBoot]) -> None:
        self._exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._tasks = {boot.worker: asyncio.create_task(self._run(boot)) for boot in boots}

    async def _run(self, boot: WorkerBoot) -> None:
        status = 1
        try:
            await serve_worker(boot)
            status = 0
        finally:
            self._exits.put_nowait((boot.worker, status))

    @property
    def workers(self) -> tuple[int, ...]:
        """See Fleet."""
        return tuple(self._tasks)

    @property
    def running(self) -> frozenset[int]:
        """See Fleet."""
        return frozenset(worker for worker, task in self._tasks.items() if not task.done())

    def last_lines(self, worker: int, n_lines: int = 20) -> str:
        """See Fleet: no log."""
        return ""

    def host_of(self, worker: int) -> str:
        """See Fleet."""
        return ""

    def clock_ahead(self, worker: int) -> float:
        """See Fleet."""
        return 0.0

    async def wait_exit(self) -> tuple[int, int]:
        """See Fleet."""
        return await self._exits.get()

    async def dump_stacks(self, worker: int) -> WorkerStacks:
        """See Fleet."""
        return WorkerStacks(worker, missing="it is simulated")

    async def kill(self, worker: int) -> None:
        """See Fleet."""
        self._tasks[worker].cancel()

    restarts = False

    async def restart(self, boot: WorkerBoot) -> None:
        """See Fleet. Raises LaunchError."""
        raise LaunchError(f"worker {boot.worker} is simulated")

    async def terminate(self, grace_seconds: float = 5.0, *, again: bool = False) -> None:
        """See Fleet."""
        if grace_seconds > 0:
            await asyncio.wait(self._tasks.values(), timeout=grace_seconds)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class SimulatedLauncher:
    """Implements `launcher.Launcher` by tasks of this process."""

    def __init__(self, interface: str) -> None:
        self.interface = interface

    async def start(self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float) -> Fleet:
        """See Launcher."""
        return SimulatedFleet([replace(boot, interface=self.interface) for boot in boots])


async def _serve_host(name: str, interface: str, invitation: tuple[str, str]) -> int:
    """A host, from its join to its end."""
    host, _, port = invitation[0].rpartition(":")
    key, address = parse_join_key(invitation[1], "the master"), (host, int(port))
    client = SecureClient(f"tcp://{host}:{port}", secrets.token_hex(8).encode(), key.client, key.server)
    agent = HostAgent(client, address, lambda line: None, SimulatedLauncher)
    try:
        await agent.join(name, interface)
        return await agent.serve()
    finally:
        await agent.end(0)
        await client.close()


async def _serve_hosts(names: Sequence[str], interface: str, invitation: tuple[str, str]) -> list[int]:
    return await asyncio.gather(*(_serve_host(name, interface, invitation) for name in names))


def serve_hosts(space: str, interface: str, names: Sequence[str], pipe: Connection) -> None:
    """A process with these hosts in a network namespace: waits for the run's invitation, and says how agents ended."""
    if space:
        enter_namespace(space)
    pipe.send((asyncio.run(_serve_hosts(names, interface, pipe.recv())), time.monotonic()))


# --- the master -------------------------------------------------------------------------------------------------------


class Size(Struct, frozen=True):
    """The run of a measurement."""

    n_hosts: int
    per_host: int
    steps: int
    address: str  # of the master
    space: str = ""  # its network namespace

    @property
    def n_workers(self) -> int:
        """The workers of all hosts."""
        return self.n_hosts * self.per_host


class Figures(Struct):
    """The figures of the master's process. Seconds of `time.monotonic`, which all processes of a machine share."""

    outcome: str = ""
    began: float = 0.0  # Master.run
    joined: float = 0.0  # the last agent
    ready: float = 0.0
    last_step: float = 0.0
    ended: float = 0.0
    n_calls: int = 0  # of workers: one model call on one worker
    step_seconds: list[float] = msgspec.field(default_factory=list)
    cpu_seconds: float = 0.0  # of all threads, from ready to the end of the last step
    loop_seconds: float = 0.0  # of the main thread in that time
    start_cpu_seconds: float = 0.0
    peak_bytes: int = 0
    steps_bytes: int = 0  # resident after the last step


class _Watch:
    """Implements Observer: notes when what happens."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._cpu = self._loop = 0.0

    def observe(self, record: RunRecord) -> None:
        """See Observer."""
        figures = self._figures
        match record:
            case RunStarted():
                figures.ready, self._cpu, self._loop = time.monotonic(), time.process_time(), time.thread_time()
                figures.start_cpu_seconds = time.process_time()
            case Span():
                figures.n_calls += bool(record.call != "checkpoint")
            case StepRecord():
                figures.step_seconds.append(record.seconds)
                figures.last_step = time.monotonic()
                figures.cpu_seconds = time.process_time() - self._cpu
                figures.loop_seconds = time.thread_time() - self._loop
                figures.steps_bytes = resident_bytes()
            case _:
                pass

    def close(self) -> None:
        """See Observer."""


class _Inviting:
    """Implements AgentStarter: hands the invitation to the processes of the hosts."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    async def start(self, invitation: Invitation) -> None:
        """See AgentStarter."""
        for pipe in self._pipes:
            pipe.send((invitation.address, invitation.key))

    async def failed(self) -> str:
        """See AgentStarter."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        """See AgentStarter."""


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process that is in RAM now."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def run_master(size: Size, folder: Path, hosts: Sequence[Connection], pipe: Connection) -> None:
    """The process of the master: PPO of six calls over all workers, 8 samples a worker and step."""
    if size.space:
        enter_namespace(size.space)
    shape = Shape(algorithm="ppo", n_workers=size.n_workers, groups=size.n_workers, n=SAMPLES, steps=size.steps)
    job = job_of(shape)
    cluster = replace(job.cluster, nodes=size.n_hosts, devices_per_node=size.per_host)
    job = replace(job, cluster=cluster, run_dir=str(folder), runtime=RuntimeSpec())
    figures = Figures()

    def say(line: str) -> None:
        if "has joined" in line:
            figures.joined = time.monotonic()

    terms = JoinTerms(size.address, join_seconds=120.0)
    launcher = HostsLauncher(terms, Needed(_any(cluster), folder), _Inviting(hosts), say)
    master = Master(job, RunFolder(folder), Observers([_Watch(figures)]), launcher=launcher)
    figures.began = time.monotonic()
    outcome = asyncio.run(master.run())
    figures.ended = time.monotonic()
    figures.outcome = outcome.reason
    figures.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send_bytes(msgspec.msgpack.encode(figures))


def _any(cluster: Cluster) -> Cluster:
    """The cluster as this machine is checked against it."""
    return replace(cluster, host_memory_bytes=0)
