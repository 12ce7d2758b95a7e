"""Stale samples, faults and resumes in random order: what trainers got is judged as the audit of a real run is."""

import random

import pytest

from realgraph.planner.plan.plan import Turn
from realgraph.runtime.commands.actions import Send
from realgraph.runtime.scheduler.meshes.turns import NextTurn, Turns
from realgraph.runtime.wire.protocol import Abort, Reallocate
from tests.broken_simulations import LETHAL, MOMENTS, OUTLIVED, broken_run, cut
from tests.shapes import Shape
from tests.simulator import Simulator

N_RUNS, PARTS = 110, 4
LEAST_EVENTS = 25_000  # of a part: 10^5 in all
N_CUT, AFTER_CUT = 20, 100  # runs, and the most events of each when a worker has been cut off


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1_000_001, id="a stopped worker misses an abort before new weights"),
        pytest.param(1_000_109, id="a stop while a call of a step after the last is under way"),
        pytest.param(1_000_224, id="an engine lost before it has made what it tells of late"),
    ],
)
def test_faults_that_have_met_once(seed: int) -> None:
    assert broken_run(seed, lives=10, least=1, steps=20).problems == ()


def test_a_call_of_a_step_after_the_last_ends_though_its_turn_has_been_passed() -> None:
    """It was under way when the run was told to stop."""
    turns = Turns({0: (Turn("values", 1), Turn("train", 0))}, 0, ())
    values, train, after = NextTurn("values", 0), NextTurn("train", 0), NextTurn("values", 1)
    assert turns.next(9, 9) == [values]
    turns.leave(*_at(values))
    assert turns.next(9, 9) == [after]
    assert turns.next(9, 1) == [train]
    turns.leave(*_at(after))
    assert turns.next(9, 1) == [train]
    turns.leave(*_at(train))
    assert turns.next(9, 1) == []


def _at(turn: NextTurn) -> tuple[str, int]:
    return turn.call, turn.step
