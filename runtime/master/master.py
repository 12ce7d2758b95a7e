"""The master: the asyncio shell round the Scheduler. Moves messages and time in, actions out; owns no tensor.

Four things can end a run: the Scheduler halts (in order or by a failure), an interrupt, or an error of the master
itself, such as a full disk. In every case the workers end, and what was trained up to the last whole step is saved if
the failure left it intact.
"""

import asyncio
import time
from pathlib import Path
from typing import assert_never

import msgspec
from msgspec import Struct

from realgraph.runtime.commands.actions import (
    Action,
    Checkpointed,
    CheckpointWritten,
    EngineJoined,
    EngineLost,
    EngineReplaced,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    StopRequested,
    Tick,
    WorkerLost,
)
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.rotation import MEGABYTE
from realgraph.runtime.job.run_folder import RunFolder, disk_text
from realgraph.runtime.master.advice import Advice
from realgraph.runtime.master.checkpoints import Checkpoints, DamagedState, read_state, rescue, step_of
from realgraph.runtime.master.event_log import EventLog, LogStart
from realgraph.runtime.master.inbox import Inbox, StopNow
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    Note,
    Observers,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)
from realgraph.runtime.master.startup import StartError, WorkerGroup, ready_worker_group, start_worker_group
from realgraph.runtime.master.status import StatusFile
from realgraph.runtime.master.step_metrics import flatten, planned_of
from realgraph.runtime.processes.interrupts import Interrupted, Interrupts, unless
from realgraph.runtime.processes.launcher import Launcher, LaunchError, WorkerStacks
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.processes.stacks import stacks_of, with_stacks
from realgraph.runtime.replacement.engines import EngineReplacements, RunWorkers
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Bye, Done, Failed, Generated, Heartbeat, Hello, Loaded, Met, Ready
from realgraph.runtime.wire.sockets import TransportError

GRACE_SECONDS = 10.0  # for workers to end by themselves after Shutdown


class RunOutcome(Struct, frozen=True):
    """The end of a run."""

    steps: int  # whole steps done
    reason: str
    failure: Failed | None = None  # None where nothing went wrong
    interrupted: bool = False  # the user asked for the end, which may have been the run's own all the same
    saved: Path | None = None  # the newest checkpoint
    again: bool = False  # the run is to restart from there: a worker or host was lost, and its hosts wait

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.interrupted


class Master:
    """One run, from the start of its workers to their end. `run` is called once, in the main thread."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        observers: Observers,
        resume: Path | None = None,
        launcher: Launcher = LocalLauncher(),
        restarts: int = 0,
    ) -> None:
        """restarts: of this run by itself so far."""
        self._job, self._folder, self._observers, self._resume = job, folder, observers, resume
        self._launcher, self._restarts = launcher, restarts
        self._checkpoints = Checkpoints(folder, job.checkpoint.keep)
        self._interrupts = Interrupts(self._interrupted)
        self._inbox: Inbox | None = None
        self._steps = step_of(resume) if resume is not None else 0
        self._last_state: Checkpointed | None = None  # the state at the last whole step
        self._step_began = 0.0
        self._advice = Advice(job.graph.calls, job.graph.prompted)
        self._status = StatusFile(folder.status, job.name, job.steps, job.staleness, restarts)

    async def run(self) -> RunOutcome:
        """Train. A failure of the run is no exception: the outcome says it."""
        with self._interrupts:
            try:
                failure = await self._start_and_drive()
            except Interrupted:
                failure = None
            self._recover()
            return self._ended(failure)

    def _recover(self) -> None:
        """Leave no half of a checkpoint behind: it may be what filled the disk. What can't be removed is said."""
        try:
            warnings = self._checkpoints.recover()
        except OSError as error:
            warnings = (f"the checkpoints are left as they are: {disk_text(error)}",)
        for text in warnings:
            self._publish(Note(text, "warning"))

    def _interrupted(self, count: int) -> None:
        if self._inbox is not None:
            self._inbox.put(StopRequested() if count == 1 else StopNow())
        if count == 1:
            text = "stopping after this step; interrupt again to stop now" if self._inbox else "stopping"
            self._observers.note(text, "warning")

    async def _start_and_drive(self) -> Failed | None:
        """Everything between the first process and the last. Raises Interrupted."""
        began = time.monotonic()
        try:
            workers = await unless(self._interrupts.first, start_worker_group(self._job, self._folder, self._launcher))
        except LaunchError as error:
            return Failed(-1, "", str(error), "start")
        failure: Failed | None = None
        try:
            try:
                await unless(self._interrupts.first, ready_worker_group(workers, self._job, self._resume))
                self._begin(workers, began)
            except StartError as error:
                return await with_stacks(error.failure, workers.fleet)
            failure = await self._with_inbox(workers)
            return failure
        finally:
            await self._close(workers, again=self._goes_on(failure))

    def _goes_on(self, failure: Failed | None) -> bool:
        """True where the run restarts by itself: a worker was lost or hung, no one asked for the end, and there is a
        checkpoint."""
        lost = failure is not None and failure.kind in ("worker", "deadline") and not self._interrupts.count
        return lost and self._restarts < self._job.runtime.restarts and self._folder.latest() is not None

    async def _with_inbox(self, workers: WorkerGroup) -> Failed | None:
        """Drive, and after a failure save what can be saved. Raises Interrupted where nothing has failed."""
        inbox = self._inbox = Inbox(workers, self._job.runtime)
        try:
            try:
                failure = await self._drive(workers, inbox)
            except OSError as error:
                failure = unwritable(error)
            if failure is not None:
                try:
                    await unless(self._interrupts.second, self._rescue(workers, inbox))
                except Interrupted:
                    self._observers.note("interrupted while saving", "warning")
            return failure
        finally:
            await inbox.close()

    async def _close(self, workers: WorkerGroup, *, again: bool) -> None:
        """End the workers; a second interrupt cuts their time short."""
        try:
            await unless(self._interrupts.second, workers.close(GRACE_SECONDS, again=again))
        except Interrupted:
            await workers.close(0.0)

    def _begin(self, workers: WorkerGroup, began: float) -> None:
        """All workers are ready: the Scheduler takes over. Raises StartError."""
        state = None
        if self._resume is not None:
            try:
                state = read_state(self._resume)
            except DamagedState as error:
                text = f"the checkpoint {self._resume} is damaged: {error}"
                raise StartError(Failed(-1, "", text, "start")) from error
        n_rows = {worker.n_rows for worker in workers.ready.values()}
        if len(n_rows) > 1:
            text = f"the workers see data sets of different lengths: {sorted(n_rows)}"
            raise StartError(Failed(-1, "", text, "start"))
        n_eval_rows = max(worker.n_eval_rows for worker in workers.ready.values())
        numbers, n_data_rows = tuple(sorted(workers.ready)), n_rows.pop()
        self._scheduler = Scheduler(self._job, numbers, n_data_rows, state, n_eval_rows=n_eval_rows)
        checkpoint = str(self._resume) if self._resume is not None else ""
        self._log_start = LogStart(
            msgspec.json.encode(self._job), numbers, n_data_rows, n_eval_rows, state, checkpoint=checkpoint
        )
        seconds = time.monotonic() - began
        facts = {
            **workers.ready[min(workers.ready)].facts,
            "fork_seconds": workers.fork_seconds,
            "start_seconds": seconds,
        }
        self._observers.observe(
            RunStarted(
                name=self._job.name,
                graph=self._job.graph.name,
                steps=self._job.steps,
                first_step=self._steps,
                run_dir=str(self._folder.root),
                calls=tuple(self._job.graph.calls),
                facts=facts,
                time=time.time(),
                restarts=self._restarts,
                planned=planned_of(self._job),
            )
        )

    async def _drive(self, workers: WorkerGroup, inbox: Inbox) -> Failed | None:
        """Feed the Scheduler until it halts. The failure that ended the run, or None. Raises Interrupted, OSError."""
        log = EventLog(self._folder.events, self._job.outputs.rotate_mb * MEGABYTE, self._log_start)
        try:
            return await self._drive_logged(workers, inbox, log)
        finally:
            log.close()
            self._status.remove()

    async def _drive_logged(self, workers: WorkerGroup, inbox: Inbox, log: EventLog) -> Failed | None:
        known = RunWorkers(workers.fleet, workers.socket, workers.boots, workers.peers)
        self._replacements = EngineReplacements(self._job, known, inbox.join, self._observers.note)
        try:
            return await self._drive_replacing(workers, inbox, log)
        finally:
            await self._replacements.close()

    async def _drive_replacing(self, workers: WorkerGroup, inbox: Inbox, log: EventLog) -> Failed | None:
        self._step_began = time.monotonic()
        self._last_state = self._scheduler.state
        actions = self._ask_scheduler(None, inbox, log)
        event: Event | StopNow
        silent: tuple[WorkerStacks, ...] = ()
        while True:
            self._replacements.check()
            if inbox.idle:
                log.flush()
                if self._status.due():
                    self._status.write(self._scheduler.image, inbox.clock.now(), inbox.signs())
            try:
                halt = await self._perform(workers, actions)
            except TransportError as error:  # a worker that just died takes no message: its end says more
                event = await inbox.explain(Failed(-1, "", str(error), "worker"))
            else:
                if halt is not None:
                    return await with_stacks(halt.error, workers.fleet, silent) if halt.error else None
                event = await inbox.next(self._scheduler.deadline())
            match event:
                case StopNow():
                    raise Interrupted
                case WorkerLost(worker=worker) if worker not in self._replacements.ending:
                    silent = await stacks_of(workers.fleet, (worker,))
                    await workers.fleet.kill(worker)  # one that is only silent must not wake up again
                case Done() | Generated():
                    self._trace(event)
                case Hello() | Ready() | Met() | Failed():
                    self._replacements.hear(event)
                case Heartbeat() | Loaded() | Bye() | Tick() | WorkerLost() | EngineJoined() | StopRequested():
                    pass
                case _:
                    assert_never(event)
            actions = self._ask_scheduler(event, inbox, log)

    def _ask_scheduler(self, event: Event | None, inbox: Inbox, log: EventLog) -> list[Action]:
        """The Scheduler's actions about `event` (None: its start), which is on record before. Raises OSError."""
        now = inbox.clock.now()
        log.record(event, now, lambda: self._scheduler.image)
        actions = self._scheduler.start(now) if event is None else self._scheduler.on(event, now)
        log.acted(actions)
        return actions

    def _trace(self, reply: Done | Generated) -> None:
        call = reply.call or "checkpoint"
        if reply.ended > 0:
            span = Span(reply.worker, call, self._steps, reply.started, reply.ended)
            if isinstance(reply, Done):
                span = msgspec.structs.replace(span, arrived=reply.arrived, resident=reply.resident)
            self._observers.observe(span)

    async def _perform(self, workers: WorkerGroup, actions: list[Action]) -> Halt | None:
        unsent: TransportError | None = None
        for action in actions:
            match action:
                case Send(worker=worker, command=command):
                    try:
                        await workers.socket.send(worker, command)
                    except TransportError as error:  # the others get theirs: the run may go on without it
                        host = workers.fleet.host_of(worker)
                        unsent = unsent or TransportError(f"{error}, on {host}" if host else str(error))
                case EngineLost(workers=engine, text=text):
                    self._observers.note(text, "warning")
                    await self._replacements.lost(engine)
                case EngineReplaced(text=text):
                    self._observers.note(text, "info")
                case StepEnded():
                    self._step_ended(action)
                case EvalEnded(step=step, metrics=metrics, best=best):
                    values = {name: mean.value for name, mean in metrics.items()}
                    self._observers.observe(EvalRecord(step, values, best, time.time()))
                    for text in action.transcripts:
                        self._observers.observe(Transcript(step, text, "eval"))
                case CheckpointWritten(step=step, folder=folder, state=state):
                    began = time.monotonic()
                    done = await asyncio.to_thread(self._checkpoints.commit, step, Path(folder), state)
                    self._observers.observe(CheckpointRecord(step, str(done.path), time.monotonic() - began))
                    for text in done.warnings:
                        self._observers.note(text, "warning")
                case Halt():
                    return action
        if unsent is not None:
            raise unsent
        return None

    def _step_ended(self, ended: StepEnded) -> None:
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._status.step_took(seconds)
        metrics = flatten(ended, self._job.graph, self._job.plan)
        self._observers.observe(StepRecord(ended.step, seconds, metrics, time.time(), ended.lengths))
        for text in ended.transcripts:
            self._observers.observe(Transcript(ended.step, text))
        for text in self._advice.look(metrics):
            self._observers.note(text, "warning")
        self._steps = ended.step + 1  # from here on the step is whole: it is on record
        self._last_state = self._scheduler.state

    async def _rescue(self, workers: WorkerGroup, inbox: Inbox) -> None:
        """After a failure: have the survivors save the state of the last whole step, where nothing newer is saved."""
        state = self._last_state
        if state is None or self._job.rollout_alone or state.step <= self._checkpoints.newest_step():
            return
        self._recover()
        began = time.monotonic()
        try:
            done = await rescue(workers, self._job, self._checkpoints, state, inbox)
        except OSError as error:
            self._observers.note(f"the state after step {state.step} was not saved: {disk_text(error)}", "error")
        else:
            self._publish(CheckpointRecord(state.step, str(done.path), time.monotonic() - began))

    def _publish(self, record: RunRecord) -> OSError | None:
        """Tell the watchers at the end of a run: that one of them can't write any more is no news then."""
        try:
            self._observers.observe(record)
        except OSError as error:
            return error
        return None

    def _ended(self, failure: Failed | None) -> RunOutcome:
        outcome = self._outcome(failure)
        unwritten = self._publish(RunEnded(outcome.steps, outcome.reason, outcome.ok, time.time()))
        if unwritten is not None and failure is None:
            return self._outcome(unwritable(unwritten))
        return outcome

    def _outcome(self, failure: Failed | None) -> RunOutcome:
        reason = (
            "finished" if not self._interrupts.count else "stopped" if self._interrupts.count == 1 else "interrupted"
        )
        if failure is not None:
            reason = describe(failure)
        interrupted = failure is None and self._interrupts.count > 0
        return RunOutcome(self._steps, reason, failure, interrupted, self._folder.latest(), self._goes_on(failure))


def unwritable(error: OSError) -> Failed:
    """The master itself can't write a file of the run."""
    return Failed(-1, "", f"the master could not write: {disk_text(error)}", "disk")


def describe(failure: Failed) -> str:
    """A failure in one line: call, worker, sample, and what happened."""
    place = []
    if failure.call:
        place.append(f"call {failure.call!r}")
    if failure.worker >= 0:
        place.append(f"worker {failure.worker}")
    if failure.sample >= 0:
        place.append(f"sample {failure.sample}")
    return f"{', '.join(place)}: {failure.error}" if place else failure.error
