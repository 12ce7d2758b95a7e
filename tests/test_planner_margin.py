"""The margin of memory peaks: a quantile of what was measured beyond the prediction, and plans that keep to it."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError, convert
from msgspec.structs import replace

from realgraph.planner.costs.memory.margin import (
    LEAST_QUANTILE,
    LONG_TOKENS,
    SPREADS,
    MemorySpec,
    margin_bytes,
    regimes_of,
    spread_of,
)
from realgraph.planner.costs.memory.memory import Footprint, usable_bytes
from realgraph.planner.feasibility.diagnose import Infeasible
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.footprints import holding
from realgraph.planner.options.holdings import bound_of, margin_of, peak_of
from realgraph.planner.options.pricing import options_of
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import search
from tests.planner_cases import cluster, grpo, known, request

QUANTILES = st.floats(LEAST_QUANTILE, 1, exclude_max=True)
COUNTS = st.integers(0, 2**40)
FOOTPRINTS = st.builds(Footprint, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
AXES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(lambda dp, tp, pp, cp: Layout(DeviceMesh(0, dp * tp * pp * cp), dp, tp, pp, cp=cp), *[AXES] * 4)
MODELS = st.sampled_from(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"])


@given(FOOTPRINTS, LAYOUTS, MODELS, st.integers(1, 2**20), st.booleans(), QUANTILES, QUANTILES)
def test_the_bound_is_no_less_than_the_mean_and_grows_with_the_quantile(
    added: Footprint, layout: Layout, model: str, tokens: int, cpu: bool, one: float, two: float
) -> None:
    deviation = spread_of(regimes_of(known(model), layout, tokens), added, cpu=cpu)
    low, high = sorted((one, two))
    assert 0 == margin_bytes(deviation, LEAST_QUANTILE) <= margin_bytes(deviation, low) <= margin_bytes(deviation, high)


@given(FOOTPRINTS, LAYOUTS, MODELS, st.integers(1, 2**20))
def test_a_call_has_the_widest_spread_of_its_regimes_and_caches_have_none(
    added: Footprint, layout: Layout, model: str, tokens: int
) -> None:
    shape = known(model)
    regimes = set(regimes_of(shape, layout, tokens))
    assert regimes == {
        "plain",
        *(["long"] if tokens > LONG_TOKENS or layout.cp > 1 else []),
        *(["experts"] if shape.experts else []),
        *(["stages"] if layout.pp > 1 else []),
    }
    in_order = list(regimes_of(shape, layout, tokens))
    whole = spread_of(iter(in_order), added, cpu=False)
    assert whole == max(spread_of(iter((one,)), added, cpu=False) for one in in_order)
    assert whole == spread_of(iter(in_order), replace(added, kv_cache=0), cpu=False)
    assert spread_of(iter(in_order), added, cpu=True) <= whole


def test_the_margin_by_hand() -> None:
    """Three stages that add 40 GB: the stages' fixed part, or what long samples add, whichever is wider."""
    added = Footprint(activations=30_000_000_000, logits=10_000_000_000, kv_cache=10**12)
    staged = Layout(DeviceMesh(0, 3), pp=3)
    short, long = (
        spread_of(regimes_of(known("Qwen/Qwen3-0.6B"), staged, tokens), added, cpu=False) for tokens in (4096, 65536)
    )
    assert short == SPREADS["stages"].fixed_bytes
    assert long == pytest.approx(math.hypot(0.25e9, 0.09 * 40e9))
    assert margin_bytes(short, 0.95) == math.ceil(NormalDist().inv_cdf(0.95) * 2.75e9)


def asked(memory_bytes: float, quantile: float = 0.95) -> PlanRequest:
    machine = replace(cluster("H100-SXM", 8), memory_bytes=round(memory_bytes))
    return replace(request(grpo(), "Qwen/Qwen3-8B", machine), memory=MemorySpec(quantile))


@settings(max_examples=25)
@given(st.sampled_from([1, 2, 4, 8]), QUANTILES, QUANTILES, st.randoms(use_true_random=False))
def test_an_option_that_fits_at_a_quantile_fits_at_a_lower_one(size: int, one: float, two: float, rng: object) -> None:
    low, high = sorted((one, two))
    bold, careful = asked(40e9, low), asked(40e9, high)
    mesh = DeviceMesh(0, size)
    offered = list(candidates(careful, "train", mesh, careful.cluster))
    for candidate in rng.sample(offered, min(20, len(offered))):  # type: ignore[attr-defined]
        mean = holding(replace(bold, memory=MemorySpec(0.5)), "train", candidate, bold.cluster)
        less, more = (holding(one, "train", candidate, one.cluster) for one in (bold, careful))
        assert mean.margin == 0
        assert less.margin <= more.margin
        assert replace(less, margin=0) == replace(more, margin=0) == mean  # the prediction is the same
        fits = [any(options_of(one, "train", candidate, one.cluster)) for one in (careful, bold)]
        assert fits[0] <= fits[1]


def planned(one: PlanRequest) -> Plan:
    found = search(one, Limits(gap=0.05, seconds=5.0))
    assert isinstance(found, Plan)
    return found


def test_a_plan_keeps_its_bound_within_the_device_and_is_valid_at_every_lower_quantile() -> None:
    careful = asked(85.5e9, 0.99)
    plan = planned(careful)
    room = device_bytes(careful, careful.cluster)
    for call, allocation in plan.allocations.items():
        mean = peak_of(careful, plan.allocations, call)[1].total
        assert allocation.peak_bytes == mean < allocation.bound_bytes <= room
        assert allocation.bound_bytes == bound_of(careful, plan.allocations, call)
        assert allocation.bound_bytes - mean == margin_of(careful, plan.allocations, call)
    for quantile in (0.99, 0.95, 0.75, LEAST_QUANTILE):
        assert not list(validate(plan, replace(careful, memory=MemorySpec(quantile)), "plan.json"))


@pytest.mark.slow
def test_less_risk_never_makes_a_plan_faster_and_what_does_not_fit_says_mean_bound_and_key() -> None:
    """Somewhere between what fits as expected and what fits for sure a plan is there for those who take the risk."""
    train = [
        holding(asked(85.5e9), "train", one, asked(85.5e9).cluster)
        for one in candidates(asked(85.5e9), "train", DeviceMesh(0, 8), asked(85.5e9).cluster)
    ]
    least = min(train, key=lambda held: held.resident.total + held.active.total + held.margin)
    mean = least.resident.total + least.active.total
    tight = mean + least.margin // 2 + (85_500_000_000 - usable_bytes(cluster("H100-SXM", 8)))
    with pytest.raises(Infeasible) as raised:
        search(asked(tight), Limits(gap=0.05, seconds=5.0))
    text = str(raised.value)
    assert "95 % bound, memory.quantile: 0.95" in text
    assert "expected)" in text
    assert any("memory.quantile" in change for change in raised.value.changes)


@pytest.mark.parametrize("quantile", [0.4, 1.0, -1, 2])
def test_quantiles_below_the_mean_and_certainty_are_refused(quantile: float) -> None:
    with pytest.raises(ValidationError):
        convert({"quantile": quantile}, MemorySpec)
