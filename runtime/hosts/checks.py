"""Hosts that have joined, held against the plan: which is which node of the cluster, and every fault at once."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from realgraph.graphs.errors import Problem, Where
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.detect import kind_of_gpu
from realgraph.runtime.hosts.facts import is_public
from realgraph.runtime.hosts.messages import HostFacts

LEAST_MEMORY = 0.95  # of what the plan counts on: drivers and kernels keep some


def in_order(hosts: Sequence[HostFacts], cluster: Cluster, here: str) -> list[HostFacts]:
    """The hosts as the nodes of a cluster: of each group of nodes those with its kind of device, first the one whose id
    is `here`, then by name. Where the kinds don't fit, the rest stands where there is room."""
    left = sorted(hosts, key=lambda host: (host.id != here, _natural(host.name)))
    placed: list[HostFacts | None] = []
    for group in cluster.groups:
        fitting = [host for host in left if group.is_cpu or _kind(host) == group.kind]
        for number in range(group.nodes):
            placed.append(fitting[number] if number < len(fitting) else None)
        left = [host for host in left if host not in placed]
    rest = iter(left)
    return [host if host is not None else next(rest) for host in placed]


def faults(
    hosts: Sequence[HostFacts], cluster: Cluster, versions: Mapping[str, str], *, trusted_network: bool
) -> Iterator[Problem]:
    """All that is wrong with hosts that are the cluster's nodes in this order. versions: of the master's host."""
    names = Counter(host.name for host in hosts)
    for name, count in names.items():
        if count > 1:
            ids = len({host.id for host in hosts if host.name == name})
            said = f"{count} hosts are named {name}" if ids > 1 else f"host {name} has joined {count} times"
            hint = "give each its own: realgraph worker --name NAME" if ids > 1 else "start one agent on each host"
            yield _problem("$.launch", said, hint)
    groups = [group for group in cluster.groups for _ in range(group.nodes)]
    for host, group in zip(hosts, groups, strict=True):
        yield from _machine_faults(host, group)
        yield from _version_faults(host, versions)
        if is_public(host.address) and not trusted_network:
            text = f"host {host.name} would listen on {host.address}, a public address"
            hint = "gloo, NCCL and torch's store do not authenticate: name a private network by launch.interface, or"
            yield _problem(
                "$.launch", text, f"{hint} set launch.trusted_network: true where a firewall keeps others out"
            )


def _machine_faults(host: HostFacts, group: Cluster) -> Iterator[Problem]:
    machine = host.machine
    if not group.is_cpu:
        gpus, wanted = machine.gpus, f"{group.devices_per_node} x {group.kind}"
        found = ", ".join(f"{n} x {name}" for name, n in Counter(gpu.name for gpu in gpus).items()) or "no NVIDIA GPU"
        if machine.gpu_error:
            text = f"the GPUs of host {host.name} can't be read: {machine.gpu_error}"
            yield _problem("$.cluster", text, "repair its driver, or leave the host out")
        elif len(gpus) < group.devices_per_node or _kind(host) != group.kind:
            text = f"the plan is for {wanted} a node, and host {host.name} has {found}"
            yield _problem("$.cluster", text, "give cluster the devices that the hosts have, and plan again")
        elif min(gpu.memory_bytes for gpu in gpus) < LEAST_MEMORY * group.memory_bytes:
            least, planned = min(gpu.memory_bytes for gpu in gpus) / 1e9, group.memory_bytes / 1e9
            text = f"the plan counts on {planned:.1f} GB a device, and a GPU of host {host.name} has {least:.1f} GB"
            yield _problem("$.cluster.memory_gb", text, "set cluster.memory_gb to the least of all hosts")
    if machine.host_memory_bytes < LEAST_MEMORY * group.host_memory_bytes:
        has, planned = machine.host_memory_bytes / 1e9, group.host_memory_bytes / 1e9
        text = f"the plan counts on {planned:.1f} GB of memory a host, and host {host.name} has {has:.1f} GB"
        yield _problem("$.cluster.host_memory_gb", text, "set cluster.host_memory_gb to the least of all hosts")


def _version_faults(host: HostFacts, versions: Mapping[str, str]) -> Iterator[Problem]:
    for package, ours in versions.items():
        theirs = host.versions.get(package)
        if theirs != ours:
            has = f"has {package} {theirs}" if theirs else f"has no {package}"
            text = f"host {host.name} {has}, and this host {ours}"
            yield _problem("$.launch", text, f"install {package} {ours} there: workers of one run must be alike")


def _kind(host: HostFacts) -> str | None:
    """The one kind of a host's GPUs; None for none, or several."""
    kinds = {kind_of_gpu(gpu.name) for gpu in host.machine.gpus}
    return next(iter(kinds)) if len(kinds) == 1 else None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that puts node10 behind node9."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _problem(path: str, text: str, hint: str) -> Problem:
    return Problem(Where(path=path), text, hint, "hosts")
