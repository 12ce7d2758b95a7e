"""The means by which workers form their process groups: a store that one of them opens, gloo with one port and one
thread a process, and what tells which worker is missing when a collective fails.

On one host the store is a file that no other user can read; over hosts torch's own, on the interface of the run alone.
"""

import os
import platform
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import msgspec
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import Backend, ProcessGroupGloo

from realgraph.runtime.wire.curve import is_local

LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"
GLOO = "realgraph_gloo"
SIGN_SECONDS = 4.0  # at most, of a worker whose collective has failed, for signs of the others of its group
_PAUSE_SECONDS = 0.05  # between two looks for them
_ANSWER_SECONDS = 0.5  # of the store for the last look
# those that no worker ends before all have come: who gives no sign where they miss their deadline is behind
_OF_ALL = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"})


class CollectiveError(RuntimeError):
    """A collective failed or missed its deadline: a rank of the group is gone or far behind."""


_TCP = "tcp://"


class Rendezvous(Protocol):
    """One worker's part of the meeting of all; `close` it once the groups have ended."""

    @property
    def address(self) -> str:
        """The address that `reach_store` takes."""
        ...

    def close(self) -> None:
        """The address means nothing any more."""
        ...


def open_rendezvous(interface: str) -> Rendezvous:
    """The meeting of the workers that listen on `interface`: on this host alone, or over the network."""
    return FileRendezvous() if is_local(interface) else NetworkRendezvous(interface)


class NetworkRendezvous:
    """torch's store, listening on one address of this host. It does not ask who connects."""

    def __init__(self, interface: str) -> None:
        with socket.create_server((interface, 0)) as listener:
            port = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                interface, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.address = f"{_TCP}{interface}:{port}"

    def close(self) -> None:
        """The store ends with its last user."""
        self._store = None


class FileRendezvous:
    """A worker's file through which those of one host meet: nobody but this user can open it.

    On Linux it is anonymous memory, reached through /proc, so that nothing is left of it after any end; elsewhere a
    file in a folder of its own. `close` it once the groups have ended.
    """

    def __init__(self) -> None:
        self._folder = ""
        if sys.platform == "linux":
            self._file = os.memfd_create("realgraph-rendezvous", os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)
            self.address = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._folder = tempfile.mkdtemp(prefix="realgraph-")  # mode 0700
            self.address = os.path.join(self._folder, "rendezvous")
            self._file = os.open(self.address, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def close(self) -> None:
        """The file is gone; the address means nothing any more."""
        os.close(self._file)
        if self._folder:
            shutil.rmtree(self._folder)


def reach_store(address: str, n_workers: int, timeout_seconds: float) -> Store:
    """The store of a Rendezvous. Raises CollectiveError where there is none, or it can't be opened."""
    if address.startswith(_TCP):
        return _reach_over_network(address, timedelta(seconds=timeout_seconds))
    if not os.path.exists(address):  # torch would make a file of its own
        raise CollectiveError(f"the rendezvous {address} is gone, and so is the worker that opened it")
    try:
        store = FileStore(address, n_workers)
    except RuntimeError as error:
        raise CollectiveError(f"the rendezvous {address} can't be opened: {error}") from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _reach_over_network(address: str, timeout: timedelta) -> Store:
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise CollectiveError(f"the rendezvous {address} can't be reached: {error}") from error


def register_gloo(interface: str) -> str:
    """The name of a backend that is gloo with one device for all groups of this process.

    torch's own "gloo" opens a device for every group: a port, and a thread that wakes a hundred times a second.
    interface: this host's address that the others reach; of this host alone, nobody outside may connect, whatever the
    host's name resolves to. Raises RuntimeError where there is no such network.
    """
    gloo: Any = ProcessGroupGloo
    local = is_local(interface)
    device = gloo.create_device(interface=LOOPBACK) if local else gloo.create_device(hostname=interface)

    def open_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        return ProcessGroupGloo(store, rank, size, options)

    Backend.register_backend(GLOO, open_group, devices=["cpu"])
    return GLOO


class Attendance:
    """The processes of the workers that form groups, seen from one of them: who has come, and who of its host has
    ended. workers: by their rank in the default group; rank: this one's; near: the ranks on this host. opener: the
    worker whose store it is."""

    def __init__(self, store: Store, workers: Sequence[int], rank: int, near: Collection[int], opener: int) -> None:
        self.store, self.workers, self.rank, self.opener = store, workers, rank, opener
        self._near = [peer for peer in near if peer != rank]
        self._handles: dict[int, int] = {}  # by rank
        self._gone: set[int] = set()  # before they could be watched

    def named(self, ranks: Sequence[int]) -> str:
        """The workers of these ranks, for messages."""
        return _named([self.workers[rank] for rank in ranks])

    def arrive(self, ranks: Sequence[int]) -> None:
        """Leave word that this worker has come to make a group."""
        self.store.set(_mark(ranks, self.rank), _process())

    def unformed(self, ranks: Sequence[int], error: Exception) -> CollectiveError:
        """The error of a group that was not made, with the workers that never came."""
        missing = [self.workers[rank] for rank in ranks if not self.store.check([_mark(ranks, rank)])]
        who = f"; never came: worker {', '.join(map(str, missing))}" if missing else ""
        return CollectiveError(f"{self.named(ranks)} could not form their group{who}: {error}")

    def watch(self) -> None:
        """From now on the ends of this host's workers are seen, all of which have arrived in the default group. On a
        system without process descriptors none is."""
        space = _process().partition(" ")[2]
        everybody = range(len(self.workers))
        for peer in self._near if hasattr(os, "pidfd_open") else ():
            pid, _, its_space = self.store.get(_mark(everybody, peer)).decode().partition(" ")
            if its_space != space:  # its number means another process here
                continue
            try:
                self._handles[peer] = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self._gone.add(peer)
            except OSError:  # a sandbox that does not allow it
                return

    def ended(self, ranks: Iterable[int]) -> set[int]:
        """Those of the ranks whose processes are known to have ended."""
        poll, peers = select.poll(), {}
        for peer, handle in self._handles.items():
            poll.register(handle, select.POLLIN)
            peers[handle] = peer
        seen = {peers[handle] for handle, event in poll.poll(0) if event & select.POLLIN}
        return (seen | self._gone) & set(ranks)

    def watched(self, ranks: Iterable[int]) -> bool:
        """True where the end of any of these ranks would be seen."""
        return set(ranks) <= self._handles.keys() | self._gone | {self.rank}

    def close(self) -> None:
        """Watch no more."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)


class _Sign(msgspec.Struct, frozen=True):
    """The word of a worker whose collective has failed, for the others of its group."""

    late: bool  # it has waited until the deadline
    ended: tuple[int, ...] = ()  # ranks whose ends it has seen


@dataclass
class _Signs:
    """Those of a group, as one worker hears them: one thread replaces what another reads."""

    of: dict[int, _Sign] = field(default_factory=dict)  # by rank, this worker's own among them
    heard: bool = False  # to the end of the roll call
    lost: str = ""  # how the store has failed

    def ended(self) -> set[int]:
        """The ranks that others have seen end."""
        return {rank for sign in self.of.values() for rank in sign.ended}


class RollCall:
    """Finds, once a collective over a group has failed, which of its workers is missing. Nothing is exchanged before.

    The ends of processes are seen by the workers of their host. Those of other hosts, and who lives but does not come,
    are told from signs that each worker leaves in the store when its collective fails, and for which it waits no longer
    than SIGN_SECONDS or the group's own deadline.
    """

    def __init__(self, attendance: Attendance, ranks: Sequence[int], purpose: str, seconds: float) -> None:
        """ranks: of the group in the default one; seconds: the deadline of its collectives."""
        self._attendance, self._ranks, self._seconds = attendance, ranks, seconds
        self._key = f"realgraph/signs/{purpose}/{key_of(ranks)}"

    def missing(self, what: str, waited: float) -> str:
        """The workers that are missing from a collective which has failed after `waited` seconds, and how; where none
        is known to be, what is known of them all. Never raises, and returns within 5 s."""
        signs, late = _Signs(), waited >= self._seconds
        end = time.monotonic() + min(SIGN_SECONDS, self._seconds)
        # by a thread of its own: a store that a stopped worker serves answers nobody, and knows no deadline
        asking = threading.Thread(target=self._ask, args=(signs, late, end), daemon=True)
        try:
            asking.start()
        except RuntimeError as error:
            signs.lost = f"was not asked: {error}"
        while time.monotonic() < end and not self._ended(signs) and len(signs.of) < len(self._ranks):
            time.sleep(_PAUSE_SECONDS)
        if asking.ident is not None:
            asking.join(_ANSWER_SECONDS)
        if ended := self._ended(signs):
            return f"{self._listed(ended)} {'has' if len(ended) == 1 else 'have'} ended"
        silent = set(self._ranks) - signs.of.keys()
        parts = [self._living()]
        if not signs.heard:
            store = f"the store of worker {self._attendance.opener}"
            parts.append(f"what the others saw is not known: {store} {signs.lost or 'does not answer'}")
        elif silent and what in _OF_ALL and any(sign.late for sign in signs.of.values()):
            parts.append(f"{self._listed(silent)} gave no sign when the others met the deadline of {self._seconds:g} s")
        return ", ".join(part for part in parts if part)

    def _ended(self, signs: _Signs) -> set[int]:
        return self._attendance.ended(self._ranks) | signs.ended()

    def _ask(self, signs: _Signs, late: bool, end: float) -> None:
        """Leave this worker's sign, and look for those of the others until all have left one, or one has ended."""
        store, own = self._attendance.store, self._attendance.rank
        file = getattr(store, "path", "")  # of a FileStore
        try:
            while not file or os.path.exists(file):  # torch would wait for one that is gone
                sign = _Sign(late, tuple(sorted(self._attendance.ended(self._ranks))))
                if signs.of.get(own) != sign:
                    store.set(f"{self._key}/{own}", msgspec.json.encode(sign).decode())
                    signs.of = {**signs.of, own: sign}
                for peer in self._ranks:
                    if peer != own and store.check([f"{self._key}/{peer}"]):
                        word = msgspec.json.decode(store.get(f"{self._key}/{peer}"), type=_Sign)
                        signs.of = {**signs.of, peer: word}
                if sign.ended or signs.ended() or len(signs.of) == len(self._ranks) or time.monotonic() >= end:
                    signs.heard = True
                    return
                time.sleep(_PAUSE_SECONDS)
            signs.lost = "is gone"
        except (RuntimeError, msgspec.MsgspecError) as error:
            signs.lost = f"has failed: {error}"

    def _living(self) -> str:
        """All processes whose ends this worker would have seen."""
        if self._attendance.watched(self._ranks):
            return "the processes of all of them live"
        seen = [rank for rank in self._ranks if self._attendance.watched([rank])]
        if len(seen) == 1:
            return ""
        others = self._listed(set(self._ranks).difference(seen))
        return f"the processes of {self._listed(seen)} live, and {others} can't be seen from their host"

    def _listed(self, ranks: Iterable[int]) -> str:
        workers = [str(self._attendance.workers[rank]) for rank in sorted(ranks)]
        if len(workers) == 1:
            return f"worker {workers[0]}"
        return f"workers {', '.join(workers[:-1])} and {workers[-1]}"


def _process() -> str:
    """This process: its number, and the space in which that counts."""
    space = os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0
    return f"{os.getpid()} {space}"


def key_of(ranks: Sequence[int]) -> str:
    """A group's in the store."""
    return "-".join(map(str, ranks))


def _mark(ranks: Sequence[int], rank: int) -> str:
    return f"realgraph/{key_of(ranks)}/{rank}"


def _named(workers: Sequence[int]) -> str:
    if (len(workers) > 2 and list(workers) == list(range(workers[0], workers[-1] + 1))) or len(workers) == 2:
        between = "to" if workers[-1] - workers[0] == len(workers) - 1 else "and"
        return f"workers {workers[0]} {between} {workers[-1]}"
    return f"workers {', '.join(map(str, workers))}"
