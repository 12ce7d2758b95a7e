"""Pins: choices of a plan that a user fixes, call by call; the search chooses the rest. Data only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from realgraph.planner.plan.layout import Recompute, Schedule

Count = Annotated[int, Meta(ge=1)]


class Pin(Struct, frozen=True, forbid_unknown_fields=True):
    """Choices for one call; what is left out is the planner's.

    first, devices: the device mesh, `devices` consecutive devices from `first` (default 0).
    """

    first: Annotated[int, Meta(ge=0)] | None = None  # number of the mesh's first device
    devices: Count | None = None  # size of the mesh
    dp: Count | None = None  # data-parallel ranks
    tp: Count | None = None  # tensor-parallel ranks
    pp: Count | None = None  # pipeline stages
    ep: Count | None = None  # ranks that the experts are spread over
    cp: Count | None = None  # context-parallel ranks
    sharding: Literal["replicated", "fsdp"] | None = None  # of the data-parallel copies
    max_tokens_per_microbatch: Count | None = None  # that a device holds at once, of a call that does not generate
    kv_cache_tokens: Count | None = None  # of a device's KV cache, of a generate call
    recompute: Recompute | None = None  # what a train call computes again: nothing, all but products, whole layers
    schedule: Schedule | None = None  # of a train call's pipeline stages
    chunks: Count | None = None  # groups of layers of a stage, where the schedule is interleaved
    residency: Literal["resident", "offloaded"] | None = None  # of the weights between calls
