"""The master: the asyncio shell round the Scheduler. Moves messages and time in, actions out; owns no tensor.

Three things can end a run: the Scheduler halts (in order or by a failure), a second interrupt, or an error of the
master itself, such as a full disk. In every case the workers end, and what was trained up to the last whole step is
saved if the failure left it intact.
"""

import asyncio
import signal
import time
from pathlib import Path

from msgspec import Struct

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
from realgraph.runtime.checkpoints import Checkpoints, rescue
from realgraph.runtime.job import Job
from realgraph.runtime.launch import LaunchError, describe_exit
from realgraph.runtime.observer import (
    CheckpointRecord,
    EvalRecord,
    Observers,
    RunEnded,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)
from realgraph.runtime.protocol import Done, Failed, Generated, Shutdown
from realgraph.runtime.run_folder import RunFolder
from realgraph.runtime.scheduler import Scheduler
from realgraph.runtime.startup import Crew, StartError, ready_crew, start_crew
from realgraph.runtime.step_metrics import flatten
from realgraph.runtime.transport import TransportError

GRACE_SECONDS = 10.0  # for workers to end by themselves after Shutdown


class Outcome(Struct, frozen=True):
    """How a run ended. steps: whole steps done. failure: what went wrong, None if nothing did."""

    steps: int
    reason: str
    failure: Failed | None = None
    interrupted: bool = False
    saved: Path | None = None  # the newest checkpoint

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.interrupted


class _Interrupt:
    """The user asked a second time: stop now."""


class _Exit(Struct, frozen=True):
    worker: int
    status: int


class Master:
    """One run, from the start of its workers to their end. `run` is called once."""

    def __init__(self, job: Job, folder: RunFolder, observers: Observers, resume: Path | None = None) -> None:
        self._job, self._folder, self._observers, self._resume = job, folder, observers, resume
        self._checkpoints = Checkpoints(folder, job.checkpoint.keep)
        self._inbox: asyncio.Queue[object] = asyncio.Queue()
        self._heard: dict[int, float] = {}
        self._interrupts = 0
        self._steps = 0
        self._border: Checkpointed | None = None  # the state at the last whole step
        self._step_began = 0.0

    async def run(self) -> Outcome:
        """Train. Never raises for a failure of the run: the outcome says it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            outcome = await self._run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return outcome

    def _interrupt(self) -> None:
        self._interrupts += 1
        self._inbox.put_nowait(StopRequested() if self._interrupts == 1 else _Interrupt())
        if self._interrupts == 1:
            self._observers.note("stopping after this step; interrupt again to stop now", "warning")

    async def _run(self) -> Outcome:
        began = time.monotonic()
        try:
            crew = await start_crew(self._job, self._folder)
        except LaunchError as error:
            return self._ended(Failed(-1, "", str(error), "start"))
        try:
            try:
                await self._ready(crew, began)
                failure = await self._drive(crew)
            except StartError as error:
                failure = error.failure
            except OSError as error:
                failure = Failed(-1, "", f"the master could not write: {error}", "disk")
            except TransportError as error:
                failure = Failed(-1, "", str(error), "worker")
            if failure is not None:
                await self._rescue(crew)
            return self._ended(failure)
        finally:
            await crew.close(0.0 if self._interrupts > 1 else GRACE_SECONDS)

    async def _ready(self, crew: Crew, began: float) -> None:
        ready = asyncio.create_task(ready_crew(crew, self._job, self._resume))
        interrupt = asyncio.create_task(self._wait_interrupt())
        try:
            await asyncio.wait((ready, interrupt), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise StartError(Failed(-1, "", "interrupted while starting", "start"))
            ready.result()
        finally:
            for task in (ready, interrupt):
                task.cancel()
            await asyncio.gather(ready, interrupt, return_exceptions=True)
        state = self._checkpoints.state(self._resume) if self._resume is not None else None
        n_rows = {worker.n_rows for worker in crew.ready.values()}
        assert len(n_rows) == 1, f"the workers see data sets of different lengths: {sorted(n_rows)}"
        n_eval_rows = max(worker.n_eval_rows for worker in crew.ready.values())
        self._scheduler = Scheduler(self._job, sorted(crew.ready), n_rows.pop(), state, n_eval_rows=n_eval_rows)
        self._steps = state.step if state is not None else 0
        facts = dict(crew.ready[min(crew.ready)].facts)
        facts["start_seconds"] = time.monotonic() - began
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
            )
        )

    async def _wait_interrupt(self) -> None:
        while self._interrupts == 0:
            await asyncio.sleep(0.05)

    async def _drive(self, crew: Crew) -> Failed | None:
        """Feed the Scheduler until it halts. The failure that ended the run, or None."""
        watchers = [
            asyncio.create_task(self._receive(crew)),
            asyncio.create_task(self._exits(crew)),
        ]
        self._heard = dict.fromkeys(crew.ready, time.monotonic())
        self._step_began = time.monotonic()
        try:
            self._border = self._scheduler.state
            halt = await self._perform(crew, self._scheduler.start(time.monotonic()))
            while halt is None:
                event = await self._next_event()
                if isinstance(event, _Interrupt):
                    return None
                halt = await self._perform(crew, self._scheduler.on(event, time.monotonic()))
            if halt.error is None:
                await self._shut_down(crew)
            return halt.error
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _receive(self, crew: Crew) -> None:
        while True:
            worker, reply = await crew.socket.receive()
            self._heard[worker] = time.monotonic()
            self._inbox.put_nowait(reply)

    async def _exits(self, crew: Crew) -> None:
        while True:
            self._inbox.put_nowait(_Exit(*await crew.fleet.wait_exit()))

    async def _next_event(self) -> Event | _Interrupt:
        """The next reply, loss, request or tick, whichever comes first."""
        while True:
            now = time.monotonic()
            deadline = self._scheduler.deadline()
            if deadline is not None and now >= deadline:
                return Tick()
            silent = min(self._heard, key=self._heard.__getitem__)
            if now - self._heard[silent] > self._job.runtime.lost_after_seconds:
                return WorkerLost(silent, f"has not been heard of for {now - self._heard[silent]:.0f} s")
            wait = self._job.runtime.heartbeat_seconds
            if deadline is not None:
                wait = min(wait, deadline - now)
            try:
                async with asyncio.timeout(wait):
                    happened = await self._inbox.get()
            except TimeoutError:
                continue
            match happened:
                case _Exit(worker=worker, status=status):
                    return WorkerLost(worker, describe_exit(status))
                case Done() | Generated():
                    self._trace(happened)
                    return happened
                case _:
                    return happened  # type: ignore[return-value]

    def _trace(self, reply: Done | Generated) -> None:
        call = reply.call or "checkpoint"
        if reply.ended > 0:
            self._observers.observe(Span(reply.worker, call, self._steps, reply.started, reply.ended))

    async def _perform(self, crew: Crew, actions: list[Action]) -> Halt | None:
        for action in actions:
            match action:
                case Send(worker=worker, command=command):
                    await crew.socket.send(worker, command)
                case StepEnded():
                    self._step_ended(action)
                case EvalEnded(step=step, metrics=metrics, best=best):
                    values = {name: mean.value for name, mean in metrics.items()}
                    self._observers.observe(EvalRecord(step, values, best, time.time()))
                    for text in action.transcripts:
                        self._observers.observe(Transcript(step, text, "eval"))
                case CheckpointWritten(step=step, folder=folder, state=state):
                    path = self._checkpoints.commit(step, Path(folder), state)
                    self._observers.observe(CheckpointRecord(step, str(path)))
                case Halt():
                    return action
        return None

    def _step_ended(self, ended: StepEnded) -> None:
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._steps = ended.step + 1
        self._border = self._scheduler.state
        metrics = flatten(ended, self._job.graph)
        self._observers.observe(StepRecord(ended.step, seconds, metrics, time.time()))
        for text in ended.transcripts:
            self._observers.observe(Transcript(ended.step, text))

    async def _shut_down(self, crew: Crew) -> None:
        for worker in sorted(crew.fleet.running):
            await crew.socket.send(worker, Shutdown())

    async def _rescue(self, crew: Crew) -> None:
        """After a failure: have the survivors save the state of the last whole step, where nothing newer is saved."""
        border = self._border
        if border is None or border.step <= self._checkpoints.newest_step():
            return
        try:
            path = await rescue(crew, self._job, self._checkpoints, border)
        except OSError as error:
            self._observers.note(f"the state after step {border.step} could not be saved: {error}", "error")
        else:
            self._observers.observe(CheckpointRecord(border.step, str(path)))

    def _ended(self, failure: Failed | None) -> Outcome:
        interrupted = failure is None and self._interrupts > 1
        stopped = failure is None and self._interrupts == 1
        reason = "interrupted" if interrupted else "stopped" if stopped else "finished"
        if failure is not None:
            reason = describe(failure)
        saved = self._folder.latest()
        outcome = Outcome(self._steps, reason, failure, interrupted, saved)
        self._observers.observe(RunEnded(self._steps, reason, outcome.ok, time.time()))
        return outcome


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
