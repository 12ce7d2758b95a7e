"""Values of other hosts that several workers of this one gather for the same task: they come once, to one of them,
which shows them to the others. Knows no socket.
"""

import threading
import zlib
from collections.abc import Callable, Sequence

from msgspec import Struct

from realgraph.runtime.store.bundle import Deadline, SharedFetch, TransferError
from realgraph.runtime.store.store import StoredValue


class Share(Struct, frozen=True):
    """A share that each of `readers`, of whatever host, gathers once for `task`: all of them want the same of it."""

    task: int
    readers: tuple[int, ...]


def fetcher(owner: int, readers: Sequence[int]) -> int:
    """The one of the readers on a host that fetches what a worker of another host holds; owners spread over them."""
    return sorted(readers)[zlib.crc32(b"%d" % owner) % len(readers)]


class _Fetched:
    """One task's values: on their way until `done`, then here, or a failure."""

    def __init__(self, n_readers: int) -> None:
        self.done = threading.Event()
        self.n_left = n_readers  # that have not asked for them
        self.entries: list[StoredValue] = []
        self.error: TransferError | None = None


class Shares:
    """The values that this worker fetches for its host, each kept until its last reader has asked for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetched: dict[int, _Fetched] = {}
        self._closed = False

    def take(self, request: SharedFetch, fetch: Callable[[], list[StoredValue]]) -> list[StoredValue]:
        """The values of a request, in its order, for one of its readers: the first one's call fetches, others wait.

        Raises the TransferError that fetching has ended with, for every reader; SlowPeerError at the deadline.
        """
        owner = request.wants[0][0]
        with self._lock:
            if self._closed:
                raise TransferError(owner, f"nothing can be had from worker {owner}: this data plane is closed")
            first = request.task not in self._fetched
            found = self._fetched.setdefault(request.task, _Fetched(request.n_readers))
            found.n_left -= 1
            if not found.n_left:
                del self._fetched[request.task]
        if first:
            self._bring(found, owner, fetch)
        deadline = Deadline(request.deadline_seconds)
        if not found.done.wait(deadline.left()):
            raise deadline.slow(owner, "send its part of a share")
        if found.error is not None:
            raise found.error
        return found.entries

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._lock:
            self._closed = True
            fetched = list(self._fetched.values())
        for found in fetched:
            found.error = found.error or TransferError(-1, "a share was not fetched to its end: the worker ends")
            found.done.set()

    def _bring(self, found: _Fetched, owner: int, fetch: Callable[[], list[StoredValue]]) -> None:
        try:
            found.entries = fetch()
        except TransferError as error:
            found.error = error
        except BaseException:
            found.error = TransferError(owner, f"the share of worker {owner} could not be fetched")
            raise
        finally:
            found.done.set()
