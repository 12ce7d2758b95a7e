"""The Scheduler over random graphs, plans, durations, discards and faults; the simulator checks every command."""

import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from realgraph.runtime.commands.actions import (
    Action,
    Checkpointed,
    CheckpointWritten,
    EvalEnded,
    Send,
    StepEnded,
    StopRequested,
)
from realgraph.runtime.job.engine_loss import expendable_workers
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Evaluate, Execute, Heartbeat, Load, Reallocate, Save
from tests.resumed_runs import assert_trains_the_rest, groups_of_steps, resumed_from
from tests.shapes import Shape, random_shape
from tests.simulator import Simulator, ended_steps

SEEDS = range(0, 2400, 100)


@pytest.mark.parametrize("first", SEEDS)
def test_random_runs_end_in_order_and_break_no_invariant(first: int) -> None:
    n_events = n_evaluated_busy = n_saved_busy = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        shape = random_shape(rng)
        simulator = Simulator(shape, rng)
        halt = simulator.run()
        assert halt is not None
        assert halt.error is None, (seed, shape, halt.reason)
        assert halt.reason == "finished"
        assert simulator.step == shape.steps, (seed, shape)
        n_events += simulator.n_events
        n_evaluated_busy += simulator.n_evaluated_busy
        n_saved_busy += simulator.n_saved_busy
    assert n_events > 3_000  # 24 x 100 runs: over 10^5 events
    assert n_evaluated_busy > 0  # while groups are in the making
    assert n_saved_busy > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_no_group_beyond_the_bound_is_trained_where_overdue_groups_wait_or_are_dropped(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.algorithm, shape.steps = rng.choice(["grpo", "ppo"]), 6
    shape.overdue = rng.choice(["wait", "drop"])
    simulator = Simulator(shape, rng)
    simulator.run()
    assert max(step.oldest for step in ended_steps(simulator)) <= shape.staleness


@pytest.mark.parametrize("seed", range(60))
def test_synchronous_batches_do_not_depend_on_the_order_of_arrival(seed: int) -> None:
    shape = random_shape(random.Random(seed))
    shape.staleness, shape.oversample = 0, 1.0
    runs = []
    for order in (1, 2):
        simulator = Simulator(shape, random.Random(f"{seed} {order}"))
        simulator.run()
        runs.append(simulator)
    assert {key: sorted(shares) for key, shares in runs[0].history.items()} == {
        key: sorted(shares) for key, shares in runs[1].history.items()
    }
    first, second = map(ended_steps, runs)
    assert [(s.n_tokens, s.n_dropped, s.n_skipped) for s in first] == [
        (s.n_tokens, s.n_dropped, s.n_skipped) for s in second
    ]


def rounded(log: Iterable[Action]) -> list[Send]:
    """The commands, tasks numbered from the first on, deadlines without the last bits (they depend on the clock)."""
    numbers: dict[int, int] = {}
    commands = []
    for action in log:
        if not isinstance(action, Send):
            continue
        command = action.command
        if isinstance(command, Execute):
            seconds = round(command.deadline_seconds, 6)
            command = msgspec.structs.replace(command, deadline_seconds=seconds)
        if isinstance(command, Execute | Reallocate | Save | Evaluate | Load) and command.task is not None:
            command = msgspec.structs.replace(command, task=numbers.setdefault(command.task, len(numbers)))
        commands.append(Send(action.worker, command))
    return commands


# --- resume -----------------------------------------------------------------------------------------------------------


def repeatable_shape(rng: random.Random) -> Shape:
    """A random run of four steps that goes on alike whenever it is stopped: synchronous, nothing floats, no function is
    still at work on a surplus."""
    shape = random_shape(rng)
    shape.algorithm = rng.choice(["grpo", "ppo", "sft", "dpo"])
    shape.staleness, shape.floating, shape.steps, shape.oversample = 0, False, 4, 1.0
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_resumed_run_gives_the_commands_of_the_uninterrupted_one(seed: int) -> None:
    rng = random.Random(seed)
    shape = repeatable_shape(rng)
    shape.checkpoint_every, shape.eval_every = 0, 0
    whole = Simulator(shape, rng)
    whole.steady = True
    boundaries: list[tuple[Checkpointed, int]] = []
    whole.take(whole.scheduler.start(0.0))
    while whole.halt is None:
        n_steps, n_sent = whole.step, len(whole.actions)
        whole.advance()
        if whole.step > n_steps:
            at = next(i for i in range(n_sent, len(whole.actions)) if isinstance(whole.actions[i], StepEnded))
            boundaries.append((whole.scheduler.state, at + 1))
    assert [state.step for state, _ in boundaries] == [1, 2, 3, 4]
    for state, at in boundaries[:-1]:
        resumed = resumed_from(state, shape, rng)
        resumed.steady = True
        resumed.run()
        assert_same(resumed, whole.actions[at:])
        assert ended_steps(resumed)[-1].metrics == ended_steps(whole)[-1].metrics


def assert_same(resumed: Simulator, expected: list[Action]) -> None:
    """The resumed run has sent the very commands, and written the very states, of what is left of another."""
    assert rounded(resumed.log) == rounded(expected)
    states, theirs = (
        [action.state for action in actions if isinstance(action, CheckpointWritten)]
        for actions in (resumed.actions, expected)
    )
    assert states == theirs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_run_resumed_from_a_checkpoint_writes_the_states_of_the_uninterrupted_one(seed: int) -> None:
    """States are equal to the last field, with evaluations, which may refresh the generator's copy before a save."""
    rng = random.Random(seed)
    shape = repeatable_shape(rng)
    shape.checkpoint_every, shape.eval_every = rng.choice([1, 2]), rng.choice([0, 1, 2, 3])
    whole = Simulator(shape, rng)
    whole.steady = True
    whole.run()
    written = [(i, action) for i, action in enumerate(whole.actions) if isinstance(action, CheckpointWritten)]
    for i, action in written[:-1]:
        resumed = resumed_from(action.state, shape, rng)
        resumed.steady = True
        resumed.run()
        assert_same(resumed, whole.actions[i + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_run_that_was_stopped_and_resumed_ends_with_the_bytes_of_the_uninterrupted_one(seed: int) -> None:
    """Although it has written a checkpoint more, wherever the stop came."""
    rng = random.Random(seed)
    shape = repeatable_shape(rng)
    shape.checkpoint_every, shape.eval_every = rng.choice([0, 1, 3]), rng.choice([0, 1, 2])
    whole, stopped = Simulator(shape, rng), Simulator(shape, rng)
    whole.steady = stopped.steady = True
    whole.run()
    stopped.run(max_events=rng.randint(1, whole.n_events - 1))
    stopped.feed(StopRequested())
    stopped.run()
    ends = [action.state for action in stopped.actions if isinstance(action, CheckpointWritten)]
    resumed = resumed_from(ends[-1] if ends else None, shape, rng)
    resumed.steady = True
    resumed.run()
    last_bytes, expected = (
        [msgspec.json.encode(action.state) for action in actions if isinstance(action, CheckpointWritten)][-1]
        for actions in (stopped.actions + resumed.actions, whole.actions)
    )
    assert last_bytes == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_after_any_checkpoint_each_group_is_trained_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape.checkpoint_every, shape.steps = 1, 4
    whole = Simulator(shape, rng)
    whole.run()
    written = [action for action in whole.actions if isinstance(action, CheckpointWritten)]
    assert [action.step for action in written] == [1, 2, 3, 4]
    assert {action.folder for action in written} == {f"/run/checkpoints/step-{n:06d}.partial" for n in range(1, 5)}
    for action in written[:-1]:
        assert_trains_the_rest(whole, action)


# --- single rules -----------------------------------------------------------------------------------------------------


def test_calls_on_disjoint_meshes_run_at_once_and_a_floating_critic_runs_beside_the_next_generation() -> None:
    shape = Shape(algorithm="ppo", n_workers=4, split=True, steps=4, groups=4)
    simulator = Simulator(shape, random.Random(1))
    beside = 0
    while simulator.halt is None:
        if not simulator.actions:
            simulator.take(simulator.scheduler.start(0.0))
        simulator.advance()
        beside += len({task for task in simulator.holding.values() if task >= 0}) > 1
    assert beside > 0


def test_evaluations_come_at_the_start_at_their_steps_and_at_the_end() -> None:
    simulator = Simulator(Shape(eval_every=2, steps=5), random.Random(0))
    simulator.run()
    assert [action.step for action in simulator.actions if isinstance(action, EvalEnded)] == [0, 2, 4, 5]
    rows = [command.command.rows for command in simulator.log if isinstance(command.command, Evaluate)]
    assert sorted(row for part in rows for row in part) == sorted([*range(5)] * 4)


def test_carried_numbers_go_from_one_step_to_the_next() -> None:
    simulator = Simulator(Shape(steps=4), random.Random(0))
    simulator.run()
    advantages = [s.command for s in simulator.log if isinstance(s.command, Execute) and s.command.call == "advantage"]
    assert [command.state for command in advantages] == [{} if i == 0 else {"coef": float(i)} for i in range(4)]
    assert simulator.scheduler.state.carried == {"advantage": {"coef": 4.0}}


def test_metrics_and_counts_of_a_step_are_merged_over_workers() -> None:
    simulator = Simulator(Shape(n_workers=4, groups=8, n=3, steps=2), random.Random(0))
    simulator.run()
    for step in ended_steps(simulator):
        assert step.n_samples == 24
        n = step.metrics["train"]["n"]
        assert isinstance(n, Mean) and (n.total, n.weight) == (24, 4)
        assert set(step.spans) == {"rollout", "reward", "ref_logp", "advantage", "train"}
        assert step.spans["reward"].ended <= step.spans["train"].ended


class Interleavings(RuleBasedStateMachine):
    """Hypothesis drives one run: which event comes next, when a stop or a fault strikes, when it is killed and resumed.

    trained: groups by step, of every life of the run. evaluated: the steps after which an evaluation has ended.
    """

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.simulator = Simulator(random_shape(self.rng), self.rng)
        self.simulator.take(self.simulator.scheduler.start(0.0))
        self.trained: dict[int, set[int]] = {}
        self.evaluated: set[int] = set()
        self.stopped = False

    @property
    def running(self) -> bool:
        return getattr(self, "simulator", None) is not None and self.simulator.halt is None

    @precondition(lambda self: self.running)
    @rule(n=st.integers(1, 40))
    def go_on(self, n: int) -> None:
        for _ in range(n):
            if self.running:
                self.simulator.advance()

    @precondition(lambda self: self.running and self.simulator.events)
    @rule(which=st.integers(0, 10**6))
    def overtake(self, which: int) -> None:
        """Any answer may come before the one that was due."""
        planned = self.simulator.events[which % len(self.simulator.events)]
        planned.time = self.simulator.now
        self.simulator.events.sort()
        self.simulator.advance()

    @precondition(lambda self: self.running)
    @rule()
    def stop(self) -> None:
        if self.rng.random() < 0.1:
            self.stopped = True
            self.simulator.feed(StopRequested())

    @precondition(lambda self: self.running)
    @rule()
    def kill_and_resume(self) -> None:
        """Kill the run at any moment and resume its newest checkpoint: sessions, evaluations and saves are cut off."""
        written = [action.state for action in self.simulator.actions if isinstance(action, CheckpointWritten)]
        if not written or self.rng.random() < 0.3:
            return
        self.look_back()
        self.trained = {step: groups for step, groups in self.trained.items() if step < written[-1].step}
        self.simulator = resumed_from(written[-1], self.simulator.shape, self.rng)
        self.simulator.take(self.simulator.scheduler.start(0.0))
        self.stopped = False

    def look_back(self) -> None:
        """Note what this life of the run has trained, no group twice, and evaluated."""
        for step, groups in groups_of_steps(self.simulator):
            assert self.trained.setdefault(step, groups) == groups
        assert len(set().union(*self.trained.values())) == sum(map(len, self.trained.values()))
        self.evaluated |= {action.step for action in self.simulator.actions if isinstance(action, EvalEnded)}

    @precondition(lambda self: self.running)
    @rule(worker=st.integers(0, 3))
    def heartbeat(self, worker: int) -> None:
        number = worker % self.simulator.shape.n_workers
        if number not in self.simulator.contract.gone:
            self.simulator.feed(Heartbeat(number))

    @precondition(lambda self: self.running)
    @rule(worker=st.integers(0, 3))
    def lose(self, worker: int) -> None:
        if self.rng.random() < 0.05:
            job, lost = self.simulator.job, worker % self.simulator.shape.n_workers
            self.simulator.lose(lost)
            if lost not in expendable_workers(job.graph, job.plan):
                assert self.simulator.halt is not None
                assert self.simulator.halt.error is not None

    @precondition(lambda self: not self.running)
    @rule(worker=st.integers(0, 3))
    def nothing_follows_the_halt(self, worker: int) -> None:
        if getattr(self, "simulator", None) is not None:
            assert self.simulator.scheduler.on(Heartbeat(worker), 1e9) == []
            assert self.simulator.scheduler.deadline() is None

    def teardown(self) -> None:
        if self.running:
            self.simulator.n_events += 1  # it has been started
            halt = self.simulator.run()
            assert halt is not None
            if self.simulator.contract.gone and halt.error is not None:
                return  # a step had begun to use what the lost engine had
            assert halt.error is None
            self.look_back()
            shape = self.simulator.shape
            if not self.stopped:
                assert not self.trained or sorted(self.trained) == list(range(shape.steps))
                if shape.eval_every and self.simulator.contract.generate:
                    due = {*range(0, shape.steps + 1, shape.eval_every), shape.steps}
                    spec = self.simulator.job.eval
                    if spec is not None and spec.on is not None:  # one that the next has overtaken is not made
                        assert shape.steps in self.evaluated <= due
                    else:
                        assert self.evaluated == due


Interleavings.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestInterleavings = Interleavings.TestCase
