"""The steps in hand: what of each has ended, and how a call of a step is started. Knows no turns and no sessions."""

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

from msgspec import Struct

from realgraph.planner.costs.lengths import quantiles
from realgraph.runtime.commands.actions import Action, Checkpointed, Send, StepEnded
from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.commands.tasks import Task, TaskKind, Tasks
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.groups.ledger import Group
from realgraph.runtime.scheduler.placement import Batch, drawn, units_of
from realgraph.runtime.scheduler.program import OF_GROUP, CallPlan, Program
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Execute, Prefetch, SampleSource

Part = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[SampleSource, ...]]  # (workers, shares, sources)

LENGTH_QUANTILES = 32  # that a step tells of its samples' lengths


class StepImage(Struct, frozen=True):
    """A step in hand as plain data; its batch is made again of its groups."""

    step: int
    groups: tuple[int, ...]
    owned: tuple[str, ...]  # calls whose keys lie with their own workers
    started: tuple[str, ...]
    done: tuple[str, ...]
    tally: int  # its number
    prefetching: tuple[str, ...]


class OpenStepsImage(Struct, frozen=True):
    """The steps in hand as plain data."""

    completed: int
    newest_train: int
    carried: dict[str, dict[str, float]]
    open: tuple[StepImage, ...]


class _Step:
    """A step whose batch is there. started, done: calls. prefetching: those whose workers gather what engines have."""

    __slots__ = ("batch", "done", "prefetching", "started", "tally")

    def __init__(self, batch: Batch, tally: StepTally) -> None:
        self.batch, self.tally = batch, tally
        self.started: set[str] = set()
        self.done: set[str] = set()
        self.prefetching: set[str] = set()


class OpenSteps:
    """Steps from their batch to their end. `completed` steps have ended; `carried` numbers go from one to the next."""

    def __init__(self, job: Job, program: Program, tasks: Tasks, state: Checkpointed) -> None:
        self._job, self._program, self.tasks = job, program, tasks
        self.completed = state.step
        self.newest_train = state.step - 1  # the last step of which a train call has started
        self.carried: dict[str, dict[str, float]] = dict(state.carried)
        self.longest_seconds = max((call.predicted_seconds for call in program.calls.values()), default=0.0)
        self._open: dict[int, _Step] = {}

    def limit(self, predicted_seconds: float) -> float:
        """The longest that a call may take that is predicted to take so long."""
        return self._job.runtime.deadline(predicted_seconds)

    def open(self, kind: TaskKind, call: str, step: int) -> Task:
        """A task that belongs to no step in hand."""
        return self.tasks.open(kind, call, step, StepTally())

    def fly(self, task: Task, workers: Sequence[int], now: float, predicted_seconds: float) -> None:
        """`workers` have got the commands of `task`."""
        self.tasks.fly(task, workers, now, self.limit(predicted_seconds))

    def image(self, tallies: TallyNumbers) -> OpenStepsImage:
        """All that they have."""
        steps = [
            StepImage(
                number,
                tuple([group.id for group in step.batch.groups]),
                step.batch.owned,
                tuple(sorted(step.started)),
                tuple(sorted(step.done)),
                tallies.of(step.tally),
                tuple(sorted(step.prefetching)),
            )
            for number, step in self._open.items()
        ]
        carried = {call: dict(numbers) for call, numbers in self.carried.items()}
        return OpenStepsImage(self.completed, self.newest_train, carried, tuple(steps))

    def restore(self, image: OpenStepsImage, groups: Mapping[int, Group], tallies: Sequence[StepTally]) -> None:
        """Go on from an image; groups: the ledger's."""
        self.completed, self.newest_train, self.carried = image.completed, image.newest_train, dict(image.carried)
        for entry in image.open:
            members = [groups[number] for number in entry.groups]
            batch = Batch(entry.step, members, self._job.seed)
            for name in entry.owned:
                batch.own(self._program.calls[name])
            step = self._open[entry.step] = _Step(batch, tallies[entry.tally])
            step.started, step.done = set(entry.started), set(entry.done)
            step.prefetching = set(entry.prefetching)

    # --- the life of a step -------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, tally: StepTally, now: float) -> list[Action]:
        """The batch of the next step is there. The workers of its calls gather what may be lost with an engine."""
        step, actions = _Step(batch, tally), list[Action]()
        self._open[batch.step] = step
        for name in self._program.prefetched:
            task = self.tasks.open("prefetch", name, batch.step, tally)
            sends = [
                Send(worker, Prefetch(task.number, name, batch.step, sources))
                for members, sources in batch.prefetched(self._program.calls[name])
                for worker in (members if sources else ())
            ]
            actions += sends
            self.tasks.fly(task, [send.worker for send in sends], now, self.limit(self.longest_seconds))
            step.prefetching.add(name)
        return actions

    def prefetched(self, task: Task) -> None:
        """The workers of a call have what it reads of engines."""
        self._open[task.step].prefetching.discard(task.call)

    def ended(self, task: Task) -> None:
        """A call of a step has ended on all its workers."""
        self._open[task.step].done.add(task.call)
        if task.state:
            self.carried[task.call] = dict(task.state)

    def end(self) -> tuple[Batch, StepTally] | None:
        """Close the oldest step, if every call of it has ended."""
        step = self._open.get(self.completed)
        if step is None or len(step.done) < len(self._program.batched):
            return None
        del self._open[self.completed]
        self.completed += 1
        step.tally.add_groups([group.metrics for group in step.batch.groups])
        return step.batch, step.tally

    # --- a worker is lost ---------------------------------------------------------------------------------------------

    def _first_dependent(self, worker: int) -> int | None:
        """The first step that may still need groups of which `worker` has some: whose workers do not have yet what they
        read of engines."""
        dependent = [n for n, step in self._open.items() if any(group.owner == worker for group in step.batch.groups)]
        return min([number for number in dependent if self._open[number].prefetching], default=None)

    def _begun(self, number: int) -> bool:
        """True where a step can't be put back: a call on a mesh has started, one is under way, or has left numbers."""
        step = self._open[number]
        lasting = any(self._program.calls[name].role or name in self.carried for name in step.started)
        return lasting or step.started != step.done

    def can_lose(self, worker: int) -> bool:
        """True where no step needs what `worker` has: its workers have that, or it can be put back."""
        first = self._first_dependent(worker)
        return first is None or not any(self._begun(number) for number in self._open if number >= first)

    def put_back(self, worker: int) -> list[tuple[Batch, StepTally]]:
        """Forget the steps, from the first on that may need what `worker` has and has not begun."""
        first = self._first_dependent(worker)
        numbers = [number for number in sorted(self._open) if first is not None and number >= first]
        for task in [task for task in self.tasks.flying.values() if task.kind == "prefetch" and task.step in numbers]:
            self.tasks.give_up(task)
        steps = [self._open.pop(number) for number in numbers]
        return [(step.batch, step.tally) for step in steps]

    def check(self) -> None:
        """Assert what is always true."""
        for number, step in self._open.items():
            assert number >= self.completed
            assert step.done <= step.started <= set(self._program.batched)
            for call in step.started:
                assert set(self._program.calls[call].after) <= step.done, (call, number)

    # --- starting calls -----------------------------------------------------------------------------------------------

    def may_run(self, call: CallPlan, step: int, versions: Mapping[str, int]) -> bool:
        """True where `call` of `step` has its batch, its keys and the very version of the weights that it needs."""
        at = self._open.get(step)
        if at is None or at.prefetching or call.name in at.started or not at.done.issuperset(call.after):
            return False
        if call.role not in self._program.trains:
            return True
        return versions[call.role] == step * self._program.trains[call.role] + call.ordinal

    def start_free(self, barrier: int, now: float) -> list[Action]:
        """Start the functions and advantages whose keys are there. Calls over the batch wait at the barrier."""
        actions: list[Action] = []
        previous: _Step | None = None
        for number in sorted(self._open):
            step = self._open[number]
            for name in self._program.batched:
                call = self._program.calls[name]
                if call.role or step.prefetching or name in step.started or not step.done.issuperset(call.after):
                    continue
                if call.kind == "whole" and number > barrier:
                    continue
                if previous is not None and name not in previous.done:
                    continue
                actions += self.start(name, number, {}, now)[1]
            previous = step
        return actions

    def start(self, name: str, number: int, versions: Mapping[str, int], now: float) -> tuple[Task, list[Action]]:
        """The task of `name` of step `number`, and its commands to its workers."""
        call, step = self._program.calls[name], self._open[number]
        task = self.tasks.open("call", name, number, step.tally)
        actions = self.run(task, call, step.batch, versions, now)
        step.started.add(name)
        if call.kind == "train":
            self.newest_train = max(self.newest_train, number)
        return task, actions

    def run(
        self,
        task: Task,
        call: CallPlan,
        batch: Batch,
        versions: Mapping[str, int],
        now: float,
        *,
        held_out: bool = False,
    ) -> list[Action]:
        """The commands of `task`, by which `call` works on a batch: of a step, or of held-out rows."""
        match call.kind:
            case "inference" | "train":
                parts = _parts_of_mesh(call, batch)
                seconds = self.limit(call.predicted_seconds)
            case "late" | "stream":
                parts = _parts_of_units(call, batch)
                most = max(len(shares) for _, shares, _ in parts)
                queue = call.timeout_seconds * math.ceil(most / self._job.runtime.function_processes)
                seconds = queue + self._program.slack_seconds
            case "whole":
                parts = _parts_of_whole(call, batch)
                seconds = self.limit(self.longest_seconds) + call.timeout_seconds
            case "generate":
                raise AssertionError(f"{call.name!r} runs group by group, outside of steps")
            case _:
                assert_never(call.kind)
        version, state = versions.get(call.role, 0), self.carried.get(call.name, {})
        what = (task.number, call.name, task.step)
        actions: list[Action] = []
        workers: list[int] = []
        for members, shares, sources in parts:
            command = Execute(*what, shares, sources, version, state, seconds, held_out)
            for worker in members:
                actions.append(Send(worker, command))
                workers.append(worker)
        self.tasks.fly(task, workers, now, seconds)
        return actions


def _parts_of_mesh(call: CallPlan, batch: Batch) -> list[Part]:
    """One part per data-parallel rank: its share of every mini-batch."""
    if call.minibatches == 1:
        if call.kind == "inference":
            batch.own(call)
        parts = batch.whole_named(call)
        sources_of_ranks = batch.sources_of_ranks(call)
        return [
            (workers, (part,) * call.epochs, sources)
            for workers, part, sources in zip(call.ranks, parts, sources_of_ranks, strict=True)
        ]
    cuts = batch.minibatches(call)
    mesh: list[Part] = []
    for rank, workers in enumerate(call.ranks):
        shares = tuple([batch.named(cut[rank]) for cut in cuts])
        mesh.append((workers, shares, batch.sources(call, drawn(cuts, rank))))
    return mesh


def _parts_of_units(call: CallPlan, batch: Batch) -> list[Part]:
    """One part per worker that gets, or has, any samples, or groups."""
    if not call.ranks:
        return [
            ((owner,), units_of(batch.named(positions), call.whole_groups), batch.sources(call, positions))
            for owner, positions in sorted(batch.by_owner().items())
        ]
    batch.own(call)
    parts = zip(call.ranks, batch.whole_named(call), batch.sources_of_ranks(call), strict=True)
    return [(workers, units_of(samples, call.whole_groups), sources) for workers, samples, sources in parts if samples]


def _parts_of_whole(call: CallPlan, batch: Batch) -> list[Part]:
    """One part: the whole batch."""
    positions = range(len(batch.ids))
    batch.own(call)
    return [(call.workers, (tuple(batch.ids),), batch.sources(call, positions))]


def summary(batch: Batch, tally: StepTally, versions: Mapping[str, int], n_engines: int, program: Program) -> StepEnded:
    """The report of a step that has ended. n_engines: see StepEnded."""
    ages = [batch.step - group.oldest for group in batch.groups]
    lengths = [sample.n_new_tokens for group in batch.groups for sample in group.samples]
    n_new_tokens = sum(sample.n_new_tokens for group in batch.groups for sample in group.kept)
    tokens = {call.name: _tokens(call, batch, tally) for call in program.calls.values() if call.role}
    trained = {call.own: tokens[call.name] for call in program.calls.values() if call.kind == "train"}
    return StepEnded(
        step=batch.step,
        metrics=tally.metrics,
        spans=tally.spans,
        n_groups=len(batch.groups),
        n_samples=len(batch.ids),
        n_tokens=sum(batch.n_tokens),
        n_new_tokens=n_new_tokens,
        n_skipped=tally.n_skipped,
        n_dropped=tally.n_dropped,
        n_surplus=tally.n_surplus,
        n_left_out=sum(len(group.left_out) for group in batch.groups),
        age=Mean(float(sum(ages)), float(len(ages))),
        oldest=max(ages),
        versions=dict(versions),
        transcripts=tuple(tally.transcripts),
        lengths=quantiles(lengths, LENGTH_QUANTILES) if any(lengths) else (),
        age_p95=sorted(ages)[math.ceil(0.95 * len(ages)) - 1],
        n_engines=n_engines,
        tokens=tokens,
        n_trained_tokens=sum(trained.values()),
    )


def _tokens(call: CallPlan, batch: Batch, tally: StepTally) -> int:
    """See StepEnded. How long the data's own sequences are only those know that train on them."""
    if call.kind == "generate":
        made = [group.metrics[call.name]["new_tokens"].total for group in batch.groups if call.name in group.metrics]
        return round(sum(made))
    if call.own == OF_GROUP:
        trained = tally.metrics.get(call.name, {}).get("n_tokens")
        return round(trained.total) if isinstance(trained, Mean) else 0
    return sum(batch.lengths(call.own))
