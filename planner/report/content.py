"""All that `realgraph plan` shows of a plan, as plain data: rows, timeline, memory, bottleneck, comparisons, doubts.

The terminal, the HTML page and the trace draw from it. It searches nothing: what a search found beside the plan (other
plans, what-if hints, a sweep) is handed in as `Findings`.
"""

from collections.abc import Mapping

from msgspec import Struct

from realgraph.planner.advise.sweep import Hint
from realgraph.planner.plan.events import EventGraph
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.report.format import devices_text, percent_text, seconds_text
from realgraph.planner.report.memory import MemoryBar, memory_bars
from realgraph.planner.report.schedule import (
    Kind,
    Lane,
    Timeline,
    circuit_parts,
    kind_of,
    slacks,
    tasks_of,
    timeline,
)
from realgraph.planner.request.request import PlanRequest, kept_by
from realgraph.planner.search.search import events_of

LOADED_SHARE = 0.9  # a device that is busy for this share of the period is what bounds it


class CallRow(Struct, frozen=True):
    """One call of the allocation table."""

    call: str
    kind: Kind
    role: str
    allocation: Allocation
    share: float  # of the period
    slack_seconds: float  # longer by this, the period stays
    critical: bool


class Bottleneck(Struct, frozen=True):
    """The circuit that bounds the period."""

    sentence: str
    call: str
    # its nodes with their seconds; it spans `steps` steps, and so sum(seconds) / steps is the period
    circuit: tuple[tuple[str, float], ...]
    steps: int
    load: float  # the busiest devices' share of it
    devices: str


class Comparison(Struct, frozen=True):
    """Another plan of the same run under the same costs. period_seconds None: there is none, for a reason in words."""

    name: str
    period_seconds: float | None
    note: str = ""
    without: str = "does not fit"


class Price(Struct, frozen=True):
    """US dollars: of one device for an hour, of one step, of the whole run of `steps`."""

    per_device_hour: float
    per_step: float
    per_run: float
    steps: int


class PlannedSize(Struct, frozen=True):
    """One cluster size of a sweep; `note` says why where there is no plan."""

    devices: int
    period_seconds: float | None
    lower_bound_seconds: float = 0.0
    note: str = ""


class MeasuredSeconds(Struct, frozen=True):
    """Seconds of one call: predicted, and the median that a run measured over `count` steps, with its spread."""

    call: str
    predicted_seconds: float
    measured_seconds: float
    spread: float  # half the distance between the quartiles, relative to the median
    count: int


class Findings(Struct, frozen=True):
    """Findings beside the plan itself; empty parts are not shown."""

    comparisons: tuple[Comparison, ...] = ()
    hints: tuple[Hint, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    price: Price | None = None
    sweep: tuple[PlannedSize, ...] = ()
    target_seconds: float | None = None
    measured: tuple[MeasuredSeconds, ...] = ()


class Report(Struct, frozen=True):
    """The report of one plan."""

    title: str
    facts: tuple[tuple[str, str], ...]  # lines of (name, text) that say what was planned
    plan: Plan
    n_samples: int
    n_devices: int
    devices_per_node: int
    rows: tuple[CallRow, ...]
    timeline: Timeline
    memory: tuple[MemoryBar, ...]
    bottleneck: Bottleneck
    findings: Findings
    quantile: float  # of memory peaks, that must fit

    @property
    def samples_per_second(self) -> float:
        return self.n_samples / self.plan.period_seconds if self.plan.period_seconds > 0 else 0.0


def report_of(
    request: PlanRequest, plan: Plan, title: str, facts: tuple[tuple[str, str], ...], findings: Findings = Findings()
) -> Report:
    """Everything that follows from the request and the plan, with the findings beside it."""
    request = kept_by(request, plan)
    events = events_of(request, plan)
    tasks = tasks_of(request.graph, plan, events)
    shown = timeline(tasks, plan.period_seconds, plan.bottleneck, request.cluster.n_devices)
    bottleneck = bottleneck_of(plan, events, shown)
    return Report(
        title=title,
        facts=facts,
        plan=plan,
        n_samples=request.workload.n_samples,
        n_devices=request.cluster.n_devices,
        devices_per_node=request.cluster.devices_per_node,
        rows=tuple(_rows(request, plan, slacks(events, plan.period_seconds))),
        timeline=shown,
        memory=memory_bars(request, plan),
        bottleneck=bottleneck,
        findings=findings,
        quantile=request.memory.quantile,
    )


def _rows(request: PlanRequest, plan: Plan, slack: Mapping[str, float]) -> list[CallRow]:
    return [
        CallRow(
            call=name,
            kind=kind_of(request.graph, name),
            role=request.graph.role(name),
            allocation=plan.allocations[name],
            share=plan.allocations[name].seconds / plan.period_seconds if plan.period_seconds > 0 else 0.0,
            slack_seconds=slack.get(name, 0.0),
            critical=name in plan.bottleneck,
        )
        for name in request.mesh_calls
        if name in plan.allocations
    ]


# --- what bounds the period -------------------------------------------------------------------------------------------


def bottleneck_of(plan: Plan, events: EventGraph, shown: Timeline) -> Bottleneck:
    """The critical circuit in numbers, the busiest devices, and one sentence."""
    busiest = max(shown.lanes, key=lambda lane: lane.busy_seconds, default=Lane((), (), 0.0, 1.0))
    load, devices = 1 - busiest.idle, devices_text(busiest.devices)
    if not plan.bottleneck or plan.period_seconds <= 0:
        return Bottleneck("", "", (), 1, load, devices)
    seconds, distance = circuit_parts(events, plan.bottleneck, plan.period_seconds)
    circuit = tuple(zip(plan.bottleneck, seconds, strict=True))
    call, longest = max(circuit, key=lambda node: node[1])
    sentence = _sentence((call, longest), plan.period_seconds * distance, (load, devices, len(busiest.devices)))
    return Bottleneck(sentence, call, circuit, distance, load, devices)


def _sentence(node: tuple[str, float], total: float, busiest: tuple[float, str, int]) -> str:
    """`train_actor bounds the period: resource load 96 % (devices 0-7); ...`."""
    (call, seconds), (load, devices, count) = node, busiest
    where = f"device{'s' * (count > 1)} {devices}"
    share_text = f"it takes {seconds_text(seconds)}, {percent_text(seconds / total)} of the critical circuit"
    if load >= LOADED_SHARE:
        return f"{call} bounds the period: resource load {percent_text(load)} ({where}); {share_text}"
    return (
        f"{call} bounds the period by what waits for it: {share_text}; "
        f"no device is busy for more than {percent_text(load)} of the period ({where})"
    )
