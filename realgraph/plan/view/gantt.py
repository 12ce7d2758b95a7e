"""A plan's timeline as a Gantt chart of characters: one row per group of devices with equal orders, two periods."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from realgraph.planner.report.format import devices_text, percent_text, seconds_text
from realgraph.planner.report.schedule import Bar, Kind, Lane, Timeline

COLOURS: dict[Kind, str] = {"generate": "blue", "inference": "green", "train": "magenta", "reallocate": "yellow"}
LABEL_CHARACTERS = 24  # at most, for a group's devices
IDLE_CHARACTERS = 11  # of the last column
MOST_LANES = 24  # further groups are counted, not drawn
MOST_CHARACTERS, CRITICAL, SLACK, NOTHING = 160, "━", "─", "·"


def gantt(timeline: Timeline) -> Iterator[RenderableType]:
    """The chart with its scale and legend; nothing where the plan has no schedule."""
    if any(lane.bars for lane in timeline.lanes):
        yield Text("\ntimeline of two periods", style="bold")
        yield Gantt(timeline)


class Gantt:
    """Draws itself at the width that it is given."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lanes = self._timeline.lanes
        shown = lanes[:MOST_LANES]
        names = [_shortened(devices_text(lane.devices)) for lane in shown]
        label = max(map(len, names), default=0)
        width = max(20, min(options.max_width, MOST_CHARACTERS) - label - IDLE_CHARACTERS - 2)
        for name, lane in zip(names, shown, strict=True):
            row = Text(no_wrap=True).append(f"{name:<{label}} ", style="dim")
            row.append_text(lane_text(lane, self._timeline.window_seconds, width))
            row.append(f" {percent_text(lane.idle):>5} idle", style="dim")
            yield row
        yield Text(" " * (label + 1) + scale_text(self._timeline, width), style="dim", no_wrap=True)
        hidden = sum(len(lane.devices) for lane in lanes[MOST_LANES:])
        more = f"; {len(lanes) - MOST_LANES} more groups with {hidden} devices" if hidden else ""
        legend = f"{CRITICAL} on the critical circuit, {SLACK} has slack, {NOTHING} idle{more}"
        yield Text(" " * (label + 1) + legend, style="dim")


def lane_text(lane: Lane, window_seconds: float, width: int) -> Text:
    """One row of exactly `width` characters. A bar that rounds to nothing still gets one, where there is room."""
    text, filled = Text(), 0
    for bar in lane.bars:
        first = max(filled, round(bar.start / window_seconds * width))
        last = min(width, max(first + 1, round(bar.end / window_seconds * width)))
        if last <= first:
            continue
        text.append(NOTHING * (first - filled), style="dim")
        text.append(bar_text(bar, last - first), style=_style(bar))
        filled = last
    return text.append(NOTHING * (width - filled), style="dim")


def bar_text(bar: Bar, width: int) -> str:
    """The call's name on a line that says whether it is critical; an edge where it begins."""
    line = CRITICAL if bar.critical else SLACK
    name = bar.task.replace("reallocate:", "↻")
    return ("▏" + name[: max(0, width - 2)]).ljust(width, line)[:width]


def scale_text(timeline: Timeline, width: int) -> str:
    """`0 s ... 67.3 s ... 135 s`, each under its moment."""
    line = [" "] * (width + 10)
    for share, seconds in ((0.0, 0.0), (0.5, timeline.period_seconds), (1.0, timeline.window_seconds)):
        text = "0 s" if not seconds else seconds_text(seconds)
        first = min(round(share * width), width + 10 - len(text))
        line[first : first + len(text)] = text
    return "".join(line).rstrip()


def _style(bar: Bar) -> str:
    """Filled where the call is critical, so that what bounds the step stands out."""
    return f"bold black on {COLOURS[bar.kind]}" if bar.critical else COLOURS[bar.kind]


def _shortened(text: str) -> str:
    return text if len(text) <= LABEL_CHARACTERS else text[: LABEL_CHARACTERS - 1] + "…"
