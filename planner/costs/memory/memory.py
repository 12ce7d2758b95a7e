"""Bytes that one device holds: weights and optimizer states of each copy, and what a running call adds. Pure formulas.

Sizes of states: ZeRO, arXiv:1910.02054, sec. 3.1. Two worlds: this project's engines, on dp alone, and for layouts
that cut a model an engine in the manner of Megatron-Core, whose states are 6 bytes a bfloat16 parameter and 12 more cut
over the dp copies, of a float32 one 8 and 8. All numbers are of the fullest device, but where a stage is asked for.
"""

from functools import lru_cache

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.memory.activations import (
    Running,
    cache_bytes_per_token,
    decode_logits,
    forward_activations,
    generation,
    in_flight,
    kept_bytes_per_token,
    kv_bytes_per_token,
    train_activations,
)
from realgraph.planner.costs.memory.terms import (
    COMMUNICATOR_BYTES,
    GPU_RUNTIME_BYTES,
    TERMS,
    DType,
    Footprint,
    Recompute,
    Term,
    ceil_div,
    communicators,
    cuts_model,
    distributes_states,
    element_bytes,
    master_bytes,
    served_expert_ranks,
    trained_expert_ranks,
    usable_bytes,
)
from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.plan.layout import Layout, Stages
from realgraph.planner.plan.stages import layer_ranges, stage_totals, stages_of

GATHERED_LAYERS = (
    3  # that FSDP holds whole at once: one in use, one that comes, and the buffer that it is copied out of
)

__all__ = [
    "COMMUNICATOR_BYTES",
    "GPU_RUNTIME_BYTES",
    "TERMS",
    "DType",
    "Footprint",
    "Recompute",
    "Running",
    "StateShare",
    "Term",
    "cache_bytes_per_token",
    "communicators",
    "cuts_model",
    "decode_logits",
    "element_bytes",
    "expert_copies",
    "forward_activations",
    "frozen_copy",
    "gathered",
    "generation",
    "kept_bytes_per_token",
    "kv_bytes_per_token",
    "local_params",
    "local_routed",
    "master_bytes",
    "rescue_copies",
    "served_expert_ranks",
    "train_activations",
    "trained_copy",
    "trained_expert_ranks",
    "usable_bytes",
]


class StateShare(Struct, frozen=True):
    """Optimizer states of an engine: of which share of its parameters, and how they lie."""

    distributed: bool | None = None  # cut over the devices that hold the same parameters; None: as `trained_copy` says
    trained: float = 1.0  # share of the parameters that has gradients and states


@lru_cache(maxsize=1 << 16)
def local_params(
    model: ModelSpec, role: ModelRole, layout: Layout, serves: bool = False, stage: int | None = None
) -> int:
    """Parameters on each device of a pipeline stage before dp cuts them: the stage's layers, with the embedding on the
    first stage and the head on the last.

    serves: in an engine that only generates, which cuts experts in its own way. stage: None is the fullest one.
    """
    if not cuts_model(layout):
        return model.n_params(role.head)
    dense, routed = _stage(model, role, layout, serves, stage)
    return int(dense) + int(routed)


def local_routed(
    model: ModelSpec, role: ModelRole, layout: Layout, serves: bool = False, stage: int | None = None
) -> int:
    """Parameters of routed experts among them."""
    return int(_stage(model, role, layout, serves, stage)[1])


def _stage(model: ModelSpec, role: ModelRole, layout: Layout, serves: bool, stage: int | None) -> tuple[float, float]:
    ranks = served_expert_ranks(layout) if serves else trained_expert_ranks(layout)
    stages = _stage_params(model, role.head, (layout.tp, ranks), stages_of(model, role.head, layout))
    return max(stages, key=sum) if stage is None else stages[stage]


@lru_cache(maxsize=1 << 12)
def _stage_params(
    model: ModelSpec, head: Head, ranks: tuple[int, int], stages: Stages
) -> tuple[tuple[float, float], ...]:
    """Parameters on each device of every stage: all but routed experts, and these. A tied head's matrix lies on the
    first stage and on the last. ranks: of tensor parallelism, and over which experts are cut."""
    tensor, experts = ranks
    head_params, embedding = model.head_params(head), model.vocab * model.hidden
    totals, sparse = stage_totals(stages), _expert_layers(model, stages)
    every = model.attention_params() + model.norms * model.hidden
    dense = [
        n * every + (n - s) * model.mlp_params() + s * model.common_params()
        for n, s in zip(totals, sparse, strict=True)
    ]
    dense[0] += embedding
    dense[-1] += model.hidden  # the last norm
    dense[-1] += embedding if len(stages) > 1 and model.tied and head == "lm" else head_params
    routed = [s * model.experts * model.expert_params() / experts for s in sparse]
    copied = model.attention_copies(tensor)  # on every rank
    cut = [one / tensor + n * copied for one, n in zip(dense, totals, strict=True)]
    return tuple(zip(cut, routed, strict=True))


def _expert_layers(model: ModelSpec, stages: Stages) -> list[float]:
    """Layers of experts on each stage; where it is not known which they are, spread alike."""
    if not model.dense_layers:
        return [total * model.expert_layers / model.layers for total in stage_totals(stages)]
    dense = set(model.dense_layers)
    return [sum(n not in dense for chunk in chunks for n in chunk) for chunks in layer_ranges(stages)]


def expert_copies(layout: Layout) -> int:
    """Devices that hold the same experts: of the dp x cp x tp devices of a stage, one in each group of ep."""
    ranks = layout.dp * layout.cp
    return max(1, ranks * layout.tp // layout.ep) if layout.ep > 1 else ranks


@lru_cache(maxsize=1 << 16)
def trained_copy(
    model: ModelSpec,
    role: ModelRole,
    layout: Layout,
    share: StateShare = StateShare(),
    stage: int | None = None,
) -> Footprint:
    """Bytes of a trained role under AdamW with gradients summed in the masters' precision, while it trains; between
    train calls there are no gradients.

    Whole copies: weights, a master copy where that is wider, summed gradients and two moments; each gradient of a
    backward pass is added to its sum as soon as it is there. FSDP's shards are the masters themselves, and a backward
    pass leaves gradients of its own: those of experts that lie on one device of a pipeline stage alone are summed
    before the others' one reduction. So 16 bytes a parameter in float32, 18 in bfloat16, 20 in FSDP. A distributed
    optimizer (default: where the layout cuts the model) cuts masters and moments over the devices that hold the same
    parameters; float32 weights are their own masters. stage: of the pipeline, None is the fullest one.
    """
    own, wide = element_bytes(role.dtype), master_bytes(role)
    whole = local_params(model, role, layout, stage=stage)
    trained = round(share.trained * whole)
    routed = local_routed(model, role, layout, stage=stage) * trained // whole
    rows = ceil_div(trained - routed, layout.dp * layout.cp) + ceil_div(routed, expert_copies(layout))
    if layout.sharding == "fsdp" and layout.dp * layout.cp > 1:
        sharded = _sharded_params(model, role, layout, stage)
        apart = layout.pp > 1 and layout.ep > 1 and expert_copies(layout) == 1
        left = max(rows - routed, routed) if apart else rows
        return Footprint(weights=wide * sharded, gradients=wide * (rows + left), optimizer=2 * wide * rows)
    stepped = rows if (cuts_model(layout) if share.distributed is None else share.distributed) else trained
    return Footprint(
        weights=own * whole, gradients=wide * trained, optimizer=(2 if wide == own else 3) * wide * stepped
    )


def _sharded_params(model: ModelSpec, role: ModelRole, layout: Layout, stage: int | None = None) -> int:
    """Parameters of which FSDP leaves a device its part: of spread experts over those that hold the same ones."""
    routed = local_routed(model, role, layout, stage=stage)
    rest = local_params(model, role, layout, stage=stage) - routed
    return ceil_div(rest, layout.dp * layout.cp) + ceil_div(routed, expert_copies(layout))


def rescue_copies(model: ModelSpec, role: ModelRole, layout: Layout, stage: int | None = None) -> Footprint:
    """Host bytes of the states that a worker keeps of its part before each train call: the last, and the one being
    taken. stage: as in `trained_copy`."""
    own, wide = element_bytes(role.dtype), master_bytes(role)
    rows, whole = _sharded_params(model, role, layout, stage), local_params(model, role, layout, stage=stage)
    weights = rows if layout.sharding == "fsdp" else whole
    states = rows if layout.sharding == "fsdp" or distributes_states(layout) else whole
    return Footprint(optimizer=2 * (own * weights + (2 if wide == own else 3) * wide * states))


def frozen_copy(model: ModelSpec, role: ModelRole, layout: Layout, serves: bool = False) -> Footprint:
    """Resident bytes of a copy that only runs forward: its weights, and masters where a moving average updates them.

    serves: see `local_params`.
    """
    own, wide = element_bytes(role.dtype), master_bytes(role)
    averaged = wide if role.ema_rate is not None and wide > own else 0
    if layout.sharding == "fsdp":
        return Footprint(weights=(own + averaged) * _sharded_params(model, role, layout))
    return Footprint(weights=(own + averaged) * local_params(model, role, layout, serves))


def gathered(model: ModelSpec, role: ModelRole, layout: Layout, running: Running | None) -> Footprint:
    """The weights that FSDP gathers while a call runs: two layers (one prefetched), the buffer that one of them is
    copied out of (torch, distributed/fsdp/_fully_shard/_fsdp_collectives.py) and, as one group, embedding, norm and
    head; in a backward pass a layer's and that group's whole gradients wait for their reduction.

    A pipeline stage that trains keeps all its weights gathered for the micro-batches of a step, and sums its whole
    gradients until the one reduction behind the last. Experts that lie on one device alone are not gathered: each pass
    casts them, and keeps the casts for its backward pass. running: None where nothing is trained.
    """
    if layout.sharding != "fsdp":
        return Footprint()
    own, wide, alone = element_bytes(role.dtype), master_bytes(role), 0.0
    experts = local_routed(model, role, layout)
    if layout.ep > 1 and expert_copies(layout) == 1:
        alone = _casts(model, layout, experts, running) if running is not None and own < wide else 0.0
        experts = 0
    if layout.pp > 1 and running is not None:
        whole = local_params(model, role, layout) - local_routed(model, role, layout) + experts
        return Footprint(weights=own * whole + int(own * alone), gradients=wide * whole)
    ends = (model.vocab * model.hidden + model.head_params(role.head)) // layout.tp
    layer = _gathered_layer(model, layout, spread=experts > 0)
    weights = own * (GATHERED_LAYERS * layer + ends) + int(own * alone)
    return Footprint(weights=weights, gradients=0 if running is None else wide * (layer + ends))


def _gathered_layer(model: ModelSpec, layout: Layout, *, spread: bool) -> int:
    """Parameters of the largest layer that a device gathers at once; spread: its part of the experts among them."""
    if layout.ep == 1:
        return model.layer_params() // layout.tp + int(model.attention_copies(layout.tp))
    routed = model.experts * model.expert_params()
    dense = model.mlp_params() if model.expert_layers < model.layers else 0
    rest = model.attention_params() + model.norms * model.hidden
    beside = model.layer_params() - rest - routed  # a router, and experts that every token passes
    cut = (rest + max(dense, beside)) // layout.tp + int(model.attention_copies(layout.tp))
    return cut + (routed // layout.ep if spread else 0)


def _casts(model: ModelSpec, layout: Layout, experts: int, running: Running) -> float:
    """Parameters of a stage's `experts` that are there twice: of the micro-batches whose activations are kept, or of
    one layer where layers are computed again."""
    if running.recompute in (None, "none"):
        return experts * max(in_flight(layout.pp, running))
    return experts / model.layers
