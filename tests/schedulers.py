"""Runs of simulated Schedulers that copies take over, for tests; and the evaluations of a run."""

import msgspec

from realgraph.runtime.commands.actions import EvalEnded
from realgraph.runtime.scheduler.scheduler import Scheduler
from tests.simulated_rollouts import N_EVAL_ROWS
from tests.simulator import Simulator


def copied(scheduler: Scheduler) -> Scheduler:
    """Another Scheduler of the same run, by its image as bytes, which stays the same."""
    copy = Scheduler(scheduler._job, scheduler._workers, 1000, None, N_EVAL_ROWS)
    image = msgspec.msgpack.encode(scheduler.image)
    copy.restore(msgspec.msgpack.decode(image, type=type(scheduler.image)))
    assert msgspec.msgpack.encode(copy.image) == image
    return copy


def run_by_copies(simulator: Simulator) -> int:
    """Run to the end, which is in order, by a copy after each event while an evaluation or a checkpoint is in hand;
    returns how many copies."""
    n_copied, halt = 0, simulator.run(1)
    while halt is None:
        if simulator.scheduler.image.boundary_task is not None:
            simulator.scheduler = copied(simulator.scheduler)
            n_copied += 1
        halt = simulator.run(simulator.n_events + 1)
    assert halt.error is None
    return n_copied


def check_evaluations(simulator: Simulator, every: int) -> None:
    """Run to the end, which is in order: evaluations are before the first step, after every `every` and at the end."""
    halt = simulator.run()
    assert halt is not None and halt.error is None
    ended = [action.step for action in simulator.actions if isinstance(action, EvalEnded)]
    last = simulator.shape.steps
    assert ended == [step for step in range(last + 1) if step % every == 0 or step == last]
