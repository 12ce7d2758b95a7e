"""Control messages between master and workers, over CurveZMQ by msgspec. Moves no tensor and decides nothing."""

import logging
from collections.abc import Iterable, Mapping

import zmq

from realgraph.runtime.wire import protocol
from realgraph.runtime.wire.curve import KeyPair
from realgraph.runtime.wire.refusals import UNREADABLE, Refusals
from realgraph.runtime.wire.sockets import SecureClient, SecureServer

log = logging.getLogger(__name__)


class MasterSocket:
    """The master's end. Workers dial `address`; each must hold the secret of the public key listed under its number.

    Make it inside a running event loop. A message that is malformed, or that claims to be from another worker, is
    logged, counted in `refused`, and goes no further.
    """

    def __init__(self, keys: KeyPair, workers: Mapping[int, str], interface: str) -> None:
        self._workers = dict(workers)
        self._refusals = Refusals(log)
        self._server = SecureServer(keys, frozenset(workers.values()), f"tcp://{interface}:0")
        self.address = self._server.address

    def replace_key(self, worker: int, public: str) -> None:
        """A new process stands for `worker`, with a key of its own: messages under the one before are refused."""
        self._workers[worker] = public
        self._server.allow(self._workers.values())

    async def send(self, worker: int, command: protocol.Command, deadline_seconds: float = 30.0) -> None:
        """Queue a command. Raises TransportError where the worker is not connected or takes nothing for that long."""
        await self.send_to_all((worker,), command, deadline_seconds)

    async def send_to_all(
        self, workers: Iterable[int], command: protocol.Command, deadline_seconds: float = 30.0
    ) -> None:
        """Queue one command for several workers, which is encoded, and where it is long held, once. Raises as `send`
        does."""
        body = protocol.encode(command)
        for worker in workers:
            await self._server.send(b"%d" % worker, body, f"worker {worker}", deadline_seconds)

    async def receive(self) -> tuple[int, protocol.Reply]:
        """The next well-formed reply and the worker that sent it. For one task, to be cancelled only at the end.

        Waits without end: the heartbeats of workers bound it.
        """
        while True:
            frames = await self._server.receive()
            worker, problem = self._sender(frames)
            if not problem:
                try:
                    reply = protocol.decode_reply(frames[1].buffer)
                except UNREADABLE as error:
                    problem = f"a message from worker {worker} cannot be read: {error}"
                else:
                    if reply.worker == worker:
                        return worker, reply
                    problem = f"worker {worker} sent a message in the name of worker {reply.worker}"
            self._refusals.add(f"refused: {problem}")

    @property
    def refused(self) -> int:
        """Messages that were."""
        return self._refusals.count

    async def close(self) -> None:
        """Send what is queued, then close the port."""
        await self._server.close()

    def _sender(self, frames: list[zmq.Frame]) -> tuple[int, str]:
        """The worker that sent a message, and what is wrong with it if anything."""
        name = frames[0].bytes
        if len(frames) != 2:
            return -1, f"a message of {len(frames)} frames from {name!r}, expected 2"
        worker = int(name) if name.isdigit() and len(name) <= 9 else -1
        if worker not in self._workers or name != b"%d" % worker:
            return -1, f"a message from {name!r}, which is no worker of this run"
        if frames[1].get("User-Id") != self._workers[worker]:
            return worker, f"a message in the name of worker {worker}, with the key of another"
        return worker, ""


class WorkerSocket:
    """A worker's end. Make it inside a running event loop; it dials at once and reconnects by itself."""

    def __init__(self, worker: int, address: str, keys: KeyPair, master_key: str) -> None:
        self._client = SecureClient(address, b"%d" % worker, keys, master_key)

    @property
    def lost_seconds(self) -> float:
        """Seconds in which there has been no connection to the master: 0 while there is one."""
        return self._client.lost_seconds

    async def send(self, reply: protocol.Reply, deadline_seconds: float = 30.0) -> None:
        """Queue a reply. Raises TransportError where the queue stays full until the deadline."""
        await self._client.send(protocol.encode(reply), deadline_seconds)

    async def receive(self) -> protocol.Command:
        """The next well-formed command. Raises TransportError where the master refused this worker's key.

        Waits without end: `lost_seconds` says whether there still is a master.
        """
        while True:
            frames = await self._client.receive()
            try:
                if len(frames) == 1:
                    command: protocol.Command = protocol.decode_command(frames[0])
                    return command
                problem = f"it has {len(frames)} frames, expected 1"
            except UNREADABLE as error:
                problem = str(error)
            log.warning("refused a message of the master: %s", problem)

    async def close(self) -> None:
        """Send what is queued, then hang up."""
        await self._client.close()
