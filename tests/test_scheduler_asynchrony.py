"""The Scheduler where samples may be stale: overdue groups, evaluations during sessions, kills and resumes of them."""

import random
from collections.abc import Sequence
from typing import Literal

import pytest

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten, EvalEnded
from realgraph.runtime.job.rollout import Interrupt
from realgraph.runtime.scheduler.groups.ledger import Ledger
from tests.resumed_runs import groups_of_steps, resumed_from
from tests.shapes import Shape, random_shape
from tests.simulator import Simulator, ended_steps


@pytest.mark.slow
@pytest.mark.parametrize("overdue", ["mask", "allow", "drop", "wait"])
def test_groups_that_are_overtaken_meet_what_the_run_says_of_them(
    overdue: Literal["mask", "allow", "drop", "wait"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a bound of one step: up to four steps old and more, left out, or waited for; each of it really happens."""
    ages: set[int] = set()
    n_dropped, waits = 0, 0
    must_wait = Ledger._must_wait

    def counted(ledger: Ledger, step: int, taken: Sequence[tuple[int, int]]) -> bool:
        nonlocal waits
        found = must_wait(ledger, step, taken)
        waits += found
        return found

    monkeypatch.setattr(Ledger, "_must_wait", counted)
    for seed in range(30):
        rng = random.Random(seed)
        shape = Shape(n_workers=4, split=True, groups=6, staleness=1, overdue=overdue, steps=8, slow=0.2, seed=seed)
        shape.again = rng.random() < 0.5
        simulator = Simulator(shape, rng)
        halt = simulator.run()
        assert halt is not None
        assert halt.error is None
        steps = ended_steps(simulator)
        ages |= {step.oldest for step in steps}
        n_dropped += sum(step.n_dropped for step in steps)
    assert ages >= {0, 1} if overdue in ("drop", "wait") else ages >= {0, 1, 2, 3, 4}
    assert max(ages) <= 1 or overdue in ("mask", "allow")
    assert (n_dropped > 0) == (overdue == "drop")
    assert (waits > 0) == (overdue == "wait")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 80, 40))
def test_an_asynchronous_run_killed_again_and_again_trains_each_group_once_and_makes_every_evaluation(
    first: int,
) -> None:
    n_killed = n_busy = n_evaluating = 0
    for seed in range(first, first + 40):
        rng = random.Random(seed)
        shape = random_shape(rng)
        shape.algorithm, shape.steps = rng.choice(["grpo", "ppo"]), 5
        shape.staleness, shape.spare, shape.checkpoint_every, shape.eval_every = rng.choice([1, 2, 4]), 0, 1, 1
        shape.eval_on = None
        state: Checkpointed | None = None
        trained: dict[int, set[int]] = {}
        evaluated: set[int] = set()
        simulator: Simulator | None = None
        for life in range(5):
            simulator = resumed_from(state, shape, rng)
            simulator.run(max_events=rng.randint(1, 150) if life < 4 else 10**9)
            n_killed += simulator.halt is None
            n_busy += simulator.halt is None and any(worker.making for worker in simulator.workers.values())
            tasks = simulator.scheduler._tasks.flying.values()
            n_evaluating += simulator.halt is None and any(task.kind == "evaluate" for task in tasks)
            evaluated |= {action.step for action in simulator.actions if isinstance(action, EvalEnded)}
            trained.update(groups_of_steps(simulator))
            written = [action.state for action in simulator.actions if isinstance(action, CheckpointWritten)]
            if simulator.halt is not None:
                break
            if written:
                state = written[-1]
        assert simulator is not None and simulator.halt is not None
        assert simulator.halt.error is None, (seed, shape, simulator.halt.reason)
        assert evaluated == set(range(6))
        assert sorted(trained) == list(range(5))
        assert len(set().union(*trained.values())) == sum(map(len, trained.values())) == 5 * shape.groups
    assert n_killed > 40
    assert n_busy > 20
    assert n_evaluating > 0


@pytest.mark.parametrize(("split", "kept"), [(False, 1), (True, 1), (True, 3)])
def test_groups_in_the_making_wait_for_an_evaluation_however_long(split: bool, kept: int) -> None:
    """A worker makes nothing while it evaluates: that is no silence of its own."""
    shape = Shape(staleness=kept, split=split, eval_every=1, steps=4, slow=0.5)
    simulator = Simulator(shape, random.Random(0))
    seconds = {"evaluate": 900.0, "groups": 30.0}  # parts of groups take 90 or 900 s; the deadline is 1000 s
    simulator.seconds = lambda what: seconds.get(what.split()[0], 1.0)  # type: ignore[method-assign]
    halt = simulator.run()
    assert halt is not None
    assert halt.error is None, halt.reason
    assert simulator.n_evaluated_busy > 0
    assert [action.step for action in simulator.actions if isinstance(action, EvalEnded)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("interrupt", ["recompute", "keep_kv", "wait"])
def test_samples_that_never_come_end_the_run_at_a_deadline(interrupt: Interrupt) -> None:
    """Also where new weights wait for them, and nothing else runs: whichever answer it is that is lost."""
    for seed in range(40):
        shape = Shape(n_workers=1, groups=4, staleness=2, interrupt=interrupt, steps=6, eval_every=2, seed=seed)
        simulator = Simulator(shape, random.Random(seed))
        simulator.run(seed)
        simulator.events.clear()
        simulator.run(simulator.n_events + 50)
        assert simulator.halt is not None, (seed, "ticks without end")
        assert simulator.halt.error is not None
        assert simulator.halt.error.kind == "deadline"
