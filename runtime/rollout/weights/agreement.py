"""Words between the trainer that broadcasts new weights and the workers of the servers that take them.

They are keys of the store through which all workers of a run have met, of a worker without which there is no run. Every
wait ends with the word, with anybody's failure of that update, with the end of the worker whose word it is, or at a
deadline.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from torch._C._distributed_c10d import PrefixStore, Store

from realgraph.planner.request.engine_support import SGLANG_KIND

_LOOK_SECONDS = (0.0005, 0.05)  # between two looks for a word: the first, and the longest
_FAILED = "failed"


class BroadcastFailed(Exception):
    """A broadcast that somebody has given up; the text says who and why."""


class WorkerGone(BroadcastFailed):
    """The worker whose word was awaited has ended."""


def _gone(worker: int | None) -> WorkerGone:
    return WorkerGone(f"worker {worker}, which has a server, is gone")


class UpdateWords:
    """The words of one generate call. seconds: that one may be waited for. is_gone: true of a worker that has ended,
    without which the run goes on. From any thread."""

    def __init__(self, store: Store, call: str, seconds: float, is_gone: Callable[[int], bool]) -> None:
        self._store, self.seconds, self._is_gone = PrefixStore(f"{SGLANG_KIND}/{call}", store), seconds, is_gone

    def post(self, update: int, word: str, value: str = "") -> None:
        """Say a word about an update, once."""
        self._store.set(f"{update}/{word}", value)

    def hear(self, update: int, word: str, worker: int | None = None, *, whatever_fails: bool = False) -> str:
        """Wait for a word. worker: whose it is, where the run can go on without that one. whatever_fails: also of an
        update that somebody has given up. Raises BroadcastFailed, WorkerGone."""
        key, began, (pause, longest) = f"{update}/{word}", time.monotonic(), _LOOK_SECONDS
        while True:
            gone = worker is not None and self._is_gone(worker)  # looked at first: its last words are there by then
            if self._store.check([key]):
                return self._store.get(key).decode()
            if not whatever_fails and (why := self.failure(update)) is not None:
                raise BroadcastFailed(why)
            if gone:
                raise _gone(worker)
            if time.monotonic() - began > self.seconds:
                raise BroadcastFailed(f"nobody has said {word!r} of update {update} in {self.seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def hear_those(self, update: int, words: Mapping[int, str]) -> list[str]:
        """The word of each of these workers, but of those that are gone and have not said it: alike for all who ask.
        Raises BroadcastFailed."""
        heard = []
        for worker, word in words.items():
            with contextlib.suppress(WorkerGone):
                heard.append(self.hear(update, word, worker))
        return heard

    def check_there(self, workers: Iterable[int]) -> None:
        """Raise WorkerGone for the first of these workers that is gone, if any."""
        for worker in filter(self._is_gone, workers):
            raise _gone(worker)

    def said(self, update: int, word: str) -> str | None:
        """A word that somebody has told; None where nobody has."""
        key = f"{update}/{word}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def fail(self, update: int, why: str) -> None:
        """Give an update by broadcast up, for all."""
        if self.failure(update) is None:
            self.post(update, _FAILED, why)

    def failure(self, update: int) -> str | None:
        """Reason why somebody has given it up; None where nobody has."""
        return self.said(update, _FAILED)
