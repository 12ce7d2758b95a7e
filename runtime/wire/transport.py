"""Control messages between master and workers: ZeroMQ, CurveZMQ, msgspec. Moves no tensor and decides nothing."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from realgraph.runtime.wire import protocol
from realgraph.runtime.wire.curve import (
    MONITORED,
    KeyPair,
    answer_zap,
    bound_address,
    give_up_silent,
    handshake_failure,
    is_local,
    secure_client,
    secure_server,
)
from realgraph.runtime.wire.curve import ZAP_ENDPOINT as ZAP

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000  # messages queued for one peer before a send waits
MAX_MESSAGE_BYTES = 256 << 20  # more than any job or batch of ids; what is longer is refused by the socket
LINGER_MS = 1_000  # how long a closing socket still tries to send its last messages


class TransportError(Exception):
    """A message could not be sent or can never arrive."""


class MasterSocket:
    """The master's end. Workers dial `address`; each must hold the secret of the public key listed under its number.

    Make it inside a running event loop. A message that is malformed, or that claims to be from another worker, is
    logged, counted in `refused`, and goes no further.
    """

    def __init__(self, keys: KeyPair, workers: Mapping[int, str], interface: str) -> None:
        self._workers = dict(workers)
        self._allowed = frozenset(workers.values())
        self.refused = 0
        self._context = zmq.asyncio.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        secure_server(self._socket, keys)
        if not is_local(interface):
            give_up_silent(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to nobody is an error, not a loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its number
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._socket.bind(f"tcp://{interface}:0")
        self.address: str = bound_address(self._socket)
        self._tasks = (_forever(self._admit), _forever(self._watch))

    async def send(self, worker: int, command: protocol.Command, deadline_seconds: float = 30.0) -> None:
        """Queue a command. Raises TransportError where the worker is not connected or takes nothing for that long."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._socket.send_multipart([b"%d" % worker, protocol.encode(command)])
        except TimeoutError:
            raise TransportError(
                f"worker {worker} has taken no message for {deadline_seconds:g} s: its queue is full"
            ) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise TransportError(f"worker {worker} is not connected") from None

    async def receive(self) -> tuple[int, protocol.Reply]:
        """The next well-formed reply and the worker that sent it. For one task, to be cancelled only at the end.

        Waits without end: the heartbeats of workers bound it.
        """
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            worker, problem = self._sender(frames)
            if not problem:
                try:
                    reply = protocol.decode_reply(frames[1].buffer)
                except msgspec.MsgspecError as error:
                    problem = f"a message from worker {worker} cannot be read: {error}"
                else:
                    if reply.worker == worker:
                        return worker, reply
                    problem = f"worker {worker} sent a message in the name of worker {reply.worker}"
            self.refused += 1
            log.warning("refused: %s", problem)

    async def close(self) -> None:
        """Send what is queued (at most LINGER_MS), then close the port."""
        await _cancel(self._tasks)
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket, self._zap):
            socket.close()
        await asyncio.to_thread(self._context.term)

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

    async def _admit(self) -> None:
        request = await self._zap.recv_multipart()
        await self._zap.send_multipart(answer_zap(request, self._allowed))

    async def _watch(self) -> None:
        event = await recv_monitor_message(self._monitor)
        if failure := handshake_failure(event["event"]):
            log.warning("a connection to %s was refused: %s", self.address, failure)


class WorkerSocket:
    """A worker's end. Make it inside a running event loop; it dials at once and reconnects by itself."""

    def __init__(self, worker: int, address: str, keys: KeyPair, master_key: str) -> None:
        self.address = address
        self._connected = False
        self._since = time.monotonic()
        self._refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._receiving: asyncio.Future[list[bytes]] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket)
        secure_client(self._socket, keys, master_key)
        if not is_local(address):
            give_up_silent(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, b"%d" % worker)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._socket.connect(address)
        self._tasks = (_forever(self._watch),)

    @property
    def lost_seconds(self) -> float:
        """Seconds in which there has been no connection to the master: 0 while there is one."""
        return 0.0 if self._connected else time.monotonic() - self._since

    async def send(self, reply: protocol.Reply, deadline_seconds: float = 30.0) -> None:
        """Queue a reply. Raises TransportError where the queue stays full until the deadline."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._socket.send(protocol.encode(reply))
        except TimeoutError:
            raise TransportError(
                f"the master at {self.address} has taken no message for {deadline_seconds:g} s"
            ) from None

    async def receive(self) -> protocol.Command:
        """The next well-formed command. Raises TransportError where the master refused this worker's key.

        Waits without end: `lost_seconds` says whether there still is a master.
        """
        while True:
            frames = await self._frames()
            try:
                if len(frames) == 1:
                    command: protocol.Command = protocol.decode_command(frames[0])
                    return command
                problem = f"it has {len(frames)} frames, expected 1"
            except msgspec.MsgspecError as error:
                problem = str(error)
            log.warning("refused a message of the master: %s", problem)

    async def _frames(self) -> list[bytes]:
        if self._receiving is None:  # kept over a cancelled wait, so that no message is lost with it
            self._receiving = asyncio.ensure_future(self._socket.recv_multipart())
        receiving = self._receiving
        await asyncio.wait((receiving, self._refusal), return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            raise TransportError(f"no connection to the master at {self.address}: {self._refusal.result()}")
        self._receiving = None
        return receiving.result()

    async def close(self) -> None:
        """Send what is queued (at most LINGER_MS), then hang up."""
        await _cancel(self._tasks)
        self._refusal.cancel()
        if self._receiving is not None:
            self._receiving.cancel()
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket):
            socket.close()
        await asyncio.to_thread(self._context.term)

    async def _watch(self) -> None:
        event = await recv_monitor_message(self._monitor)
        if failure := handshake_failure(event["event"]):
            if not self._refusal.done() and event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refusal.set_result(failure)
        elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
        elif self._connected:
            self._connected, self._since = False, time.monotonic()


def _set_limits(socket: zmq.asyncio.Socket) -> None:
    socket.set_hwm(MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _forever(turn: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    async def turns() -> None:
        while True:
            await turn()

    return asyncio.create_task(turns())


async def _cancel(tasks: tuple[asyncio.Task[None], ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
