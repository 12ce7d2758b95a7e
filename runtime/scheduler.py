"""The Scheduler: a state machine that turns events into commands. No socket, no clock, no torch.

It owns the state of a run: the ledger, weight versions, carried numbers, whose turn it is, what is in flight. The
master feeds it replies and ticks, carries out what it returns, and wakes it at `deadline()`.
"""

from collections.abc import Sequence
from typing import assert_never

from realgraph.runtime import failures
from realgraph.runtime.actions import (
    Action,
    Checkpointed,
    CheckpointWritten,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    StopRequested,
    Tick,
    WorkerLost,
)
from realgraph.runtime.borders import Borders
from realgraph.runtime.collection import BARREN_BATCHES, Collection, UnexpectedReply
from realgraph.runtime.job import Job
from realgraph.runtime.ledger import Ledger
from realgraph.runtime.placement import Batch
from realgraph.runtime.program import make_program
from realgraph.runtime.protocol import (
    Bye,
    Done,
    Drop,
    Evaluate,
    Failed,
    Generated,
    Heartbeat,
    Hello,
    Loaded,
    Mean,
    Ready,
    Reallocate,
    Save,
)
from realgraph.runtime.steps import Steps
from realgraph.runtime.tasks import Task, Tasks
from realgraph.runtime.turns import Next, Turns


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
        self._job, self._workers, self._n_rows, self._n_eval_rows = job, tuple(workers), n_rows, n_eval_rows
        self._program = make_program(job, workers)
        self._fresh = state is None
        self._border = state or Checkpointed(0, dict.fromkeys(self._program.trains, 0), 0, 0, 0, 0)
        first = self._border.step
        self._versions = dict(self._border.versions)
        copies = [name for name, call in self._program.calls.items() if call.owners]
        self._copies = dict.fromkeys(copies, 0 if state is None else -1)  # version of each call's own copy
        # what frozen weights made, or was only loaded, never gets too old
        overdue = job.overdue if self._trains_generator() else "allow"
        self._ledger = Ledger(job.batch.groups, job.staleness, overdue)
        self._ledger.restore(
            self._border.next_group, self._border.open, self._border.n_trained, self._border.n_discarded
        )
        self._tasks = Tasks(self._border.next_task)
        self._turns = Turns(job.plan.orders, first, self._program.generate)
        self._borders = Borders(job, first, n_eval_rows)
        self._borders.best_step, self._borders.best_value = self._border.best_step, self._border.best_value
        self._collection = Collection(self._program, self._ledger, self._tasks, job.runtime)
        self._collection.step = first
        self._steps = Steps(job, self._program, self._tasks, self._border)
        self._border_task: int | None = None
        self._session: int | None = None  # the step whose generate session is open
        offsets = [turn.offset for order in job.plan.orders.values() for turn in order]
        self._ahead = max(1, max(offsets, default=0) - min(offsets, default=0))
        self._halted = False
        self._out: list[Action] = []
        self._collection.out = self._steps.out = self._out

    # --- the interface ------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """The first commands. Times are seconds of any clock that never goes back."""
        if self._fresh:
            self._borders.started()
        self._pump(now)
        return self._flush()

    def on(self, event: Event, now: float) -> list[Action]:
        """What is to be done about `event`; nothing any more after a Halt."""
        if not self._halted:
            try:
                self._handle(event, now)
            except UnexpectedReply as error:
                worker = getattr(event, "worker", -1)
                self._halt(Failed(worker, getattr(event, "call", ""), str(error), kind="worker"))
        return self._flush()

    def deadline(self) -> float | None:
        """When the next Tick is needed; None where nothing is awaited."""
        return None if self._halted else self._tasks.deadline()

    @property
    def state(self) -> Checkpointed:
        """Of the last step border: a fresh Scheduler goes on from there."""
        return self._border

    def check(self) -> None:
        """Assert what is always true of the Scheduler's own state (for tests: it looks at everything)."""
        self._ledger.check()
        self._steps.check()
        assert all(version <= self._versions[self._program.calls[c].role] for c, version in self._copies.items())

    def _flush(self) -> list[Action]:
        actions = list(self._out)
        self._out.clear()
        return actions

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case Done():
                self._done(event, now)
            case Generated() | Loaded():
                self._arrived(event, now)
            case Failed():
                self._halt(event)
            case WorkerLost():
                self._lost(event)
            case Tick():
                self._tick(now)
            case StopRequested():
                self._stop()
                self._pump(now)
            case Hello() | Ready() | Heartbeat() | Bye():
                pass  # the master's affair
            case _:
                assert_never(event)

    def _arrived(self, reply: Generated | Loaded, now: float) -> None:
        if isinstance(reply, Generated) and reply.call != self._program.generate:
            raise UnexpectedReply(f"worker {reply.worker} generated by {reply.call!r}, which is no generate call")
        self._collection.arrived(reply, self._trains_generator(), now)
        self._pump(now)

    def _done(self, reply: Done, now: float) -> None:
        task = self._tasks.flying.get(reply.task)
        if task is None or reply.worker not in task.waiting:
            raise UnexpectedReply(f"worker {reply.worker} answered task {reply.task}, which it was not given")
        task.waiting.discard(reply.worker)
        task.tally.add(task.call, reply.metrics, reply.started, reply.ended)
        if reply.transcripts:
            task.tally.transcripts.extend(reply.transcripts)
        if reply.state:
            task.state.update(reply.state)
        if reply.kept:
            task.kept.update(reply.kept)
        if task.waiting:
            return
        self._tasks.close(task)
        self._ended(task, reply.worker, now)
        self._pump(now)

    def _ended(self, task: Task, worker: int, now: float) -> None:
        match task.work:
            case "stream":
                self._collection.function_ended(task, worker, now)
            case "call":
                call = self._program.calls[task.call]
                self._steps.ended(task)
                if call.work == "train":
                    self._versions[call.role] += 1
                if call.ranks:
                    self._turns.release(task.number)
                    self._turns.leave(task.call, task.step)
            case "reallocate":
                self._turns.release(task.number)
                self._copies[task.call] = self._versions[self._program.calls[task.call].role]
            case "evaluate":
                metrics = task.tally.metrics.get(task.call, {})
                self._turns.release(task.number)
                self._border_done()
                self._out.append(EvalEnded(task.step, metrics, self._borders.judge(task.step, metrics)))
            case "save":
                self._border_done()
                self._borders.saved = task.step
                self._out.append(CheckpointWritten(task.step, self._folder(task.step), self._snapshot()))

    def _border_done(self) -> None:
        self._border_task = None
        self._borders.queue.popleft()

    def _stop(self) -> None:
        """End after the step in hand: the last one of which anything has been started."""
        done = self._steps.completed
        begun = self._session is not None or bool(self._ledger.live)
        self._borders.stop_after(max(done + 1 if begun else done, self._steps.newest_train + 1))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _halt(self, error: Failed | None, reason: str = "") -> None:
        """The end. After an error nothing that was still to be sent is sent."""
        self._halted = True
        if error is not None:
            self._out[:] = [action for action in self._out if not isinstance(action, Send)]
        self._out.append(Halt(error, reason or (failures.failed_text(error) if error else "finished")))

    def _lost(self, event: WorkerLost) -> None:
        tasks = self._tasks.of(event.worker)
        task = next((task for task in tasks if task.work != "stream"), tasks[0] if tasks else None)
        if task is not None:
            doing, call = f"while it ran {failures.doing_text(task)}", task.call
        elif event.worker in self._tasks.watches:
            call = self._program.generate
            doing = f"while it {'ran ' + call if call else 'loaded data'} for step {self._steps.completed}"
        else:
            doing, call = "between two calls", ""
        error = failures.lost(event.worker, event.reason, doing, call)
        self._halt(error, error.error)

    def _tick(self, now: float) -> None:
        late = self._tasks.overdue(now)
        while isinstance(late, int) and self._program.generate and self._session is None:
            # the session is closed: its mesh runs other calls, and the groups wait with their tokens
            self._tasks.watch(late, now, self._collection.limit_seconds)
            late = self._tasks.overdue(now)
        if late is None:
            return
        if isinstance(late, int):
            since = self._tasks.watches[late][0]
            error = failures.silent(late, self._program.generate, self._collection.n_open(late), now - since)
        else:
            error = failures.late(late, now)
        self._halt(error, error.error)

    def _give_up_if_barren(self) -> None:
        n, n_skipped = self._collection.n_barren, self._collection.n_skipped
        if n >= BARREN_BATCHES * self._job.batch.groups or n_skipped >= self._n_rows:
            error = failures.barren(self._workers[0], self._program.generate, n, n_skipped)
            self._halt(error, error.error)

    def _snapshot(self) -> Checkpointed:
        return Checkpointed(
            step=self._steps.completed,
            versions=dict(self._versions),
            next_group=self._ledger.next_group,
            next_task=self._tasks.next_task,
            n_trained=self._ledger.n_trained,
            n_discarded=self._ledger.n_discarded,
            open=self._ledger.open,
            carried={call: dict(numbers) for call, numbers in self._steps.carried.items()},
            best_step=self._borders.best_step,
            best_value=self._borders.best_value,
        )

    def _folder(self, step: int) -> str:
        return f"{self._job.run_dir}/checkpoints/step-{step:06d}.partial"

    # --- going on -----------------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Start all that can be started."""
        if not self._halted and self._collection.n_barren:
            self._give_up_if_barren()
        while not self._halted and self._advance(now):
            pass
        if not self._halted and not self._tasks.flying and not self._tasks.watches:
            heads = self._turns.heads(self._barrier, self._borders.target)
            error = failures.stalled(self._workers[0], [f"{head.call} of step {head.step}" for head in heads])
            self._halt(error, error.error)

    @property
    def _barrier(self) -> int:
        return self._borders.barrier(self._steps.completed)

    def _advance(self, now: float) -> bool:
        """One round; whether anything happened that may let something else start."""
        moved = self._assemble()
        moved |= self._steps.start_free(self._barrier, now)
        moved |= self._end_step()
        self._borders.end_with_save(self._steps.completed)
        if self._borders.queue:
            moved |= self._work_at_border(now)
        elif self._steps.completed >= self._borders.target:
            self._halt(None, "stopped" if self._borders.stopping else "finished")
            return False
        else:
            moved |= self._take_turns(now)
        if not moved:
            self._admit(now)
        return moved

    def _admit(self, now: float) -> None:
        if self._program.generate:
            if self._session is None:
                return
        elif self._borders.queue:
            return  # so that no group is in hand at a checkpoint
        weights = self._weights_of(self._program.generate) if self._program.generate else 0
        version = self._admission_version(weights)
        room = self._ledger.room(version, self._borders.target)
        if room:
            self._collection.admit(room, version, weights, now)

    def _weights_of(self, call: str) -> int:
        """The version of the weights that `call` runs on: those of its own copy, where it has one."""
        return self._copies.get(call, self._versions.get(self._program.calls[call].role, 0))

    def _trains_generator(self) -> int:
        """Train calls a step of the role that generates; 0 where it is frozen, or nothing generates."""
        call = self._program.calls.get(self._program.generate)
        return self._program.trains.get(call.role, 0) if call else 0

    def _admission_version(self, weights: int) -> int:
        """What admission counts: train steps behind the weights that generate; frozen weights are as old as the step."""
        per_step = self._trains_generator()
        return weights // per_step if per_step else max(self._steps.completed, self._session or 0)

    def _assemble(self) -> bool:
        """Make batches of the ready groups, and close the session that made the last of them."""
        moved = False
        while self._collection.step < self._borders.target:
            step = self._collection.step
            overdue = self._ledger.overdue_groups(step)
            self._collection.tally.n_dropped += len(overdue)
            self._collection.drop(overdue)
            groups = self._ledger.batch(step)
            if groups is None:
                return moved
            batch = Batch(step, groups, self._program.samples_per_group, self._job.seed)
            self._steps.begin(batch, self._collection.next_batch())
            if self._session is not None and self._session <= step:
                self._turns.leave(self._program.generate, self._session)
                self._session = None
            moved = True
        return moved

    def _end_step(self) -> bool:
        """Close the oldest open step, if all its calls have ended and nothing of the border before it is left."""
        ended = None if self._borders.queue else self._steps.end()
        if ended is None:
            return False
        batch, tally = ended
        self._out += [Send(worker, Drop(groups)) for worker, groups in batch.holdings().items()]
        self._ledger.trained(batch.groups)
        samples = [(sample, group) for group in batch.groups for sample in group.samples]
        self._out.append(
            StepEnded(
                step=batch.step,
                metrics=tally.metrics,
                spans=tally.spans,
                n_groups=len(batch.groups),
                n_samples=len(samples),
                n_tokens=sum(batch.n_tokens),
                n_new_tokens=sum(sample.n_new_tokens for sample, _ in samples),
                n_skipped=tally.n_skipped,
                n_dropped=tally.n_dropped,
                age=Mean(float(sum(batch.step - group.oldest for group in batch.groups)), float(len(batch.groups))),
                oldest=max(batch.step - group.oldest for group in batch.groups),
                versions=dict(self._versions),
                transcripts=tuple(tally.transcripts),
            )
        )
        self._border = self._snapshot()
        self._borders.ended(self._steps.completed)
        return True

    # --- turns --------------------------------------------------------------------------------------------------------

    def _behind(self, call: str) -> bool:
        """Whether `call` runs on a copy that is older than the trained weights."""
        return call in self._copies and self._copies[call] < self._versions[self._program.calls[call].role]

    def _may_run(self, head: Next) -> bool:
        """Whether all that `head` needs is there, its copy of the weights left aside."""
        call = self._program.calls[head.call]
        if call.work != "generate":
            return self._steps.may_run(call, head.step, self._versions)
        if self._session is not None:
            return False
        per_step = self._trains_generator()
        if not per_step:
            return head.step <= self._steps.completed + self._ahead + self._job.staleness
        return self._versions[call.role] // per_step >= head.step - self._job.staleness

    def _take_turns(self, now: float) -> bool:
        """Start reallocations first, then the calls that are next on all their devices."""
        moved = False
        heads = self._turns.next(self._barrier, self._borders.target)
        for head in heads:
            if head.call == self._program.generate and self._session is None and head.step < self._collection.step:
                self._turns.leave(head.call, head.step)  # its batch is there already
                moved = True
        if moved:
            return True
        heads = [head for head in heads if self._may_run(head)]
        wanted = [head.call for head in heads if self._behind(head.call)]
        if self._session is not None and self._behind(self._program.generate):
            wanted.insert(0, self._program.generate)
        reserved: set[int] = set()
        for name in wanted:
            if self._reallocate(name, now):
                moved = True
            else:
                reserved.update(id(lane) for lane in self._turns.of(name, self._program.calls[name].trainer))
        for head in heads:
            lanes = self._turns.of(head.call)
            if self._behind(head.call) or not self._turns.idle(lanes) or any(id(lane) in reserved for lane in lanes):
                continue
            moved = True
            if head.call == self._program.generate:
                self._session = head.step
            else:
                self._turns.hold(lanes, self._steps.start(head.call, head.step, self._versions, now).number)
        return moved

    def _reallocate(self, name: str, now: float) -> bool:
        """Bring the copy of `name` up to date, if both meshes are free; an open session of `name` itself goes on."""
        call = self._program.calls[name]
        lanes = self._turns.of(name, call.trainer)
        if not self._turns.idle(lanes):
            return False
        if self._session is not None and name != self._program.generate:
            held = {id(lane) for lane in self._turns.of(self._program.generate)}
            if any(id(lane) in held for lane in lanes):
                return False
        workers = sorted({*call.workers, *call.owners})
        task = self._tasks.open("reallocate", name, self._steps.completed, self._collection.tally)
        version = self._versions[call.role]
        command = Reallocate(task.number, call.role, name, version, call.owners)
        self._out += [Send(worker, command) for worker in workers]
        self._turns.hold(lanes, task.number)
        self._tasks.fly(task, workers, now, self._steps.limit(call.predicted_seconds))
        return True

    # --- borders ------------------------------------------------------------------------------------------------------

    def _work_at_border(self, now: float) -> bool:
        """The next evaluation or checkpoint, as soon as what runs has ended; nothing else starts before it is done."""
        work = self._borders.queue[0]
        if self._border_task is not None:
            return False
        return self._evaluate(work.step, now) if work.kind == "evaluate" else self._save(work.step, now)

    def _evaluate(self, step: int, now: float) -> bool:
        name = self._program.generate
        if not name:
            self._borders.queue.popleft()
            return True
        if self._behind(name):
            return self._reallocate(name, now)
        lanes = self._turns.of(name)
        if not self._turns.idle(lanes):
            return False
        homes, call = self._program.homes, self._program.calls[name]
        task = self._steps.open("evaluate", "evaluate", step)
        rows = {home: tuple(range(i, self._n_eval_rows, len(homes))) for i, home in enumerate(homes)}
        version = self._versions.get(call.role, 0)
        workers = [home for home in homes if rows[home]]
        self._out += [Send(home, Evaluate(task.number, step, rows[home], version)) for home in workers]
        self._turns.hold(lanes, task.number)
        self._tasks.fly(task, workers, now, self._steps.limit(call.predicted_seconds))
        self._border_task = task.number
        return False

    def _save(self, step: int, now: float) -> bool:
        if not self._turns.idle(self._turns.lanes):
            return False
        task = self._steps.open("save", "save", step)
        command = Save(task.number, step, self._folder(step))
        self._out += [Send(worker, command) for worker in self._workers]
        self._tasks.fly(task, self._workers, now, self._steps.limit(self._steps.longest_seconds))
        self._border_task = task.number
        return False
