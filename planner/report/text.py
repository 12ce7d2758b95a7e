"""Short texts about a plan that the terminal and the page share."""

from collections.abc import Iterator, Sequence

from realgraph.planner.costs.spread import BAR_SHARE
from realgraph.planner.plan.layout import Recompute, Schedule, Stages
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Allocation, Plan, Transport
from realgraph.planner.plan.problem import Limits
from realgraph.planner.plan.stages import stage_totals
from realgraph.planner.report.content import CallRow, PlannedSize, Report
from realgraph.planner.report.format import bytes_text, counted, gap_text, percent_text, seconds_text, words
from realgraph.planner.report.memory import MemoryBar

TRANSPORT_WORDS: dict[Transport, str] = {
    "in_place": "in place",
    "device": "device to device",
    "host": "through host memory",
}
STOPPED = {
    "proven": "the gap was proven",
    "time limit": "the time limit was reached",
    "interrupted": "it was interrupted",
    "exhausted": "nothing was left to try",
}
STREAMS = (
    "it was proven but for what a stream of generation loses on devices that it shares, which the bound leaves out"
)
OWN_GAP_RATIO = 1.05  # times the gap that a search proves: a wider one is not the search's own


def predicted_text(report: Report) -> str:
    """The kind of number that the period is."""
    low, high = report.plan.period_bar_seconds
    bar = f"{seconds_text(low)} to {seconds_text(high)} in {percent_text(BAR_SHARE)} of such cases"
    return f"predicted: {bar}" if high else "predicted, not measured"


def bound_text(plan: Plan) -> str:
    """Bound, gap, why the search ended, and what the bound speaks of."""
    parts = [seconds_text(plan.lower_bound_seconds), f"gap {gap_text(plan.gap)}"]
    best_gap = plan.best_seconds / plan.lower_bound_seconds - 1 if plan.lower_bound_seconds > 0 else plan.gap
    if plan.simplified:
        parts.append(f"{gap_text(max(0.0, best_gap))} of the best plan found")
    if plan.stopped:
        wider = plan.stopped == "proven" and best_gap > OWN_GAP_RATIO * Limits().gap
        why = STREAMS if wider else STOPPED.get(plan.stopped, plan.stopped)
        parts.append(f"searched for {seconds_text(plan.search_seconds)} until {why}")
    return ", ".join(parts) + (f"; within: {plan.scope}" if plan.scope else "")


def weights_text(row: CallRow) -> str:
    """The state of the role's weights there: sharding, residency, recomputation."""
    allocation = row.allocation
    parts = ["FSDP" if allocation.layout.sharding == "fsdp" else "replicated" if allocation.layout.dp > 1 else "whole"]
    if allocation.residency == "reallocated":
        parts.append("copy")
    elif allocation.residency == "offloaded":
        parts += ["offloaded", *(["prefetched"] if allocation.prefetch_during else [])]
    parts += passes_text(allocation.recompute)
    return ", ".join(parts)


def passes_text(recompute: Recompute, schedule: Schedule = "1f1b", chunks: int = 1) -> list[str]:
    """The way a train call takes its micro-batches, where not in the plainest way: `selective recompute`."""
    again = {"none": [], "selective": ["selective recompute"], "full": ["recompute"]}
    order = {"1f1b": [], "interleaved": [f"interleaved x{chunks}"]}
    return [*again[recompute], *order[schedule]]


def option_text(option: CallOption) -> str:
    """Settings of an option besides layout and tokens, where not in the plainest way: `recompute, offloaded`."""
    kept = {"reallocated": ["copy"], "offloaded": ["offloaded"]}.get(option.residency, [])
    return ", ".join([*passes_text(*option.passes), *kept])


def pipelines_text(rows: Sequence[CallRow]) -> str:
    """Order and layers of each train call's pipeline stages: `train_actor 1F1B (20 layers a stage)`."""
    return ", ".join(
        f"{row.call} {' '.join(passes_text('none', allocation.schedule, allocation.chunks)) or '1F1B'}"
        + (f" ({layers_text(allocation.layout.stages)})" if allocation.layout.stages else "")
        for row, allocation in ((row, row.allocation) for row in rows if row.kind == "train")
        if allocation.layout.pp > 1
    )


def layers_text(stages: Stages) -> str:
    """Layers of each stage: `20 layers a stage`, `layers 10+10+11+9`."""
    totals = stage_totals(stages)
    even = len(set(totals)) == 1
    return f"{counted(totals[0], 'layer')} a stage" if even else f"layers {'+'.join(map(str, totals))}"


def batches_text(row: CallRow) -> str:
    """`4 x 16,384` micro-batches and tokens; of a generate call, the sequences at once and the tokens of the cache."""
    allocation = row.allocation
    tokens = f"{allocation.tokens:,}"
    if row.kind == "generate":
        return f"{allocation.running:,} in {tokens}" if allocation.running else f"KV {tokens}"
    return f"{allocation.microbatches:,} x {tokens}" if allocation.microbatches else tokens


def table_legend(report: Report) -> Iterator[str]:
    """The meaning of what the allocation table shows."""
    yield "bold: on the critical circuit"
    yield "micro-batches: of a rank and optimizer step, x tokens at most"
    if any(row.kind == "generate" for row in report.rows):
        yield "of a generate call: sequences at once in KV-cache tokens"
    if any(row.allocation.residency == "reallocated" for row in report.rows):
        yield "copy: refreshed from the trained weights every step"


def memory_text(allocation: Allocation, quantile: float) -> str:
    """`74.0 GB expected at its peak, most of it activations; 78.1 GB at the quantile 0.95 (memory.quantile)`, and what
    is spare."""
    mean = f"{bytes_text(allocation.peak_bytes)} expected at its peak, most of it {words(allocation.worst_term)}"
    bound = f"{bytes_text(allocation.bound_bytes)} at the quantile {quantile:g} (memory.quantile), which must fit"
    spare = allocation.spare_cache_tokens
    longer = f"; of its cache, {counted(spare, 'token')} are spare, for samples longer than expected" if spare else ""
    most = f"{allocation.most_running:,} sequences may run at once, {allocation.running:,} are expected to"
    more = f"; up to {most}" if allocation.spare_running else ""
    return f"{mean}; {bound}{longer}{more}"


def bar_text(bar: MemoryBar) -> str:
    """`74.0 GB to 78.1 GB`: what is expected, and the bound; where there is no margin, the first alone."""
    margin = f" to {bytes_text(bar.bound_bytes)}" if bar.bound_bytes > bar.expected_bytes else ""
    return f"{bytes_text(bar.expected_bytes)}{margin}"


def moves_text(plan: Plan) -> str:
    """The way of trained weights to each call that reads them: `rollout 30.1 ms device to device, values in place`."""
    return ", ".join(
        f"{call} {f'{seconds_text(plan.reallocation_seconds.get(call, 0.0))} ' if transport != 'in_place' else ''}"
        f"{TRANSPORT_WORDS[transport]}"
        for call, transport in plan.reallocation_transport.items()
    )


def inputs_text(plan: Plan, least: float = 0.0) -> str:
    """Seconds of calls that go into bringing their inputs: `train_actor 7.52 ms`; of those with this share."""
    return ", ".join(
        f"{call} {seconds_text(allocation.input_seconds)}"
        for call, allocation in plan.allocations.items()
        if allocation.input_seconds > least * allocation.seconds
    )


def cheapest(sizes: Sequence[PlannedSize], target_seconds: float | None) -> PlannedSize | None:
    """The smallest size whose period is at most the target."""
    if target_seconds is None:
        return None
    reaching = [size for size in sizes if size.period_seconds is not None and size.period_seconds <= target_seconds]
    return min(reaching, key=lambda size: size.devices, default=None)
