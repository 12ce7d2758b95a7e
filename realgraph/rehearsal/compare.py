"""The metrics of a rehearsal beside those of one process: the same numbers, or where they part."""

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

TIMES = ("seconds", "tokens_per_second")
# how many sequences decode at once depends on the clock; entropy is of the first micro-batch of each rank, and the gaps
# of log-probabilities are rounding alone; bytes are a layout's
NOT_ALIKE = (
    *TIMES,
    "running",
    "waiting",
    "free_cache_tokens",
    "entropy",
    "logprob_gap",
    "update_gap",
    "peak_bytes",
    "planned_bytes",
    "prefetched_bytes",
)
# of an asynchronous plan, where the clock decides which groups are ready first, and so all that follows from samples
CLOCKLESS = ("/lr", "batch/groups", "batch/samples")
TOLERANCE = 1e-6  # relative, in float64, after steps that amplify rounding
# absolute: calls hand log-probabilities and values on in float32, whose last digit a layout may change; a mean of their
# differences that is all but zero has the rounding of single ones (2e-7), less by the root of their number
FLOOR = 1e-7


class Compared(Struct, frozen=True):
    """One metric of one step, by the plan and by one process; None where a run has no such metric."""

    step: int
    metric: str
    planned: float | None
    alone: float | None

    @property
    def alike(self) -> bool:
        """True where both are there and equal but for rounding."""
        if self.planned is None or self.alone is None:
            return False
        return math.isclose(self.planned, self.alone, rel_tol=TOLERANCE, abs_tol=FLOOR)


def compared(
    planned: Sequence[Mapping[str, float]],
    alone: Sequence[Mapping[str, float]],
    steps: int,
    *,
    asynchronous: bool = False,
) -> Iterator[Compared]:
    """The metrics of the first `steps` steps that no layout changes, in the order of the steps and of their names; of
    an asynchronous plan only those that the clock does not change either."""
    for step in range(steps):
        ours = planned[step] if step < len(planned) else {}
        theirs = alone[step] if step < len(alone) else {}
        for name in sorted({*ours, *theirs}):
            follows = not asynchronous or any(part in name for part in CLOCKLESS)
            if follows and not name.endswith(NOT_ALIKE):
                yield Compared(step, name, ours.get(name), theirs.get(name))


def too_old(planned: Sequence[Mapping[str, float]], bound: float) -> tuple[str, ...]:
    """Steps that trained on samples which lagged more than `bound` steps behind the weights, in words."""
    ages = [step.get("staleness/max", 0.0) for step in planned]
    return tuple(f"samples of step {i + 1} lag {age:g} steps behind" for i, age in enumerate(ages) if age > bound)
