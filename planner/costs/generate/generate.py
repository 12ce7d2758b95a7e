"""Predicted seconds of a generate call: prefill, and decode steps under continuous batching over a distribution of
lengths, down to the few long sequences at the end of a batch."""

import math
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.compute.forward import forward_seconds
from realgraph.planner.costs.generate.decode import decode_seconds as decode_seconds
from realgraph.planner.costs.generate.decode import decode_step, slowest_stage, uneven_stages
from realgraph.planner.costs.generate.occupancy import Occupancy, occupancy
from realgraph.planner.costs.lengths import Lengths, lengths_of
from realgraph.planner.costs.memory.terms import PREFILL_TOKENS
from realgraph.planner.costs.overhead import pass_layer_seconds, rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import mean_seen, seen_by

# Switches of these kinds' servers add up inside the network (NCCL's NVLS algorithm, NCCL 2.17 release notes).
REDUCING_SWITCHES = ("H100-SXM", "H200", "H800", "H20", "B200", "GB200", "B300", "GB300")

# Decode steps that one more prefill takes, besides the work of its tokens, which is the same in any prefill: it reads
# all weights once more. On CPUs 0.25 to 1 come out alike.
PREFILL_STEPS = 0.5


class GenerateWork(Struct, frozen=True):
    """The work of one generate call."""

    samples: int  # of the whole batch
    samples_per_group: int
    prompt_tokens: float  # of a prompt, mean over the samples
    mean_new_tokens: float  # of a response, mean over the samples
    max_new_tokens: int
    running: int  # sequences that a replica runs at once
    # measured new tokens at equal steps of probability, rising; without them the lengths are log-normal, cut at
    # max_new_tokens
    lengths: tuple[int, ...] = ()
    # for which running sequences stand still at a weight update, besides the move of the weights and their new prefill
    stall_seconds: float = 0.0
    wake_seconds: float = 0.0  # of a stream's engine after a pause, besides the new prefill

    @property
    def distribution(self) -> Lengths:
        return lengths_of(self.mean_new_tokens, self.max_new_tokens, self.lengths)


def generate_seconds(setting: Setting, work: GenerateWork) -> float:
    """All samples of a batch: prefill of each group's prompt once, then decode steps until the last sample has ended.

    Replicas get equal parts of the groups and all wait for the slowest. A slot whose sequence ends takes the next one.
    """
    share = work.samples / setting.layout.dp
    return sum(phase_seconds(setting, work)) + rollout_dispatch_seconds(setting.costs, share)


def prefill_seconds(setting: Setting, tokens: float, prompt: float) -> float:
    """Seconds of one replica to compute the keys and values of `tokens` tokens in sequences of `prompt` tokens.

    Passes of at most PREFILL_TOKENS; logits are needed of last tokens only and left out. Stages of a pipeline work on
    different passes, as fast as the slowest of them.
    """
    if tokens <= 0:
        return 0.0
    flops = setting.engine.product_speedup * setting.cluster.flops
    headless = replace(setting.role, head="value")
    engine = replace(setting, role=headless, cluster=replace(setting.cluster, flops=flops), backend=_serving(setting))
    count = max(1.0, tokens / PREFILL_TOKENS)
    seen = seen_by(engine, lambda window: mean_seen(prompt, window))
    one, slowest = forward_seconds(engine, tokens / count, seen.mean), slowest_stage(setting)
    if uneven := uneven_stages(setting):
        hidden = forward_seconds(engine, tokens / count, seen.full) - forward_seconds(
            engine, tokens / count, seen.windowed
        )
        slowest = max(ratio + fewer * hidden / one for ratio, fewer in uneven)
    return one * (slowest * count + setting.layout.pp - 1) / setting.layout.pp


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


def phase_seconds(setting: Setting, work: GenerateWork) -> tuple[float, float]:
    """Seconds of prefill and of decoding."""
    share = work.samples / setting.layout.dp
    prompts = max(1, math.ceil(share / work.samples_per_group)) * work.prompt_tokens
    prefill = prefill_seconds(setting, prompts, work.prompt_tokens)
    if setting.cluster.is_cpu:
        prefill += _refills(work, share) * setting.model.layers * pass_layer_seconds(setting.costs)
    return prefill, _decode_seconds(setting, work, share)


def _decode_seconds(setting: Setting, work: GenerateWork, share: float) -> float:
    """A CPU engine draws a sequence's first token from its prefill, in a step that decodes only what runs beside it."""
    step, filled = decode_step(setting), occupancy_of(setting, work)
    if not setting.cluster.is_cpu:
        return filled.seconds(lambda running, age: step(running, work.prompt_tokens + age))
    if work.distribution.longest <= 1:
        return 0.0
    waves, new = _waves(work, share), 0.0  # part of what runs at a step that came with it
    if work.distribution.deviation:
        waves, new = 0.0, waves / (1 + waves) / max(1.0, work.distribution.mean)
    seconds = filled.seconds(lambda running, age: step((1 - new) * running, work.prompt_tokens + age))
    first = step((1 - new) * filled.running[:1], work.prompt_tokens + filled.age[:1])  # none of it decodes
    return max(0.0, seconds - (1 + waves) * float(first[0]))


def _waves(work: GenerateWork, share: float) -> float:
    """The times that a replica's slots are filled again."""
    return max(0.0, share / max(1, work.running) - 1)


def _refills(work: GenerateWork, share: float) -> float:
    """Steps of the CPU engine that take in prompts beside those that run, each a pass of its own: where lengths are
    equal, all slots are free at once."""
    if not work.distribution.deviation:
        return _waves(work, share)
    return min(_waves(work, share) * max(1.0, work.distribution.mean / _steps_between_refills(work)), share)


def _steps_between_refills(work: GenerateWork) -> float:
    """Steps between two of them where lengths differ: of n slots n / mean are free after a step, twice as many after
    two, until the tokens that they have not drawn, in steps of n, take as long as a prefill (`AdmissionDelay`)."""
    return max(1.0, math.sqrt(2 * PREFILL_STEPS * work.distribution.mean))


def slots_in_use(work: GenerateWork) -> int:
    """The CPU engine's, on average, while others wait. Of n slots n T / mean become free in the T steps between two
    refills. A quarter of those count as empty: half of them would be on average, but where the cache is what limits
    them, sequences that have just begun leave room for more than n (`tests/test_paged_cache.py` compares)."""
    if not work.distribution.deviation:
        return max(1, work.running)
    free = min(1.0, _steps_between_refills(work) / max(1.0, work.distribution.mean)) / 4
    return max(1, round(work.running * (1 - free)))


def occupancy_of(setting: Setting, work: GenerateWork) -> Occupancy:
    """The phases of the batch, whatever a step costs."""
    replicas = min(setting.layout.dp, work.samples)
    share, slots = work.samples / replicas, max(1, work.running)
    if setting.cluster.is_cpu and share > slots:
        slots = slots_in_use(work)
    return occupancy(work.distribution, share, slots, replicas)
