"""The spreads that measured peaks tell: they cover what they are learnt from, and what tells nothing is left aside."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from benchmarks.cost_model import memory_targets
from benchmarks.published import Row
from benchmarks.published_spread import (
    LEAST_ROWS,
    QUANTILE,
    Peak,
    bias,
    coverage,
    coverage_by_others,
    covered,
    learnt,
    of_regime,
    telling,
)
from realgraph.planner.costs.memory.margin import SPREADS, Regime, Spread

BLANK = Row(*[""] * len(Row.__struct_fields__))
DEVICE = 80 * 10**9


def peak(measured: float, regimes: tuple[Regime, ...] = ("plain",), **fields: str) -> Peak:
    return Peak(replace(BLANK, **fields), regimes, measured, 40e9, 20e9, DEVICE, 40e9)


def drawn(rng: random.Random, count: int, regimes: tuple[Regime, ...]) -> list[Peak]:
    return [peak(40e9 + rng.gauss(0, 2e9), regimes, source=f"{regimes} {i}") for i in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_spreads_cover_so_many_of_their_peaks_and_the_least_grid_step_less_does_not(seed: int) -> None:
    rng = random.Random(seed)
    sizes: tuple[tuple[int, tuple[Regime, ...]], ...] = (
        (60, ("plain",)),
        (9, ("plain", "long")),
        (40, ("plain", "stages")),
    )
    peaks = [one for size in sizes for one in drawn(rng, *size)]
    found = learnt(peaks)
    for regime in SPREADS:
        own = of_regime(peaks, regime)
        if own:
            assert covered(own, found) >= (QUANTILE if len(own) >= LEAST_ROWS else 1.0)
            assert covered(own, found, 0.5) <= covered(own, found)
    narrower: dict[Regime, Spread] = {
        name: replace(one, fixed_bytes=one.fixed_bytes // 2, share=one.share / 2) for name, one in found.items()
    }
    assert covered(of_regime(peaks, "plain"), narrower) < QUANTILE
    assert found["experts"].fixed_bytes == 0  # no peak, no spread of its own
    assert abs(bias(peaks)) < 0.05


def test_what_a_full_device_and_contradicted_rows_tell_is_left_aside() -> None:
    small, large = (
        peak(measured, source=f"list L{line}", micro_batch=str(size), global_batch=str(line))
        for measured, line, size in ((60e9, 1, 2), (50e9, 2, 4))
    )
    full, other = peak(79.8e9, source="list L3"), peak(50e9, source="list L4", micro_batch="2", tp="4")
    kept, left = telling([small, large, full, other])
    assert (kept, left) == ([large, other], [small, full])


def test_a_system_is_told_by_all_others() -> None:
    """One system lies where predicted, the other 4 GB above: neither tells the other's spread."""
    exact = [peak(40e9, source=f"a{i}") for i in range(25)]
    above = [peak(44e9, source=f"b{i}") for i in range(25)]
    systems: dict[str, Sequence[Peak]] = {"exact": exact, "above": above}
    by_others = coverage_by_others([*exact, *above], systems)
    assert by_others["above, plain"].below_bound == 0
    assert by_others["exact, plain"].below_bound == 1
    told = coverage_by_others([*exact, *(replace(one, predicted=44e9) for one in above)], systems)
    assert told["above, plain"] == by_others["above, plain"]  # a constant of its own rows is not used for it
    assert coverage(exact, SPREADS)["all"].below_mean == 1
    assert coverage(above, SPREADS)["plain"].bias == pytest.approx(40 / 44 - 1)


def test_a_spread_that_the_peaks_do_not_tell_fails_its_target() -> None:
    targets = {one.name: one for one in memory_targets([peak(40e9, source=f"a{i}") for i in range(25)])}
    assert not targets["memory: regimes whose shipped spread is the one learnt"].met
    assert targets["memory, plain: share of 25 peaks below the bound"].met
