"""The runtime keeps what the planner promises: its own Scheduler, on the clock, reaches the predicted period."""

import pytest

from benchmarks.clocked import GRPO, LONG_TAIL, PPO, planned
from tests.plan_clock import PlanClock

CASES = [  # 8 to 128 devices; colocated, apart, and calls that pause a stream
    *((GRPO, [], staleness) for staleness in (0, 1, 4)),
    (GRPO, LONG_TAIL, 2),
    *((GRPO, ["params.kl_coef=0.1", "cluster.nodes=2"], staleness) for staleness in (0, 4)),
    *((PPO, [], staleness) for staleness in (0, 2)),
    (PPO, ["cluster.nodes=4", *LONG_TAIL], 1),
    (PPO, ["cluster.nodes=8", "batch.groups=1024"], 0),
    (GRPO, ["cluster.nodes=16", "batch.groups=256", *LONG_TAIL], 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "overrides", "staleness"), CASES)
def test_the_scheduler_reaches_the_predicted_period(config: str, overrides: list[str], staleness: int) -> None:
    """By the rule of admission alone, whose places plans take to be filled, with the sequences at once that they
    expect. The limit of work in flight makes steps longer where that would be for tokens beyond the bound, and trains
    about as many of the others a second. Where launches are most of a decode step, fewer sequences take hardly less:
    three quarters as many, at least. Under it spare sequences cost nothing, whatever more of them would."""
    run = planned(config, f"staleness={staleness}", "steps=28", *overrides)
    rule, limited = run.lean.clock(limited=False), run.clock()
    reached, plan = rule.period(), run.plan
    assert reached == pytest.approx(plan.period_seconds, rel=0.01 if staleness else 0.005), plan.orders
    if staleness:
        fewer = limited.period()
        assert _young(limited, staleness) / fewer >= 0.75 * _young(rule, staleness) / reached
        assert _young(limited, staleness) >= _young(rule, staleness) - 0.01
        expected = run.lean.clock()
        assert expected.period() / fewer >= 0.99 * _young(expected, staleness) / _young(limited, staleness)


def _young(clock: PlanClock, bound: int) -> float:
    """Share of the trained tokens within the bound."""
    return sum(share for age, share in clock.steady_ages().items() if age <= bound)
