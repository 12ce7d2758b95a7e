"""Where a role's weights lie: a device mesh and how the axes of parallelism cut the weights over it."""

from typing import Literal

from msgspec import Struct


class DeviceMesh(Struct, frozen=True, order=True):
    """`n_devices` consecutive devices from `first`: an aligned power of two inside a node, or whole nodes."""

    first: int
    n_devices: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.n_devices)

    def meets(self, other: "DeviceMesh") -> bool:
        """Whether the two share a device."""
        return self.first < other.first + other.n_devices and other.first < self.first + self.n_devices


class Layout(Struct, frozen=True):
    """A mesh x (dp, tp, pp, ep, cp), dp outermost; dp x tp x pp x cp devices. `fsdp` shards the dp copies' states."""

    mesh: DeviceMesh
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    sharding: Literal["replicated", "fsdp"] = "replicated"
