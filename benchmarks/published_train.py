"""Predictions of the cost and memory model for published training speeds and memory."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec.structs import replace

from benchmarks import published_memory
from benchmarks.published import Prediction, Row
from benchmarks.published_backends import DEEPSPEED_2022, FSDP_2023, MEGATRON_2022, in_eight_bits
from benchmarks.published_case import Case, staged, train_request
from benchmarks.published_memory import fits, footprint, groups_of, margin_of, with_memory
from benchmarks.published_shapes import cluster_of, model_of
from benchmarks.published_steps import written_seconds
from realgraph.planner.costs.backend import FSDP, MEGATRON, Backend
from realgraph.planner.costs.compute.train import Recompute
from realgraph.planner.costs.memory.memory import usable_bytes
from realgraph.planner.costs.spread import regimes_of
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages
from realgraph.planner.plan.option import CallOption

ASYNC_TP = replace(FSDP, tp_overlap=0.3)  # products and tensor-parallel traffic in slices, in turn
EIGHT_N = "hw_tflops_per_gpu"  # operations counted as 8 a parameter and token: with all layers computed again
# The first of these that a configuration has is compared.
TIMES = ("throughput_per_gpu", "throughput_total", "step_time", EIGHT_N)
SAME_MEASUREMENT = "the same measurement in another unit"
# Four Omni-Path links of 100 Gb/s for eight GPUs (BLOOM, arXiv:2211.05100, sec. 3.3). The share that collectives reach
# was set with BLOOM's rows of 2 to 12 stages and 24 to 4 copies in view; of InfiniBand it would be twice as much.
JEAN_ZAY_WIRE_BYTES_PER_S = 6.25e9
JEAN_ZAY_SHARE = 0.4

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
# The machine of prime-rl's that tells what a tensor's own file access takes: its mixtures' adapters are tens of
# thousands of tensors, and without it these three rows are predicted 40 to 290 % too fast. Nowhere else is it counted.
FILES_OF = "B200"
OTHER_KIND = "A100-80GB"
# On 25 February 2022 the nodes' PCIe and NUMA settings were fixed; the source says that all speeds rose by 1 to 5 %.
SLOW_NUMA = 1.03

# Nearly full memory: the allocator frees what it cached and asks the driver again, and the device waits (PyTorch, CUDA
# semantics, memory management: num_alloc_retries). How much longer that takes was set with rows in view.
CROWDED_SHARE = 0.845
CROWDED_SLOWDOWN = 1.06

RECOMPUTE = re.compile(r"ckpt|recompute|\bac\b|sac|full-ac")


def predictions(rows: Sequence[Row]) -> Iterator[Prediction]:
    """Predictions of training speed, peak memory and fitting; rows of other phases are passed over."""
    for case in cases(rows):
        yield from _speed(case)
        yield from published_memory.predictions(case)


def cases(rows: Sequence[Row]) -> Iterator[Case]:
    """The configurations of the training phase that can be predicted."""
    for group in _configurations(rows):
        case = _case(group)
        if isinstance(case, Case):
            yield case


def unpredicted(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Rows of the training phase that no prediction answers, each with the reason."""
    for group in _configurations(rows):
        case = _case(group)
        if isinstance(case, str):
            yield from ((row, case) for row in group.values())
            continue
        converted = {
            one.row
            for one in (*_speed(case), *published_memory.predictions(case))
            if one.phase != "fits" or one.row.metric == "oom"
        }
        first = next((metric for metric in TIMES if metric in group), "")
        yield from ((row, _why(row, first)) for row in group.values() if row not in converted)


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
        cluster = replace(cluster, nic_bytes_per_s=JEAN_ZAY_SHARE * JEAN_ZAY_WIRE_BYTES_PER_S)
    if row.system == "torchtitan" and layout.pp > 1:
        micro = 1  # a local batch is cut into samples for the pipeline
    virtual = re.search(r"VP=(\d+)", row.notes)
    chunks = min(int(virtual[1]), model.layers // layout.pp) if virtual and layout.pp > 1 else 1
    option = CallOption(
        layout,
        max_tokens_per_microbatch=-(-micro * length // layout.cp),
        recompute=recompute_of(row),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=max(1, chunks),
    )
    factors, engine = factors_of(row, cluster.kind), backend_of(row)
    if re.search(r"fp8|float8|fp4", row.notes.lower()):
        engine = in_eight_bits(engine, factors.fp8)
    request = train_request(model, (cluster, factors), engine, (batch, length))
    # FSDP's selective recomputation: every second product is computed again, half-way to all
    half = option.recompute == "selective" and engine.name == FSDP.name
    lora = re.search(r"LoRA r=(\d+)", row.notes)
    dealt = "experts in their order" in row.notes
    whole, rank = 0.5 if half else 0.0, int(lora[1]) if lora else 0
    case = with_memory(Case(request, staged(request, option), group, whole, rank, dealt))
    return case if "Megatron" not in row.system or RECOMPUTE.search(row.notes.lower()) else _least_recompute(case)


def _least_recompute(case: Case) -> Case:
    """The case with the least recomputation with which it fits, as a user would set it where none is published.

    Where attention and element-wise operations are not enough, as few whole layers as fit (Megatron-Core's
    recompute_num_layers).
    """
    some, every = (replace(case, option=replace(case.option, recompute=way)) for way in ("selective", "full"))
    room = usable_bytes(case.request.cluster) - groups_of(case) - margin_of(some)
    fewest, least = footprint(some).total, footprint(every).total
    if fits(case):
        return case
    if fewest <= room:
        return some
    return replace(some, whole=(fewest - room) / (fewest - least)) if least <= room else case


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
    if "AutoModel" in row.system:
        return FSDP
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


def _as_unknown(case: Case) -> Case:
    """The case as that of a system that nobody has measured: without constants which its rows alone tell, the fabric of
    BLOOM's machine and the exposed traffic of llm-foundry's FSDP."""
    row, request = next(iter(case.rows.values())), case.request
    if "BLOOM" in row.system:
        cluster = replace(request.cluster, nic_bytes_per_s=JEAN_ZAY_WIRE_BYTES_PER_S)
        return replace(case, request=replace(request, cluster=cluster))
    if "llm-foundry" in row.system:
        engine = replace(request.engine, backend=replace(case.engine, exposed=FSDP.exposed))
        return replace(case, request=replace(request, engine=engine))
    return case


def _seconds(case: Case, files: str = FILES_OF) -> float:
    """Seconds of one optimizer step, with what the engine or the machine adds to the arithmetic.

    files: the kind of device whose machine counts every tensor of a file.
    """
    notes, seconds = next(iter(case.rows.values())).notes, case.seconds(case.option.recompute)
    if case.whole:
        seconds = (1 - case.whole) * seconds + case.whole * case.seconds("full")
    if case.engine.name == DEEPSPEED_2022.name and re.search(r"02-2[0-4]", notes):
        seconds *= SLOW_NUMA
    if footprint(case).total > CROWDED_SHARE * usable_bytes(case.request.cluster):
        seconds *= CROWDED_SLOWDOWN
    if HANDS_OVER in notes:
        one = next(iter(case.rows.values()))
        seconds += written_seconds(case.model, case.lora_rank, each_tensor=one.gpu == files)
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
    unknown = _in_unit(case, row, _seconds(_as_unknown(case), files=""))
    moe, family = case.model.experts > 0, family_of(case.engine)
    regimes = tuple(regimes_of("train", case.model, case.layout))
    yield Prediction(row, "train", group, measured, predicted, moe, family, _inferred(row), regimes, unknown=unknown)


def _inferred(row: Row) -> str:
    """A note on a row whose device kind nobody published: the prediction for the kind before it."""
    if not re.search(r"GPU type\S* inferred", row.notes) or OTHER_KIND in row.gpu:
        return ""
    other = _case({row.metric: replace(row, gpu=OTHER_KIND)})
    converted = _in_unit(other, row, _seconds(other)) if isinstance(other, Case) else None
    return f"the device kind {row.gpu}, which the source does not print" + (
        f"; on {OTHER_KIND}s the prediction is {converted:.4g}" if converted is not None else ""
    )


def _in_unit(case: Case, row: Row, seconds: float) -> float | None:
    """Seconds of a step as the row's metric and unit have it; None where the unit is not read."""
    workload, devices = case.request.workload, case.layout.mesh.n_devices
    tokens = workload.n_samples * workload.max_new_tokens
    if row.metric == "step_time":
        converted = row.in_unit(seconds)
        return converted if isinstance(converted, float) else None
    if row.metric == EIGHT_N:
        return 8 * case.model.n_params() * tokens / seconds / devices / 1e12
    if not row.unit.startswith(("sample", "seq", "token")):
        return None
    amount = workload.n_samples if row.unit.startswith(("sample", "seq")) else tokens
    return amount / seconds / (devices if row.metric == "throughput_per_gpu" else 1)
