"""A plan's timeline as a Chrome trace: opens in ui.perfetto.dev and chrome://tracing. A row per group of devices.

Reallocations are joined to their calls by flow arrows; the memory at each group's worst moment is a counter.
Source: Trace Event Format (Google), "JSON Object Format"; times in microseconds.
"""

from itertools import chain

import msgspec

from realgraph.planner.plan.plan import REALLOCATION
from realgraph.planner.plan.stages import layer_ranges
from realgraph.planner.report.content import Report
from realgraph.planner.report.format import devices_text
from realgraph.planner.report.schedule import Bar

Event = dict[str, object]
MICROSECONDS = 1e6
COLOURS = {"generate": "thread_state_runnable", "inference": "good", "train": "bad", "reallocate": "yellow"}


def trace_json(report: Report) -> str:
    """The whole file."""
    events: list[Event] = [_named("process_name", 0, f"plan of {report.title}")]
    for row, lane in enumerate(report.timeline.lanes):
        events.append(_named("thread_name", row, f"devices {devices_text(lane.devices)}"))
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": row, "args": {"sort_index": row}})
        events += [_slice(bar, row, report) for bar in lane.bars]
        events += [event for bar in lane.bars for event in _arrow(bar, row, report)]
    events += _counters(report)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"period_seconds": report.plan.period_seconds, "lower_bound": report.plan.lower_bound_seconds},
    }
    return msgspec.json.encode(document).decode() + "\n"


def _named(what: str, row: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}


def _slice(bar: Bar, row: int, report: Report) -> Event:
    arguments: dict[str, object] = {"step": bar.step, "critical": bar.critical}
    allocation = report.plan.allocations.get(bar.task)
    if allocation is not None:
        layout = allocation.layout
        arguments |= {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "peak_bytes": allocation.peak_bytes}
        if layout.stages:
            arguments["layers"] = [devices_text(chain(*ranges)) for ranges in layer_ranges(layout.stages)]
    if bar.kind == "reallocate":
        call = bar.task.removeprefix(REALLOCATION)
        arguments["transport"] = report.plan.reallocation_transport.get(call, "device")
    return {
        "name": bar.task,
        "cat": bar.kind,
        "ph": "X",
        "pid": 0,
        "tid": row,
        "ts": bar.start * MICROSECONDS,
        "dur": (bar.end - bar.start) * MICROSECONDS,
        "cname": COLOURS[bar.kind],
        "args": arguments,
    }


def _arrow(bar: Bar, row: int, report: Report) -> list[Event]:
    """From the end of a reallocation to the start of its call in the same step, on the call's first group."""
    target = bar.task.removeprefix(REALLOCATION)
    if bar.kind != "reallocate":
        return []
    for place, lane in enumerate(report.timeline.lanes):
        for other in lane.bars:
            if other.task == target and other.step == bar.step and other.start >= bar.end - 1e-9:
                link: Event = {"name": "weights", "cat": "flow", "id": f"{target}:{bar.step}:{row}", "pid": 0}
                end = {"ph": "f", "bp": "e", "tid": place, "ts": other.start * MICROSECONDS}
                return [{**link, "ph": "s", "tid": row, "ts": bar.start * MICROSECONDS}, {**link, **end}]
    return []


def _counters(report: Report) -> list[Event]:
    """Memory of each group: resident bytes all the time, as stacked counters at the window's two ends."""
    events: list[Event] = []
    for bar in report.memory:
        name = f"memory of devices {devices_text(bar.devices)} (GB, worst moment)"
        values = {part.label: part.nbytes / 1e9 for part in bar.parts}
        events += [
            {"name": name, "ph": "C", "pid": 0, "ts": moment * MICROSECONDS, "args": values}
            for moment in (0.0, report.timeline.window_seconds)
        ]
    return events
