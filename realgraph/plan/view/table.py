"""A plan report as text and tables for a terminal. Computes nothing: `planner/report/content.py` does."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from realgraph.plan.view.gantt import COLOURS, gantt
from realgraph.planner.advise.alternatives import Alternative
from realgraph.planner.advise.sweep import Hint
from realgraph.planner.report.content import Bottleneck, CallRow, MeasuredSeconds, PlannedSize, Report
from realgraph.planner.report.format import (
    axes_text,
    axes_used,
    bytes_text,
    change_text,
    devices_text,
    dollars_text,
    layout_text,
    percent_text,
    rate_text,
    ratio_text,
    seconds_text,
    words,
)
from realgraph.planner.report.memory import MemoryPart
from realgraph.planner.report.text import (
    bar_text,
    batches_text,
    bound_text,
    cheapest,
    inputs_text,
    memory_text,
    moves_text,
    option_text,
    pipelines_text,
    predicted_text,
    table_legend,
    weights_text,
)

CLUSTER_CELLS = 16  # of a drawn cluster
MEMORY_CELLS = 40  # of a full device
NUMBERS = ("micro-batches", "seconds", "share", "memory")
SPARED = ("most of it", "on the cluster", "weights", "share", "micro-batches")  # by a narrow terminal, in this order
PART_COLOURS = {"resident": "cyan", "active": "yellow", "margin": "magenta"}
SLOW_INPUTS_SHARE = 0.01  # of a call's seconds: inputs that take more are named
NAMED_PARTS = 6  # of a memory bar
MOST_NODES = 4  # that are drawn apart
SHADES = ("█", "▓", "▒", "░", "◼", "▪")


def plan_parts(report: Report, width: int) -> Iterator[RenderableType]:
    """The parts that follow from the plan alone, in reading order, for a terminal of `width` characters."""
    yield from head(report)
    yield Text()
    yield allocation_table(report, width)
    yield from gantt(report.timeline)
    yield from bottleneck(report.bottleneck)
    yield from moves(report)
    yield from memory(report, width)
    yield Text()
    for doubt in report.findings.doubts:
        yield Text.assemble(("doubt ", "bold yellow"), doubt)


def explain_parts(report: Report, call: str, alternatives: tuple[Alternative, ...]) -> Iterator[RenderableType]:
    """The options of one call under the plan's head."""
    yield from head(report)
    allocation = report.plan.allocations[call]
    seconds = seconds_text(allocation.seconds)
    if allocation.input_seconds:
        seconds += f", {seconds_text(allocation.input_seconds)} of it to bring its inputs"
    text = f"{call}: {layout_text(allocation.layout)}, {allocation.tokens:,} tokens, {seconds}"
    slack = next((row.slack_seconds for row in report.rows if row.call == call), 0.0)
    critical = slack <= 1e-3 * report.plan.period_seconds
    why = "on the critical circuit" if critical else f"may take {seconds_text(slack)} longer before a step does"
    yield Text.assemble(("\nchosen ", "bold"), f"{text}; {why}")
    yield Text.assemble(("memory ", "bold"), f"{memory_text(allocation, report.quantile)}\n")
    if alternatives:
        yield options(alternatives)
    else:
        yield Text("no other option fits its pins and constraints")


def beside_parts(report: Report) -> Iterator[RenderableType]:
    """The parts on what was found beside the plan: other plans, hints, cluster sizes, a run's measurements."""
    findings = report.findings
    for note in findings.notes:
        yield Text.assemble(("note ", "bold"), note)
    yield Text()
    if findings.comparisons:
        yield comparisons(report)
    if findings.hints:
        yield hints(findings.hints)
    if findings.sweep:
        yield sweep(findings.sweep, findings.target_seconds)
    if findings.measured:
        yield measured(findings.measured)


def head(report: Report) -> Iterator[Text]:
    """The head: what was planned, how fast it is, and how good that is."""
    plan = report.plan
    for i, (name, text) in enumerate(report.facts):
        yield Text.assemble((f"{name}: " if not i else f"{name} ", "bold"), text)
    speed = f"{seconds_text(plan.period_seconds)} a step, {rate_text(report.samples_per_second)} samples/s"
    latency = f", {seconds_text(plan.latency_seconds)} from start to end of one step" if plan.latency_seconds else ""
    yield Text.assemble(("period ", "bold"), f"{speed}{latency} ({predicted_text(report)})")
    yield Text.assemble(("lower bound ", "bold"), bound_text(plan))
    price = report.findings.price
    if price is not None:
        text = f"{dollars_text(price.per_step)} a step, {dollars_text(price.per_run)} for {price.steps:,} steps"
        rate = f"{dollars_text(price.per_device_hour)} per device and hour"
        yield Text.assemble(("price ", "bold"), f"{text}, at {rate}")


# --- the allocation ---------------------------------------------------------------------------------------------------


def allocation_table(report: Report, width: int) -> Table:
    """One row per mesh-holding call, in the graph's order; memory of the fullest device while the call runs.

    A narrow terminal gets fewer columns.
    """
    axes = axes_used(row.allocation.layout for row in report.rows)
    table = titled("allocation")
    rows = [_cells(row, report, axes) for row in report.rows]
    shown = _fitting(rows, columns(axes), width)
    for name in shown:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    table.caption, table.caption_justify = "; ".join(table_legend(report)), "left"
    return table


def columns(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The heads, where these axes of parallelism are shown."""
    return ("call", "on the cluster", "devices", "/".join(axes), "weights", *NUMBERS, "most of it")


def _fitting(rows: Sequence[Mapping[str, Text | str]], names: tuple[str, ...], width: int) -> tuple[str, ...]:
    """The columns that `width` characters have room for, two between any."""
    needed = {name: max(cell_len(name), *(cell_len(str(row[name])) for row in rows)) + 2 for name in names}
    for name in SPARED:
        if sum(needed.values()) > width:
            del needed[name]
    return tuple(needed)


def _cells(row: CallRow, report: Report, axes: tuple[str, ...]) -> dict[str, Text | str]:
    allocation = row.allocation
    layout, colour = allocation.layout, COLOURS[row.kind]
    values: list[Text | str] = [
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
    return dict(zip(columns(axes), values, strict=True))


def mesh_picture(devices: range, report: Report) -> str:
    """The cluster as at most 16 blocks: full, partly (`▄`) or not (`·`) of this mesh; few nodes stand apart."""
    n, per_node = report.n_devices, report.devices_per_node
    size = -(-n // CLUSTER_CELLS)
    blocks = [range(first, min(n, first + size)) for first in range(0, n, size)]
    apart = per_node // size if per_node % size == 0 and n <= MOST_NODES * per_node else len(blocks)
    drawn = ""
    for i, block in enumerate(blocks):
        covered = sum(device in devices for device in block)
        drawn += " " if i and i % apart == 0 else ""
        drawn += "█" if covered == len(block) else "▄" if covered else "·"
    return drawn


# --- why --------------------------------------------------------------------------------------------------------------


def bottleneck(critical: Bottleneck) -> Iterator[Text]:
    """The sentence, and the critical circuit with the seconds of each of its nodes."""
    if not critical.circuit:
        return
    yield Text()
    yield Text.assemble(("bottleneck ", "bold"), critical.sentence)
    chain = " -> ".join(f"{name} {seconds_text(seconds)}" for name, seconds in critical.circuit)
    spans = "every step" if critical.steps == 1 else f"every {critical.steps} steps"
    yield Text.assemble(("critical circuit ", "bold"), f"{chain} -> {critical.circuit[0][0]}, {spans}")


def moves(report: Report) -> Iterator[Text]:
    """The order of pipeline stages, how trained weights get to the calls that read them, and slow inputs."""
    weights, inputs = moves_text(report.plan), inputs_text(report.plan, SLOW_INPUTS_SHARE)
    stages = pipelines_text(report.rows)
    if stages:
        yield Text.assemble(("pipelines ", "bold"), stages)
    if weights:
        yield Text.assemble(("new weights ", "bold"), weights)
    if inputs:
        yield Text.assemble(("inputs ", "bold"), f"of the seconds of calls: {inputs}")


def memory(report: Report, width: int) -> Iterator[Text]:
    """The worst moment of each group of devices as a bar of its parts, the largest first, and what they are."""
    bars = [bar for bar in report.memory if bar.parts]
    names = [devices_text(bar.devices) for bar in bars]
    label = max(map(len, names), default=0)
    if bars:
        yield Text("\nmemory at the worst moment", style="bold")
    for name, bar in zip(names, bars, strict=True):
        parts = sorted(bar.parts, key=lambda part: -part.nbytes)
        moment = f" in {bar.call}" if bar.call else ""
        full = f"{bar_text(bar)} of {bytes_text(bar.usable_bytes)}{moment}"
        yield Text.assemble((f"{name:<{label}} ", "dim"), _stack(parts, bar.usable_bytes), f" {full}", no_wrap=True)
        yield from _legend(parts, label + 1, width)
    if bars:
        yield Text(
            " " * (label + 1) + "cyan: resident; yellow: of the call that runs; magenta: margin; dots: free",
            style="dim",
        )


def _legend(parts: Sequence[MemoryPart], indent: int, width: int) -> Iterator[Text]:
    """The names of the largest parts, as many to a line as fit."""
    entries = [
        Text.assemble((SHADES[i % len(SHADES)], PART_COLOURS[part.kind]), f" {part.label} {bytes_text(part.nbytes)}")
        for i, part in enumerate(parts[:NAMED_PARTS])
    ]
    if len(parts) > NAMED_PARTS:
        entries.append(Text(f"and {len(parts) - NAMED_PARTS} smaller"))
    line = Text(" " * indent)
    for entry in entries:
        if len(line) > indent and len(line) + len(entry) > width:
            yield line
            line = Text(" " * indent)
        line.append_text(entry).append("  ")
    yield line


def _stack(parts: Sequence[MemoryPart], usable_bytes: int) -> Text:
    """One bar; the whole width is what a plan may fill."""
    picture, full = Text(), 0.0
    for i, part in enumerate(parts):
        before, full = round(full), full + part.nbytes / usable_bytes * MEMORY_CELLS
        picture.append(SHADES[i % len(SHADES)] * (round(full) - before), style=PART_COLOURS[part.kind])
    return picture.append("·" * max(0, MEMORY_CELLS - len(picture.plain)), style="dim")


# --- beside the plan --------------------------------------------------------------------------------------------------


def comparisons(report: Report) -> Table:
    """Other plans of the same run under the same costs."""
    table = titled("beside it, at the same costs")
    table.add_column("plan")
    table.add_column("period", justify="right")
    table.add_column("against this", justify="right")
    table.add_column("what it is")
    own = report.plan.period_seconds
    for other in report.findings.comparisons:
        if other.period_seconds is None:
            table.add_row(other.name, "-", other.without, other.note)
        else:
            change = change_text(other.period_seconds / own) if own > 0 else ""
            table.add_row(other.name, seconds_text(other.period_seconds), change, other.note)
    return table


def hints(changes: tuple[Hint, ...]) -> Table:
    """The gains of changes, each planned anew."""
    table = titled("what if")
    table.add_column("change")
    table.add_column("period", justify="right")
    table.add_column("samples/s", justify="right")
    for hint in sorted(changes, key=lambda hint: -hint.gain):
        if hint.period_seconds is None:
            table.add_row(hint.text, "-", "-")
        else:
            table.add_row(hint.text, seconds_text(hint.period_seconds), change_text(1 + hint.gain))
    return table


def options(alternatives: tuple[Alternative, ...]) -> Table:
    """The next-best options of one call, the best first."""
    table = titled("next-best options, the rest of the plan as it is")
    table.add_column("layout")
    for name in ("tokens", "seconds", "period"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights")
    table.add_column("why not")
    for one in alternatives:
        period = "does not fit" if one.period_seconds is None else seconds_text(one.period_seconds)
        numbers = (f"{one.option.tokens:,}", seconds_text(one.seconds), period)
        table.add_row(layout_text(one.option.layout), *numbers, option_text(one.option), one.reason)
    return table


def sweep(sizes: tuple[PlannedSize, ...], target_seconds: float | None) -> Table:
    """The scaling curve: period, speed-up per device, and the cheapest size that reaches the target."""
    table = titled("cluster sizes")
    for name in ("devices", "period", "bound", "device seconds", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("")
    planned = [size for size in sizes if size.period_seconds is not None]
    least = min((size.period_seconds * size.devices for size in planned if size.period_seconds), default=0.0)
    reached = cheapest(sizes, target_seconds)
    for size in sizes:
        if size.period_seconds is None:
            table.add_row(f"{size.devices:,}", "-", "-", "-", "-", size.note)
            continue
        area = size.period_seconds * size.devices
        mark = f"the least that reaches {seconds_text(target_seconds)}" if size is reached and target_seconds else ""
        bar = "█" * max(1, round(16 * least / area)) if area > 0 else ""
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


def measured(calls: tuple[MeasuredSeconds, ...]) -> Table:
    """Predicted against measured seconds of each call of a run."""
    table = titled("predicted against measured")
    table.add_column("call")
    for name in ("predicted", "measured", "spread", "predicted / measured", "steps"):
        table.add_column(name, justify="right")
    for call in calls:
        table.add_row(
            call.call,
            seconds_text(call.predicted_seconds),
            seconds_text(call.measured_seconds),
            percent_text(call.spread),
            ratio_text(call.predicted_seconds, call.measured_seconds),
            f"{call.count:,}",
        )
    return table


def titled(title: str) -> Table:
    """An empty table in the style of a report."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
