"""The shape of a stream of generation, in tokens: who runs, how old, and how long a batch waits for its last group.

Groups are admitted in bursts, one per weight update. Every running sequence gains one token a step, whatever a step
costs, so the shape depends on lengths, group and batch, on the tokens between two bursts and on the slots alone. It is
found once and then priced for every model and layout: see `rollout.py`. Knows no seconds.
"""

import math
from functools import cached_property, lru_cache

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.lengths import Floats, Lengths

BURST_CELLS = 32  # of the time between two bursts
INTEGRAL_POINTS = 2048  # points at which integrals over the lengths are known
MISSING_GROUPS = 0.5  # groups: the expected number that is missing when the last one is about to come
WAIT_POINTS = 48  # intervals for which waits are tabled
SHORTEST_PART = 64  # the smallest of them, as a part of the longest response
LONGEST_PART = 1.5  # the largest, likewise
LAG = (np.arange(BURST_CELLS)[:, None] - np.arange(BURST_CELLS)[None, :]) % BURST_CELLS  # cells since another, round
SLOT_STEP = 1.005  # numbers of slots are taken in such steps, each rounded down


class Shape(Struct, frozen=True, eq=False, dict=True):
    """A stream whose bursts are `between` tokens apart; counts are per admitted sequence of a burst.

    Arrays have a value for each of BURST_CELLS parts of the time between two bursts.
    """

    between: float  # tokens between two bursts
    running: Floats  # [BURST_CELLS] sequences that run
    age: Floats  # [BURST_CELLS] their mean number of new tokens
    sum_squared_shares: Floats  # [BURST_CELLS] over bursts, of the share of each that runs
    incomplete_bursts: float  # bursts' worth of groups that are not complete just after a burst
    started_share: Floats  # [BURST_CELLS + 1] of a burst, by the edges of the cells
    # A batch is complete so many bursts, and tokens after these, after the burst it was admitted with.
    wait_bursts: int
    wait_tokens: float

    @cached_property
    def edges(self) -> Floats:
        """[BURST_CELLS + 1]: tokens since the burst, at the edges of the cells."""
        return np.linspace(0.0, self.between, BURST_CELLS + 1)

    @cached_property
    def started(self) -> float:
        """Share of a burst that has started when a batch is complete."""
        return float(np.interp(self.wait_tokens, self.edges[:-1], self.started_share[1:]))

    @cached_property
    def mean_running(self) -> float:
        return float(self.running.mean())

    @cached_property
    def most_running(self) -> float:
        return float(self.running.max())


def shape_of(lengths: Lengths, per_group: int, groups: float, between: float, slots: float = math.inf) -> Shape:
    """The shape of bursts of `groups` groups that are `between` tokens apart.

    slots: how many sequences may run at once, as a multiple of those in a burst. `between` is no less than what so many
    need if they are always in use, see `least_between`.
    """
    slots = rounded(slots)
    between = max(between, least_between(lengths, slots))
    if _at_once(lengths, between)[0][0] <= slots:
        slots = math.inf
    return _shape(lengths, per_group, groups, between, slots)


def rounded(slots: float) -> float:
    """Few numbers stand for all, so that shapes are found again."""
    return SLOT_STEP ** math.floor(math.log(slots, SLOT_STEP) + 1e-9) if math.isfinite(slots) else slots


def least_between(lengths: Lengths, slots: float) -> float:
    """Tokens between bursts at which `slots` (a multiple of the sequences of a burst) are always in use."""
    return lengths.mean / slots * (1 + 1e-9)


@lru_cache(maxsize=16384)
def _shape(lengths: Lengths, per_group: int, groups: float, between: float, slots: float) -> Shape:
    running, aged = _at_once(lengths, between)
    starts = np.zeros(BURST_CELLS)
    starts[0] = 1.0
    if math.isfinite(slots):
        starts = _starts(running, slots)
        running, aged = _turned(running, starts), _turned(aged, starts)
    waited = _wait(lengths, per_group, groups, between, starts)
    wait_bursts = int(waited / between)
    return Shape(
        between=between,
        running=running,
        age=aged / np.maximum(running, 1e-12),
        sum_squared_shares=_sum_squared_shares(lengths, between),
        incomplete_bursts=_incomplete_bursts(lengths, per_group, between),
        started_share=np.append(0.0, np.cumsum(starts)),
        wait_bursts=wait_bursts,
        wait_tokens=waited - wait_bursts * between,
    )


@lru_cache(maxsize=1024)
def _at_once(lengths: Lengths, between: float) -> tuple[Floats, Floats]:
    """Bursts that each start at once: sequences that run in each cell, and the sum of their new tokens."""
    at, alive, aged = _integrals(lengths)
    bursts = np.arange(math.ceil(lengths.longest / between) + 1) * between
    edges = np.linspace(0.0, between, BURST_CELLS + 1)[:, None] + bursts[None, :]
    width = between / BURST_CELLS
    running: Floats = np.diff(np.interp(edges, at, alive), axis=0).sum(axis=1) / width
    old: Floats = np.diff(np.interp(edges, at, aged), axis=0).sum(axis=1) / width
    return running, old


@lru_cache(maxsize=1024)
def _sum_squared_shares(lengths: Lengths, between: float) -> Floats:
    """[BURST_CELLS]: sum over all bursts of the squared share of their sequences that still run."""
    bursts = np.arange(math.ceil(lengths.longest / between) + 1) * between
    middle: Floats = (np.arange(BURST_CELLS) + 0.5)[:, None] * (between / BURST_CELLS) + bursts[None, :]
    squared: Floats = (lengths.survival(middle.ravel()).reshape(middle.shape) ** 2).sum(axis=1)
    return squared


@lru_cache(maxsize=1024)
def _incomplete_bursts(lengths: Lengths, per_group: int, between: float) -> float:
    """Bursts' worth of groups that are not complete just after a burst."""
    bursts: Floats = np.arange(math.ceil(lengths.longest / between) + 1, dtype=np.float64) * between
    return float((1 - (1 - lengths.survival(bursts)) ** per_group).sum())


@lru_cache(maxsize=64)
def _integrals(lengths: Lengths) -> tuple[Floats, Floats, Floats]:
    """Points in tokens, and the integrals to each of the survival S(u) and of u S(u)."""
    at = np.unique(np.concatenate([np.linspace(0.0, lengths.longest, INTEGRAL_POINTS), np.array(lengths.tokens)]))
    width, middle = np.diff(at), (at[1:] + at[:-1]) / 2
    alive = lengths.survival(middle) * width
    return at, np.append(0.0, np.cumsum(alive)), np.append(0.0, np.cumsum(alive * middle))


# --- slots ------------------------------------------------------------------------------------------------------------


def _starts(running: Floats, slots: float) -> Floats:
    """Share of a burst that starts in each cell where no more than `slots` may run.

    All slots are in use from the burst until the last of it has started: running, turned by the starts, is `slots` in
    those cells. That is linear; the number of cells is the least whose starts add up to the burst.
    """
    low, high = 0, BURST_CELLS
    starts_in = {0: np.zeros(BURST_CELLS), BURST_CELLS: _filling(running, slots, BURST_CELLS)}
    while high - low > 1:
        middle = (low + high) // 2
        starts_in[middle] = _filling(running, slots, middle)
        low, high = (low, middle) if starts_in[middle].sum() >= 1 else (middle, high)
    less, more = float(starts_in[low].sum()), float(starts_in[high].sum())
    share = min(1.0, max(0.0, (1 - less) / max(1e-12, more - less)))
    mixed: Floats = share * starts_in[high] + (1 - share) * starts_in[low]
    starts: Floats = mixed / mixed.sum()
    return starts


def _filling(running: Floats, slots: float, cells: int) -> Floats:
    """Starts in the first so many cells with which `slots` run in each of them."""
    starts = np.zeros(BURST_CELLS)
    starts[:cells] = np.maximum(0.0, np.linalg.solve(running[LAG[:cells, :cells]], np.full(cells, slots)))
    return starts


def _turned(values: Floats, starts: Floats) -> Floats:
    """The value of each cell for `starts` in all of them, from that for one start in cell 0; both go round."""
    turned: Floats = values[LAG] @ starts
    return turned


# --- waits ------------------------------------------------------------------------------------------------------------


def _wait(lengths: Lengths, per_group: int, groups: float, between: float, starts: Floats) -> float:
    """Tokens from a burst until as many groups are complete as have been admitted with it: those of its own that are
    late may be made good by early ones of later bursts.

    At t after burst k and x between bursts, with F the distribution of when a burst's groups are complete: late ones
    are sum over i >= 0 of 1 - F(t + i x), early ones sum over i >= 1 of F(t - i x); the wait is the t at which both
    agree up to half a group. All times are multiples of a cell; straight lines between.
    """
    width = between / BURST_CELLS
    bursts = math.ceil(lengths.longest / between) + 2
    at: Floats = np.arange(bursts * BURST_CELLS, dtype=np.float64) * width
    one = 1 - (1 - lengths.survival(at)) ** per_group
    late: Floats = (
        np.convolve(one, starts)[: len(one)] + np.append(1 - np.cumsum(starts), np.zeros(len(one)))[: len(one)]
    )
    of_bursts = late.reshape(bursts, BURST_CELLS)
    behind = np.cumsum(of_bursts[::-1], axis=0)[::-1].ravel()
    early = np.cumsum(1 - of_bursts, axis=0).ravel()
    ahead = np.append(np.zeros(BURST_CELLS), early)[: len(early)]
    open_groups = behind - ahead
    return float(np.interp(-MISSING_GROUPS / groups, -open_groups, at))


@lru_cache(maxsize=256)
def _waits(lengths: Lengths, per_group: int, groups: float) -> tuple[Floats, Floats]:
    """Tokens between bursts, falling, and how many bursts a batch then waits for, rising; slots enough for all."""
    between: Floats = np.geomspace(LONGEST_PART, 1 / SHORTEST_PART, WAIT_POINTS) * lengths.longest
    alone = np.append(1.0, np.zeros(BURST_CELLS - 1))
    waits = [_wait(lengths, per_group, groups, float(one), alone) / float(one) for one in between]
    return between, np.maximum.accumulate(np.array(waits))


def between_for(lengths: Lengths, per_group: int, groups: float, bursts: float) -> float:
    """Tokens between bursts where a batch waits for so many of them."""
    between, waits = _waits(lengths, per_group, groups)
    return float(np.exp(np.interp(bursts, waits, np.log(between))))
