"""Seconds of what follows from a trained copy's states: gradients and weights between the dp copies, the optimizer."""

from functools import lru_cache

from msgspec import Struct

from realgraph.planner.costs.comm import allreduce_seconds, axis_link, gather_seconds, hop_seconds
from realgraph.planner.costs.memory.memory import expert_copies, lora_params, master_bytes, trained_expert_ranks
from realgraph.planner.costs.overhead import optimizer_bytes_per_s
from realgraph.planner.costs.setting import Setting

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
def state_costs(setting: Setting) -> StateCosts:
    """Traffic and optimizer of a trained copy under a setting.

    Whole copies reduce gradients once a step, and a distributed optimizer gathers new weights after it; that moves as
    much as an all-reduce. FSDP gathers each layer before its forward and its backward pass and scatters its gradients.
    Experts are cut over ep ranks of the dp copies and reduced between those that hold the same ones.
    """
    layout, engine = setting.layout, setting.engine
    dense, routed = stage_params(setting)
    trained = trained_share(setting)
    groups = [(dense, layout.dp * layout.cp, layout.tp)]
    if routed:
        groups.append((routed, expert_copies(layout), trained_expert_ranks(layout)))
    gradient = engine.gradient_bytes if setting.role.dtype != "float32" else master_bytes(setting.role)
    step = gather = scatter = 0.0
    for params, size, apart in groups:
        rate = axis_link(setting, size, min(apart, setting.cluster.devices_per_node)).bytes_per_s
        if layout.sharding == "replicated":
            if engine.distributed:
                once = gather_seconds(gradient * params * trained, size, rate, 0.0)
                step += (1 + engine.reduces_all) * once
                step += gather_seconds(setting.element * params * trained, size, rate, 0.0)
            else:
                step += allreduce_seconds(gradient * params * trained, size, rate, 0.0)
            step += 2 * hop_seconds(setting, size)
            continue
        latency = setting.model.layers / layout.pp * hop_seconds(setting, size)
        gather += gather_seconds(setting.element * params, size, rate, 0.0) + (latency if size > 1 else 0.0)
        scatter += gather_seconds(gradient * params * trained, size, rate, 0.0) + (latency if size > 1 else 0.0)
    moved = engine.sum_bytes * (dense + routed) * trained
    accumulate = moved / (setting.cluster.memory_bytes_per_s * setting.costs.memory)
    return StateCosts(step, gather, scatter, _optimizer_seconds(setting, dense * trained, routed * trained), accumulate)


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


def trained_share(setting: Setting) -> float:
    """Share of the parameters that an optimizer step changes: all, or those of adapters."""
    if not setting.lora_rank:
        return 1.0
    return lora_params(setting.model, setting.lora_rank) / setting.model.n_params(setting.role.head)


def exposed_seconds(traffic: float, compute: float, overlap: float, least: float = EXPOSED_SHARE) -> float:
    """Seconds that are left of traffic that travels beside a share `overlap` of compute; never less than the share
    `least`."""
    return max(least * traffic, traffic - overlap * compute)
