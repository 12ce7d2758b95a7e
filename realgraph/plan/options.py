"""The options of `realgraph plan` on the command line. Data and the reading of it; plans nothing."""

from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import MOST_DEVICES

COMMAND_LINE = "command line"


class PlanOptions(Struct, frozen=True):
    """Everything but the run file and its overrides; the options of the same names, see docs/planning.md."""

    json_out: bool = False
    out: Path | None = None
    edited: Path | None = None  # `--plan`
    explain: str | None = None  # a call
    html: Path | None = None
    trace: Path | None = None
    run_dir: Path | None = None  # `--run`
    devices: str | None = None  # cluster sizes: `8..1024`, or `8,12,16`
    target: float | None = None  # seconds of a period
    robust: bool = False
    colocated: bool = False
    exact: bool = False  # the fastest plan, not the simplest of those within its error bar
    brief: bool = False
    time_limit: float = 60.0  # seconds
    seed: int = 0
    price: float | None = None  # USD for an hour of a device
    costs: Path | None = None
    lengths: Path | None = None


NAMES = {
    "json_out": "json",
    "edited": "plan",
    "run_dir": "run",
}  # options that are called otherwise on the command line
EXCLUSIVE = (
    ("edited", "robust"),
    ("edited", "devices"),
    ("robust", "devices"),
    ("edited", "exact"),
    ("robust", "exact"),
    ("devices", "exact"),
)


def refuse_others(options: PlanOptions, known: Collection[str], what: str) -> None:
    """Raise ConfigError for the options that `what` would leave unheard: all that are given but the known ones."""
    unheard = [_flag(name) for name in _given(options) if name not in known]
    if unheard:
        raise _error(f"{what} takes no {', '.join(unheard)}", "leave it out", unheard[0])


def _given(options: PlanOptions) -> list[str]:
    """The options that say something else than the default."""
    plain = PlanOptions()
    return [name for name in PlanOptions.__struct_fields__ if getattr(options, name) != getattr(plain, name)]


def refuse_conflicts(options: PlanOptions) -> None:
    """Raise ConfigError for two options of which only one would be heard, and for a target without sizes."""
    given = _given(options)
    for one, other in EXCLUSIVE:
        if one in given and other in given:
            text = f"{_flag(one)} and {_flag(other)} say two things: {MEANS[one]}, and {MEANS[other]}"
            raise _error(text, f"give {_flag(one)} or {_flag(other)}", _flag(other))
    if options.target is not None and options.devices is None:
        raise _error("a target chooses among cluster sizes", "add --devices 8..1024", "--target")


MEANS = {
    "edited": "evaluate this plan",
    "robust": "choose the most robust plan",
    "devices": "plan for each of these sizes",
    "exact": "take the fastest plan",
}


def _flag(name: str) -> str:
    return f"--{NAMES.get(name, name).replace('_', '-')}"


def sizes_of(text: str, per_node: int) -> tuple[int, ...]:
    """The cluster sizes of `--devices`: `8..1024` doubles from 8 on and ends with 1024; `8,24,96` are themselves.

    A size above one node is whole nodes of `per_node`. Raises ConfigError.
    """
    try:
        if ".." in text:
            first, _, last = text.partition("..")
            sizes = _doubled(int(first), int(last))
        else:
            sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise _error(f"{text!r} names no sizes", "such as 8..1024, or 8,24,96") from None
    wrong = [size for size in sizes if not 1 <= size <= MOST_DEVICES]
    if wrong or not sizes:
        raise _error(f"a cluster has 1 to {MOST_DEVICES:,} devices, not {f'{wrong[-1]:,}' if wrong else text}", "")
    odd = [size for size in sizes if size > per_node and size % per_node]
    if odd:
        hint = f"a multiple of {per_node}, the devices of a node"
        raise _error(f"{odd[0]} devices are no whole nodes of {per_node}", hint)
    return sizes


def _doubled(first: int, last: int) -> tuple[int, ...]:
    if not 1 <= first <= last:
        raise ValueError(f"{first}..{last}")
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys((*sizes, last)))


def _error(text: str, hint: str, flag: str = "--devices") -> ConfigError:
    return ConfigError([Problem(Where(COMMAND_LINE, path=flag), text, hint, flag.removeprefix("--"))])
