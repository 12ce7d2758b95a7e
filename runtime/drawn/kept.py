"""Tokens that other engines have drawn, kept here for when those are lost or give samples away."""

import threading
from collections.abc import Iterable

from realgraph.runtime.drawn.tokens import DrawnTokens, decode_news


class KeptTokens:
    """They by sample, from their first new token on. Used from any thread."""

    def __init__(self) -> None:
        self._kept: dict[int, DrawnTokens] = {}
        self._senders: dict[int, int] = {}  # of the tokens of a sample
        self._lock = threading.Lock()

    def take(self, data: bytes) -> None:
        """A message of another engine. Raises msgspec.MsgspecError for one that can't be read."""
        worker, drawn, over = decode_news(data)
        with self._lock:
            for one in drawn:
                known = self._kept.get(one.sample)
                if known is not None and one.start:
                    self._kept[one.sample] = known.joined(one)
                elif not one.start:
                    self._kept[one.sample] = one
                    self._senders[one.sample] = worker
            for sample in over:
                self._pop(sample)

    def _pop(self, sample: int) -> DrawnTokens | None:
        self._senders.pop(sample, None)
        return self._kept.pop(sample, None)

    def forget(self, worker: int) -> None:
        """A worker is gone, and what was needed of its tokens was taken."""
        with self._lock:
            for sample in [sample for sample, sender in self._senders.items() if sender == worker]:
                self._pop(sample)

    def pop(self, samples: Iterable[int]) -> dict[int, DrawnTokens]:
        """Give what is known of samples, which from now on are this engine's own affair."""
        with self._lock:
            found = {sample: self._pop(sample) for sample in samples}
        return {sample: drawn for sample, drawn in found.items() if drawn is not None}

    def __len__(self) -> int:
        return len(self._kept)
