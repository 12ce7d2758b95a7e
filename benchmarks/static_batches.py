"""Generation without continuous batching: samples go through in padded batches, and each batch runs to its longest."""

import math
from statistics import NormalDist

import numpy as np

from realgraph.planner.costs.comm import axis_link, gather_seconds
from realgraph.planner.costs.generate.decode import decode_step
from realgraph.planner.costs.generate.generate import GenerateWork, prefill_seconds
from realgraph.planner.costs.generate.occupancy import Occupancy
from realgraph.planner.costs.lengths import Floats, Lengths
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting

BATCH_PHASES = 48  # of a batch, in which the age of its samples is taken to be even


def static_generate_seconds(setting: Setting, work: GenerateWork) -> float:
    """Seconds of all samples of a batch on an engine without continuous batching."""
    share = work.samples / setting.layout.dp
    return sum(static_phases(setting, work)) + rollout_dispatch_seconds(setting.costs, share)


def static_phases(setting: Setting, work: GenerateWork) -> tuple[float, float]:
    """Seconds of prefill and of decoding."""
    share, replicas = work.samples / setting.layout.dp, min(setting.layout.dp, work.samples)
    in_step = setting.layout.sharding == "fsdp"  # all ranks gather before a batch
    shape = static_occupancy(work.distribution, work.samples / replicas, work.running, replicas, in_step)
    step = decode_step(setting)
    decode = shape.seconds(lambda running, age: step(running, work.prompt_tokens + age))
    return _prefill_seconds(setting, work, share), decode


def _prefill_seconds(setting: Setting, work: GenerateWork, share: float) -> float:
    """Prompts of a group are not shared; a sharded copy's weights are gathered before every batch."""
    count, samples = batches(share, work.running)
    one = prefill_seconds(setting, samples * work.prompt_tokens, work.prompt_tokens)
    return count * (one + gathered_seconds(setting))


def batches(samples: float, running: int) -> tuple[int, float]:
    """Number of batches, and samples of each, of `samples` on a replica that runs at most `running` at once."""
    count = max(1, math.ceil(samples / max(1, running)))
    return count, samples / count


def gathered_seconds(setting: Setting) -> float:
    """A sharded copy's weights to every rank, once; 0 where they lie whole on a rank."""
    layout = setting.layout
    if layout.sharding == "replicated":
        return 0.0
    nbytes = setting.element * setting.model.n_params(setting.role.head) / layout.tp
    return gather_seconds(nbytes, layout.dp, axis_link(setting, layout.dp, layout.tp).bytes_per_s)


def static_occupancy(lengths: Lengths, samples: float, slots: int, replicas: int, in_step: bool) -> Occupancy:
    """Occupancy by `samples` sequences per replica in batches of at most `slots`.

    in_step: replicas wait for each other after every batch, and not only after the last.

    A sequence that has ended keeps its row, padded, until the longest of those that wait for each other has ended:
    some one of n runs at step u with probability 1 - F(u)^n.
    """
    count, size = batches(samples, slots)
    knots = np.unique(np.append(np.linspace(0.0, lengths.longest, BATCH_PHASES + 1), lengths.tokens))
    width, age = np.diff(knots), (knots[1:] + knots[:-1]) / 2
    ended = 1 - lengths.survival(age)
    own, any_of_all = 1 - ended ** max(1.0, size), 1 - ended ** max(1.0, size * replicas)
    running, none = np.full(len(age), max(1.0, size)), np.zeros(len(age))
    if in_step:
        steps = count * width * any_of_all
        return Occupancy(steps, steps, running, age, none, none)
    steps = width * ((count - 1) * own + any_of_all)
    more = width * np.sqrt(own * (1 - own))
    if more.any():
        more *= _deviation(width, age, (own, any_of_all), (count, replicas)) / more.sum()
    return Occupancy(steps, count * width * own, running, age, more, none, replicas)


def _deviation(width: Floats, age: Floats, runs: tuple[Floats, Floats], of: tuple[int, int]) -> float:
    """Standard deviation of the steps of all batches but the last on one replica.

    runs: shares of time in which some sequence of a batch, and of as many on all replicas, runs. of: batches, and
    replicas.

    The slowest replica's batches take no longer than if all waited for each other after each: so large at most that
    the largest of `replicas` normal deviations (Blom 1958) says the same.
    """
    own, any_of_all = runs
    count, replicas = of
    mean = float(np.dot(width, own))
    spread = math.sqrt(count - 1) * math.sqrt(max(0.0, 2 * float(np.dot(width * age, own)) - mean**2))
    if replicas == 1:
        return spread
    largest = NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))
    return min(spread, (count - 1) * (float(np.dot(width, any_of_all)) - mean) / largest)
