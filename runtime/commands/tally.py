"""Reports of a step's calls: metrics merged over workers, when each call ran, samples to show, groups left out."""

from collections.abc import Mapping

from realgraph.runtime.commands.actions import CallSpan
from realgraph.runtime.wire.protocol import Max, Mean, Metric


class StepTally:
    """Sums over the replies that belong to one step."""

    __slots__ = ("_metrics", "_spans", "n_dropped", "n_skipped", "transcripts")

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, list[float] | Max]] = {}
        self._spans: dict[str, list[float]] = {}
        self.transcripts: list[str] = []
        self.n_skipped = self.n_dropped = 0

    def add(self, call: str, metrics: Mapping[str, Metric], started: float, ended: float) -> None:
        """Merge one worker's report of `call`; started and ended in seconds, both 0 where it has none."""
        if metrics:
            sums = self._metrics.setdefault(call, {})
            for name, metric in metrics.items():
                held = sums.get(name)
                if isinstance(metric, Max):
                    sums[name] = metric + held if isinstance(held, Max) else metric
                elif isinstance(held, list):
                    held[0] += metric.total
                    held[1] += metric.weight
                else:
                    sums[name] = [metric.total, metric.weight]
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
    def metrics(self) -> dict[str, dict[str, Metric]]:
        """call -> name -> mean or maximum over all workers."""
        return {
            call: {name: held if isinstance(held, Max) else Mean(*held) for name, held in sums.items()}
            for call, sums in self._metrics.items()
        }

    @property
    def spans(self) -> dict[str, CallSpan]:
        """call -> when its first worker started and its last one ended."""
        return {call: CallSpan(*pair) for call, pair in self._spans.items()}
