"""Predicted seconds of inference calls: forward passes over packed batches."""

import math

from realgraph.planner.cost import Setting
from realgraph.planner.cost_comm import collective_bytes_per_s, gather_seconds
from realgraph.planner.cost_forward import forward_seconds
from realgraph.planner.cost_overhead import dispatch_seconds
from realgraph.planner.cost_train import TrainWork, fsdp_slowdown, shared_prompts


def inference_seconds(setting: Setting, work: TrainWork) -> float:
    """One forward pass over the whole batch in micro-batches."""
    layout = setting.layout
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    computed = per_device / count * shared_prompts(setting, work, per_device / count)
    forward = forward_seconds(setting, computed, work.sample_tokens / 2)
    gathered = 0.0
    if layout.sharding == "fsdp":
        nbytes = setting.element * setting.model.n_params(setting.role.head) / (layout.tp * layout.pp)
        gathered = gather_seconds(nbytes, layout.dp * layout.cp, collective_bytes_per_s(setting, layout.dp))
    passes = fsdp_slowdown(setting) * forward * (count + layout.pp - 1) / layout.pp + count * gathered
    return passes + dispatch_seconds(setting.costs, per_device / work.sample_tokens)
