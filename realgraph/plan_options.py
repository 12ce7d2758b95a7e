"""What a user asks of `realgraph plan` on the command line. Data and the reading of it; plans nothing."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.cluster import MOST_DEVICES

COMMAND_LINE = "command line"


class PlanOptions(Struct, frozen=True):
    """Everything but the run file and its overrides; the options of the same names, see docs/planning.md.

    edited: `--plan`. engine None: what the cluster's kind suggests. explain: a call. devices: `8..1024`, or `8,12,16`.
    """

    json_out: bool = False
    out: Path | None = None
    edited: Path | None = None
    explain: str | None = None
    html: Path | None = None
    trace: Path | None = None
    run_dir: Path | None = None
    devices: str | None = None
    target: float | None = None
    robust: bool = False
    colocated: bool = False
    brief: bool = False
    time_limit: float = 60.0
    seed: int = 0
    price: float | None = None
    costs: Path | None = None
    engine: Literal["installed", "any"] | None = None
    lengths: Path | None = None


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
        raise _error(f"a cluster has 1 to {MOST_DEVICES:,} devices, not {wrong[0] if wrong else text}", "")
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


def _error(text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where(COMMAND_LINE, path="--devices"), text, hint, "devices")])
