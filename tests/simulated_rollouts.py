"""Groups as simulated workers make them: begun, gone on with, skipped, aborted, filtered. Knows neither the Scheduler
nor the calls that run on meshes."""

import heapq
import random
from collections.abc import Container

import msgspec

from realgraph.graphs.graph import INPUT
from realgraph.graphs.spec import Inference, Train
from realgraph.runtime.commands.actions import Event
from realgraph.runtime.job.evaluations import scoring_of
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.scheduler.program import ranks_of
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Evaluate, Execute, Generated, Load, Loaded, Sample, Submit
from tests.shapes import Shape
from tests.simulated_tasks import SimulatedTasks
from tests.simulated_worker import Workers

N_EVAL_ROWS = 5


class SimulatedRollouts(SimulatedTasks):
    """Only the shape's seed decides what is kept and skipped. keep: the share that the filter leaves in."""

    def __init__(self, shape: Shape, rng: random.Random, contract: Workers, keep: float) -> None:
        super().__init__(shape, rng)
        self.keep, self.contract = keep, contract
        self.job, self.graph, self.workers = contract.job, contract.graph, contract.all
        self.submitted: set[tuple[str, int]] = set()
        self.final: dict[int, str] = {}
        self.unmade: set[int] = set()  # groups that were aborted before they were made
        self.n_crossed = 0  # groups whose answer and abort have crossed
        self.oldest: dict[int, int] = {}  # group -> version of its oldest token
        self.maker: dict[int, int] = {}  # group -> the worker that makes it
        self.n_moved = 0  # groups that were begun again
        self.judged: list[int] = []  # held-out samples of the evaluation in hand, by engines or heads of train calls

    # --- making -------------------------------------------------------------------------------------------------------

    def make(self, number: int, groups: tuple[int, ...], version: int, call: str) -> None:
        """Generate or load groups; they come back in random batches."""
        for group in groups:
            assert (call, group) not in self.submitted, f"group {group} was handed out twice"
            self.submitted.add((call, group))
        self.workers[number].making.update((call, group) for group in groups)
        left = list(groups)
        rng = random.Random(f"{self.shape.seed} {groups}") if self.steady else self.rng
        rng.shuffle(left)
        while left:
            size = rng.randint(1, len(left))
            part, left = left[:size], left[size:]
            self.plan_groups(number, part, version, call)

    def begin(self, number: int, command: Submit) -> None:
        """A worker goes on with groups whose tokens it keeps, or begins them anew; others keep them from now on."""
        if command.call != self.contract.generate:
            return
        for index, group in enumerate(command.groups):
            kept = self.workers[number].kept.pop(group, command.version)
            self.maker[group] = number
            self.n_moved += kept < command.version or group in self.oldest
            # some message of its tokens may have been lost with their engine
            self.oldest[group] = self.rng.choice([kept, command.version]) if not self.steady else kept
            if command.keepers:
                self.contract.keep(group, command.keepers[index], self.oldest[group])

    def plan_groups(self, number: int, part: list[int], version: int, call: str) -> None:
        worker, n, later = self.workers[number], self.graph.samples_per_group, call != self.contract.generate
        good = tuple(group for group in part if self.shape.lot(group, f"skip{call if later else ''}") >= 0.05)
        skipped = tuple(group for group in part if group not in good)
        of_group = later and self.graph.keys[f"{call}.tokens"].type.level == "group"
        samples = []
        for sample in [sample for group in good for sample in sample_ids(group, 1 if of_group else n)]:
            length = self.shape.length(sample, call if later else "")
            oldest = version if later else self.oldest.get(group_of(sample), version)
            samples.append(Sample(sample, length, length // 2, oldest=oldest))
        if not later:
            self.rng.shuffle(samples)

        def made() -> None:
            asked = {group for of, group in worker.making if of == call}
            worker.making.difference_update((call, group) for group in part)
            for group in skipped:
                self.contract.forget_kept(group)  # it has no token
                if group in asked:  # what was aborted meanwhile stays as it is
                    self.discard(group)
            for key in self.graph.keys.values():
                if key.producer == call or (key.producer == INPUT and not later):
                    made = [group for group in good if group not in self.unmade]
                    worker.store[key.name].update(sample for group in made for sample in sample_ids(group, n))

        ready = tuple(samples)
        if call:
            event: Event = Generated(number, call, good, ready, {"len": Mean(1.0)}, skipped, self.now, self.now + 1)
        else:
            event = Loaded(number, good, ready, skipped)
        slow = 10 if self.shape.lot(min(part), "slow") < self.shape.slow else 1
        self.plan(event, 3 * slow * self.seconds(f"groups {part}{call if later else ''}"), made)

    def stand_still(self, number: int, seconds: float) -> None:
        """Delay what this worker is making."""
        for planned in self.events:
            if isinstance(planned.event, Generated) and planned.event.worker == number:
                planned.time += seconds
        heapq.heapify(self.events)

    def check_drained(self, number: int, call: str) -> None:
        """No sample is under way when the weights that generate change, where new ones wait for those. What other
        workers were told to stop is not under way, though they did not hear it: they do not hear of new weights either.
        """
        if self.shape.interrupt != "wait" or not self.shape.kept:
            return
        for other, worker in self.workers.items():
            unheard = worker.unheard if other != number else ()
            making = {group for name, group in worker.making if name == call}
            assert making.issubset(unheard), f"samples of two versions: groups {making} of worker {other}"

    # --- groups that are not trained ----------------------------------------------------------------------------------

    def abort(self, number: int, groups: set[int], live: Container[int]) -> None:
        """A worker stops making groups: those that the Scheduler has discarded, and at a stop all. Some answers have
        been sent already. live: the groups that are not discarded."""
        worker = self.workers[number]
        worker.making = {(call, group) for call, group in worker.making if group not in groups}
        self.final |= dict.fromkeys([group for group in groups if group not in live], "discarded")
        for group in groups:
            self.contract.forget_kept(group)
        left = []
        for planned in self.events:
            event = planned.event
            if isinstance(event, Generated) and event.worker == number and groups & {*event.groups, *event.skipped}:
                if planned.before is None:  # made, and the answer is on its way
                    self.n_crossed += 1
                elif not self.steady and self.rng.random() < 0.3:
                    planned.time = self.now
                    self.n_crossed += 1
                else:
                    planned.event = event = self.without(event, groups)
                    if not event.groups and not event.skipped:
                        continue
            left.append(planned)
        self.events = left
        heapq.heapify(self.events)

    def without(self, event: Generated, groups: set[int]) -> Generated:
        """The answer of a worker as it is about the other groups."""
        self.unmade |= groups & {*event.groups, *event.skipped}
        return msgspec.structs.replace(
            event,
            groups=tuple(group for group in event.groups if group not in groups),
            skipped=tuple(group for group in event.skipped if group not in groups),
            samples=tuple(one for one in event.samples if group_of(one.sample) not in groups),
        )

    def discard(self, group: int) -> None:
        """A filter may leave out what a later generate call has skipped, and the other way round."""
        several = len(self.graph.generates) > 1
        assert self.final.get(group) == "discarded" if several and group in self.final else group not in self.final
        self.final[group] = "discarded"

    def left_out(self, group: int) -> tuple[int, ...]:
        """The samples that the filter leaves out: of a whole group, or each for itself."""
        samples = tuple(sample_ids(group, self.graph.samples_per_group))
        if self.graph.keys["keep"].type.level == "group":
            return () if self.shape.lot(group, "keep") < self.keep else samples
        return tuple(sample for sample in samples if self.shape.lot(sample, "keep") >= self.keep)

    def left(self, group: int) -> list[int]:
        """The samples of a group that are trained on."""
        gone = self.left_out(group) if "keep" in self.graph.keys else ()
        return [sample for sample in sample_ids(group, self.graph.samples_per_group) if sample not in gone]

    # --- evaluations --------------------------------------------------------------------------------------------------

    def evaluate_part(self, number: int, command: Evaluate) -> float:
        """Draw or judge held-out samples, where other calls work on them in between. Returns the seconds."""
        named = {sample for source in command.sources for sample in source.samples}
        if command.part == "judge":
            for source in command.sources:
                self.contract.check_source("", source)
            assert named <= {sample for samples in self.workers[number].store.values() for sample in samples}
            self.judged += sorted(named)
            reward = {"reward": Mean(float(len(named)), float(len(named)))} if named else {}
            return self.answer(number, command.task, "evaluate", None, reward)
        if command.sources:
            assert self.contract.version_at(number, command.call) >= command.version
            self.contract.check_sources(command.call, command.sources, named)
            groups = [group for group in {group_of(one) for one in named} if not self._too_long(group, command.call)]
            name, samples = command.call, [one for one in sorted(named) if group_of(one) in groups]
        else:
            self.contract.check_evaluate(number, command)
            assert self.job.eval is not None
            groups = [-1 - row for row in command.rows if not self._too_long(-1 - row)]
            name, samples = self.contract.generate, [s for g in groups for s in sample_ids(g, self.job.eval.n)]
        if name != self.contract.generate and self.graph.keys[f"{name}.text"].type.level == "group":
            samples = [sample_ids(group, 1)[0] for group in groups]

        def made() -> None:
            inputs = [key.name for key in self.graph.inputs] if name == self.contract.generate else []
            for key in (*inputs, *self.graph.writes[name]):
                self.workers[number].store[key].update(samples)

        loaded = tuple(Sample(sample, self.shape.length(sample)) for sample in samples)
        return self.answer(number, command.task, "evaluate", made, loaded=loaded)

    def _too_long(self, group: int, call: str = "") -> bool:
        """True where a held-out prompt is left out."""
        return self.shape.lot(group, f"skip{call}") < 0.05

    def load_held_out(self, number: int, command: Load) -> None:
        """Rows that are too long are left out."""
        good = [group for group in command.groups if not self._too_long(group)]
        samples = [sample for group in good for sample in sample_ids(group, self.graph.samples_per_group)]
        assert command.task is not None

        def made() -> None:
            for key in self.graph.inputs:
                self.workers[number].store[key.name].update(samples)

        loaded = tuple(Sample(sample, self.shape.length(sample)) for sample in samples)
        self.answer(number, command.task, "evaluate", made, loaded=loaded)

    def evaluate_loss(self, number: int, command: Execute) -> None:
        """A call on held-out rows: it changes no weights, and a train call sees each sample once."""
        call, samples = self.graph.calls[command.call], {sample for share in command.shares for sample in share}
        assert all(group_of(sample) < 0 for sample in samples)
        self.contract.check_execute(number, command)
        metrics, left_out = dict[str, Mean](), dict[int, tuple[int, ...]]()
        if isinstance(call, Inference | Train):
            self.hold(number, command.task)
        if isinstance(call, Train):
            assert len(command.shares) == 1
            head = number in {rank[0] for rank in ranks_of(self.contract.layouts[command.call])}
            self.judged += sorted(samples) if head else []
            metrics = {"loss": Mean(float(len(samples)), float(len(samples)))} if head and samples else {}
        if "keep" in self.graph.writes[command.call]:
            left_out = {group: self.left_out(group) for group in {group_of(sample) for sample in samples}}

        def ended() -> None:
            self.contract.check_sources(command.call, command.sources, samples, read=True)
            for key in self.graph.writes[command.call]:
                self.workers[number].store[key].update(samples)
            if isinstance(call, Inference):
                self.contract.give_up(number, command.call)

        self.answer(number, command.task, "evaluate", ended, metrics, left_out, command.step)

    def check_evaluated(self) -> None:
        """An evaluation has had each row once in every train call, or judged each sample once, and nothing is left."""
        assert not any(group < 0 for worker in self.workers.values() for group in worker.groups())
        good = [-1 - row for row in range(N_EVAL_ROWS) if not self._too_long(-1 - row)]
        if self.contract.generate:
            assert self.job.eval is not None
            scoring = scoring_of(self.graph, self.job.eval)
            later = [name for name in scoring.on_devices if name in self.graph.generates]
            left = [group for group in good if not any(self._too_long(group, name) for name in later)]
            samples = [sample for group in left for sample in sample_ids(group, self.job.eval.n)]
            assert sorted(self.judged) == sorted(samples if scoring.gathered else [])
            self.judged.clear()
            return
        rows = [sample for group in good for sample in self.left(group)]
        n_trains = sum(isinstance(call, Train) for call in self.graph.calls.values())
        assert sorted(self.judged) == sorted(rows * n_trains)
        self.judged.clear()
