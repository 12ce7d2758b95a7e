"""The table of device kinds: peak rates from data sheets, and the fractions of them that kernels reach."""

from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.planner.inputs.shipped import shipped_table

Rate = Annotated[float, Meta(ge=1e-6, le=1e3)]  # a fraction, or a ratio; beyond it is a slip of the pen
Amount = Annotated[float, Meta(ge=0, le=1e3)]  # a fraction or seconds
Rows = Annotated[float, Meta(ge=0, le=1e6)]


class EfficiencyFactors(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Reached fractions of the peak rates, and fixed seconds; see the head of devices.yaml.

    From `elementwise` on: what the calls of a small model are made of. `realgraph profile` measures it; the shipped
    table has it of CPUs.
    """

    gemm: Rate
    gemm_tokens: Rows  # rows of a matrix product at which half of `gemm` is reached
    gemm_width: Rows  # columns, likewise
    attention: Rate
    memory: Rate
    kv: Rate
    link: Rate
    nic: Rate
    step_seconds: Amount  # of one decode step, that no arithmetic explains
    layer_seconds: Amount  # of each of its layers, likewise
    sequence_seconds: Amount  # of each of its sequences, likewise
    fp8: Rate = 1.0  # of matrix products in fp8, over that in bf16
    sustained: Rate = 1.0  # share of the clock that long compute keeps within the power limit
    # Rows whose seconds each product of a packed pass costs besides: tiles and waves left half empty. 0: gemm_tokens.
    pass_tokens: Rows = 0.0
    host: Rate = 0.9  # of the rate between a GPU and its host, by copies from and to pinned memory
    elementwise: Amount = 0.0  # of the memory rate, by element-wise operations of a pass; 0: as `memory`
    optimizer: Amount = 0.0  # of the memory rate, by an optimizer step; 0: as `memory`
    backward: Rate = 2.0  # seconds of a backward pass over those of its forward
    pass_layer_seconds: Amount | None = None  # of a layer in a packed forward pass; None: as in a decode step
    microbatch_seconds: Amount = 0.0  # of a micro-batch's passes
    optimizer_step_seconds: Amount = 0.0
    collective_seconds: Amount | None = None  # of a round of an all-reduce, which has two; None: 10 us
    # Of the link's peak, and fixed seconds, of all-gathers, reduce-scatters, all-to-alls, and messages from one device
    # to another; 0 and None: as `link` and `collective_seconds`.
    gather: Amount = 0.0
    gather_seconds: Amount | None = None
    scatter: Amount = 0.0
    scatter_seconds: Amount | None = None
    exchange: Amount = 0.0
    exchange_seconds: Amount | None = None
    p2p: Amount = 0.0
    p2p_seconds: Amount | None = None
    call_seconds: Amount = 0.0  # of a call on a mesh, to send, gather and store
    sample_seconds: Amount = 0.0  # of each of its samples, likewise
    admission_seconds: Amount = 0.0  # of each sample that generation takes in and gives out, besides its decode steps
    function_seconds: Amount | None = None  # of each sample of a function in one worker's subprocess; None: 0.1 ms


class DeviceKind(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of device. Rates are peaks per second, *_gb in 10^9 bytes; `names` match what its driver calls it.

    usd_per_hour: a typical price on demand, for comparisons; 0 where none is known.
    """

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
    usd_per_hour: float
    costs: EfficiencyFactors


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """The shipped table."""
    return msgspec.convert(shipped_table("devices")["kinds"], dict[str, DeviceKind])


def device_kind(name: str, where: Where | None = None) -> DeviceKind:
    """One row of the table. Raises ConfigError with the closest spelling."""
    kinds = device_kinds()
    if name in kinds:
        return kinds[name]
    lowered = {known.lower(): known for known in kinds}
    hint = f"did you mean {lowered[name.lower()]!r}?" if name.lower() in lowered else suggest(name, kinds)
    place = where or Where(path="$.cluster.kind")
    raise ConfigError([Problem(place, f"unknown device kind {name!r}", hint, "cluster")])
