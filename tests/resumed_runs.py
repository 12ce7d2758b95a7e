"""Simulated runs that go on from a checkpoint, groups that steps have trained, and what the ledger says of them."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten
from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.scheduler.scheduler import Scheduler
from tests.shapes import Shape, job_of
from tests.simulator import Simulator


def resumed_from(state: Checkpointed | None, shape: Shape, rng: random.Random) -> Simulator:
    """A run that goes on from a state as it is read from its file; None: from the beginning."""
    read = msgspec.json.decode(msgspec.json.encode(state), type=Checkpointed | None)
    return Simulator(shape, rng, Scheduler(job_of(shape), range(shape.n_workers), 1000, read, 5))


def groups_of_steps(simulator: Simulator) -> Iterator[tuple[int, set[int]]]:
    """Each step with the groups of its batch, once for every call that has run on it."""
    for (step, _), shares in simulator.history.items():
        yield step, {group_of(sample) for share in shares for part in share for sample in part}


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


def ledger_problems(state: Mapping[str, Any], groups: set[int], steps: int, per_step: int) -> list[str]:
    """Problems of the ledger at the end of a run that has trained `groups`: each number that was ever given out must be
    trained, discarded, or open. state: as it is written."""
    problems = []
    if state["step"] != steps or state["n_trained"] != steps * per_step:
        problems.append(f"the last state has {state['step']} steps and {state['n_trained']} trained groups")
    if len(groups) != steps * per_step:
        problems.append(f"{len(groups)} different groups trained, not {steps * per_step}")
    if state["next_group"] != state["n_trained"] + state["n_discarded"] + len(state["open"]):
        problems.append(f"the ledger does not add up: {state}")
    if any(group >= state["next_group"] for group in groups) or groups & set(state["open"]):
        problems.append("groups were trained that the ledger has not given out, or has as open")
    left = set(range(state["next_group"])) - groups - set(state["open"])
    if len(left) != state["n_discarded"]:
        problems.append(f"{len(left)} groups neither trained nor open, {state['n_discarded']} discarded")
    return problems
