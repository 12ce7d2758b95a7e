"""Bytes by which a device's peak may exceed its prediction: a quantile of what was measured beyond it. Pure.

A prediction counts tensors. What allocators waste between them, work spaces of kernels, tensors whose lives overlap
otherwise than counted, show in measured peaks alone. Their spread is that of the published peaks in
`benchmarks/published_memory.py`; the rule that makes `SPREADS` of them is in `published_spread.py` beside it.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, hypot
from statistics import NormalDist
from typing import Annotated, Literal

from msgspec import Meta, Struct

from realgraph.planner.costs.memory.terms import Footprint
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import Layout

Regime = Literal["plain", "long", "experts", "stages"]
LEAST_QUANTILE = 0.5  # the prediction itself
Quantile = Annotated[float, Meta(ge=LEAST_QUANTILE, lt=1)]
LONG_TOKENS = 32_768  # of a sample, from which on it is long


class MemorySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The risk of running out of memory that a plan may take."""

    quantile: Quantile = 0.95  # of the peaks that a call may have, which must fit; 0.5: the prediction alone


class Spread(Struct, frozen=True):
    """Standard deviation of a peak: the root of the sum of both parts' squares."""

    fixed_bytes: int  # whatever the call, of GPUs
    share: float  # of all that a running call adds but caches, which are as large as they are asked to be


# By `published_spread.learnt` from 83 peaks of 3 systems. A call of several regimes has the widest of their spreads.
SPREADS: dict[Regime, Spread] = {
    "plain": Spread(fixed_bytes=250_000_000, share=0.05),
    "long": Spread(fixed_bytes=250_000_000, share=0.09),
    "experts": Spread(fixed_bytes=0, share=0.0),  # three peaks of one system, none above what the plain regime allows
    "stages": Spread(fixed_bytes=2_750_000_000, share=0.0),
}


def regimes_of(model: ModelSpec, layout: Layout, sample_tokens: float) -> Iterator[Regime]:
    """The regimes of a call whose longest sample has `sample_tokens` tokens."""
    yield "plain"
    if sample_tokens > LONG_TOKENS or layout.cp > 1:
        yield "long"
    if model.experts:
        yield "experts"
    if layout.pp > 1:
        yield "stages"


def spread_of(regimes: Iterator[Regime], added: Footprint, *, cpu: bool) -> float:
    """Standard deviation, in bytes, of a peak while a call runs that adds so much: the widest of its regimes.

    On CPUs, whose processes have no communicators and no caching allocator, the fixed part is 0.
    """
    varies = added.total - added.kv_cache
    return max(hypot(0 if cpu else SPREADS[one].fixed_bytes, SPREADS[one].share * varies) for one in regimes)


def margin_bytes(deviation: float, quantile: float) -> int:
    """Bytes beyond the prediction below which the share `quantile` of peaks lies; 0 for 0.5. Peaks err normally, as
    far as the spreads know: they were made so that 95 % of the measured ones lie below."""
    return ceil(max(0.0, _deviations(quantile)) * deviation)


@lru_cache(maxsize=64)
def _deviations(quantile: float) -> float:
    """Standard deviations from the mean to a quantile."""
    return NormalDist().inv_cdf(quantile)
