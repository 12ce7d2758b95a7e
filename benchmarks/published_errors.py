"""The spread of measured seconds round their predictions, by phase and regime.

The deviations that the planner ships (`planner/costs/spread.py`), and so the bar that `realgraph plan` prints, are
`learnt` here. Leaving a system out shows what they are worth for one that nobody has measured.
"""

import json
from collections.abc import Mapping, Sequence
from math import hypot, log
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.published import TIMES, Prediction
from realgraph.planner.costs.spread import BAR_SHARE, SPREADS, SpreadPhase, SpreadRegime, half_width

OWN_RESULTS = tuple(sorted((Path(__file__).parent / "results").glob("predictions*.json")))  # of one machine each
PHASES: dict[str, SpreadPhase] = {  # of published rows
    "train": "train",
    "inference": "inference",
    "generate": "generate",
    "weight_sync": "reallocate",
    "rl_step": "step",
}
OWN_CALLS: dict[str, SpreadPhase] = {"rollout": "generate", "ref_logp": "inference", "train": "train"}
OWN_REGIMES: dict[SpreadRegime, str] = {"shipped cpu": "shipped", "profiled cpu": "predicted"}
GRID = tuple(i / 100 for i in range(101))  # deviations that are tried
LEAST_ROWS = 5  # of which a fifth is at least one

Spreads = Mapping[SpreadPhase, Mapping[SpreadRegime, float]]


class Residual(Struct, frozen=True):
    """ln(measured / predicted) seconds of one row, and what its bar depends on."""

    phase: SpreadPhase
    regimes: tuple[SpreadRegime, ...]
    value: float
    system: str = ""
    beside: float = 0.0  # deviation of what the spreads of other phases say

    def within(self, spreads: Spreads) -> bool:
        """True where the row lies within its bar."""
        known = spreads[self.phase]
        deviation = max((known[one] for one in self.regimes if one in known), default=known["plain"])
        return abs(self.value) <= half_width(hypot(deviation, self.beside)) + 1e-9


class BarCoverage(Struct, frozen=True):
    """The figures of some rows; within: the share within their bars. bias: median of ln(predicted / measured)."""

    rows: int
    bias: float
    within: float


def residuals(predictions: Sequence[Prediction], systems: Sequence[str]) -> list[Residual]:
    """Those of published rows that are seconds or speeds. systems: of each prediction."""
    found = []
    for one, system in zip(predictions, systems, strict=True):
        if one.phase in PHASES:
            slower = log(one.measured / one.predicted) * (1 if one.row.unit in TIMES else -1)
            found.append(Residual(PHASES[one.phase], one.regimes, slower, system, one.beside))
    return found


def own_residuals(files: Sequence[Path] = OWN_RESULTS) -> list[Residual]:
    """Those of this project's calls on CPUs, by the shipped factors and after a profile of the machine."""
    rows = [row for file in files for row in json.loads(file.read_text("utf-8"))["rows"]]
    return [
        Residual(OWN_CALLS[row["call"]], (regime,), log(row["measured"] / row[field]), "realgraph on CPUs")
        for regime, field in OWN_REGIMES.items()
        for row in rows
        if row["call"] in OWN_CALLS
    ]


def learnt(rows: Sequence[Residual]) -> dict[SpreadPhase, dict[SpreadRegime, float]]:
    """Each phase's deviations, regime after regime: the least of a grid with which 80 % of the regime's rows lie within
    their 80 % bars, where those of earlier regimes stand. Of fewer than five rows, all."""
    found: dict[SpreadPhase, dict[SpreadRegime, float]] = {
        phase: dict.fromkeys(regimes, 0.0) for phase, regimes in SPREADS.items()
    }
    for phase, regimes in SPREADS.items():
        for regime in regimes:
            own = of_regime(rows, phase, regime)
            found[phase][regime] = _least(own, found, regime) if own else 0.0
    return found


def _least(own: Sequence[Residual], known: Spreads, regime: SpreadRegime) -> float:
    """The least deviation of the grid that covers so large a share of a regime's rows; the widest where none does."""
    wanted, phase = 1.0 if len(own) < LEAST_ROWS else BAR_SHARE, own[0].phase
    return next((one for one in GRID if covered(own, with_one(known, phase, regime, one)) >= wanted), GRID[-1])


def with_one(known: Spreads, phase: SpreadPhase, regime: SpreadRegime, deviation: float) -> Spreads:
    """The spreads with another deviation of one regime."""
    own: Mapping[SpreadRegime, float] = {**known[phase], regime: deviation}
    return {**known, phase: own}


def regimes_learnt() -> list[tuple[SpreadPhase, SpreadRegime]]:
    """Every phase and regime that the planner has a deviation of."""
    return [(phase, regime) for phase, regimes in SPREADS.items() for regime in regimes]


def of_regime(rows: Sequence[Residual], phase: SpreadPhase, regime: SpreadRegime) -> list[Residual]:
    """The rows of a phase's regime; those of no other, for the plain one."""
    of_phase = [row for row in rows if row.phase == phase]
    known = SPREADS[phase]
    if regime == "plain":
        return [row for row in of_phase if all(one == "plain" or one not in known for one in row.regimes)]
    return [row for row in of_phase if regime in row.regimes]


def covered(rows: Sequence[Residual], spreads: Spreads) -> float:
    """Share of the rows within their bars."""
    return sum(row.within(spreads) for row in rows) / len(rows)


def coverage(rows: Sequence[Residual], spreads: Spreads = SPREADS) -> dict[str, BarCoverage]:
    """The figures of each phase's regimes, and of all published rows."""
    sets = {f"{phase}, {regime}": of_regime(rows, phase, regime) for phase in SPREADS for regime in SPREADS[phase]}
    sets["all published"] = [row for row in rows if not set(row.regimes) & set(OWN_REGIMES)]
    return {name: _coverage_of(own, spreads) for name, own in sets.items() if own}


def coverage_by_others(rows: Sequence[Residual]) -> dict[str, BarCoverage]:
    """The figures of each published system, by the deviations that the rows of all others tell; and of all of them.
    Phases that no other system tells are left out."""
    published = [row for row in rows if not set(row.regimes) & set(OWN_REGIMES)]
    found, within, every = {}, 0.0, []
    for name in sorted({row.system for row in published}):
        others = [row for row in published if row.system != name]
        known = {row.phase for row in others}
        own = [row for row in published if row.system == name and row.phase in known]
        if own:
            found[name] = _coverage_of(own, learnt(others))
            within += found[name].within * len(own)
            every += own
    if every:
        found["all"] = BarCoverage(len(every), _coverage_of(every, SPREADS).bias, within / len(every))
    return found


def _coverage_of(rows: Sequence[Residual], spreads: Spreads) -> BarCoverage:
    return BarCoverage(len(rows), -median(row.value for row in rows), covered(rows, spreads))
