"""The distance of measured seconds from predicted ones, by phase and regime; and the bar round a prediction that
follows. Pure.

A deviation is the standard deviation of ln(measured / predicted). It is learnt from the residuals of published
measurements, as the margin of memory is (`costs/memory/margin.py`); the rule that makes `SPREADS` is in
`benchmarks/published_errors.py`.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import exp
from statistics import NormalDist
from typing import Literal

from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import Layout

SpreadPhase = Literal["train", "inference", "generate", "reallocate", "step"]
SpreadRegime = Literal["plain", "cut", "experts", "shipped cpu", "profiled cpu"]
BAR_SHARE = 0.8  # of measurements that lie within the bar

# By `published_errors.learnt`: of GPUs from 284 rows of 14 systems, of CPUs from this project's own on three machines
# (benchmarks/results/predictions*.json). A call of several regimes has the widest of their deviations. `step`: of a
# whole step, besides its calls' and moves'.
SPREADS: dict[SpreadPhase, dict[SpreadRegime, float]] = {
    "train": {"plain": 0.07, "experts": 0.12, "shipped cpu": 0.38, "profiled cpu": 0.32},
    "inference": {"plain": 0.23, "shipped cpu": 0.42, "profiled cpu": 0.30},
    "generate": {"plain": 0.07, "cut": 0.13, "shipped cpu": 0.41, "profiled cpu": 0.30},
    "reallocate": {"plain": 0.18},
    "step": {"plain": 0.18},
}

# Of a call that was measured itself, on CPUs: by the same rule from ln(median / least) of its repeats in five rounds of
# runs, in the same files. Of GPUs there is no such record: there a phase has its plain deviation, what is left beside a
# factor that is fitted to other rows of the system.
MEASURED_CPU: dict[SpreadPhase, float] = {"train": 0.15, "inference": 0.16, "generate": 0.16}


def regimes_of(
    phase: SpreadPhase, model: ModelSpec, layout: Layout, *, cpu: bool = False, profiled: bool = False
) -> Iterator[SpreadRegime]:
    """The regimes of a call. profiled: on a machine whose factors were measured, which tells something of CPUs alone:
    nobody has published predictions for GPUs after a profile."""
    known = SPREADS[phase]
    if cpu:
        yield "profiled cpu" if profiled else "shipped cpu"
        return
    yield "plain"
    if "experts" in known and model.experts:
        yield "experts"
    if "cut" in known and layout.tp * layout.pp > 1:
        yield "cut"


def spread_of(phase: SpreadPhase, regimes: Iterable[SpreadRegime]) -> float:
    """The widest deviation of a call's regimes; of a phase that has none of them, its plain one."""
    known = SPREADS[phase]
    return max((known[one] for one in regimes if one in known), default=known["plain"])


@lru_cache(maxsize=16384)
def deviation_of(phase: SpreadPhase, model: ModelSpec, layout: Layout, *, cpu: bool, profiled: bool) -> float:
    """The deviation of a call under a layout, see `regimes_of`."""
    return spread_of(phase, regimes_of(phase, model, layout, cpu=cpu, profiled=profiled))


def measured_deviation(phase: SpreadPhase, *, cpu: bool) -> float:
    """The least deviation of a call that was measured, or whose phase was: its repeats in one run do not show by how
    much another run differs."""
    return MEASURED_CPU.get(phase, SPREADS[phase]["plain"]) if cpu else SPREADS[phase]["plain"]


def half_width(deviation: float, share: float = BAR_SHARE) -> float:
    """The distance from a prediction, as a natural logarithm, within which the share of measurements lies: residuals
    err normally, as far as the deviations know."""
    return NormalDist().inv_cdf((1 + share) / 2) * deviation


def bar_of(seconds: float, deviation: float, share: float = BAR_SHARE) -> tuple[float, float]:
    """The least and the most seconds of the bar round a prediction."""
    factor = exp(half_width(deviation, share))
    return seconds / factor, seconds * factor
