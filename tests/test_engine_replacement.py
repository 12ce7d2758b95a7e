"""Engines of simulated asynchronous runs that die at random moments, and whose places new processes take."""

import random
from collections import Counter

import pytest

from realgraph.runtime.commands.actions import EngineReplaced, EvalEnded, Send
from realgraph.runtime.scheduler.meshes.weights import EngineWeights, WeightMove
from realgraph.runtime.wire.protocol import Reallocate, Submit
from tests.resumed_runs import groups_of_steps
from tests.schedulers import copied
from tests.shapes import Shape
from tests.simulator import Simulator
from tests.test_engine_loss import N_ENGINES, shape_of


def lose_and_join(simulator: Simulator, rng: random.Random, n_times: int) -> int:
    """Lose engines and have others take their places, at random moments; returns how many have."""
    n_joined = 0
    for _ in range(n_times):
        simulator.run(simulator.n_events + rng.randint(1, 30))
        if simulator.halt is not None:
            break
        gone = sorted(simulator.contract.gone)
        left = [worker for worker in range(N_ENGINES * simulator.shape.tp) if worker not in gone]
        if gone and (len(left) == simulator.shape.tp or rng.random() < 0.6):
            simulator.join(rng.choice(gone))
            n_joined += 1
        else:
            victim = rng.choice(left)
            if simulator.scheduler._losses.survives(victim) or rng.random() < 0.05:
                simulator.lose(victim)
    return n_joined


@pytest.mark.slow
def test_engines_come_back_at_random_moments_and_no_group_is_lost_or_trained_twice() -> None:
    n_joined = n_whole = n_moved = n_used = 0
    for seed in range(160):
        rng = random.Random(seed)
        shape = shape_of(rng, tp=2 if seed % 3 == 2 else 1)
        simulator = Simulator(shape, rng)
        n_joined += lose_and_join(simulator, rng, rng.randint(2, 12))
        simulator.run()
        assert simulator.halt is not None
        n_moved += simulator.n_moved
        n_used += given_groups(simulator)
        if simulator.halt.error is not None:
            assert simulator.halt.error.kind == "worker", simulator.halt
            continue
        n_whole += 1
        trained = [group for groups in dict(groups_of_steps(simulator)).values() for group in groups]
        assert max(Counter(trained).values()) == 1
        assert simulator.scheduler.state.n_trained == len(trained) == shape.steps * shape.groups
        if shape.eval_every:
            ended = [action.step for action in simulator.actions if isinstance(action, EvalEnded)]
            assert ended[-1] == shape.steps
    assert n_joined > 300
    assert n_whole > 120
    assert n_moved > 500
    assert n_used > 200


def given_groups(simulator: Simulator) -> int:
    """Engines that came in the place of lost ones and then got groups, counted by their coming."""
    found, waiting = 0, set[int]()
    for action in simulator.actions:
        match action:
            case EngineReplaced(workers=(head, *_)):
                waiting.add(head)
            case Send(worker=worker, command=Submit()) if worker in waiting:
                waiting.remove(worker)
                found += 1
    return found


def run_until(simulator: Simulator, step: int) -> None:
    """So many steps are complete."""
    while simulator.step < step:
        assert simulator.run(simulator.n_events + 1) is None


@pytest.mark.parametrize("interrupt", ["recompute", "keep_kv", "wait"])
def test_an_engine_that_comes_late_takes_the_newest_weights_and_then_groups(interrupt: str) -> None:
    """None before: the simulated workers refuse groups whose weights they lack. It alone gets those weights where the
    others have them."""
    shape = Shape(n_workers=2 * N_ENGINES, split=True, groups=12, staleness=2, steps=30, interrupt=interrupt)  # type: ignore[arg-type]
    simulator = Simulator(shape, random.Random(2))
    run_until(simulator, 5)
    simulator.lose(2)
    run_until(simulator, 8)
    seen = len(simulator.actions)
    simulator.join(2)
    assert simulator.scheduler._devices.engines.version(2, 99) == 0
    simulator.run()
    assert simulator.halt is not None and simulator.halt.error is None
    commands = [one.command for one in simulator.actions[seen:] if isinstance(one, Send) and one.worker == 2]
    kinds = [type(command) for command in commands if isinstance(command, Reallocate | Submit)]
    assert kinds[0] is Reallocate
    assert kinds.count(Submit) > 3
    moves = [command for command in commands if isinstance(command, Reallocate)]
    assert all(move.joined == {2: 1} for move in moves)
    assert moves[-1].version > moves[0].version >= 8


@pytest.mark.parametrize("seed", [1001155, 1002051])
def test_groups_of_the_last_steps_are_made_again_though_all_engines_are_back(seed: int) -> None:
    """Their sessions have had their turns."""
    rng = random.Random(seed)
    shape = shape_of(rng)
    simulator = Simulator(shape, rng)
    assert lose_and_join(simulator, rng, rng.randint(2, 16))
    halt = simulator.run()
    assert halt is not None and halt.error is None, halt


def test_before_the_first_update_a_new_engine_gets_groups_at_once() -> None:
    simulator = Simulator(Shape(n_workers=2 * N_ENGINES, split=True, staleness=2, steps=4), random.Random(3))
    simulator.run(2)
    simulator.lose(1)
    simulator.join(1)
    simulator.run()
    assert simulator.halt is not None and simulator.halt.error is None
    assert given_groups(simulator) == 1
    first = next(one.command for one in simulator.actions if isinstance(one, Send) and isinstance(one.command, Submit))
    assert first.version == 0


def test_all_engines_may_go_one_after_the_other() -> None:
    """As long as each has a successor before the next goes; the last of them keeps nobody's tokens, and then does."""
    simulator = Simulator(Shape(n_workers=2 * N_ENGINES, split=True, staleness=4, steps=40), random.Random(5))
    rounds = 0
    while simulator.halt is None and rounds < 12:
        simulator.run(simulator.n_events + 15)
        victims = [n for n in range(N_ENGINES) if simulator.scheduler._losses.survives(n)][: N_ENGINES - 1]
        for victim in victims:
            if simulator.halt is None and simulator.scheduler._losses.survives(victim):
                simulator.lose(victim)
                rounds += 1
        for victim in sorted(simulator.contract.gone):
            if simulator.halt is None:
                simulator.join(victim)
    simulator.run()
    assert simulator.halt is not None and simulator.halt.error is None, simulator.halt
    assert rounds >= 9


@pytest.mark.parametrize("seed", range(8))
def test_a_scheduler_goes_on_from_its_image_before_and_after_an_engine_has_come(seed: int) -> None:
    rng = random.Random(seed)
    shape = shape_of(rng)
    simulator = Simulator(shape, rng)
    simulator.run(rng.randint(1, 40))
    simulator.lose(1)
    if simulator.halt is not None:
        return
    simulator.run(simulator.n_events + rng.randint(0, 20))
    if simulator.halt is not None:
        return
    simulator.scheduler = copied(simulator.scheduler)
    simulator.join(1)
    simulator.scheduler = copied(simulator.scheduler)
    simulator.run(simulator.n_events + rng.randint(1, 10))
    if simulator.halt is None:
        simulator.scheduler = copied(simulator.scheduler)
        simulator.run()
    assert simulator.halt is not None and simulator.halt.error is None, simulator.halt


def test_a_move_that_an_engine_has_died_in_says_nothing_of_the_one_after_it() -> None:
    engines = EngineWeights("rollout", [(0,), (1,), (2,)])
    engines.moving[7] = WeightMove(3, "rollout", (0, 1, 2))
    engines.lose(1)
    engines.join(1, 1, 0, 2)
    assert engines.heads == (0, 1, 2)
    assert engines.resting == {1}
    assert engines.ended(7, 2) == 3
    assert engines.late == {1: 0}
    assert engines.receivers("rollout", (0, 1, 2), 3, 3) == (1,)
