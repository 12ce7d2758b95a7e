"""Checkpoints by time: at the first step end at which they can be written, from a clock that is an argument."""

import random

import msgspec
import pytest

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten, StepEnded
from realgraph.runtime.job.job import CheckpointSpec
from realgraph.runtime.master.checkpoints import DamagedState, decode_state
from tests.resumed_runs import assert_trains_the_rest
from tests.shapes import random_shape
from tests.simulator import Simulator


def run_with_times(simulator: Simulator) -> list[tuple[float, int, int]]:
    """(simulated seconds, completed steps, the first of them at whose end a save was possible; 0: they were saved)."""
    found: list[tuple[float, int, int]] = []
    simulator.take(simulator.scheduler.start(0.0))
    while simulator.halt is None:
        n, newest = len(simulator.actions), simulator.scheduler._steps.newest_train
        simulator.advance()
        for action in simulator.actions[n:]:
            if isinstance(action, StepEnded):
                found.append((simulator.now, action.step + 1, max(action.step + 1, newest + 1)))
            elif isinstance(action, CheckpointWritten):
                found.append((simulator.now, action.step, 0))
    return found


@pytest.mark.parametrize("seed", range(120))
def test_a_checkpoint_by_time_comes_at_a_step_end_soon_after_its_time(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.checkpoint_every, shape.eval_every, shape.steps = 0, 0, 8
    shape.checkpoint_seconds = rng.choice([1e-3, 2.0, 10.0, 40.0, 1e6])
    simulator = Simulator(shape, rng)
    found = run_with_times(simulator)
    assert simulator.halt is not None
    assert simulator.halt.reason == "finished"
    saved_at, due = 0.0, 0
    for now, step, first in found:
        if not first:
            assert step in (due, shape.steps), "not the first step that could be saved"
            saved_at, due = now, 0
        elif not due and now - saved_at >= shape.checkpoint_seconds:
            due = first
    assert not due
    saves = [step for _, step, first in found if not first]
    assert saves[-1] == shape.steps
    if shape.checkpoint_seconds == 1e-3 and shape.staleness == 0 and not shape.floating:
        assert saves == list(range(1, shape.steps + 1))
    if shape.checkpoint_seconds == 1e6:
        assert saves == [shape.steps]


@pytest.mark.parametrize("seed", range(60))
def test_a_run_goes_on_from_any_checkpoint_by_time(seed: int) -> None:
    """Each group is trained exactly once, whatever was under way when the time came."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.checkpoint_every, shape.steps, shape.checkpoint_seconds = 0, 6, rng.choice([1e-3, 5.0, 15.0])
    whole = Simulator(shape, rng)
    whole.run()
    written = [action for action in whole.actions if isinstance(action, CheckpointWritten)]
    for action in written[:-1]:
        assert_trains_the_rest(whole, action)


def test_states_of_every_format_are_read_and_a_later_one_is_refused_by_its_number() -> None:
    state = Checkpointed(3, {"actor": 3}, 14, 12, 1, (13,))
    fields = msgspec.to_builtins(state)
    assert decode_state(msgspec.json.encode(state)) == state
    assert decode_state(msgspec.json.encode({**fields, "format": 1, "next_task": 77})) == state
    with pytest.raises(DamagedState, match="has format 3, this version reads 2 and before"):
        decode_state(msgspec.json.encode({**fields, "format": 3, "more": 1}))
    with pytest.raises(msgspec.ValidationError, match="next_task"):
        decode_state(msgspec.json.encode({**fields, "next_task": 77}))


@pytest.mark.parametrize(
    ("spec", "seconds", "text"),
    [
        (CheckpointSpec(), 600, "every 10 minutes and at the end"),
        (CheckpointSpec(every=50), 0, "every 50 steps and at the end"),
        (CheckpointSpec(every=1), 0, "every step and at the end"),
        (CheckpointSpec(minutes=0.5), 30, "every 0.5 minutes and at the end"),
        (CheckpointSpec(minutes=0), 0, "at the end"),
        (CheckpointSpec(every=50, minutes=20), 1200, "every 50 steps and every 20 minutes and at the end"),
    ],
)
def test_what_a_setting_means(spec: CheckpointSpec, seconds: float, text: str) -> None:
    assert (spec.seconds, spec.text) == (seconds, text)
