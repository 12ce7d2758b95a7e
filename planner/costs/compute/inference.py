"""Predicted seconds of inference calls: forward passes over packed batches."""

import math

from realgraph.planner.costs.compute.cores import core_pass
from realgraph.planner.costs.compute.forward import layer_seconds
from realgraph.planner.costs.compute.pipeline import MicroBatch, forward_pipeline_seconds, with_surplus
from realgraph.planner.costs.compute.states import exposed_seconds, state_costs
from realgraph.planner.costs.compute.train import TrainWork, computed_on_cpu, fsdp_slowdown, hand_over_seconds, spread
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.overhead import dispatch_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import seen_by
from realgraph.planner.plan.stages import stages_of


def inference_seconds(setting: Setting, work: TrainWork) -> float:
    """One forward pass over the whole batch in micro-batches, through pipeline stages one after the other."""
    if setting.cluster.is_cpu:
        return _cpu_inference_seconds(setting, work)
    model, layout = setting.model, setting.layout
    per_device = work.tokens / (layout.dp * layout.cp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    tokens = per_device / count
    costs, stages = layer_costs(setting), stages_of(model, setting.role.head, layout)

    def microbatch(context: float) -> MicroBatch:
        layer = layer_seconds(costs, tokens, context, work.imbalance) + costs.routing
        return MicroBatch(layer, 0.0, costs.head.at(tokens, context), hand_over_seconds(setting, tokens))

    one = with_surplus(setting, stages, seen_by(setting, work.seen), microbatch)
    passes = forward_pipeline_seconds(one, stages, count)
    passes = passes * spread(setting, work, per_device * layout.cp) + count * setting.costs.microbatch_seconds
    if layout.sharding == "fsdp":
        engine = setting.engine
        passes += exposed_seconds(count * state_costs(setting).gather, passes, engine.dp_overlap, engine.exposed)
    return passes + dispatch_seconds(setting.costs, work.tokens / layout.dp / work.sample_tokens)


def _cpu_inference_seconds(setting: Setting, work: TrainWork) -> float:
    """On the CPU engine: nothing overlapped, prompts of a group computed once."""
    layout, model, costs = setting.layout, setting.model, core_pass(setting)
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = max(1, math.ceil(per_device / work.microbatch_tokens))
    tokens = computed_on_cpu(setting, work, per_device / count)
    imbalance = work.imbalance if layout.ep > 1 else 1.0
    layer = costs.own(tokens, work.context, imbalance) + costs.moved.at(tokens, work.context)
    head = costs.head.at(tokens, work.context) + costs.ends.at(tokens, work.context)
    one = MicroBatch(layer, 0.0, head, hand_over_seconds(setting, tokens))
    passes = forward_pipeline_seconds(one, stages_of(model, setting.role.head, layout), count)
    passes = fsdp_slowdown(setting) * (passes + count * setting.costs.microbatch_seconds)
    if layout.sharding == "fsdp":
        passes += count * state_costs(setting).gather
    return passes + dispatch_seconds(setting.costs, per_device * layout.cp / work.sample_tokens)
