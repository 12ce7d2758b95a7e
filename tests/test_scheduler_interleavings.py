"""Stale samples, faults and resumes in random order: what trainers got is judged as the audit of a real run is."""

import pytest

from tests.broken_simulations import LETHAL, MOMENTS, OUTLIVED, broken_run

N_RUNS, PARTS = 110, 4
LEAST_EVENTS = 25_000  # of a part: 10^5 in all


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults_lose_no_group_and_train_none_twice_or_beyond_the_bound(part: int) -> None:
    outcomes = [broken_run(seed) for seed in range(part * N_RUNS, (part + 1) * N_RUNS)]
    for outcome in outcomes:
        assert outcome.problems == (), outcome.shape
    assert sum(outcome.n_events for outcome in outcomes) > LEAST_EVENTS
    assert sum(outcome.faults.total() for outcome in outcomes) > 3 * N_RUNS
    assert any(outcome.n_old for outcome in outcomes)
    met = {fault for outcome in outcomes for fault in outcome.faults}
    assert {kind for kind, _ in met} == {*LETHAL, *OUTLIVED}
    assert {moment for _, moment in met} == set(MOMENTS)
