"""From the measurements of a profile to a device's factors: all `EfficiencyFactors`, through the cost formulas.

The formulas themselves are fitted, stage by stage: kernels first, then collectives, passes and decode steps, whose
fixed seconds are what arithmetic leaves over. Pure; reads no clock and no file.
"""

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import fields, replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.calibrate.calibrate import Fit, Point, fit_costs
from realgraph.planner.costs.calibrate.measurements import (
    AttentionCase,
    Case,
    Collective,
    DecodeCase,
    DeviceCopy,
    Gemm,
    HostLink,
    Measured,
    Pass,
    RolloutCase,
)
from realgraph.planner.costs.comm import allreduce_seconds, gather_seconds
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.move import offload_seconds
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.generate.decode import decode_seconds
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.costs.overhead import Operation, collective_seconds, link_share
from realgraph.planner.costs.setting import Setting, dtype_rate, gemm_efficiency
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request.cost_table import Phase, PhaseFactor

FORWARD_FACTORS = ("elementwise", "pass_layer_seconds", "call_seconds", "microbatch_seconds")
TRAINING_FACTORS = ("backward", "optimizer", "optimizer_step_seconds")
DECODING_FACTORS = ("kv", "step_seconds", "layer_seconds", "sequence_seconds")
FIT_STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("matrix products", ("gemm", "gemm_tokens", "gemm_width")),
    ("copies", ("memory",)),
    ("host copies", ("host",)),
    ("attention", ("attention",)),
    ("collectives", ("link", "collective_seconds")),
    ("gathers", ("gather", "gather_seconds")),
    ("scatters", ("scatter", "scatter_seconds")),
    ("exchanges", ("exchange", "exchange_seconds")),
    ("messages", ("p2p", "p2p_seconds")),
    ("passes", (*FORWARD_FACTORS, *TRAINING_FACTORS)),
    ("decoding", DECODING_FACTORS),
    ("rollouts", ("admission_seconds",)),
)
COLLECTIVE_STAGES: dict[Operation, str] = {
    "allreduce": "collectives",
    "gather": "gathers",
    "scatter": "scatters",
    "exchange": "exchanges",
    "p2p": "messages",
}
PHASE_FACTORS: dict[Phase, tuple[str, ...]] = {
    "train": ("passes", "calls"),
    "inference": ("passes", "calls"),
    "generate": ("decoding", "rollouts", "calls"),
    "reallocate": ("collectives", "copies"),
}
FORMULA_ERROR = 0.1  # natural log: how close a formula is expected to come to a case
EXTRAPOLATION_ERROR = 0.1  # from the profile's small models to another


class Stage(Struct, frozen=True):
    """The result of one group of measurements: the fields that it set and the error that is left, in logarithms."""

    name: str
    fields: tuple[str, ...]
    error: float
    count: int


class Profiled(Struct, frozen=True):
    """The factors of a device, and how they were found."""

    costs: EfficiencyFactors
    stages: tuple[Stage, ...]


def profiled(measured: Sequence[Measured], cluster: Cluster, dtype: DType) -> Profiled:
    """Fit every field that something was measured for; the others keep the kind's own value."""
    own = device_kind(cluster.kind).costs
    costs, stages = replace(own, call_seconds=0.0, sample_seconds=0.0), []
    for name, free in FIT_STAGES:
        points = [_point(one, cluster, dtype) for one in measured if _stage(one.case) == name]
        if not points:
            continue
        fit: Fit = fit_costs(replace(costs, **_without_own(free)), free, points)
        costs = fit.costs
        stages.append(Stage(name, free, fit.error, len(points)))
    fitted = {field: getattr(costs, field) for stage in stages for field in stage.fields}
    return Profiled(replace(own, **fitted), tuple(stages))


def _without_own(free: Sequence[str]) -> dict[str, float | None]:
    """The fields that most kinds have no value of, with none: a fit begins better there than at a slower machine's."""
    return {one.name: one.default for one in fields(EfficiencyFactors) if one.name in free and not one.default}


def _stage(case: Case) -> str:
    match case:
        case Gemm():
            return "matrix products"
        case DeviceCopy():
            return "copies"
        case AttentionCase():
            return "attention"
        case Collective(op=op):
            return COLLECTIVE_STAGES[op]
        case Pass():
            return "passes"
        case DecodeCase():
            return "decoding"
        case RolloutCase():
            return "rollouts"
        case HostLink():
            return "host copies"


def _point(one: Measured, cluster: Cluster, dtype: DType) -> Point:
    """The least seconds of a case, with an error as large as the disagreement of its repeats."""
    error = math.hypot(FORMULA_ERROR, math.log1p(one.spread))
    return Point(lambda costs: predicted_seconds(one.case, cluster, dtype, costs), one.seconds, error)


def phase_errors(stages: Sequence[Stage]) -> dict[Phase, PhaseFactor]:
    """No factor, but an error bar for each phase: what its stages' formulas miss on small models, and what a larger
    model may add to that."""
    errors: dict[Phase, PhaseFactor] = {}
    for phase, names in PHASE_FACTORS.items():
        own = [stage for stage in stages if stage.name in names]
        if own:
            error = math.sqrt(sum(stage.error**2 for stage in own) + EXTRAPOLATION_ERROR**2)
            errors[phase] = PhaseFactor(error=error, count=sum(stage.count for stage in own))
    return errors


def predicted_seconds(case: Case, cluster: Cluster, dtype: DType, costs: EfficiencyFactors) -> float:
    """Seconds of a case by the cost model."""
    flops = cluster.flops * dtype_rate(dtype, cluster.is_cpu)
    match case:
        case Gemm(tokens=tokens, width=width):
            return 2.0 * tokens * width**2 / (flops * gemm_efficiency(costs, tokens, width))
        case AttentionCase():
            return case.flops / (flops * costs.attention)
        case DeviceCopy(nbytes=nbytes):
            return 2 * nbytes / (cluster.memory_bytes_per_s * costs.memory)
        case Collective():
            return _collective_seconds(case, cluster, costs)
        case Pass():
            return _pass_seconds(case, setting_of(case.model, cluster, dtype, costs))
        case DecodeCase(running=running, context=context):
            return decode_seconds(setting_of(case.model, cluster, dtype, costs), running, context)
        case RolloutCase():
            return _rollout_seconds(case, setting_of(case.model, cluster, dtype, costs))
        case HostLink(nbytes=nbytes):
            return offload_seconds(cluster, nbytes, costs)


def _collective_seconds(case: Collective, cluster: Cluster, costs: EfficiencyFactors) -> float:
    rate = cluster.link_bytes_per_s * link_share(costs, case.op)
    latency = collective_seconds(cluster, costs, case.op)
    if case.op == "p2p":
        return 2 * (case.nbytes / rate + latency)
    moved = allreduce_seconds if case.op == "allreduce" else gather_seconds
    return moved(case.nbytes, case.ranks, rate, latency)


def setting_of(model: ModelSpec, cluster: Cluster, dtype: DType, costs: EfficiencyFactors) -> Setting:
    """A model as data-parallel copies on all devices of the node."""
    devices = cluster.devices_per_node
    layout = Layout(DeviceMesh(0, devices), dp=devices)
    return Setting(model, ModelRole(trainable=True, dtype=dtype), layout, cluster, costs)


def _pass_seconds(case: Pass, setting: Setting) -> float:
    tokens = case.samples * case.length
    work = TrainWork(tokens * setting.layout.dp, float(case.length), tokens // case.microbatches)
    return train_seconds(setting, work) if case.train else inference_seconds(setting, work)


def _rollout_seconds(case: RolloutCase, setting: Setting) -> float:
    work = GenerateWork(
        samples=case.groups * case.per_group * setting.layout.dp,
        samples_per_group=case.per_group,
        prompt_tokens=float(case.prompt),
        mean_new_tokens=float(case.new),
        max_new_tokens=case.new,
        running=case.running,
    )
    return generate_seconds(setting, work)
