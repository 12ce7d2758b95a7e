"""Costs that no arithmetic explains: fixed seconds of passes, steps, collectives and calls, and what the CPU engine
shares.

A large model's calls hardly notice them; a small model's are made of them. `realgraph profile` measures them.
"""

from typing import Literal

from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind

COLLECTIVE_SECONDS = 1e-5  # latency of one collective operation where none was measured
# What devices do with their links: `exchange` is an all-to-all, `p2p` a message from one device to another.
Operation = Literal["allreduce", "gather", "scatter", "exchange", "p2p"]


def elementwise_bytes_per_s(setting: Setting) -> float:
    """Bandwidth of a pass's element-wise operations: activations of a small model stay in caches, those of a large one
    do not."""
    return setting.cluster.memory_bytes_per_s * elementwise_share(setting.costs)


def elementwise_share(costs: EfficiencyFactors) -> float:
    """Share of the memory's bandwidth that a pass's element-wise operations reach."""
    return costs.elementwise or costs.memory


def optimizer_bytes_per_s(setting: Setting) -> float:
    """Bandwidth of an optimizer step: states of a small model stay in caches."""
    costs = setting.costs
    return setting.cluster.memory_bytes_per_s * (costs.optimizer or costs.memory)


def pass_layer_seconds(costs: EfficiencyFactors) -> float:
    """Fixed seconds of one layer in a packed forward pass: what is spent between its operations."""
    return costs.layer_seconds if costs.pass_layer_seconds is None else costs.pass_layer_seconds


def collective_seconds(cluster: Cluster, costs: EfficiencyFactors, operation: Operation = "allreduce") -> float:
    """Latency of one operation, of an all-reduce of either of its rounds; an all-reduce's where none was measured.

    Where processes share a core, who is waited for waits for its turn on it.
    """
    turns = max(1.0, device_kind(cluster.kind).flops / cluster.flops) if cluster.is_cpu else 1.0
    return turns * _latency_seconds(costs, operation)


def _latency_seconds(costs: EfficiencyFactors, operation: Operation) -> float:
    own: float | None = None if operation == "allreduce" else getattr(costs, f"{operation}_seconds")
    if own is not None:
        return own
    return COLLECTIVE_SECONDS if costs.collective_seconds is None else costs.collective_seconds


def link_share(costs: EfficiencyFactors, operation: Operation = "allreduce") -> float:
    """Fraction of the links' peak that an operation reaches; where it was not measured, an all-reduce's."""
    own: float = 0.0 if operation == "allreduce" else getattr(costs, operation)
    return own or costs.link


def dispatch_seconds(costs: EfficiencyFactors, samples: float) -> float:
    """Seconds of one call on one device beside its passes: the command, and `samples` to gather, pack and store."""
    return costs.call_seconds + samples * costs.sample_seconds


def rollout_dispatch_seconds(costs: EfficiencyFactors, samples: float) -> float:
    """Seconds of one generate call on one device beside its passes: `samples` taken in, given out and stored."""
    return dispatch_seconds(costs, samples) + samples * costs.admission_seconds


def computed_tokens(samples: float, groups: float, per_group: int, lengths: tuple[float, float]) -> float:
    """Tokens of a packed micro-batch that pass through the CPU engine's projections (runtime/attention/sharing.py).

    samples: of the micro-batch, drawn evenly from `groups` groups of `per_group`; lengths: of the prompt, which is
    computed once for all samples of a group in the micro-batch, and of a whole sample, whose last token nobody asks
    for. Expected distinct groups: groups x (1 - (1 - samples / (groups x per_group))^per_group). What responses have in
    common besides depends on the data and is left out.
    """
    prompt, whole = lengths
    drawn = min(1.0, samples / (groups * per_group))
    distinct = min(samples, max(1.0, groups * (1 - (1 - drawn) ** per_group)))
    return distinct * prompt + samples * max(0.0, whole - prompt - 1)
