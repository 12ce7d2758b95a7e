"""A worker's way to the run directory where its host does not see it: requests to the host of the run, and answers.

Each thread has a connection of its own. What is written is on its way while the thread goes on, a few pieces at most;
whatever fails is an OSError, and ends the connection, so that an answer never meets a later request.
"""

import itertools
import threading
import time
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from realgraph.runtime.files.messages import (
    PIECE_BYTES,
    AppendLine,
    FileAnswer,
    FileBox,
    FileReply,
    FileRequest,
    ListFolder,
    MakeFolder,
    ReadBox,
    SyncPath,
    WriteBox,
    decode_reply,
    encode,
)
from realgraph.runtime.wire.curve import MONITORED, KeyPair, give_up_silent, handshake_failure, secure_client
from realgraph.runtime.wire.refusals import UNREADABLE

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 600.0  # a full page cache may take so long to get to the disk; a lost connection ends a wait at once
AHEAD_BYTES = 2 * PIECE_BYTES  # that are written and not yet answered,
AHEAD = 64  # in as many requests at most
MAX_REPLY_BYTES = PIECE_BYTES + (16 << 20)  # with the names of a folder


class FileClient:
    """Made once per worker. keys: this worker's; address, server_key: of the FileServer. Every method is safe to call
    from several threads, and raises OSError."""

    def __init__(self, address: str, server_key: str, keys: KeyPair) -> None:
        self._address, self._server_key, self._keys = address, server_key, keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._here = threading.local()
        self._numbers = itertools.count()

    def make_folder(self, path: str) -> None:
        self._ask(MakeFolder(next(self._numbers), path))

    def write(self, path: str, file_bytes: int, box: FileBox, data: bytes) -> None:
        """Write a box of at most PIECE_BYTES; it is written once `sync` says so."""
        self._begin(WriteBox(next(self._numbers), path, file_bytes, box, data))

    def append(self, path: str, line: bytes) -> None:
        self._ask(AppendLine(next(self._numbers), path, line))

    def sync(self, path: str) -> None:
        """Wait until all that this thread has written is there, and this file, or the entries of this folder, safe."""
        self._ask(SyncPath(next(self._numbers), path))

    def read(self, path: str, box: FileBox) -> bytes:
        """A box of at most PIECE_BYTES."""
        return self._ask(ReadBox(next(self._numbers), path, box)).data

    def sizes(self, path: str) -> Mapping[str, int]:
        """The files in a folder, with their bytes."""
        return self._ask(ListFolder(next(self._numbers), path)).sizes

    def close(self) -> None:
        """Hang up. No thread may be using this."""
        self._context.destroy(linger=0)

    def _begin(self, request: FileRequest) -> "_Connection":
        connection: _Connection | None = getattr(self._here, "connection", None)
        if connection is not None and connection.stale():
            self._drop(connection)
            connection = None
        if connection is None:
            connection = _Connection(self._context, self._address, self._server_key, self._keys)
            self._here.connection = connection
        try:
            connection.send(request)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _ask(self, request: FileRequest) -> FileAnswer:
        """The answer to a request. All earlier ones of this thread are done by then."""
        connection = self._begin_after(request)
        try:
            return connection.answer(request.number)
        except BaseException:
            self._drop(connection)
            raise

    def _begin_after(self, request: FileRequest) -> "_Connection":
        connection: _Connection | None = getattr(self._here, "connection", None)
        if connection is not None:
            try:
                connection.settle()
            except BaseException:
                self._drop(connection)
                raise
        return self._begin(request)

    def _drop(self, connection: "_Connection") -> None:
        connection.close()
        del self._here.connection


class _Connection:
    """The way of one thread to the host of the run."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, server_key: str, keys: KeyPair) -> None:
        self._host = address.removeprefix("tcp://")
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        secure_client(self._socket, keys, server_key)
        give_up_silent(self._socket)
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._greeted = False
        self._made = time.monotonic()
        self._unanswered: dict[int, int] = {}  # requests by number, with their bytes
        self._socket.connect(address)

    def stale(self) -> bool:
        """True where it broke while nothing was asked."""
        events = []
        while not self._unanswered and self._monitor.poll(0):
            events.append(parse_monitor_message(self._monitor.recv_multipart())["event"])
        self._greeted |= zmq.EVENT_HANDSHAKE_SUCCEEDED in events
        return zmq.EVENT_DISCONNECTED in events

    def send(self, request: FileRequest) -> None:
        body = encode(request)
        while self._unanswered and (self._ahead + len(body) > AHEAD_BYTES or len(self._unanswered) >= AHEAD):
            self._take()
        while not self._sent(body):  # a server that refuses this key takes the queue away again
            self._wait(zmq.POLLOUT)
        self._unanswered[request.number] = len(body)

    @property
    def _ahead(self) -> int:
        """Bytes that are not yet answered."""
        return sum(self._unanswered.values())

    def settle(self) -> None:
        """Wait for all answers."""
        while self._unanswered:
            self._take()

    def answer(self, number: int) -> FileAnswer:
        """The answer to a request that is on its way."""
        while (reply := self._take()).number != number:
            pass
        return reply

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0)

    def _take(self) -> FileAnswer:
        """The next answer. Raises OSError with what the host of the run says, or that it says nothing."""
        reply = self._receive()
        self._unanswered.pop(reply.number, None)
        if isinstance(reply, FileAnswer):
            return reply
        raise OSError(reply.errno, reply.text, reply.path)

    def _sent(self, body: bytes) -> bool:
        """False where there is no queue to the server, or no room in it."""
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> FileReply:
        self._wait(zmq.POLLIN)
        try:
            return decode_reply.decode(self._socket.recv())
        except UNREADABLE as error:
            raise ConnectionError(f"the host of the run sent no answer: {error}") from None

    def _wait(self, event: int) -> None:
        """Return when the socket can be read, or written. Raises OSError where the connection is lost or silent."""
        last = time.monotonic() + ANSWER_SECONDS
        self._poller.modify(self._socket, event)
        while (now := time.monotonic()) < last:
            limit = last if self._greeted else min(last, self._made + CONNECT_SECONDS)
            if now > limit:
                raise ConnectionError(f"the host of the run can't be reached at {self._host}")
            ready = dict(self._poller.poll(int(1000 * (limit - now)) + 1))
            if self._socket in ready:
                return
            if self._monitor in ready:
                self._note(parse_monitor_message(self._monitor.recv_multipart())["event"])
        raise TimeoutError(f"the host of the run at {self._host} has not answered for {ANSWER_SECONDS:g} s")

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            raise ConnectionError(f"the connection to the host of the run at {self._host} broke")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            raise ConnectionError(f"the host of the run at {self._host} is another: {handshake_failure(event)}")
