"""Predicted seconds of inference calls: forward passes over packed batches."""

import math

from realgraph.planner.costs.comm import collective_bytes_per_s, gather_seconds
from realgraph.planner.costs.compute.forward import forward_seconds, layer_seconds
from realgraph.planner.costs.compute.pipeline import stage_layers
from realgraph.planner.costs.compute.states import exposed_seconds, state_costs
from realgraph.planner.costs.compute.train import TrainWork, computed_on_cpu, fsdp_slowdown, hand_over_seconds, spread
from realgraph.planner.costs.layer import adapter_costs, layer_costs
from realgraph.planner.costs.overhead import dispatch_seconds
from realgraph.planner.costs.setting import Setting


def inference_seconds(setting: Setting, work: TrainWork) -> float:
    """One forward pass over the whole batch in micro-batches, through pipeline stages one after the other."""
    if setting.cluster.is_cpu:
        return _cpu_inference_seconds(setting, work)
    model, layout = setting.model, setting.layout
    per_device = work.tokens / (layout.dp * layout.cp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    tokens, context = per_device / count, work.context
    costs = layer_costs(setting, work.fp8)
    layer = layer_seconds(costs, tokens, context, work.imbalance) + costs.routing
    layer += adapter_costs(setting).at(tokens, context)
    head = costs.head.at(tokens, context)
    stage = stage_layers(model.layers, layout.pp, head / layer) * layer
    stage += hand_over_seconds(setting, tokens)
    passes = count * stage + (layout.pp - 1) * (model.layers * layer + head) / layout.pp
    passes *= spread(setting, work, per_device * layout.cp)
    if layout.sharding == "fsdp":
        engine = setting.engine
        passes += exposed_seconds(count * state_costs(setting).gather, passes, engine.dp_overlap, engine.exposed)
    return passes + dispatch_seconds(setting.costs, work.tokens / layout.dp / work.sample_tokens)


def _cpu_inference_seconds(setting: Setting, work: TrainWork) -> float:
    """On the CPU engine: dp only, nothing overlapped, prompts of a group computed once."""
    layout = setting.layout
    per_device = math.ceil(work.tokens / layout.dp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    computed = computed_on_cpu(work, per_device / count)
    forward = forward_seconds(setting, computed, work.context) + setting.costs.microbatch_seconds
    gathered = 0.0
    if layout.sharding == "fsdp":
        nbytes = setting.element * setting.model.n_params(setting.role.head)
        gathered = gather_seconds(nbytes, layout.dp, collective_bytes_per_s(setting, layout.dp))
    passes = fsdp_slowdown(setting) * forward * count + count * gathered
    return passes + dispatch_seconds(setting.costs, per_device / work.sample_tokens)
