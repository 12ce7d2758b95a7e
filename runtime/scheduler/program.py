"""A graph and its plan as the Scheduler reads them, worked out once: who runs each call, and after what.

Two classes of calls: generate, inference and train hold a mesh; functions and advantages are free. Of the free, those
that see one group at a time and need nothing of the whole batch are *streaming*: they start as soon as their group is
made, on the worker that made it (its owner). So do later generate calls of a group, on a worker of their own mesh.
Functions that need results of the whole batch run where training does, so that a step that has begun needs nothing that
only the owners of its groups have; without training, on these owners, who write the samples down.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.functions import KEEP
from realgraph.graphs.graph import INPUT, Graph
from realgraph.graphs.infer import is_own
from realgraph.graphs.keys import TOKENS, own_tokens
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, Train
from realgraph.planner.plan.axes import head_worker, rank_workers
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.residency import dropped_copies, shares_devices, shares_trained_copy
from realgraph.runtime.job.engine_loss import expendable_engines
from realgraph.runtime.job.evaluations import scoring_of
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import sample_ids
from realgraph.runtime.wire.protocol import Sample

GROUP_OWNER = ""  # owner of what lies with the worker that made the group
SHARED = -1  # the lengths of the tokens that were sampled
OF_GROUP = -2  # one sequence of the data a group, of a length that is not told

CallKind = Literal["generate", "stream", "late", "whole", "inference", "train"]


class CallPlan(Struct, frozen=True):
    """One call: on which workers it runs, after what, and where the keys lie that it reads."""

    name: str
    kind: CallKind  # late: a function per sample or group that needs a batch-wide call; whole: over the batch
    role: str
    reads: dict[str, tuple[str, ...]]  # owner (GROUP_OWNER, or the call whose workers hold the keys) -> keys
    after: tuple[str, ...]  # calls of the same step that come first
    workers: tuple[int, ...]  # all that run it; of stream, and of late where nothing trains: the groups' owners
    # its data-parallel ranks' workers, heads first; of late, where something trains: each of `workers`
    ranks: tuple[tuple[int, ...], ...] = ()
    needs: int = 0  # of stream and later generate calls: bit set of the streaming calls that come before it
    ordinal: int = 0  # of train: train calls of the role that come before it in a step
    trainer_workers: tuple[int, ...] = ()  # those of `trainer`
    trainer: str = ""  # the train call of its role, where it runs on another copy of the weights: reallocations; or ""
    dropped: tuple[str, ...] = ()  # calls whose common copy of the weights is given up after this one
    gives_way: bool = False  # of generate: what it holds is given up between two sessions
    whole_groups: bool = False  # a group's samples are compared, and so stay together
    minibatches: int = 1
    epochs: int = 1
    own: int = SHARED  # whose lengths its samples have: `Sample.own_tokens` at this place, SHARED or OF_GROUP
    per_sample: bool = True  # of generate: one sample, or more, beside each of the group's; else one for the group
    trained_on: bool = False  # of generate: a train call works on its samples
    timeout_seconds: float = 0.0  # of functions
    predicted_seconds: float = 0.0  # by the plan


class Judging(Struct, frozen=True):
    """The judging of held-out samples."""

    after: tuple[str, ...] = ()  # calls that work on the samples first, in order
    call: CallPlan | None = None  # reads what these have written; None where it reads nothing


class Program(Struct, frozen=True):
    """All calls of a graph, sorted by how the Scheduler starts them."""

    calls: dict[str, CallPlan]
    generate: str  # the generate call that makes the samples of a group, '' where there is none
    later: tuple[str, ...]  # the other generate calls
    stream: tuple[str, ...]  # streaming functions and later generate calls, in an order that respects their keys
    batched: tuple[str, ...]  # every other call but generate, likewise
    trains: dict[str, int]  # role -> train calls a step
    owner_workers: tuple[int, ...]  # the workers that make or load groups
    samples_per_group: int
    least_samples: int  # of a group that goes on, where a function leaves samples out
    function_processes: int  # subprocesses of each owner
    slack_seconds: float  # that functions may be late: a process may be busy with a sample whose group is not whole
    n_own_keys: int = 0  # lengths of a sample by own tokenizers of other roles; those of later calls' samples follow
    judging: Judging = Judging()  # of evaluations
    # Of `batched`: the calls that read what lies with the groups' owners, where these may be lost. No call of a step
    # starts before their workers have it.
    prefetched: tuple[str, ...] = ()

    @property
    def generates(self) -> tuple[str, ...]:
        """Every generate call, the one that makes the samples of a group first."""
        return (self.generate, *self.later) if self.generate else ()

    @property
    def paced(self) -> tuple[str, ...]:
        """The generate calls whose weights admission and staleness count: of trained roles, and on whose samples these
        are trained; none where what generates is frozen."""
        trained = [name for name in self.generates if self.trains_of(name)]
        return tuple([name for name in trained if self.calls[name].trained_on] or trained)

    def ids_of(self, groups: Sequence[int]) -> dict[int, Sequence[int]]:
        """The samples that groups have when they are made, by number."""
        return {number: sample_ids(number, self.samples_per_group) for number in groups}

    def with_places(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Samples with places for the lengths that later generate calls will tell."""
        places = (0,) * len(self._measured)
        return tuple([replace(one, own_tokens=(*one.own_tokens, *places)) if places else one for one in samples])

    def with_lengths(self, samples: Sequence[Sample], call: str, own: Sequence[Sample]) -> tuple[Sample, ...]:
        """Samples of a group with the lengths of those that a later generate call made beside them, if it did."""
        if call not in self._measured:
            return tuple(samples)
        place = self.n_own_keys + self._measured.index(call)
        pairs = zip(samples, own, strict=True)
        lengths = [(one, (*one.own_tokens[:place], o.n_tokens, *one.own_tokens[place + 1 :])) for one, o in pairs]
        return tuple([replace(one, own_tokens=own_tokens) for one, own_tokens in lengths])

    @property
    def _measured(self) -> tuple[str, ...]:
        """The later generate calls whose samples' lengths are told."""
        return tuple([name for name in self.later if self.calls[name].per_sample])

    @property
    def trainer(self) -> str:
        """The last train call of the role that makes the samples of groups; '' where that is frozen."""
        call = self.calls.get(self.generate)
        trains = [
            name for name, other in self.calls.items() if call and other.kind == "train" and other.role == call.role
        ]
        return trains[-1] if trains else ""

    def trains_of(self, generate: str) -> int:
        """Train calls a step of the role of a generate call; 0 where it is frozen, or there is no such call."""
        call = self.calls.get(generate)
        return self.trains.get(call.role, 0) if call else 0


def own_keys(graph: Graph) -> tuple[str, ...]:
    """The keys of samples as the own tokenizers of other roles cut them."""
    return tuple(dict.fromkeys(own_tokens(call.model) for call in graph.calls.values() if is_own(call)))


def ranks_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The workers of each data-parallel rank, its head worker first: it owns the rank's requests and outputs."""
    return tuple(rank_workers(layout, rank) for rank in range(layout.dp))


def make_program(job: Job, workers: Sequence[int]) -> Program:
    """Raises ConfigError where the Scheduler cannot run the graph, AssertionError where the plan does not fit it."""
    graph, plan = job.graph, job.plan
    generates = graph.generates
    kinds = _kinds(graph)
    _check(graph, plan, kinds, workers)
    layouts = {name: plan.allocations[name].layout for name, kind in kinds.items() if _holds(kind)}
    places = _places(graph, generates, layouts, workers)
    dropped = dropped_copies(graph, plan.allocations, plan.staleness)
    stream = tuple(name for name, kind in kinds.items() if kind == "stream" or name in generates[1:])
    lengths = _later_lengths(graph)
    calls: dict[str, CallPlan] = {}
    trains: dict[str, int] = {}
    for name, kind in kinds.items():
        call, role = graph.calls[name], graph.role(name)
        layout = layouts.get(name)
        where = tuple(layout.mesh.devices) if layout else places.of(kind)
        calls[name] = CallPlan(
            name=name,
            kind=kind,
            role=role,
            reads=_reads(graph, kinds, name),
            after=_after(graph, kinds, name),
            workers=where,
            ranks=ranks_of(layout) if layout else places.ranks(kind),
            needs=sum(1 << stream.index(p) for p in _producers(graph, name) if p in stream),
            ordinal=trains.get(role, 0) if kind == "train" else 0,
            trainer=(trainer := _trainer(graph, plan, name)),
            trainer_workers=tuple(layouts[trainer].mesh.devices) if trainer else (),
            dropped=dropped.get(name, ()),
            gives_way=kind == "generate" and len(generates) == 1 and _gives_way(plan, name),
            whole_groups=_whole_groups(call),
            minibatches=call.minibatches if isinstance(call, Train) else 1,
            epochs=call.epochs if isinstance(call, Train) else 1,
            own=_own(graph, name, lengths),
            per_sample=name == generates[0] or name in lengths if kind == "generate" else True,
            trained_on=any(kinds[n] == "train" and graph.sampler(n) == name for n in kinds) and kind == "generate",
            timeout_seconds=call.timeout_seconds if isinstance(call, Function) else 0.0,
            predicted_seconds=plan.allocations[name].seconds if layout else 0.0,
        )
        if kind == "train":
            trains[role] = trains.get(role, 0) + 1
    batched = tuple(name for name, kind in kinds.items() if kind not in ("stream", "generate"))
    return Program(
        calls=calls,
        generate=next(iter(generates), ""),
        later=generates[1:],
        stream=stream,
        batched=batched,
        trains=trains,
        owner_workers=places.owners,
        samples_per_group=graph.samples_per_group,
        least_samples=graph.least_samples,
        function_processes=job.function_processes(places.owners[0]),
        slack_seconds=job.runtime.min_deadline_seconds
        + max((calls[name].timeout_seconds for name in graph.sample_functions), default=0.0),
        n_own_keys=len(own_keys(graph)),
        judging=_judging(job, kinds),
        prefetched=_prefetched(job, kinds),
    )


def _judging(job: Job, kinds: Mapping[str, CallKind]) -> Judging:
    """See `Program.judging`."""
    if job.eval is None or not job.graph.generates:
        return Judging()
    scoring = scoring_of(job.graph, job.eval)
    reads = _places_of(job.graph, kinds, scoring.gathered)
    return Judging(scoring.on_devices, CallPlan(scoring.call, "late", "", reads, (), ()) if reads else None)


def _prefetched(job: Job, kinds: Mapping[str, CallKind]) -> tuple[str, ...]:
    """See `Program.prefetched`."""
    if not expendable_engines(job.graph, job.plan):
        return ()
    names = [name for name, kind in kinds.items() if kind not in ("generate", "stream")]
    return tuple([name for name in names if GROUP_OWNER in _reads(job.graph, kinds, name)])


def _later_lengths(graph: Graph) -> tuple[str, ...]:
    """The later generate calls that make a sample beside each of the group's, whose lengths are told, too."""
    levels = {name: graph.keys[f"{name}.{TOKENS}"].type.level for name in graph.generates[1:]}
    return tuple(name for name, level in levels.items() if level == "sample")


def _own(graph: Graph, name: str, lengths: Sequence[str]) -> int:
    """The place of the lengths of the samples that a call works on: see `CallPlan.own`."""
    call, keys = graph.calls[name], own_keys(graph)
    if graph.works_on_data(name):
        return OF_GROUP
    if is_own(call):
        return keys.index(own_tokens(call.model))
    works = isinstance(call, Inference | Advantage | Train)
    return len(keys) + lengths.index(graph.sampler(name)) if works and graph.sampler(name) in lengths else SHARED


def _whole_groups(call: ModelCall) -> bool:
    """See `CallPlan.whole_groups`."""
    if isinstance(call, Train):
        return any(term.needs_whole_groups for term in call.loss.terms.values())
    return isinstance(call, Function) and call.over == "group"


def _gives_way(plan: Plan, generate: str) -> bool:
    """True where nothing of the generate call stays on its devices between two sessions but weights that it keeps."""
    away = plan.allocations[generate].residency == "offloaded"
    return not plan.staleness and (away or shares_devices(plan.allocations, (generate,)))


def _holds(kind: CallKind) -> bool:
    return kind in ("generate", "inference", "train")


def _producers(graph: Graph, name: str) -> list[str]:
    """The calls of the same step whose keys `name` reads."""
    return [producer for producer in graph.producers(name) if producer not in (INPUT, name)]


def _kinds(graph: Graph) -> dict[str, CallKind]:
    kinds: dict[str, CallKind] = {}
    for name, call in graph.calls.items():
        match call:
            case Generate():
                kinds[name] = "generate"
            case Inference():
                kinds[name] = "inference"
            case Train():
                kinds[name] = "train"
            case Advantage():
                kinds[name] = "whole"
            case Function(over="batch"):
                kinds[name] = "whole"
            case Function():
                early = all(kinds[producer] in ("generate", "stream") for producer in _producers(graph, name))
                kinds[name] = "stream" if early else "late"
    return kinds


def _reads(graph: Graph, kinds: Mapping[str, CallKind], name: str) -> dict[str, tuple[str, ...]]:
    made_inside = [key for key in graph.reads[name] if key not in graph.keys or graph.keys[key].producer == name]
    return _places_of(graph, kinds, [key for key in graph.reads[name] if key not in made_inside])


def _places_of(graph: Graph, kinds: Mapping[str, CallKind], keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Keys by where they lie: see `CallPlan.reads`."""
    owners: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        producer = graph.keys[key].producer
        with_group = producer in (INPUT, *graph.generates[:1]) or _stays(kinds, kinds[producer])
        owners.setdefault(GROUP_OWNER if with_group else producer, []).append(key)
    return {owner: tuple(keys) for owner, keys in owners.items()}


def _stays(kinds: Mapping[str, CallKind], kind: CallKind) -> bool:
    """True of functions that run where the samples of a group are."""
    return kind == "stream" or (kind == "late" and "train" not in kinds.values())


def _after(graph: Graph, kinds: Mapping[str, CallKind], name: str) -> tuple[str, ...]:
    """Producers of the batch, and for train: what still needs the role's weights as they are in this step."""
    after = [producer for producer in _producers(graph, name) if kinds[producer] not in ("generate", "stream")]
    if kinds[name] == "train":
        role = graph.role(name)
        names = list(kinds)
        after += [other for other in names if kinds[other] == "inference" and graph.role(other) == role]
        earlier = names[: names.index(name)]
        after += [other for other in earlier if kinds[other] == "train" and graph.role(other) == role]
    return tuple(dict.fromkeys(after))


def _trainer(graph: Graph, plan: Plan, name: str) -> str:
    """The call whose weights have to be copied for `name`; '' where there is none, or the copy is the same."""
    call = graph.calls[name]
    if not isinstance(call, Generate | Inference):
        return ""
    for other in graph.calls:
        if isinstance(graph.calls[other], Train) and graph.role(other) == call.model:
            shared = shares_trained_copy(call, plan.allocations[name], plan.allocations[other])
            return "" if shared else other
    return ""


class _Places(Struct, frozen=True):
    """The workers that make or load groups; those of late functions that do not run there; the one of functions over
    the whole batch."""

    owners: tuple[int, ...]
    late: tuple[int, ...]
    whole: int

    def of(self, kind: CallKind) -> tuple[int, ...]:
        """The workers of functions of a kind."""
        return {"whole": (self.whole,), "late": self.late or self.owners}.get(kind, self.owners)

    def ranks(self, kind: CallKind) -> tuple[tuple[int, ...], ...]:
        """See `CallPlan.ranks`; of functions of a kind."""
        return tuple((worker,) for worker in self.late) if kind == "late" else ()


def _places(graph: Graph, generates: Sequence[str], layouts: Mapping[str, Layout], workers: Sequence[int]) -> _Places:
    trains = [name for name in layouts if isinstance(graph.calls[name], Train)]
    batch = layouts.get(next(iter([*trains, *generates, *layouts]), ""))
    source = layouts.get(next(iter([*generates, *trains, *layouts]), ""))
    owner_workers = tuple(workers)
    if source is not None:
        heads = tuple(head_worker(source, rank) for rank in range(source.dp))
        owner_workers = heads if generates else tuple(source.mesh.devices)
    whole = head_worker(batch, 0) if batch is not None else workers[0]
    return _Places(owner_workers, tuple(layouts[trains[0]].mesh.devices) if trains else (), whole)


def _check(graph: Graph, plan: Plan, kinds: Mapping[str, CallKind], workers: Sequence[int]) -> None:
    late = [name for name in kinds if KEEP in graph.writes[name] and kinds[name] != "stream"]
    if late:
        raise ConfigError(
            Problem(
                Where(path=f"$.calls.{name}"),
                f"{name!r} writes {KEEP!r}, but needs the whole batch: what it drops could not be replaced",
                "filter by a function per sample or group that reads only inputs, generated keys and such functions",
                "late-filter",
            )
            for name in late
        )
    for name, kind in kinds.items():
        if _holds(kind):
            assert name in plan.allocations, f"the plan has no allocation for {name!r}"
            for device in plan.allocations[name].layout.mesh.devices:
                assert device in workers, f"the plan puts {name!r} on device {device}, which has no worker"
                turns = [turn.call for turn in plan.orders.get(device, ())]
                assert turns.count(name) == 1, f"the order of device {device} has {turns.count(name)} turns of {name!r}"
