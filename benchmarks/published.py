"""Rows of published measurements and what the cost model says of each: the form shared by the phases' readers."""

import csv
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct


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
        """A column as a number, `default` where it is empty or no number."""
        try:
            return float(getattr(self, field))
        except ValueError:
            return default


class Prediction(Struct, frozen=True):
    """A row beside its prediction, in one unit. group: rows whose order is compared (one source and model).

    phase: train, generate, inference, rl_step, weight_sync, memory or fits. Of `fits`: 1.0 for yes, 0.0 for no.
    moe: whether the model has experts. backend: the engine's family, whose rows of other systems calibrate this one.
    assumed: what the source leaves out and is assumed instead.
    """

    row: Row
    phase: str
    group: str
    measured: float
    predicted: float
    moe: bool = False
    backend: str = ""
    assumed: str = ""


def read_rows(file: Path) -> Iterator[Row]:
    """All rows of a CSV with the columns of `Row`. Raises ValueError where a column is missing."""
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = set(Row.__struct_fields__) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{file} lacks the columns {', '.join(sorted(missing))}")
        for row in reader:
            yield Row(**{name: (row[name] or "").strip() for name in Row.__struct_fields__})
