"""More groups are begun than a step takes: the first that finish are trained, and no bound and no step suffers."""

import random
from pathlib import Path

import pytest

from benchmarks.audit import judge_run
from realgraph.runtime.commands.aborted import AbortedGroups
from realgraph.runtime.commands.actions import CheckpointWritten
from realgraph.runtime.job.job import BatchSpec
from realgraph.runtime.job.sample_ids import sample_id
from realgraph.runtime.scheduler.concurrency.controller import Concurrency
from realgraph.runtime.scheduler.concurrency.settings import ConcurrencySettings
from realgraph.runtime.wire.protocol import Abort, Generated, Sample
from tests.resumed_runs import groups_of_steps, ledger_problems, resumed_from
from tests.runs import GRPO, finish, home, records, write_run
from tests.shapes import Shape, random_shape
from tests.simulator import Simulator, ended_steps

__all__ = ["home"]

KEPT = (1.0, 0.5, 0.1)  # of the groups, by a filter


def shape_for(rng: random.Random, staleness: int) -> Shape:
    """Any run that begins more groups than a step takes and filters some."""
    shape = random_shape(rng)
    shape.algorithm, shape.staleness, shape.spare, shape.filtered = rng.choice(["grpo", "ppo"]), staleness, 0, True
    shape.groups, shape.steps, shape.checkpoint_every = 6, 6, 1
    shape.slow, shape.oversample = rng.choice([0.0, 0.2]), rng.choice([1.25, 1.5, 2.0])
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_step_starves_the_bound_holds_and_every_group_is_accounted_for(staleness: int, keep: float) -> None:
    """Under filters that leave out up to nine of ten groups: the simulator refuses a batch that is not whole."""
    n_surplus = n_stopped = n_crossed = 0
    for seed in range(12 if keep > 0.1 else 9):
        rng = random.Random(seed)
        shape = shape_for(rng, staleness)
        simulator = Simulator(shape, rng, keep=keep)
        halt = simulator.run()
        assert halt is not None and halt.error is None, (seed, shape, halt)
        steps = ended_steps(simulator)
        assert len(steps) == shape.steps
        most = simulator.job.batch.surplus
        assert all(step.n_surplus <= most for step in steps)
        if shape.overdue in ("wait", "drop") or not staleness:
            assert max(step.oldest for step in steps) <= staleness
        written = [action.state for action in simulator.actions if isinstance(action, CheckpointWritten)]
        assert staleness or written[-1].open == ()  # a synchronous step leaves nothing behind
        trained = {group for _, groups in groups_of_steps(simulator) for group in groups}
        state = {
            name: getattr(written[-1], name) for name in ("step", "n_trained", "n_discarded", "next_group", "open")
        }
        assert ledger_problems(state, trained, shape.steps, shape.groups) == []
        n_surplus += sum(step.n_surplus for step in steps)
        n_stopped += sum(len(send.command.groups) for send in simulator.log if isinstance(send.command, Abort))
        n_crossed += simulator.n_crossed
    if staleness == 4:
        return  # too few steps for anything to be too old
    assert n_surplus > 0
    assert n_stopped > 0 and n_crossed > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_synchronous_run_goes_on_from_any_checkpoint_with_the_batches_and_states_of_the_whole_one(seed: int) -> None:
    """In a simulation whose times depend on the groups alone. A discarded group is never begun again."""
    rng = random.Random(seed)
    shape = shape_for(rng, 0)
    shape.floating, shape.eval_every = False, 0
    whole = Simulator(shape, rng)
    whole.steady = True
    whole.run()
    written = [action.state for action in whole.actions if isinstance(action, CheckpointWritten)]
    for i, state in enumerate(written[:-1]):
        resumed = resumed_from(state, shape, rng)
        resumed.steady = True
        resumed.run()
        rest = {at: shares for at, shares in whole.history.items() if at[0] >= state.step}
        assert {at: sorted(shares) for at, shares in resumed.history.items()} == {
            at: sorted(shares) for at, shares in rest.items()
        }
        assert [one.state for one in resumed.actions if isinstance(one, CheckpointWritten)] == written[i + 1 :]


def test_the_first_that_finish_are_trained_and_steps_end_earlier() -> None:
    """With a tail: a tenth of what is made takes ten times as long."""
    seconds = {}
    for oversample in (1.0, 1.5):
        ends = []
        for seed in range(20):
            shape = Shape(n_workers=4, groups=8, steps=6, slow=0.1, seed=seed, oversample=oversample)
            simulator = Simulator(shape, random.Random(seed))
            simulator.run()
            ends.append(simulator.now)
        seconds[oversample] = sum(ends)
    assert seconds[1.5] < 0.9 * seconds[1.0]


def test_the_surplus_comes_on_top_of_the_limit_of_work_in_flight() -> None:
    rooms = []
    for surplus in (0, 3):
        settings = ConcurrencySettings(8, 2, 2, float("inf"), 4, fixed=False, surplus=surplus)
        rooms.append(Concurrency(settings).room(0))
    assert rooms[1] >= rooms[0] + 3


@pytest.mark.parametrize(("groups", "oversample", "surplus"), [(64, 1.25, 16), (10, 1.1, 1), (4, 1.1, 1), (8, 1.0, 0)])
def test_the_surplus_is_that_share_of_the_groups_rounded_up(groups: int, oversample: float, surplus: int) -> None:
    assert BatchSpec(groups=groups, oversample=oversample).surplus == surplus


def test_answers_about_groups_that_were_given_up_are_left_out_for_as_long_as_they_may_come() -> None:
    aborted = AbortedGroups()
    aborted.add(1, [4, 5], until=9)
    samples = tuple(Sample(sample_id(group, place), 7) for group in (4, 5, 6) for place in range(2))
    reply = Generated(1, "rollout", (4, 6), samples[:2] + samples[4:], skipped=(5,))
    gone, left = aborted.crossed(reply)
    assert gone == {4, 5}
    assert left == Generated(1, "rollout", (6,), samples[4:])
    again = AbortedGroups()
    again.restore(aborted.image)
    assert again.crossed(Generated(1, "rollout", (4,), samples[:2])) == ({4}, None)
    other = Generated(2, "rollout", (4,), samples[:2])
    assert again.crossed(other) == (set(), other)
    later = Generated(1, "rollout", (9,), ())
    assert again.crossed(later) == (set(), later)
    assert again.image.untils == ()


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "layout"), [(0, {"tp": 2}), (1, {})])
def test_a_run_stops_what_it_needs_no_more_and_trains_whole_batches(
    home: Path, staleness: int, layout: dict[str, int]
) -> None:
    """On engines of one worker, and of two that generate together and then train at once."""
    name = f"surplus-{staleness}"
    batch = {"groups": 8, "oversample": 1.5, "max_new_tokens": 32}
    allocation = {"rollout": layout} if layout else {}
    config = {"steps": 4, "outputs": {"audit": True}, "staleness": staleness, "batch": batch, "allocation": allocation}
    finish(home, "run", str(write_run(home, name, GRPO, config)), name=name)
    steps = [record["metrics"] for record in records(home / name)]
    assert [step["batch/groups"] for step in steps] == [8] * 4
    surplus = [step["batch/surplus_groups"] for step in steps]
    assert surplus == [4] * 4 if not staleness else 0 <= max(surplus) <= 4
    judged = judge_run(home / name)
    assert judged.problems == ()
    assert max(judged.ages["train"]) <= staleness
