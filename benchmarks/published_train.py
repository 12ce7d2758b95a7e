"""Predictions of the cost and memory model for published training speeds and memory."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published import Prediction, Row
from benchmarks.published_adapters import adapted_share, adapted_train_seconds
from benchmarks.published_backends import DEEPSPEED_2022, FSDP_2023, MEGATRON_2022, eight_bit
from benchmarks.published_shapes import cluster_of, model_of
from benchmarks.published_steps import written_seconds
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.backend import FSDP, MEGATRON, Backend
from realgraph.planner.costs.compute.train import Recompute, TrainWork, microbatches, train_seconds
from realgraph.planner.costs.memory.memory import (
    GPU_RUNTIME_BYTES,
    TERMS,
    USABLE_FRACTION,
    Footprint,
    Running,
    gathered,
    train_activations,
    trained_copy,
    usable_bytes,
)
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages

ASYNC_TP = replace(FSDP, tp_overlap=0.3)  # products and tensor-parallel traffic in slices, in turn
EIGHT_N = "hw_tflops_per_gpu"  # operations counted as 8 a parameter and token: with all layers computed again
# The first of these that a configuration has is compared.
TIMES = ("throughput_per_gpu", "throughput_total", "step_time", EIGHT_N)
SAME_MEASUREMENT = "the same measurement in another unit"
# Four Omni-Path links of 100 Gb/s for eight GPUs (BLOOM, arXiv:2211.05100, sec. 3.3). The share that collectives reach
# was set with BLOOM's rows of 2 to 12 stages and 24 to 4 copies in view; of InfiniBand it would be twice as much.
JEAN_ZAY_NIC_BYTES_PER_S = 0.4 * 6.25e9

# Share of the peak of attention kernels, forward and backward, causal, with heads of 128: FlashAttention-3
# (arXiv:2407.08608, figures 5 and 6) for 2 and 3 on H100; FlashAttention-2 (arXiv:2307.08691, figures 5 to 7) for the
# first, by Triton, and 2 on A100. Kernels for Ampere run on newer GPUs at the speed of H100.
ATTENTION = {
    ("triton", "ampere"): 0.36,
    ("triton", "hopper"): 0.20,
    ("flash2", "hopper"): 0.36,
    ("flash2", "blackwell"): 0.17,
}
GENERATIONS = {
    "ampere": ("A100-40", "A100-80", "A800", "RTX-A6000"),
    "hopper": ("H100-SXM", "H100-PCIe", "H200", "H800", "H20"),
    "blackwell": ("B200", "GB200", "B300", "GB300"),
}
KERNELS = (  # what a system's software of that time used
    (r"llm-foundry", "triton"),
    (r"flash_attention_2|torchtitan", "flash2"),
)

HANDS_OVER = "RL trainer"  # of prime-rl: writes weights for the engines each step (trainer/rl/broadcast/filesystem.py)
OTHER_KIND = "A100-80GB"
LIVE_LAYERS = 1.25  # layers' worth of tensors in a layer's backward pass, where gradients are freed as they are used
DEEPSPEED_BUCKET_BYTES = 2_000_000_000  # two buckets of 5e8 elements in 16 bits, its default
# On 25 February 2022 the nodes' PCIe and NUMA settings were fixed; the source says that all speeds rose by 1 to 5 %.
SLOW_NUMA = 1.03
SCORE_BYTES = 5  # scores, their softmax in 16 bits, and a mask (arXiv:2205.05198, sec. 4.1)

# Nearly full memory: the allocator frees what it cached and asks the driver again, and the device waits (PyTorch, CUDA
# semantics, memory management: num_alloc_retries). How much longer that takes was set with rows in view.
CROWDED_SHARE = 0.9
CROWDED_SLOWDOWN = 1.06

RECOMPUTE = re.compile(r"ckpt|recompute|\bac\b|sac|full-ac")


class Case(Struct, frozen=True):
    """A configuration that was measured: what the formulas need of it."""

    setting: Setting
    work: TrainWork
    rows: dict[str, Row]  # its measurements by metric
    whole: float = 0.0  # share of layers that are computed again whole, the others as `work` says
    lora_rank: int = 0  # of trained adapters, 0 where all weights are trained

    def seconds(self, recompute: Recompute) -> float:
        """Seconds of one optimizer step's arithmetic and traffic."""
        work = replace(self.work, recompute=recompute)
        if self.lora_rank:
            return adapted_train_seconds(self.setting, work, self.lora_rank)
        return train_seconds(self.setting, work)


def predictions(rows: Sequence[Row]) -> Iterator[Prediction]:
    """Predictions of training speed, peak memory and fitting; rows of other phases are passed over."""
    for group in _configurations(rows):
        case = _case(group)
        if isinstance(case, Case):
            yield from _speed(case)
            yield from _memory(case)


def unpredicted(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Rows of the training phase that no prediction answers, each with the reason."""
    for group in _configurations(rows):
        case = _case(group)
        if isinstance(case, str):
            yield from ((row, case) for row in group.values())
            continue
        told = {one.row for one in (*_speed(case), *_memory(case)) if one.phase != "fits" or one.row.metric == "oom"}
        first = next((metric for metric in TIMES if metric in group), "")
        yield from ((row, _why(row, first)) for row in group.values() if row not in told)


def _why(row: Row, first: str) -> str:
    """The reason why a row of a predicted configuration has no prediction of its own; first: the speed compared."""
    if row.metric in (first, "peak_memory"):
        return f"no measured value, or a unit that is not read: {row.value} {row.unit}".rstrip()
    return SAME_MEASUREMENT if first else f"{row.metric or 'no metric'} alone tells no seconds"


def _configurations(rows: Sequence[Row]) -> Iterator[dict[str, Row]]:
    """Rows of the training phase by metric, those of one configuration together."""
    found: dict[tuple[str, ...], list[dict[str, Row]]] = {}
    for row in dict.fromkeys(row for row in rows if row.phase == "train"):
        measured = ("metric", "value", "unit")
        key = tuple(getattr(row, field) for field in row.__struct_fields__ if field not in measured)
        alike = found.setdefault(key, [])
        if all(row.metric in group for group in alike):  # measured again
            alike.append({})
        next(group for group in alike if row.metric not in group)[row.metric] = row
    return (group for alike in found.values() for group in alike)


def _case(group: dict[str, Row]) -> Case | str:
    """The configuration, or why it can't be predicted."""
    row = next(iter(group.values()))
    model, cluster = model_of(row), cluster_of(row)
    if model is None:
        return f"no shape known of {row.model}"
    if cluster is None:
        return f"no machine known of {row.n_gpus or 1} x {row.gpu}"
    if not (row.count("tp") and row.count("dp")):
        return "the layout is not published"
    length = row.count("seq_len")
    if not length:
        return "lengths are not published"
    micro = row.count("micro_batch", 1) or 1
    layout = _layout(row, model.layers)
    if layout.dp * layout.tp * layout.pp * layout.cp > layout.mesh.n_devices or layout.ep > layout.mesh.n_devices:
        return "the layout needs more devices than there are"
    if layout.pp > model.layers:
        return "more stages than layers"
    batch = row.count("global_batch") or layout.dp * micro * _accumulated(row)
    if "BLOOM" in row.system:
        cluster = replace(cluster, nic_bytes_per_s=JEAN_ZAY_NIC_BYTES_PER_S)
    if row.system == "torchtitan" and layout.pp > 1:
        micro = 1  # a local batch is cut into samples for the pipeline
    virtual = re.search(r"VP=(\d+)", row.notes)
    work = TrainWork(
        tokens=round(batch * length),
        sample_tokens=length,
        microbatch_tokens=-(-micro * length // layout.cp),
        recompute=recompute_of(row),
        schedule="interleaved" if virtual and int(virtual[1]) > 1 else "1f1b",
        chunks=max(1, int(virtual[1])) if virtual else 2,
        imbalance=1.0,
    )
    factors = factors_of(row, cluster.kind)
    setting = Setting(model, ModelRole(dtype="bfloat16"), layout, cluster, factors, backend_of(row))
    if re.search(r"fp8|float8|fp4", row.notes.lower()):
        setting = eight_bit(setting)
    # FSDP's selective recomputation: every second product is computed again, half-way to all
    half = work.recompute == "selective" and setting.engine.name == FSDP.name
    lora = re.search(r"LoRA r=(\d+)", row.notes)
    case = Case(setting, work, group, 0.5 if half else 0.0, int(lora[1]) if lora else 0)
    return case if "Megatron" not in row.system or RECOMPUTE.search(row.notes.lower()) else _least_recompute(case)


def _least_recompute(case: Case) -> Case:
    """The case with the least recomputation with which it fits, as a user would set it where none is published.

    Where attention and element-wise operations are not enough, as few whole layers as fit (Megatron-Core's
    recompute_num_layers).
    """
    room = usable_bytes(case.setting.cluster)
    some, every = (replace(case, work=replace(case.work, recompute=way)) for way in ("selective", "full"))
    held, least = footprint(some).total, footprint(every).total
    if footprint(case).total <= room:
        return case
    if held <= room:
        return some
    return replace(some, whole=(held - room) / (held - least)) if least <= room else case


def _layout(row: Row, layers: int) -> Layout:
    axes = {axis: max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp", "ep")}
    cut = axes["tp"] * axes["pp"] * axes["cp"]
    devices = row.count("n_gpus") or cut * row.count("dp")
    dp = max(1, devices // cut)
    sharded = backend_of(row).name == FSDP.name or bool(re.search(r"FSDP=[1-9]", row.notes))
    sharding: Literal["replicated", "fsdp"] = "fsdp" if sharded else "replicated"
    return Layout(DeviceMesh(0, devices), dp=dp, **axes, sharding=sharding, stages=_stages(row, layers, axes["pp"]))


def _stages(row: Row, layers: int, pp: int) -> Stages:
    """As many layers on every stage, as Megatron-LM and what was made from it asked for in 2022 (megatron/model/
    transformer.py); () where that can't be, or the software is newer: balanced."""
    even = pp > 1 and layers % pp == 0 and backend_of(row) in (DEEPSPEED_2022, MEGATRON_2022)
    return ((layers // pp,),) * pp if even else ()


def _accumulated(row: Row) -> int:
    found = re.search(r"micro_batches per step=(\d+)", row.notes)
    return max(1, int(found[1])) if found else 1


def backend_of(row: Row) -> Backend:
    """The engine behind a system's name."""
    if "Megatron-DeepSpeed" in row.system:
        return DEEPSPEED_2022
    if "2022" in row.source:
        return MEGATRON_2022
    if re.search(r"Megatron|nanotron|NeMo", row.system):
        return MEGATRON
    if "llm-foundry" in row.system:
        return FSDP_2023
    return ASYNC_TP if "asyncTP" in row.notes else FSDP


def factors_of(row: Row, kind: str) -> EfficiencyFactors:
    """The device's factors, with the rate of the attention kernel of the row's software."""
    costs = device_kind(kind).costs
    kernel = next((kernel for pattern, kernel in KERNELS if re.search(pattern, f"{row.system} {row.notes}")), None)
    generation = next((name for name, kinds in GENERATIONS.items() if kind in kinds), "")
    rate = ATTENTION.get((kernel or "", generation))
    return costs if rate is None else replace(costs, attention=rate)


def family_of(engine: Backend) -> str:
    """The engine's family: Megatron and what was made of it, or FSDP."""
    return "fsdp" if engine.name == FSDP.name else "megatron"


def recompute_of(row: Row) -> Recompute:
    """The recomputation that the notes tell of."""
    notes = row.notes.lower()
    if re.search(r"act-ckpt=false", notes):
        return "none"
    if re.search(r"act-ckpt|full-ac|full recompute|ac=(recompute|offload)", notes):
        return "full"
    if row.system == "torchtitan":
        return "selective"  # its recipes' default
    return "selective" if re.search(r"\bsac\b|selective", notes) else "none"


def _seconds(case: Case) -> float:
    """Seconds of one optimizer step, with what the engine or the machine adds to the arithmetic."""
    notes, seconds = next(iter(case.rows.values())).notes, case.seconds(case.work.recompute)
    if case.whole:
        seconds = (1 - case.whole) * seconds + case.whole * case.seconds("full")
    if case.setting.engine.name == DEEPSPEED_2022.name and re.search(r"02-2[0-4]", notes):
        seconds *= SLOW_NUMA
    if footprint(case).total > CROWDED_SHARE * usable_bytes(case.setting.cluster):
        seconds *= CROWDED_SLOWDOWN
    if HANDS_OVER in notes:
        seconds += written_seconds(case.setting.model, case.lora_rank)
    return seconds


def _speed(case: Case) -> Iterator[Prediction]:
    metric = next((metric for metric in TIMES if metric in case.rows), None)
    if metric is None:
        return
    row = case.rows[metric]
    group = f"{row.source.split('@')[0].split(' L')[0]} | {row.model} | {metric}"
    predicted, measured = _in_unit(case, row, _seconds(case)), row.number("value")
    if predicted is None or measured <= 0:
        return
    moe, family = case.setting.model.experts > 0, family_of(case.setting.engine)
    yield Prediction(row, "train", group, measured, predicted, moe, family, _inferred(row))


def _inferred(row: Row) -> str:
    """A note on a row whose device kind nobody published: the prediction for the kind before it."""
    if not re.search(r"GPU type\S* inferred", row.notes) or OTHER_KIND in row.gpu:
        return ""
    other = _case({row.metric: replace(row, gpu=OTHER_KIND)})
    told = _in_unit(other, row, _seconds(other)) if isinstance(other, Case) else None
    return f"the device kind {row.gpu}, which the source does not print" + (
        f"; on {OTHER_KIND}s the prediction is {told:.4g}" if told is not None else ""
    )


def _in_unit(case: Case, row: Row, seconds: float) -> float | None:
    """Seconds of a step as the row's metric and unit have it; None where the unit is not read."""
    work, devices = case.work, case.setting.layout.mesh.n_devices
    if row.metric == "step_time":
        told = row.in_unit(seconds)
        return told if isinstance(told, float) else None
    if row.metric == EIGHT_N:
        return 8 * case.setting.model.n_params() * work.tokens / seconds / devices / 1e12
    if not row.unit.startswith(("sample", "seq", "token")):
        return None
    amount = work.tokens / work.sample_tokens if row.unit.startswith(("sample", "seq")) else work.tokens
    return amount / seconds / (devices if row.metric == "throughput_per_gpu" else 1)


def footprint(case: Case) -> Footprint:
    """Bytes of the fullest device of a configuration, the runtime's own aside."""
    some = _footprint(case, case.work.recompute)
    if not case.whole:
        return some
    every = _footprint(case, "full")
    return Footprint(
        *(round((1 - case.whole) * getattr(some, term) + case.whole * getattr(every, term)) for term in TERMS)
    )


def _footprint(case: Case, recompute: Recompute) -> Footprint:
    setting, work = case.setting, case.work
    model, role, layout, engine = setting.model, setting.role, setting.layout, setting.engine
    row = next(iter(case.rows.values()))
    running = Running(
        recompute=recompute,
        fused=layout.sharding == "replicated" or "Composer" in row.system or "Megatron" in row.system,
        live=LIVE_LAYERS,
        offloaded="AC=Offload" in row.notes,
        logit_bytes=logit_bytes_of(row),
        microbatches=microbatches(setting, work),
        chunks=work.chunks if work.schedule == "interleaved" else 1,
        score_bytes=SCORE_BYTES if engine.attention == "unfused" else 0,
        sample_tokens=round(work.sample_tokens),
        sequence_parallel=engine.sequence_parallel,
    )
    rows = train_activations(model, role, layout, work.microbatch_tokens, running)
    return _states(case, row) + rows + gathered(model, role, layout, None if case.lora_rank else running)


def _states(case: Case, row: Row) -> Footprint:
    """Weights, gradients and optimizer as the row's engine keeps them."""
    setting = case.setting
    model, role, layout = setting.model, setting.role, setting.layout
    distributed = setting.engine.distributed and _stage(row) > 0
    share = adapted_share(model, role, case.lora_rank) if case.lora_rank else 1.0
    states = trained_copy(model, role, layout, distributed, share)
    if layout.sharding == "fsdp":
        return replace(states, gradients=states.gradients // 2)  # summed where the backward pass leaves them
    if setting.engine.name == DEEPSPEED_2022.name:
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


def logit_bytes_of(row: Row) -> int:
    """Bytes that a loss keeps of each logit: 16 bits, float32, log-softmax and gradient, or what a fused one leaves."""
    if "RL trainer" in row.notes:
        return 0  # never all at once
    if "Composer" in row.system:
        return 4  # MPT's fused cross-entropy: logits and their gradient in 16 bits
    if re.search(r"Megatron-Bridge", row.system) or ("torchtitan" in row.system and "2025" in row.source):
        return 6
    return 10 if "Megatron" in row.system else 16


def _stage(row: Row) -> int:
    """The ZeRO stage."""
    found = re.search(r"ZeRO-(\d)", row.notes)
    return int(found[1]) if found else 1


def _gradient_bytes(row: Row) -> int:
    """Bytes of a gradient: the bf16 optimizer, from 28 February on, sums in float32 beside the backward's own."""
    return 6 if "02-28" in row.notes else 2


def _memory(case: Case) -> Iterator[Prediction]:
    """Peak memory where it was published, and for every configuration whether it fits."""
    row = next(iter(case.rows.values()))
    group = f"{row.source.split('@')[0].split(' L')[0]} | {row.model} | memory"
    cluster, moe = case.setting.cluster, case.setting.model.experts > 0
    held = footprint(case).total
    peak = case.rows.get("peak_memory")
    if peak is not None and peak.number("value") > 0 and peak.unit in ("GB", "GiB"):
        driver = "BLOOM" in row.system  # counts the runtime, and what the allocator keeps, in GiB
        whole = held / USABLE_FRACTION + GPU_RUNTIME_BYTES if driver else held
        unit = 1 << 30 if driver or peak.unit == "GiB" else 10**9
        yield Prediction(peak, "memory", group, peak.number("value"), whole / unit, moe)
    ran = not any(metric == "oom" and row.number("value") for metric, row in case.rows.items())
    yield Prediction(case.rows.get("oom", row), "fits", group, float(ran), float(held <= usable_bytes(cluster)), moe)
