"""The tables that `benchmarks/cost_model.py` prints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks import published_errors
from benchmarks.published import Prediction
from benchmarks.published_spread import PeakCoverage


class Scores(Struct, frozen=True):
    """Errors of a set of rows: |predicted / measured - 1|."""

    n: int
    median: float
    p90: float
    calibrated_median: float
    calibrated_p90: float


class Target(Struct, frozen=True):
    """A claim: `value` is not above `bound`; with `at_least`, not below it."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


class Headline(Protocol):
    """Relative errors of a phase (`published_regimes.LeftOut`)."""

    rows: int
    systems: int
    median: float | None
    p90: float | None
    all_in_median: float
    all_in_p90: float


class RegimeErrors(Protocol):
    """Errors of a regime's rows (`published_regimes.Regime`)."""

    rows: int
    median: float
    bias: float

    @property
    def met(self) -> bool: ...


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def headline_table(rows: Mapping[str, Headline]) -> Table:
    """Per phase, what the constants are worth for a system that they do not know."""
    table = Table(title="each system by what all others tell: relative error", title_justify="left")
    table.add_column("phase")
    for name in ("rows", "systems", "left out", "90 %", "all in", "90 %"):
        table.add_column(name, justify="right")
    for name, one in rows.items():
        percents = (one.median, one.p90, one.all_in_median, one.all_in_p90)
        shown = ("-" if value is None else f"{value:.1%}" for value in percents)
        table.add_row(name, str(one.rows), str(one.systems), *shown)
    return table


def regimes_table(rows: Mapping[str, RegimeErrors], bound: float) -> Table:
    """Per regime, its median error; of generation beside its target."""
    title = f"by regime: relative error; target of generation: {bound:.0%}; bias below 0: predicted too fast"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("regime")
    for name in ("rows", "median", "bias"):
        table.add_column(name, justify="right")
    for name, one in rows.items():
        mark = ("PASS" if one.met else "FAIL") if name.startswith("generate") else ""
        table.add_row(mark, name, str(one.rows), f"{one.median:.1%}", f"{one.bias:+.1%}")
    return table


def errors_table(title: str, rows: dict[str, Scores]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("of")
    for name in ("rows", "median", "90 %", "calibrated", "90 %"):
        table.add_column(name, justify="right")
    for name, one in rows.items():
        percents = (one.median, one.p90, one.calibrated_median, one.calibrated_p90)
        table.add_row(name, str(one.n), *(f"{value:.1%}" for value in percents))
    return table


def bounds_table(memory: dict[str, dict[str, PeakCoverage]]) -> Table:
    """Bias and what lies below, of each regime, and of each system's with the spreads that all others tell."""
    table = Table(title="memory peaks below the prediction and below its 95 % bound", title_justify="left")
    for name in ("spreads of", "peaks of"):
        table.add_column(name)
    for name in ("rows", "bias", "below prediction", "below bound"):
        table.add_column(name, justify="right")
    for whose, rows in memory.items():
        for name, one in rows.items():
            shares = (f"{one.bias:+.1%}", f"{one.below_mean:.0%}", f"{one.below_bound:.0%}")
            table.add_row(whose, name, str(one.rows), *shares)
    return table


def bars_table(bars: dict[str, dict[str, published_errors.BarCoverage]]) -> Table:
    """Rows within the bars of `realgraph plan`, of each regime, and of each system by what all others tell."""
    table = Table(title="seconds within their 80 % bars; bias: ln(predicted / measured)", title_justify="left")
    for name in ("deviations of", "rows of"):
        table.add_column(name)
    for name in ("rows", "bias", "within"):
        table.add_column(name, justify="right")
    for whose, rows in bars.items():
        for name, one in rows.items():
            table.add_row(whose, name, str(one.rows), f"{one.bias:+.2f}", f"{one.within:.0%}")
    return table


def claims_table(found: Sequence[Target]) -> Table:
    table = Table(title="targets", title_justify="left")
    for name in ("", "claim", "reached", "bound"):
        table.add_column(name)
    for one in found:
        sign = ">=" if one.at_least else "<="
        table.add_row("PASS" if one.met else "FAIL", one.name, f"{one.value:.3f}", f"{sign} {one.bound}")
    return table


def print_rows(console: Console, pairs: Sequence[tuple[Prediction, Prediction]]) -> None:
    for one, two in pairs:
        row = one.row
        where = f"{row.system} {row.model} {row.gpu} n{row.n_gpus} tp{row.tp} pp{row.pp} dp{row.dp} s{row.seq_len}"
        console.print(f"{one.phase:9} {compared(one, two)} {row.metric} {where}")


def compared(one: Prediction, two: Prediction) -> str:
    """Measured, predicted, and both relative errors; of whether a configuration fits, yes or no."""
    if one.phase == "fits":
        said = ["fits" if value else "fails" for value in (one.measured, one.predicted)]
        return f"{said[0]:>10} {said[1]:>10} {'':15}"
    errors = (found.predicted / found.measured - 1 for found in (one, two))
    return f"{one.measured:10.4g} {one.predicted:10.4g} " + " ".join(f"{value:+7.1%}" for value in errors)
