"""A stream's intervals of tokens between two updates, cut finer where plans below a known period may lie.

An interval stands for all streams within it at the least seconds and the shortest wait of any (`rollout.py`), so a
bound is as loose as its intervals are wide. Let some plan of period P be known. A stream of a faster plan has T seconds
of work a step and a batch that waits for w periods and R seconds; both are at least those of its interval. If every
plan in which generation takes more than T_n seconds on n devices is slower than P, and every path from a complete batch
to the weights that wait for it takes U seconds or more, then
    T <= T_n    and    R + U <= (1 + eta - w) P'    for its own period P' < P,
and as w <= 1 + eta wherever that can hold, R + U <= (1 + eta - w) P too. An interval for which one of the two is false
has no stream of a faster plan, and is left out. The others are cut into parts, each of which is an interval as before.
So the least period over what is left is a bound on every plan that is faster than P, and P on all others.
"""

from functools import cached_property

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.generate.generate import GenerateWork
from realgraph.planner.costs.generate.rollout import (
    Stream,
    Variant,
    interval_bounds,
    stream_levels,
    stream_of,
    variants_at,
)
from realgraph.planner.costs.setting import Setting

PARTS = 8  # of an interval that is cut


class StreamWindow(Struct, frozen=True):
    """The bounds that hold for the stream of every plan faster than `period`."""

    period: float
    return_seconds: float  # from a complete batch to the weights that wait for it, at least
    distance: int  # 1 + staleness: steps from those weights to the batches of before
    most_seconds: tuple[tuple[int, float], ...]  # (devices of the mesh, seconds that the stream may take there)

    def has(self, n_devices: int, seconds: float, wait: tuple[int, float]) -> bool:
        """True where a stream with at least these seconds and this wait, in periods and seconds, may be in such a
        plan."""
        periods, rest = wait
        fast = any(n == n_devices and seconds <= most for n, most in self.most_seconds)
        return fast and rest + self.return_seconds <= (self.distance - periods) * self.period


class IntervalCuts(Struct, frozen=True, eq=False, dict=True):
    """The intervals that a search is offered of one call that streams, by number. Each is computed when it is first
    asked for."""

    setting: Setting
    work: GenerateWork
    staleness: int

    def __len__(self) -> int:
        return len(self._free)

    @cached_property
    def _stream(self) -> Stream:
        return stream_of(self.setting, self.work)

    @cached_property
    def _free(self) -> list[Variant]:
        """The streams at the ends of intervals, where nothing pauses them."""
        return stream_levels(self._stream, self.staleness)

    @cached_property
    def _paused(self) -> list[Variant]:
        return stream_levels(self._stream, self.staleness, paused=True)

    def offers(self, paused: bool = False) -> tuple[Variant, ...]:
        """The intervals uncut."""
        return interval_bounds(self._paused if paused else self._free)

    def parts(self, number: int, paused: bool = False) -> tuple[Variant, ...]:
        """The intervals into which one is cut: of the last, which is a single stream, that alone."""
        levels = self._paused if paused else self._free
        if number == len(levels) - 1:
            return interval_bounds(levels[-1:])
        begin, end = levels[number], levels[number + 1]
        points = np.geomspace(begin.tokens_between_updates, end.tokens_between_updates, PARTS + 1)
        inner = variants_at(self._stream, [float(point) for point in points[1:-1]], paused)
        return interval_bounds([begin, *inner, end])[:-1]
