"""Evaluations of graphs that generate: engines draw samples of held-out prompts and score them, at once where functions
score alone, else in parts: engines draw, calls of the graph work on the samples, engines judge by what these have
written. Knows not when.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.commands.loads import by_group
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.groups.ledger import Group
from realgraph.runtime.scheduler.held_out import HeldOutRows, Started
from realgraph.runtime.scheduler.placement import ids_beside, sources_of_groups
from realgraph.runtime.scheduler.program import Program
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.metrics import Metric
from realgraph.runtime.wire.protocol import Evaluate, Sample, SampleSource

JUDGED = "evaluate"  # the call of a task whose answers have the metrics


class HeldOutSamples(HeldOutRows):
    """The evaluation in hand, if any."""

    def __init__(self, job: Job, program: Program, steps: OpenSteps, devices: Devices) -> None:
        super().__init__(job, program, steps, devices, program.judging.after)

    @property
    def in_hand(self) -> bool:
        """True where engines hold samples that are not judged yet."""
        return bool(self._groups)

    def _batches(self, n_rows: int) -> float:
        """The batches that have as many samples as an evaluation of so many rows; 1 or more."""
        assert self._job.eval is not None
        return max(1.0, n_rows * self._job.eval.n / (self._job.batch.groups * self._program.samples_per_group))

    def whole(
        self, step: int, n_rows: int, owners: Sequence[int], now: float, *, beside: bool = False, checkpoint: str = ""
    ) -> tuple[Task, list[Action]]:
        """An evaluation that these engines do by themselves, each of its share of the rows: its task and commands."""
        task = self._steps.open("evaluate", JUDGED, step)
        return task, self._ask(task, n_rows, owners, now, Evaluate(task.number, step, (), 0, beside, checkpoint))

    def _ask(self, task: Task, n_rows: int, owners: Sequence[int], now: float, command: Evaluate) -> list[Action]:
        """`command` for each engine, with its share of the rows and the version of its weights."""
        rows = {owner: tuple(range(i, n_rows, len(owners))) for i, owner in enumerate(owners)}
        workers = [owner for owner in owners if rows[owner]]
        # as long as the rollouts of so many steps, by fewer engines
        steps = self._batches(n_rows) * len(self._devices.engines.heads) / len(owners)
        self._steps.fly(task, workers, now, steps * self._program.calls[self._program.generate].predicted_seconds)
        version = self._devices.engines.version(workers[0], self._devices.generator_weights)
        commands = {worker: replace(command, rows=rows[worker], version=version) for worker in workers}
        if command.part == "judge":
            commands = {worker: replace(one, sources=self._written(worker)) for worker, one in commands.items()}
        return [Send(worker, one) for worker, one in commands.items()]

    def _written(self, owner: int) -> tuple[SampleSource, ...]:
        """The places of what calls have written about the samples of an engine."""
        assert self._program.judging.call is not None
        positions = self._batch.by_owner().get(owner, [])
        return self._batch.sources(self._program.judging.call, positions) if positions else ()

    # --- in parts -----------------------------------------------------------------------------------------------------

    def start(self, step: int, n_rows: int, now: float) -> Started:
        """The next part, where nothing runs; None where it can't begin now."""
        name = self._next if self._next_row else self._program.generate
        if not name:
            return self._at_engines(JUDGED, "judge", step, n_rows, now)
        if self._program.calls[name].kind != "generate":
            return self._run(name, step, now, self._batches(n_rows))
        if self._devices.behind(name):
            return self._bring(name, now)
        if name == self._program.generate:
            return self._at_engines(name, "draw", step, n_rows, now)
        return self._draw_later(name, step, n_rows, now)

    def _at_engines(self, name: str, part: Literal["draw", "judge"], step: int, n_rows: int, now: float) -> Started:
        """A part that the engines of the samples do, each for its own rows."""
        task = self._open(name, step)
        command = Evaluate(task.number, step, (), 0, part=part)
        return task, self._ask(task, n_rows, self._devices.engines.heads, now, command)

    def _draw_later(self, name: str, step: int, n_rows: int, now: float) -> Started:
        """Have the engines of a later generate call draw: each gets some of the groups."""
        call, version = self._program.calls[name], self._devices.weights_of(name)
        task = self._open(name, step)
        given: dict[int, list[Group]] = {}
        for place, group in enumerate(self._groups):
            worker = group.makers[name] = call.ranks[place % len(call.ranks)][0]
            given.setdefault(worker, []).append(group)
        self._batch = self._batched(self._batch.owned)
        self._steps.fly(task, [*given], now, self._batches(n_rows) * call.predicted_seconds)
        command = Evaluate(task.number, step, (), version, part="draw", call=name)
        return task, [
            Send(worker, replace(command, sources=sources_of_groups(call, groups))) for worker, groups in given.items()
        ]

    def ended(self, task: Task, n_rows: int) -> tuple[list[Action], dict[str, Metric] | None]:
        """A part has ended: what is done after it, and the metrics where it was the last one."""
        if task.call == JUDGED:
            drops, metrics = self._drops(self._groups), dict(self._tally.metrics.get(JUDGED, {}))
            self._begin()
            return drops, metrics
        if task.call == self._program.generate:
            self._next_row, self._groups = n_rows, self._drawn(task)
            self._batch = self._batched()
            return self._devices.release_generator(), None
        self._ran(task)
        return self._later_drawn(task) if self._program.calls[task.call].kind == "generate" else [], None

    def _drawn(self, task: Task) -> tuple[Group, ...]:
        assert self._job.eval is not None
        return self._arrived(task, self._job.eval.n)

    def _later_drawn(self, task: Task) -> list[Action]:
        """Keep the lengths of a later call's samples; groups of which a prompt is too long are left out. Raises
        UnexpectedReply."""
        call = self._program.calls[task.call]
        samples: list[Sample] = [sample for own in task.loaded.values() for sample in own]
        numbers = {group_of(sample.sample) for sample in samples}
        kept = [group for group in self._groups if group.id in numbers]
        own = by_group(samples, ids_beside(call, kept))
        for group in kept:
            group.samples = self._program.with_lengths(group.samples, call.name, own[group.id])
        drops = self._drops([group for group in self._groups if group.id not in numbers])
        self._groups = tuple(kept)
        self._batch = self._batched(self._batch.owned)
        return drops

    def forget(self, task: Task) -> list[Action]:
        """An evaluation is begun anew of which `task` was a part: what it has left is forgotten."""
        drops = self._drops(self._drawn(task))
        self._begin()
        return drops
