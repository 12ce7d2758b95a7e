"""Predicted seconds of a generate call: prefill, and decode steps under continuous batching over a distribution of
lengths, down to the few long sequences at the end of a batch."""

import math
from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.compute.forward import forward_seconds
from realgraph.planner.costs.generate.decode import ROLE_PRECISION, DecodeStep, Precision, decode_step, engine_flops
from realgraph.planner.costs.generate.decode import decode_seconds as decode_seconds
from realgraph.planner.costs.generate.occupancy import Occupancy, occupancy
from realgraph.planner.costs.lengths import Floats, Lengths, lengths_of, shorter
from realgraph.planner.costs.memory.terms import PREFILL_TOKENS
from realgraph.planner.costs.overhead import pass_layer_seconds, rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting

PREFILL_DRAWS = 1.0  # tokens of a sample that the CPU engine's prefill tells, so that no decode step has to
# Switches of these kinds' servers add up inside the network (NCCL's NVLS algorithm, NCCL 2.17 release notes).
REDUCING_SWITCHES = ("H100-SXM", "H200", "H800", "H20", "B200", "GB200", "B300", "GB300")
TAIL_RUNNING_SHARE = 0.1  # of the largest number of running sequences: what counts as the tail of a batch


class GenerateWork(Struct, frozen=True):
    """Samples of the whole batch and of one group, their lengths in tokens, and how many a replica runs at once.

    prompt_tokens and mean_new_tokens are means over the samples. lengths: measured new tokens at equal steps of
    probability, rising; without them the lengths are log-normal, cut at max_new_tokens. stall_seconds: for which
    running sequences stand still at a weight update, besides the move of the weights and their new prefill.
    """

    samples: int
    samples_per_group: int
    prompt_tokens: float
    mean_new_tokens: float
    max_new_tokens: int
    running: int
    lengths: tuple[int, ...] = ()
    precision: Precision = ROLE_PRECISION
    stall_seconds: float = 0.0

    @property
    def distribution(self) -> Lengths:
        return lengths_of(self.mean_new_tokens, self.max_new_tokens, self.lengths)


class Generation(Struct, frozen=True):
    """A synchronous generate call, of the slowest replica.

    tail_share: of the seconds with fewer than a tenth of the largest number of sequences running. tokens_per_second:
    new tokens of the whole mesh. running: mean number of sequences on a replica. roofline_share: seconds that reading
    weights and caches at the memory's peak rate would take, over the seconds of decoding.
    """

    seconds: float
    prefill_seconds: float
    decode_seconds: float
    tail_share: float
    tokens_per_second: float
    running: float
    roofline_share: float


def generate_seconds(setting: Setting, work: GenerateWork) -> float:
    """All samples of a batch: prefill of each group's prompt once, then decode steps until the last sample has ended.

    Replicas get equal parts of the groups and all wait for the slowest. A slot whose sequence ends takes the next one.
    """
    share = work.samples / setting.layout.dp
    return sum(_phases(setting, work)) + rollout_dispatch_seconds(setting.costs, share)


def generation(setting: Setting, work: GenerateWork) -> Generation:
    """The same call with what a report says of it."""
    prefill, decode = _phases(setting, work)
    step, shape = decode_step(setting, work.precision), _occupancy(setting, work)
    seconds = shape.steps * step(shape.running, work.prompt_tokens + shape.age)
    few = shape.running < TAIL_RUNNING_SHARE * shape.running.max(initial=0.0)
    ideal = shape.steps * read_seconds(setting, step, shape.running, work.prompt_tokens + shape.age)
    total = prefill + decode + rollout_dispatch_seconds(setting.costs, work.samples / setting.layout.dp)
    return Generation(
        seconds=total,
        prefill_seconds=prefill,
        decode_seconds=decode,
        tail_share=float(seconds[few].sum() / total),
        tokens_per_second=work.samples * work.distribution.mean / total,
        running=float(np.dot(seconds, shape.running) / max(1e-12, float(seconds.sum()))),
        roofline_share=float(ideal.sum() / max(1e-12, float(seconds.sum()))),
    )


def prefill_seconds(setting: Setting, precision: Precision, tokens: float, prompt: float) -> float:
    """Seconds of one replica to compute the keys and values of `tokens` tokens in sequences of `prompt` tokens.

    Passes of at most PREFILL_TOKENS; logits are needed of last tokens only and left out. Stages of a pipeline work on
    different passes.
    """
    if tokens <= 0:
        return 0.0
    flops = setting.cluster.flops * engine_flops(setting, precision) / setting.flops
    headless = replace(setting.role, head="value")
    engine = replace(setting, role=headless, cluster=replace(setting.cluster, flops=flops), backend=_serving(setting))
    count = max(1.0, tokens / PREFILL_TOKENS)
    one = forward_seconds(engine, tokens / count, prompt / 2)
    return one * (count + setting.layout.pp - 1) / setting.layout.pp


@lru_cache(maxsize=64)
def _server(tp_overlap: float) -> Backend:
    return Backend("serving", tp_overlap=tp_overlap, sequence_parallel=False)


def _serving(setting: Setting) -> Backend:
    """Engines that serve run forward passes without overlap, with norms and residuals whole on every rank.

    Of a ring's 2 (n - 1) / n buffers of traffic a reducing switch leaves (n + 1) / n.
    """
    n = setting.layout.tp
    inside = 2 < n <= setting.cluster.devices_per_node and setting.cluster.kind in REDUCING_SWITCHES
    return _server(1 - (n + 1) / (2 * (n - 1)) if inside else 0.0)


def read_seconds(setting: Setting, step: DecodeStep, running: Floats, context: Floats) -> Floats:
    """Seconds of a decode step that only reads weights and caches, at the peak rate of the memory."""
    experts = step.expert_read * -np.expm1(running * step.group * step.unchosen)
    weights = (step.dense_read + experts) * setting.costs.memory
    return weights + running * context * step.cache_token * setting.costs.kv


def _phases(setting: Setting, work: GenerateWork) -> tuple[float, float]:
    """Seconds of prefill and of decoding."""
    share = work.samples / setting.layout.dp
    prompts = max(1, math.ceil(share / work.samples_per_group)) * work.prompt_tokens
    prefill = prefill_seconds(setting, work.precision, prompts, work.prompt_tokens)
    if setting.cluster.is_cpu:
        prefill += _refills(work, share) * setting.model.layers * pass_layer_seconds(setting.costs)
    step = decode_step(setting, work.precision)
    decode = _occupancy(setting, work).seconds(lambda running, age: step(running, work.prompt_tokens + age))
    return prefill, decode


def _refills(work: GenerateWork, share: float) -> float:
    """Steps of the CPU engine that take in prompts beside those that run, each a pass of its own: where lengths differ,
    some slot is free at every step until nothing waits; where they are equal, all slots are free at once."""
    waves = max(0.0, share / max(1, work.running) - 1)
    return waves * (max(1.0, work.distribution.mean - PREFILL_DRAWS) if work.distribution.deviation else 1.0)


def _occupancy(setting: Setting, work: GenerateWork) -> Occupancy:
    replicas = min(setting.layout.dp, work.samples)
    drawn = PREFILL_DRAWS if setting.cluster.is_cpu else 0.0
    lengths = shorter(work.distribution, drawn)
    return occupancy(lengths, work.samples / replicas, max(1, work.running), replicas)
