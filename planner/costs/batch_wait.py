"""How long a batch takes to complete when groups are admitted in bursts, one per weight update. In tokens, not seconds:
the shape depends on lengths, group and batch alone, and is found once."""

from functools import lru_cache

import numpy as np

from realgraph.planner.costs.lengths import Floats, Lengths

POINTS = 32  # intervals between bursts for which the wait is found
SHORTEST = 16  # the smallest of them, as a share of the longest response
MISSING = 0.5  # groups: the expected number that is missing when the last one is about to come
BUSY = 0.75  # share of the time that training is taken to need where the staleness bound rules


@lru_cache(maxsize=256)
def burst_waits(lengths: Lengths, per_group: int, groups: float) -> tuple[Floats, Floats]:
    """Tokens between two bursts of `groups` groups each, and tokens from a burst until as many groups are complete as
    have been admitted with it: those of its own that are late may be made good by early ones of later bursts.

    At t after burst k and x between bursts, with F the distribution of a group's longest response: late ones are
    sum over i >= 0 of 1 - F(t + i x), early ones sum over i >= 1 of F(t - i x); the wait is the t at which both agree
    up to half a group.
    """
    longest = lengths.longest
    between: Floats = np.geomspace(longest / SHORTEST, 2 * longest, POINTS)
    bursts: Floats = np.arange(SHORTEST + 2, dtype=np.float64)
    low, high = np.zeros(POINTS), longest + between
    for _ in range(40):
        middle = (low + high) / 2
        late = 1 - _complete(lengths, per_group, middle[:, None] + bursts * between[:, None])
        early = _complete(lengths, per_group, middle[:, None] - bursts[1:] * between[:, None])
        enough = late.sum(axis=1) - early.sum(axis=1) <= MISSING / groups
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return between, high


def wait_tokens(lengths: Lengths, per_group: int, groups: float, between: float) -> float:
    """The wait for bursts that are `between` tokens apart; for very frequent ones the mean group and half a burst."""
    known, waits = burst_waits(lengths, per_group, groups)
    if between < known[0]:
        return lengths.expected_max(per_group) + between / 2
    return float(np.interp(between, known, waits))


@lru_cache(maxsize=1024)
def bound_interval(lengths: Lengths, per_group: int, groups: float, staleness: int) -> float:
    """Tokens between bursts where the staleness bound rules: wait + training = (1 + staleness) x interval.

    Training is taken to need BUSY of the interval: what it really needs changes the wait little.
    """
    known, waits = burst_waits(lengths, per_group, groups)
    room = (1 + staleness - BUSY) * known - waits
    if room[0] >= 0:
        return float(known[0])
    return float(np.interp(0.0, room, known))


def _complete(lengths: Lengths, per_group: int, tokens: Floats) -> Floats:
    """Share of groups all of whose samples have at most so many tokens."""
    shares: Floats = (1 - lengths.survival(np.maximum(tokens, 0.0))) ** per_group
    return shares * (tokens > 0)
