"""Notes about a run that goes on but learns nothing. Reads a step's flat metrics; changes nothing."""

from collections.abc import Iterator, Mapping

FLAT_STEPS = 5  # in a row, before equal rewards are worth a note
TOLERANCE = 1e-9  # relative to the mean square: below it rewards differ by rounding only


class Advice:
    """Looks at each step; every note is given once a run."""

    def __init__(self) -> None:
        self._flat: dict[str, int] = {}  # call -> steps in a row whose rewards were all equal

    def look(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """What to tell after a step."""
        for name, square in metrics.items():
            call, _, what = name.rpartition("/")
            if what != "reward_square":
                continue
            mean = metrics[f"{call}/reward"]
            flat = square - mean * mean <= TOLERANCE * max(square, TOLERANCE)
            self._flat[call] = self._flat.get(call, 0) + 1 if flat else 0
            if self._flat[call] == FLAT_STEPS:
                yield (
                    f"every reward of the last {FLAT_STEPS} steps was {mean:.4g}: there is nothing to learn from; "
                    "look at the samples, the reward function, and whether answers are cut at batch.max_new_tokens"
                )
