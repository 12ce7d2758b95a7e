"""Rows of published measurements and what the cost model says of each: the form shared by the phases' readers."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from realgraph.planner.costs.spread import SpreadRegime

TIMES = {"s": 1.0, "ms": 1e3, "h": 1 / 3600}  # of a second


class Row(Struct, frozen=True):
    """One measurement as published; '' where the source is silent. Numbers stay text: sources print `1/2`, `n/a`."""

    source: str
    system: str
    model: str
    params_b: str
    gpu: str
    n_gpus: str
    tp: str
    pp: str
    dp: str
    cp: str
    ep: str
    seq_len: str
    global_batch: str
    micro_batch: str
    phase: str
    metric: str
    value: str
    unit: str
    notes: str

    def number(self, field: str, default: float = 0.0) -> float:
        """A column as a number, `default` where it is empty or no finite number."""
        try:
            found = float(getattr(self, field))
        except ValueError:
            return default
        return found if math.isfinite(found) else default

    def count(self, field: str, default: int = 0) -> int:
        """A column as a whole number of at least 0."""
        return max(0, round(self.number(field, default)))

    def in_unit(self, seconds: float) -> float | str:
        """Predicted seconds in the row's unit, or why that is not possible."""
        return seconds * TIMES[self.unit] if self.unit in TIMES else f"no time: {self.unit or 'no unit'}"


class Prediction(Struct, frozen=True):
    """A row beside its prediction, in one unit. group: rows whose order is compared (one source and model).

    regimes: those of the planner's deviations (costs/spread.py) that it has; beside: deviation of a step's calls.

    phase: train, generate, inference, rl_step, weight_sync, memory or fits. Of `fits`: 1.0 for yes, 0.0 for no.
    moe: whether the model has experts. backend: the engine's family, whose rows of other systems calibrate this one.
    assumed: what the source leaves out and is assumed instead. unpublished: batch or lengths are among it, so that the
    row counts as not predicted. unknown: what is predicted without the constants that its system or machine alone
    tells, None where there are none.
    """

    row: Row
    phase: str
    group: str
    measured: float
    predicted: float
    moe: bool = False
    backend: str = ""
    assumed: str = ""
    regimes: tuple[SpreadRegime, ...] = ("plain",)
    beside: float = 0.0
    unpublished: bool = False
    unknown: float | None = None


def read_rows(file: Path) -> Iterator[Row]:
    """All rows of a CSV with the columns of `Row`. Raises ValueError where a column is missing."""
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = set(Row.__struct_fields__) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{file} lacks the columns {', '.join(sorted(missing))}")
        for row in reader:
            yield Row(**{name: (row[name] or "").strip() for name in Row.__struct_fields__})
