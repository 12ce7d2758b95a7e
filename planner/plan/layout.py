"""The place of a role's weights: a device mesh and how the axes of parallelism cut the weights over it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from realgraph.planner.inputs.cluster import MOST_DEVICES

Recompute = Literal["none", "selective", "full"]  # in a backward pass: nothing, all but matrix products, whole layers
Schedule = Literal["1f1b", "interleaved"]  # the order in which pipeline stages take micro-batches
AXES = ("dp", "tp", "pp", "ep", "cp", "sharding")  # what a layout says besides its mesh


Ranks = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
Stages = tuple[tuple[Annotated[int, Meta(ge=0, le=1 << 31)], ...], ...]  # layers of each stage's chunks


class DeviceMesh(Struct, frozen=True, order=True, cache_hash=True):
    """`n_devices` consecutive devices from `first`: an aligned power of two inside a node, or whole nodes."""

    first: Annotated[int, Meta(ge=0, lt=MOST_DEVICES)]
    n_devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)]

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.n_devices)

    def overlaps(self, other: "DeviceMesh") -> bool:
        """True where the two share a device."""
        return self.first < other.first + other.n_devices and other.first < self.first + self.n_devices


class Layout(Struct, frozen=True, cache_hash=True):
    """A mesh x (dp, tp, pp, ep, cp): dp x tp x pp x cp devices, tp innermost, then cp, dp, pp outermost (`axes.py`).

    ep spreads routed experts over neighbours of one stage. `fsdp` shards the states over the dp x cp copies.
    """

    mesh: DeviceMesh
    dp: Ranks = 1
    tp: Ranks = 1
    pp: Ranks = 1
    ep: Ranks = 1
    cp: Ranks = 1
    sharding: Literal["replicated", "fsdp"] = "replicated"
    stages: Stages = ()  # where pp is more than 1, as plans have them; (): as `stages.py` balances them

    @property
    def axes(self) -> tuple[int | str, ...]:
        """Values of `AXES`: equal for layouts that cut weights alike, wherever they lie."""
        return (self.dp, self.tp, self.pp, self.ep, self.cp, self.sharding)
