"""The benchmark of asynchronous RL by the number of GPUs: its lengths, its ideal steps and its verdicts."""

import pytest
from msgspec.structs import replace

from benchmarks.async_scale import (
    CONTEXT,
    LARGE,
    PROMPT,
    SMALL,
    TOLERANCE,
    Series,
    judged,
    lengths,
    on_the_right_side,
    reached,
)
from benchmarks.clocked import GRPO, planned
from benchmarks.published_assumed import AREAL_BATCH, AREAL_CUT, AREAL_TOKENS


def test_lengths_have_the_published_mean_and_share_of_cut_answers() -> None:
    known = lengths(AREAL_BATCH.limit)
    mean = sum(known) / len(known) + AREAL_BATCH.prompt
    assert mean * AREAL_BATCH.samples == pytest.approx(AREAL_TOKENS[0][1], rel=0.01)
    cut = sum(length == AREAL_BATCH.limit for length in known) / len(known)
    assert cut == pytest.approx(AREAL_CUT, abs=1 / len(known))
    shorter = lengths(CONTEXT - PROMPT)
    assert list(shorter) == [min(length, CONTEXT - PROMPT) for length in known]


@pytest.mark.parametrize("bound", [0, 2])
def test_no_run_is_faster_than_calls_that_never_wait(bound: int) -> None:
    """A synchronous one is no slower, either; a stream may be, by its interruptions and by slots that stand empty."""
    apart = ("allocation.rollout.devices=4", "allocation.train={first: 4, devices: 4}")
    found = reached(planned(GRPO, f"staleness={bound}", "batch.groups=64", "steps=18", *apart, levels=(bound,)))
    assert found.seconds >= found.ideal * 0.995
    assert bound or found.seconds <= found.ideal * 1.01
    assert found.staleness == bound


@pytest.mark.parametrize("series", [SMALL, LARGE])
def test_a_crossover_on_the_other_side_is_seen(series: Series) -> None:
    assert on_the_right_side(series, series.published)
    for gpus, ratio in series.published.items():
        if abs(ratio - 1) > 0.02:
            assert not on_the_right_side(series, {**series.published, gpus: 1 / ratio})
    even = replace(series, published={1: 1.0})
    assert on_the_right_side(even, {1: 0.9}) and on_the_right_side(even, {1: 1.1})


@pytest.mark.parametrize("published", [0.85, 1.0, 2.89])
def test_a_ratio_passes_within_the_tolerance_on_both_sides(published: float) -> None:
    for off in (-TOLERANCE, TOLERANCE):
        assert judged("", published * (1 + 0.99 * off), published).passed
        assert not judged("", published * (1 + 1.01 * off), published).passed
