"""The two ends of a CurveZMQ connection: a server that many dial, and a client. Moves frames, and knows no message."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

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
from realgraph.runtime.wire.refusals import Refusals

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000  # messages queued for one peer before a send waits
MAX_WAITING_CLIENTS = 4096  # that dial while this process is busy or stopped: all workers of a large run
MAX_MESSAGE_BYTES = 256 << 20  # more than any job or batch of ids; what is longer is refused by the socket
_UNCOPIED_BYTES = 64 << 10  # of a message that waits in queues as it is, however many clients get it
LINGER_MS = 1_000  # how long a closing socket still tries to send its last messages


class TransportError(Exception):
    """A message could not be sent or can never arrive."""


class SecureServer:
    """Clients dial `address`; each must hold the secret of one of the `allowed` public keys, and has a name.

    Make it inside a running event loop. Raises zmq.ZMQError where the address can't be bound.
    """

    def __init__(self, keys: KeyPair, allowed: Collection[str], address: str) -> None:
        """address: `tcp://INTERFACE:PORT`; port 0 is any."""
        self._allowed = frozenset(allowed)
        self._refusals = Refusals(log)
        self._context = zmq.asyncio.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        secure_server(self._socket, keys)
        if not is_local(address):
            give_up_silent(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to nobody is an error, not a loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its name
        self._socket.setsockopt(zmq.BACKLOG, MAX_WAITING_CLIENTS)
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._close_sockets()
            self._context.term()
            raise
        self.address: str = bound_address(self._socket)
        self._tasks = (_forever(self._admit), _forever(self._watch))

    def allow(self, allowed: Collection[str]) -> None:
        """From now on the holders of these keys may connect, and nobody else. Connections that there are stay."""
        self._allowed = frozenset(allowed)

    async def send(self, client: bytes, body: bytes, who: str, deadline_seconds: float) -> None:
        """Queue a message for a client. Raises TransportError, which calls it `who`, where it is not connected or takes
        nothing for that long."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._socket.send_multipart([client, body], copy=len(body) < _UNCOPIED_BYTES)
        except TimeoutError:
            text = f"{who} has taken no message for {deadline_seconds:g} s: its queue is full"
            raise TransportError(text) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise TransportError(f"{who} is not connected") from None

    async def receive(self) -> list[zmq.Frame]:
        """The next message, behind the name of the client that sent it; its key is the frames' `User-Id`. For one
        task, to be cancelled only at the end. Waits without end."""
        frames: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
        return frames

    async def close(self) -> None:
        """Send what is queued (at most LINGER_MS), then close the port."""
        await _cancel(self._tasks)
        self._close_sockets()
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket, self._zap):
            socket.close()

    async def _admit(self) -> None:
        request = await self._zap.recv_multipart()
        await self._zap.send_multipart(answer_zap(request, self._allowed))

    async def _watch(self) -> None:
        event = await recv_monitor_message(self._monitor)
        if failure := handshake_failure(event["event"]):
            self._refusals.add(f"a connection to {self.address} was refused: {failure}")


class SecureClient:
    """Dials a SecureServer at once, under a name of its own, and reconnects by itself. Make it inside a running event
    loop."""

    def __init__(self, address: str, name: bytes, keys: KeyPair, server_key: str) -> None:
        self.address = address
        self.connected = False
        self._since = time.monotonic()
        self._refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._receiving: asyncio.Future[list[bytes]] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket)
        secure_client(self._socket, keys, server_key)
        if not is_local(address):
            give_up_silent(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._socket.connect(address)
        self._tasks = (_forever(self._watch),)

    @property
    def lost_seconds(self) -> float:
        """Seconds in which there has been no connection to the server: 0 while there is one."""
        return 0.0 if self.connected else time.monotonic() - self._since

    async def send(self, body: bytes, deadline_seconds: float = 30.0) -> None:
        """Queue a message. Raises TransportError where the queue stays full until the deadline, or the server has
        refused this client's key, which takes the queue away."""
        if self._refusal.done():
            raise self._refused()
        sending = asyncio.ensure_future(self._socket.send(body))
        try:
            if not sending.done():  # there was no room at once
                both = (sending, self._refusal)
                await asyncio.wait(both, timeout=deadline_seconds, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return
        finally:
            sending.cancel()
        if self._refusal.done():
            raise self._refused()
        raise TransportError(f"the master at {self.address} has taken no message for {deadline_seconds:g} s")

    async def receive(self) -> list[bytes]:
        """The frames of the next message. Raises TransportError where the server refused this client's key.

        Waits without end: `lost_seconds` says whether there still is a server.
        """
        if self._receiving is None:  # kept over a cancelled wait, so that no message is lost with it
            self._receiving = asyncio.ensure_future(self._socket.recv_multipart())
        receiving = self._receiving
        await asyncio.wait((receiving, self._refusal), return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            raise self._refused()
        self._receiving = None
        return receiving.result()

    def _refused(self) -> TransportError:
        return TransportError(f"no connection to the master at {self.address}: {self._refusal.result()}")

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
            self.connected = True
        elif self.connected:
            self.connected, self._since = False, time.monotonic()


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
