"""Ways of a train call to take its micro-batches: recomputation, and the order of its pipeline stages. Prices nothing.

Interleaved stages hold groups of layers that are no neighbours. What reads such a copy in place passes the groups in
the same turns; a second train call of the role would need its states elsewhere, so such roles have none.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from msgspec.structs import replace

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.spec import Train
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.options.calls import microbatches_of
from realgraph.planner.options.couplings import train_calls
from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute, Schedule, Stages
from realgraph.planner.plan.option import PASSES, PLAIN, CallOption
from realgraph.planner.plan.stages import stage_totals, stages_of
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

ONE_DEVICE = DeviceMesh(0, 1)
CHUNK_COUNTS = (8, 4, 2)  # groups of layers of an interleaved stage
NO_BACKWARD_TEXT = "recompute, schedule and chunks belong to train calls: this one has no backward pass"


def passes_for(request: PlanRequest, call: str, plain: CallOption, cluster: Cluster) -> Iterator[CallOption]:
    """All that a train call may choose from under a layout, in micro-batches of so many tokens."""
    support = request.engine
    ways = support.recompute
    if request.role(call).gradient_checkpointing:
        ways = ("full",)
    counts = _chunk_counts(request, call, plain, cluster) if "interleaved" in support.schedules else ()
    for recompute in ways:
        yield replace(plain, recompute=recompute)
        for chunks in counts:
            yield replace(plain, recompute=recompute, schedule="interleaved", chunks=chunks)


def _chunk_counts(request: PlanRequest, call: str, plain: CallOption, cluster: Cluster) -> tuple[int, ...]:
    """Groups of layers of an interleaved stage: as many as there may be, since more take less memory and fill faster;
    where some of these would be single layers, as many as leave none; and as many as all have the same layers.

    None where a turn of micro-batches has more of them than there are samples, or stages have no two layers.
    """
    layout, pin = plain.layout, request.pins.get(call, Pin())
    if cluster.is_cpu and pin.schedule is None and pin.chunks is None:
        return ()  # no formula tells schedules apart there
    if layout.pp == 1:
        return ()
    least = least_layers(request.model(call), request.role(call).head, layout)
    if least < 2 or shared_states(request, call):
        return ()
    kind = request.graph.calls[call]
    steps = kind.minibatches if isinstance(kind, Train) else 1
    count = microbatches_of(request, call, replace(plain, schedule="interleaved"), cluster)
    if count * layout.dp * steps > request.workload.n_samples:
        return ()
    if pin.chunks:
        return (pin.chunks,) if 1 < pin.chunks <= least else ()
    fitting = [chunks for chunks in CHUNK_COUNTS if chunks <= least]
    plain_counts = counts_without_single_layers(request, call, layout)
    even = even_chunks(request.model(call).layers, layout.pp)
    return tuple(dict.fromkeys((*fitting[:1], *plain_counts[:1], *([even] if 1 < even <= least else []))))


def counts_without_single_layers(request: PlanRequest, call: str, layout: Layout) -> tuple[int, ...]:
    """CHUNK_COUNTS of stages of balanced layers under which no chunk is a single layer."""
    return _plain_counts(request.model(call), request.role(call).head, layout.pp)


@lru_cache(maxsize=1 << 10)
def even_chunks(layers: int, pp: int) -> int:
    """The most chunks of a stage, CHUNK_COUNTS[0] at most, that have the same number of layers, two or more; 1 where
    there are none. Megatron-LM interleaves in no other way."""
    fitting = (chunks for chunks in range(CHUNK_COUNTS[0], 1, -1) if 2 * pp * chunks <= layers)
    return next((chunks for chunks in fitting if layers % (pp * chunks) == 0), 1)


@lru_cache(maxsize=1 << 10)
def _plain_counts(model: ModelSpec, head: Head, pp: int) -> tuple[int, ...]:
    free = Layout(ONE_DEVICE, pp=pp)
    fitting = [chunks for chunks in CHUNK_COUNTS if chunks <= least_layers(model, head, free)]
    return tuple(chunks for chunks in fitting if not has_single_layers(stages_of(model, head, free, chunks)))


def has_single_layers(stages: Stages) -> bool:
    """True where a chunk is a single layer: any but the last, whose place the head takes."""
    layers: list[int] = [*chain.from_iterable(zip(*stages, strict=True))]
    return min(layers[:-1]) < 2


# --- what can't be ----------------------------------------------------------------------------------------------------


def pin_problems(request: PlanRequest, call: str, pin: Pin, where: Where) -> Iterator[Problem]:
    """Problems of the passes that a pin sets, whatever the search would choose."""
    if not isinstance(request.graph.calls[call], Train):
        if any(getattr(pin, name) is not None for name in PASSES):
            yield Problem(where, NO_BACKWARD_TEXT, "leave them out", "pin")
        return
    piped = pin.schedule not in (None, "1f1b") or (pin.chunks or 1) > 1
    schedule: Schedule = pin.schedule or ("interleaved" if piped else "1f1b")
    chunks = pin.chunks or (2 if schedule == "interleaved" else 1)
    stages = pin.pp or (min(2, request.model(call).layers) if piped else 1)
    asked = CallOption(Layout(ONE_DEVICE, pp=stages), 1, pin.recompute or "none", schedule, chunks)
    fault = schedule_fault(asked, request.model(call), request.role(call).head) or _shared_fault(request, call, asked)
    if fault:
        yield Problem(where, fault, "leave schedule and chunks out", "pin")
    elif piped and asked.schedule not in request.engine.schedules:
        what = f"no {asked.schedule}" if "pp" in request.engine.axes else "no"
        text = f"{request.engine.name} run {what} pipeline stages"
        yield Problem(where, text, "leave schedule and chunks out", "pin")
    if pin.recompute is not None:
        yield from _recompute_problems(request, call, pin.recompute, where)


def plan_problems(request: PlanRequest, call: str, candidate: CallOption, where: Where) -> Iterator[Problem]:
    """Problems of the passes of an allocation; where: its place in the plan's file."""
    if not isinstance(request.graph.calls[call], Train):
        if candidate.passes != PLAIN:
            yield Problem(where, NO_BACKWARD_TEXT, "leave them out", "plan_passes")
        return
    fault = schedule_fault(candidate, request.model(call), request.role(call).head) or _shared_fault(
        request, call, candidate
    )
    if fault:
        yield Problem(Where(where.file, path=f"{where.path}.schedule"), fault, "", "plan_passes")
    place = Where(where.file, path=f"{where.path}.recompute")
    yield from _recompute_problems(request, call, candidate.recompute, place)


def shared_states(request: PlanRequest, call: str) -> str:
    """Another train call of the same role, '' where there is none."""
    others = (name for name in train_calls(request, request.graph.role(call)) if name != call)
    return next(others, "")


def _shared_fault(request: PlanRequest, call: str, candidate: CallOption) -> str:
    other = shared_states(request, call)
    if not other or candidate.schedule != "interleaved":
        return ""
    return f"interleaved stages hold other layers than {other!r}, which trains the same role, would find there"


def schedule_fault(candidate: CallOption, model: ModelSpec, head: Head) -> str:
    """Reason why the stages of a model can't work in this order, '' where they can."""
    stages, layers = candidate.layout.pp, model.layers
    if candidate.schedule != "1f1b" and stages == 1:
        return f"schedule {candidate.schedule} needs pipeline stages: pp is 1"
    if candidate.schedule != "interleaved":
        return f"chunks {candidate.chunks} needs schedule interleaved" if candidate.chunks > 1 else ""
    if candidate.chunks < 2:
        return "an interleaved stage has two chunks or more"
    if candidate.chunks * stages > layers:
        return f"{candidate.chunks} chunks in each of {stages} stages are more than the {layers} layers"
    least = least_layers(model, head, candidate.layout)
    return f"{candidate.chunks} chunks are more than the {least} layers of a stage" if candidate.chunks > least else ""


def least_layers(model: ModelSpec, head: Head, layout: Layout) -> int:
    """Layers of the stage that has the fewest: it has no more chunks. The head takes the place of some."""
    return min(stage_totals(stages_of(model, head, layout)))


def _recompute_problems(request: PlanRequest, call: str, recompute: Recompute, where: Where) -> Iterator[Problem]:
    """Problems where the model's own setting, or what the engines can do, says otherwise."""
    setting = f"models.{request.graph.role(call)}.gradient_checkpointing"
    if request.role(call).gradient_checkpointing:
        if recompute != "full":
            yield Problem(
                where, f"recompute is {recompute}, but {setting} is true", f"set {setting} to false", "recompute"
            )
    elif recompute not in request.engine.recompute:
        text = f"recompute is {recompute}: {request.engine.name} know {', '.join(request.engine.recompute)} only"
        yield Problem(where, text, "choose one of these", "recompute")
