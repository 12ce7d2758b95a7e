"""One way to run a call: all that a plan chooses for it. Pins, candidates, allocations and reports speak of it.

A field that is added here is compared, pinned, forbidden, kept, priced apart and shown as different by its name alone;
`options/choices.py` enumerates its values, and the cost functions say what they change.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from realgraph.planner.plan.layout import AXES, Layout, Recompute, Schedule

TOKENS = ("max_tokens_per_microbatch", "kv_cache_tokens")  # a call has one of them; generate calls the second
PASSES = ("recompute", "schedule", "chunks")  # of a train call: how it takes its micro-batches
PLAIN = ("none", "1f1b", 1)  # the same of a call without a backward pass
Tokens = Annotated[int, Meta(ge=1, le=1 << 62)]
Residency = Literal["resident", "offloaded", "reallocated", "in_place"]


class CallOption(Struct, frozen=True):
    """A choice for one call. Where its place is open, the layout's mesh is any of that size in its group of
    nodes."""

    layout: Layout
    max_tokens_per_microbatch: Tokens | None = None  # that a device holds at once, of a call that does not generate
    recompute: Recompute = "none"  # of a train call's activations, in its backward pass
    schedule: Schedule = "1f1b"  # of a train call's pipeline stages
    chunks: Annotated[int, Meta(ge=1)] = 1  # groups of layers of a stage, 1 where the schedule is not interleaved
    kv_cache_tokens: Tokens | None = None  # of a device's KV cache, of a generate call
    # of the weights between calls: `reallocated` is a copy that training refreshes; `in_place` the trained copy itself,
    # which is possible only where that lies on the call's mesh under its layout
    residency: Residency = "resident"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, or of the cache of a generate call; 0 where a plan that was edited says neither."""
        return self.kv_cache_tokens or self.max_tokens_per_microbatch or 0

    @property
    def passes(self) -> tuple[Recompute, Schedule, int]:
        """The way a train call takes its micro-batches: the fields that `PASSES` names."""
        return (self.recompute, self.schedule, self.chunks)

    @property
    def settings(self) -> dict[str, int | str | None]:
        """All that was chosen but the mesh, by the names that pins have; None is what other kinds of calls have."""
        named = {name: getattr(self, name) for name in CHOSEN}
        waits = "offloaded" if self.residency == "offloaded" else "resident"  # what a pin may say of it
        return {**dict(zip(AXES, self.layout.axes, strict=True)), **named, "residency": waits}


CHOSEN = CallOption.__struct_fields__[1:]  # what a plan chooses besides the layout
SETTINGS = (*AXES, *CHOSEN)  # the same with the axes of the layout, as pins name them
