"""Lengths of responses: a distribution of new tokens per sample, and where its numbers come from.

A distribution is a list of knots of its cumulative distribution function, straight lines between them, closer together
towards the tail, where the last sequences of a batch lie. Knows no model and no device.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float64]

# Of the logarithm of a length. In chat traffic to several public models the 99.9th percentile of the response lengths
# is about ten times the median (RLHFuse, arXiv:2409.13221, sec. 2): ln 10 / 3.09. Coefficient of variation 0.86.
LOG_DEVIATION = 0.745
TAIL_PROBABILITY = 1e-7  # probability above the last knot
PROBABILITY_STEPS = 64  # knots at equal steps of probability, up to 1 - 1 / PROBABILITY_STEPS
KNOTS_PER_HALVING = 4  # further knots for each halving of what is left above
LIMIT_SHARE = 0.98  # of the limit: with a mean above it every response is taken to be as long as the limit


class Lengths(Struct, frozen=True, dict=True, cache_hash=True):
    """Knots of a cumulative distribution function of tokens: `shares` of the samples are at most `tokens` long.

    Both rise, shares from 0 to 1; equal tokens at two knots are a mass of probability there.
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    @property
    def longest(self) -> float:
        return self.tokens[-1]

    @cached_property
    def mean(self) -> float:
        shares, tokens = np.array(self.shares), np.array(self.tokens)
        return float(np.sum(np.diff(shares) * (tokens[1:] + tokens[:-1]) / 2))

    @cached_property
    def second_moment(self) -> float:
        """Mean of the square, tokens squared."""
        shares, tokens = np.array(self.shares), np.array(self.tokens)
        low, high = tokens[:-1], tokens[1:]
        return float(np.sum(np.diff(shares) * (low * low + low * high + high * high) / 3))

    def squared_excess(self, limit: float) -> float:
        """Mean of max(0, tokens - limit)^2, tokens squared."""
        shares, tokens = np.array(self.shares), np.array(self.tokens)
        width, above = np.diff(tokens), np.maximum(0.0, tokens - limit)
        low, high = above[:-1], above[1:]
        part = np.where(width > 0, (high - low) / np.where(width > 0, width, 1.0), 1.0)  # of the knots' step
        return float(np.sum(np.diff(shares) * part * (low * low + low * high + high * high) / 3))

    @property
    def deviation(self) -> float:
        """Standard deviation, tokens."""
        return math.sqrt(max(0.0, self.second_moment - self.mean**2))

    @property
    def mean_age(self) -> float:
        """New tokens that a sequence which is running has so far, at a random moment of a steady stream.

        Long sequences are met more often: the mean age is E[X^2] / 2 E[X] (renewal theory, the inspection paradox).
        """
        return self.second_moment / (2 * self.mean)

    def quantile(self, share: float) -> float:
        """Tokens that `share` of the samples do not exceed."""
        return float(np.interp(share, self.shares, self.tokens))

    def expected_max(self, samples: float) -> float:
        """Expected length of the longest of `samples` independent samples: the integral of 1 - F^samples."""
        return _expected_max(self, samples)

    def survival(self, tokens: Floats) -> Floats:
        """Share of samples longer than each of `tokens`."""
        above: Floats = np.asarray(1 - np.interp(tokens, self._strict, self.shares, left=0.0), dtype=np.float64)
        above[tokens >= self.longest] = 0.0
        return above

    @cached_property
    def _strict(self) -> Floats:
        """The knots' tokens, equal ones set apart by next to nothing so that they rise strictly."""
        apart: Floats = np.arange(len(self.tokens), dtype=np.float64) * (self.longest * 1e-9)
        return apart + np.array(self.tokens, dtype=np.float64)


@lru_cache(maxsize=1024)
def _expected_max(lengths: Lengths, samples: float) -> float:
    shares, tokens = np.array(lengths.shares), np.array(lengths.tokens)
    low, high, rise = shares[:-1], shares[1:], np.diff(shares)
    power = (high ** (samples + 1) - low ** (samples + 1)) / ((samples + 1) * np.where(rise > 0, rise, 1.0))
    below = np.where(rise > 0, power, low**samples)
    return float(tokens[0] + np.sum(np.diff(tokens) * (1 - below)))


@lru_cache(maxsize=256)
def lognormal(mean: float, longest: float, deviation: float = LOG_DEVIATION) -> Lengths:
    """Log-normal lengths that are cut at `longest` (not redrawn) and then have this `mean`; all in tokens.

    deviation: standard deviation of the logarithm. The mean of the cut lengths is
    e^(m + d^2/2) Phi((ln M - m) / d - d) + M (1 - Phi((ln M - m) / d)), which rises with m: found by bisection.
    """
    if mean >= LIMIT_SHARE * longest:
        return Lengths((0.0, 1.0), (float(longest), float(longest)))
    low, high = math.log(mean) - deviation**2 / 2, math.log(longest) + 6 * deviation
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, longest, deviation) < mean else (low, middle)
    shares = _shares()
    tokens = [min(longest, math.exp(high + deviation * _normal_quantile(share))) for share in shares[1:-1]]
    top = min(float(longest), math.exp(high + deviation * _normal_quantile(1 - TAIL_PROBABILITY / 8)))
    return Lengths(shares, (0.0, *tokens, top))


def measured(tokens: Sequence[float]) -> Lengths:
    """The distribution of measured lengths: sorted samples at the middles of equal steps of probability.

    Raises ValueError where there are none.
    """
    if not tokens:
        raise ValueError("no lengths were measured")
    rising = sorted(max(0.0, float(one)) for one in tokens)
    n = len(rising)
    shares = (0.0, *((i + 0.5) / n for i in range(n)), 1.0)
    return Lengths(shares, (rising[0], *rising, rising[-1]))


_measured = lru_cache(maxsize=64)(measured)


def lengths_of(mean: float, longest: float, quantiles: tuple[int, ...] = ()) -> Lengths:
    """The measured distribution where there is one, else the log-normal one with this mean and limit."""
    return _measured(quantiles) if quantiles else lognormal(mean, longest)


def quantiles(tokens: Sequence[float], count: int = 256) -> tuple[int, ...]:
    """At most `count` lengths at equal steps of probability, rising: what a Workload carries of measured lengths."""
    rising = sorted(tokens)
    if len(rising) <= count:
        return tuple(max(1, round(one)) for one in rising)
    places = (np.arange(count) + 0.5) / count * len(rising) - 0.5
    return tuple(max(1, round(float(one))) for one in np.interp(places, np.arange(len(rising)), rising))


@lru_cache(maxsize=1)
def _shares() -> tuple[float, ...]:
    """Probabilities of the knots: equal steps, then halvings of the rest."""
    equal = [i / PROBABILITY_STEPS for i in range(PROBABILITY_STEPS)]
    count = math.ceil(KNOTS_PER_HALVING * math.log2(1 / PROBABILITY_STEPS / TAIL_PROBABILITY))
    return (*equal, *(1 - 2 ** (-i / KNOTS_PER_HALVING) / PROBABILITY_STEPS for i in range(count + 1)), 1.0)


def _cut_mean(location: float, longest: float, deviation: float) -> float:
    """Mean of min(X, longest), X log-normal."""
    place = (math.log(longest) - location) / deviation
    inside = math.exp(location + deviation**2 / 2) * _normal(place - deviation)
    return inside + longest * (1 - _normal(place))


def _normal(place: float) -> float:
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-place / math.sqrt(2))


def _normal_quantile(share: float) -> float:
    """The inverse of `_normal`, by bisection to 1e-9."""
    low, high = -9.0, 9.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _normal(middle) < share else (low, middle)
    return (low + high) / 2
