"""Errors by regime, where one median over all of a phase hides a bad one; and of each phase by constants that are told
without the system that is predicted.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from msgspec import Struct

from benchmarks.cost_tables import Target, percentile
from benchmarks.published import TIMES, Prediction

Pairs = Sequence[tuple[Prediction, Prediction]]  # of a row, by all constants and by those told without its system

REGIME_BOUND = 0.12  # of the median error of generation in each regime
BILLIONS = ((10.0, "below 10B"), (70.0, "10B to 70B"), (float("inf"), "70B and more"))
RANKS = ((1, "tp 1"), (4, "tp 2 to 4"), (1 << 30, "tp 8 and more"))
LONG_ANSWER = 2000  # tokens
ANSWER = re.compile(r"OSL (\d+)")


class Regime(Struct, frozen=True):
    """The rows of one regime. bias: median of predicted / measured seconds - 1: below 0 is too fast."""

    rows: int
    median: float
    bias: float

    @property
    def met(self) -> bool:
        return self.median <= REGIME_BOUND


class LeftOut(Struct, frozen=True):
    """Relative errors of a phase: by factors that all other systems tell (None: there is no other), and without any."""

    rows: int
    systems: int
    median: float | None
    p90: float | None
    all_in_median: float
    all_in_p90: float


def regime_of(one: Prediction) -> str:
    """The regime of a row of a phase; '' where its source does not tell enough."""
    size = next(name for most, name in BILLIONS if one.row.number("params_b") < most)
    ranks = next(name for most, name in RANKS if (one.row.count("tp", 1) or 1) <= most)
    if one.phase == "generate":
        answer = ANSWER.search(one.row.notes)
        if answer is None:
            return ""
        length = "2,000 tokens and more" if int(answer[1]) >= LONG_ANSWER else "fewer tokens"
        return f"generate, {size}, {ranks}, {length}"
    if one.phase == "train":
        stages = ", stages" if one.row.count("pp", 1) > 1 else ""
        return f"train, {'experts' if one.moe else 'dense'}, {size}, {ranks}{stages}"
    return f"{one.phase}, {size}" if one.phase == "rl_step" else ""


def regimes(predictions: Sequence[Prediction]) -> dict[str, Regime]:
    """The regimes that have rows, in the order of their names."""
    found: dict[str, list[Prediction]] = defaultdict(list)
    for one in predictions:
        if name := regime_of(one):
            found[name].append(one)
    return {name: _regime(found[name]) for name in sorted(found)}


def _regime(rows: Sequence[Prediction]) -> Regime:
    slower = [_seconds_over(one) - 1 for one in rows]
    return Regime(len(rows), median(error(one) for one in rows), median(slower))


def _seconds_over(one: Prediction) -> float:
    """Predicted over measured seconds, whatever the unit."""
    ratio = one.predicted / one.measured
    return ratio if one.row.unit in TIMES else 1 / ratio


def regime_targets(found: dict[str, Regime]) -> Iterator[Target]:
    """The claims on generation: its median error in every regime."""
    for name, one in found.items():
        if name.startswith("generate"):
            yield Target(f"{name}: median error of {one.rows}", one.median, REGIME_BOUND)


def left_out(pairs: Pairs, systems: Sequence[str]) -> dict[str, LeftOut]:
    """Each phase's errors by what all other systems tell, beside those by all. systems: of each pair."""
    found: dict[str, list[tuple[Prediction, Prediction, str]]] = defaultdict(list)
    for (plain, without), system in zip(pairs, systems, strict=True):
        if plain.phase != "fits":
            found[_kind(plain)].append((plain, without, system))
    return {phase: _left_out(found[phase]) for phase in sorted(found)}


def _kind(one: Prediction) -> str:
    return f"train, {'experts' if one.moe else 'dense'}" if one.phase == "train" else one.phase


def _left_out(rows: Sequence[tuple[Prediction, Prediction, str]]) -> LeftOut:
    plain, without = [error(one) for one, _, _ in rows], [error(two) for _, two, _ in rows]
    systems = {system for _, _, system in rows}
    several = len(systems) > 1
    return LeftOut(
        rows=len(rows),
        systems=len(systems),
        median=median(without) if several else None,
        p90=percentile(without, 0.9) if several else None,
        all_in_median=median(plain),
        all_in_p90=percentile(plain, 0.9),
    )


def error(one: Prediction) -> float:
    """Relative error."""
    return abs(one.predicted / one.measured - 1)
