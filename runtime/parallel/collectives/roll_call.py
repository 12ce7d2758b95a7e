"""Attendance of the workers of a group: who has come, who has ended, and who is missing when a collective fails."""

import os
import select
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from torch._C._distributed_c10d import Store

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError

SIGN_SECONDS = 4.0  # at most, of a worker whose collective has failed, for signs of the others of its group
_PAUSE_SECONDS = 0.05  # between two looks for them
_ANSWER_SECONDS = 0.5  # of the store for the last look
# those that no worker ends before all have come: who gives no sign where they miss their deadline is behind
_OF_ALL = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"})


class Attendance:
    """The processes of the workers that form groups, seen from one of them: who has come, and who of its host has
    ended. workers: by their rank in the default group; rank: this one's; near: the ranks on this host. opener: the
    worker whose store it is."""

    def __init__(self, store: Store, workers: Sequence[int], rank: int, near: Collection[int], opener: int) -> None:
        self.store, self.workers, self.rank, self.opener = store, workers, rank, opener
        self._near = [peer for peer in near if peer != rank]
        self._handles: dict[int, int] = {}  # by rank
        self._gone: set[int] = set()  # before they could be watched

    def named(self, ranks: Iterable[int]) -> str:
        """The workers of these ranks, for messages: `worker 3`, `workers 4 and 6`, `workers 0 to 3`."""
        named = sorted(self.workers[rank] for rank in ranks)
        if len(named) == 1:
            return f"worker {named[0]}"
        if len(named) > 2 and named[-1] - named[0] == len(named) - 1:
            return f"workers {named[0]} to {named[-1]}"
        return f"workers {', '.join(map(str, named[:-1]))} and {named[-1]}"

    def arrive(self, ranks: Sequence[int]) -> None:
        """Leave word that this worker has come to make a group."""
        self.store.set(_mark(ranks, self.rank), _process())

    def unformed(self, ranks: Sequence[int], error: Exception) -> CollectiveError:
        """The error of a group that was not made, with the workers that never came."""
        missing = [rank for rank in ranks if not self.store.check([_mark(ranks, rank)])]
        who = f"; never came: {self.named(missing)}" if missing else ""
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
            return f"{self._attendance.named(ended)} {'has' if len(ended) == 1 else 'have'} ended"
        silent = set(self._ranks) - signs.of.keys()
        parts = [self._living()]
        if not signs.heard:
            store = f"the store of worker {self._attendance.opener}"
            parts.append(f"what the others saw is not known: {store} {signs.lost or 'does not answer'}")
        elif silent and what in _OF_ALL and any(sign.late for sign in signs.of.values()):
            they = self._attendance.named(silent)
            parts.append(f"{they} gave no sign when the others met the deadline of {self._seconds:g} s")
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
        others = self._attendance.named(set(self._ranks).difference(seen))
        return f"the processes of {self._attendance.named(seen)} live, and {others} can't be seen from their host"


def _process() -> str:
    """This process: its number, and the space in which that counts."""
    space = os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0
    return f"{os.getpid()} {space}"


def key_of(ranks: Sequence[int]) -> str:
    """A group's in the store."""
    return "-".join(map(str, ranks))


def _mark(ranks: Sequence[int], rank: int) -> str:
    return f"realgraph/{key_of(ranks)}/{rank}"
