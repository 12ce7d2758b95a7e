"""The pictures of the HTML report as SVG text: timeline, memory, scaling curve, pairs of bars, small meshes.

Colours are classes of the page's style sheet, so both themes share them. Every mark has a title to hover over.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from realgraph.planner.report.content import MeasuredSeconds, PlannedSize
from realgraph.planner.report.format import bytes_text, devices_text, percent_text, seconds_text
from realgraph.planner.report.memory import MemoryBar
from realgraph.planner.report.schedule import Bar, Lane, Timeline

WIDTH, LABEL, RIGHT = 1040, 120, 70  # of a picture, of its names on the left, of its numbers on the right
LANE, GAP, AXIS = 40, 10, 26
CHARACTER_WIDTH = 7.0  # width of one, roughly
RESIDENT, ACTIVE = 8, 5  # colours of memory; what has none left is grey, or pale
MOST_LANES = 40
FOOT_HEIGHT = 20  # below the lanes: what the two halves are
MILLISECONDS_BELOW = 0.5  # seconds that a timeline shows


def svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """A picture that scales with the page. label: for those who do not see it."""
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _line(ends: tuple[float, float, float, float], kind: str) -> str:
    x1, y1, x2, y2 = ends
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(box: tuple[float, float, float, float], kind: str, radius: float = 0.0) -> str:
    x, y, width, height = box
    size = f'width="{width:.2f}" height="{height:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} rx="{radius:.0f}" class="{kind}"/>'


def fitting(text: str, width: float) -> str:
    """As much of a label as fits into so many pixels; '' where that says nothing."""
    room = int((width - 10) / CHARACTER_WIDTH)
    return text if len(text) <= room else f"{text[: room - 1]}…" if room >= 4 else ""


def ticks(most: float) -> tuple[float, ...]:
    """Round numbers from 0 up to `most`: four to nine of them."""
    if most <= 0:
        return (0.0,)
    rough = most / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return tuple(step * i for i in range(int(most / step * 1.0001) + 1))


# --- timeline ---------------------------------------------------------------------------------------------------------


def timeline_svg(timeline: Timeline) -> str:
    """Two periods, a row per group of devices, the idle share at the right, a line where the next step begins."""
    lanes, scale = timeline.lanes[:MOST_LANES], (WIDTH - LABEL - RIGHT) / timeline.window_seconds
    bottom = AXIS + len(lanes) * (LANE + GAP)
    parts = list(_time_axis(timeline, scale, bottom))
    for i, lane in enumerate(lanes):
        parts += _lane(lane, AXIS + i * (LANE + GAP), scale)
    middle = LABEL + timeline.period_seconds * scale
    parts.append(_line((middle, AXIS - 6, middle, bottom + FOOT_HEIGHT - GAP), "rule thin"))
    period = f"one period: {seconds_text(timeline.period_seconds)}"
    for i, text in enumerate((period, "the next one")):
        if fitting(text, middle - LABEL) == text:
            parts.append(_text(LABEL + (i + 0.5) * (middle - LABEL), bottom + FOOT_HEIGHT - GAP, text, "soft mid"))
    return svg(WIDTH, bottom + FOOT_HEIGHT, parts, f"timeline of two periods; {period}")


def _time_axis(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    for moment in ticks(timeline.window_seconds):
        x = LABEL + moment * scale
        yield _line((x, AXIS - 6, x, bottom - GAP), "line")
        text = f"{moment * 1e3:g} ms" if timeline.window_seconds < MILLISECONDS_BELOW else f"{moment:g} s"
        yield _text(x, 12, text, "soft mid")
    yield _text(WIDTH, 12, "idle", "soft end")


def _lane(lane: Lane, top: float, scale: float) -> Iterator[str]:
    window = WIDTH - LABEL - RIGHT
    name = fitting(devices_text(lane.devices), LABEL + 6)
    whole = f"{len(lane.devices)} device{'s' * (len(lane.devices) > 1)}: {devices_text(lane.devices)}"
    yield f"<g><title>{escape(whole)}</title>{_text(0, top + LANE / 2 + 4, name)}</g>"
    yield _rect((LABEL, top, window, LANE), "track", 4)
    yield from (_bar(bar, top, scale) for bar in lane.bars)
    yield _text(WIDTH, top + LANE / 2 + 4, percent_text(lane.idle), "soft end")


def _bar(bar: Bar, top: float, scale: float) -> str:
    x, width = LABEL + bar.start * scale, max(1.5, (bar.end - bar.start) * scale - 1.5)
    circuit = {True: ", on the critical circuit", False: ", has slack", None: ""}[bar.critical]
    hover = f"{bar.task}, step {bar.step}: {seconds_text(bar.end - bar.start)} from {bar.start:.3g} s{circuit}"
    parts = [f"<title>{escape(hover)}</title>", _rect((x, top, width, LANE), bar.kind, 4)]
    if bar.critical:
        parts.append(_rect((x, top + LANE - 4, width, 4), "ink"))
    label = fitting(bar.task.replace("reallocate:", "↻ "), width)
    if label:
        parts.append(_text(x + 7, top + LANE / 2 + 3, label, "on"))
    return f'<g class="bar" data-call="{escape(bar.task)}">{"".join(parts)}</g>'


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_svg(bars: Sequence[MemoryBar]) -> str:
    """A stacked bar per group of devices at its worst moment; the line is what a plan may fill, and so 100 %."""
    colours = shades(bars)
    most = max(max(bar.device_bytes, bar.bound_bytes) for bar in bars)
    scale = (WIDTH - LABEL - RIGHT) / most
    bottom = AXIS + len(bars) * (LANE + GAP)
    parts: list[str] = []
    for gigabytes in ticks(most / 1e9):
        x = LABEL + gigabytes * 1e9 * scale
        parts += [_line((x, AXIS - 6, x, bottom - GAP), "line"), _text(x, 12, f"{gigabytes:g} GB", "soft mid")]
    for i, bar in enumerate(bars):
        parts += _stack(bar, AXIS + i * (LANE + GAP), scale, colours)
    parts.append(_text(WIDTH, 12, "full", "soft end"))
    return svg(WIDTH, bottom + 2, parts, "memory of each group of devices at its worst moment")


def shades(bars: Sequence[MemoryBar]) -> dict[tuple[str, str], str]:
    """(kind, label) of a part -> the class of its colour: the same in all bars, the largest parts first."""
    most: dict[tuple[str, str], int] = {}
    for part in (part for bar in bars for part in bar.parts):
        most[part.kind, part.label] = max(part.nbytes, most.get((part.kind, part.label), 0))
    classes: dict[tuple[str, str], str] = {}
    for kind, letter, count in (("resident", "r", RESIDENT), ("active", "a", ACTIVE), ("margin", "m", 0)):
        ranked = sorted((key for key in most if key[0] == kind), key=lambda key: -most[key])
        classes |= {key: f"{letter}{min(rank, count)}" for rank, key in enumerate(ranked)}
    return classes


def _stack(bar: MemoryBar, top: float, scale: float, colours: Mapping[tuple[str, str], str]) -> Iterator[str]:
    whole = f"{len(bar.devices)} device{'s' * (len(bar.devices) > 1)}: {devices_text(bar.devices)}"
    name = _text(0, top + LANE / 2 + 4, fitting(devices_text(bar.devices), LABEL + 6))
    yield f"<g><title>{escape(whole)}</title>{name}</g>"
    yield _rect((LABEL, top, bar.device_bytes * scale, LANE), "track", 4)
    x = float(LABEL)
    for part in sorted(bar.parts, key=lambda part: (list(KINDS).index(part.kind), -part.nbytes)):
        width = part.nbytes * scale
        hover = f"{part.label}: {bytes_text(part.nbytes)}, {KINDS[part.kind]}"
        box = _rect((x, top, max(0.5, width - 1.5), LANE), colours[part.kind, part.label])
        yield f'<g class="bar"><title>{escape(hover)}</title>{box}</g>'
        x += width
    limit = LABEL + bar.usable_bytes * scale
    usable = f"usable: {bytes_text(bar.usable_bytes)} of {bytes_text(bar.device_bytes)}"
    yield f"<g><title>{usable}</title>{_line((limit, top - 4, limit, top + LANE + 4), 'rule')}</g>"
    share = bar.bound_bytes / bar.usable_bytes if bar.usable_bytes else 0.0
    yield _text(WIDTH, top + LANE / 2 + 4, percent_text(share), "soft end")


KINDS = {
    "resident": "all the time",
    "active": "while the call runs",
    "margin": "by which the peak may lie above the prediction",
}


# --- small pictures ---------------------------------------------------------------------------------------------------


def mesh_svg(devices: range, n_devices: int, kind: str) -> str:
    """The cluster as one strip, the mesh filled in."""
    width, height = 112.0, 14.0
    share = width / max(1, n_devices)
    box = (devices.start * share, 0.0, max(1.5, len(devices) * share), height)
    title = f"<title>devices {devices_text(devices)} of {n_devices}</title>"
    strip = _rect((0, 0, width, height), "track", 3) + _rect(box, kind, 3)
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img">{title}{strip}</svg>'


def bar_svg(share: float, kind: str) -> str:
    """One bar of a table."""
    width, height = 180.0, 12.0
    size = f'width="{width:.0f}" height="{height:.0f}"'
    bar = _rect((0, 0, max(1.5, share * width), height), kind, 3)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" {size} aria-hidden="true">{bar}</svg>'


def chip_svg(kind: str) -> str:
    """A square of a legend."""
    return f'<svg viewBox="0 0 11 11" aria-hidden="true">{_rect((0, 0, 11, 11), kind, 2)}</svg>'


# --- curves -----------------------------------------------------------------------------------------------------------


def scaling_svg(sizes: Sequence[PlannedSize], target_seconds: float | None) -> str:
    """Period and bound over the number of devices, both axes logarithmic; the target as a line."""
    planned = [(size.devices, size.period_seconds, size.lower_bound_seconds) for size in sizes if size.period_seconds]
    values = [value for _, period, bound in planned for value in (period, bound) if value and value > 0]
    low, high = min([*values, target_seconds or values[0]]) / 1.15, max([*values, target_seconds or values[0]]) * 1.15
    first, last = min(d for d, _, _ in planned), max(d for d, _, _ in planned)
    height, left, right, top, base = 310.0, 60.0, 24.0, 16.0, 264.0

    def x_of(devices: float) -> float:
        spread = math.log(last / first) or 1.0
        return left + (math.log(devices / first) / spread if last > first else 0.5) * (WIDTH - left - right)

    def y_of(seconds: float) -> float:
        return base - math.log(seconds / low) / math.log(high / low) * (base - top)

    parts = [_line((left, base, WIDTH - right, base), "line")]
    for seconds in log_ticks(low, high):
        parts += [_line((left, y_of(seconds), WIDTH - right, y_of(seconds)), "line")]
        parts += [_text(left - 8, y_of(seconds) + 4, f"{seconds:g} s", "soft end")]
    bounds = " ".join(f"{x_of(devices):.1f},{y_of(bound):.1f}" for devices, _, bound in planned if bound > 0)
    curve = " ".join(f"{x_of(devices):.1f},{y_of(period):.1f}" for devices, period, _ in planned if period)
    parts += [f'<polyline points="{bounds}" class="under"/>', f'<polyline points="{curve}" class="curve"/>']
    if target_seconds:
        y = y_of(target_seconds)
        parts += [_line((left, y, WIDTH - right, y), "dash"), _text(WIDTH - right, y - 6, "target", "soft end")]
    for devices, period, _ in planned:
        if period:
            hover = f"<title>{devices:,} devices: {seconds_text(period)} a step</title>"
            dot = f'<circle cx="{x_of(devices):.1f}" cy="{y_of(period):.1f}" r="5" class="generate"/>'
            parts += [f'<g class="bar">{hover}{dot}</g>', _text(x_of(devices), base + 20, f"{devices:,}", "soft mid")]
    parts.append(_text((left + WIDTH - right) / 2, height - 6, "devices", "soft mid"))
    return svg(WIDTH, height, parts, "period over the number of devices")


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers between the two: as few to a power of ten as give at least four, where that can be."""
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        numbers = tuple(factor * power for power in powers for factor in factors if low <= factor * power <= high)
        if len(numbers) >= 4:
            return numbers
    return numbers


def pairs_svg(calls: Sequence[MeasuredSeconds]) -> str:
    """Predicted above measured, call by call."""
    most = max(max(call.predicted_seconds, call.measured_seconds) for call in calls)
    scale = (WIDTH - LABEL - 2 * RIGHT) / most if most > 0 else 0.0
    parts: list[str] = []
    for i, call in enumerate(calls):
        top = i * (LANE + GAP)
        parts.append(_text(0, top + LANE / 2 + 4, fitting(call.call, LABEL + 6)))
        both = (("predicted", call.predicted_seconds, "other"), ("measured", call.measured_seconds, "generate"))
        for row, (what, seconds, kind) in enumerate(both):
            y, width = top + row * LANE / 2, max(1.5, seconds * scale)
            hover = f"<title>{escape(call.call)}, {what}: {seconds_text(seconds)}</title>"
            parts.append(f'<g class="bar">{hover}{_rect((LABEL, y, width, LANE / 2 - 2), kind, 3)}</g>')
            parts.append(_text(LABEL + width + 7, y + LANE / 4 + 4, seconds_text(seconds), "soft"))
    return svg(WIDTH, len(calls) * (LANE + GAP), parts, "predicted and measured seconds of each call")
