"""What one step has to do, in the planner's terms."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]


class Workload(Struct, frozen=True):
    """A step's size. Lengths are tokens a sample; `mean_new_tokens` is a guess until a run has measured it."""

    groups: int
    samples_per_group: int
    prompt_tokens: int
    max_new_tokens: int
    mean_new_tokens: float
    staleness: int = 0
    max_tokens_per_microbatch: int | None = None
    max_running: int | None = None  # sequences that decode at once on a device; default: the engine's

    @property
    def n_samples(self) -> int:
        return self.groups * self.samples_per_group
