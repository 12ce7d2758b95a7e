"""Costs that no arithmetic explains: fixed seconds of passes, steps, collectives and calls, and what the CPU engine
shares.

A large model's calls hardly notice them; a small model's are made of them. `realgraph profile` measures them.
"""

from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.devices import EfficiencyFactors

COLLECTIVE_SECONDS = 1e-5  # latency of one collective operation where none was measured


def elementwise_bytes_per_s(setting: Setting) -> float:
    """Bandwidth of a pass's element-wise operations: activations of a small model stay in caches, those of a large one
    do not."""
    costs = setting.costs
    return setting.cluster.memory_bytes_per_s * (costs.elementwise or costs.memory)


def optimizer_bytes_per_s(setting: Setting) -> float:
    """Bandwidth of an optimizer step: states of a small model stay in caches."""
    costs = setting.costs
    return setting.cluster.memory_bytes_per_s * (costs.optimizer or costs.memory)


def pass_layer_seconds(costs: EfficiencyFactors) -> float:
    """Fixed seconds of one layer in a packed forward pass: what is spent between its operations."""
    return costs.layer_seconds if costs.pass_layer_seconds is None else costs.pass_layer_seconds


def collective_seconds(costs: EfficiencyFactors) -> float:
    """Latency of one collective operation."""
    return COLLECTIVE_SECONDS if costs.collective_seconds is None else costs.collective_seconds


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
