"""Two steps as planned and as they were: the timelines that stand one over the other, on one scale."""

from collections.abc import Iterator, Sequence
from statistics import median

from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.planner.plan.plan import REALLOCATION, reallocation_node
from realgraph.planner.report.schedule import (
    SHOWN_PERIODS,
    Bar,
    Kind,
    Lane,
    Timeline,
    has_starts,
    kind_of,
    started_tasks,
    timeline,
)
from realgraph.report.history import RunHistory, Slice
from realgraph.runtime.job.job import Job
from realgraph.runtime.master.observer import StepRecord

JOINED_SHARE = 0.004  # of the window: slices of one call that lie closer are drawn as one bar


def timelines(history: RunHistory) -> tuple[Timeline | None, Timeline | None]:
    """Planned and measured, each None where there is none: a plan by hand has no starts, and a trace may be rotated."""
    planned, measured = planned_timeline(history.job), measured_timeline(history)
    window = max((one.window_seconds for one in (planned, measured) if one is not None), default=0.0)
    wide = [replace(one, window_seconds=window) if one is not None else None for one in (planned, measured)]
    return wide[0], wide[1]


def planned_timeline(job: Job) -> Timeline | None:
    """Two periods of the plan's steady state."""
    plan = job.plan
    if not has_starts(plan) or plan.period_seconds <= 0:
        return None
    seconds = {reallocation_node(call): taken for call, taken in plan.reallocation_seconds.items()}
    tasks = started_tasks(job.graph, plan, plan.starts, seconds)
    return timeline(tasks, plan.period_seconds, plan.bottleneck, job.cluster.n_devices)


def measured_timeline(history: RunHistory) -> Timeline | None:
    """As long as two steps take, from the beginning of a step in the middle of those that the trace has."""
    covered = _covered(history)
    if not covered:
        return None
    period = median(step.seconds for step in covered)
    first = covered[max(0, len(covered) // 2 - 1)]
    begin = first.time - first.seconds
    window = SHOWN_PERIODS * period
    workers = sorted({one.worker for one in history.slices if one.worker >= 0})
    lanes = tuple(
        _lane(history.job.graph, worker, _inside(history.slices, worker, begin, begin + window), window)
        for worker in workers
    )
    return Timeline(period, window, lanes)


def _covered(history: RunHistory) -> Sequence[StepRecord]:
    """The steps that lie in the trace, those that count where there are some."""
    if not history.slices:
        return ()
    start = min(one.started for one in history.slices)
    end = max(one.ended for one in history.slices)
    inside = [step for step in history.steady or history.steps if step.time - step.seconds >= start - step.seconds / 2]
    return [step for step in inside if step.time <= end + step.seconds / 2]


def _inside(slices: Sequence[Slice], worker: int, begin: float, end: float) -> list[Slice]:
    """The slices of a worker in the window, in seconds from its beginning, cut at its ends."""
    return sorted(
        (
            replace(one, started=max(0.0, one.started - begin), ended=min(end, one.ended) - begin)
            for one in slices
            if one.worker == worker and one.ended > begin and one.started < end
        ),
        key=lambda one: one.started,
    )


def _lane(graph: Graph, worker: int, slices: Sequence[Slice], window: float) -> Lane:
    bars = tuple(_bars(graph, slices, JOINED_SHARE * window))
    busy = _union(slices)
    return Lane((worker,), bars, busy / SHOWN_PERIODS, min(1.0, max(0.0, 1 - busy / window)))


def _bars(graph: Graph, slices: Sequence[Slice], gap: float) -> Iterator[Bar]:
    """One bar for slices of a call that follow each other closely."""
    pending: dict[str, Bar] = {}
    for one in slices:
        last = pending.get(one.call)
        if last is not None and one.started - last.end <= gap and last.step == one.step:
            pending[one.call] = replace(last, end=max(last.end, one.ended))
            continue
        if last is not None:
            yield last
        kind = _kind(graph, one.call)
        pending[one.call] = Bar(one.call, kind, one.step, one.started, one.ended, None)
    yield from pending.values()


def _kind(graph: Graph, call: str) -> Kind:
    if call.startswith(REALLOCATION):
        return "reallocate"
    return kind_of(graph, call) if call in graph.calls else "other"


def _union(slices: Sequence[Slice]) -> float:
    """Seconds in which at least one slice runs; they are ordered by their start."""
    busy = reached = 0.0
    for one in slices:
        busy += max(0.0, one.ended - max(reached, one.started))
        reached = max(reached, one.ended)
    return busy
