"""Tells other engines what this one has drawn, so that they can go on from it: one of them keeps the tokens of a group.

New tokens are collected and sent every KEEP_SECONDS, by a thread of its own, so that generation never waits for a peer.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realgraph.runtime.drawn.kept import KeptTokens
from realgraph.runtime.drawn.tokens import DrawnTokens, encode_news
from realgraph.runtime.wire.protocol import NOBODY

log = logging.getLogger(__name__)

KEEP_SECONDS = 1.0  # between two messages to a peer: what is drawn meanwhile is lost with this engine
GIVE_SECONDS = 10.0  # for a peer to take a message

Collected = Callable[[Mapping[int, int]], Sequence[DrawnTokens]]  # samples, and how many tokens of each are known


@dataclass
class _SharedGroup:
    """A group of this engine. ended: its samples of which nothing more is drawn, whole."""

    keeper: int
    sent: dict[int, int]  # tokens of each sample that has not ended
    ended: dict[int, DrawnTokens] = field(default_factory=dict)


class TokenSharing:
    """One worker's. deposit: gives a peer a message; returns why that has failed, '' where it has not. collect: has the
    thread that generation belongs to call `share` soon. kept: what peers have told this worker.
    """

    def __init__(
        self,
        worker: int,
        kept: KeptTokens,
        deposit: Callable[[int, bytes], str],
        collect: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker, self.kept, self._deposit, self._collect = worker, kept, deposit, collect
        self._lock = threading.Lock()  # holds all below
        self._groups: dict[int, _SharedGroup] = {}
        self._group_of: dict[int, int] = {}
        self._due: dict[int, list[DrawnTokens]] = {}  # by keeper
        self._over: dict[int, list[int]] = {}  # by keeper
        self._shared, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # --- what happens to groups ---------------------------------------------------------------------------------------

    def begin(self, group: int, samples: Iterable[int], keeper: int) -> None:
        """A group's samples are drawn here from now on. keeper: the worker that keeps their tokens, NOBODY for none."""
        with self._lock:
            self._groups[group] = _SharedGroup(keeper, dict.fromkeys(samples, 0))
            self._group_of.update(dict.fromkeys(self._groups[group].sent, group))
            self._begin_to_share(keeper)

    def _begin_to_share(self, keeper: int) -> None:
        """Start the thread once there is a keeper."""
        if self._thread is None and keeper != NOBODY and not self._stop.is_set():
            self._thread = threading.Thread(target=self._serve, name="drawn", daemon=True)
            self._thread.start()

    def end(self, drawn: DrawnTokens) -> None:
        """Nothing more is drawn of a sample, of which this is all."""
        with self._lock:
            number = self._group_of.get(drawn.sample)
            if number is None or drawn.sample not in self._groups[number].sent:
                return
            group = self._groups[number]
            n_sent = group.sent.pop(drawn.sample)
            group.ended[drawn.sample] = drawn
            if group.keeper != NOBODY:
                self._due.setdefault(group.keeper, []).append(drawn.after(n_sent))

    def over(self, groups: Iterable[int]) -> None:
        """These are trained, or given up: nobody needs their tokens any more."""
        with self._lock:
            for number in groups:
                group = self._groups.pop(number, None)
                if group is None:
                    continue
                samples = [*group.sent, *group.ended]
                for sample in samples:
                    del self._group_of[sample]
                if group.keeper != NOBODY:
                    self._over.setdefault(group.keeper, []).extend(samples)

    def keep(self, number: int, keeper: int) -> bool:
        """The tokens of a group are kept by another worker from now on, which is told all of them. False where the
        group is not known here."""
        with self._lock:
            if (group := self._groups.get(number)) is None:
                return False
            group.keeper, group.sent = keeper, dict.fromkeys(group.sent, 0)
            self._begin_to_share(keeper)
            if keeper != NOBODY:
                self._due.setdefault(keeper, []).extend(group.ended.values())
            return True

    def share(self, drawn: Collected) -> None:
        """Collect what was drawn since the last time; it is sent at once."""
        with self._lock:
            kept = [group for group in self._groups.values() if group.keeper != NOBODY]
            since = {sample: n for group in kept for sample, n in group.sent.items()}
        found = drawn(since)  # which may wait for a decode step
        with self._lock:
            for one in found:
                group = self._groups.get(self._group_of.get(one.sample, -1))
                if group is None or group.keeper == NOBODY or group.sent.get(one.sample) != one.start:
                    continue  # it is over, or another worker keeps it from now on
                group.sent[one.sample] = one.start + one.n
                self._due.setdefault(group.keeper, []).append(one)
        self._shared.set()

    def close(self, timeout: float) -> None:
        """End the thread."""
        self._stop.set()
        self._shared.set()
        if self._thread is not None:
            self._thread.join(timeout)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stop.wait(KEEP_SECONDS):
            self._shared.clear()
            self._collect()
            self._shared.wait(KEEP_SECONDS)  # a worker that is busy otherwise collects later
            self.send()

    def send(self) -> None:
        """Send what is due. A peer that does not take it keeps nothing of the groups that it was to keep: the run goes
        on, and they are drawn again where this engine is lost, too."""
        with self._lock:
            due, over = self._due, self._over
            self._due, self._over = {}, {}
        for keeper in sorted({*due, *over}):
            data = encode_news(self._worker, due.get(keeper, ()), over.get(keeper, ()))
            if problem := self._deposit(keeper, data):
                log.warning("worker %d no longer keeps the tokens of groups that are made here: %s", keeper, problem)
                with self._lock:
                    for group in self._groups.values():
                        group.keeper = NOBODY if group.keeper == keeper else group.keeper
