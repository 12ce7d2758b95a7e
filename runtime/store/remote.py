"""The route between hosts: values in frames over ZeroMQ with CurveZMQ, no more in flight than the reader granted.

The owner serves from one thread of its own; encryption runs in ZeroMQ's threads.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from realgraph.runtime.store import bundle
from realgraph.runtime.store.bundle import (
    Bundle,
    Credit,
    Deadline,
    Deposit,
    Deposited,
    Fetch,
    Item,
    Missing,
    PeerLostError,
)
from realgraph.runtime.store.store import MissingValueError, Store
from realgraph.runtime.wire.curve import (
    MONITORED,
    ZAP_ENDPOINT,
    KeyPair,
    answer_zap,
    bound_address,
    give_up_silent,
    handshake_failure,
    secure_client,
    secure_server,
)
from realgraph.runtime.wire.protocol import Peer
from realgraph.runtime.wire.refusals import UNREADABLE, Refusals

log = logging.getLogger(__name__)

WINDOW_FRAMES = 8  # frames a reader grants in advance: enough to keep the wire busy, and the most that waits in queues
MAX_WINDOW_FRAMES = 64
_MAX_QUEUED_FRAMES = MAX_WINDOW_FRAMES + 8
_MAX_MESSAGE_BYTES = 1 << 30
_MAX_RETRIES = 3
_TICK_MS = 1_000
_UNCONFIGURED_TICK_MS = 20
_STOP = "inproc://stop"


@dataclass
class _Outgoing:
    """An answer under way: what is left of it, and when to give it up."""

    frames: Iterator[bytes | memoryview]
    expires: float


class RemoteServer:
    """Sends this worker's values to the peers whose keys are known. `allow` says which; nobody before that."""

    def __init__(
        self,
        store: Store,
        keys: KeyPair,
        interface: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        deposits: Callable[[bytes], None],
    ) -> None:
        self._store, self._refusals, self._deposits = store, Refusals(log), deposits
        self._allowed: Collection[str] | None = None
        self._outgoing: dict[bytes, _Outgoing] = {}
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind(_STOP)
        self._stop.connect(_STOP)
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _set_limits(self._router)
        secure_server(self._router, keys)
        give_up_silent(self._router)
        self._router.bind(f"tcp://{interface}:0")
        self.address = bound_address(self._router)
        self._thread = threading.Thread(target=self._serve, name="data-remote", daemon=True)
        self._thread.start()

    def allow(self, keys: Collection[str]) -> None:
        """Let the holders of these public keys in, and nobody else."""
        self._allowed = frozenset(keys)

    def close(self) -> None:
        """End the thread and close the port."""
        self._stop.send(b"")
        self._thread.join(30)
        self._stop.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stopped, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        next_tick = time.monotonic()
        while True:
            if self._allowed is not None and self._zap not in poller:  # who dials before we know anybody has to wait
                poller.register(self._zap, zmq.POLLIN)
            ready = dict(poller.poll(_UNCONFIGURED_TICK_MS if self._allowed is None else _TICK_MS))
            if self._stopped in ready:
                break
            if self._zap in ready and self._allowed is not None:
                self._zap.send_multipart(answer_zap(self._zap.recv_multipart(), self._allowed))
            if self._router in ready:
                self._take(self._router.recv_multipart())
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK_MS / 1000
                self._expire()
        for socket in (self._zap, self._stopped, self._router):
            socket.close()

    def _take(self, message: Sequence[bytes]) -> None:
        reader, *bodies = message
        try:
            if len(bodies) != 1:
                raise msgspec.ValidationError(f"{len(bodies)} frames, expected 1")
            request = bundle.decode_request(bodies[0])
            if isinstance(request, Deposit):
                self._deposits(request.data)
        except UNREADABLE as error:
            self._refusals.add(f"refused a request that cannot be read: {error}")
            return
        match request:
            case Fetch():
                self._begin(reader, request)
            case Credit(frames=n):
                self._send_frames(reader, n)
            case Deposit():
                self._send(reader, bundle.encode(Deposited()))
            case bundle.FetchRequest() | bundle.SharedFetch() | bundle.Release():
                self._refusals.add("refused a request of the other route")

    def _begin(self, reader: bytes, request: Fetch) -> None:
        try:
            entries = bundle.find(self._store, request.items)
        except MissingValueError as error:
            self._send(reader, bundle.encode(Missing(error.key, error.id)))
            return
        self._outgoing[reader] = _Outgoing(bundle.frames(entries), time.monotonic() + request.deadline_seconds)
        self._send(reader, bundle.encode(Bundle(bundle.extents(entries))))
        self._send_frames(reader, request.window)

    def _send_frames(self, reader: bytes, n: int) -> None:
        for _ in range(min(n, MAX_WINDOW_FRAMES)):
            outgoing = self._outgoing.get(reader)
            if outgoing is None:  # the last frames of an answer need no credit, but may get some
                return
            frame = next(outgoing.frames, None)
            if frame is None:
                del self._outgoing[reader]
                return
            self._send(reader, frame)

    def _send(self, reader: bytes, frame: bytes | memoryview) -> None:
        try:
            self._router.send(reader, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            log.debug("a reader is gone or takes more than it granted: %s", error)
            self._outgoing.pop(reader, None)

    def _expire(self) -> None:
        for reader in [r for r, outgoing in self._outgoing.items() if time.monotonic() > outgoing.expires]:
            del self._outgoing[reader]


class RemoteChannel:
    """A reader's connection to one owner. It is closed after any error, so an answer never meets a later question."""

    def __init__(self, peer: Peer, keys: KeyPair, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._worker = peer.worker
        self._place = f"worker {peer.worker} at {peer.address}"
        self._socket = context.socket(zmq.DEALER)
        _set_limits(self._socket)
        secure_client(self._socket, keys, peer.key)
        give_up_silent(self._socket)
        self._monitor = self._socket.get_monitor_socket(MONITORED | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._greeted = False
        self._retries = 0  # since there was a connection
        self._socket.connect(peer.address)

    def ask(self, items: Sequence[Item], deadline: Deadline) -> None:
        self._send(Fetch(tuple(items), WINDOW_FRAMES, deadline.left()), deadline)

    def deposit(self, data: bytes, deadline: Deadline) -> None:
        self._send(Deposit(data), deadline)
        if not isinstance(self._answer(deadline), Deposited):
            raise PeerLostError(self._worker, f"{self._place} sent an answer of the other route")

    def _answer(self, deadline: Deadline) -> bundle.Answer:
        try:
            return bundle.decode_answer(self._receive(deadline, "answer").bytes)
        except UNREADABLE as error:
            raise PeerLostError(self._worker, f"{self._place} sent a header that is wrong: {error}") from None

    def collect(self, deadline: Deadline, copy: bool) -> list[Tensor]:
        """`copy` makes no difference: values are always the reader's own."""
        answer = self._answer(deadline)
        if isinstance(answer, Missing):
            raise bundle.AbsentError(self._worker, answer.key, answer.id)
        if not isinstance(answer, Bundle):
            raise PeerLostError(self._worker, f"{self._place} sent an answer of the other route")
        landed, filled, credit = bundle.landing(answer.extents), 0, 0
        while filled < landed.nbytes:
            piece = np.frombuffer(self._receive(deadline, "send all values").buffer, dtype=np.uint8)
            if not 0 < piece.nbytes <= landed.nbytes - filled:
                raise PeerLostError(self._worker, f"{self._place} sent {piece.nbytes} bytes that were not announced")
            landed[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes
            credit += 1
            if credit == WINDOW_FRAMES // 2 and filled < landed.nbytes:
                self._send(Credit(credit), deadline)
                credit = 0
        try:
            return bundle.carve(landed, answer.extents)
        except ValueError as error:
            raise PeerLostError(self._worker, f"{self._place} sent a header that is wrong: {error}") from None

    def stale(self) -> bool:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    return True
        return False

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0)

    def _send(self, request: Fetch | Credit | Deposit, deadline: Deadline) -> None:
        """A connection whose key was refused takes nothing any more: the monitor says so, not the socket."""
        body = bundle.encode(request)
        while not deadline.passed:
            with contextlib.suppress(zmq.Again):
                self._socket.send(body, zmq.NOBLOCK)
                return
            self._wait(zmq.POLLOUT, deadline)
        raise deadline.slow(self._worker, "take a request")

    def _receive(self, deadline: Deadline, doing: str) -> zmq.Frame:
        """The next frame; connection failures end the wait at once. Raises TransferError."""
        while not deadline.passed:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv(zmq.NOBLOCK, copy=False)
            self._wait(zmq.POLLIN, deadline)
        raise deadline.slow(self._worker, doing)

    def _wait(self, way: int, deadline: Deadline) -> None:
        """Until the socket is ready that way, an event of the connection was handled or time is over."""
        self._poller.modify(self._socket, way)
        ready = dict(self._poller.poll(max(1, int(deadline.left() * 1000))))
        if self._socket not in ready and self._monitor in ready:
            self._check(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def _check(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            raise PeerLostError(self._worker, f"{self._place} is lost: the connection broke")
        elif event == zmq.EVENT_CONNECTED:
            self._retries = 0
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._retries += 1
            if self._retries >= _MAX_RETRIES:
                raise PeerLostError(self._worker, f"{self._place} cannot be reached: it refuses connections")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            failure = handshake_failure(event)  # one that just broke off is tried again: it may know no keys yet
            raise PeerLostError(self._worker, f"{self._place} did not accept this worker: {failure}")


def _set_limits(socket: "zmq.Socket[bytes]") -> None:
    socket.set_hwm(_MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
