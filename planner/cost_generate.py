"""Predicted seconds of generation: prefill, and decode steps as a roofline under continuous batching."""

import heapq
import math

from msgspec import Struct

from realgraph.planner.cost import Setting, gemm_efficiency
from realgraph.planner.cost_comm import allreduce_seconds, collective_bytes_per_s
from realgraph.planner.cost_forward import forward_seconds
from realgraph.planner.cost_overhead import rollout_dispatch_seconds
from realgraph.planner.memory import kv_bytes_per_token
from realgraph.planner.model_spec import ModelSpec

LENGTH_QUANTILES = 128  # sequences that stand for a device's share when generation is simulated


class GenerateWork(Struct, frozen=True):
    """Samples of the whole batch and of one group, their lengths in tokens, and how many a device runs at once.

    prompt_tokens and mean_new_tokens are means over the samples.
    """

    samples: int
    samples_per_group: int
    prompt_tokens: float
    mean_new_tokens: float
    max_new_tokens: int
    running: int


def decode_seconds(setting: Setting, running: float, context: float) -> float:
    """One decode step of `running` sequences of mean length `context` on one replica: bound by memory or arithmetic."""
    model, layout, cluster, costs = setting.model, setting.layout, setting.cluster, setting.costs
    active = model.active_params() + model.hidden * model.vocab
    bandwidth = cluster.memory_bytes_per_s
    read = setting.element * _touched_params(model, running) / layout.tp / (bandwidth * costs.memory)
    rate = setting.flops * gemm_efficiency(costs, running, model.hidden / layout.tp)
    computed = 2 * active * running / layout.tp / rate
    cache = kv_bytes_per_token(model, setting.role.dtype) / min(layout.tp, model.kv_heads)
    cached = running * context * cache / (bandwidth * costs.kv)
    nbytes = setting.element * running * model.hidden
    reduced = 2 * model.layers * allreduce_seconds(nbytes, layout.tp, collective_bytes_per_s(setting, layout.tp))
    fixed = costs.step_seconds + model.layers * costs.layer_seconds + running * costs.sequence_seconds
    return max(read, computed) + cached + reduced + fixed


def generate_seconds(setting: Setting, work: GenerateWork) -> float:
    """All samples of a batch: prefill of each group's prompt once, then continuous batching over `running` slots.

    A device's share is simulated by at most LENGTH_QUANTILES sequences at the quantiles of a truncated exponential
    distribution of lengths; a slot whose sequence ends takes the next one.
    """
    share = math.ceil(work.samples / setting.layout.dp)
    count = min(share, LENGTH_QUANTILES)
    scale = share / count  # real sequences behind each simulated one
    lengths = [length_quantile((i + 0.5) / count, work.mean_new_tokens, work.max_new_tokens) for i in range(count)]
    waiting = [lengths[i * _stride(count) % count] for i in range(count)]  # long and short ones mixed
    slots = max(1, min(count, round(work.running / scale)))
    ends = waiting[:slots]
    heapq.heapify(ends)
    queue, now, seconds = iter(waiting[slots:]), 0.0, 0.0
    while ends:
        end = heapq.heappop(ends)
        age = min(end, work.mean_new_tokens) / 2
        running = min(work.running, (len(ends) + 1) * scale)
        seconds += max(0.0, end - now) * decode_seconds(setting, running, work.prompt_tokens + age)
        now = max(now, end)
        following = next(queue, None)
        if following is not None:
            heapq.heappush(ends, now + following)
    prompts = math.ceil(share / work.samples_per_group) * work.prompt_tokens
    prefill = forward_seconds(setting, prompts, work.prompt_tokens / 2)
    return seconds + prefill + rollout_dispatch_seconds(setting.costs, share)


def length_quantile(share: float, mean: float, longest: int) -> float:
    """The length below which `share` of the samples fall: exponential, cut at `longest`, with the given mean.

    mean = scale (1 - exp(-longest / scale)): samples that would run on are cut, not redrawn.
    """
    if mean >= 0.99 * longest:
        return float(longest)
    low, high = mean, longest * 100.0
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if scale * -math.expm1(-longest / scale) < mean else (low, scale)
    return min(float(longest), -high * math.log1p(-share))


def _touched_params(model: ModelSpec, tokens: float) -> float:
    """Weights that a step of `tokens` tokens reads: of the experts, those that some token chose."""
    head = model.vocab * model.hidden
    if not model.expert_layers:
        return model.active_params() + head
    unchosen = math.exp(tokens * math.log1p(-model.experts_per_token / model.experts))
    chosen = model.experts * (1 - unchosen)
    routed = model.expert_layers * model.expert_params()
    return model.active_params() + head + routed * max(0.0, chosen - model.experts_per_token)


def _stride(count: int) -> int:
    """A step near the golden section of `count` and coprime to it: i x step visits every place, well mixed."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step
