"""Predicted seconds of generation that runs on while weights are trained: a stream instead of a batch.

With a staleness bound of eta >= 1 a generate call admits groups as the bound lets it and hands over finished ones; no
replica waits for the last sequence of a batch. AReaL's rule (arXiv:2505.24298, eq. 3) admits group number i at version
v while floor((i - 1) / B) <= v + eta: a burst of B groups at each weight update. What the stream looks like depends on
one number, the tokens x that a sequence gains between two updates. Fewer tokens between them mean more sequences in
flight: more of them decode more tokens a second, and take longer each. `bursts.py` has the shape for a given x: n(v)
sequences on a replica at v tokens after an update, and the wait W of a batch, w whole bursts and r tokens. Priced with
the seconds s(n) of a token step:
  seconds       T = interruption + prefill of B / D prompts + integral over [0, x] of s(n(v)) dv    of a step
  remainder     R = the same over [0, r] alone
  latency       L = w P + R      from the admission of a batch until it is complete, where updates are P apart
P = T + O is the period: what else the mesh does in O seconds of a step (weights that arrive, calls that share it)
pauses the stream, and its tokens stand still. The staleness bound wants a batch to be complete, trained on and its
weights back, in U seconds, before 1 + eta periods are over: w P + R + U <= (1 + eta) P. More tokens between updates
make T larger and W / x smaller, so a plan has one x at which both hold: the stream finds it by itself, and
`planner/search/streams.py` finds it for a plan. Offered to the search are intervals of x, each at the least seconds
and waits within: no x of the interval makes a better plan.

An interruption is the stall of an update and the prefill anew of all sequences in flight. Where slots are so many that
this costs more than they gain, fewer are used: that is up to the engine's limit of running sequences, which a plan
names. At eta = 0 there is no stream: the batch is generated as a whole, tail and all.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.generate.bursts import BURST_CELLS, Shape, between_for, least_between, rounded, shape_of
from realgraph.planner.costs.generate.decode import DecodeStep, decode_step
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds, prefill_seconds
from realgraph.planner.costs.lengths import Floats, Lengths
from realgraph.planner.costs.overhead import rollout_dispatch_seconds
from realgraph.planner.costs.setting import Setting

STREAM_LEVELS = 24  # intervals of the tokens between two updates that are offered, of each of two kinds
SLOT_RATIO = 0.9  # of one number of slots to the next smaller one that is tried
MOST_STEP = 1.01  # steps in which the most tokens between two updates are looked for
MOST_SHARE = 2.0  # of the longest response: no more of them are tried
LEAST_SLOT_SHARE = 0.02  # of a burst: no fewer slots are tried


class Variant(Struct, frozen=True):
    """One way to run a generate call: the batch as a whole, or a stream."""

    seconds: float  # for which the mesh is needed, a step
    # From the admission of a batch until it is complete: so many periods, and seconds besides; 0 and `seconds` where
    # the batch is generated as a whole.
    latency_periods: int
    remainder_seconds: float
    running: int  # the most sequences at once on a replica
    groups_in_flight: float  # begun and not yet complete, mean
    tokens_between_updates: float = 0.0  # of weights; 0 of a batch
    prefill_seconds: float = 0.0  # of an update's interruption: the stall, and the prefill anew of all in flight
    pause_seconds: float = 0.0  # of another one, where calls that read a batch take the mesh
    staleness: float = 0.0  # updates from the first token of a group until its batch is complete

    @property
    def latency_seconds(self) -> float:
        """From the admission of a batch until it is complete, where nothing else pauses the stream."""
        return self.latency_periods * self.seconds + self.remainder_seconds


class Stream(Struct, frozen=True, eq=False, dict=True):
    """The common part of the variants of one call."""

    setting: Setting
    work: GenerateWork
    step: DecodeStep
    lengths: Lengths
    slots: float  # sequences that run at once on a replica, at most
    prompt_seconds: float

    @property
    def share(self) -> float:
        """Sequences of one replica in a burst."""
        return self.work.samples / self.setting.layout.dp

    @property
    def groups(self) -> float:
        return self.work.samples / self.work.samples_per_group

    @cached_property
    def least(self) -> float:
        """The fewest tokens between two updates: all slots are always in use."""
        return least_between(self.lengths, rounded(self.slots / self.share))

    @cached_property
    def most(self) -> float:
        """Tokens between two updates at which each batch is complete just before the next: more gain nothing."""
        between = max(self.least, between_for(self.lengths, self.work.samples_per_group, self.groups, 1.0))
        while self.shape(between).wait_bursts and between < MOST_SHARE * self.lengths.longest:
            between *= MOST_STEP  # of tabled waits, and where slots are few
        return between

    def shape(self, between: float) -> Shape:
        """The shape with so many tokens between two updates, no fewer than the slots allow."""
        slots, per_group = self.slots / self.share, self.work.samples_per_group
        return shape_of(self.lengths, per_group, self.groups, max(between, self.least), slots)


def batch_variant(setting: Setting, work: GenerateWork) -> Variant:
    """The batch as a whole."""
    seconds = generate_seconds(setting, work)
    running = max(1, min(work.running, -(-work.samples // setting.layout.dp)))
    return Variant(seconds, 0, seconds, running, work.samples / work.samples_per_group)


def stream_of(setting: Setting, work: GenerateWork) -> Stream:
    """The stream of a setting, with as many slots as pay."""
    prompts = work.samples / work.samples_per_group / setting.layout.dp * work.prompt_tokens
    step = decode_step(setting)
    return Stream(
        setting=setting,
        work=work,
        step=step,
        lengths=work.distribution,
        slots=_slots(setting, work, step),
        prompt_seconds=prefill_seconds(setting, prompts, work.prompt_tokens),
    )


def _slots(setting: Setting, work: GenerateWork, step: DecodeStep) -> float:
    """Number of the engine's slots, always in use, with which a step takes least."""
    share, mean = work.samples / setting.layout.dp, work.distribution.mean
    context = work.prompt_tokens + work.distribution.mean_age

    def seconds(slots: float) -> float:
        return share * mean / slots * step.seconds(slots, context) + _interruption_seconds(
            setting, work, slots, context
        )

    best, fewer = float(work.running), float(work.running)
    least = seconds(best)
    while fewer > max(1.0, LEAST_SLOT_SHARE * share):
        fewer = max(1.0, SLOT_RATIO * fewer)
        fewer_seconds = seconds(fewer)
        if fewer_seconds >= least:
            break
        best, least = fewer, fewer_seconds
    return float(math.floor(best))


def _interruption_seconds(setting: Setting, work: GenerateWork, running: float, context: float) -> float:
    """Seconds of one interruption: so many sequences are prefilled again."""
    return prefill_seconds(setting, running * context, context) + work.stall_seconds


def variant_of(stream: Stream, between: float, paused: bool = False) -> Variant:
    """The stream with so many tokens between two updates, no fewer than its slots allow: the formulas at the head.

    paused: calls that read a batch take the mesh and the memory of its caches as soon as it is complete, besides the
    update: a second interruption.
    """
    return variants_at(stream, (between,), paused)[0]


def variants_at(stream: Stream, between: Sequence[float], paused: bool) -> list[Variant]:
    """The streams with so many tokens between two updates; the cells of all are computed at once."""
    shapes = [stream.shape(one) for one in between]
    mean, met = _sequences(stream, shapes)
    decoded = _decode(stream, shapes, (mean, met))
    return [_variant(stream, shape, met[i], decoded[i], paused) for i, shape in enumerate(shapes)]


def _variant(stream: Stream, shape: Shape, met: Floats, decode: Floats, paused: bool) -> Variant:
    """met: [BURST_CELLS], of `_sequences`; decode: [BURST_CELLS + 1], of `_decode`."""
    setting, work = stream.setting, stream.work
    prefill = _interruption_at(stream, shape, met, shape.between)
    dispatch = rollout_dispatch_seconds(setting.costs, stream.share)
    pause = work.wake_seconds + _interruption_at(stream, shape, met, shape.wait_tokens) if paused else 0.0
    seconds = prefill + pause + stream.prompt_seconds + dispatch + float(decode[-1])
    part = dispatch * shape.wait_tokens / shape.between
    waited = float(np.interp(shape.wait_tokens, shape.edges, decode))
    remainder = prefill + stream.prompt_seconds * shape.started + part + waited
    longest = stream.lengths.expected_max(work.samples_per_group)
    return Variant(
        seconds=seconds,
        latency_periods=shape.wait_bursts,
        remainder_seconds=remainder,
        running=max(1, min(work.running, math.ceil(stream.share * shape.most_running))),
        groups_in_flight=stream.groups * shape.mean_running * longest / stream.lengths.mean,
        tokens_between_updates=shape.between,
        prefill_seconds=prefill,
        pause_seconds=pause,
        staleness=shape.wait_bursts + shape.wait_tokens / shape.between,
    )


def _interruption_at(stream: Stream, shape: Shape, met: Floats, tokens: float) -> float:
    """Seconds of an interruption at so many tokens after an update."""
    cell = min(BURST_CELLS - 1, int(tokens / shape.between * BURST_CELLS))
    context = stream.work.prompt_tokens + float(shape.age[cell])
    return _interruption_seconds(stream.setting, stream.work, float(met[cell]), context)


def _sequences(stream: Stream, shapes: Sequence[Shape]) -> tuple[Floats, Floats]:
    """Two of [shapes, BURST_CELLS]: sequences on a replica, and those that a sequence meets, which are more: full
    replicas have more of them.

    By the variance over the mean. Each burst brings the groups on every replica to one number; how many sequences of
    each run depends on its age and on chance. At least one: some replica runs while a batch is not complete.
    """
    running = np.array([shape.running for shape in shapes])
    squared = np.array([shape.sum_squared_shares for shape in shapes])
    incomplete = np.array([shape.incomplete_bursts for shape in shapes])[:, None]
    mean, per_group = stream.share * running, stream.work.samples_per_group
    in_groups = stream.share * per_group * np.maximum(0.0, squared - running**2 / incomplete)
    single = np.maximum(0.0, mean - stream.share * squared)
    others = 1 - 1 / stream.setting.layout.dp
    met: Floats = np.maximum(1.0, mean + others * (in_groups + single) / np.maximum(1.0, mean))
    return mean, np.minimum(met, np.maximum(mean, stream.slots))


def _decode(stream: Stream, shapes: Sequence[Shape], sequences: tuple[Floats, Floats]) -> Floats:
    """[shapes, BURST_CELLS + 1]: seconds of decoding from an update to each edge of the cells.

    A token step takes E[n] / E[n / s(n)] over the replicas, as sequences see it: with a variance V of n, to its first
    power, s + s' V / n x (1 - s' n / s).
    """
    mean = np.maximum(1.0, sequences[0])
    met = np.maximum(mean, sequences[1])
    context = stream.work.prompt_tokens + np.array([shape.age for shape in shapes])
    plain = stream.step(mean, context)
    more = stream.step(met, context) - plain
    rise = np.clip(more / plain * mean / np.maximum(1e-9, met - mean), 0.0, 1.0)
    cell_tokens = np.array([shape.between for shape in shapes])[:, None] / BURST_CELLS
    decoded = np.zeros((len(shapes), BURST_CELLS + 1))
    np.cumsum((plain + more * (1 - rise)) * cell_tokens, axis=1, out=decoded[:, 1:])
    return decoded


def interval_bounds(levels: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants that a search chooses from: for each interval from one stream to the next, and for the last stream
    alone, the least seconds of all streams from there on and the shortest wait within it. levels: by tokens between
    two updates."""
    ends = [*levels[1:], levels[-1]]  # of the intervals: interruptions are shortest there, decoding is where they begin
    least = [
        one.seconds
        - one.prefill_seconds
        - one.pause_seconds
        + min(one.prefill_seconds, end.prefill_seconds)
        + min(one.pause_seconds, end.pause_seconds)
        for one, end in zip(levels, ends, strict=True)
    ]
    fastest = [float(seconds) for seconds in np.minimum.accumulate(least[::-1])[::-1]]
    return tuple(
        replace(
            one,
            seconds=seconds,
            latency_periods=end.latency_periods,
            remainder_seconds=min(end.remainder_seconds, _least_remainder(one, end, seconds)),
        )
        for one, end, seconds in zip(levels, ends, fastest, strict=True)
    )


def _least_remainder(begin: Variant, end: Variant, seconds: float) -> float:
    """A bound of the seconds that streams of an interval wait beyond the whole periods of its end. One that waits for
    a period more waits for at least the `seconds` of each stream, whatever its own remainder."""
    return begin.remainder_seconds if begin.latency_periods == end.latency_periods else seconds


def stream_levels(stream: Stream, staleness: int, paused: bool = False) -> list[Variant]:
    """Streams with more and more tokens between two updates: a batch waits for 1 + staleness of them, down to one.

    Where what follows generation takes `spent` periods, it waits for so many fewer; mostly that is about one.
    """
    tokens = {*_level_tokens(stream.lengths, stream.work.samples_per_group, stream.groups, staleness), stream.most}
    return variants_at(stream, sorted({max(stream.least, one) for one in tokens}), paused)


@lru_cache(maxsize=1024)
def _level_tokens(lengths: Lengths, per_group: int, groups: float, staleness: int) -> frozenset[float]:
    """Tokens between two updates of all levels, whatever runs them."""
    spent = np.concatenate([np.linspace(0.0, 1.25, STREAM_LEVELS + 1), np.linspace(1.25, staleness, STREAM_LEVELS + 1)])
    waits = 1.0 + staleness - np.minimum(spent, staleness)
    return frozenset(between_for(lengths, per_group, groups, float(one)) for one in waits)
