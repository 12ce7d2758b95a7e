"""Ends of runs of the Scheduler: lost workers, failed and silent calls, stops, and what cannot go on."""

import random

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import Function
from realgraph.planner.plan.plan import Turn
from realgraph.runtime.commands.actions import CheckpointWritten, Halt, StopRequested, WorkerLost
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Command, Done, Evaluate, Execute, Failed, Heartbeat, Save, Submit
from tests.shapes import Shape, build_graph, graph_of, job_of, random_shape
from tests.simulator import Simulator, ended_steps

STREAMING = ("reward", "bonus", "other", "filter")


def under_way(rng: random.Random, most_events: int) -> Simulator:
    """A random run after some of its events."""
    simulator = Simulator(random_shape(rng), rng)
    simulator.run(max_events=rng.randint(1, most_events))
    return simulator


@pytest.mark.parametrize("seed", range(120))
def test_a_lost_worker_ends_the_run_once_and_is_named(seed: int) -> None:
    rng = random.Random(seed)
    simulator = under_way(rng, 60)
    if simulator.halt is not None:
        return
    worker = rng.randrange(simulator.shape.n_workers)
    simulator.feed(WorkerLost(worker, "killed by signal 9"))
    assert simulator.halt is not None
    error = simulator.halt.error
    assert error is not None
    assert (error.worker, error.kind) == (worker, "worker")
    assert f"worker {worker} was lost" in simulator.halt.reason
    assert "killed by signal 9" in simulator.halt.reason
    assert simulator.scheduler.deadline() is None
    assert simulator.scheduler.on(simulator.events[0].event if simulator.events else Heartbeat(0), 1e9) == []


@pytest.mark.parametrize("seed", range(120))
def test_a_call_that_fails_ends_the_run_once_and_is_named_with_its_sample(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    simulator = Simulator(shape, rng)
    left = rng.randint(1, 8)

    def fail(command: Command) -> Failed | None:
        nonlocal left
        if not isinstance(command, Execute):
            return None
        left -= 1
        sample = command.shares[0][0] if command.shares[0] else -1
        return Failed(0, command.call, "division by zero", sample=sample) if left == 0 else None

    simulator.failing = fail
    halt = simulator.run()
    assert halt is not None
    if left > 0:
        assert halt.error is None
        return
    assert halt.error is not None
    assert halt.error.error == "division by zero"
    assert f"{halt.error.call} failed on worker 0" in halt.reason
    assert halt.error.sample < 0 or f"sample {halt.error.sample}" in halt.reason


@pytest.mark.parametrize("seed", range(120))
def test_a_worker_that_never_answers_is_named_at_the_deadline(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.checkpoint_every, shape.eval_every = rng.choice([0, 1]), rng.choice([0, 1])
    simulator = Simulator(shape, rng)
    kinds = (Execute, Submit, Save, Evaluate)
    left = rng.randint(1, 12)
    mute: list[tuple[int, Command]] = []

    def silent(worker: int, command: Command) -> bool:
        nonlocal left
        left -= isinstance(command, kinds)
        if left == 0 and not mute:
            mute.append((worker, command))
            return True
        return False

    simulator.silent = silent
    halt = simulator.run()
    assert halt is not None
    if not mute:
        assert halt.error is None
        return
    worker, command = mute[0]
    if halt.error is None:  # its groups were filtered out meanwhile, or newer ones trained up to the end of the run
        assert shape.staleness or simulator.frozen or shape.filtered or shape.begun > 1
        assert isinstance(command, Submit) or (isinstance(command, Execute) and command.call in STREAMING)
        return
    assert halt.error.kind == "deadline"
    assert halt.error.worker == worker
    if isinstance(command, Execute):
        when = "the evaluation after step" if command.held_out else "step"
        assert f"{command.call} of {when} {command.step} has not ended on worker {worker}" in halt.reason
    if isinstance(command, Submit):
        assert f"rollout has not finished any of {len(command.groups)} groups on worker {worker}" in halt.reason
    assert simulator.now >= 1000.0


def test_an_answer_to_nothing_is_refused_by_name() -> None:
    simulator = Simulator(Shape(), random.Random(0))
    simulator.take(simulator.scheduler.start(0.0))
    simulator.feed(Done(1, 77, "reward"))
    assert simulator.halt is not None
    assert "worker 1 answered task 77, which it was not given" in simulator.halt.reason


@pytest.mark.parametrize("seed", range(120))
def test_a_stop_ends_after_the_step_in_hand_with_a_checkpoint(seed: int) -> None:
    simulator = under_way(random.Random(seed), 80)
    if simulator.halt is not None:
        return
    shape, at_stop = simulator.shape, simulator.step
    simulator.feed(StopRequested())
    halt = simulator.halt or simulator.run()
    assert halt is not None
    assert halt.error is None
    assert halt.reason in ("stopped", "finished")
    assert simulator.step <= at_stop + 1 + max(shape.kept, 1)
    if shape.kept == 0 and not simulator.frozen:
        assert simulator.step <= at_stop + 1
    written = [action.step for action in simulator.actions if isinstance(action, CheckpointWritten)]
    if simulator.step:
        assert written[-1] == simulator.step
        assert len(set(written)) == len(written)


def test_filters_that_keep_nothing_end_the_run_with_the_reason() -> None:
    simulator = Simulator(Shape(filtered=True), random.Random(0), keep=0.0)
    halt = simulator.run()
    assert halt is not None
    assert halt.error is not None
    assert "prompt groups in a row were all left out" in halt.reason


def test_a_filter_behind_a_batch_wide_call_is_refused() -> None:
    graph = graph_of(Shape(algorithm="ppo"))
    rows = [(name, graph.calls[name], graph.reads[name], graph.writes[name]) for name in graph.calls]
    at = next(i for i, row in enumerate(rows) if row[0] == "advantage")
    rows.insert(at, ("late", Function("late", over="group"), ("shaped",), ("keep",)))
    shape = Shape(algorithm="ppo")
    job = msgspec.structs.replace(job_of(shape), graph=build_graph(rows, ("prompt", "answer"), 2))
    with pytest.raises(ConfigError, match=r"\$\.calls\.late: 'late' writes 'keep', but needs the whole batch"):
        Scheduler(job, range(2), 1000)


def test_a_plan_whose_orders_block_each_other_is_named() -> None:
    shape = Shape()
    job = job_of(shape)
    orders = {device: (Turn("train"), Turn("ref_logp"), Turn("rollout")) for device in range(2)}
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, orders=orders))
    halt = Scheduler(job, range(2), 1000).start(0.0)[-1]
    assert isinstance(halt, Halt)
    assert "the plan's orders block each other" in halt.reason
    assert "train of step 0" in halt.reason


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
def test_orders_get_the_batches_that_they_ask_for_ahead_whatever_the_limit_of_work_in_flight(ahead: int) -> None:
    """All devices make the samples of `ahead` steps later before they train a step."""
    shape = Shape(staleness=ahead, steps=3 * ahead + 2)
    job = job_of(shape)
    turns = tuple(Turn(name, ahead if name == "rollout" else 0) for name in ("rollout", "ref_logp", "train"))
    plan = msgspec.structs.replace(job.plan, orders=dict.fromkeys(range(2), turns))
    scheduler = Scheduler(msgspec.structs.replace(job, plan=plan), range(2), 1000, None, 5)
    simulator = Simulator(shape, random.Random(ahead), scheduler)
    halt = simulator.run()
    assert halt is not None
    assert (halt.reason, simulator.step) == ("finished", shape.steps)
    trained = [ended for ended in ended_steps(simulator) if ended.step >= 2 * ahead]
    assert trained
    assert all(0 < ended.age.value >= ahead - 1 for ended in trained)
