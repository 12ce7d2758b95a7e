"""The machine a plan is made for, as a user writes it. Detects nothing: `detect.py` does."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]


class ClusterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`nodes` x `devices` (per node) of one `kind`: a name of `planner/devices.yaml`, `cpu`, or `auto` (this machine).

    `memory_gb` (per device, 10^9 bytes) overrides the kind's own.
    """

    nodes: Count = 1  # hosts
    devices: Count | None = None  # per node; default: this machine's GPUs, or 2 processes on a CPU
    kind: str = "auto"  # H100-SXM, A100-80, ..., cpu; auto: this machine
    memory_gb: Annotated[float, Meta(gt=0)] | None = None  # per device
    host_memory_gb: Annotated[float, Meta(gt=0)] | None = None  # per node


class Cluster(Struct, frozen=True):
    """A resolved cluster: every number known. Rates are per device and second, memory in bytes.

    flops: dense bf16 (fp32 on a CPU). link_bytes_per_s: device to device inside a node; nic: per device between nodes.
    """

    nodes: int
    devices_per_node: int
    kind: str
    memory_bytes: int
    host_memory_bytes: int
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    nic_bytes_per_s: float
    pcie_bytes_per_s: float

    @property
    def n_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"
