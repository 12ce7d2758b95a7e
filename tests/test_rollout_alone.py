"""`realgraph run --no-train`: what is left of graphs and plans, how it is scheduled, and a real run."""

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from realgraph.graphs.graph import INPUT
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner.plan.plan import REALLOCATION
from realgraph.run.rollout_alone import measured_lines, without_calls, without_training
from realgraph.run_file.open_graph import open_graph
from realgraph.runtime.commands.actions import StepEnded
from realgraph.runtime.master.observer import StepRecord
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Evaluate, Execute, Reallocate, Save
from tests.runs import GRPO, finish, home, merged, records, write_run
from tests.shapes import job_of, random_shape
from tests.simulated_worker import Workers
from tests.simulator import Simulator

__all__ = ["home"]

GENERATING = ("grpo", "ppo", "raft", "remax", "generate")
REFERENCE = ["params.kl_coef=0.1", "models.ref.path=none"]
APART = {"allocation": {"rollout": {"first": 0, "devices": 1}, "train": {"first": 1, "devices": 1}}}


@pytest.mark.parametrize("name", GENERATING)
def test_all_but_training_is_left_of_a_graph(name: str) -> None:
    overrides = ["models.actor.path=none", *(REFERENCE if name == "grpo" else ())]
    whole = open_graph(name, overrides)
    graph = without_training(whole)
    gone = {call for call in whole.calls if call not in graph.calls}
    assert all(isinstance(whole.calls[call], Train | Advantage) for call in gone)
    kept = {call for call, one in whole.calls.items() if isinstance(one, Generate | Inference | Function)}
    assert kept == graph.calls.keys()
    assert graph.generates == whole.generates
    assert graph.samples_per_group == whole.samples_per_group
    for key in graph.keys.values():
        assert key.producer in {INPUT, *graph.calls}
        assert graph.calls.keys() >= set(key.consumers)
    for call in graph.calls:
        assert graph.reads[call] == whole.reads[call]
        assert graph.keys.keys() >= {*graph.reads[call], *graph.writes[call]}
    assert without_training(graph) == graph


@pytest.mark.parametrize("seed", range(40))
def test_rollouts_are_scheduled_to_the_end_and_nothing_else_is(seed: int) -> None:
    """Under any plan: every step comes, its rewards and inference too, and no weights move, are saved or evaluated."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.algorithm = rng.choice(["grpo", "ppo", "distill", "twin"])
    shape.checkpoint_seconds, shape.oversample = rng.choice([0.0, 1e-3]), 1.0
    whole = job_of(shape)
    graph = without_training(whole.graph)
    plan = without_calls(whole.plan, graph.calls)
    assert not any(turn.call.startswith(REALLOCATION) for order in plan.orders.values() for turn in order)
    job = replace(whole, graph=graph, plan=plan, eval=None, rollout_alone=True)
    simulator = Simulator(shape, rng, Scheduler(job, range(shape.n_workers), 1000), graph=graph)
    simulator.frozen, simulator.job = True, job
    simulator.contract = Workers(job, shape.n_workers, simulator.versions)
    simulator.workers = simulator.contract.all
    halt = simulator.run()
    assert halt is not None
    assert halt.reason == "finished"
    assert sum(isinstance(action, StepEnded) for action in simulator.actions) == shape.steps
    commands = [sent.command for sent in simulator.log]
    assert not any(isinstance(command, Reallocate | Save | Evaluate) for command in commands)
    executed = {command.call for command in commands if isinstance(command, Execute)}
    assert executed == {name for name, call in graph.calls.items() if not isinstance(call, Generate)}


def test_the_figures_are_of_steps_that_are_warm() -> None:
    graph = open_graph("generate", ["models.actor.path=none"])
    metrics = {"batch/new_tokens": 80.0, "batch/samples": 8.0, "rollout/running": 6.0}
    steps = [StepRecord(i, 50.0 if i == 0 else 2.0, metrics, lengths=(1, 30)) for i in range(5)]
    text = "\n".join(measured_lines(graph, steps))
    assert "steps 2 to 5: 40 tokens/s" in text
    assert "10 on average, up to about 30" in text
    assert "on an engine: 6.0" in text
    alone = [StepRecord(i, 2.0, metrics | {"rollout/running": 0.0}) for i in range(5)]  # groups that end together
    assert "on an engine" not in "\n".join(measured_lines(graph, alone))
    assert not list(measured_lines(graph, []))


def test_where_several_calls_generate_the_figures_say_whose_they_are() -> None:
    graph = open_graph("remax", ["models.actor.path=none"])
    metrics = {"batch/new_tokens": 80.0, "batch/samples": 8.0, "greedy/new_tokens": 3.0}
    text = "\n".join(measured_lines(graph, [StepRecord(0, 2.0, metrics, lengths=(1, 30))]))
    assert "40 tokens/s of rollout" in text
    assert "tokens of a sample of rollout: 10 on average, up to about 30" in text
    assert "tokens of a sample of greedy: 3 on average" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["synchronous", "asynchronous"])
def test_a_run_is_measured_and_keeps_nothing(home: Path, name: str) -> None:
    parts: dict[str, Any] = merged(APART, {"staleness": 2}) if name == "asynchronous" else {"params": {"kl_coef": 0.1}}
    every = {"steps": 4, "checkpoint": {"every": 1}, "eval": {"every": 1, "data": {"path": "test.jsonl"}}}
    running = finish(home, "run", str(write_run(home, name, GRPO, every, parts)), "--no-train")
    assert not (home / name).exists()  # it is the run's own, which may come later
    folder = home / f"{name}-no-train"
    steps = records(folder)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    calls = {key.partition("/")[0] for step in steps for key in step["metrics"]}
    assert {"rollout", "reward"} <= calls
    assert ("ref_logp" in calls) == (name == "synchronous")
    assert not calls & {"train", "advantage", "reallocate"}
    assert all(step["metrics"].get("rollout/version", 0.0) == 0.0 for step in steps)
    assert not records(folder, "eval")
    assert not records(folder, "checkpoint")
    assert not (folder / "checkpoints").exists()
    assert not (folder / "samples").exists()
    assert "rollout alone, steps 2 to 4:" in running.output()
    assert max(step["metrics"]["staleness/max"] for step in steps) == (2.0 if name == "asynchronous" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_begins_more_groups_than_a_step_takes_is_measured(home: Path, staleness: int) -> None:
    """`batch.oversample` beside --no-train: steps are whole, and what is beyond them is given up as in training."""
    name = f"surplus-alone-{staleness}"
    batch = {"groups": 8, "oversample": 1.5, "max_new_tokens": 32}
    parts = merged(APART if staleness else {}, {"steps": 4, "staleness": staleness, "batch": batch})
    running = finish(home, "run", str(write_run(home, name, GRPO, parts)), "--no-train")
    steps = [record["metrics"] for record in records(home / f"{name}-no-train")]
    assert [step["batch/groups"] for step in steps] == [8] * 4
    surplus = [step["batch/surplus_groups"] for step in steps]
    assert surplus == [4] * 4 if not staleness else 0 <= max(surplus) <= 4
    assert "rollout alone, steps 2 to 4:" in running.output()
