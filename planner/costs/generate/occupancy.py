"""The number of sequences that decode at each token step of a batch under continuous batching: a bucketed simulation.

Every running sequence gains one token a step, whatever a step costs, so the shape of a generation depends on lengths,
samples and slots alone. It is found once and then priced for every model and layout. Steps are counted in tokens.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.lengths import Floats, Lengths

LENGTH_CELLS = 384  # buckets of token steps up to the length that one in a million samples exceeds
RARE_PROBABILITY = 1e-6
MOST_PROBABILITY = 1 - 1e-15  # a probability just below 1, whose logarithm is finite
FULL_PHASES = 48  # in which the ages of full slots are followed
DRAIN_COHORTS = 96  # of sequences admitted at about one time, in the drain
STEADY_LENGTHS = 3  # so many times that length after the start, ends and admissions have become a steady stream

_NORMAL = NormalDist()
StepSeconds = Callable[[Floats, Floats], Floats]


class Occupancy(Struct, frozen=True, eq=False):
    """The phases of one generation, arrays of one length; of all replicas, the slowest counts."""

    # tokens that every running sequence gains in the phase, weighted with the probability that some replica still runs
    steps: Floats
    alone: Floats  # the same were there one replica
    running: Floats  # sequences on a replica
    age: Floats  # their mean number of new tokens
    more_steps: Floats  # what one standard deviation more of work on one replica adds to `steps`
    more_running: Floats  # the same of `running`
    replicas: int = 1  # how many wait for each other

    def seconds(self, step: StepSeconds) -> float:
        """Expected seconds until the last replica is done, `step(running, age)` being the seconds of one token step.

        The slowest replica has the longest sequence or the most work. Both are independent, so their excess over the
        mean replica adds up in squares; z_D deviations is the expected largest of D normal ones (Blom 1958).
        """
        base = step(self.running, self.age)
        total = float(np.dot(self.steps, base))
        if self.replicas == 1:
            return total
        longer = float(np.dot(self.more_steps, base))
        fuller = float(np.dot(self.alone, step(self.running + self.more_running, self.age) - base))
        work = math.hypot(longer, fuller) * _NORMAL.inv_cdf((self.replicas - 0.375) / (self.replicas + 0.25))
        tail = total - float(np.dot(self.alone, base))
        return total + math.hypot(work, tail) - tail


@lru_cache(maxsize=1024)
def occupancy(lengths: Lengths, samples: float, slots: int, replicas: int) -> Occupancy:
    """The occupancy of `samples` sequences per replica on `slots` slots, on `replicas` replicas that all wait for the
    last one.

    The running number follows its expectation; how long the last ones run follows from order statistics: some replica
    is still at work at step u with probability 1 - product over all sequences of P(length <= u - start).
    """
    if samples <= slots or not lengths.longest:  # what needs no step needs no slot
        return _at_once(lengths, samples, replicas)
    return _in_turn(lengths, samples, slots, replicas)


def _at_once(lengths: Lengths, samples: float, replicas: int) -> Occupancy:
    """Every sequence starts at step 0: n S(u) of them run at step u."""
    knots = _grid(lengths)
    steps, middle = np.diff(knots), (knots[1:] + knots[:-1]) / 2
    alive = lengths.survival(middle)
    gone = samples * np.log1p(-np.minimum(alive, MOST_PROBABILITY))
    more = _spread(steps, np.sqrt(alive * (1 - alive)), math.sqrt(samples) * lengths.deviation)
    busy, alone = -np.expm1(replicas * gone), -np.expm1(gone)
    none = np.zeros(len(steps))
    return Occupancy(steps * busy, steps * alone, _while_any(samples * alive, alone), middle, none, more, replicas)


def _spread(steps: Floats, deviation: Floats, tokens: float) -> Floats:
    """One standard deviation more of running sequences, in proportion to that of each step alone, so that it adds up to
    `tokens`, the deviation of their sum: deviations at different steps do not all go together."""
    whole = float(np.dot(steps, deviation))
    return deviation * (tokens / whole if whole else 0.0)


@lru_cache(maxsize=64)
def _grid(lengths: Lengths) -> Floats:
    """Steps between which a phase is taken to be even: the knots of the lengths, and enough others between them."""
    even = np.linspace(0.0, lengths.longest, FULL_PHASES + 1)
    return np.unique(np.concatenate([even, np.array(lengths.tokens)]))


def _while_any(running: Floats, alone: Floats) -> Floats:
    """The expected number of running sequences given that there is one: mean over probability."""
    return np.maximum(1.0, running / np.maximum(alone, 1e-300))


def _in_turn(lengths: Lengths, samples: float, slots: int, replicas: int) -> Occupancy:
    """Sequences wait for slots: full slots while any waits, then those that remain run out.

    The stream of admissions is the renewal density of the lengths (times the slots), up to the last waiting sequence:
    its expectation, which is far from any draw where there is one slot.
    """
    waiting = samples - slots
    if slots == 1:  # one after another: each waits for the whole of the one before it, and the last one runs alone
        end, steady, ages, sizes = 0.0, waiting * lengths.mean, np.zeros(1), np.ones(1)
    else:
        end, steady, ages, sizes = _admissions(lengths, waiting, slots)
    alive = ages < lengths.longest
    full = _full_phase(lengths, (end, steady, math.sqrt(waiting) * lengths.deviation / slots), slots)
    return _joined(full, _drain(lengths, _merged(ages[alive], sizes[alive]), slots, replicas))


def _admissions(lengths: Lengths, waiting: float, slots: int) -> tuple[float, float, Floats, Floats]:
    """Until nobody of `waiting` sequences waits: steps that are followed and steady ones; then the ages of the cohorts
    that were admitted, the first `slots` included, and their sizes."""
    sizes: Floats
    ages: Floats
    width, admitted = _renewal(lengths)
    total = np.cumsum(admitted) * slots
    count = int(np.searchsorted(total, waiting))  # whole cells of admissions
    if count == len(total):
        end = count * width
        steady = (waiting - float(total[-1])) * lengths.mean / slots  # steps left out: a steady stream has set in
        sizes = admitted * slots
        ages = end - (np.arange(count, dtype=np.float64) + 0.5) * width
    else:
        last = waiting - (float(total[count - 1]) if count else 0.0)
        part = last / (float(admitted[count]) * slots)
        end, steady = (count + part) * width, 0.0
        sizes = np.append(slots * admitted[:count], last)
        ages = end - np.append((np.arange(count) + 0.5) * width, (count + part / 2) * width)
    return end, steady, np.insert(ages, 0, end), np.insert(sizes, 0, float(slots))


def _merged(ages: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Neighbouring cohorts taken together, so that about DRAIN_COHORTS are left. The first one, large, stays alone."""
    bounds = np.unique(np.append([0, 1], np.arange(1, len(ages), max(1, len(ages) // DRAIN_COHORTS))))
    bounds = bounds[bounds < len(ages)]
    joined = np.add.reduceat(sizes, bounds)
    return np.add.reduceat(ages * sizes, bounds) / np.maximum(1e-12, joined), joined


def _full_phase(lengths: Lengths, spans: tuple[float, float, float], slots: int) -> Occupancy:
    """All slots run while ages rise from 0 to their steady mean, then steadily.

    spans: steps that are followed, steady ones after them, and one standard deviation of their sum.
    """
    end, steady, spread = spans
    edges = np.linspace(0.0, end, FULL_PHASES + 1)
    age = np.append(np.interp((edges[1:] + edges[:-1]) / 2, *_ages(lengths)), lengths.mean_age)
    steps = np.append(np.diff(edges), steady)
    more = np.zeros(FULL_PHASES + 1)
    more[-1 if steady else -2] = spread
    return Occupancy(steps, steps, np.full(FULL_PHASES + 1, float(slots)), age, more, np.zeros(FULL_PHASES + 1))


@lru_cache(maxsize=64)
def _ages(lengths: Lengths) -> tuple[Floats, Floats]:
    """Steps since all slots started at once, and the mean age of a running sequence then, both in tokens."""
    width, admitted = _renewal(lengths)
    starts = (np.arange(len(admitted)) + 0.5) * width
    at = np.linspace(0.0, STEADY_LENGTHS * LENGTH_CELLS * width, 4 * FULL_PHASES)
    since = at[:, None] - starts[None, :]
    alive = np.where(since > 0, lengths.survival(np.maximum(since, 0.0)), 0.0) * admitted
    first = lengths.survival(at)
    age = (first * at + np.sum(alive * since, axis=1)) / np.maximum(1e-12, first + alive.sum(axis=1))
    return at, age


def _drain(lengths: Lengths, cohorts: tuple[Floats, Floats], slots: int, replicas: int) -> Occupancy:
    """The slots empty: cohorts of given sizes that are so old when the queue is empty, and what is left of the first
    ones, the oldest. Both from the last admitted to the first."""
    ages, sizes = cohorts
    knots = _grid(lengths)
    middle = (knots[1:] + knots[:-1]) / 2
    since = middle[:, None] + ages[None, :]
    alive = lengths.survival(since)
    running = alive @ sizes
    age = (alive * since) @ sizes / np.maximum(1e-12, running)
    gone = np.log1p(-np.minimum(alive, MOST_PROBABILITY)) @ sizes
    busy, alone, none = -np.expm1(replicas * gone), -np.expm1(gone), np.zeros(len(middle))
    steps = np.diff(knots)
    more = _spread(steps, np.sqrt((alive * (1 - alive)) @ sizes), math.sqrt(slots) * lengths.deviation)
    still = np.minimum(_while_any(running, alone), float(slots))
    return Occupancy(steps * busy, steps * alone, still, age, none, more, replicas)


def _joined(first: Occupancy, second: Occupancy) -> Occupancy:
    def column(name: str) -> Floats:
        return np.concatenate([getattr(first, name), getattr(second, name)])

    return Occupancy(
        steps=column("steps"),
        alone=column("alone"),
        running=column("running"),
        age=column("age"),
        more_steps=column("more_steps"),
        more_running=column("more_running"),
        replicas=second.replicas,
    )


@lru_cache(maxsize=64)
def _renewal(lengths: Lengths) -> tuple[float, Floats]:
    """Width of a cell in tokens, and the sequences that one slot admits in each cell after its first one.

    Solves the renewal equation N(t) = S(t) + sum of a_s S(t - s) = 1: what ends is replaced at once. Admissions lie in
    the middle of their cell.
    """
    reach = max(1.0, lengths.quantile(1 - RARE_PROBABILITY))
    width = reach / LENGTH_CELLS
    count = STEADY_LENGTHS * LENGTH_CELLS
    cells: Floats = np.arange(count, dtype=np.float64)
    first = lengths.survival((cells + 1) * width)
    alive = lengths.survival((cells + 0.5) * width)
    admitted = np.zeros(count)
    for cell in range(count):
        low = max(0, cell - LENGTH_CELLS - 1)
        occupied = float(np.dot(admitted[low:cell], alive[cell - low : 0 : -1])) if cell else 0.0
        admitted[cell] = max(0.0, 1.0 - first[cell] - occupied) / alive[0]
    return width, admitted
