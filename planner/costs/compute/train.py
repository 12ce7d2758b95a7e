"""Predicted seconds of training calls. Backward is twice the forward (arXiv:2001.08361, table 1).

On a GPU one model covers what this project's engines run and the wide space of a planner: recomputation, tensor,
pipeline, context and expert parallelism, sharded or distributed states. On CPUs passes have formulas of their own
(`cores.py`), and prompts of a group are computed once.
"""

import math

from msgspec import Struct

from realgraph.planner.costs.compute.cores import core_microbatch, shared_gradients_seconds
from realgraph.planner.costs.compute.forward import EXPERT_IMBALANCE, layer_seconds
from realgraph.planner.costs.compute.pipeline import MicroBatch, Pipeline, pipeline_seconds, with_surplus
from realgraph.planner.costs.compute.states import REPLICATED_EXPOSED_SHARE, StateCosts, exposed_seconds, state_costs
from realgraph.planner.costs.layer import BACKWARD_ATTENTION_RATIO, LayerCosts, layer_costs
from realgraph.planner.costs.lengths import Lengths, lognormal
from realgraph.planner.costs.overhead import collective_seconds, computed_tokens, dispatch_seconds, link_share
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import mean_context, mean_seen, seen_by
from realgraph.planner.plan.layout import Recompute as Recompute
from realgraph.planner.plan.layout import Schedule, Stages
from realgraph.planner.plan.stages import stages_of

SPREAD_POWER = 5  # power of the mean of a rank's even share and the longest sample
FSDP_SLOWDOWN_CPU = 1.3  # measured with FSDP2 on two processes: 1.27 at 30M parameters, 1.6 at 0.8M


class TrainWork(Struct, frozen=True):
    """The work of one train call."""

    tokens: int  # of the whole batch
    sample_tokens: float  # of a sample, the mean
    microbatch_tokens: int  # of a micro-batch
    optimizer_steps: int = 1  # of one epoch
    epochs: int = 1
    prompt_tokens: float = 0.0  # of a sample, equal in all `samples_per_group` samples of a group
    samples_per_group: int = 1
    # what the backward pass computes again; `selective` is attention and element-wise operations, `full` whole layers
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 2  # groups of layers of a stage, where the schedule is interleaved
    longest_tokens: int | None = None  # of the longest sample, None where all are equal
    imbalance: float = EXPERT_IMBALANCE  # tokens of the busiest expert's device over the mean
    responses: Lengths | None = None  # beside prompts; None: log-normal ones up to the longest

    @property
    def context(self) -> float:
        """`seen` without a window."""
        return self.seen(math.inf)

    def seen(self, window: float) -> float:
        """Tokens of its own sample, the last `window` at most, that a token attends to: mean over the tokens, of which
        long samples have more."""
        if self.responses is not None:
            return mean_context(self.prompt_tokens, self.responses, window)
        longest, response = self.longest_tokens or 0, self.sample_tokens - self.prompt_tokens
        if longest <= self.sample_tokens or response <= 0:
            return mean_seen(self.sample_tokens, window)
        return mean_context(self.prompt_tokens, lognormal(response, longest - self.prompt_tokens), window)


def microbatches(setting: Setting, work: TrainWork) -> int:
    """Number of micro-batches of one rank in one optimizer step.

    Interleaved stages take a multiple of their number (arXiv:2104.04473, sec. 2.2.2).
    """
    layout = setting.layout
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    count = max(1, math.ceil(per_device / work.optimizer_steps / work.microbatch_tokens))
    return layout.pp * math.ceil(count / layout.pp) if work.schedule == "interleaved" else count


def train_seconds(setting: Setting, work: TrainWork) -> float:
    """One train call: every epoch's micro-batches forward and backward, gradient reduction, and optimizer steps."""
    if setting.cluster.is_cpu:
        return _cpu_train_seconds(setting, work)
    return gpu_train_seconds(setting, work, layer_costs(setting), state_costs(setting))


def gpu_train_seconds(setting: Setting, work: TrainWork, layers: LayerCosts, states: StateCosts) -> float:
    """The same on GPUs, from costs of layers and states that the caller may have changed: some other engine's."""
    layout, steps, costs = setting.layout, work.optimizer_steps, setting.costs
    count = microbatches(setting, work)
    tokens = work.tokens / (layout.dp * layout.cp * steps)
    per_micro = tokens / count
    stages = _stages(setting, work)
    seen = seen_by(setting, work.seen)
    one = with_surplus(setting, stages, seen, lambda tokens: _microbatch(setting, work, layers, (per_micro, tokens)))
    passes = pipeline_seconds(one, Pipeline(stages, work.schedule), count)
    passes = passes * spread(setting, work, tokens * layout.cp) + count * costs.microbatch_seconds
    passes += (count - 1) * states.accumulate
    step = passes + _traffic_seconds(setting, states, one, count, passes) + states.optimizer
    dispatched = dispatch_seconds(costs, work.tokens / layout.dp / work.sample_tokens)
    return work.epochs * steps * step + dispatched


def _stages(setting: Setting, work: TrainWork) -> Stages:
    """The layers of the stages; an interleaved one of few layers has fewer chunks."""
    model, layout = setting.model, setting.layout
    chunks = min(work.chunks, model.layers // layout.pp) if work.schedule == "interleaved" and layout.pp > 1 else 1
    return stages_of(model, setting.role.head, layout, chunks)


def _microbatch(setting: Setting, work: TrainWork, layers: LayerCosts, size: tuple[float, float]) -> MicroBatch:
    """Seconds of one micro-batch. size: tokens on each cp rank, and tokens that each sees."""
    tokens, context = size
    forward = layer_seconds(layers, tokens, context, work.imbalance) + layers.routing
    gradients = layers.gradients.at(tokens, context) + work.imbalance * layers.expert_gradients.at(tokens, context)
    attention, traffic = layers.attention.at(tokens, context), layers.traffic.at(tokens, context)
    again = (BACKWARD_ATTENTION_RATIO - 1) * attention + (setting.costs.backward - 1) * traffic
    backward = forward + gradients + again
    recompute = work.recompute if work.recompute != "none" or not setting.role.gradient_checkpointing else "full"
    if recompute == "full":
        backward += forward
    elif recompute == "selective":
        backward += traffic + (attention if setting.engine.attention == "unfused" else 0.0)
    head = layers.head.at(tokens, context) + layers.head_backward.at(tokens, context)
    return MicroBatch(forward, backward, head, hand_over_seconds(setting, tokens))


def hand_over_seconds(setting: Setting, tokens: float) -> float:
    """One stage's hidden states to the next, each tp rank its part; between nodes where a stage fills one."""
    layout, cluster, engine = setting.layout, setting.cluster, setting.engine
    if layout.pp == 1:
        return 0.0
    nbytes = setting.element * tokens * setting.model.hidden / layout.tp
    inside = layout.mesh.n_devices <= cluster.devices_per_node
    link = cluster.link_bytes_per_s * link_share(setting.costs, "p2p")
    rate = link if inside else cluster.nic_bytes_per_s * setting.costs.nic
    return (nbytes / rate + collective_seconds(cluster, setting.costs, "p2p")) * (1 - engine.p2p_overlap)


def spread(setting: Setting, work: TrainWork, tokens: float) -> float:
    """Busiest over mean dp rank, of `tokens` on average in one optimizer step; the cp ranks of one share its samples.

    Samples are dealt longest first, each to the rank with the fewest tokens: shares are nearly even unless one sample
    is about as long as a share, which is then the busiest. A power mean joins the two: within a tenth of what draws of
    such deals show from 4 samples a rank on, and exact for one (tests).
    """
    if setting.layout.dp == 1:
        return 1.0
    longest = max(work.longest_tokens or 0, work.sample_tokens) / tokens
    sample = min(1.0, work.sample_tokens / tokens)
    return float((1 + longest**SPREAD_POWER - sample**SPREAD_POWER) ** (1 / SPREAD_POWER))


def _traffic_seconds(setting: Setting, states: StateCosts, one: MicroBatch, count: int, passes: float) -> float:
    """Seconds of one step's traffic between the dp copies that compute does not hide."""
    engine, layout = setting.engine, setting.layout
    if layout.sharding == "fsdp" and layout.pp > 1:  # before the first pass and behind the last: nothing hides them
        return states.gather + states.scatter
    if layout.sharding == "fsdp":
        traffic = count * (2 * states.gather + states.scatter)
        return exposed_seconds(traffic, passes, engine.dp_overlap, engine.exposed)
    last = one.backward * setting.model.layers / layout.pp
    return exposed_seconds(states.step, last, engine.dp_overlap, REPLICATED_EXPOSED_SHARE)


# --- the CPU engine ---------------------------------------------------------------------------------------------------


def _cpu_train_seconds(setting: Setting, work: TrainWork) -> float:
    """One train call: every epoch's micro-batches forward and backward, gradient reduction, and optimizer steps.

    FSDP gathers weights twice and scatters gradients once a micro-batch; of stages once each in a step.
    """
    layout, steps, costs = setting.layout, work.optimizer_steps, setting.costs
    count = microbatches(setting, work)
    per_device = math.ceil(work.tokens / layout.dp / layout.cp)
    tokens = computed_on_cpu(setting, work, per_device / (steps * count), steps)
    recompute = "full" if setting.role.gradient_checkpointing else work.recompute
    transfer = hand_over_seconds(setting, tokens)
    one = core_microbatch(setting, (tokens, work.context), recompute, work.imbalance, transfer)
    passes = pipeline_seconds(one, Pipeline(_stages(setting, work), work.schedule), count)
    passes = fsdp_slowdown(setting) * (passes + count * costs.microbatch_seconds)
    states = state_costs(setting)
    step = passes + _traffic_seconds(setting, states, one, count, passes) + states.optimizer
    dispatched = dispatch_seconds(costs, per_device * layout.cp / work.sample_tokens)
    return work.epochs * steps * (step + shared_gradients_seconds(setting)) + dispatched


def computed_on_cpu(setting: Setting, work: TrainWork, tokens: float, steps: int = 1) -> float:
    """The number of a micro-batch's `tokens` on a device that the CPU engine computes: equal prompts once, last tokens
    never. Context-parallel ranks compute all of theirs."""
    if setting.layout.cp > 1:
        return tokens
    samples, all_samples = tokens / work.sample_tokens, work.tokens / work.sample_tokens / steps
    groups, lengths = all_samples / work.samples_per_group, (work.prompt_tokens, work.sample_tokens)
    return computed_tokens(samples, groups, work.samples_per_group, lengths)


def fsdp_slowdown(setting: Setting) -> float:
    """Factor by which compute takes longer on CPUs under FSDP than on whole weights, traffic between devices aside."""
    sharded = setting.layout.sharding == "fsdp" and setting.layout.mesh.n_devices > 1
    return FSDP_SLOWDOWN_CPU if sharded else 1.0
