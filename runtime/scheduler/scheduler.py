"""The Scheduler: a state machine that turns events into commands. No socket, no clock, no torch.

It owns the state of a run: the ledger, weight versions, carried numbers, whose turn it is, what is in flight. The
master feeds it replies and ticks, carries out what it returns, and wakes it at `deadline()`.
"""

from collections.abc import Sequence
from typing import assert_never

from realgraph.runtime.commands import failures
from realgraph.runtime.commands.actions import (
    Action,
    Checkpointed,
    CheckpointWritten,
    EngineJoined,
    Event,
    Halt,
    Send,
    StopRequested,
    Tick,
    WorkerLost,
)
from realgraph.runtime.commands.loads import UnexpectedReply
from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.commands.tasks import Task, Tasks
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.boundary_runner import BoundaryRunner
from realgraph.runtime.scheduler.collection import DISCARDED_BATCHES, Collection
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.engine_loss import EngineLosses
from realgraph.runtime.scheduler.groups.ledger import Ledger
from realgraph.runtime.scheduler.image import SchedulerImage
from realgraph.runtime.scheduler.placement import Batch
from realgraph.runtime.scheduler.program import make_program
from realgraph.runtime.scheduler.step_boundary import StepBoundary
from realgraph.runtime.scheduler.steps import OpenSteps, summary
from realgraph.runtime.wire.protocol import Bye, Done, Drop, Failed, Generated, Heartbeat, Hello, Loaded, Met, Ready


class Scheduler:
    """One run, from its start or from a checkpoint's state, to its `Halt`.

    workers: device numbers, one worker each. n_rows, n_eval_rows: of the data sets, as the workers report them.
    """

    def __init__(
        self,
        job: Job,
        workers: Sequence[int],
        n_rows: int,
        state: Checkpointed | None = None,
        n_eval_rows: int = 0,
    ) -> None:
        if n_rows < 1:
            raise ValueError("the data set has no rows")
        self._job, self._workers, self._n_rows = job, tuple(workers), n_rows
        self._program = make_program(job, workers)
        self._fresh = state is None
        self._last_state = last = state or Checkpointed(0, dict.fromkeys(self._program.trains, 0), 0, 0, 0)
        # what frozen weights made, or was only loaded, never gets too old
        overdue = job.overdue if self._program.paced else "allow"
        self._ledger = Ledger(job.batch.groups, job.staleness, overdue, job.plan.staleness, job.batch.surplus)
        self._ledger.restore(last.next_group, last.open, last.n_trained, last.n_discarded)
        self._tasks = Tasks()
        self._boundary = StepBoundary(job, last, n_eval_rows)
        self._collection = Collection(job, self._program, self._ledger, self._tasks)
        self._collection.step = last.step
        self._steps = OpenSteps(job, self._program, self._tasks, last)
        self._devices = Devices(job, self._program, self._steps, self._collection, last)
        self._boundary_runner = BoundaryRunner(job, self._program, self._boundary, self._steps, self._devices)
        inner = self._ledger, self._collection, self._steps, self._devices, self._boundary_runner
        self._losses = EngineLosses(job, *inner)
        self._n_discarded = self._ledger.n_discarded  # when the last pump after an answer began
        self._halted = False

    # --- the interface ------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """The first commands. Times are seconds of any clock that never goes back."""
        self._boundary.began(now)
        if self._fresh:
            self._boundary.started()
        else:
            self._boundary.resumed(self._last_state.step)
        return _without_sends_after_a_failure(self._pump(now))

    def on(self, event: Event, now: float) -> list[Action]:
        """Actions that answer `event`; none any more after a Halt."""
        if self._halted or self._losses.ignores(event):
            return []
        try:
            actions = self._handle(event, now)
        except UnexpectedReply as error:
            worker = getattr(event, "worker", -1)
            actions = self._halt(Failed(worker, getattr(event, "call", ""), str(error), kind="worker"))
        actions = self._losses.reaching(actions)
        return _without_sends_after_a_failure(actions) if self._halted else actions

    def deadline(self) -> float | None:
        """The time at which the next Tick is needed; None where nothing is awaited."""
        return None if self._halted else self._tasks.deadline()

    @property
    def state(self) -> Checkpointed:
        """State of the last step boundary: a fresh Scheduler goes on from there."""
        return self._last_state

    @property
    def image(self) -> SchedulerImage:
        """The whole state of a Scheduler that has not halted: `restore` gives one that acts alike."""
        numbers = TallyNumbers()
        collection, steps = self._collection.image(numbers), self._steps.image(numbers)
        return SchedulerImage(
            last_state=self._last_state,
            ledger=self._ledger.image,
            tasks=self._tasks.image(numbers),
            collection=collection,
            steps=steps,
            devices=self._devices.image,
            boundary=self._boundary.image,
            boundary_task=self._boundary_runner.task,
            held_out=self._boundary_runner.held_out.image(numbers),
            spoiled=self._boundary_runner.spoiled,
            gone=tuple(sorted(self._losses.gone)),
            beside=self._boundary_runner.beside,
            n_discarded=self._n_discarded,
            tallies=numbers.images,
        )

    def restore(self, image: SchedulerImage) -> None:
        """Go on from the image of a Scheduler of the same job, workers, data and first state."""
        tallies = [StepTally.restored(tally) for tally in image.tallies]
        self._last_state, self._n_discarded = image.last_state, image.n_discarded
        self._ledger.restore_image(image.ledger)
        self._tasks.restore(image.tasks, tallies)
        self._collection.restore(image.collection, tallies)
        self._steps.restore(image.steps, self._ledger.live, tallies)
        self._devices.restore(image.devices)
        self._boundary.restore(image.boundary)
        self._boundary_runner.task, self._boundary_runner.beside = image.boundary_task, image.beside
        self._boundary_runner.held_out.restore(image.held_out, tallies)
        self._boundary_runner.spoiled, self._losses.gone = image.spoiled, set(image.gone)

    def check(self) -> None:
        """Assert what is always true of the Scheduler's own state (for tests: it looks at everything)."""
        self._ledger.check()
        self._steps.check()
        self._devices.check()

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> list[Action]:
        """First what the event itself brings, then what can start after it."""
        match event:
            case Done():
                return self._done(event, now)
            case Generated() | Loaded():
                return self._arrived(event, now)
            case Failed():
                return self._halt(event)
            case WorkerLost():
                return self._lost(event, now)
            case EngineJoined():
                return self._losses.join(event) + self._pump(now)
            case Tick():
                return self._tick(now)
            case StopRequested():
                return self._stop() + self._pump(now)
            case Hello() | Ready() | Met() | Heartbeat() | Bye():
                return []  # the master's affair
            case _:
                assert_never(event)

    def _arrived(self, reply: Generated | Loaded, now: float) -> list[Action]:
        if isinstance(reply, Generated) and reply.call not in self._program.generates:
            raise UnexpectedReply(f"worker {reply.worker} generated by {reply.call!r}, which is no generate call")
        actions = self._collection.arrived(reply, self._devices.generator_version(reply.worker), now)
        return actions + self._pump_if_moved(now)

    def _done(self, reply: Done, now: float) -> list[Action]:
        task = self._tasks.flying.get(reply.task)
        if task is None or reply.worker not in task.waiting:
            raise UnexpectedReply(f"worker {reply.worker} answered task {reply.task}, which it was not given")
        task.answered(reply)
        if task.kind != "stream" and reply.worker in self._tasks.watches:
            self._tasks.watch(reply.worker, now, self._collection.limit_seconds)  # it goes on generating from here
        if task.waiting:
            moved = task.kind == "reallocate" and self._devices.answered(task, reply.worker)
            return self._pump(now) if moved else []
        self._tasks.close(task)
        actions = self._ended(task, reply.worker, now)
        return actions + (self._pump_if_moved(now) if task.kind == "stream" else self._pump(now))

    def _ended(self, task: Task, worker: int, now: float) -> list[Action]:
        match task.kind:
            case "stream":
                return self._collection.function_ended(task, worker, now)
            case "prefetch":
                self._steps.prefetched(task)
            case "call":
                call = self._program.calls[task.call]
                self._steps.ended(task)
                if call.role:
                    self._devices.ended(call, task)
            case "reallocate":
                self._devices.reallocated(task)
            case "evaluate":
                return self._boundary_runner.evaluated(task)
            case "save":
                self._boundary_runner.saved(task, now)
                return [CheckpointWritten(task.step, self._boundary_runner.folder(task.step), self._snapshot())]
        return []

    def _stop(self) -> list[Action]:
        """End after the step in hand: the last one of which anything has been started."""
        done = self._steps.completed
        begun = self._devices.session is not None or bool(self._ledger.live)
        self._boundary.stop_after(max(done + 1 if begun else done, self._steps.newest_train + 1))
        return self._collection.abort() if self._devices.abandon_session(self._boundary.target) else []

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _halt(self, error: Failed | None, reason: str = "") -> list[Action]:
        self._halted = True
        return [Halt(error, reason or (failures.failed_text(error) if error else "finished"))]

    def _lost(self, event: WorkerLost, now: float) -> list[Action]:
        if self._losses.survives(event.worker):
            actions, ended = self._losses.lose(event.worker, event.reason, now)
            for task in ended:
                self._tasks.close(task)
                actions += self._ended(task, event.worker, now)
            return actions + self._pump(now)
        error = self._losses.fatal(event.worker, event.reason)
        return self._halt(error, error.error)

    def _tick(self, now: float) -> list[Action]:
        late = self._tasks.overdue(now)
        while isinstance(late, int) and self._devices.stands_still(late):
            self._tasks.watch(late, now, self._collection.limit_seconds)
            late = self._tasks.overdue(now)
        if late is None:
            return []
        if isinstance(late, int):
            since = self._tasks.watches[late][0]
            error = failures.silent(late, self._collection.call_of(late), self._collection.n_open(late), now - since)
        else:
            error = failures.late(late, now)
        return self._halt(error, error.error)

    def _give_up_if_all_discarded(self) -> list[Action]:
        n, n_skipped = self._collection.n_discarded_in_row, self._collection.n_skipped
        prompted = self._job.graph.prompted
        no_row_fits = n_skipped >= self._n_rows and not prompted  # a prompt that a call writes may be shorter next time
        if n >= DISCARDED_BATCHES * self._job.batch.groups or no_row_fits:
            error = failures.all_discarded(self._workers[0], self._program.generate, n, n_skipped, prompted)
            return self._halt(error, error.error)
        return []

    def _snapshot(self) -> Checkpointed:
        return Checkpointed(
            step=self._steps.completed,
            versions=dict(self._devices.versions),
            next_group=self._ledger.next_group,
            n_trained=self._ledger.n_trained,
            n_discarded=self._ledger.n_discarded,
            open=self._ledger.open,
            carried={call: dict(numbers) for call, numbers in self._steps.carried.items()},
            best_step=self._boundary.best_step,
            best_value=self._boundary.best_value,
            best_reward=self._boundary.best_reward,
            evaluated_step=self._boundary.evaluated_step,
            copies=dict(self._devices.copies),
        )

    # --- going on -----------------------------------------------------------------------------------------------------

    def _pump_if_moved(self, now: float) -> list[Action]:
        """After groups came a step further: look around only if there may be a new batch, a free place, or a stall."""
        n_discarded, enough = self._ledger.n_discarded, self._ledger.n_ready >= self._job.batch.groups
        stalls = not (self._tasks.flying or self._tasks.watches)
        if enough or n_discarded != self._n_discarded or stalls or self._devices.drained:
            self._n_discarded = n_discarded
            return self._pump(now)
        return self._admit(now)

    def _pump(self, now: float) -> list[Action]:
        """Start all that can be started."""
        actions: list[Action] = []
        if not self._halted and self._collection.n_discarded_in_row:
            actions += self._give_up_if_all_discarded()
        while not self._halted:
            moved = self._advance(now)
            if moved is None:
                if not self._halted:
                    actions += self._admit(now)
                    if self._stands_still:  # the orders ask for more batches ahead than the limit has in flight
                        actions += self._admit(now, limited=False)
                break
            actions += moved
        if not self._halted and self._stands_still:
            heads = self._devices.turns.heads(self._barrier, self._boundary.target)
            error = failures.stalled(self._workers[0], [f"{head.call} of step {head.step}" for head in heads])
            actions += self._halt(error, error.error)
        return actions

    @property
    def _stands_still(self) -> bool:
        return not self._tasks.flying and not self._tasks.watches

    @property
    def _barrier(self) -> int:
        return self._boundary.barrier(self._steps.completed)

    def _advance(self, now: float) -> list[Action] | None:
        """One round, in this order: batches, free calls, the end of a step, then a boundary's work or the next turns.

        None where nothing happened that may let something else start.
        """
        beside = self._boundary_runner.evaluate_beside(now)
        if beside is not None:
            return beside
        batched = self._assemble(now)
        free = self._steps.start_free(self._barrier, now)
        ended = self._end_step(now)
        self._boundary.end_with_save(self._steps.completed)
        if self._boundary.queue:
            last = self._boundary_runner.work(self._losses.left(self._workers), now)
        elif self._steps.completed >= self._boundary.target:
            last = self._halt(None, "stopped" if self._boundary.stopping else "finished")
        else:
            last = self._devices.take_turns(self._barrier, self._boundary.target, now)
        if batched is None and not free and ended is None:
            return last
        return [*(batched or ()), *free, *(ended or ()), *(last or ())]

    def _admit(self, now: float, limited: bool = True) -> list[Action]:
        """Begin samples, where none wait for new weights. Not `limited`: a batch at most, whatever is in flight."""
        target = self._boundary.target
        draining = self._devices.draining(self._barrier, target)
        begun = self._collection.hold(draining, now)
        again = self._losses.n_again  # of batches whose sessions have had their turns
        if self._program.generate:
            if self._program.generate in draining or (self._devices.session is None and not again):
                return begun
        elif self._boundary.queue:
            return []  # so that no group is in hand at a checkpoint
        for at in self._devices.admissions():
            room = self._ledger.room(at.version, target)
            room = room if self._devices.session is not None or not self._program.generate else min(room, again)
            begun += self._collection.admit(room if limited else min(room, self._ledger.per_batch), at, now, limited)
        return begun

    def _assemble(self, now: float) -> list[Action] | None:
        """Make batches of the ready groups, and close the session that made the last of them; None: no batch."""
        moved = False
        actions: list[Action] = []
        while self._collection.step < self._boundary.target:
            step = self._collection.step
            overdue = self._ledger.overdue_groups(step)
            if overdue:
                actions += self._collection.drop_overdue(overdue, now)
            groups = self._ledger.batch(step)
            if groups is None:
                break
            actions += self._collection.drop_surplus(self._ledger.surplus_groups(step), now)
            batch = Batch(step, groups, self._job.seed)
            actions += self._steps.begin(batch, self._collection.next_batch(groups, now), now)
            actions += self._devices.close_session(step)
            moved = True
        return actions if moved or actions else None

    def _end_step(self, now: float) -> list[Action] | None:
        """Close the oldest open step, if all its calls have ended and nothing of the boundary before it is left."""
        ended = None if self._boundary.queue else self._steps.end()
        if ended is None:
            return None
        batch, tally = ended
        self._ledger.trained(batch.groups)
        self._collection.step_ended(batch.step, now)
        self._last_state = self._snapshot()
        completed = self._steps.completed
        self._boundary.ended(completed, max(completed, self._steps.newest_train + 1), now)
        drops = [Send(worker, Drop(groups)) for worker, groups in batch.holdings().items()]
        return [*drops, summary(batch, tally, self._devices.versions, self._losses.n_engines, self._program)]


def _without_sends_after_a_failure(actions: list[Action]) -> list[Action]:
    """The actions of an event; where they end in an error, nothing that was still to be sent is sent."""
    match actions:
        case [*_, Halt(error=Failed())]:
            return [action for action in actions if not isinstance(action, Send)]
        case _:
            return actions
