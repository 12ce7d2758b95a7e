"""Curves over the steps of a run: one small picture for each metric."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import isfinite

from msgspec import Struct

from realgraph.planner.report.svg import svg
from realgraph.runtime.master.observer import EvalRecord, StepRecord

MOST_POINTS = 240  # of a curve: more steps are drawn as the means of as many groups
WIDTH, HEIGHT, LEFT, TOP, BASE = 330.0, 150.0, 64.0, 30.0, 126.0
# Metrics that stand at the top of a report, by the last part of their names, in this order.
MAIN = (
    *("reward", "loss", "accuracy", "kl", "approx_kl", "entropy", "grad_norm", "new_tokens"),
    *("clip_fraction", "masked_share", "logprob_gap"),
)
SECONDS, TOKENS, AGE = "seconds a step", "trained tokens a second", "staleness/mean"
TRAINED = "batch/trained_tokens"  # a metric: of all samples that a step trains on


class Curve(Struct, frozen=True):
    """Values of a metric by step, steps rising; at least one."""

    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]

    @property
    def varies(self) -> bool:
        return any(before[1] != after[1] for before, after in pairwise(self.points))


def curves_of(steps: Sequence[StepRecord]) -> dict[str, Curve]:
    """Every metric of the steps, by name; seconds and speed first. Values that are no numbers are left out."""
    series: dict[str, list[tuple[float, float]]] = {SECONDS: [], TOKENS: []}
    for step in steps:
        series[SECONDS].append((step.step, step.seconds))
        if step.seconds > 0 and step.metrics.get(TRAINED):
            series[TOKENS].append((step.step, step.metrics[TRAINED] / step.seconds))
        for name, value in step.metrics.items():
            series.setdefault(name, []).append((step.step, value))
    return _curves(series)


def evaluation_curves(evaluations: Sequence[EvalRecord]) -> dict[str, Curve]:
    """Every metric of the evaluations."""
    series: dict[str, list[tuple[float, float]]] = {}
    for evaluation in evaluations:
        for name, value in evaluation.metrics.items():
            series.setdefault(name, []).append((evaluation.step, value))
    return _curves(series)


def main_curves(curves: Mapping[str, Curve]) -> list[Curve]:
    """The curves that say how the run went."""
    names = [name for last in MAIN for name in curves if name.rpartition("/")[2] == last]
    chosen = [curves[name] for name in (*names, SECONDS, TOKENS, AGE) if name in curves]
    return [curve for curve in chosen if curve.varies]


def curve_svg(curve: Curve) -> str:
    """The curve, its name, its last value, and the ends of both axes."""
    values = [value for _, value in curve.points]
    low, high = min(values), max(values)
    first, final = curve.points[0][0], curve.points[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / (final - first) if final > first else 0.5
        up = (value - low) / (high - low) if high > low else 0.5
        return LEFT + across * (WIDTH - LEFT - 8), BASE - up * (BASE - TOP)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve.points))
    x, y = place(*curve.points[-1])
    labels = [
        (LEFT, 14.0, curve.name, ""),
        (WIDTH - 8, 14.0, number_text(curve.last), "end"),
        (LEFT - 6, TOP + 4, number_text(high), "soft end"),
        (LEFT, BASE + 16, f"{first:,.0f}", "soft"),
        (WIDTH - 8, BASE + 16, f"step {final:,.0f}", "soft end"),
    ]
    if high > low:
        labels.append((LEFT - 6, BASE + 4, number_text(low), "soft end"))
    parts = [
        f'<line x1="{LEFT}" y1="{BASE}" x2="{WIDTH - 8}" y2="{BASE}" class="line"/>',
        f'<line x1="{LEFT}" y1="{TOP}" x2="{WIDTH - 8}" y2="{TOP}" class="line"/>',
        f'<polyline points="{line}" class="curve"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="generate"/>',
        *(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>' for x, y, text, kind in labels),
    ]
    return svg(WIDTH, HEIGHT, parts, f"{curve.name} over the steps; last {number_text(curve.last)}")


def number_text(value: float) -> str:
    """Three significant digits: `0.832`, `12.4`, `1,980`, `3.1e-07`."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _curves(series: Mapping[str, Iterable[tuple[float, float]]]) -> dict[str, Curve]:
    known = {name: [point for point in points if isfinite(point[1])] for name, points in series.items()}
    return {name: Curve(name, _thinned(points)) for name, points in known.items() if points}


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most MOST_POINTS: the means of neighbours, at the last step of each group."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    ends = [round(i * len(points) / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    groups = (points[start:end] for start, end in pairwise(ends))
    return tuple((group[-1][0], sum(value for _, value in group) / len(group)) for group in groups)
