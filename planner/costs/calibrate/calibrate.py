"""Fits of costs to measurements: factors of a cost model, factors of phases, and the merging of tables. Pure.

Everything is fitted in logarithms, so that a call that is twice as long as predicted weighs as much as one that takes
half as long, and with a prior, so that few measurements move little.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.request.cost_table import CostTable, MeasuredCall, Phase, PhaseFactor

Vector = NDArray[np.float64]
Predict = Callable[[EfficiencyFactors], float]

PRIOR_ERROR = 0.7  # natural log: a phase may be twice or half of what was predicted before anything is known
CALL_SPREAD, ASSUMED_CALLS = 0.15, 2  # natural log: how far calls lie from their phase, and what that weighs
LEAST_ERROR = 0.03  # of one measurement: no run repeats itself more closely
DERIVATIVE_STEP = 1e-3  # of the logarithms, for derivatives
FIT_ITERATIONS = 60
FIXED_COST_PART = 0.05  # of the shortest measurement: where a fixed cost begins
NO_FIXED_SECONDS = 1e-9  # seconds: the logarithm of a fixed cost that is none


# --- factors of the cost model ----------------------------------------------------------------------------------------


class Point(Struct, frozen=True):
    """One measurement of what the cost model predicts: `predict` by given factors, and what it really took, seconds."""

    predict: Predict
    seconds: float
    error: float = 0.1  # natural log: how close a formula is expected to come


class Fit(Struct, frozen=True):
    """Fitted factors, and the standard deviation of ln(measured / predicted) that is left."""

    costs: EfficiencyFactors
    error: float


def fit_costs(start: EfficiencyFactors, free: Sequence[str], points: Sequence[Point], prior: float = 2.0) -> Fit:
    """The `free` fields of `start` moved so that the points are met: Levenberg and Marquardt's least squares in the
    logarithms of fields and seconds (Marquardt 1963).

    prior: standard deviation of the fields' logarithms around `start`, which keeps what the points do not tell where it
    was. A field of None or 0 in `start` begins, where it is of seconds, at a small part of the shortest point's, else
    at the rate of memory, of links' operations at that of all-reduces.
    """
    least = min((point.seconds for point in points), default=1.0)
    begin = np.array([math.log(_start(start, name, least)) for name in free])
    measured = np.array([math.log(point.seconds) for point in points])
    weights = np.array([1 / point.error for point in points])

    def residuals(at: Vector) -> Vector:
        costs = _with(start, free, at)
        predicted = np.array([math.log(max(point.predict(costs), NO_FIXED_SECONDS)) for point in points])
        return np.concatenate([weights * (predicted - measured), (at - begin) / prior])

    fitted = _least_squares(residuals, begin)
    left = residuals(fitted)[: len(points)]
    spread = math.sqrt(float(np.mean((left / weights) ** 2))) if len(points) else 0.0
    return Fit(_with(start, free, fitted), spread)


def _start(costs: EfficiencyFactors, name: str, least_seconds: float) -> float:
    value = asdict(costs)[name]
    if value:
        return float(value)
    if name.endswith("seconds"):
        return least_seconds * FIXED_COST_PART
    return costs.link if name in ("gather", "scatter", "exchange", "p2p") else costs.memory


def _with(costs: EfficiencyFactors, names: Sequence[str], logs: Vector) -> EfficiencyFactors:
    return replace(costs, **{name: math.exp(log) for name, log in zip(names, logs.tolist(), strict=True)})


def _least_squares(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """The least sum of squares from `start`, damped so that no step makes it larger."""
    at, residual = start, residuals(start)
    damping = 1e-2
    for _ in range(FIT_ITERATIONS):
        slope = np.stack(
            [(residuals(at + move) - residual) / DERIVATIVE_STEP for move in DERIVATIVE_STEP * np.eye(len(at))], axis=1
        )
        normal, gradient = slope.T @ slope, slope.T @ residual
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
        there = at + np.clip(step, -1.0, 1.0)
        tried = residuals(there)
        if tried @ tried < residual @ residual:
            done = residual @ residual - tried @ tried < 1e-8
            at, residual, damping = there, tried, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return at


# --- factors of phases ------------------------------------------------------------------------------------------------


def phase_factors(measured: Iterable[MeasuredCall]) -> dict[Phase, PhaseFactor]:
    """Factors by which the calls of each phase take longer than the shipped factors say, with the error that is left.

    The mean of ln(measured / predicted), weighted by each call's own error, with a prior at 0 of standard deviation
    PRIOR_ERROR; error: the deviation of single calls around it, and how uncertain it is itself. Calls differ by
    CALL_SPREAD until several have been seen.
    """
    by_phase: dict[Phase, list[MeasuredCall]] = {}
    for call in measured:
        if call.seconds > 0 and call.predicted_seconds > 0:
            by_phase.setdefault(call.phase, []).append(call)
    return {phase: _factor(calls) for phase, calls in by_phase.items()}


def _factor(calls: Sequence[MeasuredCall]) -> PhaseFactor:
    ratios = np.array([math.log(call.seconds / call.predicted_seconds) for call in calls])
    noise = np.array([math.hypot(call.error, LEAST_ERROR) for call in calls])
    apart = float(np.sum((ratios - np.mean(ratios)) ** 2))
    spread = math.sqrt((apart + ASSUMED_CALLS * CALL_SPREAD**2) / (len(calls) - 1 + ASSUMED_CALLS))
    weights = 1 / (noise**2 + spread**2)
    mean = float(weights @ ratios / (weights.sum() + PRIOR_ERROR**-2))
    uncertain = 1 / (weights.sum() + PRIOR_ERROR**-2)
    return PhaseFactor(math.exp(mean), 0.0, math.sqrt(uncertain + spread**2), len(calls))


# --- tables -----------------------------------------------------------------------------------------------------------


def merge(tables: Sequence[CostTable], keep: float = 0.5) -> CostTable:
    """One table from several, oldest first. A call that several measured counts with `keep` of its older value and the
    rest of its newer one, in logarithms: what the machine does today outweighs what it did last month.

    The newest factors, lengths, name and date win; factors of phases that were found beside other factors are left out.
    Raises ValueError for tables of different kinds of devices.
    """
    kinds = {table.kind for table in tables if table.kind}
    if len(kinds) > 1:
        raise ValueError(f"tables of different devices can't be merged: {', '.join(sorted(kinds))}")
    merged = CostTable()
    for table in tables:
        factors = table.factors or merged.factors
        old, new = _predicted_by(merged, factors), _predicted_by(table, factors)
        calls = _merged_calls(old.calls, new.calls, keep)
        merged = replace(
            table,
            kind=table.kind or merged.kind,
            factors=factors,
            phases={**old.phases, **new.phases, **phase_factors(calls)},
            calls=calls,
            lengths=table.lengths or merged.lengths,
            step_end_seconds=merged.step_end_seconds if table.step_end_seconds is None else table.step_end_seconds,
        )
    return merged


def _predicted_by(table: CostTable, factors: EfficiencyFactors | None) -> CostTable:
    """The table without what compares measurements with predictions, where those were made by other factors."""
    if table.factors == factors:
        return table
    return replace(table, phases={}, calls=tuple(replace(call, predicted_seconds=0.0) for call in table.calls))


def _merged_calls(old: Sequence[MeasuredCall], new: Sequence[MeasuredCall], keep: float) -> tuple[MeasuredCall, ...]:
    calls: dict[tuple[object, ...], MeasuredCall] = {_what(call): call for call in old}
    for call in new:
        before = calls.get(_what(call))
        calls[_what(call)] = call if before is None else _newer(before, call, keep)
    return tuple(calls.values())


def _what(call: MeasuredCall) -> tuple[object, ...]:
    """All that makes two measurements ones of the same thing."""
    left_out = ("seconds", "predicted_seconds", "error", "count")
    return tuple(value for name, value in asdict(call).items() if name not in left_out)


def _newer(old: MeasuredCall, new: MeasuredCall, keep: float) -> MeasuredCall:
    share = keep * old.count / (keep * old.count + (1 - keep) * new.count) if old.count + new.count else keep
    seconds = math.exp(share * math.log(old.seconds) + (1 - share) * math.log(new.seconds))
    apart = abs(math.log(new.seconds / old.seconds)) / 2
    error = math.hypot(math.hypot(share * old.error, (1 - share) * new.error), apart)
    return replace(new, seconds=seconds, error=error, count=old.count + new.count)
