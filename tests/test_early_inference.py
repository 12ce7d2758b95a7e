"""The bound on what inference by the sample could gain, where the answer is known."""

import pytest

from benchmarks.clocked import GRPO, LONG_TAIL, ClockedPlan, planned
from benchmarks.early_inference import APART, CHUNKS, gain, with_training


@pytest.fixture(scope="module")
def case() -> ClockedPlan:
    """A reference on devices of its own, beside generation and training."""
    return planned(GRPO, "staleness=1", *LONG_TAIL, "params.kl_coef=0.001", *APART)


@pytest.mark.slow
def test_idle_devices_hide_all_but_the_last_chunk_and_gain_nothing_where_training_is_the_bottleneck(
    case: ClockedPlan,
) -> None:
    seconds = 10 * sum(allocation.seconds for allocation in case.job.plan.allocations.values())
    found = gain(case, with_training(case, seconds))
    assert found.hidden == pytest.approx(1 - 1 / CHUNKS, abs=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert found.early_seconds == pytest.approx(found.seconds, rel=0.01)


@pytest.mark.slow
def test_a_reference_between_generation_and_training_is_worth_at_most_its_seconds(case: ClockedPlan) -> None:
    found = gain(case, with_training(case, case.job.plan.allocations["rollout"].seconds / 4))
    assert 0 < found.hidden < 1
    assert found.early_seconds <= found.seconds * 1.005
    assert found.seconds - found.early_seconds <= 1.1 * found.hidden * found.share * found.seconds
