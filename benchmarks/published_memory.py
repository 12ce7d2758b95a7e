"""Predicted bytes of published training configurations beside the peaks that were measured, and whether they fit."""

import re
from collections.abc import Iterator

from msgspec.structs import replace

from benchmarks.published import Prediction, Row
from benchmarks.published_adapters import adapted_share
from benchmarks.published_backends import DEEPSPEED_2022
from benchmarks.published_case import TRAIN, Case
from benchmarks.published_spread import Peak
from realgraph.planner.costs.backend import FSDP
from realgraph.planner.costs.memory.activations import COMBINED
from realgraph.planner.costs.memory.margin import Regime, regimes_of
from realgraph.planner.costs.memory.memory import (
    COMMUNICATOR_BYTES,
    GPU_RUNTIME_BYTES,
    TERMS,
    Footprint,
    Running,
    StateShare,
    communicators,
    gathered,
    local_params,
    usable_bytes,
)
from realgraph.planner.options.calls import microbatches_of
from realgraph.planner.options.footprints import copy_of, running_bound
from realgraph.planner.plan.option import CallOption

FUSED = re.compile(r"Composer|Megatron|AutoModel")  # systems with norms and activation functions of one kernel each
LIVE_LAYERS = 1.25  # layers' worth of tensors in a layer's backward pass, where gradients are freed as they are used
DEEPSPEED_BUCKET_BYTES = 2_000_000_000  # two buckets of 5e8 elements in 16 bits, its default
SCORE_BYTES = 5  # scores, their softmax in 16 bits, and a mask (arXiv:2205.05198, sec. 4.1)
# torchtitan's experts, which prime-rl has, multiply their outputs by the router's weights in float32 and so keep them,
# the product's gradient, that of the outputs and that of the weights before it is summed (torchtitan, models/moe.py).
COMBINED_FLOAT32 = 4
# For one axis of Megatron-DeepSpeed: Megatron's own communicator, DeepSpeed's (runtime/pipe/topology.py), and one of
# pairs of stages, of all model-parallel ranks or of embeddings. Counted for BLOOM's rows, used for them alone, and not
# where they are predicted by what other systems tell.
DEEPSPEED_COMMUNICATORS = 3
# What PyTorch's allocator of 2022 keeps beyond live tensors, which BLOOM's peaks, read from the driver, have in them.
# It gives that up before it runs out of memory, so it is no part of what must fit. Told by BLOOM's rows, used for them
# alone, and as above.
CACHED_SHARE = 0.06


def footprint(case: Case) -> Footprint:
    """Bytes of the fullest device of a configuration, the runtime's own and communicators aside."""
    return _states(case) + _added(case)


def _added(case: Case) -> Footprint:
    """Bytes that a pass adds, where some layers are computed again whole."""
    some = _planned(case, case.option)[0]
    if not case.whole:
        return some
    every = _planned(case, replace(case.option, recompute="full"))[0]
    return Footprint(
        *(round((1 - case.whole) * getattr(some, term) + case.whole * getattr(every, term)) for term in TERMS)
    )


def _planned(case: Case, option: CallOption) -> tuple[Footprint, int]:
    """Bytes that a pass adds and its margin, as the planner has them. Of weights that are not trained FSDP gathers no
    gradients."""
    added, margin = running_bound(case.request, TRAIN, option, case.request.cluster)
    if not case.lora_rank:
        return added, margin
    frozen = gathered(case.model, case.request.role(TRAIN), case.layout, None)
    return replace(added, weights=frozen.weights, gradients=frozen.gradients), margin


def margin_of(case: Case) -> int:
    """Bytes by which the peak may lie above the prediction, as the planner has it."""
    some = _planned(case, case.option)[1]
    if not case.whole:
        return some
    return round((1 - case.whole) * some + case.whole * _planned(case, replace(case.option, recompute="full"))[1])


def regimes_of_case(case: Case) -> Iterator[Regime]:
    """The regimes of a configuration."""
    return regimes_of(case.model, case.layout, case.request.workload.max_new_tokens)


def groups_of(case: Case, *, known: bool = True) -> int:
    """Bytes of a configuration's communicators, beyond the first one. known: with what its own system tells."""
    if not known or case.engine.name != DEEPSPEED_2022.name:
        return communicators(case.layout).total
    layout = case.layout
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp))
    return COMMUNICATOR_BYTES * max(0, DEEPSPEED_COMMUNICATORS * axes - 1)


def fits(case: Case, *, known: bool = True) -> bool:
    """True where the bound of a configuration's peak is within what its devices have. known: see `groups_of`."""
    needed = footprint(case).total + groups_of(case, known=known) + margin_of(case)
    return needed <= usable_bytes(case.request.cluster)


def with_memory(case: Case) -> Case:
    """The case whose engine keeps in memory what the row's system does."""
    request, layout, row = case.request, case.layout, next(iter(case.rows.values()))
    passes = Running(
        fused=layout.sharding == "replicated" or bool(FUSED.search(row.system)),
        live=LIVE_LAYERS,
        offloaded="AC=Offload" in row.notes,
        logit_bytes=logit_bytes_of(row),
        microbatches=microbatches_of(request, TRAIN, case.option, request.cluster),
        score_bytes=SCORE_BYTES if case.engine.attention == "unfused" else 0,
        sample_tokens=request.workload.max_new_tokens,
        sequence_parallel=case.engine.sequence_parallel,
        combined=COMBINED_FLOAT32 if case.engine.name == FSDP.name and not case.dealt else COMBINED,
    )
    states = StateShare(case.engine.distributed and _stage(row) > 0, _trained_share(case))
    return replace(case, request=replace(request, engine=replace(request.engine, passes=passes, states=states)))


def _trained_share(case: Case) -> float:
    return adapted_share(case.model, case.request.role(TRAIN), case.lora_rank) if case.lora_rank else 1.0


def _states(case: Case) -> Footprint:
    """Weights, gradients and optimizer: a request's, and as the row's engine keeps them."""
    row, layout = next(iter(case.rows.values())), case.layout
    states = copy_of(case.request, TRAIN, layout, case.request.cluster)
    if layout.sharding == "fsdp":
        kept = replace(states, gradients=states.gradients // 2)  # summed where the backward pass leaves them
        if layout.dp * layout.cp == 1:  # one device's shards are float32 masters too
            whole = local_params(case.model, case.request.role(TRAIN), layout)
            trained = round(_trained_share(case) * whole)
            kept = Footprint(weights=4 * whole, gradients=4 * trained, optimizer=8 * trained)
        return _halved(kept) if "states in bfloat16" in row.notes else kept
    if case.engine.name == DEEPSPEED_2022.name:
        ours = states.gradients // 4
        copies = 0 if _gradient_bytes(row) > 2 else states.optimizer // 3  # a float32 shard while the optimizer steps
        return replace(
            states,
            gradients=ours * _gradient_bytes(row),
            optimizer=states.optimizer + copies,
            buckets=DEEPSPEED_BUCKET_BYTES,
        )
    if "Bridge" in row.system:
        return replace(states, gradients=states.gradients // 2)  # its recipes sum them in bf16
    return states


def _halved(states: Footprint) -> Footprint:
    """States in 16 bits, where they are counted in 32."""
    halves = (states.weights // 2, states.gradients // 2, states.optimizer // 2)
    return replace(states, weights=halves[0], gradients=halves[1], optimizer=halves[2])


def logit_bytes_of(row: Row) -> int:
    """Bytes that a loss keeps of each logit: 16 bits, float32, log-softmax and gradient, or what a fused one leaves."""
    if "RL trainer" in row.notes:
        return 0  # never all at once
    if "Composer" in row.system:
        return 4  # MPT's fused cross-entropy: logits and their gradient in 16 bits
    if re.search(r"Megatron-Bridge|AutoModel", row.system) or ("torchtitan" in row.system and "2025" in row.source):
        return 6
    return 10 if "Megatron" in row.system else 16


def _stage(row: Row) -> int:
    """The ZeRO stage."""
    found = re.search(r"ZeRO-(\d)", row.notes)
    return int(found[1]) if found else 1


def _gradient_bytes(row: Row) -> int:
    """Bytes of a gradient: the bf16 optimizer, from 28 February on, sums in float32 beside the backward's own."""
    return 6 if "02-28" in row.notes else 2


def predictions(case: Case) -> Iterator[Prediction]:
    """Peak memory where it was published, and for every configuration whether it fits."""
    row = next(iter(case.rows.values()))
    group = f"{row.source.split('@')[0].split(' L')[0]} | {row.model} | memory"
    moe = case.model.experts > 0
    peak = peak_of(case)
    if peak is not None:
        unit = _unit(peak.row)
        measured, predicted, unknown = (one / unit for one in (peak.measured, peak.predicted, peak.unknown))
        yield Prediction(peak.row, "memory", group, measured, predicted, moe, unknown=unknown)
    ran = not any(metric == "oom" and row.number("value") for metric, row in case.rows.items())
    called, unseen = float(fits(case)), float(fits(case, known=False))
    yield Prediction(case.rows.get("oom", row), "fits", group, float(ran), called, moe, unknown=unseen)


def peak_of(case: Case) -> Peak | None:
    """The measured peak of a configuration, None where none was published."""
    row = case.rows.get("peak_memory")
    if row is None or row.number("value") <= 0 or row.unit not in ("GB", "GiB"):
        return None
    peak = unknown = footprint(case).total
    if "BLOOM" in row.system:  # counts the runtime, and what the allocator keeps
        unknown = peak + GPU_RUNTIME_BYTES + groups_of(case, known=False)
        peak = round((1 + CACHED_SHARE) * peak) + GPU_RUNTIME_BYTES + groups_of(case)
    return Peak(
        row=row,
        regimes=tuple(regimes_of_case(case)),
        measured=row.number("value") * _unit(row),
        predicted=peak,
        varies=_added(case).total,
        device_bytes=case.request.cluster.memory_bytes,
        unknown=unknown,
    )


def _unit(row: Row) -> float:
    return float(1 << 30 if "BLOOM" in row.system or row.unit == "GiB" else 10**9)
