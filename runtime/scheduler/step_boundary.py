"""The work between two steps: evaluations and checkpoints, one at a time, in order. Knows when, not how."""

from collections import deque
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from realgraph.runtime.commands.actions import Checkpointed
from realgraph.runtime.job.job import Job
from realgraph.runtime.wire.metrics import Metric

# The first of these that an evaluation reports decides which is best, then its reward; else the least loss does.
BEST_BY = ("accuracy", "pass@1", "reward")


class BoundaryWork(Struct, frozen=True):
    """An evaluation or a checkpoint of `step` completed steps."""

    kind: Literal["evaluate", "save"]
    step: int


class BoundaryImage(Struct, frozen=True):
    """The work due at step boundaries as plain data."""

    target: int
    saved: int
    stopping: bool
    queue: tuple[BoundaryWork, ...]
    best_step: int
    best_value: float
    best_reward: float
    evaluated_step: int
    saved_at: float
    due: int
    evaluation: int
    written: tuple[int, ...]


class StepBoundary:
    """The work due at step boundaries, the end of the run (`target` completed steps) and the best evaluation."""

    def __init__(self, job: Job, state: Checkpointed, n_eval_rows: int) -> None:
        self.n_eval_rows = n_eval_rows
        self.target = max(job.steps, state.step)
        self.saved = state.step
        self.stopping = False
        self.queue: deque[BoundaryWork] = deque()
        self.best_step, self.best_value, self.best_reward = state.best_step, state.best_value, state.best_reward
        self.evaluated_step = state.evaluated_step
        self._saves = not job.rollout_alone
        self._every_save = job.checkpoint.every if self._saves else 0
        self._save_seconds = job.checkpoint.seconds if self._saves else 0.0
        self._saved_at = 0.0  # when the last checkpoint was, or the start
        self._due = -1  # the step that is saved because it is time; -1: none yet
        self.evaluation = -1  # the step whose weights are evaluated next while the run goes on; -1: none
        self._written = deque([state.step], job.checkpoint.keep)  # steps whose checkpoints are kept
        can_eval = job.eval is not None and n_eval_rows > 0
        self._every_eval = job.eval.every if job.eval is not None and can_eval else 0
        self._at_start = job.eval is not None and job.eval.at_start
        self._beside = job.eval is not None and job.eval.on is not None
        # every checkpoint is evaluated
        self._saved_ones = job.eval is not None and job.eval.on == "checkpoint" and can_eval and self._saves

    @property
    def image(self) -> BoundaryImage:
        """All that it has."""
        best = (self.best_step, self.best_value, self.best_reward, self.evaluated_step)
        return BoundaryImage(
            self.target,
            self.saved,
            self.stopping,
            tuple(self.queue),
            *best,
            self._saved_at,
            self._due,
            self.evaluation,
            tuple(self._written),
        )

    def restore(self, image: BoundaryImage) -> None:
        """Go on from an image."""
        self.target, self.saved, self.stopping, self.queue = (
            image.target,
            image.saved,
            image.stopping,
            deque(image.queue),
        )
        self.best_step, self.best_value, self.best_reward = image.best_step, image.best_value, image.best_reward
        self.evaluated_step = image.evaluated_step
        self._saved_at, self._due, self.evaluation = image.saved_at, image.due, image.evaluation
        self._written = deque(image.written, self._written.maxlen)

    def began(self, now: float) -> None:
        """Count time from here on."""
        self._saved_at = now

    def was_saved(self, step: int, now: float) -> None:
        """The checkpoint of `step` completed steps is written."""
        self.saved, self._saved_at, self._due = step, now, -1
        if step not in self._written:
            self._written.append(step)
        if self._saved_ones and not (step == self.target and self.stopping):
            self._evaluate(step)

    def is_kept(self, step: int) -> bool:
        """True where there is a checkpoint of `step` completed steps."""
        return step in self._written

    def started(self) -> None:
        """A fresh run begins."""
        if self._every_eval and self._at_start:
            self._evaluate(0)

    def resumed(self, step: int) -> None:
        """A run goes on after `step` steps, of which the last may have been saved before it was evaluated."""
        if self.evaluated_step < step and self._is_evaluated(step):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        """Now, or while the run goes on, where it does: one that has not begun by the next is not made."""
        beside = self._beside and step < self.target
        self.evaluation = step if beside else -1
        if not beside:
            self.queue.append(BoundaryWork("evaluate", step))

    def _is_evaluated(self, step: int) -> bool:
        if not self._every_eval:
            return False
        return step % self._every_eval == 0 or (step == self.target and not self.stopping)

    def ended(self, step: int, first: int, now: float) -> None:
        """`step` steps are complete, and `first` is the first at whose end a checkpoint can still be written.

        `first` is later where train calls of further steps have begun already.
        """
        at_end = step == self.target
        if self._is_evaluated(step):
            self._evaluate(step)
        if self._save_seconds and self._due < 0 and now - self._saved_at >= self._save_seconds:
            self._due = first
        if (at_end and self._saves) or step == self._due or (self._every_save and step % self._every_save == 0):
            self.queue.append(BoundaryWork("save", step))

    def stop_after(self, step: int) -> None:
        """The run ends with `step` complete steps, or where it would have ended anyway."""
        if step < self.target:
            self.target, self.stopping, self.evaluation = step, True, -1

    def end_with_save(self, step: int) -> None:
        """Queue the last checkpoint, if a stop made this step the last one. step: complete steps."""
        if self._saves and step == self.target != self.saved and not self.queue:
            self.queue.append(BoundaryWork("save", step))

    def barrier(self, step: int) -> int:
        """The last step that may train before the next checkpoint is written. step: complete steps.

        An evaluation that all wait for may turn out the best so far, and then a checkpoint of its weights follows.
        """
        periods = [every for every in (self._every_save, 0 if self._beside else self._every_eval) if every]
        due = [self._due] if self._due > step else []
        return min([self.target, *due, *((step // every + 1) * every for every in periods)]) - 1

    def judge(self, step: int, metrics: Mapping[str, Metric], *, beside: bool = False) -> bool:
        """True where this evaluation is better than all before it: it is remembered, and its weights are saved.

        Of equal ones, such as where every sample is right, the one with the higher reward or lower loss is better.
        Of step 0 nothing is saved: those weights are the run's own starting point. beside: the run has gone on since;
        then its weights have to be saved already.
        """
        self.evaluated_step = step
        known = {name: metric.value for name, metric in metrics.items()}
        if "loss" in known:
            known["reward"] = -known["loss"]
        value, reward = next((known[name] for name in BEST_BY if name in known), None), known.get("reward", 0.0)
        if value is None:
            return False
        if self.best_step >= 0 and (value, reward) <= (self.best_value, self.best_reward):
            return False
        if beside and step and step not in self._written:
            return False
        self.best_step, self.best_value, self.best_reward = step, value, reward
        if step and not beside and step != self.saved and BoundaryWork("save", step) not in self.queue:
            self.queue.append(BoundaryWork("save", step))
        return True
