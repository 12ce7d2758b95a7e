"""Predicted seconds of generation that runs on while weights are trained: a stream instead of a batch.

With a staleness bound of eta >= 1 a generate call admits groups as the bound lets it and hands over finished ones; no
replica waits for the last sequence of a batch. How many sequences are in flight is then a choice: more of them decode
more tokens a second, and take longer each. So one call has several variants, and the event graph of a plan decides:
its mesh is held for `seconds` a step, and what reads its outputs waits for `latency`.

Derivation. N samples in B groups of g a step, mean length m, E_g the expected longest of g, on D replicas with n
sequences each; s(n) seconds of one token step at their mean length (prompts, and the mean age of renewal theory).
  decoding      d = N m / (D n) x s(n)                             tokens of a step over tokens a second
  seconds       T = d + prefill of B / D prompts + interruption    one interruption a step, at the weight update: n
                                                                   sequences are prefilled again, and stand still
  group         L = E_g s(n) x T / d                               its longest sample, slowed down by all the rest
  in flight     K = B L / T = E_g D n / (g m) groups               Little's law
AReaL's rule (arXiv:2505.24298, eq. 3) admits group number i at version v while floor((i - 1) / B) <= v + eta: a burst
of B more at each weight update. What is admitted and not yet trained on is (1 + eta) B: K in flight, B in training for
the share u of the time, and finished ones that wait for their batch, half a batch on average. With frequent bursts,
then, K <= (1 + eta - u - 1/2) B, and the circuit generate -> train -> generate of a plan with its 1 + eta tokens says
the same, (latency + training) / (1 + eta) <= T with training = u T, if latency = L + T / 2. With rare ones a batch
waits for its late groups, down to its very last one: `batch_wait.py` has the latency in between. It depends on the
interval between updates, which the whole plan decides; taken is the longer of T and of that at which the staleness
bound itself rules. At eta = 0 there is no stream: the batch is generated as a whole, tail and all.

The variants hold where nothing else interrupts the session. Where the mesh is shared with other calls the sequences in
flight are paused for those, and a group takes L / T sessions, not L seconds.
"""

from msgspec import Struct

from realgraph.planner.costs.batch_wait import bound_interval, wait_tokens
from realgraph.planner.costs.decode import DecodeStep, decode_step
from realgraph.planner.costs.generate import GenerateWork, generate_seconds, prefill_seconds
from realgraph.planner.costs.lengths import Lengths
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting

LEVELS = 6  # numbers of sequences in flight that are offered
RATIO = 0.7  # of one level to the next larger one


class Variant(Struct, frozen=True):
    """One way to run a generate call. seconds: the mesh is needed per step. latency: from the admission of a step's
    batch until it is complete. running: sequences on a replica. groups_in_flight: begun and not yet complete, mean.
    staleness: mean number of weight updates between the first token of a group and its batch being complete; 0 where
    the batch is generated as a whole.
    """

    seconds: float
    latency: float
    running: int
    groups_in_flight: float
    staleness: float = 0.0


class _Stream(Struct, frozen=True, eq=False):
    """What the levels of one call share."""

    setting: Setting
    work: GenerateWork
    step: DecodeStep
    lengths: Lengths
    staleness: int
    longest_of_group: float
    prompt_seconds: float


def rollout_variants(setting: Setting, work: GenerateWork, staleness: int) -> tuple[Variant, ...]:
    """The batch as a whole; and for a staleness bound above 0, streams with fewer and fewer sequences in flight.

    No stream has more in flight than the bound admits were training to take no time. What is no faster than another in
    both seconds and latency is left out, the batch too.
    """
    seconds = generate_seconds(setting, work)
    groups = work.samples / work.samples_per_group
    running = max(1, min(work.running, -(-work.samples // setting.layout.dp)))
    batch = Variant(seconds, seconds, running, groups)
    if staleness < 1:
        return (batch,)
    stream = _stream(setting, work, staleness)
    share = work.samples / setting.layout.dp
    most = min(float(work.running), (staleness + 0.5) * share * stream.lengths.mean / stream.longest_of_group)
    levels = {max(1, round(most * RATIO**level)) for level in range(LEVELS)}
    found = [batch, *(_variant(stream, level) for level in sorted(levels, reverse=True))]
    return tuple(
        one for i, one in enumerate(found) if not any(_beats(other, one, j < i) for j, other in enumerate(found))
    )


def _beats(one: Variant, other: Variant, first: bool) -> bool:
    """Whether `one` is as good in both, and better in one or before `other` in the list."""
    as_good = one.seconds <= other.seconds and one.latency <= other.latency
    return as_good and (first or (one.seconds, one.latency) != (other.seconds, other.latency))


def stream_seconds(setting: Setting, work: GenerateWork, staleness: int, running: int) -> Variant:
    """A stream with `running` sequences on each replica."""
    return _variant(_stream(setting, work, staleness), running)


def _stream(setting: Setting, work: GenerateWork, staleness: int) -> _Stream:
    lengths = work.distribution
    prompts = work.samples / work.samples_per_group / setting.layout.dp * work.prompt_tokens
    return _Stream(
        setting=setting,
        work=work,
        step=decode_step(setting, work.precision),
        lengths=lengths,
        staleness=staleness,
        longest_of_group=lengths.expected_max(work.samples_per_group),
        prompt_seconds=prefill_seconds(setting, work.precision, prompts, work.prompt_tokens),
    )


def _variant(stream: _Stream, running: int) -> Variant:
    """The formulas at the head of this file."""
    setting, work, lengths = stream.setting, stream.work, stream.lengths
    replicas, groups = setting.layout.dp, work.samples / work.samples_per_group
    context = work.prompt_tokens + lengths.mean_age
    token = stream.step.seconds(running, context)
    decode = work.samples * lengths.mean / (replicas * running) * token
    again = prefill_seconds(setting, work.precision, running * context, context) + work.stall_seconds
    dispatch = rollout_dispatch_seconds(setting.costs, work.samples / replicas)
    seconds = decode + stream.prompt_seconds + again + dispatch
    slow = token * seconds / decode  # of one token, with all that interrupts it
    group = stream.longest_of_group * slow
    per_group = work.samples_per_group
    between = max(seconds / slow, bound_interval(lengths, per_group, groups, stream.staleness))
    latency = max(seconds, wait_tokens(lengths, per_group, groups, between) * slow)
    return Variant(seconds, latency, running, groups * group / seconds, group / seconds + 0.5)
