"""Notes about a run that goes on but learns nothing. Reads a step's flat metrics; changes nothing."""

from collections.abc import Iterator, Mapping

FLAT_STEPS = 5  # in a row, before equal rewards are worth a note
FLAT_TOLERANCE = 1e-9  # relative to the mean square: below it rewards differ by rounding only
OVERDUE_SHARE = 0.05  # of sampled tokens that are masked for their age: more is worth a note


class Advice:
    """Looks at each step; every note is given once a run."""

    def __init__(self) -> None:
        self._flat: dict[str, int] = {}  # call -> steps in a row whose rewards were all equal
        self._given: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines to tell after a step."""
        yield from self._equal_rewards(metrics)
        for name, value in metrics.items():
            call, _, what = name.rpartition("/")
            overdue = metrics.get(f"{call}/overdue", 0.0)
            old = (
                f"{overdue:.0%} of its sampled tokens were older than `staleness` allows and were left out of the loss"
            )
            hint = _fix(metrics)
            if what == "empty_steps" and value and self._first(name):
                yield (
                    f"{call} took no optimizer step for {value:.0f} of its mini-batches: no token had a part in the "
                    f"loss; {f'{old}: {hint}' if overdue else 'all of them are masked, or weigh nothing'}"
                )
            elif what == "overdue" and value > OVERDUE_SHARE and self._first(name):
                yield f"{call}: {old}; {hint}"

    def _first(self, name: str) -> bool:
        """True where this note has not been given yet; from now on it has."""
        first = name not in self._given
        self._given.add(name)
        return first

    def _equal_rewards(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for name, square in metrics.items():
            call, _, what = name.rpartition("/")
            if what != "reward_square":
                continue
            mean = metrics[f"{call}/reward"]
            flat = square - mean * mean <= FLAT_TOLERANCE * max(square, FLAT_TOLERANCE)
            self._flat[call] = self._flat.get(call, 0) + 1 if flat else 0
            if self._flat[call] == FLAT_STEPS:
                yield (
                    f"every reward of the last {FLAT_STEPS} steps was {mean:.4g}: there is nothing to learn from; "
                    "look at the samples, the reward function, and whether answers are cut at batch.max_new_tokens"
                )


def _fix(metrics: Mapping[str, float]) -> str:
    """A bound that 95 % of this step's groups would have kept, oldest token and all, and what else helps."""
    kept = metrics.get("staleness/p95", 0.0)
    bound = (
        f"raise `staleness` to {kept:.0f}, which 95% of this step's groups would keep" if kept else "raise `staleness`"
    )
    running = max((value for name, value in metrics.items() if name.endswith("/running")), default=0.0)
    fewer = f", set `rollout.max_running` below the {running:.0f} sequences that ran at once" if running >= 2 else ""
    return f"{bound}{fewer}, or set `overdue` to wait"
