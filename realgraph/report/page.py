"""The report of a run as one HTML page: how it went, how far the plan was from it, and what it said."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from realgraph.plan.view.measured import measured_calls
from realgraph.planner.report.format import bytes_text, change_text, counted, percent_text, rate_text, seconds_text
from realgraph.planner.report.markup import PageContent, document, legend, section, table
from realgraph.planner.report.svg import MOST_LANES, pairs_svg, timeline_svg
from realgraph.report.curves import TRAINED, Curve, curve_svg, curves_of, evaluation_curves, main_curves, number_text
from realgraph.report.history import RunHistory
from realgraph.report.timelines import timelines
from realgraph.runtime.master.observer import Transcript
from realgraph.runtime.wire.metrics import PEAK_BYTES

SHOWN_SAMPLES = 12  # of training, and of evaluations, the last ones
OTHERS = "of the run"  # metrics that belong to no call


def page(history: RunHistory) -> str:
    """The whole file."""
    curves = curves_of(history.steps)
    return document(
        PageContent(
            title=history.job.name,
            what="run",
            facts=tuple(_facts(history)),
            tiles=tuple(_tiles(history, curves)),
            sections=tuple(_sections(history, curves)),
            footer=(escape(f"From {history.folder.root}."),),
        )
    )


def _facts(history: RunHistory) -> Iterator[tuple[str, str]]:
    job, cluster = history.job, history.job.cluster
    yield "graph", f"{job.graph.name}: {', '.join(job.graph.calls)}"
    yield "devices", f"{counted(cluster.n_devices, 'device')} of kind {cluster.kind}"
    if job.staleness:
        yield "staleness", f"at most {counted(job.staleness, 'step')}"
    if history.starts:
        first = history.starts[0]
        again = len(history.starts) - 1
        text = f"{datetime.fromtimestamp(first.time, UTC):%Y-%m-%d %H:%M} UTC"
        yield "started", text + f", and {counted(again, 'time')} again" * (again > 0)
    yield "state", _state(history)
    if history.checkpoints:
        yield (
            "newest checkpoint",
            f"after {counted(history.checkpoints[-1].step, 'step')}: {history.checkpoints[-1].path}",
        )


def _state(history: RunHistory) -> str:
    if history.end is None:
        return "it has not ended, or was killed"
    return history.end.reason if history.end.ok else f"failed: {history.end.reason}"


def _tiles(history: RunHistory, curves: Mapping[str, Curve]) -> Iterator[tuple[str, str]]:
    done = history.steps[-1].step + 1 if history.steps else 0
    yield f"{done:,}", f"of {counted(history.job.steps, 'step')} done"
    if history.steady:
        whole = measured_calls(history.read)[0]
        change = change_text(whole.measured_seconds / whole.predicted_seconds) if whole.predicted_seconds else ""
        yield seconds_text(whole.measured_seconds), "a step, median" + f"; against the plan: {change}" * bool(change)
        tokens = sum(step.metrics.get(TRAINED, 0.0) for step in history.steady)
        seconds = sum(step.seconds for step in history.steady)
        if tokens and seconds > 0:
            yield rate_text(tokens / seconds), "trained tokens a second"
    first = {curve.name.rpartition("/")[2]: curve for curve in reversed(main_curves(curves))}
    for curve in [*first.values()][::-1][:2]:
        yield number_text(curve.last), f"{curve.name}; {number_text(curve.points[0][1])} at first"
    best = [one for one in history.evaluations if one.best]
    if best and best[-1].metrics:
        name, value = next(iter(best[-1].metrics.items()))
        yield number_text(value), f"{name} of the best evaluation, after {counted(best[-1].step, 'step')}"


def _sections(history: RunHistory, curves: Mapping[str, Curve]) -> Iterator[str]:
    main = main_curves(curves)
    if main:
        yield section("How it went", _pictures(main))
    scores = evaluation_curves(history.evaluations)
    if scores:
        yield section("Evaluations", _varying([*scores.values()]))
    if history.steady:
        known = legend([("other", "predicted"), ("generate", f"measured: median of {len(history.steady)} steps")])
        pairs = pairs_svg(measured_calls(history.read))
        yield section("Predicted against measured", f'<div class="wide">{pairs}</div>{known}')
    yield from _timelines(history)
    memory = _memory(history)
    if memory:
        heads = ("call", "device memory at most", "predicted", "measured against predicted")
        note = "On CPUs the measured bytes are those of the process, with what its libraries take."
        yield section("Memory", table(heads, memory) + f'<p class="note">{note}</p>')
    yield from _samples(history.transcripts)
    if curves:
        yield section("All metrics", "".join(_groups(history, curves)))


def _pictures(curves: Sequence[Curve]) -> str:
    return f'<div class="curves">{"".join(curve_svg(curve) for curve in curves)}</div>'


def _timelines(history: RunHistory) -> Iterator[str]:
    planned, measured = timelines(history)
    if measured is None:
        return
    parts = []
    for name, one in (("as planned", planned), ("as it was", measured)):
        if one is not None:
            hidden = len(one.lanes) - MOST_LANES
            more = f'<p class="note">{counted(hidden, "more lane")} not drawn.</p>' if hidden > 0 else ""
            parts.append(f'<p class="note">{name}</p><div class="wide">{timeline_svg(one)}</div>{more}')
    shown = [one for one in (planned, measured) if one is not None]
    kinds = dict.fromkeys(bar.kind for one in shown for lane in one.lanes for bar in lane.bars)
    names = {"other": "functions, checkpoints, evaluations"}
    yield section("Timeline: two steps", "".join(parts) + legend([(kind, names.get(kind, kind)) for kind in kinds]))


def _memory(history: RunHistory) -> list[tuple[str, ...]]:
    """The most bytes that each call had on a device, beside the plan's."""
    rows: list[tuple[str, ...]] = []
    for call, allocation in history.job.plan.allocations.items():
        name = f"{call}/{PEAK_BYTES}"
        most = max((step.metrics[name] for step in history.planned if name in step.metrics), default=0.0)
        if most:
            share = percent_text(most / allocation.peak_bytes) if allocation.peak_bytes else ""
            rows.append((call, bytes_text(most), bytes_text(allocation.peak_bytes), share))
    return rows


def _samples(transcripts: Sequence[Transcript]) -> Iterator[str]:
    """The last samples of training and of evaluations, the newest first."""
    for split, title in (("train", "Samples of training"), ("eval", "Samples of evaluations")):
        last = [one for one in transcripts if one.split == split][-SHOWN_SAMPLES:]
        if last:
            rows = "".join(
                f'<tr><td class="n">{one.step:,}</td><td class="text">{escape(one.text)}</td></tr>'
                for one in last[::-1]
            )
            heads = '<tr><th class="n">step</th><th>sample</th></tr>'
            yield section(title, f"<table><thead>{heads}</thead><tbody>{rows}</tbody></table>")


def _groups(history: RunHistory, curves: Mapping[str, Curve]) -> Iterator[str]:
    """Every metric, call by call."""
    calls = [*history.job.graph.calls, OTHERS]
    groups: dict[str, list[Curve]] = {call: [] for call in calls}
    for name, curve in curves.items():
        groups[name.partition("/")[0] if name.partition("/")[0] in groups else OTHERS].append(curve)
    for call, members in groups.items():
        if members:
            head = f"<summary>{escape(call)}: {counted(len(members), 'metric')}</summary>"
            yield f"<details>{head}{_varying(members)}</details>"


def _varying(curves: Sequence[Curve]) -> str:
    """Pictures of those that vary, and the values of the others."""
    fixed = [f"{curve.name} {number_text(curve.last)}" for curve in curves if not curve.varies]
    note = f'<p class="note">always: {escape("; ".join(fixed))}</p>' if fixed else ""
    return _pictures([curve for curve in curves if curve.varies]) + note
