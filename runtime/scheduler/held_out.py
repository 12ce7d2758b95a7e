"""Evaluations part by part: held-out rows go through calls of the graph, and no weights change. Those of graphs that
generate nothing are by the loss, of as many rows at a time as groups of a step. Knows not when.
"""

import math
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.commands.actions import Action, Send
from realgraph.runtime.commands.loads import by_group
from realgraph.runtime.commands.tally import StepTally, TallyNumbers
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import group_of, held_out_group, sample_ids
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.groups.ledger import Group, GroupImage
from realgraph.runtime.scheduler.placement import Batch
from realgraph.runtime.scheduler.program import Program
from realgraph.runtime.scheduler.step_boundary import BEST_BY
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.metrics import Mean, Metric
from realgraph.runtime.wire.protocol import Drop, Load

LOAD = ""  # the call of a task that loads rows

Started = tuple[Task | None, list[Action]] | None  # a part and its commands; no task where weights are brought first


class HeldOutImage(Struct, frozen=True):
    """An evaluation in parts as plain data."""

    next_row: int
    groups: tuple[GroupImage, ...]
    owned: tuple[str, ...]  # calls whose keys lie with their own workers
    ended: tuple[str, ...]
    tally: int  # its number


class HeldOutRows:
    """The held-out rows in hand, if any, and the calls that work on them, one by one."""

    def __init__(self, job: Job, program: Program, steps: OpenSteps, devices: Devices, calls: Sequence[str]) -> None:
        self._job, self._program, self._steps, self._devices = job, program, steps, devices
        self._calls = tuple(calls)
        self._begin()

    def _begin(self) -> None:
        self._next_row = 0  # the first that is not there yet
        self._groups: tuple[Group, ...] = ()  # the rows in hand
        self._ended = set[str]()  # calls that have worked on them
        self._tally = StepTally()
        self._batch = self._batched()

    @property
    def _kept(self) -> Sequence[Group]:
        """The rows in hand that calls work on."""
        return self._groups

    def _batched(self, owned: Sequence[str] = ()) -> Batch:
        batch = Batch(0, self._kept, self._job.seed)
        for name in owned:
            batch.own(self._program.calls[name])
        return batch

    def image(self, tallies: TallyNumbers) -> HeldOutImage:
        """All that it has."""
        groups, ended = tuple([group.image for group in self._groups]), tuple(sorted(self._ended))
        return HeldOutImage(self._next_row, groups, self._batch.owned, ended, tallies.of(self._tally))

    def restore(self, image: HeldOutImage, tallies: Sequence[StepTally]) -> None:
        """Go on from an image."""
        self._next_row, self._ended, self._tally = image.next_row, set(image.ended), tallies[image.tally]
        self._groups = tuple([Group.restored(group) for group in image.groups])
        self._batch = self._batched(image.owned)

    @property
    def _next(self) -> str:
        """The call that is next; '' where all have ended, or no rows are left for them."""
        return next((name for name in self._calls if name not in self._ended and self._batch.ids), "")

    def _open(self, name: str, step: int) -> Task:
        """The task of a part."""
        return self._steps.tasks.open("evaluate", name, step, self._tally)

    def _arrived(self, task: Task, n: int) -> tuple[Group, ...]:
        """The groups, of `n` samples each, that lie with the workers which have loaded or drawn them. Raises
        UnexpectedReply."""
        found = []
        for owner, samples in task.loaded.items():
            expected = {number: sample_ids(number, n) for number in {group_of(one.sample): None for one in samples}}
            for number, own in by_group(samples, expected).items():
                group = Group(number, owner, 0)
                group.samples = self._program.with_places(own)
                found.append(group)
        return tuple(sorted(found, key=lambda group: group.id))

    def _bring(self, name: str, now: float) -> Started:
        """Bring weights that are behind."""
        commands = self._devices.reallocate(name, now)
        return None if commands is None else (None, commands)

    def _run(self, name: str, step: int, now: float, batches: float = 1.0) -> Started:
        """Start a call on the rows in hand, or bring its weights. batches: they are as many samples as in so many."""
        if self._devices.behind(name):
            return self._bring(name, now)
        call = self._program.calls[name]
        call = replace(call, minibatches=1, epochs=1, predicted_seconds=call.predicted_seconds * batches)
        task = self._open(name, step)
        return task, self._steps.run(task, call, self._batch, self._devices.versions, now, held_out=True)

    def _ran(self, task: Task) -> None:
        """A call has ended."""
        self._ended.add(task.call)
        self._devices.dropped.update(self._program.calls[task.call].dropped)

    def _drops(self, groups: Sequence[Group]) -> list[Action]:
        """Have all workers forget these rows."""
        numbers = tuple([group.id for group in groups])
        workers = set(self._program.owner_workers).union(*(self._program.calls[name].workers for name in self._calls))
        return [Send(worker, Drop(numbers)) for worker in sorted(workers)] if numbers else []


class HeldOutLoss(HeldOutRows):
    """The evaluation in hand, if any, of a graph that generates nothing. Its parts are the loading of rows, and then
    each call on them."""

    def __init__(self, job: Job, program: Program, steps: OpenSteps, devices: Devices) -> None:
        # all calls, in order: those first that leave samples out
        super().__init__(job, program, steps, devices, (*program.stream, *program.batched))

    @property
    def _kept(self) -> Sequence[Group]:
        """The rows in hand without those of which functions have left too much out."""
        return [group for group in self._groups if len(group.kept) >= self._program.least_samples]

    def start(self, step: int, n_rows: int, now: float) -> Started:
        """The next part, where nothing runs; None where it can't begin now."""
        return self._run(self._next, step, now) if self._groups else self._load(step, n_rows, now)

    def _load(self, step: int, n_rows: int, now: float) -> tuple[Task, list[Action]]:
        """Have the workers that load groups load the next rows."""
        rows = range(self._next_row, min(n_rows, self._next_row + self._job.batch.groups))
        self._next_row = rows.stop
        owners = self._program.owner_workers
        shares = {owner: tuple(map(held_out_group, rows[i :: len(owners)])) for i, owner in enumerate(owners)}
        task = self._open(LOAD, step)
        sends = [Send(owner, Load(groups, task.number)) for owner, groups in shares.items() if groups]
        self._steps.fly(task, [send.worker for send in sends], now, self._steps.longest_seconds)
        self._tally.n_skipped += len(rows)  # until they are there
        return task, [*sends]

    def ended(self, task: Task, n_rows: int) -> tuple[list[Action], dict[str, Metric] | None]:
        """A part has ended: what is forgotten after it, and the metrics where it was the last one."""
        if task.call == LOAD:
            self._groups = self._arrived(task, self._program.samples_per_group)
            self._tally.n_skipped -= len(self._groups)
            self._batch = self._batched()
        else:
            self._ran(task)
            self._leave_out(task.left_out)
        if self._next:
            return [], None
        drops = self._drops(self._groups)
        self._groups, self._ended = (), set()
        if self._next_row < n_rows:
            return drops, None
        metrics = self._metrics(n_rows)
        self._begin()
        return drops, metrics

    def _leave_out(self, left_out: Mapping[int, tuple[int, ...]]) -> None:
        """A function that runs before all calls of the batch has left samples out, by group."""
        for group in self._groups:
            group.left_out += left_out.get(group.id, ())
        if left_out:
            self._batch = self._batched()

    def _metrics(self, n_rows: int) -> dict[str, Metric]:
        """Metrics over all rows: of the first train call, and of others with their name before; `perplexity` where the
        loss has a mean negative log-likelihood; skipped: share of rows left out, which are too long."""
        trains = [name for name in self._calls if self._program.calls[name].kind == "train"]
        found: dict[str, Metric] = {}
        for name in trains:
            prefix = "" if name == trains[0] else f"{name}/"
            metrics = self._tally.metrics.get(name, {})
            if "nll" in metrics:
                metrics["perplexity"] = Mean(_exp(metrics["nll"].value))
            names = sorted(metrics, key=lambda key: (key not in BEST_BY, key != "loss"))  # that which judges first
            found |= {prefix + key: metrics[key] for key in names}
        return found | {"skipped": Mean(float(self._tally.n_skipped), float(n_rows))}


def _exp(nll: float) -> float:
    """Perplexity of a negative log-likelihood in nats a token; the largest float where it is beyond."""
    return math.exp(min(nll, math.log(sys.float_info.max)))
