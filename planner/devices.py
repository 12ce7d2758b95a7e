"""The table of device kinds: peak rates from data sheets, and the fractions of them that kernels reach."""

from functools import cache
from importlib.resources import files

import msgspec
import yaml
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """Reached fractions of the peak rates, and fixed seconds; see the head of devices.yaml.

    gemm_tokens, gemm_width: rows and columns of a matrix product at which half of `gemm` is reached.
    step, layer, sequence: seconds of one decode step that no arithmetic explains.
    """

    gemm: float
    gemm_tokens: float
    gemm_width: float
    attention: float
    memory: float
    kv: float
    link: float
    nic: float
    step_seconds: float
    layer_seconds: float
    sequence_seconds: float


class DeviceKind(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of device. Rates are peaks per second, *_gb in 10^9 bytes; `names` match what its driver calls it."""

    source: str
    names: tuple[str, ...]
    flops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float
    nic_gb_per_s: float
    pcie_gb_per_s: float
    per_node: int
    host_memory_gb: float
    costs: Costs


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """The shipped table."""
    table = yaml.safe_load((files("realgraph.planner") / "devices.yaml").read_text(encoding="utf-8"))
    return msgspec.convert(table["kinds"], dict[str, DeviceKind])


def device_kind(name: str, where: Where | None = None) -> DeviceKind:
    """One row of the table. Raises ConfigError with the closest spelling."""
    kinds = device_kinds()
    if name in kinds:
        return kinds[name]
    lowered = {known.lower(): known for known in kinds}
    hint = f"did you mean {lowered[name.lower()]!r}?" if name.lower() in lowered else suggest(name, kinds)
    place = where or Where(path="$.cluster.kind")
    raise ConfigError([Problem(place, f"unknown device kind {name!r}", hint, "cluster")])
