"""Evaluations that an asynchronous run does not wait for: by engines that keep their weights meanwhile."""

import random
from typing import Literal

import pytest
from msgspec import structs

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten, EvalEnded, Send, StepEnded
from realgraph.runtime.job.evaluations import eval_on_mistake
from realgraph.runtime.scheduler.step_boundary import StepBoundary
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Evaluate, Submit
from tests.generating import generating_graph
from tests.schedulers import copied
from tests.shapes import Shape, graph_of, plan_of, random_shape
from tests.simulator import Simulator, ended_steps

Mode = Literal["engine", "interleaved", "checkpoint"]
MODES: tuple[Mode, ...] = ("engine", "interleaved", "checkpoint")


def shape_of(rng: random.Random, mode: Mode) -> Shape:
    """Any run that evaluates beside."""
    shape = random_shape(rng)
    shape.algorithm, shape.n_workers, shape.split, shape.tp = rng.choice(["grpo", "ppo"]), 6, True, 1
    shape.staleness, shape.spare, shape.steps = rng.choice([1, 2, 4]), 0, rng.choice([4, 6])
    shape.eval_every, shape.eval_on, shape.scored_by = rng.choice([1, 2]), mode, ""
    shape.interrupt = rng.choice(["recompute", "keep_kv", "wait"])
    if mode == "checkpoint":
        shape.checkpoint_every = rng.choice([1, 2])
    return shape


class SlowEvaluations(Simulator):
    """Engines that evaluate while the run goes on take so many seconds."""

    eval_seconds = 0.0

    def seconds(self, what: str) -> float:
        return self.eval_seconds if what.startswith("evaluate") and self.evaluating else super().seconds(what)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(15))
def test_a_run_evaluates_one_version_after_another_and_its_last_weights(mode: Mode, seed: int) -> None:
    """The simulated engines refuse new weights while they evaluate, and evaluations of others than they have."""
    rng = random.Random(seed)
    simulator = SlowEvaluations(shape_of(rng, mode), rng)
    simulator.eval_seconds = rng.choice([0.5, 5.0, 50.0])
    halt = simulator.run()
    assert halt is not None and halt.error is None, halt
    ended = [action for action in simulator.actions if isinstance(action, EvalEnded)]
    steps = [evaluation.step for evaluation in ended]
    assert steps == sorted(set(steps))
    assert steps[-1] == simulator.shape.steps, "the last weights are evaluated at the end"
    written = {action.step for action in simulator.actions if isinstance(action, CheckpointWritten)}
    assert all(one.step in written or not one.step for one in ended if one.best), "the best has a checkpoint"
    beside = [send for send in simulator.log if isinstance(send.command, Evaluate) and send.command.beside]
    if mode == "checkpoint" and not beside:
        return  # the run has ended before an engine had none of its groups left
    assert beside
    assert len({send.worker for send in beside}) == (3 if mode == "interleaved" else 1)
    for send in beside:
        assert isinstance(send.command, Evaluate)
        assert bool(send.command.checkpoint) == (mode == "checkpoint")


@pytest.mark.slow
def test_every_checkpoint_is_evaluated_where_evaluations_are_quick() -> None:
    """From its files, on the version that it has, by an engine without groups: the simulated ones refuse all else.
    Checkpoints that another one follows before an engine is free are left out."""
    n_evaluated, n_written = 0, 0
    for seed in range(20):
        rng = random.Random(seed)
        shape = shape_of(rng, "checkpoint")
        shape.steps = 12
        simulator = SlowEvaluations(shape, rng)
        simulator.eval_seconds = 0.1
        halt = simulator.run()
        assert halt is not None and halt.error is None, halt
        written = {action.step for action in simulator.actions if isinstance(action, CheckpointWritten)}
        evaluated = {action.step for action in simulator.actions if isinstance(action, EvalEnded)}
        assert evaluated <= written
        assert shape.steps in evaluated
        n_evaluated, n_written = n_evaluated + len(evaluated), n_written + len(written)
    assert n_evaluated > 0.5 * n_written, (n_evaluated, n_written)


def test_an_engine_that_is_set_aside_gets_no_groups_and_training_does_not_wait_for_it() -> None:
    """An evaluation that takes for ever: all steps end meanwhile, by the other engines."""
    for seed in range(10):
        rng = random.Random(seed)
        shape = shape_of(rng, "engine")
        simulator = SlowEvaluations(shape, rng)
        simulator.eval_seconds = 500.0
        halt = simulator.run()
        assert halt is not None and halt.error is None, halt
        ends = [a for a in simulator.actions if isinstance(a, StepEnded | EvalEnded)]
        assert [type(end) for end in ends[: shape.steps]] == [StepEnded] * shape.steps
        sends = [action for action in simulator.actions if isinstance(action, Send | EvalEnded)]
        first = next(i for i, a in enumerate(sends) if isinstance(a, Send) and isinstance(a.command, Evaluate))
        alone = sends[first]
        assert isinstance(alone, Send)
        for action in sends[first:]:
            if isinstance(action, EvalEnded):
                break
            assert action.worker != alone.worker or not isinstance(action.command, Submit)


def test_engines_that_evaluate_among_groups_keep_generating() -> None:
    """All of them hold their weights: training goes as far as the bound lets it."""
    n_steps = 0
    for seed in range(10):
        rng = random.Random(seed)
        shape = shape_of(rng, "interleaved")
        simulator = SlowEvaluations(shape, rng)
        simulator.eval_seconds = 500.0
        simulator.run()
        before = next(i for i, a in enumerate(simulator.actions) if isinstance(a, EvalEnded))
        steps = [action for action in simulator.actions[:before] if isinstance(action, StepEnded)]
        assert len(steps) >= min(shape.steps, shape.staleness + 1)
        n_steps += len(steps)
    assert n_steps


def test_an_evaluation_under_way_is_part_of_the_schedulers_image() -> None:
    rng = random.Random(3)
    shape = shape_of(rng, "engine")
    simulator = SlowEvaluations(shape, rng)
    simulator.eval_seconds = 20.0
    while not simulator.evaluating:
        simulator.run(simulator.n_events + 1)
    simulator.scheduler = copied(simulator.scheduler)
    halt = simulator.run()
    assert halt is not None and halt.error is None, halt
    assert len(ended_steps(simulator)) == shape.steps


@pytest.mark.parametrize(
    ("shape", "mode", "text"),
    [
        (Shape(n_workers=4, split=True, staleness=1), "engine", None),
        (Shape(n_workers=2, split=True, staleness=1), "interleaved", None),
        (Shape(n_workers=2, split=True, staleness=1), "engine", "'rollout' has one engine, which can't be set aside"),
        (
            Shape(n_workers=2, split=True, staleness=1),
            "checkpoint",
            "'rollout' has one engine, which can't be set aside",
        ),
        (Shape(n_workers=4, split=True, tp=2, staleness=1), "engine", "'rollout' has one engine"),
        (Shape(n_workers=4, split=True), "interleaved", "the plan is synchronous"),
        (Shape(n_workers=4, staleness=1), "engine", "generates on the devices of other calls"),
        (Shape(n_workers=4, split=True, staleness=1, algorithm="distill"), "engine", "by weights that are trained"),
        (Shape(algorithm="sft", staleness=1), "interleaved", "by weights that are trained"),
    ],
)
def test_a_plan_without_an_engine_for_it_is_named(shape: Shape, mode: Mode, text: str | None) -> None:
    graph = graph_of(shape)
    mistake = eval_on_mistake(graph, plan_of(shape, graph), mode)
    assert mistake is None if text is None else mistake is not None and text in mistake[0], mistake


def test_a_graph_that_generates_more_than_once_has_no_engine_for_it() -> None:
    shape = Shape(n_workers=4, split=True, staleness=1, algorithm="judge")
    graph = generating_graph(shape)
    mistake = eval_on_mistake(graph, plan_of(shape, graph), "engine")
    assert mistake is not None and "the graph generates more than once" in mistake[0]


def test_of_evaluations_with_equal_accuracy_the_higher_reward_is_the_best() -> None:
    """Also after a resume: the state of a checkpoint has both."""
    simulator = Simulator(random_shape(random.Random(0)), random.Random(0))
    nothing = Checkpointed(0, {}, 0, 0, 0)
    boundary = StepBoundary(simulator.job, nothing, n_eval_rows=1)

    def judged(step: int, accuracy: float, reward: float) -> bool:
        return boundary.judge(step, {"accuracy": Mean(accuracy), "reward": Mean(reward)})

    assert judged(0, 1.0, 2.0) and judged(2, 1.0, 3.0)
    assert not judged(3, 1.0, 3.0) and not judged(4, 0.5, 9.0)
    state = structs.replace(nothing, best_step=2, best_value=boundary.best_value, best_reward=boundary.best_reward)
    boundary = StepBoundary(simulator.job, state, n_eval_rows=1)
    assert not judged(5, 1.0, 2.5)
    assert judged(6, 1.0, 3.5)
