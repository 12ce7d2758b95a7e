"""What the Scheduler needs to know of a graph and its plan, worked out once: who runs each call, and after what.

Two classes of work: generate, inference and train hold a mesh; functions and advantages are free. Of the free, those
that see one group at a time and need nothing of the whole batch are *streaming*: they start as soon as their group is
made, on the worker that made it (its home).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import INPUT, Graph
from realgraph.graphs.infer import is_own
from realgraph.graphs.keys import own_tokens
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.residency import shares_trained_copy
from realgraph.runtime.job.job import Job

HOME = ""  # owner of what a group's home worker holds
KEEP = "keep"  # the group-level key that filters
SHARED = -1  # the lengths of the tokens that were sampled

Work = Literal["generate", "stream", "late", "whole", "inference", "train"]


class CallPlan(Struct, frozen=True):
    """One call. `work`: late = a function per sample or group that needs a batch-wide call; whole = over the batch.

    reads: owner (HOME, or the call whose workers hold the keys) -> keys. after: calls of the same step that come first.
    workers: all that run it (of stream and late: the groups' homes); ranks: its data-parallel ranks' workers.
    needs: bit set of the streaming functions that come before this streaming function. ordinal, of train: how many
    train calls of the role come before it in a step. trainer, owners: the call that trains this call's role and its
    workers, where this call runs on another copy of the weights and so needs reallocations; else empty. own: whose
    lengths its samples have: those of `Sample.own_tokens` at this place, or the shared ones.
    """

    name: str
    work: Work
    role: str
    reads: dict[str, tuple[str, ...]]
    after: tuple[str, ...]
    workers: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...] = ()
    needs: int = 0
    ordinal: int = 0
    owners: tuple[int, ...] = ()
    trainer: str = ""
    per_group: bool = False
    whole_groups: bool = False
    minibatches: int = 1
    epochs: int = 1
    own: int = SHARED
    timeout_seconds: float = 0.0
    predicted_seconds: float = 0.0


class Program(Struct, frozen=True):
    """stream: in an order that respects their keys. batched: every other call but generate, likewise.

    trains: role -> train calls a step. homes: the workers that make or load groups.
    """

    calls: dict[str, CallPlan]
    generate: str
    stream: tuple[str, ...]
    batched: tuple[str, ...]
    trains: dict[str, int]
    homes: tuple[int, ...]
    samples_per_group: int

    @property
    def trains_of_generator(self) -> int:
        """Train calls a step of the role that generates; 0 where it is frozen, or nothing generates."""
        call = self.calls.get(self.generate)
        return self.trains.get(call.role, 0) if call else 0


def own_keys(graph: Graph) -> tuple[str, ...]:
    """The keys of samples as the own tokenizers of other roles cut them."""
    return tuple(dict.fromkeys(own_tokens(call.model) for call in graph.calls.values() if is_own(call)))


def ranks_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The workers of each data-parallel rank: dp is the outermost axis of the mesh."""
    size = layout.tp * layout.pp * layout.cp
    first = layout.mesh.first
    return tuple(tuple(range(first + rank * size, first + (rank + 1) * size)) for rank in range(layout.dp))


def make_program(job: Job, workers: Sequence[int]) -> Program:
    """Raises ConfigError where the Scheduler cannot run the graph, AssertionError where the plan does not fit it."""
    graph, plan = job.graph, job.plan
    generates = [name for name, call in graph.calls.items() if isinstance(call, Generate)]
    assert len(generates) <= 1, f"several generate calls over the same groups: {', '.join(generates)}"
    works = _works(graph)
    _check(graph, plan, works, workers)
    layouts = {name: plan.allocations[name].layout for name, work in works.items() if _holds(work)}
    homes, batch_worker = _places(graph, generates, layouts, workers)
    stream = tuple(name for name, work in works.items() if work == "stream")
    calls: dict[str, CallPlan] = {}
    trains: dict[str, int] = {}
    for name, work in works.items():
        call, role = graph.calls[name], graph.role(name)
        layout = layouts.get(name)
        where = tuple(layout.mesh.devices) if layout else (batch_worker,) if work == "whole" else homes
        calls[name] = CallPlan(
            name=name,
            work=work,
            role=role,
            reads=_reads(graph, works, name),
            after=_after(graph, works, name),
            workers=where,
            ranks=ranks_of(layout) if layout else (),
            needs=sum(1 << stream.index(p) for p in _producers(graph, name) if works.get(p) == "stream"),
            ordinal=trains.get(role, 0) if work == "train" else 0,
            trainer=(trainer := _trainer(graph, layouts, name)),
            owners=tuple(layouts[trainer].mesh.devices) if trainer else (),
            per_group=isinstance(call, Function) and call.over == "group",
            whole_groups=isinstance(call, Train) and any(term.needs_whole_groups for term in call.loss.terms.values()),
            minibatches=call.minibatches if isinstance(call, Train) else 1,
            epochs=call.epochs if isinstance(call, Train) else 1,
            own=own_keys(graph).index(own_tokens(call.model)) if is_own(call) else SHARED,
            timeout_seconds=call.timeout_seconds if isinstance(call, Function) else 0.0,
            predicted_seconds=plan.allocations[name].seconds if layout else 0.0,
        )
        if work == "train":
            trains[role] = trains.get(role, 0) + 1
    batched = tuple(name for name, work in works.items() if work not in ("stream", "generate"))
    generate = generates[0] if generates else ""
    return Program(calls, generate, stream, batched, trains, homes, graph.samples_per_group)


def _holds(work: Work) -> bool:
    return work in ("generate", "inference", "train")


def _producers(graph: Graph, name: str) -> list[str]:
    """The calls of the same step whose keys `name` reads."""
    keys = [graph.keys[key] for key in graph.reads[name] if key in graph.keys]
    return list(dict.fromkeys(key.producer for key in keys if key.producer not in (INPUT, name)))


def _works(graph: Graph) -> dict[str, Work]:
    works: dict[str, Work] = {}
    for name, call in graph.calls.items():
        match call:
            case Generate():
                works[name] = "generate"
            case Inference():
                works[name] = "inference"
            case Train():
                works[name] = "train"
            case Advantage():
                works[name] = "whole"
            case Function(over="batch"):
                works[name] = "whole"
            case Function():
                early = all(works[producer] in ("generate", "stream") for producer in _producers(graph, name))
                works[name] = "stream" if early else "late"
    return works


def _reads(graph: Graph, works: Mapping[str, Work], name: str) -> dict[str, tuple[str, ...]]:
    owners: dict[str, list[str]] = {}
    for key in dict.fromkeys(graph.reads[name]):
        if key not in graph.keys:
            continue  # made inside the call itself
        producer = graph.keys[key].producer
        if producer == name:
            continue
        at_home = producer == INPUT or works[producer] in ("generate", "stream", "late")
        owners.setdefault(HOME if at_home else producer, []).append(key)
    return {owner: tuple(keys) for owner, keys in owners.items()}


def _after(graph: Graph, works: Mapping[str, Work], name: str) -> tuple[str, ...]:
    """Producers of the batch, and for train: what still needs the role's weights as they are in this step."""
    after = [producer for producer in _producers(graph, name) if works[producer] not in ("generate", "stream")]
    if works[name] == "train":
        role = graph.role(name)
        names = list(works)
        after += [other for other in names if works[other] == "inference" and graph.role(other) == role]
        earlier = names[: names.index(name)]
        after += [other for other in earlier if works[other] == "train" and graph.role(other) == role]
    return tuple(dict.fromkeys(after))


def _trainer(graph: Graph, layouts: Mapping[str, Layout], name: str) -> str:
    """The call whose weights have to be copied for `name`; '' where there is none, or the copy is the same."""
    call = graph.calls[name]
    if not isinstance(call, Generate | Inference):
        return ""
    for other, trained in layouts.items():
        if isinstance(graph.calls[other], Train) and graph.role(other) == call.model:
            return "" if shares_trained_copy(call, layouts[name], trained) else other
    return ""


def _places(
    graph: Graph, generates: Sequence[str], layouts: Mapping[str, Layout], workers: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """(the workers that make or load groups, the one that runs calls over the whole batch)."""
    trains = [name for name in layouts if isinstance(graph.calls[name], Train)]
    batch = layouts.get(next(iter([*trains, *generates, *layouts]), ""))
    source = layouts.get(next(iter([*generates, *trains, *layouts]), ""))
    homes = tuple(workers)
    if source is not None:
        homes = tuple(rank[0] for rank in ranks_of(source)) if generates else tuple(source.mesh.devices)
    return homes, batch.mesh.first if batch is not None else workers[0]


def _check(graph: Graph, plan: Plan, works: Mapping[str, Work], workers: Sequence[int]) -> None:
    late = [name for name in works if KEEP in graph.writes[name] and works[name] != "stream"]
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
    for name, work in works.items():
        if _holds(work):
            assert name in plan.allocations, f"the plan has no allocation for {name!r}"
            for device in plan.allocations[name].layout.mesh.devices:
                assert device in workers, f"the plan puts {name!r} on device {device}, which has no worker"
                turns = [turn.call for turn in plan.orders.get(device, ())]
                assert turns.count(name) == 1, f"the order of device {device} has {turns.count(name)} turns of {name!r}"
