"""A plan report as text and tables for a terminal. Computes nothing: `planner/report.py` does."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from realgraph.plan_gantt import COLOURS, gantt
from realgraph.planner.plan import Plan
from realgraph.planner.report import Measured, Report, Row, Size
from realgraph.planner.report_format import (
    axes_text,
    axes_used,
    bytes_text,
    change_text,
    devices_text,
    dollars_text,
    gap_text,
    percent_text,
    seconds_text,
    words,
)

CELLS = 16  # of a drawn cluster
MEMORY_CELLS = 48  # of a full device
MOST_NODES = 4  # that are drawn apart
SHADES = ("█", "▓", "▒", "░", "◼", "▪", "▬", "▫")
STOPPED = {
    "proven": "the gap is proven",
    "time limit": "the time limit was reached",
    "interrupted": "it was interrupted",
    "exhausted": "nothing is left to try",
}


def render(report: Report) -> Iterator[RenderableType]:
    """Every part that the report has, in reading order."""
    yield from head(report)
    yield allocation_table(report)
    yield from gantt(report)
    yield from bottleneck(report)
    yield from memory(report)
    found = report.findings
    if found.comparisons:
        yield comparisons(report)
    if found.hints:
        yield hints(report)
    if found.sweep:
        yield sweep(found.sweep, found.target_seconds)
    if found.measured:
        yield measured(found.measured)
    for note in found.notes:
        yield Text.assemble(("note ", "bold"), note)
    for doubt in found.doubts:
        yield Text.assemble(("doubt ", "bold yellow"), doubt)


def head(report: Report) -> Iterator[Text]:
    """What was planned, how fast it is, and how good that is."""
    plan = report.plan
    for i, (name, text) in enumerate(report.facts):
        yield Text.assemble((f"{name}: " if not i else f"{name} ", "bold"), text)
    speed = f"{seconds_text(plan.period_seconds)} a step, {report.samples_per_second:.3g} samples/s"
    latency = f", {seconds_text(plan.latency_seconds)} from start to end of one step" if plan.latency_seconds else ""
    yield Text.assemble(("period ", "bold"), f"{speed}{latency} (predicted, not measured)")
    yield Text.assemble(("lower bound ", "bold"), bound_text(plan))
    price = report.findings.price
    if price is not None:
        text = f"{dollars_text(price.per_step)} a step, {dollars_text(price.per_run)} for {price.steps:,} steps"
        rate = f"{dollars_text(price.per_device_hour)} per device and hour"
        yield Text.assemble(("price ", "bold"), f"{text}, at {rate}")


def bound_text(plan: Plan) -> str:
    """Bound, gap, why the search ended, and what the bound speaks of."""
    parts = [seconds_text(plan.lower_bound_seconds), f"gap {gap_text(plan.gap)}"]
    if plan.stopped:
        why = STOPPED.get(plan.stopped, plan.stopped)
        parts.append(f"searched for {seconds_text(plan.search_seconds)} until {why}")
    return ", ".join(parts) + (f"; within: {plan.scope}" if plan.scope else "")


# --- the allocation ---------------------------------------------------------------------------------------------------


def allocation_table(report: Report) -> Table:
    """One row per mesh-holding call, in the graph's order; memory of the fullest device while the call runs."""
    axes = axes_used(row.allocation.layout for row in report.rows)
    table = _table("allocation")
    table.add_column("call", no_wrap=True)
    for name in ("on the cluster", "devices", "/".join(axes), "weights"):
        table.add_column(name)
    for name in ("micro-batches", "seconds", "share", "memory"):
        table.add_column(name, justify="right")
    table.add_column("most of it")
    for row in report.rows:
        table.add_row(*_cells(row, report, axes))
    table.caption, table.caption_justify = "; ".join(_notes(report)), "left"
    return table


def _cells(row: Row, report: Report, axes: tuple[str, ...]) -> list[RenderableType]:
    allocation = row.allocation
    layout, colour = allocation.layout, COLOURS[row.kind]
    return [
        Text(row.call, style="bold" if row.critical else ""),
        Text(mesh_picture(layout.mesh.devices, report), style=colour),
        devices_text(layout.mesh.devices),
        axes_text(layout, axes),
        weights_text(row),
        batches_text(row),
        seconds_text(allocation.seconds),
        percent_text(row.share),
        bytes_text(allocation.peak_bytes),
        words(allocation.worst_term),
    ]


def mesh_picture(devices: range, report: Report) -> str:
    """The cluster as at most 16 blocks: full, partly (`▄`) or not (`·`) of this mesh; few nodes stand apart."""
    n, per_node = report.n_devices, report.devices_per_node
    size = -(-n // CELLS)
    blocks = [range(first, min(n, first + size)) for first in range(0, n, size)]
    apart = per_node // size if per_node % size == 0 and n <= MOST_NODES * per_node else len(blocks)
    drawn = ""
    for i, block in enumerate(blocks):
        covered = sum(device in devices for device in block)
        drawn += " " if i and i % apart == 0 else ""
        drawn += "█" if covered == len(block) else "▄" if covered else "·"
    return drawn


def weights_text(row: Row) -> str:
    """How the role's weights lie there: sharding, residency, recomputation."""
    allocation = row.allocation
    parts = ["FSDP" if allocation.layout.sharding == "fsdp" else "replicated" if allocation.layout.dp > 1 else "whole"]
    if allocation.residency == "reallocated":
        parts.append("copy")
    elif allocation.residency == "offloaded":
        parts.append("offloaded")
    if allocation.recompute:
        parts.append("recompute")
    return ", ".join(parts)


def batches_text(row: Row) -> str:
    """`4 x 16,384` micro-batches and tokens; of a generate call, the sequences at once and the tokens of the cache."""
    allocation = row.allocation
    tokens = f"{allocation.max_tokens_per_microbatch:,}"
    if row.kind == "generate":
        return f"{allocation.running:,} in {tokens}" if allocation.running else f"KV {tokens}"
    return f"{allocation.microbatches:,} x {tokens}" if allocation.microbatches else tokens


def _notes(report: Report) -> Iterator[str]:
    yield "bold: on the critical circuit"
    yield "micro-batches: of a rank and optimizer step, x tokens at most"
    if any(row.kind == "generate" for row in report.rows):
        yield "of a generate call: sequences at once in KV-cache tokens"
    if any(row.allocation.residency == "reallocated" for row in report.rows):
        yield "copy: refreshed from the trained weights every step"


# --- why --------------------------------------------------------------------------------------------------------------


def bottleneck(report: Report) -> Iterator[Text]:
    """The sentence, and the critical circuit with the seconds of each of its nodes."""
    found = report.bottleneck
    if not found.circuit:
        return
    yield Text.assemble(("bottleneck ", "bold"), found.sentence)
    chain = " -> ".join(f"{name} {seconds_text(seconds)}" for name, seconds in found.circuit)
    spans = "every step" if found.steps == 1 else f"every {found.steps} steps"
    yield Text.assemble(("critical circuit ", "bold"), f"{chain} -> {found.circuit[0][0]}, {spans}")


def memory(report: Report) -> Iterator[RenderableType]:
    """The worst moment of each group of devices as a bar of its parts, the largest first."""
    table = _table("memory at the worst moment")
    table.add_column("devices")
    table.add_column("parts", no_wrap=True)
    table.add_column("GB", justify="right")
    table.add_column("of which")
    for bar in report.memory:
        if not bar.parts:
            continue
        parts = sorted(bar.parts, key=lambda part: -part.nbytes)
        picture, full = Text(), 0.0
        for i, part in enumerate(parts):
            before, full = round(full), full + part.nbytes / bar.usable_bytes * MEMORY_CELLS
            style = "cyan" if part.kind == "resident" else "yellow"
            picture.append(SHADES[i % len(SHADES)] * (round(full) - before), style=style)
        picture.append("·" * max(0, MEMORY_CELLS - len(picture.plain)), style="dim")
        largest = "; ".join(f"{part.label} {bytes_text(part.nbytes)}" for part in parts[:2])
        full_text = f"{bar.total_bytes / 1e9:.1f} / {bar.usable_bytes / 1e9:.1f}"
        table.add_row(devices_text(bar.devices), picture, full_text, escape(largest))
    table.caption, table.caption_justify = "cyan: resident; yellow: of the call that runs; dots: free", "left"
    if table.row_count:
        yield table


# --- beside the plan --------------------------------------------------------------------------------------------------


def comparisons(report: Report) -> Table:
    """Other plans of the same run under the same costs."""
    table = _table("beside it, at the same costs")
    table.add_column("plan")
    table.add_column("period", justify="right")
    table.add_column("against this", justify="right")
    table.add_column("what it is")
    own = report.plan.period_seconds
    for other in report.findings.comparisons:
        if other.period_seconds is None:
            table.add_row(other.name, "-", "does not fit", escape(other.note))
        else:
            change = change_text(other.period_seconds / own) if own > 0 else ""
            table.add_row(other.name, seconds_text(other.period_seconds), change, escape(other.note))
    return table


def hints(report: Report) -> Table:
    """What a change would bring, each planned anew."""
    table = _table("what if")
    table.add_column("change")
    table.add_column("period", justify="right")
    table.add_column("samples/s", justify="right")
    for hint in sorted(report.findings.hints, key=lambda hint: -hint.gain):
        table.add_row(escape(hint.text), seconds_text(hint.period_seconds), change_text(1 + hint.gain))
    return table


def sweep(sizes: tuple[Size, ...], target_seconds: float | None) -> Table:
    """The scaling curve: period, speed-up per device, and the cheapest size that reaches the target."""
    table = _table("cluster sizes")
    for name in ("devices", "period", "bound", "device seconds a step", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("")
    planned = [size for size in sizes if size.period_seconds is not None]
    least = min((size.period_seconds * size.devices for size in planned if size.period_seconds), default=0.0)
    reached = cheapest(sizes, target_seconds)
    for size in sizes:
        if size.period_seconds is None:
            table.add_row(f"{size.devices:,}", "-", "-", "-", "-", escape(size.note))
            continue
        area = size.period_seconds * size.devices
        mark = f"the least that reaches {seconds_text(target_seconds)}" if size is reached and target_seconds else ""
        bar = "█" * max(1, round(24 * least / area)) if area > 0 else ""
        table.add_row(
            f"{size.devices:,}",
            seconds_text(size.period_seconds),
            seconds_text(size.lower_bound_seconds),
            f"{area:,.0f}",
            percent_text(least / area) if area > 0 else "",
            f"{bar} {mark}".rstrip(),
            style="bold" if mark else "",
        )
    return table


def cheapest(sizes: tuple[Size, ...], target_seconds: float | None) -> Size | None:
    """The smallest size whose period is at most the target."""
    if target_seconds is None:
        return None
    reaching = [size for size in sizes if size.period_seconds is not None and size.period_seconds <= target_seconds]
    return min(reaching, key=lambda size: size.devices, default=None)


def measured(calls: tuple[Measured, ...]) -> Table:
    """Predicted against measured seconds of each call of a run."""
    table = _table("predicted against measured")
    table.add_column("call")
    for name in ("predicted", "measured", "spread", "predicted / measured", "steps"):
        table.add_column(name, justify="right")
    for call in calls:
        ratio = call.predicted_seconds / call.measured_seconds if call.measured_seconds > 0 else float("inf")
        table.add_row(
            escape(call.call),
            seconds_text(call.predicted_seconds),
            seconds_text(call.measured_seconds),
            percent_text(call.spread),
            f"{ratio:.2f}",
            f"{call.count:,}",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
