"""The route on one host: a Unix socket carries headers and, once, the descriptors of segments; bytes are never sent.

The owner serves each reader from a thread that mostly sleeps, so its compute thread need not take part. What an answer
shows is kept from reuse until the reader says it is done or hangs up.
"""

import contextlib
import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from realgraph.runtime.memory.anonymous import Bytes, Window, aligned, map_bytes
from realgraph.runtime.store import bundle
from realgraph.runtime.store.bundle import (
    Deadline,
    Deposit,
    Deposited,
    Extent,
    FetchRequest,
    Item,
    Missing,
    NewSegments,
    PeerLostError,
    Release,
    SharedFetch,
    TransferError,
    Unfetched,
)
from realgraph.runtime.store.store import MissingValueError, Store, StoredValue
from realgraph.runtime.wire.frames import LENGTH_BYTES, framed
from realgraph.runtime.wire.protocol import Peer
from realgraph.runtime.wire.refusals import UNREADABLE

log = logging.getLogger(__name__)


_MAX_HEADER_BYTES = 1 << 30
_MAX_DESCRIPTORS = 64  # in one message; the kernel takes 253
_SEND_SECONDS = 30.0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def connect_local(name: str) -> socket.socket:
    """A connection to the local socket `name` (`@...`: abstract). Raises OSError, also for a socket of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(name))
        _check_user(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _address(name: str) -> str:
    return "\0" + name[1:] if name.startswith("@") else name


def _check_user(connection: socket.socket) -> None:
    """Linux: the process at the other end must be ours. Elsewhere the socket lies in a folder only we can enter."""
    if sys.platform == "linux":
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            raise PermissionError(f"process {pid} at the other end belongs to user {uid}, not to {os.getuid()}")


def _send(connection: socket.socket, message: bundle.Request | bundle.Answer, descriptors: Sequence[int] = ()) -> None:
    data = framed(bundle.encode(message))
    if descriptors:  # they travel with the first byte
        data = data[socket.send_fds(connection, [data], list(descriptors)) :]
    connection.sendall(data)


def _receive(connection: socket.socket, deadline: Deadline | None) -> tuple[bytearray, list[int]]:
    """The next message and its descriptors. Raises OSError, TimeoutError, and EOFError where the other end hung up."""
    head, descriptors = bytearray(), list[int]()
    try:
        while len(head) < LENGTH_BYTES:
            connection.settimeout(deadline.left() if deadline else None)
            piece, fds, _, _ = socket.recv_fds(
                connection, LENGTH_BYTES - len(head), _MAX_DESCRIPTORS, flags=_CLOSE_ON_EXEC
            )
            descriptors += fds
            if not piece:
                raise EOFError
            head += piece
        length = int.from_bytes(head, "big")
        if length > _MAX_HEADER_BYTES:
            raise ConnectionError(f"a header of {length} bytes")
        body = bytearray(length)
        view = memoryview(body)
        while view:
            connection.settimeout(deadline.left() if deadline else _SEND_SECONDS)
            n = connection.recv_into(view)
            if n == 0:
                raise EOFError
            view = view[n:]
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    return body, descriptors


class LocalServer:
    """Shows this worker's store to processes of the same user on the same host."""

    def __init__(
        self, store: Store, shared: Callable[[SharedFetch], list[StoredValue]], deposits: Callable[[bytes], None]
    ) -> None:
        """shared: the values of a share that this worker fetches for its host. Raises TransferError. deposits: takes
        what peers have it take, from any thread. Raises msgspec.MsgspecError."""
        self._store, self._shared, self._deposits = store, shared, deposits
        self._folder = ""
        if sys.platform == "linux":
            self.name = f"@realgraph-{uuid.uuid4().hex}"
        else:
            self._folder = tempfile.mkdtemp(prefix="realgraph-")  # mode 0700
            self.name = os.path.join(self._folder, "store")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(1024)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="data-local", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all readers and end all threads."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        with contextlib.suppress(OSError):  # macOS: a listener cannot be shut down; its close wakes the thread there
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):  # its reader hung up meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *connections.values()):
            thread.join(_SEND_SECONDS)
        if self._folder:
            shutil.rmtree(self._folder)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                raise
            try:
                _check_user(connection)
            except OSError as error:
                log.warning("refused a reader: %s", error)
                connection.close()
                continue
            with self._lock:
                if self._closing:
                    connection.close()
                    return
                thread = threading.Thread(target=self._serve, args=(connection,), name="data-reader", daemon=True)
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader = _Reader(connection, self._store, self._shared, self._deposits)
        try:
            while True:
                body, descriptors = _receive(connection, None)
                for fd in descriptors:  # readers have none to give
                    os.close(fd)
                connection.settimeout(_SEND_SECONDS)
                reader.answer(bundle.decode_request(body))
        except (EOFError, OSError) as error:
            log.debug("a reader is gone: %r", error)
        except UNREADABLE as error:
            log.warning("hung up on a reader whose request cannot be read: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)


class _Reader:
    """The state of one reader: descriptors once, and a hold on the values of its last answer."""

    def __init__(
        self,
        connection: socket.socket,
        store: Store,
        shared: Callable[[SharedFetch], list[StoredValue]],
        deposits: Callable[[bytes], None],
    ) -> None:
        self._connection = connection
        self._store, self._shared, self._deposits = store, shared, deposits
        self._given: set[int] = set()
        self._values: list[StoredValue] = []

    def answer(self, request: bundle.Request) -> None:
        match request:
            case FetchRequest(items=items):
                self._values = []
                try:
                    self._values = bundle.find(self._store, items)
                except MissingValueError as error:
                    _send(self._connection, Missing(error.key, error.id))
                    return
                self._show()
            case SharedFetch():
                self._values = []
                try:
                    self._values = self._shared(request)
                except TransferError as error:
                    lost = isinstance(error, PeerLostError)
                    _send(self._connection, Unfetched(error.worker, str(error), lost))
                    return
                self._show()
            case Release():
                self._values = []
            case Deposit(data=data):
                self._deposits(data)
                _send(self._connection, Deposited())
            case bundle.Fetch() | bundle.Credit():
                raise ConnectionError("a request of the other route")

    def _show(self) -> None:
        self._give_segments()
        _send(self._connection, bundle.Bundle(bundle.extents(self._values)))

    def _give_segments(self) -> None:
        arena = self._store.arena
        retired = self._given - arena.segments()
        wanted = {entry.block.segment for entry in self._values if entry.block is not None}
        new = sorted(wanted - self._given)
        self._given = (self._given | wanted) - retired
        for start in range(0, len(new), _MAX_DESCRIPTORS):
            some = new[start : start + _MAX_DESCRIPTORS]
            descriptors = [arena.descriptor(segment) for segment in some]  # live: we hold a block of each
            sizes = tuple((segment, nbytes) for segment, (_, nbytes) in zip(some, descriptors, strict=True))
            _send(self._connection, NewSegments(sizes), [fd for fd, _ in descriptors])
        if retired:
            _send(self._connection, NewSegments((), tuple(sorted(retired))))


class _Loan:
    """Keeps an answer's values from reuse while tensors over them live."""


class LocalChannel:
    """A reader's connection to one owner on this host.

    After `collect` without a copy it serves nothing else until the views are gone; then it calls `returned`, from
    whatever thread.
    """

    def __init__(self, peer: Peer, returned: Callable[["LocalChannel"], None]) -> None:
        self._worker = peer.worker
        self._returned = returned
        self._mapped: dict[int, Bytes] = {}
        try:
            self._connection = connect_local(peer.local)
        except OSError as error:
            raise PeerLostError(peer.worker, f"worker {peer.worker} cannot be reached on this host: {error}") from None

    def stale(self) -> bool:
        try:
            self._connection.settimeout(0)
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # it ended, or says what nobody asked for

    def ask(self, items: Sequence[Item], deadline: Deadline) -> None:
        self.request(FetchRequest(tuple(items)), deadline)

    def deposit(self, data: bytes, deadline: Deadline) -> None:
        self.request(Deposit(data), deadline)
        if not isinstance(self._answer(deadline), Deposited):
            raise PeerLostError(self._worker, f"worker {self._worker} answered what it was not asked")

    def request(self, request: FetchRequest | SharedFetch | Deposit, deadline: Deadline) -> None:
        """Send a request that `collect` takes the answer of. Raises TransferError."""
        try:
            self._connection.settimeout(deadline.left())
            _send(self._connection, request)
        except TimeoutError:
            raise deadline.slow(self._worker, "take a request") from None
        except OSError as error:
            raise self._lost(error) from None

    def collect(self, deadline: Deadline, copy: bool) -> list[Tensor]:
        while not isinstance(answer := self._answer(deadline), bundle.Bundle):
            if isinstance(answer, Missing):
                raise bundle.AbsentError(self._worker, answer.key, answer.id)
            if isinstance(answer, Unfetched):
                raise (PeerLostError if answer.lost else TransferError)(answer.worker, answer.text)
            if isinstance(answer, Deposited):
                raise PeerLostError(self._worker, f"worker {self._worker} answered what it was not asked")
        try:
            if not copy:
                return self._views(answer.extents)
            landed, offset = bundle.landing(answer.extents), 0
            for extent in answer.extents:
                np.copyto(landed[offset : offset + extent.nbytes], self._bytes(extent))
                offset += aligned(extent.nbytes)
            values = bundle.carve(landed, answer.extents)
        except (ValueError, KeyError) as error:
            raise PeerLostError(self._worker, f"worker {self._worker} sent a header that is wrong: {error}") from None
        self._release()
        return values

    def close(self) -> None:
        self._connection.close()

    def _answer(self, deadline: Deadline) -> bundle.Answer:
        try:
            body, descriptors = _receive(self._connection, deadline)
        except TimeoutError:
            raise deadline.slow(self._worker, "answer") from None
        except (EOFError, OSError) as error:
            raise self._lost(error) from None
        try:
            answer = bundle.decode_answer(body)
            if isinstance(answer, NewSegments):
                for (segment, nbytes), fd in zip(answer.new, descriptors, strict=True):
                    self._mapped[segment] = map_bytes(fd, nbytes, writable=False)
                for segment in answer.retired:
                    del self._mapped[segment]
        except (*UNREADABLE, ValueError, KeyError, OSError) as error:
            raise PeerLostError(self._worker, f"worker {self._worker} sent a header that is wrong: {error}") from None
        finally:
            for fd in descriptors:
                os.close(fd)
        return answer

    def _bytes(self, extent: Extent) -> Bytes:
        if extent.nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        view = self._mapped[extent.segment][extent.offset : extent.offset + extent.nbytes]
        if view.nbytes != extent.nbytes:
            raise ValueError(f"{extent} lies outside its segment")
        return view

    def _views(self, extents: Sequence[Extent]) -> list[Tensor]:
        loan = _Loan()
        weakref.finalize(loan, self._end_loan).atexit = False
        views = [bundle.shaped(np.asarray(Window(self._bytes(extent), loan)), 0, extent) for extent in extents]
        return [value for view, extent in zip(views, extents, strict=True) for value in bundle.cut(view, extent)]

    def _end_loan(self) -> None:
        """The last view is gone. Runs wherever the garbage collector does, so it takes no lock and cannot raise."""
        with contextlib.suppress(PeerLostError):  # the next gather will say so
            self._release()
        self._returned(self)

    def _release(self) -> None:
        try:
            self._connection.settimeout(_SEND_SECONDS)
            _send(self._connection, Release())
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> PeerLostError:
        why = str(error) or "it hung up"
        return PeerLostError(self._worker, f"worker {self._worker} on this host is lost: {why}")
