"""A generate call with what reports of generation say of it, and the streams that asynchronous systems choose from."""

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.generate.decode import DecodeStep, decode_step
from realgraph.planner.costs.generate.generate import GenerateWork, occupancy_of, phase_seconds
from realgraph.planner.costs.generate.rollout import Variant, batch_variant, stream_levels, stream_of
from realgraph.planner.costs.lengths import Floats
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting

TAIL_RUNNING_SHARE = 0.1  # of the largest number of running sequences: what counts as the tail of a batch


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


def generation(setting: Setting, work: GenerateWork) -> Generation:
    """The same call with what a report says of it."""
    prefill, decode = phase_seconds(setting, work)
    step, shape = decode_step(setting), occupancy_of(setting, work)
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


def read_seconds(setting: Setting, step: DecodeStep, running: Floats, context: Floats) -> Floats:
    """Seconds of a decode step that only reads weights and caches, at the peak rate of the memory."""
    experts = step.expert_read * -np.expm1(running * step.group * step.unchosen)
    weights = (step.dense_read + experts) * setting.costs.memory
    return weights + running * context * step.cache_token * setting.costs.kv


def rollout_variants(setting: Setting, work: GenerateWork, staleness: int) -> tuple[Variant, ...]:
    """The batch as a whole; and for a staleness bound above 0, streams of fewer and fewer sequences in flight.

    The first has as much in flight as the bound admits were training to take no time.
    """
    batch = batch_variant(setting, work)
    return (batch, *stream_levels(stream_of(setting, work), staleness)) if staleness > 0 else (batch,)
