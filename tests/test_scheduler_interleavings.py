"""Stale samples, faults and resumes in random order: what trainers got is judged as the audit of a real run is."""

import random

import pytest

from realgraph.runtime.commands.actions import Send
from realgraph.runtime.wire.protocol import Abort, Reallocate
from tests.broken_simulations import LETHAL, MOMENTS, OUTLIVED, broken_run, cut
from tests.shapes import Shape
from tests.simulator import Simulator

N_RUNS, PARTS = 110, 4
LEAST_EVENTS = 25_000  # of a part: 10^5 in all
N_CUT, AFTER_CUT = 20, 100  # runs, and the most events of each when a worker has been cut off


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


def test_new_weights_do_not_wait_for_aborted_groups_of_a_worker_that_hears_nothing() -> None:
    """It goes on with them, and hears no more of the new weights than of the abort."""
    n_met = 0
    for seed in range(N_CUT):
        rng = random.Random(seed)
        shape = Shape(n_workers=4, split=True, groups=2, staleness=1, overdue="wait", oversample=2.0, steps=8)
        shape.interrupt = "wait"
        simulator = Simulator(shape, rng)
        simulator.run(rng.randint(20, 120))
        if simulator.halt is None:
            cut(simulator, min(simulator.contract.engines["rollout"]))
            simulator.run(simulator.n_events + AFTER_CUT)
        unheard = [at for at, send in enumerate(simulator.log) if _is_unheard(simulator, send)]
        later = simulator.log[unheard[0] :] if unheard else []
        n_met += any(isinstance(send.command, Reallocate) for send in later)
    assert n_met > N_CUT / 5


def _is_unheard(simulator: Simulator, send: Send) -> bool:
    """An abort that was lost on its way."""
    groups = simulator.workers[send.worker].unheard
    return isinstance(send.command, Abort) and groups.issuperset(send.command.groups)


def test_a_run_whose_stopped_worker_misses_an_abort_before_new_weights() -> None:
    assert broken_run(1_000_001, lives=10, least=1, steps=20).problems == ()
