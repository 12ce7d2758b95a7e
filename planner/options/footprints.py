"""Bytes that a call holds on its devices, while it runs and all the time. Prices no seconds, chooses nothing."""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate, ModelRole, Train
from realgraph.planner.costs.memory import margin, memory
from realgraph.planner.costs.memory.margin import margin_bytes
from realgraph.planner.costs.memory.memory import Footprint, Running, StateShare
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.options.calls import drops_copy, longest_part, sample_tokens, sized, stages_weights, stays_beside
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.option import CallOption, Residency
from realgraph.planner.request.request import PlanRequest

ONE_DEVICE = DeviceMesh(0, 1)


class Holding(Struct, frozen=True):
    """Bytes of one call on each device of its mesh."""

    resident: Footprint  # all the time
    active: Footprint  # besides, while it runs
    # the part of `active` that is there anyway where the call's role is trained on the same mesh under an equal layout
    shared: int = 0
    host: int = 0  # of the node's memory, all the time
    margin: int = 0  # by which a peak may lie above all this while it runs


def holding(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> Holding:
    """Memory that a call holds on its devices. Where a copy is dropped after use, its weights count while the call
    runs; the caches of a later generate call count all the time, as the others generate beside it."""
    own = waiting((request, call), (candidate.layout, candidate.residency), cluster)
    added, margin = running_bound(request, call, candidate, cluster)
    if stays_beside(request, call):
        return replace(own, resident=own.resident + added, margin=margin)
    return replace(own, active=own.active + added, margin=margin)


def copy_of(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> Footprint:
    """Bytes of a call's own copy of its role's weights, and of optimizer states where it trains; twice those of weights
    that are replaced while they are in use."""
    kind, model, role = request.graph.calls[call], request.model(call), request.role(call)
    if isinstance(kind, Train):
        return _trained(model, role, layout, request.engine.states, cluster.is_cpu)
    copy = _frozen(model, role, layout, request.engine.serves(kind))
    return copy + Footprint(weights=copy.weights) if stages_weights(request, call, cluster) else copy


def waiting(asked: tuple[PlanRequest, str], kept: tuple[Layout, Residency], cluster: Cluster) -> Holding:
    """The same without what its run adds. Gradients are there while a call trains: their memory is given back after its
    last optimizer step. The buffers of a layout's groups count while the call runs."""
    layout, residency = kept
    copy = copy_of(*asked, layout, cluster)
    active, copy = Footprint(gradients=copy.gradients), replace(copy, gradients=0)
    if not cluster.is_cpu:
        active += memory.communicators(layout)
    if stays_beside(*asked):
        return Holding(active if residency == "in_place" else copy + active, Footprint())
    if residency == "in_place":
        return Holding(Footprint(), active)
    if residency == "offloaded":
        return Holding(Footprint(), active + copy, host=copy.total)
    if residency == "reallocated" and drops_copy(*asked):
        return Holding(Footprint(), active + copy, shared=copy.weights)
    return Holding(copy, active)


def running_bound(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> tuple[Footprint, int]:
    """Memory that a running call adds, and the margin that its devices need besides."""
    added = _running(request, call, candidate)
    regimes = margin.regimes_of(request.model(call), candidate.layout, sample_tokens(sized(request, call)))
    return added, margin_bytes(margin.spread_of(regimes, added, cpu=cluster.is_cpu), request.memory.quantile)


def _running(request: PlanRequest, call: str, candidate: CallOption) -> Footprint:
    """Memory that a running call adds, its weights left aside."""
    model, role, layout, kind = request.model(call), request.role(call), candidate.layout, request.graph.calls[call]
    # activations are the same on all meshes
    cut = Layout(ONE_DEVICE, tp=layout.tp, pp=layout.pp, ep=layout.ep, cp=layout.cp, stages=layout.stages)
    if isinstance(kind, Generate):
        return memory.generation(model, role, cut, candidate.tokens, request.engine.cache_bytes)
    tokens = max(candidate.tokens, longest_part(request, call, layout))
    passes = running_of(request, candidate) if isinstance(kind, Train) else None
    rows = memory.train_activations(model, role, cut, tokens, passes) if passes else _forward(model, role, cut, tokens)
    return rows if layout.sharding == "replicated" else rows + memory.gathered(model, role, layout, passes)


def spare_room(request: PlanRequest, call: str, layout: Layout, tokens: int, sequences: int) -> Footprint:
    """A cache of so many tokens, of whole pages, and so many sequences that decode at once, on each device of a
    generate call besides those of its option."""
    model, role = request.model(call), request.role(call)
    cache = tokens * memory.cache_bytes_per_token(model, role, layout, request.engine.cache_bytes)
    return Footprint(kv_cache=cache, logits=memory.decode_logits(model, role, layout, sequences))


def running_of(request: PlanRequest, candidate: CallOption) -> Running:
    """The same of a train call in the terms of memory: see `memory.train_activations`."""
    return replace(request.engine.passes, recompute=candidate.recompute, chunks=candidate.chunks)


@lru_cache(maxsize=65536)
def _forward(model: ModelSpec, role: ModelRole, layout: Layout, tokens: int) -> Footprint:
    return memory.forward_activations(model, role, layout, tokens)


@lru_cache(maxsize=16384)
def _trained(model: ModelSpec, role: ModelRole, layout: Layout, share: StateShare, cpu: bool) -> Footprint:
    """A trained copy's states; on CPUs the rescue copies lie in the same memory."""
    states = memory.trained_copy(model, role, layout, share)
    return states + memory.rescue_copies(model, role, layout) if cpu else states


@lru_cache(maxsize=16384)
def _frozen(model: ModelSpec, role: ModelRole, layout: Layout, serves: bool) -> Footprint:
    return memory.frozen_copy(model, role, layout, serves)


def states_of(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> Footprint:
    """Bytes of a copy that wait in host memory where it is offloaded."""
    return replace(copy_of(request, call, layout, cluster), gradients=0)
