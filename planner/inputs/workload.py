"""The work of one step, in the planner's terms."""

from msgspec import Struct


class Workload(Struct, frozen=True, cache_hash=True):
    """A step's size. Lengths are tokens a sample; the means are guesses until a run has measured them.

    prompt_tokens and max_new_tokens are the longest: memory follows them, seconds follow the means.
    """

    groups: int
    samples_per_group: int
    prompt_tokens: int
    max_new_tokens: int
    mean_new_tokens: float
    staleness: int = 0
    max_tokens_per_microbatch: int | None = None
    mean_prompt_tokens: float | None = None  # default: prompt_tokens
    max_running: int | None = None  # sequences that decode at once on a device; default: the engine's
    lengths: tuple[int, ...] = ()  # new tokens at equal steps of probability, rising; default: from the mean

    @property
    def n_samples(self) -> int:
        return self.groups * self.samples_per_group

    @property
    def expected_prompt_tokens(self) -> float:
        """Tokens of a sample's prompt: the mean where it is known, else the longest."""
        return self.prompt_tokens if self.mean_prompt_tokens is None else self.mean_prompt_tokens
