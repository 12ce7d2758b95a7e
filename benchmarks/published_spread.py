"""The spread of measured memory peaks round their predictions, by regime.

The spreads that the planner ships (`planner/costs/memory/margin.py`) are `learnt` here; leaving a system out shows what
they are worth for one that nobody has measured.
"""

from collections.abc import Mapping, Sequence
from math import hypot
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published import Row
from realgraph.planner.costs.memory.margin import LEAST_QUANTILE, SPREADS, Regime, Spread, margin_bytes

QUANTILE = 0.95  # that the spreads were made for
FIXED_GB = tuple(i / 4 for i in range(17))  # tried as fixed parts
SHARES = tuple(i / 100 for i in range(21))
FULL_SHARE = 0.995  # of a device's memory, from which on it is full
CONTRADICTED_SHARE = 0.95
LEAST_ROWS = 20  # of which the largest 5 % is at least one


class Peak(Struct, frozen=True):
    """A measured peak in bytes beside its prediction, and what its spread depends on."""

    row: Row
    regimes: tuple[Regime, ...]
    measured: float
    predicted: float
    varies: float  # what a pass adds, caches aside
    device_bytes: int
    unknown: float  # predicted without the constants that its system alone tells

    def bound(self, spreads: Mapping[Regime, Spread], quantile: float = QUANTILE) -> float:
        """Bytes below which the peak lies, by these spreads."""
        widest = max(hypot(spreads[one].fixed_bytes, spreads[one].share * self.varies) for one in self.regimes)
        return self.predicted + margin_bytes(widest, quantile)


def telling(peaks: Sequence[Peak]) -> tuple[list[Peak], list[Peak]]:
    """The peaks that tell what a configuration needs, and those that don't: of a device that is full to the last byte,
    which tells what its allocator took, and of fewer tokens than another row of the same source has under the same
    settings with less memory."""
    left = [peak for peak in peaks if peak.measured >= FULL_SHARE * peak.device_bytes or _contradicted(peak, peaks)]
    return [peak for peak in peaks if peak not in left], left


def _contradicted(peak: Peak, peaks: Sequence[Peak]) -> bool:
    """True where the same settings with larger micro-batches took clearly less."""

    def settings(one: Peak) -> Row:
        return replace(one.row, source=one.row.source.split(" L")[0], micro_batch="", global_batch="", value="")

    return any(
        settings(other) == settings(peak)
        and other.row.number("micro_batch") > peak.row.number("micro_batch")
        and other.measured < CONTRADICTED_SHARE * peak.measured
        for other in peaks
    )


def of_regime(peaks: Sequence[Peak], regime: Regime) -> list[Peak]:
    """The peaks of a regime; those of no other, for the plain one."""
    return [peak for peak in peaks if (peak.regimes == ("plain",) if regime == "plain" else regime in peak.regimes)]


def learnt(peaks: Sequence[Peak]) -> dict[Regime, Spread]:
    """Each regime's spread, one after the other: of those of a grid the one of the least mean margin with which 95 % of
    its peaks lie below the 95 % bound, as a normal distribution has it, where earlier regimes' spreads stand. Fewer
    than 20 peaks can't tell what 5 % of them exceed: all of them must lie below then."""
    found: dict[Regime, Spread] = dict.fromkeys(SPREADS, Spread(0, 0.0))
    for regime in SPREADS:
        own = of_regime(peaks, regime)
        found[regime] = _narrowest(own, found, regime) if own else Spread(0, 0.0)
    return found


def _narrowest(peaks: Sequence[Peak], known: Mapping[Regime, Spread], regime: Regime) -> Spread:
    """The spread of the grid with the least mean margin that covers so large a share of the peaks; the widest where
    none does."""
    wanted = 1.0 if len(peaks) < LEAST_ROWS else QUANTILE
    grid = [Spread(round(1e9 * fixed), share) for fixed in FIXED_GB for share in SHARES]
    enough = [one for one in grid if covered(peaks, {**known, regime: one}) >= wanted] or grid[-1:]
    return min(enough, key=lambda one: sum(hypot(one.fixed_bytes, one.share * peak.varies) for peak in peaks))


def covered(peaks: Sequence[Peak], spreads: Mapping[Regime, Spread], quantile: float = QUANTILE) -> float:
    """Share of the peaks below their bounds."""
    return sum(peak.measured <= peak.bound(spreads, quantile) for peak in peaks) / len(peaks)


def bias(peaks: Sequence[Peak]) -> float:
    """Median signed relative error."""
    return median(peak.predicted / peak.measured - 1 for peak in peaks)


class PeakCoverage(Struct, frozen=True):
    """The figures of a regime, or of a regime's peaks of one system by what all other systems tell."""

    rows: int
    bias: float
    below_mean: float  # share of the peaks below their predictions
    below_bound: float  # and below the 95 % bound


def coverage(peaks: Sequence[Peak], spreads: Mapping[Regime, Spread]) -> dict[str, PeakCoverage]:
    """The figures of each regime, and of all."""
    sets = {regime: of_regime(peaks, regime) for regime in SPREADS}
    found = {f"{name}": _coverage_of(own, spreads) for name, own in sets.items() if own}
    return {**found, "all": _coverage_of(peaks, spreads)} if peaks else found


def _coverage_of(peaks: Sequence[Peak], spreads: Mapping[Regime, Spread]) -> PeakCoverage:
    return PeakCoverage(len(peaks), bias(peaks), covered(peaks, spreads, LEAST_QUANTILE), covered(peaks, spreads))


def coverage_by_others(peaks: Sequence[Peak], systems: Mapping[str, Sequence[Peak]]) -> dict[str, PeakCoverage]:
    """The figures of each system's regimes, with the spreads that the peaks of all others tell, and without the
    constants that its own rows tell."""
    found: dict[str, PeakCoverage] = {}
    for name, own in sorted(systems.items()):
        others = learnt([peak for peak in peaks if peak not in own])
        unseen = [replace(peak, predicted=peak.unknown) for peak in own]
        found |= {f"{name}, {regime}": one for regime, one in coverage(unseen, others).items()}
    return found
