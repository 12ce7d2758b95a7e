"""A plan report as one HTML page: no script, no external resource, light and dark. See `page.html` for its style."""

from collections.abc import Iterator, Sequence
from html import escape

from realgraph.planner.advise.sweep import Hint
from realgraph.planner.report.content import CallRow, Comparison, Report
from realgraph.planner.report.format import (
    axes_text,
    axes_used,
    bytes_text,
    change_text,
    devices_text,
    dollars_text,
    gap_text,
    percent_text,
    rate_text,
    seconds_text,
    words,
)
from realgraph.planner.report.markup import PageContent, document, legend, section, table
from realgraph.planner.report.svg import (
    MOST_LANES,
    bar_svg,
    memory_svg,
    mesh_svg,
    pairs_svg,
    scaling_svg,
    shades,
    timeline_svg,
)
from realgraph.planner.report.text import (
    bar_text,
    batches_text,
    bound_text,
    cheapest,
    inputs_text,
    moves_text,
    pipelines_text,
    predicted_text,
    table_legend,
    weights_text,
)

LARGEST_PARTS = 8  # parts of a memory bar that its legend names


def page(report: Report) -> str:
    """The whole file."""
    return document(
        PageContent(
            title=report.title,
            what="plan",
            facts=tuple(_facts(report)),
            tiles=tuple(_tiles(report)),
            sections=tuple(_sections(report)),
            footer=tuple(_footer(report)),
        )
    )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    for i, (name, text) in enumerate(report.facts):
        yield ("run", text) if i == 0 else (name, text)


def _tiles(report: Report) -> Iterator[tuple[str, str]]:
    """The few numbers that matter most, and what they are."""
    plan, findings = report.plan, report.findings
    yield seconds_text(plan.period_seconds), f"period: seconds a step, {predicted_text(report)}"
    yield rate_text(report.samples_per_second), "samples a second"
    yield gap_text(plan.gap), f"proven gap; lower bound {seconds_text(plan.lower_bound_seconds)}"
    busiest = report.bottleneck.devices
    yield percent_text(report.bottleneck.load), f"load of device{'s' * (not busiest.isdigit())} {busiest}"
    slower = [other for other in findings.comparisons if other.period_seconds]
    if slower and slower[0].period_seconds:
        yield change_text(slower[0].period_seconds / plan.period_seconds), f"period of the {slower[0].name} plan"
    if findings.price is not None:
        yield dollars_text(findings.price.per_run), f"a run of {findings.price.steps:,} steps"


def _sections(report: Report) -> Iterator[str]:
    findings = report.findings
    if report.bottleneck.circuit:
        yield section("What bounds the period", _bottleneck(report))
    if any(lane.bars for lane in report.timeline.lanes):
        kinds = dict.fromkeys(bar.kind for lane in report.timeline.lanes for bar in lane.bars)
        known = legend([*((kind, kind) for kind in kinds), ("ink", "edge below: on the critical circuit")])
        picture = f'<div class="wide">{timeline_svg(report.timeline)}</div>'
        yield section("Timeline: two periods", picture + _more_lanes(report) + known)
    yield section("Allocation", _allocation(report))
    if any(bar.parts for bar in report.memory):
        yield section("Memory at the worst moment", _memory(report))
    if findings.comparisons:
        yield section("Beside it, at the same costs", _comparisons(report))
    if findings.hints:
        rows = [_hint(hint) for hint in sorted(findings.hints, key=lambda hint: -hint.gain)]
        yield section("What if", table(("change", "period", "samples/s"), rows))
    if any(size.period_seconds for size in findings.sweep):
        yield section("Cluster sizes", _sizes(report))
    if findings.measured:
        known = legend([("other", "predicted"), ("generate", "measured: median of the run's steps")])
        yield section("Predicted against measured", f'<div class="wide">{pairs_svg(findings.measured)}</div>{known}')
    remarks = [*findings.notes, *findings.doubts]
    if remarks:
        items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
        yield section("Notes and doubts", f'<ul class="plain">{items}</ul>')


def _more_lanes(report: Report) -> str:
    hidden = report.timeline.lanes[MOST_LANES:]
    n_devices = sum(len(lane.devices) for lane in hidden)
    return f'<p class="note">{len(hidden)} more groups with {n_devices:,} devices are not drawn.</p>' if hidden else ""


def _hint(hint: Hint) -> tuple[str, str, str]:
    if hint.period_seconds is None:
        return hint.text, "", ""
    change = _change(1 / (1 + hint.gain), change_text(1 + hint.gain))
    return hint.text, seconds_text(hint.period_seconds), change


def _bottleneck(report: Report) -> str:
    bottleneck = report.bottleneck
    arrow = '<li class="to" aria-hidden="true">&#8594;</li>'
    nodes = arrow.join(
        f"<li>{escape(name)} <b>{seconds_text(seconds)}</b></li>" for name, seconds in bottleneck.circuit
    )
    spans = "again, one step later" if bottleneck.steps == 1 else f"again, {bottleneck.steps} steps later"
    again = f'{arrow}<li class="to">{escape(bottleneck.circuit[0][0])} {spans}</li>'
    return f'<p class="why">{escape(bottleneck.sentence)}.</p><ol class="circuit">{nodes}{again}</ol>'


def _allocation(report: Report) -> str:
    axes = axes_used(row.allocation.layout for row in report.rows)
    heads = ("call", "on the cluster", "on devices", "/".join(axes), "weights", "micro-batches")
    rows = [_allocation_row(row, report, axes) for row in report.rows]
    calls = table((*heads, "seconds", "share", "slack", "memory", "most of it"), rows)
    known = "; ".join((*table_legend(report), "slack: what a call may take longer before the period grows"))
    return calls + "".join(f'<p class="note">{escape(line)}.</p>' for line in (*_moves(report), known))


def _moves(report: Report) -> Iterator[str]:
    """The order of pipeline stages, and how weights and data get to where they are used."""
    weights, inputs, stages = moves_text(report.plan), inputs_text(report.plan), pipelines_text(report.rows)
    if stages:
        yield f"Pipelines: {stages}"
    if weights:
        yield f"New weights: {weights}"
    if inputs:
        yield f"To bring what calls read, of their seconds: {inputs}"


def _allocation_row(row: CallRow, report: Report, axes: Sequence[str]) -> tuple[str, ...]:
    allocation = row.allocation
    mesh = allocation.layout.mesh
    return (
        f"\0{'<b>' * row.critical}{escape(row.call)}{'</b>' * row.critical}",
        f"\0{mesh_svg(mesh.devices, report.n_devices, row.kind)}",
        devices_text(mesh.devices),
        axes_text(allocation.layout, axes),
        weights_text(row),
        batches_text(row),
        seconds_text(allocation.seconds),
        percent_text(row.share),
        "none" if row.slack_seconds <= 1e-3 * report.plan.period_seconds else seconds_text(row.slack_seconds),
        bytes_text(allocation.peak_bytes),
        words(allocation.worst_term),
    )


def _memory(report: Report) -> str:
    bars = [bar for bar in report.memory if bar.parts]
    colours, legends = shades(bars), []
    for bar in bars:
        largest = sorted(bar.parts, key=lambda part: -part.nbytes)[:LARGEST_PARTS]
        parts = [(colours[part.kind, part.label], f"{part.label} {bytes_text(part.nbytes)}") for part in largest]
        while_text = f", while {bar.call} runs" if bar.call else ""
        where = f"device{'s' * (len(bar.devices) > 1)} {devices_text(bar.devices)}"
        head = f"{where}{while_text}: {bar_text(bar)}"
        legends.append(legend(parts, f"<b>{escape(head)}</b>"))
    note = (
        "Cool colours lie there all the time, warm ones while the call runs; grey is the margin, by which the peak may "
        f"lie above the prediction (memory.quantile: {report.quantile:g}); the line is what a plan may fill."
    )
    return f'<div class="wide">{memory_svg(bars)}</div>{"".join(legends)}<p class="note">{note}</p>'


def _comparisons(report: Report) -> str:
    """This plan and the others, each with a bar as long as its period."""
    own, others = report.plan.period_seconds, report.findings.comparisons
    longest = max([own, *(other.period_seconds or 0.0 for other in others)])
    rows = [("\0<b>this plan</b>", f"\0{bar_svg(own / longest, 'generate')}", seconds_text(own), "", "")]
    rows += [_other(other, own, longest) for other in others]
    return table(("plan", "", "period", "against this", "what it is"), rows)


def _other(other: Comparison, own: float, longest: float) -> tuple[str, str, str, str, str]:
    if other.period_seconds is None:
        return other.name, "", "", other.without, other.note
    ratio, bar = other.period_seconds / own if own > 0 else 1.0, bar_svg(other.period_seconds / longest, "other")
    change = _change(ratio, change_text(ratio))
    return other.name, f"\0{bar}", seconds_text(other.period_seconds), change, other.note


def _change(ratio: float, text: str) -> str:
    """Coloured by whether the period is longer."""
    kind = "worse" if ratio > 1.0005 else "better" if ratio < 0.9995 else ""
    return f'\0<span class="{kind}">{escape(text)}</span>'


def _sizes(report: Report) -> str:
    findings = report.findings
    reached = cheapest(findings.sweep, findings.target_seconds)
    least = min((size.period_seconds * size.devices for size in findings.sweep if size.period_seconds), default=0.0)
    rows = []
    for size in sorted(findings.sweep, key=lambda size: size.devices):
        mark = "the least that reaches the target" if size is reached else size.note
        if size.period_seconds:
            area = size.period_seconds * size.devices
            bound = seconds_text(size.lower_bound_seconds)
            numbers = (seconds_text(size.period_seconds), bound, f"{area:,.0f}", percent_text(least / area))
        else:
            numbers = ("no plan", "", "", "")
        rows.append((f"{size.devices:,}", *numbers, mark))
    curve = f'<div class="wide">{scaling_svg(findings.sweep, findings.target_seconds)}</div>'
    known = legend([("generate", "period"), ("other", "dotted: lower bound")])
    return curve + known + table(("devices", "period", "bound", "device seconds", "efficiency", ""), rows)


def _footer(report: Report) -> Iterator[str]:
    plan = report.plan
    yield f"Lower bound {escape(bound_text(plan))}."
    made_for = ", ".join(
        f"{part} <code>{escape(value)}</code>"
        for part in ("graph", "workload", "cluster", "costs")
        if (value := getattr(plan.hashes, part))
    )
    yield f"Made for {made_for}. Predictions of a cost model, not measurements."
