"""Predictions of the cost and memory model beside published measurements, and whether they reach their targets.

`python -m benchmarks.cost_model --published FILE`: a CSV with the columns of `published.Row`. Uncalibrated: the shipped
constants of each device kind. Calibrated: times one factor per phase and engine family, from the rows of all other
systems. Rows that can't be predicted are listed with the reason. Results go to results/cost_model.json.
"""

import argparse
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.console import Console
from rich.table import Table

from benchmarks import published_rl, published_train
from benchmarks.published import Prediction, Row, read_rows

RESULTS = Path(__file__).parent / "results" / "cost_model.json"
LEAST_RANKED = 5  # rows of a group whose order is compared
PRIOR_SPREAD = 0.1  # spread of an engine family's log factor before any of its systems is known
UNSCALED = ("memory", "fits")  # phases that no factor corrects


class Scores(Struct, frozen=True):
    """Errors of a set of rows: |predicted / measured - 1|."""

    n: int
    median: float
    p90: float
    calibrated_median: float
    calibrated_p90: float


class Target(Struct, frozen=True):
    """A claim: `value` must not be above `most`, or not below it where `least` is meant."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def seconds_ratio(prediction: Prediction) -> float:
    """Measured over predicted time, whatever the unit: throughputs are turned round."""
    ratio = prediction.measured / prediction.predicted
    return ratio if prediction.row.unit in ("s", "h", "ms") else 1 / ratio


def system_of(row: Row) -> str:
    """The system without its version: rows of another version are no other system's."""
    return re.split(r" v\d| \(", row.system)[0]


def calibrated(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Each prediction times the factor of its phase and family, learned from the rows of all other systems.

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
        out.append(replace(one, predicted=one.predicted * factor if timed else one.predicted / factor))
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
    told = sum(weight * value for weight, value in zip(weights, medians, strict=True))
    return math.exp(told / (sum(weights) + 1 / PRIOR_SPREAD**2))


def error(prediction: Prediction) -> float:
    """Relative error."""
    return abs(prediction.predicted / prediction.measured - 1)


def scores(pairs: Sequence[tuple[Prediction, Prediction]]) -> Scores:
    """Median and 90th percentile of the errors, uncalibrated and calibrated."""
    plain, better = [error(one) for one, _ in pairs], [error(two) for _, two in pairs]
    return Scores(len(pairs), statistics.median(plain), _p90(plain), statistics.median(better), _p90(better))


def _p90(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


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
    """group -> rows and rank correlation, where a group has enough; repeated measurements of one setting are one."""
    groups: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in predictions:
        if one.phase not in UNSCALED:
            groups[f"{one.phase}: {one.group}"][one.predicted].append(one.measured)
    return {
        name: (len(found), spearman(list(found), [statistics.median(values) for values in found.values()]))
        for name, found in groups.items()
        if len(found) >= LEAST_RANKED
    }


def targets(pairs: Sequence[tuple[Prediction, Prediction]], order: dict[str, tuple[int, float]]) -> Iterator[Target]:
    """The claims, each with what was reached."""
    of = _selector(pairs)
    dense = of(lambda one: one.phase == "train" and not one.moe)
    moe = of(lambda one: one.phase == "train" and one.moe)
    yield from _errors("dense training", dense, 0.12, 0.08)
    yield from _errors("training with experts", moe, 0.25, None)
    yield from _errors("generation", of(lambda one: one.phase == "generate"), 0.15, 0.08)
    steps = of(lambda one: one.phase == "rl_step")
    for system in sorted({system_of(one.row) for one, _ in steps}):
        of_system = [pair for pair in steps if system_of(pair[0].row) == system]
        yield from _errors(f"RL steps of {system}", of_system, None, 0.20)
    yield from _errors("memory", of(lambda one: one.phase == "memory"), 0.10, None)
    fits = [one for one, _ in pairs if one.phase == "fits"]
    ran = [one for one in fits if one.measured]
    if ran:
        yield Target("share of runs called fits", sum(one.predicted for one in ran) / len(ran), 0.95, at_least=True)
    yield Target("out of memory called fits", sum(one.predicted for one in fits if not one.measured), 0.0)
    for name, (count, value) in sorted(order.items()):
        yield Target(f"order of {count}: {name}", value, 0.9, at_least=True)


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


def _table(title: str, rows: dict[str, Scores]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("of")
    for name in ("rows", "median", "90 %", "calibrated", "90 %"):
        table.add_column(name, justify="right")
    for name, one in rows.items():
        percents = (one.median, one.p90, one.calibrated_median, one.calibrated_p90)
        table.add_row(name, str(one.n), *(f"{value:.1%}" for value in percents))
    return table


def _claims(found: Sequence[Target]) -> Table:
    table = Table(title="targets", title_justify="left")
    for name in ("", "claim", "reached", "bound"):
        table.add_column(name)
    for one in found:
        sign = ">=" if one.at_least else "<="
        table.add_row("PASS" if one.met else "FAIL", one.name, f"{one.value:.3f}", f"{sign} {one.bound}")
    return table


def main() -> None:
    """Read, predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, required=True, help="CSV of published measurements")
    parser.add_argument("--rows", action="store_true", help="print every row with its prediction")
    asked = parser.parse_args()
    rows = list(read_rows(asked.published))
    plain = [*published_train.predictions(rows), *published_rl.predictions(rows)]
    pairs = list(zip(plain, calibrated(plain), strict=True))
    order = ranked(plain)
    found = list(targets(pairs, order))
    kinds = _by(pairs, lambda one: f"{one.row.gpu or 'unknown'}, {one.phase}")
    systems = _by(pairs, lambda one: f"{system_of(one.row)}, {one.phase}")
    missing = _missing(rows, plain)
    console = Console(width=150)
    if asked.rows:
        _print_rows(console, pairs)
    console.print(_table("per device kind and phase: relative error", kinds))
    console.print(_table("per system and phase: relative error", systems))
    console.print(_claims(found))
    said = [*_assumptions(pairs), *_repeats(plain)]
    for line in said:
        console.print(line)
    for (system, metric, reason), count in sorted(missing.items()):
        console.print(f"not predicted: {count} x {system}, {metric}: {reason}")
    RESULTS.write_text(
        json.dumps({**_record(kinds, systems, found, missing), "said": said}, indent=1) + "\n", encoding="utf-8"
    )


def _assumptions(pairs: Sequence[tuple[Prediction, Prediction]]) -> Iterator[str]:
    """Each row that was predicted under assumptions."""
    for one, two in pairs:
        if one.assumed:
            row = one.row
            mode = row.notes.split(";")[0] if row.system.startswith("AReaL") else ""
            layout = f"tp{row.tp} pp{row.pp} dp{row.dp}" if row.tp else mode
            where = f"{row.system}, {row.model}, {row.n_gpus} x {row.gpu} {layout}".rstrip()
            yield f"assumed: {where}: {_compared(one, two).strip()} {row.unit}: {one.assumed}"


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
    return Counter((row.system, row.metric, reasons.get(row, "no reader for this phase")) for row in left)


def _print_rows(console: Console, pairs: Sequence[tuple[Prediction, Prediction]]) -> None:
    for one, two in pairs:
        row = one.row
        where = f"{row.system} {row.model} {row.gpu} n{row.n_gpus} tp{row.tp} pp{row.pp} dp{row.dp} s{row.seq_len}"
        console.print(f"{one.phase:9} {_compared(one, two)} {row.metric} {where}")


def _compared(one: Prediction, two: Prediction) -> str:
    """Measured, predicted, and both relative errors; of whether a configuration fits, yes or no."""
    if one.phase == "fits":
        said = ["fits" if value else "fails" for value in (one.measured, one.predicted)]
        return f"{said[0]:>10} {said[1]:>10} {'':15}"
    errors = (found.predicted / found.measured - 1 for found in (one, two))
    return f"{one.measured:10.4g} {one.predicted:10.4g} " + " ".join(f"{value:+7.1%}" for value in errors)


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
