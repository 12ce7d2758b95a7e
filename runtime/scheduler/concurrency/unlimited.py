"""The work in flight where nothing limits it but admission: synchronous plans, and samples of no age. Takes no notice.

It has the methods that `Concurrency` shows to whoever collects groups.
"""

import math
import sys
from collections.abc import Sequence

from realgraph.runtime.scheduler.concurrency.ages import BatchedGroup


class Unlimited:
    """See `Concurrency`."""

    image = None
    most_per_engine = math.inf

    def room(self, n_waiting: int) -> int:
        """As much as anybody asks for."""
        return sys.maxsize

    def admitted(self, groups: Sequence[int], now: float) -> None:
        """See `Concurrency`."""

    def generated(self, group: int, lengths: Sequence[int], version: int, now: float) -> None:
        """See `Concurrency`."""

    def left(self, groups: Sequence[int], now: float) -> None:
        """See `Concurrency`."""

    def lost(self, groups: Sequence[int], now: float) -> None:
        """See `Concurrency`."""

    def moved(self, groups: Sequence[int], now: float) -> None:
        """See `Concurrency`."""

    def batched(self, step: int, groups: Sequence[BatchedGroup], now: float) -> None:
        """See `Concurrency`."""

    def starves(self, starving: bool, now: float) -> None:
        """See `Concurrency`."""

    def step_ended(self, step: int, now: float) -> None:
        """See `Concurrency`."""
