"""Carries out what is due between two steps: an evaluation or a checkpoint, as soon as what runs has ended.

Nothing else is started before it is done. `StepBoundary` says what is due and when. Groups that are being made stay
with their workers: an evaluation sets them aside, a checkpoint names them as open.
"""

from collections.abc import Sequence

from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.program import Program
from realgraph.runtime.scheduler.step_boundary import BoundaryWork, StepBoundary
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.protocol import Evaluate, Save


class BoundaryRunner:
    """The work in hand between two steps, if any."""

    def __init__(self, job: Job, program: Program, boundary: StepBoundary, steps: OpenSteps, devices: Devices) -> None:
        self._job, self._program, self._boundary, self._steps, self._devices = job, program, boundary, steps, devices
        self.task: int | None = None  # its number

    def work(self, workers: Sequence[int], n_eval_rows: int, now: float) -> list[Action] | None:
        """Start the next evaluation or checkpoint, or what it waits for; None where nothing can be done now."""
        work = self._boundary.queue[0]
        if self.task is not None:
            return None
        return self._evaluate(work, n_eval_rows, now) if work.kind == "evaluate" else self._save(work, workers, now)

    def done(self) -> None:
        """The evaluation or checkpoint in hand has ended."""
        self.task = None
        self._boundary.queue.popleft()

    def folder(self, step: int) -> str:
        """The folder that the checkpoint of `step` steps is written to; it gets its name when it is whole."""
        return f"{self._job.run_dir}/checkpoints/step-{step:06d}.partial"

    def _evaluate(self, work: BoundaryWork, n_rows: int, now: float) -> list[Action] | None:
        """Evaluate the newest weights on every engine that makes rollouts; an open session goes on afterwards."""
        name, spec = self._program.generate, self._job.eval
        if not name or spec is None:
            self._boundary.queue.popleft()
            return []
        turns = self._devices.turns
        if self._devices.behind(name):
            return self._devices.reallocate(name, now)
        if not turns.idle(turns.of(name)):
            return None
        owner_workers, call = self._program.owner_workers, self._program.calls[name]
        task = self._steps.open("evaluate", "evaluate", work.step)
        rows = {owner: tuple(range(i, n_rows, len(owner_workers))) for i, owner in enumerate(owner_workers)}
        version = self._devices.generator_weights
        workers = [owner for owner in owner_workers if rows[owner]]
        turns.hold(turns.of(name), task.number)
        n_samples = self._job.batch.groups * self._program.samples_per_group
        steps = max(1.0, n_rows * spec.n / n_samples)  # as long as the rollouts of so many steps
        self._steps.fly(task, workers, now, steps * call.predicted_seconds)
        self.task = task.number
        return [Send(owner, Evaluate(task.number, work.step, rows[owner], version)) for owner in workers]

    def _save(self, work: BoundaryWork, workers: Sequence[int], now: float) -> list[Action] | None:
        if not self._devices.turns.idle(self._devices.turns.lanes):
            return None
        task = self._steps.open("save", "save", work.step)
        command = Save(task.number, work.step, self.folder(work.step))
        self._steps.fly(task, workers, now, self._steps.longest_seconds)
        self.task = task.number
        return [Send(worker, command) for worker in workers]
