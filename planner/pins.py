"""What a user fixes of a plan, call by call; the search chooses the rest. Data only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]


class Pin(Struct, frozen=True, forbid_unknown_fields=True):
    """Choices for one call; what is left out is the planner's.

    first, devices: the device mesh, `devices` consecutive devices from `first` (default 0).
    max_tokens_per_microbatch: tokens a device holds at once; of a generate call, tokens in its KV cache.
    """

    first: Annotated[int, Meta(ge=0)] | None = None
    devices: Count | None = None
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    sharding: Literal["replicated", "fsdp"] | None = None
    max_tokens_per_microbatch: Count | None = None
