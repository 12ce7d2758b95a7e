"""costs.json of a run: what each of its calls really took, for the next plan. Watches the run; measures nothing itself.

The first steps are left out: caches, allocators and worker processes warm up in them. Calls are compared with what the
planner's formulas say of the lengths that the run really had, so that a wrong guess of lengths is no error of costs.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.graph import Graph
from realgraph.planner.costs.calibrate.calibrate import merge, phase_factors
from realgraph.planner.costs.lengths import quantiles
from realgraph.planner.options.calls import phase_of, setting_of, setting_seconds
from realgraph.planner.options.holdings import candidate_of
from realgraph.planner.options.pricing import MEASURED_SETTINGS
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Plan, reallocation_node
from realgraph.planner.request.cost_table import CostTable, MeasuredCall, Phase, PhaseFactor, costs_to_json, load_costs
from realgraph.planner.request.request import PlanRequest, call_hashes, hashes, kept_by
from realgraph.planner.search.assembly import repriced
from realgraph.runtime.job.run_folder import write_atomic
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    Note,
    PlannedSeconds,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)
from realgraph.runtime.master.step_metrics import REALLOCATE

WARM_UP_STEPS = 2  # left out, where more than twice as many follow; else all but the first
MOST_STEPS = 512  # of one start of a run that are kept: more would say the same of its costs
NORMAL_DEVIATION_RATIO = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
N_LENGTH_QUANTILES = 128  # quantiles kept
STREAM_FITS = 4  # until what is in flight and what generation takes agree

T = TypeVar("T")


class Planned(Struct, frozen=True):
    """The run's name, what was planned, and the plan."""

    name: str
    request: PlanRequest
    plan: Plan


class SomeSteps:
    """The first steps, which warm up, and of the others every first, second, fourth ...: never more than `MOST_STEPS`.

    However long a run is, what is kept is spread evenly over it, and takes the same memory.
    """

    def __init__(self) -> None:
        self._first: list[StepRecord] = []
        self._others: list[StepRecord] = []
        self._n = 0  # of the others, all that have been
        self.every = 1

    def add(self, record: StepRecord) -> None:
        """The next step of the run."""
        if len(self._first) < WARM_UP_STEPS:
            self._first.append(record)
            return
        if self._n % self.every == 0:
            self._others.append(record)
        self._n += 1
        if len(self._others) >= MOST_STEPS:
            self._others, self.every = self._others[::2], self.every * 2

    @property
    def records(self) -> Sequence[StepRecord]:
        """The records in the order of the run."""
        return (*self._first, *self._others)


class StepTimes:
    """The seconds of each step in which no call ran, or in which its samples were generated while others were trained.

    Of an asynchronous run the devices that train are looked at: where a step's samples were there before they were
    needed, by what is left of its seconds, and otherwise by how long they took to generate.
    """

    def __init__(self, planned: Planned) -> None:
        self._elsewhere = planned.request.graph.calls.keys() - planned.plan.allocations.keys()
        self._trainer = _trainer(planned) if planned.request.workload.staleness else None
        self._first = _first_to_read(planned.request.graph) if self._trainer else ()
        self._spans: list[tuple[float, float]] = []
        self._beside: deque[float] = deque(maxlen=MOST_STEPS)
        self._waited: deque[float] = deque(maxlen=MOST_STEPS)  # whole steps

    def ran(self, span: Span) -> None:
        """Something of the present step."""
        if span.call not in self._elsewhere and (self._trainer is None or span.worker in self._trainer.devices):
            self._spans.append((span.started, span.ended))

    def ended(self, record: StepRecord) -> None:
        """The present step is over."""
        beside = max(0.0, record.seconds - covered(self._spans))
        if self._spans and all(record.metrics.get(f"{call}/queue_seconds", 0.0) >= beside for call in self._first):
            self._beside.append(beside)
        elif self._spans:
            self._waited.append(record.seconds)
        self._spans.clear()

    @property
    def beside(self) -> Sequence[float]:
        """Seconds of steps in which nothing ran on a device: no call, no evaluation, no saving."""
        return () if self.stream else tuple(self._beside)

    @property
    def stream(self) -> Sequence[float]:
        """Seconds in which the samples of a step were generated; none where training decided how long most took."""
        return tuple(self._waited) if len(self._waited) > len(self._beside) else ()


def _trainer(planned: Planned) -> DeviceMesh | None:
    """The devices of all calls that don't generate; None where these differ, or generate too."""
    generates, allocations = planned.request.graph.generates, planned.plan.allocations
    meshes = {one.layout.mesh for name, one in allocations.items() if name not in generates}
    trainer = meshes.pop() if len(meshes) == 1 else None
    beside = (allocations[name].layout.mesh for name in generates)
    return None if trainer is None or any(trainer.overlaps(mesh) for mesh in beside) else trainer


def _first_to_read(graph: Graph) -> tuple[str, ...]:
    """The calls of models, beside those that generate, that wait for no other such call of their step."""
    computes = [name for name in graph.mesh_calls if name not in graph.generates]
    after = set(computes)  # and all that waits for one
    first = []
    for name in graph.calls:
        if not after.isdisjoint(graph.producers(name)):
            after.add(name)
        elif name in computes:
            first.append(name)
    return tuple(first)


class CostsFile:
    """An observer that writes the table of a run's costs when the run ends, in whatever way.

    A resumed run adds to the table that it finds.
    """

    def __init__(self, planned: Planned, path: Path) -> None:
        self._planned, self._path = planned, path
        self._steps, self._times = SomeSteps(), StepTimes(planned)
        self._before: CostTable | None = None

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted(first_step=first) if first and self._path.is_file():
                self._before = _readable(self._path)
            case Span():
                self._times.ran(record)
            case StepRecord():
                self._steps.add(record)
                self._times.ended(record)
            case RunEnded():
                now, times = datetime.now(UTC), self._times
                table = costs_of(self._planned, self._steps.records, now, self._steps.every, times.stream)
                beside = step_end_seconds(self._planned, times.beside)
                self._write(table and replace(table, step_end_seconds=beside))
            case RunStarted() | EvalRecord() | Transcript() | CheckpointRecord() | Note():
                pass
            case _:
                assert_never(record)

    def _write(self, table: CostTable | None) -> None:
        if table is not None:
            whole = table if self._before is None else merge([self._before, table])
            write_atomic(self._path, costs_to_json(whole))

    def close(self) -> None:
        """Nothing is held open."""


def _readable(path: Path) -> CostTable | None:
    """The table that the run wrote before; None where another version wrote it: a resumed run begins anew then."""
    try:
        return load_costs(path)
    except ConfigError:
        return None


def costs_of(
    planned: Planned, steps: Sequence[StepRecord], now: datetime, every: int = 1, stream: Sequence[float] = ()
) -> CostTable | None:
    """The table of a run's steps, each of which stands for `every`; None where it has no step after its first.

    stream: seconds in which the samples of a step were generated while others were trained.
    """
    kept = steady(steps)
    if not kept:
        return None
    request = with_lengths(kept_by(planned.request, planned.plan), kept)
    real = replace(planned, request=request)
    calls = tuple(call for name in planned.plan.allocations for call in _measured(real, name, kept))
    calls += _reallocated(real, kept)
    calls = tuple(replace(call, count=call.count * every) for call in calls)
    calls += _streamed(real, calls, stream)
    return CostTable(
        kind=request.cluster.kind,
        name=planned.name,
        date=now.isoformat(timespec="seconds"),
        factors=request.costs.factors,
        phases=phase_factors(calls),
        calls=calls,
        lengths=request.workload.lengths,
    )


def step_end_seconds(planned: Planned, beside: Sequence[float]) -> float | None:
    """The seconds that a step takes beside its calls, and beside what the plan knows of when none of them runs; None
    where that is not known. beside: as measured, of each step."""
    plan, kept = planned.plan, steady(beside)
    if not kept or not plan.allocations.keys() <= plan.starts.keys():
        return None
    if planned.request.workload.staleness:  # the devices that train have no idle time but that in which they wait
        return statistics.median(kept) if _trainer(planned) else None
    planned_spans = [
        (plan.starts[name], plan.starts[name] + one.seconds - one.step_end_seconds)
        for name, one in plan.allocations.items()
    ]
    planned_spans += [
        (start, start + seconds)
        for name, seconds in plan.reallocation_seconds.items()
        if (start := plan.starts.get(reallocation_node(name))) is not None
    ]
    end = sum(one.step_end_seconds for one in plan.allocations.values())
    idle = plan.period_seconds - end - covered(planned_spans)
    return max(0.0, statistics.median(kept) - max(0.0, idle))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, each with its start and its end."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def steady(steps: Sequence[T]) -> Sequence[T]:
    """The steps of one start of a run that count: without those that warm up."""
    return steps[WARM_UP_STEPS:] if len(steps) > 3 * WARM_UP_STEPS else steps[1:]


def planned_starts(records: Iterable[RunRecord]) -> Sequence[Sequence[StepRecord]]:
    """The steps of each start of a run, of those starts that had the plan of the last one: others have other
    predictions, layouts and machines."""
    starts: list[tuple[PlannedSeconds, list[StepRecord]]] = [(PlannedSeconds(), [])]
    for record in records:
        match record:
            case RunStarted(planned=planned):
                starts.append((planned, []))
            case StepRecord():
                starts[-1][1].append(record)
            case Span() | EvalRecord() | Transcript() | CheckpointRecord() | Note() | RunEnded():
                pass
            case _:
                assert_never(record)
    return [steps for planned, steps in starts if planned == starts[-1][0]]


def counting_steps(records: Iterable[RunRecord]) -> tuple[StepRecord, ...]:
    """The steps that count, of what each start of the run by its present plan ran; the last record of a step that was
    run again."""
    last: dict[int, StepRecord | None] = {}
    for steps in planned_starts(records):
        last |= {record.step: None for record in steps}
        last |= {record.step: record for record in steady(steps)}
    return tuple(record for record in last.values() if record is not None)


def with_lengths(request: PlanRequest, steps: Sequence[StepRecord]) -> PlanRequest:
    """The request with the prompts and responses that the steps really had."""
    samples = sum(step.metrics["batch/samples"] for step in steps)
    new = sum(step.metrics["batch/new_tokens"] for step in steps) / samples
    prompt = sum(step.metrics["batch/tokens"] for step in steps) / samples - new
    lengths = quantiles([length for step in steps for length in step.lengths], N_LENGTH_QUANTILES)
    workload = replace(
        request.workload,
        mean_prompt_tokens=prompt,
        mean_new_tokens=new if lengths else request.workload.mean_new_tokens,
        lengths=lengths,
    )
    return replace(request, workload=workload)


def _measured(planned: Planned, name: str, steps: Sequence[StepRecord]) -> tuple[MeasuredCall, ...]:
    """Measurements of one call; none where its steps overlap, so that other work is done between its start and end."""
    request, allocation = planned.request, planned.plan.allocations[name]
    phase, seconds = phase_of(request.graph.calls[name]), _seconds(name, steps)
    beside = request.workload.staleness > 0 or len(request.graph.generates) > 1
    if not seconds or (phase == "generate" and beside):
        return ()
    setting = setting_of(request, name, allocation.layout, request.cluster, request.costs.factors)
    candidate = candidate_of(request, planned.plan.allocations, name)
    predicted = setting_seconds(request, name, setting, candidate)
    return (_entry(planned, name, phase, seconds, predicted),)


def _streamed(planned: Planned, others: tuple[MeasuredCall, ...], seconds: Sequence[float]) -> tuple[MeasuredCall, ...]:
    """Measurements of generation beside training. Formulas say how long it takes by what is in flight, which a plan
    chooses by all that it knows: the prediction is the one with which these costs give the plan what was measured."""
    generates = planned.request.graph.generates
    if not (seconds := steady(seconds)) or len(generates) != 1:
        return ()
    measured = predicted = statistics.median(seconds)
    for _ in range(STREAM_FITS):
        entry = _entry(planned, generates[0], "generate", seconds, predicted)
        costs = replace(planned.request.costs, phases={}, calls=(*others, entry))
        plan = repriced(replace(planned.request, costs=costs), planned.plan)
        predicted *= plan.allocations[generates[0]].seconds / measured
    return (_entry(planned, generates[0], "generate", seconds, predicted),)


def _reallocated(planned: Planned, steps: Sequence[StepRecord]) -> tuple[MeasuredCall, ...]:
    """The move of trained weights to a call's own copy; none where there are several, which are recorded as one."""
    moved, seconds = planned.plan.reallocation_seconds, _seconds(REALLOCATE, steps)
    if planned.plan.hashes.costs != hashes(planned.request).costs:
        return ()  # what the formulas say can't be told from what a table that is not at hand has made of it
    if len(moved) != 1 or not seconds or planned.request.workload.staleness:
        return ()
    ((name, predicted),) = moved.items()
    known = planned.request.costs.phases.get(REALLOCATE, PhaseFactor())
    by_factors = (predicted - known.constant_seconds) / known.factor
    return (replace(_entry(planned, name, REALLOCATE, seconds, by_factors), call=reallocation_node(name)),)


def _seconds(name: str, steps: Sequence[StepRecord]) -> list[float]:
    return [step.metrics[f"{name}/seconds"] for step in steps if f"{name}/seconds" in step.metrics]


def _entry(planned: Planned, name: str, phase: Phase, seconds: Sequence[float], predicted: float) -> MeasuredCall:
    allocation, median = planned.plan.allocations[name], statistics.median(seconds)
    deviation = NORMAL_DEVIATION_RATIO * statistics.median(abs(value - median) for value in seconds)
    model, workload = call_hashes(planned.request, name)
    fields = {
        "call": name,
        "phase": phase,
        "model": model,
        "workload": workload,
        "devices": allocation.layout.mesh.n_devices,
        **{name: value for name, value in allocation.settings.items() if name in MEASURED_SETTINGS},
        "seconds": median,
        "predicted_seconds": predicted,
        "error": deviation / median if median > 0 else 0.0,
        "count": len(seconds),
    }
    return msgspec.convert(fields, MeasuredCall)
