"""The data plane of one worker: serves its own store to peers, and gathers values from theirs.

The route follows from where the peer is: shared memory on one host, frames over TCP between hosts. Serving runs in
threads of its own, so peers are answered while the compute thread is busy.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import zmq
from msgspec import Struct
from torch import Tensor

from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.store.bundle import AbsentError, Channel, Deadline, Item, Route, SharedFetch, TransferError
from realgraph.runtime.store.local import LocalChannel, LocalServer
from realgraph.runtime.store.remote import RemoteChannel, RemoteServer
from realgraph.runtime.store.shares import Share, Shares, fetcher
from realgraph.runtime.store.store import MissingValueError, Store, StoredValue
from realgraph.runtime.wire.curve import KeyPair
from realgraph.runtime.wire.protocol import Peer

Values = dict[str, dict[int, Tensor]]

_ROUTES: tuple[Route, ...] = ("local", "tcp")
_IDLE_CHANNELS = 4  # kept per peer and route
_MOST_IDLE = 256  # kept of all; each has up to four files open
_PEERS_AT_ONCE = 128  # asked by one gather
_MAX_SOCKETS = 8192  # of ZeroMQ, three a channel: above what gathers may have at once
_GATHER_THREADS = 4
_CLOSE_SECONDS = 60.0


class GatherRequest(Struct, frozen=True):
    """Values to gather: `ids` of `key` from `worker`'s store."""

    worker: int
    key: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class _Manner:
    """The manner of a gather: see `DataPlane.gather_now`."""

    deadline: Deadline
    copy: bool
    route: Route | None = None


class _Asked(NamedTuple):
    """A question whose answer has not been collected."""

    worker: int
    route: Route
    channel: Channel
    wants: Sequence[GatherRequest]


def _forgotten(data: bytes) -> None:
    """Takes what peers deposit where nobody wants it."""


class DataPlane:
    """Made once per worker, closed at its end. `connect` comes before the first gather and before any peer is let in.

    keys: this worker's, as a server and as a client. interface: the address that peers on other hosts reach us by.
    deposits: takes what peers `deposit` here, from any thread; raises msgspec.MsgspecError for what it can't read.
    """

    def __init__(
        self,
        worker: int,
        store: Store,
        keys: KeyPair,
        interface: str,
        host: str | None = None,
        deposits: Callable[[bytes], None] = _forgotten,
    ) -> None:
        self._worker = worker
        self._store = store
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._shares = Shares()
        self._local = LocalServer(store, self._fetched, deposits)
        self._remote = RemoteServer(store, keys, interface, self._context, deposits)
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._quiet = threading.Condition()
        self._running = 0  # gathers
        self._idle: dict[tuple[int, Route], list[Channel]] = {}
        self._returned: deque[tuple[int, LocalChannel]] = deque()  # filled by finalizers, which may not take the lock
        self._closed = False
        self._threads = ThreadPoolExecutor(_GATHER_THREADS, thread_name_prefix="gather")
        host = host_id() if host is None else host
        self.peer = Peer(worker, host, self._local.name, self._remote.address, keys.public)

    def __enter__(self) -> "DataPlane":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, peers: Sequence[Peer]) -> None:
        """The workers of this run, ourselves among them or not: whom we may ask, and who may ask us."""
        self._peers = {peer.worker: peer for peer in peers}
        self._remote.allow([peer.key for peer in peers])

    def join(self, peer: Peer) -> None:
        """A new process stands for a worker: it may ask us from now on, and the one before it may not."""
        self.connect([*(one for one in self._peers.values() if one.worker != peer.worker), peer])
        with self._lock:
            gone = [channel for route in _ROUTES for channel in self._idle.pop((peer.worker, route), [])]
        for channel in gone:
            channel.close()

    async def gather(
        self,
        wants: Sequence[GatherRequest],
        *,
        deadline_seconds: float = 60.0,
        copy: bool = True,
        route: Route | None = None,
    ) -> Values:
        """`gather_now` in a thread, for the control loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads,
            lambda: self.gather_now(wants, deadline_seconds=deadline_seconds, copy=copy, route=route),
        )

    def gather_now(
        self,
        wants: Sequence[GatherRequest],
        *,
        deadline_seconds: float = 60.0,
        copy: bool = True,
        route: Route | None = None,
        share: Share | None = None,
    ) -> Values:
        """The values wanted, by key and id, from all peers at once; safe to call from several threads.

        An id that is wanted of several workers is taken from any of them. Copies are the caller's own. `copy=False`
        gives views where the value lies in shared memory: to be read, never written, and to be let go soon, since the
        owner cannot reuse that memory while one of them lives.
        route: forces one, for tests and benchmarks; also for what lies in our own store.
        share: the readers of the same values; from other hosts these come once to each host.
        Raises AbsentError where a worker holds no such value, PeerLostError, SlowPeerError at the deadline: each a
        TransferError that names the worker.
        """
        values: Values = {want.key: {} for want in wants}
        by_worker: dict[int, list[GatherRequest]] = {}
        for want in wants:
            by_worker.setdefault(want.worker, []).append(want)
        if route is None:
            self._take_own(by_worker.pop(self._worker, []), values, copy)
        manner = _Manner(Deadline(deadline_seconds), copy, route)
        with self._counted():
            if share is not None and route is None:
                self._take_shared(share, by_worker, values, manner)
            self._take(by_worker, values, manner)
        return values

    def deposit(self, worker: int, data: bytes, deadline_seconds: float) -> None:
        """Have another worker take bytes; when this returns it has. Raises TransferError."""
        route, deadline = self._route(worker), Deadline(deadline_seconds)
        with self._counted():
            channel = self._channel(worker, route)
            try:
                channel.deposit(data, deadline)
            except BaseException:
                channel.close()
                raise
            self._keep(worker, route, channel)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A gather, which `close` waits for."""
        with self._quiet:
            self._running += 1
        try:
            yield
        finally:
            with self._quiet:
                self._running -= 1
                self._quiet.notify_all()

    def _take(self, by_worker: Mapping[int, Sequence[GatherRequest]], values: Values, manner: _Manner) -> None:
        """Ask many peers at once, then collect from one after the other: answers wait in the sockets meanwhile."""
        left = iter(by_worker.items())
        while some := list(itertools.islice(left, _PEERS_AT_ONCE)):
            asked: deque[_Asked] = deque()
            with _closing(asked):
                for worker, wants in some:
                    route = manner.route or self._route(worker)
                    asked.append(_Asked(worker, route, self._channel(worker, route), wants))
                    asked[-1].channel.ask(_items(wants), manner.deadline)
                self._collect(asked, values, manner)

    def _collect(self, asked: deque[_Asked], values: Values, manner: _Manner) -> None:
        while asked:
            one = asked[0]
            got = iter(one.channel.collect(manner.deadline, manner.copy))
            asked.popleft()
            if manner.copy or one.route == "tcp":  # else it comes back when the views are gone
                self._keep(one.worker, one.route, one.channel)
            for want in one.wants:
                values[want.key].update(zip(want.ids, got, strict=False))

    def fetchers(self, share: Share | None, owners: Iterable[int]) -> dict[int, int]:
        """The workers of this host that fetch a share from its owners on other hosts, where there are several readers
        here: owner -> worker."""
        here = [reader for reader in share.readers if not self.is_far(reader)] if share is not None else []
        return {owner: fetcher(owner, here) for owner in owners if self.is_far(owner)} if len(here) > 1 else {}

    def _take_shared(
        self, share: Share, by_worker: dict[int, list[GatherRequest]], values: Values, manner: _Manner
    ) -> None:
        """Take what comes once to this host, and leave the rest in `by_worker`."""
        wanted: dict[int, list[int]] = {}
        for owner, worker in self.fetchers(share, sorted(by_worker)).items():
            wanted.setdefault(worker, []).append(owner)
        n_readers = sum(not self.is_far(reader) for reader in share.readers)
        asked: deque[_Asked] = deque()
        with _closing(asked):
            for worker, owners in wanted.items():
                if worker != self._worker:
                    wants = [want for owner in owners for want in by_worker[owner]]
                    channel = self._channel(worker, "local")
                    asked.append(_Asked(worker, "local", channel, wants))
                    assert isinstance(channel, LocalChannel)
                    channel.request(_shared(share, n_readers, owners, by_worker, manner), manner.deadline)
            if own := wanted.get(self._worker):
                got = iter(self._fetched(_shared(share, n_readers, own, by_worker, manner)))
                for want in [want for owner in own for want in by_worker[owner]]:
                    tensors = (entry.tensor.clone() if manner.copy else entry.tensor for entry in got)
                    values[want.key].update(zip(want.ids, tensors, strict=False))
            self._collect(asked, values, manner)
        for owner in itertools.chain.from_iterable(wanted.values()):
            del by_worker[owner]

    def _fetched(self, request: SharedFetch) -> list[StoredValue]:
        """The values of a share, which this worker fetches for its host. Raises TransferError."""
        return self._shares.take(request, lambda: self._fetch(request))

    def _fetch(self, request: SharedFetch) -> list[StoredValue]:
        keys = {item.key for _, items in request.wants for item in items}
        by_worker = {
            worker: [GatherRequest(worker, item.key, item.ids) for item in items] for worker, items in request.wants
        }
        values: Values = {key: {} for key in keys}
        with self._counted():
            self._take(by_worker, values, _Manner(Deadline(request.deadline_seconds), True, "tcp"))
        return self._store.shared_copies(
            [values[item.key][id] for _, items in request.wants for item in items for id in item.ids]
        )

    def close(self) -> None:
        """Stop serving, wait for gathers that still run, and hang up. Views that were lent stay valid."""
        with self._lock:
            self._closed = True
            idle = [channel for channels in self._idle.values() for channel in channels]
            self._idle.clear()
        self._shares.close()
        self._local.close()
        self._remote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._quiet:
            self._quiet.wait_for(lambda: self._running == 0, _CLOSE_SECONDS)
        self._collect_returned()
        for channel in idle:
            channel.close()
        self._context.destroy(linger=0)

    def _take_own(self, wants: Sequence[GatherRequest], values: Values, copy: bool) -> None:
        for want in wants:
            try:
                entries = self._store.entries(want.key, want.ids)
            except MissingValueError as error:
                raise AbsentError(self._worker, error.key, error.id) from None
            for id, entry in zip(want.ids, entries, strict=True):
                values[want.key][id] = entry.tensor.clone() if copy else entry.tensor

    def _peer(self, worker: int) -> Peer:
        peer = self.peer if worker == self._worker else self._peers.get(worker)
        if peer is None:
            known = ", ".join(map(str, sorted(self._peers))) or "none yet"
            raise TransferError(worker, f"worker {worker} is not among the known peers ({known})")
        return peer

    def is_far(self, worker: int) -> bool:
        """A worker of another host."""
        return self._route(worker) == "tcp"

    def _route(self, worker: int) -> Route:
        return "local" if self._peer(worker).host == self.peer.host else "tcp"

    def _channel(self, worker: int, route: Route) -> Channel:
        self._collect_returned()
        with self._lock:
            if self._closed:
                raise TransferError(worker, f"nothing can be had from worker {worker}: this data plane is closed")
            idle = self._idle.setdefault((worker, route), [])
            while idle:
                channel = idle.pop()
                if not channel.stale():
                    return channel
                channel.close()
        peer = self._peer(worker)
        if route == "tcp":
            return RemoteChannel(peer, self._keys, self._context)
        return LocalChannel(peer, lambda channel: self._returned.append((worker, channel)))

    def _keep(self, worker: int, route: Route, channel: Channel) -> None:
        given_up = channel
        with self._lock:
            idle = self._idle.pop((worker, route), [])
            self._idle[worker, route] = idle  # those used longest ago stand first
            if not self._closed and len(idle) < _IDLE_CHANNELS:
                idle.append(channel)
                if sum(map(len, self._idle.values())) <= _MOST_IDLE:
                    return
                given_up = next(some for some in self._idle.values() if some).pop(0)
        given_up.close()

    def _collect_returned(self) -> None:
        with contextlib.suppress(IndexError):  # several threads may empty it at once
            while True:
                worker, channel = self._returned.popleft()
                self._keep(worker, "local", channel)


@contextlib.contextmanager
def _closing(asked: deque[_Asked]) -> Iterator[None]:
    """Give up the answers that are still to come where a gather fails."""
    try:
        yield
    finally:
        for one in asked:
            one.channel.close()


def _items(wants: Iterable[GatherRequest]) -> tuple[Item, ...]:
    return tuple(Item(want.key, want.ids) for want in wants)


def _shared(
    share: Share,
    n_readers: int,
    owners: Iterable[int],
    by_worker: Mapping[int, Sequence[GatherRequest]],
    manner: _Manner,
) -> SharedFetch:
    wants = tuple((owner, _items(by_worker[owner])) for owner in owners)
    return SharedFetch(share.task, n_readers, wants, manner.deadline.left())
