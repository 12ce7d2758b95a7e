"""Carries out what is due between two steps: an evaluation or a checkpoint, as soon as what runs has ended.

Nothing else is started before it is done. `StepBoundary` says what is due and when. Groups that are being made stay
with their workers: an evaluation sets them aside, a checkpoint names them as open.
"""

from collections.abc import Sequence

from realgraph.runtime.commands.actions import Action, EvalEnded, Send
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.held_out import HeldOutLoss
from realgraph.runtime.scheduler.held_out_samples import HeldOutSamples
from realgraph.runtime.scheduler.program import Program
from realgraph.runtime.scheduler.step_boundary import BoundaryWork, StepBoundary
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.metrics import Metric
from realgraph.runtime.wire.protocol import Save

PARTIAL = ".partial"  # end of the name of a checkpoint's folder until it is whole
LEAST_ENGINES = 2  # of which one can be set aside


class BoundaryRunner:
    """The work in hand between two steps, if any."""

    def __init__(self, job: Job, program: Program, boundary: StepBoundary, steps: OpenSteps, devices: Devices) -> None:
        self._job, self._program, self._boundary, self._steps, self._devices = job, program, boundary, steps, devices
        self._samples = HeldOutSamples(job, program, steps, devices)
        # the evaluation whose parts go one by one
        self.held_out = self._samples if program.generate else HeldOutLoss(job, program, steps, devices)
        self.task: int | None = None  # its number
        self.beside: int | None = None  # the number of an evaluation that the run goes on beside
        self.spoiled = False  # one of the engines of the evaluation in hand is gone: it is made again

    def work(self, workers: Sequence[int], now: float) -> list[Action] | None:
        """Start the next evaluation or checkpoint, or what it waits for; None where nothing can be done now."""
        work = self._boundary.queue[0]
        if self.task is not None:
            return None
        if work.kind == "save":
            return self._save(work, workers, now)
        return self._evaluate_in_parts(work, now) if self._in_parts else self._evaluate(work, now)

    @property
    def _in_parts(self) -> bool:
        """True where evaluations are by the loss, or models score samples."""
        return not self._program.generate or self._program.judging.call is not None

    @property
    def holds_samples(self) -> bool:
        """True where workers hold samples of the evaluation in hand."""
        return self._samples.in_hand

    @property
    def draws_samples(self) -> bool:
        """True where engines draw samples of which any of them may be asked later."""
        return self._in_parts and self.task is not None and self._boundary.queue[0].kind == "evaluate"

    def _evaluate_in_parts(self, work: BoundaryWork, now: float) -> list[Action] | None:
        """Start the next part of an evaluation, on devices where nothing runs."""
        turns = self._devices.turns
        started = self.held_out.start(work.step, self._boundary.n_eval_rows, now) if turns.idle(turns.lanes) else None
        if started is None:
            return None
        task, actions = started
        if task is not None:
            self.task = task.number
            turns.hold(turns.lanes, task.number)
        return actions

    def evaluated(self, task: Task) -> list[Action]:
        """An evaluation has ended on all its workers."""
        self._devices.turns.release(task.number)
        if self.spoiled:
            return self._again(task)
        if self._in_parts:
            return self._part_ended(task)
        beside = task.number == self.beside
        ended = self._judged(task, task.tally.metrics.get(task.call, {}), beside=beside)
        return [ended] if beside else [ended, *self._devices.release_generator()]

    def _part_ended(self, task: Task) -> list[Action]:
        """A part of an evaluation has ended, perhaps the last one."""
        actions, metrics = self.held_out.ended(task, self._boundary.n_eval_rows)
        if metrics is None:
            self.task = None
            return actions
        return [*actions, self._judged(task, metrics)]

    def _judged(self, task: Task, metrics: dict[str, Metric], *, beside: bool = False) -> EvalEnded:
        """The evaluation in hand has ended with these metrics."""
        self._done(task)
        best = self._boundary.judge(task.step, metrics, beside=beside)
        return EvalEnded(task.step, metrics, best, tuple(task.tally.transcripts))

    def saved(self, task: Task, now: float) -> None:
        """A checkpoint is written."""
        self._done(task)
        self._boundary.was_saved(task.step, now)

    def _again(self, task: Task) -> list[Action]:
        """Begin an evaluation anew that has lost an engine, now that what is left of it has ended."""
        self.spoiled = False
        if task.number == self.beside:
            self.beside, self._boundary.evaluation = None, max(task.step, self._boundary.evaluation)
            self._devices.engines.keep(())
        else:
            self.task = None
        return self._samples.forget(task)

    def _done(self, task: Task) -> None:
        """The work in hand has ended, or an evaluation that the run has gone on beside."""
        if task.number == self.beside:
            self.beside = None
            self._devices.engines.keep(())
        else:
            self.task = None
            self._boundary.queue.popleft()

    def folder(self, step: int) -> str:
        """The folder that the checkpoint of `step` steps is written to; it gets its name when it is whole."""
        return f"{self._job.run_dir}/checkpoints/step-{step:06d}{PARTIAL}"

    def _evaluate(self, work: BoundaryWork, now: float) -> list[Action] | None:
        """Evaluate the newest weights on every engine that makes rollouts; an open session goes on afterwards."""
        name = self._program.generate
        if self.beside is not None:
            return None
        if work.step <= self._boundary.evaluated_step:  # while the run went on, by engines that were ahead of its steps
            self._boundary.queue.popleft()
            return []
        self._devices.engines.keep(())  # one that was to evaluate what was saved before
        self._boundary.evaluation = -1
        turns = self._devices.turns
        if self._devices.behind(name):
            return self._devices.reallocate(name, now)
        if not turns.idle(turns.of(name)):
            return None
        task, sends = self._samples.whole(work.step, self._boundary.n_eval_rows, self._devices.engines.heads, now)
        self.task = task.number
        turns.hold(turns.of(name), self.task)
        return sends

    def evaluate_beside(self, now: float) -> list[Action] | None:
        """Start the evaluation that is due while the run goes on, once engines have the weights of its step, or newer
        ones; None where there is nothing to start."""
        due, spec = self._boundary.evaluation, self._job.eval
        if spec is None or self.beside is not None or self.task is not None:
            return None
        if spec.on == "checkpoint":
            return self._evaluate_saved(due, now)
        if due <= self._boundary.evaluated_step:  # -1, or engines were ahead of the steps that had ended
            self._boundary.evaluation = -1
            return None
        step = self._devices.whole_step
        if step is None or step < due:
            return None
        owners = self._devices.engines.heads
        owners = owners[-1:] if spec.on == "engine" else owners
        task, sends = self._samples.whole(step, self._boundary.n_eval_rows, owners, now, beside=True)
        self.beside = task.number
        self._boundary.evaluation = -1
        self._devices.engines.keep([*task.waiting])
        return sends

    def _evaluate_saved(self, step: int, now: float) -> list[Action] | None:
        """Evaluate a checkpoint on the last engine: it gets no more groups and no weights, and begins once it has none
        left and the others have the weights that it lacks, or newer ones."""
        engines, version = self._devices.engines, step * self._program.trains_of(self._program.generate)
        if step < 0 or not self._boundary.is_kept(step) or len(engines.heads) < LEAST_ENGINES:
            self._boundary.evaluation = -1
            engines.keep(())
            return None
        engine = engines.heads[-1]
        engines.keep([engine])
        if not self._devices.may_load(engine, version):
            return None
        engines.load(engine, version, self._devices.generator_weights)
        checkpoint, n_rows = self.folder(step).removesuffix(PARTIAL), self._boundary.n_eval_rows
        task, sends = self._samples.whole(step, n_rows, (engine,), now, beside=True, checkpoint=checkpoint)
        self.beside = task.number
        self._boundary.evaluation = -1
        return sends

    def _save(self, work: BoundaryWork, workers: Sequence[int], now: float) -> list[Action] | None:
        if not self._devices.turns.idle(self._devices.turns.lanes):
            return None
        task = self._steps.open("save", "save", work.step)
        command = Save(task.number, work.step, self.folder(work.step))
        self._steps.fly(task, workers, now, self._steps.longest_seconds)
        self.task = task.number
        return [Send(worker, command) for worker in workers]
