"""Discrete-event fake workers that drive the very Scheduler that sockets drive, and check all that it asks of them."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from realgraph.graphs.graph import INPUT
from realgraph.graphs.spec import Inference, Train
from realgraph.runtime.commands.actions import (
    Action,
    CheckpointWritten,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    Tick,
)
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import (
    Abort,
    Command,
    Done,
    Drop,
    EndSession,
    Evaluate,
    Execute,
    Failed,
    Generated,
    Load,
    Loaded,
    Mean,
    Reallocate,
    Sample,
    Save,
    Submit,
)
from tests.shapes import Shape, assert_balanced, job_of
from tests.simulated_worker import SimulatedWorker, Workers


@dataclass(order=True)
class Planned:
    """An event that is to come."""

    time: float
    number: int
    event: Event = field(compare=False)
    before: Callable[[], None] | None = field(default=None, compare=False)  # what the worker did by then


class Simulator:
    """Runs a Scheduler to its Halt. Random durations come from `rng`; what is kept and skipped only from the seed."""

    def __init__(self, shape: Shape, rng: random.Random, scheduler: Scheduler | None = None, keep: float = 0.7) -> None:
        self.shape, self.rng, self.keep = shape, rng, keep
        self.job = job_of(shape)
        self.graph = self.job.graph
        self.frozen = shape.algorithm in ("distill", "twin")  # what generates is never trained
        self.scheduler = scheduler or Scheduler(self.job, range(shape.n_workers), 1000, None, 5)
        self.now = 0.0
        self.events: list[Planned] = []
        self.n_planned = self.n_events = 0
        state = self.scheduler.state
        self.versions = dict(state.versions)
        self.step = state.step
        self.submitted: set[int] = set()
        self.final: dict[int, str] = {}
        self.holding: dict[int, int] = {}  # device -> task
        self.awaited: dict[int, set[int]] = {}  # task -> workers
        self.batches: dict[tuple[int, str], list[tuple[tuple[int, ...], ...]]] = {}
        self.actions: list[Action] = []
        self.log: list[Send] = []  # of them
        self.halt: Halt | None = None
        self.leaving: set[int] = set()  # groups dropped by a step that ends
        self.steady = False  # durations depend on what is done, not on the order of events
        self.silent: Callable[[int, Command], bool] = lambda worker, command: False  # swallows a command
        self.history: dict[tuple[int, str], list[tuple[tuple[int, ...], ...]]] = {}  # (step, call) -> shares
        self.failing: Callable[[Command], Failed | None] = lambda command: None
        self.contract = Workers(self.job, shape.n_workers, self.versions)
        self.workers = self.contract.all
        self.n_saved_busy = 0  # checkpoints while groups were in the making
        self.n_evaluated_busy = 0  # evaluations that groups in the making had to wait for

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, max_events: int = 10**9) -> Halt | None:
        """Advance until the Halt, or by so many events."""
        if not self.n_events:
            self.take(self.scheduler.start(self.now))
        while self.halt is None and self.n_events < max_events:
            self.advance()
        return self.halt

    def advance(self) -> None:
        """One event, or a Tick where the deadline comes first."""
        deadline = self.scheduler.deadline()
        if not self.events or (deadline is not None and self.events[0].time > deadline):
            self.tick()
            return
        planned = heapq.heappop(self.events)
        self.now = max(self.now, planned.time)
        if planned.before is not None:
            planned.before()
        self.feed(planned.event)

    def feed(self, event: Event) -> None:
        """Give the Scheduler an event now, carry out what it says, check what must be true."""
        self.n_events += 1
        self.take(self.scheduler.on(event, self.now))
        self.scheduler.check()
        if self.halt is None:
            deadline = self.scheduler.deadline()
            assert deadline is not None, "the Scheduler waits without a deadline"
            assert deadline > self.now

    def plan(self, event: Event, delay: float, before: Callable[[], None] | None = None) -> None:
        """`event` comes after `delay` seconds."""
        self.n_planned += 1
        heapq.heappush(self.events, Planned(self.now + delay, self.n_planned, event, before))

    def take(self, actions: list[Action]) -> None:
        """Carry actions out."""
        for action in actions:
            assert self.halt is None, f"{action} after the Halt"
            self.actions.append(action)
            match action:
                case Send():
                    self.log.append(action)
                    self.command(action.worker, action.command)
                case StepEnded():
                    self.step_ended(action)
                case Halt():
                    self.halt = action
                    if action.error is None:
                        self.check_stores()
                case CheckpointWritten():
                    assert action.state.step == action.step == self.step
                    per_step = {role: len(trains) for role, trains in self.contract.trains.items()}
                    assert action.state.versions == {role: self.step * n for role, n in per_step.items()}
                case EvalEnded():
                    assert "reward" in action.metrics

    # --- commands -----------------------------------------------------------------------------------------------------

    def command(self, number: int, command: Command) -> None:
        """A worker gets a command."""
        failure = self.failing(command)
        if failure is not None:
            self.plan(failure, self.rng.random())
            return
        if self.silent(number, command):
            return
        worker = self.workers[number]
        match command:
            case Submit():
                self.contract.check_submit(number, command)
                self.make(number, command.groups, command.version)
            case Load():
                self.make(number, command.groups, 0)
            case Execute():
                self.execute(number, command)
            case Reallocate():
                self.contract.check_reallocate(number, command)
                self.answer(
                    number, command.task, command.call, lambda: worker.copies.update({command.call: command.version})
                )
                self.hold(number, command.task)
            case Drop():
                for group in command.groups:
                    self.drop(worker, group)
            case EndSession():
                assert command.call == self.contract.generate
                assert number in self.contract.layouts[command.call].mesh.devices
                assert not worker.making, "a session that goes on"
                self.contract.give_up(number, command.call)
            case Abort():
                worker.making.difference_update(command.groups)  # what is on its way still arrives
            case Save():
                assert not self.holding, "a checkpoint while a call runs"
                self.n_saved_busy += any(other.making for other in self.workers.values())
                self.answer(number, command.task, "", None)
            case Evaluate():
                self.contract.check_evaluate(number, command)
                assert command.step == self.step, "an evaluation inside a step"
                assert command.version == self.step * self.trains_of_generator
                self.hold(number, command.task)
                self.n_evaluated_busy += bool(worker.making)
                reward = Mean(self.seconds(f"evaluation {command.step} {number}"))
                seconds = self.answer(number, command.task, "evaluate", None, {"reward": reward})
                self.stand_still(number, seconds)

    def hold(self, device: int, task: int) -> None:
        """A mesh-holding task takes a device."""
        assert self.holding.get(device, task) == task, f"tasks {task} and {self.holding[device]} meet on {device}"
        self.holding[device] = task

    def answer(
        self,
        number: int,
        task: int,
        call: str,
        before: Callable[[], None] | None,
        metrics: dict[str, Mean] | None = None,
        kept: dict[int, bool] | None = None,
        step: int = 0,
    ) -> float:
        """`Done` after a random while, which is returned."""
        self.awaited.setdefault(task, set()).add(number)

        def ended() -> None:
            self.awaited[task].discard(number)
            if self.holding.get(number) == task:
                self.holding[number] = -task - 1  # free only when the whole mesh is
            if not self.awaited[task]:
                for device in [d for d, t in self.holding.items() if t in (task, -task - 1)]:
                    del self.holding[device]
            if before is not None:
                before()

        state = {"coef": float(step + 1)} if call == "advantage" else {}
        done = Done(number, task, call, metrics or {}, state, kept or {}, self.now, self.now + 1)
        seconds = self.seconds(f"{call} {step} {number}")
        self.plan(done, seconds, ended)
        return seconds

    def stand_still(self, number: int, seconds: float) -> None:
        """Delay what this worker is making."""
        for planned in self.events:
            if isinstance(planned.event, Generated) and planned.event.worker == number:
                planned.time += seconds
        heapq.heapify(self.events)

    @property
    def trains_of_generator(self) -> int:
        """Train calls a step of the role that generates."""
        generate = self.contract.generate
        return len(self.contract.trains.get(self.graph.role(generate), ())) if generate else 0

    def make(self, number: int, groups: tuple[int, ...], version: int) -> None:
        """Generate or load groups; they come back in random batches."""
        for group in groups:
            assert group not in self.submitted, f"group {group} was handed out twice"
            self.submitted.add(group)
        self.workers[number].making.update(groups)
        left = list(groups)
        rng = random.Random(f"{self.shape.seed} {groups}") if self.steady else self.rng
        rng.shuffle(left)
        while left:
            size = rng.randint(1, len(left))
            part, left = left[:size], left[size:]
            self.plan_groups(number, part, version)

    def plan_groups(self, number: int, part: list[int], version: int) -> None:
        worker, n = self.workers[number], self.graph.samples_per_group
        good = tuple(group for group in part if self.shape.lot(group, "skip") >= 0.05)
        skipped = tuple(group for group in part if group not in good)
        samples = []
        for group in good:
            for index in range(n):
                length = self.shape.length(group * n + index)
                samples.append(Sample(group * n + index, length, length // 2, oldest=version))
        self.rng.shuffle(samples)

        def made() -> None:
            for group in part:
                worker.making.discard(group)
            for group in skipped:
                self.discard(group)
            for key in self.graph.keys.values():
                if key.producer in (INPUT, "rollout"):
                    worker.store[key.name].update(sample.sample for sample in samples)

        ready = tuple(samples)
        if "rollout" in self.graph.calls:
            event: Event = Generated(
                number, "rollout", good, ready, {"len": Mean(1.0)}, skipped, self.now, self.now + 1
            )
        else:
            event = Loaded(number, good, ready, skipped)
        slow = 10 if self.shape.lot(min(part), "slow") < self.shape.slow else 1
        self.plan(event, 3 * slow * self.seconds(f"groups {part}"), made)

    def seconds(self, what: str) -> float:
        """The time that a worker takes."""
        rng = random.Random(f"{self.shape.seed} {what}") if self.steady else self.rng
        return rng.expovariate(1.0)

    def discard(self, group: int) -> None:
        assert group not in self.final
        self.final[group] = "discarded"

    def execute(self, number: int, command: Execute) -> None:
        """Check that a call may run on this worker, and answer later."""
        call, n = self.graph.calls[command.call], self.graph.samples_per_group
        samples = {sample for share in command.shares for sample in share}
        self.contract.check_execute(number, command)
        if isinstance(call, Inference | Train):
            self.hold(number, command.task)
            self.check_mesh_call(number, command)
        kept: dict[int, bool] = {}
        if "keep" in self.graph.writes[command.call]:
            kept = {group: self.shape.lot(group, "keep") < self.keep for group in {sample // n for sample in samples}}
        for sample in samples:
            assert self.final.get(sample // n) in (None, "discarded"), "a call on a group that is finished"

        def ended() -> None:
            self.contract.check_sources(command)  # nothing was dropped while the call read it
            for key in self.graph.writes[command.call]:
                self.workers[number].store[key].update(samples)
            for group, keep in kept.items():
                if not keep:
                    self.discard(group)
            if isinstance(call, Inference):
                self.contract.give_up(number, command.call)
            if isinstance(call, Train) and not self.awaited[command.task]:
                self.versions[call.model] += 1

        self.answer(number, command.task, command.call, ended, {"n": Mean(float(len(samples)))}, kept, command.step)

    def check_mesh_call(self, number: int, command: Execute) -> None:
        if self.shape.kept == 0 and not self.frozen:
            assert not self.workers[number].making, "a call on a device that still generates"
        self.batches.setdefault((command.step, command.call), []).append(command.shares)
        assert all(share == tuple(sorted(share)) for share in command.shares)

    def drop(self, worker: SimulatedWorker, group: int) -> None:
        """The worker forgets a group: it was left out, or its step is about to end."""
        if self.final.setdefault(group, "trained") == "trained":
            self.leaving.add(group)
        worker.forget(group, self.graph.samples_per_group)

    def check_stores(self) -> None:
        """Nothing is held at the end of groups that are finished, but for those a function still works on."""
        n, leaving = self.graph.samples_per_group, self.scheduler._collection._leaving
        for worker in self.workers.values():
            assert not {group for group in worker.groups(n) if group in self.final} - set(leaving)

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_ended(self, ended: StepEnded) -> None:
        """The batch of a step was whole, balanced, the same for all calls, and is trained exactly once."""
        assert ended.step == self.step
        assert ended.n_groups == self.shape.groups
        self.step += 1
        n, batches = self.graph.samples_per_group, []
        for name, call in self.graph.calls.items():
            if not isinstance(call, Inference | Train):
                continue
            shares = self.history[ended.step, name] = self.batches.pop((ended.step, name))
            epochs = call.epochs if isinstance(call, Train) else 1
            cuts = call.minibatches * epochs if isinstance(call, Train) else 1
            tp = self.job.plan.allocations[name].layout.tp
            assert all(len(share) == cuts for share in shares)
            samples = sorted(sample for share in shares for part in share for sample in part)
            whole = samples[:: epochs * tp]
            if cuts == 1:
                pairs = name == "train" and self.shape.algorithm == "dpo"
                dp = self.job.plan.allocations[name].layout.dp
                assert_balanced(self.shape, {share[0] for share in shares}, dp, n if pairs else 1)
            assert samples == sorted(whole * (epochs * tp))
            batches.append(tuple(whole))
        assert len(set(batches)) <= 1
        trained = {sample // n for sample in batches[0]} if batches else set(self.leaving)
        assert len(trained) == self.shape.groups
        for group in self.leaving - trained:
            assert self.shape.overdue == "drop", f"group {group} was dropped, but neither trained nor filtered out"
            self.final[group] = "discarded"
        assert trained <= self.leaving
        if batches:
            assert batches[0] == tuple(group * n + index for group in sorted(trained) for index in range(n))
        self.leaving.clear()

    def tick(self) -> None:
        """Time passes to the deadline."""
        deadline = self.scheduler.deadline()
        assert deadline is not None
        self.now = deadline
        self.feed(Tick())


def ended_steps(simulator: Simulator) -> list[StepEnded]:
    """The Scheduler's reports of all steps."""
    return [action for action in simulator.actions if isinstance(action, StepEnded)]
