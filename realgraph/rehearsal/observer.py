"""An observer of a rehearsed run: the metrics of each step, the order of calls, and the bytes that workers count."""

from collections import defaultdict
from collections.abc import Container
from itertools import groupby

from realgraph.runtime.master.observer import RunRecord, Span, StepRecord
from realgraph.runtime.wire.metrics import ArrivedBytes, ResidentBytes


class StepsSeen:
    """Keeps what a rehearsal compares.

    arrived: of all workers, by call, or by the name of a reallocation. times: of each, on the worker that ran it most.
    resident: by call, on the fullest worker.
    """

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []  # of each step
        self.arrived: dict[str, ArrivedBytes] = {}
        self.resident: dict[str, ResidentBytes] = {}
        self._began: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)  # worker -> when calls began
        self._first: dict[str, float] = {}  # when the calls of the first step began, Unix seconds

    def observe(self, record: RunRecord) -> None:
        """Keep a step's metrics, when its calls began, and their bytes."""
        match record:
            case StepRecord():
                self.metrics.append(record.metrics)
            case Span(call=call, worker=worker) if record.step >= 0:
                self._began[worker].append((record.started, call))
                if not record.step:
                    self._first[call] = min(record.started, self._first.get(call, record.started))
                self.arrived[call] = self.arrived.get(call, ArrivedBytes()) + record.arrived
                if record.resident is not None:
                    self.resident[call] = _fuller(self.resident.get(call, ResidentBytes()), record.resident)
            case _:
                pass

    def close(self) -> None:
        """Nothing is open."""

    @property
    def times(self) -> dict[str, int]:
        """See above."""
        names = {call for began in self._began.values() for _, call in began}
        return {name: max(sum(name == call for _, call in b) for b in self._began.values()) for name in names}

    @property
    def order(self) -> tuple[str, ...]:
        """The calls of the first step as they began."""
        return tuple(sorted(self._first, key=self._first.__getitem__))

    def order_on(self, worker: int, calls: Container[str]) -> tuple[str, ...]:
        """Those of `calls` that one worker ran, as they began; reports of one that follow each other are one."""
        began = (call for _, call in sorted(self._began.get(worker, ())) if call in calls)
        return tuple(call for call, _ in groupby(began))


def _fuller(one: ResidentBytes, other: ResidentBytes) -> ResidentBytes:
    return ResidentBytes(*(max(getattr(one, term), getattr(other, term)) for term in ResidentBytes.__struct_fields__))
