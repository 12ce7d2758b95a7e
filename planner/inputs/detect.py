"""From what the user wrote to a Cluster with every number known; and what this machine has, found without torch."""

import os
import re
import subprocess
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import MOST_DEVICES, Cluster, ClusterSpec
from realgraph.planner.inputs.devices import DeviceKind, device_kind, device_kinds

CPU = "cpu"
AUTO = "auto"
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20.0
MEBIBYTE = 1 << 20


class Gpu(Struct, frozen=True):
    """One GPU as its driver names it, with its memory in bytes."""

    name: str
    memory_bytes: int


class Probe(Struct, frozen=True):
    """This machine's devices."""

    cores: int
    host_memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""  # why the GPUs could not be read, '' where they could or there is no driver


def probe() -> Probe:
    """Read this machine: cores and memory that this process may use, GPUs by nvidia-smi."""
    gpus, error = _nvidia_gpus()
    return Probe(_cores(), _host_memory_bytes(), gpus, error)


def resolve(spec: ClusterSpec, machine: Probe) -> Cluster:
    """Every number of the cluster: the spec's own, else the kind's, else this machine's.

    Raises ConfigError for a kind that no table has, GPUs that can't be read, a count that nothing tells, CPU nodes
    beside others, and more devices than a cluster has.
    """
    name = _kind_name(spec, machine)
    kind = device_kind(name)
    first = _cpu_cluster(spec, machine, kind) if name == CPU else _gpu_cluster(spec, machine, name, kind)
    whole = replace(first, more=tuple(_more(spec, i, name) for i in range(len(spec.more)))) if spec.more else first
    if whole.n_devices > MOST_DEVICES:
        text = f"these are {whole.n_devices:,} devices; a cluster has at most {MOST_DEVICES:,}"
        raise _error("nodes", text, "cluster.nodes counts hosts, cluster.devices those of one host")
    return whole


def _more(spec: ClusterSpec, number: int, first: str) -> Cluster:
    """Further nodes of another kind: never this machine, so that all that is not said is the kind's own."""
    nodes, path = spec.more[number], f"more[{number}].kind"
    kind = device_kind(nodes.kind, Where(path=f"$.cluster.{path}"))
    if CPU in (nodes.kind, first):
        text = "a mixed cluster has GPUs of several kinds; CPU processes and GPUs do not share one"
        raise _error(path, text, "leave the cpu nodes out")
    single = ClusterSpec(
        nodes=nodes.nodes,
        devices=nodes.devices or kind.per_node,
        kind=nodes.kind,
        memory_gb=nodes.memory_gb,
        host_memory_gb=nodes.host_memory_gb,
    )
    return _gpu_cluster(single, Probe(cores=1, host_memory_bytes=0), nodes.kind, kind)


def _kind_name(spec: ClusterSpec, machine: Probe) -> str:
    if spec.kind != AUTO:
        return spec.kind
    if machine.gpu_error:
        hint = "set cluster.kind to the GPU's kind, or to cpu"
        raise _error("kind", f"the GPUs of this machine can't be read: {machine.gpu_error}", hint)
    if not machine.gpus:
        return CPU
    kinds = {gpu.name: kind_of_gpu(gpu.name) for gpu in machine.gpus}
    unknown = sorted(name for name, kind in kinds.items() if kind is None)
    if unknown:
        hint = f"set cluster.kind to the closest of {', '.join(device_kinds())}, and cluster.memory_gb"
        raise _error("kind", f"this machine's GPU {unknown[0]!r} is not in the table of devices", hint)
    if len(set(kinds.values())) > 1:
        raise _error("kind", f"this machine mixes GPUs: {', '.join(sorted(kinds))}", "set cluster.kind and devices")
    return str(next(iter(kinds.values())))


def kind_of_gpu(gpu_name: str) -> str | None:
    """The device kind whose table entry knows a GPU that its driver names so."""
    for name, kind in device_kinds().items():
        if any(re.search(pattern, gpu_name) for pattern in kind.names):
            return name
    return None


def _gpu_cluster(spec: ClusterSpec, machine: Probe, name: str, kind: DeviceKind) -> Cluster:
    here = [gpu for gpu in machine.gpus if kind_of_gpu(gpu.name) == name]
    devices = spec.devices or len(here)
    if not devices:
        hint = f"set cluster.devices: {kind.per_node} is usual for {name}"
        raise _error("devices", f"how many {name} a node has is not said, and this machine has none", hint)
    nominal = min((gpu.memory_bytes for gpu in here), default=round(kind.memory_gb * 1e9))
    host = machine.host_memory_bytes if here else round(kind.host_memory_gb * 1e9)
    return Cluster(
        nodes=spec.nodes or 1,
        devices_per_node=devices,
        kind=name,
        memory_bytes=_bytes(spec.memory_gb, nominal),
        host_memory_bytes=_bytes(spec.host_memory_gb, host),
        flops=kind.flops,
        memory_bytes_per_s=kind.memory_gb_per_s * 1e9,
        link_bytes_per_s=kind.link_gb_per_s * 1e9,
        nic_bytes_per_s=kind.nic_gb_per_s * 1e9,
        pcie_bytes_per_s=kind.pcie_gb_per_s * 1e9,
    )


def _cpu_cluster(spec: ClusterSpec, machine: Probe, kind: DeviceKind) -> Cluster:
    """Processes that share a node's cores and memory; every node is taken to be like this machine."""
    devices = spec.devices or kind.per_node
    host = _bytes(spec.host_memory_gb, machine.host_memory_bytes)
    share = min(1.0, machine.cores / devices)
    return Cluster(
        nodes=spec.nodes or 1,
        devices_per_node=devices,
        kind=CPU,
        memory_bytes=_bytes(spec.memory_gb, host // devices),
        host_memory_bytes=host,
        flops=kind.flops * share,
        memory_bytes_per_s=kind.memory_gb_per_s * 1e9 * share,
        link_bytes_per_s=kind.link_gb_per_s * 1e9 * share,
        nic_bytes_per_s=kind.nic_gb_per_s * 1e9 / devices,
        pcie_bytes_per_s=kind.pcie_gb_per_s * 1e9 * share,
    )


def _bytes(gigabytes: float | None, otherwise: int) -> int:
    return otherwise if gigabytes is None else round(gigabytes * 1e9)


def _cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory_bytes() -> int:
    """Physical memory, or the container's limit where that is smaller (cgroup version 2)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


def _nvidia_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs by nvidia-smi, or why they can't be read. A machine without the tool has none."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except FileNotFoundError:
        return (), ""
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi gave no answer in {QUERY_SECONDS:.0f} s"
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip().splitlines()
        return (), f"nvidia-smi failed: {said[0] if said else f'exit status {answer.returncode}'}"
    rows = [line.rpartition(",") for line in answer.stdout.splitlines() if line.strip()]
    odd = ["".join(row) for row in rows if not row[2].strip().isdigit()]
    if odd:
        return (), f"nvidia-smi said {odd[0]!r}, not a name and mebibytes"
    return tuple(Gpu(name.strip(), int(memory) * MEBIBYTE) for name, _, memory in rows), ""


def _error(field: str, text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where(path=f"$.cluster.{field}"), text, hint, "cluster")])
