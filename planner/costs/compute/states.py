"""Seconds of what follows from a trained copy's states: gradients and weights between the dp copies, the optimizer."""

from functools import lru_cache

from msgspec import Struct

from realgraph.planner.costs.comm import allreduce_seconds, axis_link, gather_seconds, hop_seconds
from realgraph.planner.costs.memory.memory import expert_copies, master_bytes, trained_expert_ranks
from realgraph.planner.costs.overhead import Operation, optimizer_bytes_per_s
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.axes import stride_of

EXPOSED_SHARE = 0.25  # of traffic that could hide, where no engine says otherwise
REPLICATED_EXPOSED_SHARE = 0.3  # of traffic that could hide in one backward pass: buckets wait for their last gradient


class StateCosts(Struct, frozen=True):
    """Seconds on one device."""

    step: float  # traffic of one optimizer step
    gather: float  # of one micro-batch's gathers of FSDP
    scatter: float  # of one micro-batch's scatters of FSDP
    optimizer: float  # of one step
    accumulate: float  # gradients added to their sum, in each micro-batch after the first


@lru_cache(maxsize=1 << 14)
def state_costs(setting: Setting, trained_share: float = 1.0) -> StateCosts:
    """Traffic and optimizer of a trained copy under a setting; trained_share: of its parameters, all by default.

    Whole copies reduce gradients once a step, and a distributed optimizer gathers new weights after it; that moves as
    much as an all-reduce. FSDP gathers each layer before its forward and its backward pass and scatters its gradients.
    Experts are cut over ep ranks of the dp copies and reduced between those that hold the same ones.
    """
    layout, engine = setting.layout, setting.engine
    dense, routed = stage_params(setting)
    groups = [(dense, layout.dp * layout.cp, stride_of(layout, "cp"))]  # cp and dp are neighbours in that order
    if routed:
        groups.append((routed, expert_copies(layout), trained_expert_ranks(layout)))
    half = setting.role.dtype in ("bfloat16", "float16")
    gradient = engine.gradient_bytes if half else master_bytes(setting.role)
    parts = [
        _StateHolders(size, min(apart, setting.cluster.devices_per_node), trained_share * gradient * params, params)
        for params, size, apart in groups
    ]
    step = gather = scatter = 0.0
    if layout.sharding == "replicated":
        step = sum(_step_seconds(setting, part, trained_share) for part in parts)
    else:
        layers = setting.model.layers / layout.pp
        gather = sum(_moved_seconds(setting, part, "gather", setting.element * part.params, layers) for part in parts)
        scatter = sum(_moved_seconds(setting, part, "scatter", part.gradients, layers) for part in parts)
    moved = engine.sum_bytes * (dense + routed) * trained_share
    accumulate = moved / (setting.cluster.memory_bytes_per_s * setting.costs.memory)
    optimizer = _optimizer_seconds(setting, dense * trained_share, routed * trained_share)
    return StateCosts(step, gather, scatter, optimizer, accumulate)


class _StateHolders(Struct, frozen=True):
    """Devices, `apart` from each other, that hold the same `params` parameters with so many bytes of gradients."""

    size: int
    apart: int
    gradients: float
    params: float


def _step_seconds(setting: Setting, group: _StateHolders, trained_share: float) -> float:
    """Traffic of one optimizer step of whole copies."""
    if not setting.engine.distributed:
        rate = axis_link(setting, group.size, group.apart).bytes_per_s
        return allreduce_seconds(group.gradients, group.size, rate, 0.0) + 2 * hop_seconds(setting, group.size)
    weights = setting.element * group.params * trained_share
    summed = (1 + setting.engine.reduces_all) * _moved_seconds(setting, group, "scatter", group.gradients, 0.0)
    latency = hop_seconds(setting, group.size, "scatter") + hop_seconds(setting, group.size, "gather")
    return summed + _moved_seconds(setting, group, "gather", weights, 0.0) + latency


def _moved_seconds(setting: Setting, group: _StateHolders, operation: Operation, nbytes: float, times: float) -> float:
    """`nbytes` gathered on each device of a group, or scattered from it, in so many operations."""
    rate = axis_link(setting, group.size, group.apart, operation).bytes_per_s
    return gather_seconds(nbytes, group.size, rate, 0.0) + times * hop_seconds(setting, group.size, operation)


def _optimizer_seconds(setting: Setting, dense: float, routed: float) -> float:
    """One AdamW step on this device's share: reads and writes gradient, moments, master and weight."""
    layout = setting.layout
    cut = layout.sharding == "fsdp" or setting.engine.distributed
    share = dense / (layout.dp * layout.cp) + routed / expert_copies(layout) if cut else dense + routed
    return 8 * master_bytes(setting.role) * share / optimizer_bytes_per_s(setting) + (
        setting.costs.optimizer_step_seconds or setting.engine.step_seconds
    )


def stage_params(setting: Setting) -> tuple[float, float]:
    """Parameters of one device's part of a copy, before dp cuts them: all but routed experts, and routed experts."""
    model, layout = setting.model, setting.layout
    routed = model.routed_params()
    dense = model.n_params(setting.role.head) - routed
    return dense / (layout.tp * layout.pp), routed / (trained_expert_ranks(layout) * layout.pp)


def exposed_seconds(traffic: float, compute: float, overlap: float, least: float = EXPOSED_SHARE) -> float:
    """Seconds that are left of traffic that travels beside a share `overlap` of compute; never less than the share
    `least`."""
    return max(least * traffic, traffic - overlap * compute)
