"""Predictions of the cost and memory model beside published measurements, and whether they reach their targets.

`python -m benchmarks.cost_model --published FILE`: a CSV with the columns of `published.Row`, beside the rows of
published_rows.csv. Uncalibrated: the shipped constants of each device kind. Calibrated: times one factor per phase and
engine family, from the rows of all other systems. Rows that can't be predicted are listed with the reason. Results go
to results/cost_model.json.
"""

import argparse
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.console import Console

from benchmarks import published_rl, published_train
from benchmarks.cost_tables import (
    Scores,
    Target,
    bars_table,
    bounds_table,
    claims_table,
    compared,
    errors_table,
    headline_table,
    percentile,
    print_rows,
    regimes_table,
)
from benchmarks.published import Prediction, Row, read_rows
from benchmarks.published_errors import Residual, covered, of_regime, own_residuals, regimes_learnt, residuals
from benchmarks.published_errors import coverage as bar_coverage
from benchmarks.published_errors import coverage_by_others as bars_by_others
from benchmarks.published_errors import learnt as learnt_deviations
from benchmarks.published_memory import peak_of
from benchmarks.published_regimes import REGIME_BOUND, LeftOut, Regime, error, left_out, regime_targets, regimes
from benchmarks.published_spread import FULL_SHARE, QUANTILE, Peak, coverage, coverage_by_others, learnt, telling
from realgraph.planner.costs import spread
from realgraph.planner.costs.memory.margin import SPREADS

RESULTS = Path(__file__).parent / "results" / "cost_model.json"
ROWS = Path(__file__).parent / "published_rows.csv"
LEAST_RANKED = 5  # rows of a group whose order is compared
LEAST_DIFFERENCE = 0.01  # of predictions, relative: what differs by less is not ordered
PRIOR_SPREAD = 0.1  # spread of an engine family's log factor before any of its systems is known
EXPERT_SYSTEMS, EXPERT_KINDS = 3, 2  # whose rows of training with experts are compared, at least
UNSCALED = ("memory", "fits")  # phases that no factor corrects
BIAS_BOUNDS = {"experts": 0.05, "stages": 0.05}  # of a regime's median signed error of memory


def seconds_ratio(prediction: Prediction) -> float:
    """Measured over predicted time, whatever the unit: throughputs are turned round."""
    ratio = prediction.measured / prediction.predicted
    return ratio if prediction.row.unit in ("s", "h", "ms") else 1 / ratio


def system_of(row: Row) -> str:
    """The system without its version: rows of another version are no other system's."""
    return re.split(r" v\d| \(", row.system)[0]


def calibrated(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Each prediction times the factor of its phase and family, learned from the rows of all other systems, and without
    the constants that its own system or machine alone tells.

    A row that was predicted under assumptions teaches nothing: its error may be the assumption's.
    """
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in (one for one in predictions if one.phase not in UNSCALED and not one.assumed):
        ratios[one.phase, one.backend][system_of(one.row)].append(math.log(seconds_ratio(one)))
    out = []
    for one in predictions:
        known = ratios.get((one.phase, one.backend), {})
        factor = shared_factor([logs for name, logs in known.items() if name != system_of(one.row)])
        timed = one.row.unit in ("s", "h", "ms")
        predicted = one.predicted if one.unknown is None else one.unknown
        out.append(replace(one, predicted=predicted * factor if timed else predicted / factor))
    return out


def shared_factor(systems: Sequence[Sequence[float]]) -> float:
    """Factor for a system that was not measured, from the log ratios of other systems' rows.

    Random effects: a system tells the more the more rows it has and the closer they are, and all together the less the
    less they agree; what they don't tell stays at 1, as a normal prior of spread PRIOR_SPREAD says (DerSimonian & Laird
    1986).
    """
    if not systems:
        return 1.0
    medians = [statistics.median(logs) for logs in systems]
    noise = [(statistics.variance(logs) if len(logs) > 1 else PRIOR_SPREAD**2) / len(logs) for logs in systems]
    between = PRIOR_SPREAD**2
    if len(systems) > 1:
        between = max(0.0, statistics.variance(medians) - statistics.fmean(noise))
    weights = [1 / (between + own + 1e-9) for own in noise]
    weighted = sum(weight * value for weight, value in zip(weights, medians, strict=True))
    return math.exp(weighted / (sum(weights) + 1 / PRIOR_SPREAD**2))


def scores(pairs: Sequence[tuple[Prediction, Prediction]]) -> Scores:
    """Median and 90th percentile of the errors, uncalibrated and calibrated."""
    plain, better = [error(one) for one, _ in pairs], [error(two) for _, two in pairs]
    wide = percentile(plain, 0.9), percentile(better, 0.9)
    return Scores(len(pairs), statistics.median(plain), wide[0], statistics.median(better), wide[1])


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties have their mean rank. 0 where one side has one rank only."""
    ranks = [_ranks(first), _ranks(second)]
    means = [statistics.fmean(side) for side in ranks]
    spread = [sum((rank - mean) ** 2 for rank in side) for side, mean in zip(ranks, means, strict=True)]
    if not all(spread):
        return 0.0
    joint = sum((a - means[0]) * (b - means[1]) for a, b in zip(*ranks, strict=True))
    return float(joint / (spread[0] * spread[1]) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def ranked(predictions: Iterable[Prediction]) -> dict[str, tuple[int, float]]:
    """group -> rows and rank correlation, where a group has enough. Settings whose predictions differ by less than
    LEAST_DIFFERENCE are one, by the median of what was measured: the model does not tell them apart."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for one in predictions:
        if one.phase not in UNSCALED:
            groups[f"{one.phase}: {one.group}"].append(one)
    found = {name: _settings(rows) for name, rows in groups.items()}
    return {
        name: (len(settings), spearman([one for one, _ in settings], [statistics.median(two) for _, two in settings]))
        for name, settings in found.items()
        if len(settings) >= LEAST_RANKED
    }


def _settings(rows: Iterable[Prediction]) -> list[tuple[float, list[float]]]:
    """The predictions that differ, rising, each with all that was measured there."""
    found: list[tuple[float, list[float]]] = []
    for one in sorted(rows, key=lambda one: one.predicted):
        if not found or one.predicted > found[-1][0] * (1 + LEAST_DIFFERENCE):
            found.append((one.predicted, []))
        found[-1][1].append(one.measured)
    return found


def targets(
    pairs: Sequence[tuple[Prediction, Prediction]], order: dict[str, tuple[int, float]], peaks: Sequence[Peak] = ()
) -> Iterator[Target]:
    """The claims, each with what was reached. peaks: those that tell what a configuration needs."""
    of = _selector(pairs)
    dense = of(lambda one: one.phase == "train" and not one.moe)
    moe = of(lambda one: one.phase == "train" and one.moe)
    yield from _errors("dense training", dense, 0.12, 0.08)
    yield from _errors("training with experts", moe, 0.15, 0.15)
    if moe:
        known = {system_of(one.row) for one, _ in moe}, {one.row.gpu for one, _ in moe}
        yield Target("training with experts: systems", len(known[0]), EXPERT_SYSTEMS, at_least=True)
        yield Target("training with experts: kinds of device", len(known[1]), EXPERT_KINDS, at_least=True)
    yield from _errors("generation", of(lambda one: one.phase == "generate"), 0.15, 0.08)
    steps = of(lambda one: one.phase == "rl_step")
    for system in sorted({system_of(one.row) for one, _ in steps}):
        of_system = [pair for pair in steps if system_of(pair[0].row) == system]
        yield from _errors(f"RL steps of {system}", of_system, None, 0.20)
    yield from _errors("memory", of(lambda one: one.phase == "memory"), 0.10, None)
    yield from memory_targets(peaks)
    fits = [one for one, _ in pairs if one.phase == "fits"]
    ran = [one for one in fits if one.measured]
    if ran:
        yield Target("share of runs called fits", sum(one.predicted for one in ran) / len(ran), 0.97, at_least=True)
    yield Target("out of memory called fits", sum(one.predicted for one in fits if not one.measured), 0.0)
    for name, (count, value) in sorted(order.items()):
        yield Target(f"order of {count}: {name}", value, 0.9, at_least=True)


def memory_targets(peaks: Sequence[Peak]) -> Iterator[Target]:
    """The claims on memory: unbiased where a model has experts or stages, and bounds that hold in every regime."""
    for name, one in coverage(peaks, SPREADS).items():
        if name in BIAS_BOUNDS:
            yield Target(f"memory, {name}: bias of {one.rows}", abs(one.bias), BIAS_BOUNDS[name])
        yield Target(
            f"memory, {name}: share of {one.rows} peaks below the bound", one.below_bound, QUANTILE, at_least=True
        )
    if peaks:
        same = sum(learnt(peaks)[regime] == spread for regime, spread in SPREADS.items())
        yield Target("memory: regimes whose shipped spread is the one learnt", same, len(SPREADS), at_least=True)


def bar_targets(errors: Sequence[Residual]) -> Iterator[Target]:
    """The claims on the bar that `realgraph plan` prints: 80 % of all rows within it, and of every regime."""
    published = [one for one in errors if not any("cpu" in regime for regime in one.regimes)]
    if not published:
        return
    least = spread.BAR_SHARE
    yield Target(
        f"bars: share of {len(published)} rows within", covered(published, spread.SPREADS), least, at_least=True
    )
    shipped = regimes_learnt()
    for phase, regime in shipped:
        if own := of_regime(errors, phase, regime):
            share = covered(own, spread.SPREADS)
            yield Target(f"bars, {phase}, {regime}: share of {len(own)} rows within", share, least, at_least=True)
    found = learnt_deviations(errors)
    same = sum(found[phase][regime] == spread.SPREADS[phase][regime] for phase, regime in shipped)
    yield Target("bars: regimes whose shipped deviation is the one learnt", same, len(shipped), at_least=True)


def _selector(
    pairs: Sequence[tuple[Prediction, Prediction]],
) -> Callable[[Callable[[Prediction], bool]], list[tuple[Prediction, Prediction]]]:
    return lambda wanted: [pair for pair in pairs if wanted(pair[0])]


def _errors(
    name: str, pairs: Sequence[tuple[Prediction, Prediction]], plain: float | None, better: float | None
) -> Iterator[Target]:
    if not pairs:
        return
    found = scores(pairs)
    if plain is not None:
        yield Target(f"{name}: median error of {found.n}", found.median, plain)
    if better is not None:
        yield Target(f"{name}: median error of {found.n}, calibrated", found.calibrated_median, better)


# --- printing ---------------------------------------------------------------------------------------------------------


def _by(pairs: Sequence[tuple[Prediction, Prediction]], key: Callable[[Prediction], str]) -> dict[str, Scores]:
    found: dict[str, list[tuple[Prediction, Prediction]]] = defaultdict(list)
    for pair in pairs:
        if pair[0].phase != "fits":
            found[key(pair[0])].append(pair)
    return {name: scores(found[name]) for name in sorted(found)}


def _coverage_record(memory: Mapping[str, Mapping[str, Struct]]) -> dict[str, object]:
    return {whose: {name: _rounded(asdict(one)) for name, one in rows.items()} for whose, rows in memory.items()}


def _untelling(left: Sequence[Peak]) -> Iterator[str]:
    """Measured peaks that no spread is learnt from."""
    for peak in left:
        where = f"{peak.row.system}, {peak.row.model}: {peak.measured / 1e9:.1f} GB"
        full = peak.measured >= FULL_SHARE * peak.device_bytes
        why = "the device is full" if full else "the same settings with larger micro-batches took less"
        yield f"peak left aside: {where}: {why}"


def main() -> None:
    """Read, predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, help="CSV of further published measurements")
    parser.add_argument("--rows", action="store_true", help="print every row with its prediction")
    asked = parser.parse_args()
    rows = [row for file in (asked.published, ROWS) if file is not None for row in read_rows(file)]
    read = [*published_train.predictions(rows), *published_rl.predictions(rows)]
    plain = [one for one in read if not one.unpublished]
    pairs = list(zip(plain, calibrated(plain), strict=True))
    order = ranked(plain)
    peaks, left = telling([peak for case in published_train.cases(rows) if (peak := peak_of(case)) is not None])
    errors = [*residuals(read, [system_of(one.row) for one in read]), *own_residuals()]
    by_regime = regimes(plain)
    found = [*regime_targets(by_regime), *targets(pairs, order, peaks), *bar_targets(errors)]
    headline = left_out(pairs, [system_of(one.row) for one in plain])
    by_system = {
        system_of(peak.row): [one for one in peaks if system_of(one.row) == system_of(peak.row)] for peak in peaks
    }
    memory = {"all systems": coverage(peaks, SPREADS), "told by the others": coverage_by_others(peaks, by_system)}
    bars = {"all systems": bar_coverage(errors), "told by the others": bars_by_others(errors)}
    phases = _by(pairs, lambda one: one.phase)
    kinds = _by(pairs, lambda one: f"{one.row.gpu or 'unknown'}, {one.phase}")
    systems = _by(pairs, lambda one: f"{system_of(one.row)}, {one.phase}")
    missing = _missing(rows, plain)
    console = Console(width=150)
    console.print(headline_table(headline))
    console.print(regimes_table(by_regime, REGIME_BOUND))
    if asked.rows:
        print_rows(console, pairs)
    console.print(errors_table("per phase: relative error, and by factors that all other systems tell", phases))
    console.print(errors_table("per device kind and phase: relative error", kinds))
    console.print(errors_table("per system and phase: relative error", systems))
    console.print(bounds_table(memory))
    console.print(bars_table(bars))
    console.print(claims_table(found))
    said = [*_assumptions(read), *_repeats(plain), *_untelling(left)]
    for line in said:
        console.print(line)
    for (system, metric, reason), count in sorted(missing.items()):
        console.print(f"not predicted: {count} x {system}, {metric}: {reason}")
    RESULTS.write_text(
        json.dumps(
            {
                **_headlines(headline, by_regime),
                **_record(kinds, systems, found, missing),
                "memory": _coverage_record(memory),
                "bars": _coverage_record(bars),
                "said": said,
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def _assumptions(read: Sequence[Prediction]) -> Iterator[str]:
    """Each row whose source leaves something out, with what the model says under assumptions."""
    for one, two in zip(read, calibrated(read), strict=True):
        if one.assumed:
            row = one.row
            what = "not predicted, batch or lengths are not published" if one.unpublished else "assumed"
            mode = row.notes.split(";")[0] if row.system.startswith("AReaL") else ""
            layout = f"tp{row.tp} pp{row.pp} dp{row.dp}" if row.tp else mode
            where = f"{row.system}, {row.model}, {row.n_gpus} x {row.gpu} {layout}".rstrip()
            yield f"{what}: {where}: {compared(one, two).strip()} {row.unit}: {one.assumed}"


def _repeats(plain: Sequence[Prediction]) -> Iterator[str]:
    """Spread of measurements of settings that the model can't tell apart: no order of theirs is right."""
    alike: dict[tuple[str, float], list[float]] = defaultdict(list)
    for one in plain:
        if one.phase not in UNSCALED:
            alike[one.group, one.predicted].append(one.measured)
    spreads: dict[str, list[float]] = defaultdict(list)
    for (group, _), values in alike.items():
        if len(values) > 1:
            spreads[group].append(max(values) / min(values) - 1)
    for group, found in sorted(spreads.items()):
        times = f"{len(found)} settings of {group}: up to {max(found):.1%} apart"
        yield f"measured again: {times}; ranked once, by the median"


def _missing(rows: Sequence[Row], plain: Sequence[Prediction]) -> Counter[tuple[str, str, str]]:
    """Rows without a prediction by system, metric and reason."""
    reasons = dict([*published_train.unpredicted(rows), *published_rl.unpredicted(rows)])
    answered = {one.row for one in plain if one.phase != "fits" or one.row.metric == "oom"}
    left = (row for row in rows if row not in answered)
    unread = "its batch or lengths are not published"
    hidden = {one.row: unread for one in published_rl.predictions(rows) if one.unpublished}
    reasons = {**reasons, **hidden}
    return Counter((row.system, row.metric, reasons.get(row, "no reader for this phase")) for row in left)


def _headlines(headline: Mapping[str, LeftOut], by_regime: Mapping[str, Regime]) -> dict[str, object]:
    return {
        "left_out": {name: _rounded(asdict(one)) for name, one in headline.items()},
        "regimes": {name: _rounded(asdict(one)) for name, one in by_regime.items()},
    }


def _record(
    kinds: dict[str, Scores],
    systems: dict[str, Scores],
    found: Sequence[Target],
    missing: Counter[tuple[str, str, str]],
) -> dict[str, object]:
    return {
        "kinds": {name: _rounded(asdict(one)) for name, one in kinds.items()},
        "systems": {name: _rounded(asdict(one)) for name, one in systems.items()},
        "targets": [{**_rounded(asdict(one)), "met": one.met} for one in found],
        "not_predicted": [{"rows": n, "of": f"{a}, {b}", "reason": c} for (a, b, c), n in sorted(missing.items())],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


if __name__ == "__main__":
    main()
