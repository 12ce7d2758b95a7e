"""What a step's calls report: metrics merged over workers, when each call ran, samples to show, groups left out."""

from collections.abc import Mapping

from realgraph.runtime.actions import Span
from realgraph.runtime.protocol import Mean


class Tally:
    """Sums over the replies that belong to one step."""

    __slots__ = ("_metrics", "_spans", "n_dropped", "n_skipped", "transcripts")

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, list[float]]] = {}
        self._spans: dict[str, list[float]] = {}
        self.transcripts: list[str] = []
        self.n_skipped = self.n_dropped = 0

    def add(self, call: str, metrics: Mapping[str, Mean], started: float, ended: float) -> None:
        """Merge one worker's report of `call`; started and ended in seconds, both 0 where it has none."""
        if metrics:
            sums = self._metrics.setdefault(call, {})
            for name, mean in metrics.items():
                pair = sums.get(name)
                if pair is None:
                    sums[name] = [mean.total, mean.weight]
                else:
                    pair[0] += mean.total
                    pair[1] += mean.weight
        if ended > 0:
            span = self._spans.get(call)
            if span is None:
                self._spans[call] = [started, ended]
            else:
                if started < span[0]:
                    span[0] = started
                if ended > span[1]:
                    span[1] = ended

    @property
    def metrics(self) -> dict[str, dict[str, Mean]]:
        """call -> name -> mean over all workers."""
        return {call: {name: Mean(*pair) for name, pair in sums.items()} for call, sums in self._metrics.items()}

    @property
    def spans(self) -> dict[str, Span]:
        """call -> when its first worker started and its last one ended."""
        return {call: Span(*pair) for call, pair in self._spans.items()}
