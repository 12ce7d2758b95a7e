"""Bytes of a rehearsed run: what workers counted, beside the least that the plan's layouts need, and the planner's
memory terms for the toy models."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.memory.memory import Footprint, cuts_model, expert_copies, frozen_copy, trained_copy
from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.plan import Plan, reallocation_node
from realgraph.planner.plan.residency import copies, reallocations
from realgraph.planner.request.request import PlanRequest
from realgraph.rehearsal.observer import StepsSeen
from realgraph.runtime.parallel.cuts import is_expert, is_fixed, layout_boxes
from realgraph.runtime.parallel.routes import cells_by_tensors

TERMS = ("weights", "gradients", "optimizer")
TOLERANCE = 0.02  # of device bytes: the planner divides norms over tensor-parallel ranks, which hold them whole
SCORE_HEAD = "score.weight"  # of roles without a vocabulary: no checkpoint of a language model has it

Shapes = Mapping[str, tuple[int, ...]]  # of a model's whole tensors, by name


class Counted(Struct, frozen=True):
    """Bytes of one kind of one call. predicted: None where nothing predicts them. tolerance: relative."""

    call: str
    what: str
    counted: int
    predicted: int | None = None
    tolerance: float = 0.0

    @property
    def alike(self) -> bool:
        """True where they are as predicted, or nothing is."""
        return self.predicted is None or abs(self.counted - self.predicted) <= self.tolerance * self.predicted


def counted_bytes(seen: StepsSeen, request: PlanRequest, plan: Plan) -> tuple[Counted, ...]:
    """All bytes that the workers of a run have counted, by call: those that came to them, and those they held."""
    return (*_moved(seen, request, plan), *_resident(seen, request, plan))


def _moved(seen: StepsSeen, request: PlanRequest, plan: Plan) -> Iterator[Counted]:
    """Samples that a call's workers had of others, for which the plan has no number; and new weights, of which the two
    layouts say the least that must come: to a worker what it lacks, to a node each element once."""
    shapes: dict[str, Shapes] = {}
    for call, came in sorted(seen.arrived.items()):
        if call in request.graph.calls:
            yield Counted(call, "samples moved", came.near + came.far)
    trains = reallocations(request.graph, plan.allocations)
    for call, train in trains.items():
        times = seen.times.get(reallocation_node(call), 0)
        arrived = seen.arrived.get(reallocation_node(call))
        if arrived is None:
            continue
        role = request.graph.role(train)
        if role not in shapes:
            shapes[role] = toy_shapes(request, role)
        layouts = plan.allocations[train].layout, plan.allocations[call].layout
        lacked, between = _least(request, call, shapes[role], layouts)
        yield Counted(call, "weights moved", arrived.near + arrived.far, times * lacked)
        if request.cluster.nodes > 1 or request.cluster.more:
            yield Counted(call, "weights between nodes", arrived.far, times * between)


def _least(request: PlanRequest, call: str, shapes: Shapes, layouts: tuple[Layout, Layout]) -> tuple[int, int]:
    """Bytes that the workers of the second layout lack beside those of the first, and that their nodes lack."""
    model = request.model(call), request.role(call).head
    present, wanted = (layout_boxes(shapes, layout, model) for layout in layouts)
    node_of, lacked, between = request.cluster.node_of, 0, 0
    for tensors, cells in cells_by_tensors(present, wanted):
        for cell in cells:
            nodes = {node_of(worker) for worker in cell.lacking} - {node_of(worker) for worker in cell.holders}
            lacked += len(tensors) * cell.box.numel * len(cell.lacking)
            between += len(tensors) * cell.box.numel * len(nodes)
    return 8 * lacked, 8 * between  # float64


def _resident(seen: StepsSeen, request: PlanRequest, plan: Plan) -> Iterator[Counted]:
    """The fullest device of every copy beside the planner's terms for it."""
    for copy in copies(request.graph, plan.allocations):
        found = next((seen.resident[call] for call in _users(copy.calls) if call in seen.resident), None)
        if found is None:
            continue
        call = copy.calls[0]
        model, role, shapes = request.model(call), request.role(call), toy_shapes(request, request.graph.role(call))
        if copy.trained:
            footprint = trained_copy(model, role, copy.layout)
        else:
            footprint = frozen_copy(model, role, copy.layout, request.engine.serves(request.graph.calls[call]))
        for term in TERMS if copy.trained else TERMS[:1]:
            predicted = _bytes_of(footprint, term)
            divided = copy.layout.sharding == "fsdp" or term == "optimizer"
            tolerance = TOLERANCE + toy_excess(shapes, (model, role.head), copy.layout, divided=divided)
            yield Counted(", ".join(copy.calls), term, getattr(found, term), predicted, tolerance)


def _users(calls: tuple[str, ...]) -> Iterator[str]:
    """The names under which workers tell of a copy: what trains last, since gradients are there then."""
    yield from reversed(calls)
    yield from map(reallocation_node, calls)


def _bytes_of(footprint: Footprint, term: str) -> int:
    return int(getattr(footprint, term))


def toy_excess(shapes: Shapes, model: tuple[ModelSpec, Head], layout: Layout, *, divided: bool) -> float:
    """The bytes of a worker over the share that the planner counts, relative: tensors that tensor-parallel ranks hold
    whole (norms, routers), and rows that are cut over more workers than divide them. Much at toy width alone.

    divided: of what the holders of the same parameters divide among them, of which experts may have more than the rest.
    """
    if layout.sharding == "replicated" and not cuts_model(layout):
        return 0.0
    whole = replace(layout, sharding="replicated")
    ranks, copies = (layout.dp * layout.cp, expert_copies(layout)) if divided else (1, 1)
    worst = 0.0
    for boxes in {id(one): one for one in layout_boxes(shapes, whole, model).values()}.values():
        total = excess = 0.0
        for name, box in boxes.items():
            parts = copies if is_expert(name) else ranks
            uncut = box.shape == shapes[name] and not is_expert(name)
            even, rows = box.numel / parts, math.ceil(box.shape[0] / parts) * box.numel / box.shape[0]
            total += rows
            excess += rows - even + uncut * (1 - 1 / layout.tp) * even
        worst = max(worst, excess / (total - excess))
    return worst


def toy_shapes(request: PlanRequest, role: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a role's whole parameters, as its checkpoint has them, with the head that it is given."""
    from safetensors import safe_open

    models, source = request.graph.models, role
    while models[source].path is None:
        source = str(models[source].init)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(str(models[source].path)).glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            names = [name for name in tensors.keys() if not is_fixed(name)]  # noqa: SIM118
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    if models[role].head != "lm":
        shapes.pop("lm_head.weight", None)
        shapes[SCORE_HEAD] = (1, shapes["model.embed_tokens.weight"][1])
    return shapes
