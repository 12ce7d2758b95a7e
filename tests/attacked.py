"""A process with the ports of a run, for attacks on them: the master's for workers and for hosts, and a worker's."""

import asyncio
import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from realgraph.runtime.hosts.hub import Hub
from realgraph.runtime.hosts.join_key import make_join_key
from realgraph.runtime.hosts.messages import MasterBeat
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane
from realgraph.runtime.wire.curve import LOOPBACK, KeyPair, make_keys
from realgraph.runtime.wire.protocol import Drop, Peer
from realgraph.runtime.wire.sockets import TransportError
from realgraph.runtime.wire.transport import MasterSocket
from tests.preloaded import CONTEXT

_LIBC = ctypes.CDLL("libc.so.6")
GOOD, BAD = 0, 1  # workers: both hold keys of the run


class Ports(Struct, frozen=True):
    """Addresses and public keys of the ports, and the keys that open them."""

    control: str
    hub: str
    data: Peer
    control_key: str
    hub_key: str
    workers: tuple[KeyPair, KeyPair]
    agent: KeyPair


class State(Struct, frozen=True):
    """The process as it is now."""

    resident_bytes: int
    refused: int  # messages of workers
    heard: int  # well-formed ones


async def _serve(pipe: Connection) -> None:
    workers, keys, hub_keys = (make_keys(), make_keys()), make_keys(), make_keys()
    join = make_join_key(hub_keys)
    master = MasterSocket(keys, {n: pair.public for n, pair in enumerate(workers)}, LOOPBACK)
    hub = Hub(hub_keys, join, f"{LOOPBACK}:0")
    store = Store()
    store.put("x", [1], [torch.arange(8)])
    heard = 0

    async def answer_workers() -> None:
        nonlocal heard
        while True:
            worker, _ = await master.receive()
            heard += 1
            if worker == GOOD:
                await master.send(worker, Drop((1,)))

    async def answer_agents() -> None:
        while True:
            agent, _ = await hub.receive()
            with contextlib.suppress(TransportError):  # it has hung up
                await hub.send(agent, MasterBeat(), "an agent")

    with DataPlane(2, store, make_keys(), LOOPBACK) as plane:
        plane.connect([Peer(n, "far", "", "", pair.public) for n, pair in enumerate(workers)])
        data = msgspec.structs.replace(plane.peer, host="far from its readers")
        ports = Ports(
            master.address, f"tcp://{LOOPBACK}:{hub.port}", data, keys.public, hub_keys.public, workers, join.client
        )
        tasks = [asyncio.create_task(answer_workers()), asyncio.create_task(answer_agents())]
        pipe.send_bytes(msgspec.msgpack.encode(ports))
        while await asyncio.to_thread(pipe.recv):
            assert not any(task.done() for task in tasks), tasks
            gc.collect()
            _LIBC.malloc_trim(0)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            pipe.send_bytes(msgspec.msgpack.encode(State(pages * resource.getpagesize(), master.refused, heard)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await master.close()
    await hub.close()


def serve(pipe: Connection) -> None:
    """The process, until the pipe says so."""
    asyncio.run(_serve(pipe))


class Attacked:
    """The process from outside."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        assert pipe.poll(60), "the process did not start"
        self.ports = msgspec.msgpack.decode(pipe.recv_bytes(), type=Ports)

    def state(self) -> State:
        """As it is now; it answers, so nothing in it has ended."""
        self._pipe.send(True)
        assert self._pipe.poll(60), "the process does not answer"
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=State)


@contextlib.contextmanager
def attacked() -> Iterator[Attacked]:
    """A process with the ports of a run."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield Attacked(ours)
        ours.send(False)
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(10)
