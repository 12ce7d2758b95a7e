"""An observer of a rehearsed run: the metrics of each step, and the order in which calls begin."""

from realgraph.runtime.master.observer import RunRecord, Span, StepRecord


class StepsSeen:
    """Keeps what a rehearsal compares."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []  # of each step
        self._began: dict[int, dict[str, float]] = {}  # step -> call -> when its first worker began, Unix seconds

    def observe(self, record: RunRecord) -> None:
        """Keep a step's metrics, and when its calls began."""
        match record:
            case StepRecord():
                self.metrics.append(record.metrics)
            case Span(call=call, step=step, started=started) if step >= 0:
                began = self._began.setdefault(step, {})
                began[call] = min(started, began.get(call, started))
            case _:
                pass

    def close(self) -> None:
        """Nothing is open."""

    @property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The calls of each step as they began."""
        return tuple(tuple(sorted(began, key=began.__getitem__)) for _, began in sorted(self._began.items()))
