"""Measured costs that replace or correct the shipped factors: what `realgraph profile` and finished runs write.

Data only; `profile` and the run write it, `tables.py` applies it, `--costs FILE` names it.
"""

from typing import Literal

from msgspec import Struct

from realgraph.planner.devices import Costs

COSTS_FORMAT = 1
Phase = Literal["train", "inference", "generate", "reallocate"]


class PhaseFactor(Struct, frozen=True, forbid_unknown_fields=True):
    """measured seconds = factor x predicted + constant_seconds; error: relative standard deviation of what is left."""

    factor: float = 1.0
    constant_seconds: float = 0.0
    error: float = 0.0
    count: int = 0  # measurements behind it


class MeasuredCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that one call really took under one layout: the median over `count` steps and its relative deviation.

    workload: the hash of the workload it was measured with; the planner takes the seconds as they are where graph
    call, model, layout, micro-batch and workload are equal, and otherwise learns a phase factor from them.
    """

    call: str
    phase: Phase
    model: str  # hash of the ModelSpec
    workload: str
    devices: int
    dp: int
    tp: int
    pp: int
    ep: int
    cp: int
    sharding: Literal["replicated", "fsdp"]
    max_tokens_per_microbatch: int
    seconds: float
    predicted_seconds: float  # by the shipped factors
    error: float = 0.0
    count: int = 1


class CostTable(Struct, frozen=True, forbid_unknown_fields=True):
    """kind: of device, as in devices.yaml. factors: replace the kind's own. lengths: measured new tokens of samples,
    at equal steps of probability, rising."""

    kind: str = ""
    name: str = ""  # of the machine or run
    date: str = ""  # ISO 8601
    factors: Costs | None = None
    phases: dict[Phase, PhaseFactor] = {}
    calls: tuple[MeasuredCall, ...] = ()
    lengths: tuple[int, ...] = ()
    format: int = COSTS_FORMAT
