"""Measured costs that replace or correct the shipped factors: what `realgraph profile` and finished runs write.

`profile` and the run write it, the planner's tables apply it, `--costs FILE` names it. Fits nothing.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.yaml.files import read_file
from realgraph.planner.costs.engine_overheads import EngineOverheads
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.plan.layout import Recompute, Schedule

COSTS_FORMAT = 3
OLDEST_FORMAT = 2  # that is read: without rates of gathers, scatters, exchanges and messages, which it has as `link`
COSTS_FILE = "costs.json"  # in a run directory
MOST_VALUE = 1e6  # a factor, or the seconds of a call: more is a slip of the pen
FRACTIONS = (
    "elementwise",
    "optimizer",
    "gather",
    "scatter",
    "exchange",
    "p2p",
)  # factors that may be 0, but not next to it
Phase = Literal["train", "inference", "generate", "reallocate"]


class PhaseFactor(Struct, frozen=True, forbid_unknown_fields=True):
    """measured seconds = factor x predicted + constant_seconds; error: relative standard deviation of what is left."""

    factor: Annotated[float, Meta(ge=1 / MOST_VALUE, le=MOST_VALUE)] = 1.0
    constant_seconds: Annotated[float, Meta(ge=0, le=MOST_VALUE)] = 0.0
    error: Annotated[float, Meta(ge=0)] = 0.0
    count: int = 0  # measurements behind it


class MeasuredCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that one call really took under one layout: the median over `count` steps and its relative deviation.

    workload: the hash of the workload it was measured with; the planner takes the seconds as they are where graph
    call, model, layout, micro-batches and workload are equal, and otherwise learns a phase factor from them.
    """

    call: str
    phase: Phase
    model: str  # hash of the call's shape, its role's precision and states, and the ModelSpec
    workload: str
    devices: int
    dp: int
    tp: int
    pp: int
    ep: int
    cp: int
    sharding: Literal["replicated", "fsdp"]
    seconds: Annotated[float, Meta(gt=0, le=MOST_VALUE)]
    predicted_seconds: Annotated[float, Meta(ge=0)]  # by the table's factors; 0 where it was by others
    error: Annotated[float, Meta(ge=0)] = 0.0
    count: int = 1
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    max_tokens_per_microbatch: int | None = None  # of a call that does not generate
    kv_cache_tokens: int | None = None  # of a generate call


class CostTable(Struct, frozen=True, forbid_unknown_fields=True):
    """kind: of device, as in devices.yaml. factors: replace the kind's own. lengths: measured new tokens of samples,
    at equal steps of probability, rising. overheads: of the engines and the runtime, in the place of those that
    `EngineSupport` has. step_end_seconds: of a step beside its calls, as measured: replaces `step_seconds` there."""

    kind: str = ""
    name: str = ""  # of the machine or run
    date: str = ""  # ISO 8601
    factors: EfficiencyFactors | None = None
    phases: dict[Phase, PhaseFactor] = {}
    calls: tuple[MeasuredCall, ...] = ()
    lengths: tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...] = ()
    overheads: EngineOverheads | None = None
    step_end_seconds: Annotated[float, Meta(ge=0, le=MOST_VALUE)] | None = None
    format: int = COSTS_FORMAT


def costs_to_json(table: CostTable) -> bytes:
    """Indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n"


def load_costs(path: Path, where: Where | None = None) -> CostTable:
    """A table from its file, or from the directory of a finished run. Raises ConfigError at `where`."""
    file = path / COSTS_FILE if path.is_dir() else path
    place = where or Where(str(file))
    try:
        content = read_file(file)
    except FileNotFoundError as error:
        raise ConfigError([Problem(place, *_missing(path, file), "costs")]) from error
    except OSError as error:
        text = f"the costs can't be read: {error.strerror or error}: {file}"
        raise ConfigError([Problem(place, text, "", "costs")]) from error
    try:
        head = msgspec.json.decode(content, type=_Head)
        if not OLDEST_FORMAT <= head.format <= COSTS_FORMAT:
            known = f"formats {OLDEST_FORMAT} to {COSTS_FORMAT}"
            text = f"{file} has format {head.format}; this version reads {known}"
            raise ConfigError([Problem(place, text, "make it again with `realgraph profile`, or a run", "costs")])
        table = replace(msgspec.json.decode(content, type=CostTable), format=COSTS_FORMAT)
        slow = [name for name in FRACTIONS if table.factors and 0 < getattr(table.factors, name) < 1 / MOST_VALUE]
        if slow:
            raise msgspec.ValidationError(f"expected 0, or at least {1 / MOST_VALUE:g} - at `$.factors.{slow[0]}`")
        return table
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "expected what `realgraph profile --out FILE` or a finished run writes"
        raise ConfigError([Problem(place, f"{file} is no table of costs: {error}", hint, "costs")]) from error


class _Head(Struct, frozen=True):
    """The part that every version of the file has."""

    format: int


def _missing(path: Path, file: Path) -> tuple[str, str]:
    """The message about a table that is not there: text and hint."""
    if not path.is_dir():
        return f"no file or run directory {str(path)!r}", "measure this machine: realgraph profile --out FILE"
    if (path / "job.json").is_file():
        text = f"the run in {path} has left no {COSTS_FILE}"
        return text, "a run writes it at its end, after some steps; or measure: realgraph profile --out FILE"
    return f"{path} is no run directory: it holds no {COSTS_FILE}", "name a run directory, or a table's file"
