"""Discrete-event fake workers that drive the very Scheduler that sockets drive, and check all that it asks of them."""

import heapq
import random
from collections.abc import Callable
from functools import partial

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Function, Inference, Train
from realgraph.runtime.commands.actions import (
    Action,
    CheckpointWritten,
    EngineJoined,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    Tick,
    WorkerLost,
)
from realgraph.runtime.job.engine_loss import expendable_engines
from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.scheduler.groups.transitions import GroupState
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import (
    Abort,
    Command,
    Drop,
    EndSession,
    Evaluate,
    Execute,
    Failed,
    Forget,
    Generated,
    Keep,
    Load,
    Prefetch,
    Reallocate,
    Save,
    Submit,
)
from tests.shapes import Shape, assert_balanced, job_of
from tests.simulated_rollouts import N_EVAL_ROWS, SimulatedRollouts
from tests.simulated_worker import SimulatedWorker, Workers


class Simulator(SimulatedRollouts):
    """Runs a Scheduler to its Halt."""

    def __init__(
        self,
        shape: Shape,
        rng: random.Random,
        scheduler: Scheduler | None = None,
        keep: float = 0.7,
        graph: Graph | None = None,
    ) -> None:
        job = scheduler._job if scheduler is not None else job_of(shape, graph=graph)
        self.scheduler = scheduler or Scheduler(job, range(shape.n_workers), 1000, None, N_EVAL_ROWS)
        state = self.scheduler.state
        self.versions = dict(state.versions)
        super().__init__(shape, rng, Workers(job, shape.n_workers, self.versions), keep)
        self.frozen = shape.algorithm in ("distill", "twin")  # what generates is never trained
        self.n_events = 0
        self.step = state.step
        self.batches: dict[tuple[int, str], list[tuple[tuple[int, ...], ...]]] = {}
        self.actions: list[Action] = []
        self.log: list[Send] = []  # of them
        self.halt: Halt | None = None
        self.leaving: set[int] = set()  # groups dropped by a step that ends
        self.silent: Callable[[int, Command], bool] = lambda worker, command: False  # swallows a command
        self.history: dict[tuple[int, str], list[tuple[tuple[int, ...], ...]]] = {}  # (step, call) -> shares
        self.failing: Callable[[Command], Failed | None] = lambda command: None
        self.batched: set[int] = set()  # groups that a call on a mesh has had
        self.n_saved_busy = 0  # checkpoints while groups were in the making
        self.orphans: set[int] = set()  # groups that workers had which are gone
        self.evaluating: set[int] = set()  # engines that do beside other things
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

    def tick(self) -> None:
        """Time passes to the deadline."""
        deadline = self.scheduler.deadline()
        assert deadline is not None
        self.now = deadline
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        """Give the Scheduler an event now, carry out what it says, check what must be true."""
        self.n_events += 1
        self.take(self.scheduler.on(event, self.now))
        self.scheduler.check()
        if self.halt is None:
            deadline = self.scheduler.deadline()
            assert deadline is not None, "the Scheduler waits without a deadline"
            assert deadline > self.now

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
                    assert ("reward" if self.contract.generate else "loss") in action.metrics
                    self.check_evaluated()

    # --- commands -----------------------------------------------------------------------------------------------------

    def command(self, number: int, command: Command) -> None:
        """A worker gets a command."""
        assert number not in self.contract.gone, f"{command} for a worker that is gone"
        failure = self.failing(command)
        if failure is not None:
            self.plan(failure, self.rng.random())
            return
        worker = self.workers[number]
        if self.silent(number, command):
            worker.unheard.update(command.groups if isinstance(command, Abort) else ())
            return
        match command:
            case Submit():
                self.contract.check_submit(number, command)
                self.begin(number, command)
                self.make(number, command.groups, command.version, command.call)
            case Keep():
                self.contract.check_keepers(number, command.groups, command.keepers)
                for group, keeper in zip(command.groups, command.keepers, strict=True):
                    self.contract.keep(group, keeper, self.oldest[group])
            case Forget():
                worker.kept = {one: oldest for one, oldest in worker.kept.items() if self.maker[one] != command.worker}
            case Load() if command.task is not None:
                self.load_held_out(number, command)
            case Load():
                self.make(number, command.groups, 0, "")
            case Execute(held_out=True):
                self.evaluate_loss(number, command)
            case Execute():
                self.execute(number, command)
            case Reallocate():
                self.contract.check_reallocate(number, command)
                self.check_drained(number, command.call)
                assert not set(command.receivers) & self.evaluating, "new weights for an engine that evaluates"
                if command.call == self.contract.generate and self.shape.kept:
                    self.early[command.task] = set(command.owners) - set(command.receivers)
                self.answer(
                    number, command.task, command.call, lambda: worker.copies.update({command.call: command.version})
                )
                self.hold(number, command.task)
            case Prefetch():
                self.contract.prefetch(number, command)
                self.answer(number, command.task, command.call, None)
            case Drop():
                for group in command.groups:
                    if group >= 0:
                        self.drop(worker, group)
                    else:
                        worker.forget(group)
            case EndSession():
                assert command.call == self.contract.generate
                assert number in self.contract.layouts[command.call].mesh.devices
                assert not worker.making, "a session that goes on"
                self.contract.give_up(number, command.call)
            case Abort():
                self.abort(number, set(command.groups), self.scheduler._ledger.live)
            case Save():
                assert not self.holding, "a checkpoint while a call runs"
                self.n_saved_busy += any(other.making for other in self.workers.values())
                self.answer(number, command.task, "", None)
            case Evaluate(part="draw" | "judge"):
                assert command.step == self.step, "an evaluation inside a step"
                self.hold(number, command.task)
                self.n_evaluated_busy += bool(worker.making)
                self.stand_still(number, self.evaluate_part(number, command))
            case Evaluate(beside=True):
                self.contract.check_evaluate(number, command)
                assert command.version == command.step * self.trains_of_generator
                self.evaluating.add(number)
                reward = Mean(self.seconds(f"evaluation {command.step} {number}"))
                self.answer(
                    number, command.task, "evaluate", lambda: self.evaluating.discard(number), {"reward": reward}
                )
            case Evaluate():
                self.contract.check_evaluate(number, command)
                assert command.step == self.step, "an evaluation inside a step"
                assert command.version == self.step * self.trains_of_generator
                self.hold(number, command.task)
                self.n_evaluated_busy += bool(worker.making)
                reward = Mean(self.seconds(f"evaluation {command.step} {number}"))
                seconds = self.answer(number, command.task, "evaluate", None, {"reward": reward})
                self.stand_still(number, seconds)

    def lose(self, number: int, reason: str = "was killed") -> None:
        """A worker and the others of its engine are gone with all that they have, and the Scheduler is told."""
        engine = self.engine_of(number)
        self.contract.gone.update(engine)
        for one in engine:
            worker = self.workers[one]
            self.lose_answers(one)
            self.orphans |= worker.groups()
            gone = worker.groups() | {group for _, group in worker.making}
            self.submitted = {(call, group) for call, group in self.submitted if group not in gone}
            worker.store.clear()
            worker.making.clear()
            worker.kept.clear()
            worker.unheard.clear()
        ledger = self.scheduler._ledger
        keepers = {one.id: one.keeper for one in ledger.live.values() if one.owner in engine}
        devices = self.scheduler._devices
        others = set(devices.engines.heads) - devices.engines.resting - set(engine)
        able = {one: devices.generator_version(one) for one in others}
        unbatched = {group.id: group.age_version for one in engine for group in ledger.unbatched(one)}
        self.evaluating.difference_update(engine)
        self.feed(WorkerLost(number, reason))
        live = ledger.live
        for group, keeper in keepers.items() if self.halt is None else ():
            kept = group in live and group in unbatched and able.get(keeper, -1) >= unbatched[group]
            assert not kept or live[group].owner == keeper, "a group is not where its tokens are"
        self.batched -= {group for group in live if live[group].state is not GroupState.BATCHED}

    def join(self, number: int) -> None:
        """New processes stand for the engine of a worker that is gone: they have nothing but the weights that a run
        begins with."""
        engine = self.engine_of(number)
        for one in engine:
            self.contract.join(one)
        self.feed(EngineJoined(engine, self.contract.joined[number]))

    def engine_of(self, number: int) -> tuple[int, ...]:
        """All workers of an engine that the run may lose, by one of them; any other worker is by itself."""
        engines = expendable_engines(self.graph, self.job.plan)
        return next((engine for engine in engines if number in engine), (number,))

    @property
    def trains_of_generator(self) -> int:
        """Train calls a step of the role that generates."""
        generate = self.contract.generate
        return len(self.contract.trains.get(self.graph.role(generate), ())) if generate else 0

    def execute(self, number: int, command: Execute) -> None:
        """Check that a call may run on this worker, and answer later."""
        call = self.graph.calls[command.call]
        samples = {sample for share in command.shares for sample in share}
        self.contract.check_execute(number, command)
        if isinstance(call, Inference | Train):
            self.hold(number, command.task)
            self.check_mesh_call(number, command)
            for name in self.contract.trained_in_place(command.call) if isinstance(call, Train) else ():
                self.check_drained(number, name)
        left_out: dict[int, tuple[int, ...]] = {}
        if "keep" in self.graph.writes[command.call]:
            left_out = {group: self.left_out(group) for group in {group_of(sample) for sample in samples}}
        for sample in samples:
            assert self.final.get(group_of(sample)) in (None, "discarded"), "a call on a group that is finished"

        def ended() -> None:
            self.contract.check_sources(command.call, command.sources, samples, read=True)  # nothing was dropped
            for key in self.graph.writes[command.call]:
                self.workers[number].store[key].update(samples)
            for group, gone in left_out.items():
                if self.graph.samples_per_group - len(gone) < self.graph.least_samples:
                    self.discard(group)
            if isinstance(call, Inference):
                self.contract.give_up(number, command.call)
            if isinstance(call, Train) and not self.awaited[command.task]:
                self.versions[call.model] += 1

        n, of_groups = {"n": Mean(float(len(samples)))}, dict[int, dict[str, Mean]]()
        if isinstance(call, Function) and call.over != "batch":
            groups = {group_of(sample) for sample in samples}  # of which others may have some samples: each counts once
            firsts = {group: self.left(group)[:1] for group in groups}
            own = [group for group, first in firsts.items() if samples.issuperset(first)]
            of_groups = {group: {"group": Mean(float(group))} for group in own}
        self.answer(number, command.task, command.call, ended, n, left_out, command.step, of_groups)

    def check_mesh_call(self, number: int, command: Execute) -> None:
        if self.shape.kept == 0 and not self.frozen and len(self.graph.generates) < 2:
            assert not self.workers[number].making, "a call on a device that still generates"
        self.batches.setdefault((command.step, command.call), []).append(command.shares)
        self.batched.update(group_of(sample) for share in command.shares for sample in share)
        assert all(share == tuple(sorted(share)) for share in command.shares)

    def drop(self, worker: SimulatedWorker, group: int) -> None:
        """The worker forgets a group: it was left out, or its step is about to end."""
        if self.contract.layouts.keys() - set(self.graph.generates) and group not in self.batched | self.final.keys():
            assert self.shape.overdue == "drop" or self.shape.begun > 1, f"group {group} was dropped, but never trained"
            self.final[group] = "discarded"
        if self.final.setdefault(group, "trained") == "trained":
            self.leaving.add(group)
        worker.forget(group)
        self.contract.forget_kept(group)

    def check_stores(self) -> None:
        """Nothing is held at the end of groups that are finished, but for those a function still works on."""
        leaving = set(self.scheduler._collection._leaving)
        for planned in self.events:  # an answer and its abort, on their ways
            leaving |= set(planned.event.groups) if isinstance(planned.event, Generated) else set()
        for worker in (worker for number, worker in self.workers.items() if number not in self.contract.gone):
            assert not worker.kept.keys() & self.final.keys(), "tokens that nobody needs"
            assert not {group for group in worker.groups() if group in self.final} - leaving

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
            if self.graph.works_on_data(name):
                assert [group_of(sample) for sample in whole] == sorted({group_of(sample) for sample in samples})
                sizes = [sum(map(len, share)) for share in shares]
                assert len(whole) == self.shape.groups and (cuts > 1 or max(sizes) - min(sizes) <= 1)
                continue
            if cuts == 1:
                pairs = name == "train" and self.shape.algorithm == "dpo"
                dp, sampler = self.job.plan.allocations[name].layout.dp, self.graph.sampler(name)
                later = "" if sampler == self.contract.generate else sampler
                length = partial(self.shape.length, later=later)
                assert_balanced(length, {share[0] for share in shares}, dp, n if pairs else 1)
            assert samples == sorted(whole * (epochs * tp))
            batches.append(tuple(whole))
        assert len(set(batches)) <= 1
        trained = {group_of(sample) for sample in batches[0]} if batches else set(self.leaving)
        assert len(trained) == self.shape.groups
        assert self.leaving <= trained <= self.leaving | self.orphans
        self.final |= dict.fromkeys(trained, "trained")
        if batches:
            assert batches[0] == tuple(sample for group in sorted(trained) for sample in self.left(group))
        self.leaving.clear()
        self.check_measured(ended, trained)

    def check_measured(self, ended: StepEnded, trained: set[int]) -> None:
        """Means of functions over a step's groups are in that step's metrics and in no other's; beside them there is
        nothing but what was computed of discards."""
        clean = self.scheduler._ledger.n_discarded == 0
        for name in (name for name, call in self.graph.calls.items() if isinstance(call, Function)):
            measured = ended.metrics.get(name, {}).get("group")
            if measured is not None:
                assert isinstance(measured, Mean)
                beside = measured.total - sum(trained), measured.weight - len(trained)
                assert beside == (0, 0) if clean else min(beside) >= 0, (name, ended.step, beside)


def ended_steps(simulator: Simulator) -> list[StepEnded]:
    """The Scheduler's reports of all steps."""
    return [action for action in simulator.actions if isinstance(action, StepEnded)]
