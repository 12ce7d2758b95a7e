"""Reports of a step's calls: metrics merged over workers, when each call ran, samples to show, groups left out."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from realgraph.runtime.commands.actions import CallSpan
from realgraph.runtime.wire.metrics import Max, Mean, Metric


class TallyImage(Struct, frozen=True):
    """A tally as plain data, without the samples to show."""

    metrics: dict[str, dict[str, Metric]]
    spans: dict[str, tuple[float, float]]
    n_skipped: int
    n_dropped: int
    n_surplus: int


class StepTally:
    """Sums over the replies that belong to one step."""

    __slots__ = ("_metrics", "_spans", "n_dropped", "n_skipped", "n_surplus", "transcripts")

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, list[float] | Max]] = {}
        self._spans: dict[str, list[float]] = {}
        self.transcripts: list[str] = []
        self.n_skipped = self.n_dropped = self.n_surplus = 0

    def add(self, call: str, metrics: Mapping[str, Metric], started: float, ended: float) -> None:
        """Merge one worker's report of `call`; started and ended in seconds, both 0 where it has none."""
        if metrics:
            sums = self._metrics.setdefault(call, {})
            for name, metric in metrics.items():
                known = sums.get(name)
                if type(metric) is Mean:  # no isinstance: every report of every worker comes here
                    if type(known) is list:
                        known[0] += metric.total
                        known[1] += metric.weight
                    else:
                        sums[name] = [metric.total, metric.weight]
                elif isinstance(metric, Max):
                    sums[name] = metric + known if isinstance(known, Max) else metric
        if ended > 0:
            span = self._spans.get(call)
            if span is None:
                self._spans[call] = [started, ended]
            else:
                if started < span[0]:
                    span[0] = started
                if ended > span[1]:
                    span[1] = ended

    def add_groups(self, groups: Iterable[Mapping[str, Mapping[str, Metric]]]) -> None:
        """Merge what was measured of groups, each by call."""
        for metrics in groups:
            for call, values in metrics.items():
                self.add(call, values, 0.0, 0.0)

    def absorb(self, other: "StepTally") -> None:
        """Add all of another one."""
        spans = other._spans
        for call in {*other._metrics, *spans}:
            self.add(call, other.metrics.get(call, {}), *spans.get(call, (0.0, 0.0)))
        self.n_skipped, self.n_dropped = self.n_skipped + other.n_skipped, self.n_dropped + other.n_dropped
        self.n_surplus += other.n_surplus
        self.transcripts += other.transcripts

    @property
    def metrics(self) -> dict[str, dict[str, Metric]]:
        """call -> name -> mean or maximum over all workers."""
        return {
            call: {name: known if isinstance(known, Max) else Mean(*known) for name, known in sums.items()}
            for call, sums in self._metrics.items()
        }

    @property
    def spans(self) -> dict[str, CallSpan]:
        """call -> when its first worker started and its last one ended."""
        return {call: CallSpan(*pair) for call, pair in self._spans.items()}

    @property
    def image(self) -> TallyImage:
        """All that it has but the samples to show."""
        spans = {call: (started, ended) for call, (started, ended) in self._spans.items()}
        return TallyImage(self.metrics, spans, self.n_skipped, self.n_dropped, self.n_surplus)

    @staticmethod
    def restored(image: TallyImage) -> "StepTally":
        """The tally of an image."""
        tally = StepTally()
        for call, metrics in image.metrics.items():
            tally.add(call, metrics, 0.0, 0.0)
        tally._spans = {call: list(span) for call, span in image.spans.items()}
        tally.n_skipped, tally.n_dropped, tally.n_surplus = image.n_skipped, image.n_dropped, image.n_surplus
        return tally


class TallyNumbers:
    """Numbers for the tallies that the parts of a Scheduler share, in the order in which they are met."""

    def __init__(self) -> None:
        self._tallies: list[StepTally] = []

    def of(self, tally: StepTally) -> int:
        """Its number."""
        for number, known in enumerate(self._tallies):
            if known is tally:
                return number
        self._tallies.append(tally)
        return len(self._tallies) - 1

    @property
    def images(self) -> tuple[TallyImage, ...]:
        """All of them, in order of number."""
        return tuple([tally.image for tally in self._tallies])
