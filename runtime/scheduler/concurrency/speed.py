"""The speed of generation by the work in flight, learned from groups that have ended. Knows no ages and no workers.

A group of N in flight takes, for each token of its longest sample, a + b N seconds: a token step costs something by
itself, and something for each sequence in it; where sequences wait for a slot, the wait grows with N too. By Little's
law N / (seconds of a group) groups end a second. Only what N really was tells a from b, so it has to vary.
"""

import math

from msgspec import Struct

LEAST_SPREAD = 0.02  # standard deviation of N over its mean from which the slope can be told


class SpeedImage(Struct, frozen=True):
    """The sums of a fit as plain data."""

    groups: float
    tokens: float
    tokens_by_running: float
    tokens_by_square: float
    seconds: float
    seconds_by_running: float


class Speed:
    """A weighted fit of seconds on longest tokens and on longest tokens x N; older groups count ever less.

    memory: groups after which one counts 1 / e.
    """

    def __init__(self, memory: float) -> None:
        self._keep = math.exp(-1.0 / memory)
        self._sums = SpeedImage(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def image(self) -> SpeedImage:
        """All that it has."""
        return self._sums

    def restore(self, image: SpeedImage) -> None:
        """Go on from an image."""
        self._sums = image

    def add(self, running: float, longest: int, seconds: float) -> None:
        """A group has ended. running: groups in flight while it was, on average; longest: tokens of its samples."""
        old, keep = self._sums, self._keep
        self._sums = SpeedImage(
            groups=keep * old.groups + 1,
            tokens=keep * old.tokens + longest,
            tokens_by_running=keep * old.tokens_by_running + longest * running,
            tokens_by_square=keep * old.tokens_by_square + longest * running * running,
            seconds=keep * old.seconds + seconds,
            seconds_by_running=keep * old.seconds_by_running + seconds * running,
        )

    @property
    def known(self) -> bool:
        """True where a group has ended."""
        return self._sums.tokens > 0

    @property
    def longest(self) -> float:
        """Mean tokens of a group's longest sample."""
        return self._sums.tokens / self._sums.groups

    @property
    def terms(self) -> tuple[float, float]:
        """(a, b): seconds of a token of a group's longest sample are a + b N. Neither is negative.

        Where N has hardly varied nothing tells that a token of more groups takes longer: b is 0.
        """
        sums = self._sums
        mean = sums.tokens_by_running / sums.tokens
        variance = sums.tokens_by_square / sums.tokens - mean * mean
        flat = sums.seconds / sums.tokens
        if variance <= (LEAST_SPREAD * mean) ** 2:
            return flat, 0.0
        slope = (sums.seconds_by_running / sums.tokens - mean * flat) / variance
        slope = min(max(0.0, slope), flat / mean)
        return flat - slope * mean, slope

    def token_seconds(self, running: float) -> float:
        """Seconds of a token of a group's longest sample with so many groups in flight."""
        fixed, each = self.terms
        return fixed + each * running

    def groups_per_second(self, running: float) -> float:
        """Groups that end a second with so many in flight."""
        return running / (self.longest * self.token_seconds(running))

    def running_for(self, groups_per_second: float) -> float:
        """The fewest groups in flight with which so many end a second; infinite where no number does."""
        fixed, each = self.terms
        seconds = groups_per_second * self.longest
        return seconds * fixed / (1 - seconds * each) if seconds * each < 1 else math.inf
