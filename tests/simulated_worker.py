"""The fake workers of the simulator: what each holds, and everything that a real worker refuses. Decides nothing."""

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner.plan.residency import dropped_copies, shares_trained_copy
from realgraph.runtime.job.engine_loss import expendable_workers, shares_tokens
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.scheduler.program import ranks_of
from realgraph.runtime.wire.protocol import NOBODY, Evaluate, Execute, Prefetch, Reallocate, SampleSource, Submit


@dataclass
class SimulatedWorker:
    """One fake worker: keys of its store by sample, weights of its copies, groups still to make."""

    store: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    making: set[tuple[str, int]] = field(default_factory=set)  # generate call, group
    copies: dict[str, int] = field(default_factory=dict)  # call -> version
    kept: dict[int, int] = field(default_factory=dict)  # group that another makes -> version of its oldest known token
    unheard: set[int] = field(default_factory=set)  # groups that it goes on with: their abort was lost on its way

    def groups(self) -> set[int]:
        """The groups of which it stores anything."""
        return {group_of(sample) for samples in self.store.values() for sample in samples}

    def forget(self, group: int) -> None:
        """Everything that it stores of a group."""
        for held in self.store.values():
            held.difference_update([sample for sample in held if group_of(sample) == group])


class Workers:
    """All workers of a job. `versions`: role -> train calls that have ended; its owner counts them."""

    def __init__(self, job: Job, n_workers: int, versions: dict[str, int]) -> None:
        self.job, self.graph, self.versions = job, job.graph, versions
        self.options = job.plan.allocations
        self.layouts = {name: allocation.layout for name, allocation in job.plan.allocations.items()}
        self.trains = {
            role: [name for name, call in self.graph.calls.items() if isinstance(call, Train) and call.model == role]
            for role in versions
        }
        self.trainer = {
            name: self.trains[call.model][-1]
            for name, call in self.graph.calls.items()
            if isinstance(call, Generate | Inference) and call.model in versions
        }
        # call -> the calls whose common copy is given up after it: before its first use, too
        self.dropped = dropped_copies(self.graph, self.options, job.plan.staleness)
        # all other copies are loaded from the checkpoint
        loaded = {name: versions[self.graph.role(name)] for name in self.trainer if name not in self.dropped}
        self.all = {number: SimulatedWorker(copies=dict(loaded)) for number in range(n_workers)}
        self.gone: set[int] = set()
        self.joined: Counter[int] = Counter()  # that have been gone, by how often
        self.generate = next(iter(self.graph.generates), "")  # the call that makes the samples of a group
        self.fetched: dict[tuple[int, str, int], set[tuple[str, int]]] = {}  # (worker, call, step) -> (key, sample)
        self.engines = {name: {rank[0] for rank in ranks_of(self.layouts[name])} for name in self.graph.generates}

    def version_at(self, number: int, call: str) -> int:
        """The version of the weights that `call` would use on this worker."""
        role = self.graph.role(call)
        if role not in self.versions:
            return 0
        if isinstance(self.graph.calls[call], Train):
            return self.versions[role]
        if shares_trained_copy(self.graph.calls[call], self.options[call], self.options[self.trainer[call]]):
            return self.versions[role]
        return self.all[number].copies.get(call, -1)

    def trained_in_place(self, train: str) -> list[str]:
        """The generate calls whose very weights the call `train` changes."""
        role, readers = self.graph.role(train), list[str]()
        for name in self.graph.generates:
            call = self.graph.calls[name]
            if self.graph.role(name) == role and shares_trained_copy(
                call, self.options[name], self.options[self.trainer[name]]
            ):
                readers.append(name)
        return readers

    def give_up(self, number: int, call: str) -> None:
        """After a use of `call`: its copy is there no more, if it is one that is brought again."""
        for name in self.dropped.get(call, ()):
            self.all[number].copies.pop(name, None)

    def join(self, number: int) -> None:
        """A worker that was gone is there again, with the weights that a run begins with and nothing else."""
        worker = self.all[number]
        assert not worker.making and not worker.kept and not worker.groups()
        worker.copies = {self.generate: 0}
        self.gone.remove(number)
        self.joined[number] += 1

    # --- what a worker refuses ----------------------------------------------------------------------------------------

    def check_submit(self, number: int, command: Submit) -> None:
        """A worker without the engine or the prompts, with weights that are too old, or that has these requests
        already."""
        assert number in self.engines[command.call], f"worker {number} has no generation engine"
        if command.call == self.generate:
            assert not command.sources
        else:
            n = self.graph.samples_per_group
            samples = {sample for group in command.groups for sample in sample_ids(group, n)}
            self.check_sources(command.call, command.sources, samples)
        held = self.version_at(number, command.call)
        assert held >= command.version, f"{command.call} would run on version {held}, not {command.version}"
        self.check_keepers(number, command.groups, command.keepers)
        asked = {(command.call, group) for group in command.groups}
        assert not self.all[number].making & asked, "request ids in use already"

    def check_keepers(self, number: int, groups: Sequence[int], keepers: Sequence[int]) -> None:
        """Tokens that nobody keeps though others could, or that are kept where they are drawn or by who is gone."""
        others = self.engines[self.generate] - self.gone - {number}
        if shares_tokens(self.graph, self.job.plan):
            assert len(keepers) == len(groups)
            assert set(keepers) <= (others or {NOBODY})
        else:
            assert not keepers

    def keep(self, group: int, keeper: int, oldest: int) -> None:
        """From now on nobody but this worker keeps the tokens of a group."""
        self.forget_kept(group)
        if keeper != NOBODY:
            self.all[keeper].kept[group] = oldest

    def forget_kept(self, group: int) -> int | None:
        """Nobody keeps the tokens of a group any more; returns the version of the oldest, if anybody did."""
        found = [worker.kept.pop(group) for worker in self.all.values() if group in worker.kept]
        return min(found, default=None)

    def check_evaluate(self, number: int, command: Evaluate) -> None:
        """A worker without the engine, a job without an evaluation, other weights than those asked for."""
        assert self.job.eval is not None
        assert number in self.engines[self.generate], f"worker {number} has no generation engine"
        if command.checkpoint:
            assert command.checkpoint.endswith(f"step-{command.step:06d}")
            assert not self.all[number].making, "groups under way on an engine that reads a checkpoint"
            self.all[number].copies[self.generate] = command.version
        held = self.version_at(number, self.generate)
        assert held == command.version, f"the evaluation would run on version {held}, not {command.version}"

    def check_reallocate(self, number: int, command: Reallocate) -> None:
        """Owners that do not train the role, receivers without a copy, weights that are not those trained."""
        trainer = self.layouts[self.trainer[command.call]]
        assert command.owners == tuple(trainer.mesh.devices)
        assert number in command.owners or number in self.layouts[command.call].mesh.devices
        assert command.role == self.graph.role(command.call)
        assert command.version == self.versions[command.role], "a reallocation of stale or future weights"
        assert not self.gone.intersection(command.receivers)
        assert command.joined == {one: self.joined[one] for one in command.receivers if one in self.joined}

    def check_execute(self, number: int, command: Execute) -> None:
        """A call that is not for this worker, or of another version of the weights than it has."""
        call, role = self.graph.calls[command.call], self.graph.role(command.call)
        assert not isinstance(call, Generate), f"{command.call!r} is not for an engine"
        samples = {sample for share in command.shares for sample in share}
        fetched = self.fetched.pop((number, command.call, command.step), set())
        self.check_sources(command.call, command.sources, samples, fetched)
        if isinstance(call, Advantage | Inference):
            assert len(command.shares) == 1
        if not isinstance(call, Inference | Train):
            return
        assert number in self.layouts[command.call].mesh.devices
        held = self.version_at(number, command.call)
        assert held == command.version, f"{command.call} needs version {command.version}, worker {number} has {held}"
        if role in self.versions:
            trains = self.trains[role]
            step, ordinal = divmod(command.version, len(trains))
            assert step == command.step, f"{command.call} of step {command.step} on the weights of step {step}"
            assert ordinal == (trains.index(command.call) if isinstance(call, Train) else 0)

    def prefetch(self, number: int, command: Prefetch) -> None:
        """Inputs that a worker gathers for a call to come lie where the command says."""
        named = {(key, sample) for source in command.sources for key in source.keys for sample in source.samples}
        assert command.call in self.layouts or isinstance(self.graph.calls[command.call], Advantage | Function)
        assert number not in expendable_workers(self.graph, self.job.plan), "inputs of a step on an engine"
        assert {key for key, _ in named} <= set(self.graph.reads[command.call])
        for source in command.sources:
            self.check_source(command.call, source)
        self.fetched[number, command.call, command.step] = named

    def check_sources(
        self,
        call: str,
        sources: Sequence[SampleSource],
        samples: set[int],
        fetched: Container[tuple[str, int]] = (),
        *,
        read: bool = False,
    ) -> None:
        """Every key of every sample is named once, and lies where the command for `call` says, or was fetched. read: or
        lay there, on a worker that is, or has been, gone since."""
        wanted = {(key, sample) for key in self.graph.reads[call] for sample in samples}
        named: set[tuple[str, int]] = set()
        for source in sources:
            here = {(key, sample) for key in source.keys for sample in source.samples}
            assert not here & named
            named |= here
            if read and source.worker in self.gone | self.joined.keys():
                continue
            if not all(one in fetched for one in here):
                self.check_source(call, source)
        assert named == wanted

    def check_source(self, call: str, source: SampleSource) -> None:
        """A worker that is there, and has what is wanted of it."""
        assert source.worker not in self.gone, f"{call} would read from a worker that is gone"
        store = self.all[source.worker].store
        missing = [(key, sample) for key in source.keys for sample in source.samples if sample not in store[key]]
        assert not missing, f"{call}: not on worker {source.worker}: {missing}"
