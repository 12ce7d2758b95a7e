"""The machine a plan is made for, as a user writes it. Detects nothing: `detect.py` does."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

Count = Annotated[int, Meta(ge=1)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e6)]  # 10^9 bytes
MOST_DEVICES = 65_536  # of a cluster


class NodesSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Further nodes of another kind, for a mixed cluster. Their devices are numbered after those before them."""

    nodes: Count
    kind: str  # a name of planner/inputs/devices.yaml
    devices: Count | None = None  # per node; default: the kind's usual server
    memory_gb: Gigabytes | None = None  # per device
    host_memory_gb: Gigabytes | None = None  # per node


class ClusterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`nodes` x `devices` (per node) of one `kind`: a name of `planner/inputs/devices.yaml`, `cpu`, or `auto`
    (this machine).

    `memory_gb` (per device, 10^9 bytes) overrides the kind's own. `more`: nodes of other kinds.
    """

    nodes: Count | None = None  # hosts; default: 1, or those of the allocation (`launch.kind: slurm`)
    devices: Count | None = None  # per node; default: this machine's GPUs, or 2 processes on a CPU
    kind: str = "auto"  # H100-SXM, A100-80, ..., cpu; auto: this machine, or those of the allocation
    memory_gb: Gigabytes | None = None  # per device
    host_memory_gb: Gigabytes | None = None  # per node
    more: tuple[NodesSpec, ...] = ()  # nodes of other kinds: a mixed cluster


class Cluster(Struct, frozen=True, cache_hash=True):
    """A resolved cluster: every number known. Rates are per device and second, memory in bytes.

    The numbers are of the first group of nodes, of one kind.
    """

    nodes: int
    devices_per_node: int
    kind: str
    memory_bytes: int
    host_memory_bytes: int
    flops: float  # dense bf16 (fp32 on a CPU)
    memory_bytes_per_s: float
    link_bytes_per_s: float  # device to device inside a node
    nic_bytes_per_s: float  # per device between nodes
    pcie_bytes_per_s: float
    more: tuple["Cluster", ...] = ()  # the other groups, whose devices are numbered on

    @property
    def n_devices(self) -> int:
        """Devices of all groups."""
        return self.nodes * self.devices_per_node + sum(group.n_devices for group in self.more)

    @property
    def groups(self) -> tuple["Cluster", ...]:
        """Each group of nodes of one kind, as a cluster of its own, in the order of their devices."""
        return (replace(self, more=()), *self.more) if self.more else (self,)

    def first_of(self, group: int) -> int:
        """The number of the first device of a group."""
        return sum(one.n_devices for one in self.groups[:group])

    def node_of(self, device: int) -> int:
        """The number of the node that a device is in."""
        before = 0
        for group in self.groups:
            if device < group.n_devices:
                return before + device // group.devices_per_node
            device -= group.n_devices
            before += group.nodes
        raise ValueError(f"the cluster has {self.n_devices} devices")

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"
