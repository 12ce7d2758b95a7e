"""Simulated runs that go on from a checkpoint, and groups that their steps have trained."""

import random
from collections.abc import Iterator

import msgspec

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten
from realgraph.runtime.scheduler.scheduler import Scheduler
from tests.shapes import Shape, job_of
from tests.simulator import Simulator


def resumed_from(state: Checkpointed | None, shape: Shape, rng: random.Random) -> Simulator:
    """A run that goes on from a state as it is read from its file; None: from the beginning."""
    read = msgspec.json.decode(msgspec.json.encode(state), type=Checkpointed | None)
    return Simulator(shape, rng, Scheduler(job_of(shape), range(shape.n_workers), 1000, read, 5))


def groups_of_steps(simulator: Simulator) -> Iterator[tuple[int, set[int]]]:
    """Each step with the groups of its batch, once for every call that has run on it."""
    n = simulator.graph.samples_per_group
    for (step, _), shares in simulator.history.items():
        yield step, {sample // n for share in shares for part in share for sample in part}


def assert_trains_the_rest(whole: Simulator, written: CheckpointWritten) -> None:
    """A run that goes on from a checkpoint of `whole` trains as many groups as are left, and none of those before."""
    shape = whole.shape
    resumed = resumed_from(written.state, shape, whole.rng)
    halt = resumed.run()
    assert halt is not None
    assert halt.reason == "finished"
    before = set().union(*(groups for step, groups in groups_of_steps(whole) if step < written.step))
    after = {group for group, final in resumed.final.items() if final == "trained"}
    assert not before & after
    assert len(after) == shape.groups * (shape.steps - written.step)
