"""Seconds and bytes of one way to run a call: the rows of the search's tables. Chooses nothing.

How much a stream of generation has in flight depends on the whole plan, and so do the pauses that lengthen its latency.
Its rows are bounds: no stream within the interval of a row is faster or has a shorter latency.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from realgraph.graphs.spec import Generate, Train
from realgraph.planner.costs.compute.move import offload_seconds
from realgraph.planner.costs.generate.refined import IntervalCuts, StreamWindow
from realgraph.planner.costs.generate.rollout import Stream, Variant, stream_of
from realgraph.planner.costs.memory import memory
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.spread import deviation_of, measured_deviation
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.options.calls import (
    formula_seconds,
    generate_work,
    input_seconds,
    is_trained,
    overhead_seconds,
    phase_of,
    running_sequences,
    setting_of,
    setting_seconds,
    sized,
    stays_beside,
    step_end_seconds,
    streams,
)
from realgraph.planner.options.footprints import running_bound, states_of, waiting
from realgraph.planner.options.meshes import group_of
from realgraph.planner.plan.layout import Layout, Recompute, Schedule
from realgraph.planner.plan.option import SETTINGS, CallOption, Residency
from realgraph.planner.request.cost_table import CostTable, MeasuredCall, PhaseFactor
from realgraph.planner.request.request import PlanRequest, call_hashes

MEASURED_SETTINGS = ("devices", *(name for name in MeasuredCall.__struct_fields__ if name in SETTINGS))  # what was run
Caches = Literal["", "kept", "given up", "training"]
CACHES: dict[bool, tuple[Caches, ...]] = {False: ("",), True: ("kept", "given up", "training")}  # by `careful`
ELSEWHERE_BYTES = 1 << 50  # bytes that no device has: what reads the trained copy in place fits nowhere else


class PricedOption(Struct, frozen=True):
    """A candidate with its price: one row of a table."""

    candidate: CallOption
    seconds: float
    latency: float
    nbytes: tuple[int, int, int]  # resident, active and shared, as the search counts them
    host: int = 0
    running: int = 0  # sequences that decode at once on a replica, of a generate call
    error: float = 0.0  # relative standard error of `seconds`
    whole: int = 0  # of a stream, how many periods are part of `latency`
    beside: str = ""  # a later generate call of a frozen role: it shares its weights with no other call


class Timing(Struct, frozen=True):
    """Seconds that a call holds its mesh, seconds until its outputs are there, sequences that decode at once."""

    seconds: float
    latency: float
    running: int = 0
    error: float = 0.0
    whole: int = 0  # of a stream, how many of its own `seconds` are part of `latency`
    # where a paused stream's caches are told apart: `kept` for good, `given up` and computed anew at a price, or for
    # `training` on this mesh alone
    caches: Caches = ""


class Correction(Struct, frozen=True):
    """Measurements that change what formulas say of one candidate.

    Where this very call was measured under this layout and workload, its measured seconds stand, as many times as long
    as formulas say of lengths that are others now.
    """

    factor: float = 1.0
    constant_seconds: float = 0.0
    error: float = 0.0  # relative standard error of the seconds
    measured_seconds: float | None = None

    def of(self, timing: Timing, more: float, after: float) -> Timing:
        """A timing with `more` seconds besides, which measurements hold too, and `after` seconds, which they don't."""
        if self.measured_seconds is not None:
            seconds = self.measured_seconds + after
            return Timing(seconds, seconds, timing.running, self.error)
        constant = self.constant_seconds + after
        seconds = self.factor * (timing.seconds + more) + constant
        rest = timing.latency - timing.whole * timing.seconds
        latency = timing.whole * seconds + self.factor * (rest + more) + constant
        return Timing(seconds, latency, timing.running, self.error, timing.whole)


Run = tuple[Layout, int, tuple[Recompute, Schedule, int]]  # what is computed, wherever the weights wait


def run_of(candidate: CallOption) -> Run:
    return candidate.layout, candidate.tokens, candidate.passes


class Timed(Struct, frozen=True):
    """The common part of several candidates of one call on one mesh: seconds and bytes of a run, bytes of a copy,
    seconds for the inputs of so many data-parallel ranks, and seconds beside the run."""

    least: float = 0.0  # no plan has a shorter period, as far as is known
    careful: bool = False  # rows of streams tell what becomes of their caches where other calls share the mesh
    window: StreamWindow | None = None  # outside which no intervals of streams are wanted; those within are cut finer
    room: int | None = None  # bytes of an empty device, None: those of the cluster's kind
    memory_only: bool = False  # every run takes a second: whether it fits is all that is asked
    timings: dict[Run, tuple[Timing, ...]] = {}
    cuts: dict[Run, IntervalCuts] = {}  # of streams, whatever becomes of their caches
    refined: dict[tuple[Run, int], tuple[Timing, ...]] = {}  # of intervals, by their numbers in `timings`, cut finer
    running: dict[Run, tuple[int, int]] = {}  # bytes that it adds, and the margin
    waiting: dict[tuple[Layout, Residency], tuple[int, int, int, int]] = {}  # resident, active, shared and host bytes
    inputs: dict[int, float] = {}
    beside: dict[tuple[Layout, Residency], float] = {}  # seconds of offloading, engine and controller


def options_of(
    request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster, timed: Timed | None = None
) -> Iterator[PricedOption]:
    """The rows of one candidate, none where it can't fit an empty device of `cluster`, its group of nodes.

    timed: of one call on one mesh, what several candidates share.
    """
    known = Timed() if timed is None else timed
    layout, residency = candidate.layout, candidate.residency
    key = run_of(candidate)
    if key not in known.running:
        running, margin = running_bound(request, call, candidate, cluster)
        known.running[key] = running.total, margin
    if (layout, residency) not in known.waiting:
        own = waiting((request, call), (layout, residency), cluster)
        known.waiting[layout, residency] = own.resident.total, own.active.total, own.shared, own.host
    (added, margin), (resident, active, shared, host) = known.running[key], known.waiting[layout, residency]
    beside, in_place = stays_beside(request, call), residency == "in_place"
    resident, active = (resident + added, active + margin) if beside else (resident, active + added + margin)
    room = memory.usable_bytes(cluster) if known.room is None else known.room
    if resident + active > room:
        return
    if in_place:
        active, shared = active + ELSEWHERE_BYTES, ELSEWHERE_BYTES
    for base, timing in _timings(request, call, candidate, cluster, known):
        yield PricedOption(
            candidate=candidate,
            seconds=timing.seconds,
            latency=timing.latency + timing.whole * max(0.0, known.least - timing.seconds),
            nbytes=_with_caches((resident, active, shared), base, in_place),
            host=host,
            running=timing.running,
            error=timing.error,
            whole=timing.whole,
            beside=call if beside and not is_trained(request, request.graph.role(call)) else "",
        )


def _timings(
    request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster, known: Timed
) -> Iterator[tuple[Timing, Timing]]:
    """Seconds of each row by the formulas, and the same with all that stands beside the run itself."""
    if known.memory_only:
        yield Timing(1.0, 1.0), Timing(1.0, 1.0)
        return
    key, ranks = run_of(candidate), candidate.layout.dp
    if key not in known.timings:
        known.timings[key] = formula_timings(request, call, candidate, cluster, known)
    timings = known.timings[key]
    if ranks not in known.inputs:
        known.inputs[ranks] = input_seconds(request, call, candidate.layout, cluster)
    kept = candidate.layout, candidate.residency
    if kept not in known.beside:
        known.beside[kept] = _beside_seconds(request, call, candidate, cluster)
    more, correction = known.inputs[ranks] + known.beside[kept], correction_of(request, call, candidate, cluster)
    after = step_end_seconds(request, call, cluster)
    if known.window is not None:
        devices = candidate.layout.mesh.n_devices
        wanted = [i for i, one in enumerate(timings) if _within(known.window, devices, correction.of(one, more, after))]
        missing = [number for number in wanted if (key, number) not in known.refined]
        parts = _refined(known.cuts[key], known.careful, missing) if missing else []
        known.refined.update(((key, number), cut) for number, cut in zip(missing, parts, strict=True))
        timings = tuple(one for number in wanted for one in known.refined[key, number])
    for base in timings:
        yield base, correction.of(base, more, after)


def _with_caches(nbytes: tuple[int, int, int], timing: Timing, in_place: bool) -> tuple[int, int, int]:
    """Resident, active and shared bytes, where a stream's caches and weights are kept, or given up for training."""
    resident, active, shared = nbytes
    match timing.caches:
        case "kept":
            return (
                (resident + active - ELSEWHERE_BYTES, ELSEWHERE_BYTES, ELSEWHERE_BYTES)
                if in_place
                else (resident + active, 0, 0)
            )
        case "training":
            elsewhere = 0 if in_place else ELSEWHERE_BYTES
            return resident, active + elsewhere, shared + elsewhere
        case "" | "given up":
            return nbytes


# --- seconds ----------------------------------------------------------------------------------------------------------


def formula_timings(
    request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster, known: Timed
) -> tuple[Timing, ...]:
    """By the formulas alone; several where a generate call may have more or less in flight."""
    generates = isinstance(request.graph.calls[call], Generate)
    if streams(request, call):
        return tuple(_stream_timings(request, call, candidate, cluster, known))
    setting = _setting(request, call, candidate, cluster)
    seconds = formula_seconds(request, call, setting, candidate)
    own = sized(request, call)
    running = running_sequences(own, candidate.layout, candidate.tokens) if generates else 0
    return (Timing(seconds, seconds, running),)


def _stream_timings(
    request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster, known: Timed
) -> Iterator[Timing]:
    """Timings of all that may be in flight; careful ones for each of the things that may become of the caches."""
    key = run_of(candidate)
    if key not in known.cuts:
        setting, work = _setting(request, call, candidate, cluster), generate_work(request, call, candidate)
        known.cuts[key] = IntervalCuts(setting, work, request.workload.staleness)
    free = known.cuts[key].offers()
    paused = known.cuts[key].offers(paused=True) if known.careful else ()
    for caches in CACHES[known.careful]:
        yield from (_timing(one, caches) for one in (paused if caches == "given up" else free))


def _refined(cut: IntervalCuts, careful: bool, numbers: Sequence[int]) -> list[tuple[Timing, ...]]:
    """Timings of the parts of the intervals with these numbers in `_stream_timings`."""
    sorts = CACHES[careful]
    return [
        tuple(
            _timing(one, sorts[number // len(cut)])
            for one in cut.parts(number % len(cut), sorts[number // len(cut)] == "given up")
        )
        for number in numbers
    ]


def _within(window: StreamWindow, n_devices: int, one: Timing) -> bool:
    return window.has(n_devices, one.seconds, (one.whole, one.latency - one.whole * one.seconds))


def _timing(one: Variant, caches: Caches = "") -> Timing:
    return Timing(one.seconds, one.latency_seconds, one.running, whole=one.latency_periods, caches=caches)


def candidate_stream(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> Stream:
    """The stream of a generate call."""
    work = generate_work(request, call, candidate)
    return stream_of(_setting(request, call, candidate, cluster), work)


def stream_timing(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster, variant: Variant) -> Timing:
    """Timing of one stream of a generate call, as `options_of` prices its rows."""
    more = input_seconds(request, call, candidate.layout, cluster) + _beside_seconds(request, call, candidate, cluster)
    after = step_end_seconds(request, call, cluster)
    return correction_of(request, call, candidate, cluster).of(_timing(variant), more, after)


def _beside_seconds(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> float:
    """Offloading, and the overheads of engines and controller."""
    overheads = overhead_seconds(request, call, candidate.layout, cluster)
    return overheads + offloading_seconds(request, call, candidate, cluster)


def _setting(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> Setting:
    return setting_of(request, call, candidate.layout, cluster, factors_of(request, cluster))


def factors_of(request: PlanRequest, cluster: Cluster) -> EfficiencyFactors | None:
    """Measured efficiency factors of a group's kind of device; None: the shipped ones."""
    return request.costs.factors if request.costs.kind in ("", cluster.kind) else None


def measured_there(request: PlanRequest, layout: Layout) -> CostTable:
    """The measured costs where they speak of the kind of device that a layout lies on; else none."""
    if request.costs.kind and request.cluster.more:
        group = request.cluster.groups[group_of(request.cluster, layout.mesh.first)]
        return request.costs if group.kind == request.costs.kind else CostTable()
    return request.costs


def correction_of(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> Correction:
    """The correction of every timing of a candidate. The error is that of the measurements, and at least what another
    run would differ by."""
    phase = phase_of(request.graph.calls[call])
    least = measured_deviation(phase, cpu=request.cluster.is_cpu)
    measured = _measured(request, call, candidate)
    if measured is not None and not streams(request, call):
        now = setting_seconds(request, call, _setting(request, call, candidate, cluster), candidate)
        longer = now / measured.predicted_seconds if measured.predicted_seconds else 1.0
        return Correction(error=max(measured.error, least), measured_seconds=longer * measured.seconds)
    if measured is not None and measured.predicted_seconds > 0:  # of one number of samples in flight
        return Correction(measured.seconds / measured.predicted_seconds, 0.0, max(measured.error, least))
    factor = measured_there(request, candidate.layout).phases.get(phase, PhaseFactor())
    error = max(factor.error, least) if factor.error else _formula_error(request, call, candidate)
    return Correction(factor.factor, factor.constant_seconds, error)


def _formula_error(request: PlanRequest, call: str, candidate: CallOption) -> float:
    """Deviation of a prediction by the formulas alone."""
    phase, profiled = phase_of(request.graph.calls[call]), request.costs.factors is not None
    return deviation_of(phase, request.model(call), candidate.layout, cpu=request.cluster.is_cpu, profiled=profiled)


def is_measured(request: PlanRequest, call: str, candidate: CallOption) -> bool:
    """True where exactly this call was measured. A stream's seconds depend on what is in flight besides."""
    return not streams(request, call) and _measured(request, call, candidate) is not None


def _measured(request: PlanRequest, call: str, candidate: CallOption) -> MeasuredCall | None:
    """The measurement of exactly this call, None where there is none."""
    calls = measured_there(request, candidate.layout).calls
    now = {**candidate.settings, "devices": candidate.layout.mesh.n_devices} if calls else {}
    for measured in calls:
        ran = measured.call == call and all(getattr(measured, name) == now[name] for name in MEASURED_SETTINGS)
        if ran and (measured.model, measured.workload) == call_hashes(request, call):
            return measured
    return None


def offloading_seconds(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> float:
    """Frozen weights are read from the host before use; trained states are read and written back."""
    if candidate.residency != "offloaded":
        return 0.0
    trains = isinstance(request.graph.calls[call], Train)
    moved = states_of(request, call, candidate.layout, cluster).total
    return (2 if trains else 1) * offload_seconds(cluster, moved, factors_of(request, cluster))
