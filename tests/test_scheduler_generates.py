"""The Scheduler where a group is made by several generate calls: any interleaving, discards, kills, every bound."""

import random

import msgspec
import pytest

from realgraph.runtime.commands.actions import CheckpointWritten, StopRequested
from realgraph.runtime.scheduler.image import SchedulerImage
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Reallocate
from tests.generating import GENERATING, generating_graph
from tests.resumed_runs import groups_of_steps
from tests.shapes import Shape, job_of, random_shape
from tests.simulator import Simulator, ended_steps


def generating_shape(rng: random.Random) -> Shape:
    """Any job whose graph generates more than once."""
    shape = random_shape(rng)
    shape.algorithm, shape.floating, shape.again = rng.choice(GENERATING), False, False
    return shape


def simulator_of(shape: Shape, rng: random.Random, state: CheckpointWritten | None = None) -> Simulator:
    graph = generating_graph(shape)
    job = job_of(shape, graph=graph)
    scheduler = Scheduler(job, range(shape.n_workers), 1000, state.state if state else None, 5)
    return Simulator(shape, rng, scheduler, graph=graph)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_runs_end_in_order_and_break_no_invariant(first: int) -> None:
    n_events = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        shape = generating_shape(rng)
        simulator = simulator_of(shape, rng)
        halt = simulator.run()
        assert halt is not None
        assert halt.error is None, (seed, shape, halt.reason)
        assert simulator.step == shape.steps, (seed, shape)
        n_events += simulator.n_events
    assert n_events > 3_000


@pytest.mark.parametrize("seed", range(24))
def test_no_group_beyond_the_bound_is_trained_where_overdue_groups_wait_or_are_dropped(seed: int) -> None:
    rng = random.Random(seed)
    shape = generating_shape(rng)
    shape.overdue, shape.steps = rng.choice(["wait", "drop"]), 6
    simulator = simulator_of(shape, rng)
    simulator.run()
    assert max(step.oldest for step in ended_steps(simulator)) <= shape.staleness


@pytest.mark.parametrize("seed", range(40))
def test_synchronous_batches_do_not_depend_on_the_order_of_arrival(seed: int) -> None:
    shape = generating_shape(random.Random(seed))
    shape.staleness, shape.oversample = 0, 1.0
    runs = []
    for order in (1, 2):
        simulator = simulator_of(shape, random.Random(f"{seed} {order}"))
        simulator.run()
        runs.append(simulator)
    assert {key: sorted(shares) for key, shares in runs[0].history.items()} == {
        key: sorted(shares) for key, shares in runs[1].history.items()
    }


@pytest.mark.parametrize("seed", range(24))
def test_a_run_killed_at_a_checkpoint_trains_the_rest_and_no_group_twice(seed: int) -> None:
    rng = random.Random(seed)
    shape = generating_shape(rng)
    shape.checkpoint_every, shape.steps = 1, 4
    whole = simulator_of(shape, rng)
    whole.run()
    for written in [action for action in whole.actions if isinstance(action, CheckpointWritten)]:
        resumed = simulator_of(shape, rng, written)
        halt = resumed.run()
        assert halt is not None
        assert halt.error is None
        before = set().union(*(groups for step, groups in groups_of_steps(whole) if step < written.step))
        after = {group for group, final in resumed.final.items() if final == "trained"}
        assert not before & after
        assert len(after) == shape.groups * (shape.steps - written.step)


@pytest.mark.parametrize("seed", range(24))
def test_a_scheduler_made_of_an_image_acts_alike(seed: int) -> None:
    rng = random.Random(seed)
    simulator = simulator_of(generating_shape(rng), rng)
    simulator.run(rng.randint(1, 150))
    if simulator.halt is not None:
        return
    old = simulator.scheduler
    image = msgspec.msgpack.decode(msgspec.msgpack.encode(old.image), type=SchedulerImage)
    new = Scheduler(simulator.job, range(simulator.shape.n_workers), 1000, old.state, 5)
    new.restore(image)
    assert new.image == old.image
    now = simulator.now
    for planned in sorted(simulator.events)[:20]:
        now = max(now, planned.time)
        assert new.on(planned.event, now) == old.on(planned.event, now)
        assert new.image == old.image
        new.check()


@pytest.mark.parametrize("seed", range(24))
def test_a_stop_at_any_time_ends_the_run_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = generating_shape(rng)
    simulator = simulator_of(shape, rng)
    simulator.run(rng.randint(1, 120))
    if simulator.halt is None:
        simulator.feed(StopRequested())
        simulator.run()
    assert simulator.halt is not None
    assert simulator.halt.error is None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 80, 40))
def test_new_weights_of_each_call_wait_for_its_own_samples_and_every_run_ends(first: int) -> None:
    """Under any plan: the simulator refuses weights of a call that change while a sample of it is made."""
    held, n_moved = set[str](), 0
    for seed in range(first, first + 40):
        rng = random.Random(seed)
        shape = generating_shape(rng)
        shape.interrupt, shape.staleness, shape.steps = "wait", rng.choice([1, 2, 3]), 5
        simulator = simulator_of(shape, rng)
        while simulator.halt is None:
            simulator.run(max_events=simulator.n_events + 1)
            held |= simulator.scheduler._collection.paused
            n_moved += isinstance(simulator.log[-1].command, Reallocate) if simulator.log else 0
        assert simulator.halt.error is None, (seed, shape, simulator.halt.reason)
        assert simulator.step == shape.steps
    assert held and n_moved
