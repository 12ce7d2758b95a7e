"""Engines that die at random moments of simulated asynchronous runs, which go on without them."""

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from realgraph.planner.plan.axes import coordinates_of, session_layout
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.commands.actions import Checkpointed, EngineLost, EvalEnded, Halt, Send
from realgraph.runtime.job.engine_loss import expendable_engines, expendable_workers
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Failed, Forget, Prefetch
from tests.generating import generating_graph
from tests.resumed_runs import groups_of_steps
from tests.schedulers import copied
from tests.shapes import Shape, graph_of, job_of, plan_of, random_shape
from tests.simulator import Simulator

N_ENGINES = 4


def shape_of(rng: random.Random, tp: int = 1) -> Shape:
    """Any run with engines of its own, each of so many workers."""
    shape = random_shape(rng)
    shape.algorithm, shape.n_workers, shape.split, shape.tp = "grpo", 2 * N_ENGINES * tp, True, tp
    shape.staleness, shape.spare, shape.steps = rng.choice([1, 2, 4]), 0, 8
    shape.interrupt = rng.choice(["recompute", "keep_kv", "wait"])
    return shape


@pytest.mark.slow
def test_engines_die_at_random_moments_and_no_group_is_lost_or_trained_twice() -> None:
    """Each run loses up to all engines but one, and goes on: the workers of a step that has begun have fetched what the
    engines had, those of functions that need its results among them."""
    n_survived, n_moved = 0, 0
    for seed in range(120):
        rng = random.Random(seed)
        shape = shape_of(rng, tp=2 if seed % 3 == 2 else 1)
        shape.late = ("", "sample", "group")[seed // 3 % 3]
        simulator = Simulator(shape, rng)
        assert expendable_workers(simulator.graph, simulator.job.plan) == set(range(N_ENGINES * shape.tp))
        for engine in rng.sample(range(N_ENGINES), rng.randint(1, N_ENGINES - 1)):
            simulator.run(simulator.n_events + rng.randint(1, 60))
            if simulator.halt is None:
                simulator.lose(engine * shape.tp + rng.randrange(shape.tp))
        simulator.run()
        assert simulator.halt is not None
        lost = [action for action in simulator.actions if isinstance(action, EngineLost)]
        n_survived += len(lost)
        n_moved += simulator.n_moved
        assert simulator.halt.error is None, simulator.halt
        trained = [group for groups in dict(groups_of_steps(simulator)).values() for group in groups]
        assert max(Counter(trained).values()) == 1
        state = simulator.scheduler.state
        assert state.step == shape.steps
        assert state.n_trained == len(trained) == shape.steps * shape.groups
        if shape.eval_every:
            ended = [action.step for action in simulator.actions if isinstance(action, EvalEnded)]
            assert ended[-1] == shape.steps
        if shape.overdue == "wait":
            for step, groups in dict(groups_of_steps(simulator)).items():
                assert all(
                    step - simulator.oldest[group] // simulator.trains_of_generator <= shape.staleness
                    for group in groups
                )
    assert n_survived > 200
    assert n_moved > 200


def test_all_who_stay_are_told_of_each_worker_of_a_lost_engine() -> None:
    """Those that it follows as well as its head: a trainer may wait for any of them."""
    simulator = Simulator(Shape(n_workers=16, split=True, staleness=1, tp=2, steps=50), random.Random(2))
    simulator.run(3)
    simulator.lose(3)
    assert simulator.halt is None
    sent = [one for one in simulator.actions if isinstance(one, Send)]
    told = {(one.worker, one.command.worker) for one in sent if isinstance(one.command, Forget)}
    assert told == {(other, lost) for other in range(16) if other not in (2, 3) for lost in (2, 3)}


@pytest.mark.parametrize("seed", range(12))
def test_sequences_of_the_data_go_along_with_the_groups_of_a_lost_engine(seed: int) -> None:
    rng = random.Random(seed)
    shape = shape_of(rng)
    shape.algorithm, shape.again, shape.floating = "beside", False, False
    graph = generating_graph(shape)
    scheduler = Scheduler(job_of(shape, graph=graph), range(shape.n_workers), 1000, None, 5)
    simulator = Simulator(shape, rng, scheduler, graph=graph)
    simulator.run(rng.randint(1, 60))
    simulator.lose(rng.randrange(N_ENGINES))
    halt = simulator.run() if simulator.halt is None else simulator.halt
    assert halt is not None and halt.error is None, halt
    assert simulator.step == shape.steps


def test_the_last_engine_and_workers_that_train_are_not_to_be_lost() -> None:
    for victims in ([0, 1, 2, 3], [N_ENGINES]):
        simulator = Simulator(Shape(n_workers=2 * N_ENGINES, split=True, staleness=2, steps=50), random.Random(2))
        simulator.run(3)
        for victim in victims:
            assert simulator.halt is None
            simulator.lose(victim)
        assert simulator.halt is not None and simulator.halt.error is not None
        assert f"worker {victims[-1]} was lost" in simulator.halt.reason


@pytest.mark.parametrize("seed", range(6))
def test_a_scheduler_that_has_lost_an_engine_goes_on_from_its_image(seed: int) -> None:
    rng = random.Random(seed)
    shape = shape_of(rng)
    simulator = Simulator(shape, rng)
    simulator.run(rng.randint(1, 60))
    simulator.lose(1)
    assert simulator.halt is None
    simulator.scheduler = copied(simulator.scheduler)
    halt = simulator.run()
    assert halt is not None and halt.error is None, halt
    assert isinstance(simulator.scheduler.state, Checkpointed)


def test_only_engines_with_nothing_else_to_do_are_expendable() -> None:
    for shape in (
        Shape(n_workers=4, staleness=1),
        Shape(n_workers=4, split=True),
        Shape(n_workers=4, split=True, staleness=1, algorithm="ppo"),
        Shape(n_workers=4, split=True, staleness=1, algorithm="distill"),
        Shape(n_workers=4, staleness=1, algorithm="sft"),
    ):
        graph = graph_of(shape)
        assert not expendable_workers(graph, plan_of(shape, graph)), shape


@pytest.mark.parametrize(
    ("layout", "engines"),
    [
        ({"dp": 4}, [(0,), (1,), (2,), (3,)]),
        ({"dp": 2, "tp": 2}, [(0, 1), (2, 3)]),
        ({"dp": 2, "pp": 2}, [(0, 2), (1, 3)]),
        ({"dp": 4, "ep": 2}, [(0, 1), (2, 3)]),
        ({"tp": 2, "pp": 2}, [(0, 1, 2, 3)]),
    ],
)
def test_an_engine_is_all_workers_that_generate_together(
    layout: dict[str, Any], engines: list[tuple[int, ...]]
) -> None:
    """By itself it is a layout of as many workers, cut alike."""
    graph = graph_of(shape := Shape(n_workers=8, split=True, staleness=1))
    plan = plan_of(shape, graph)
    cut = Layout(DeviceMesh(0, 4), **layout)
    rollout = replace(plan.allocations["rollout"], layout=cut)
    found = expendable_engines(graph, replace(plan, allocations={**plan.allocations, "rollout": rollout}))
    assert list(found) == engines
    alone = session_layout(cut)
    assert alone.mesh == DeviceMesh(0, len(engines[0]))
    assert (alone.tp, alone.pp, alone.ep) == (cut.tp, cut.pp, cut.ep)
    for engine in engines:
        for rank, worker in enumerate(engine):
            inside, outside = coordinates_of(alone, rank), coordinates_of(cut, worker)
            assert (inside.pp, inside.tp, inside.dp) == (outside.pp, outside.tp, outside.dp % alone.dp)


def fetching() -> tuple[Simulator, list[Prefetch]]:
    """A run up to the moment when worker 4 gathers what engines have."""
    simulator = Simulator(Shape(n_workers=2 * N_ENGINES, split=True, staleness=1, steps=6), random.Random(5))
    while not (asked := [one.command for one in simulator.log if isinstance(one.command, Prefetch)]):
        simulator.run(simulator.n_events + 1)
    return simulator, asked


def broken(command: Prefetch) -> Failed:
    return Failed(N_ENGINES, command.call, "PeerLostError: worker 0 is lost", "worker", task=command.task)


def test_a_step_whose_inputs_are_lost_on_their_way_is_put_back() -> None:
    simulator, asked = fetching()
    command = asked[0]
    simulator.lose(command.sources[0].worker)
    assert command.task in simulator.scheduler._tasks.given_up
    assert simulator.scheduler.on(broken(command), simulator.now) == []
    halt = simulator.run()
    assert halt is not None and halt.error is None, halt
    again = [
        one.command for one in simulator.log if isinstance(one.command, Prefetch) and one.command.step == command.step
    ]
    assert {one.task for one in again} > {one.task for one in asked if one.step == command.step}


def test_inputs_that_can_not_be_had_though_nobody_is_lost_end_the_run_with_their_worker() -> None:
    simulator, asked = fetching()
    halt = simulator.scheduler.on(broken(asked[0]), simulator.now)[-1]
    assert isinstance(halt, Halt)
    assert halt.error is not None and "worker 0 is lost" in halt.error.error
