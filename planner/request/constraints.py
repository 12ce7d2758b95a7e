"""Constraints of a user on the whole plan, beside the pins of single calls. Data only."""

from typing import Annotated

from msgspec import Meta, Struct

from realgraph.planner.inputs.cluster import Gigabytes
from realgraph.planner.request.pins import Pin


class Constraints(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the search; an error can name each as one of those in conflict.

    share: calls that must lie on one mesh. forbid: call -> layouts it may not have: an option that agrees with all that
    is set in such a pin is left out. reserve: devices that stay free, the last ones of the cluster.
    """

    share: tuple[tuple[str, ...], ...] = ()  # sets of calls that must lie on one mesh
    forbid: dict[str, tuple[Pin, ...]] = {}  # call -> choices it may not have
    reserve: Annotated[int, Meta(ge=0)] = 0  # devices left free, the last of the cluster
    memory_gb: Gigabytes | None = None  # per device, 10^9 bytes that a plan may fill
    host_memory_gb: Gigabytes | None = None  # per node, for what is offloaded
    colocated: bool = False  # every call on all devices
    offload: bool = True  # whether weights and optimizer states may wait in host memory
