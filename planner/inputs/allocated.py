"""The parts of `cluster` that a user has left out, taken from the hosts that are there."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import ClusterSpec, NodesSpec
from realgraph.planner.inputs.detect import AUTO, CPU, Probe, kind_of_gpu


def is_whole(spec: ClusterSpec) -> bool:
    """True where a spec leaves nothing to the hosts."""
    return spec.nodes is not None and spec.devices is not None and spec.kind != AUTO


def cluster_from(spec: ClusterSpec, hosts: Sequence[tuple[str, Probe]]) -> ClusterSpec:
    """The spec with the nodes, devices, kinds and memory of the named hosts where it has none: of each kind the least
    that a host has. Raises ConfigError for hosts that no cluster can be made of."""
    kinds: dict[str, list[Probe]] = {}
    problems = [problem for name, host in hosts for problem in _unreadable(name, host)]
    if problems:
        raise ConfigError(problems)
    for _, host in hosts:
        kinds.setdefault(_kind(host), []).append(host)
    if spec.kind != AUTO:
        if spec.kind != CPU and spec.kind not in kinds:
            text = f"no host has {spec.kind}: they have {', '.join(sorted(kinds))}"
            raise ConfigError([Problem(Where(path="$.cluster.kind"), text, "leave it out, or name another", "cluster")])
        chosen = kinds[spec.kind] if spec.kind != CPU else [host for _, host in hosts]
        return _filled(spec, spec.kind, chosen)
    if spec.nodes is not None or spec.devices is not None or len(kinds) == 1:
        kind = max(kinds, key=lambda name: len(kinds[name]))
        return _filled(spec, kind, kinds[kind])
    if CPU in kinds:
        text = f"{len(kinds[CPU])} of {len(hosts)} hosts have no GPU"
        hint = "leave them out of the allocation, or say which cluster to plan for: cluster.kind"
        raise ConfigError([Problem(Where(path="$.cluster"), text, hint, "cluster")])
    first, *others = sorted(kinds, key=lambda name: (-len(kinds[name]), name))
    more = tuple(_further(kind, kinds[kind]) for kind in others)
    return replace(_filled(spec, first, kinds[first]), more=spec.more or more)


def _filled(spec: ClusterSpec, kind: str, hosts: Sequence[Probe]) -> ClusterSpec:
    group = _further(kind, hosts)
    return replace(
        spec,
        nodes=spec.nodes or group.nodes,
        devices=spec.devices or group.devices,
        kind=kind,
        memory_gb=spec.memory_gb or group.memory_gb,
        host_memory_gb=spec.host_memory_gb or group.host_memory_gb,
    )


def _further(kind: str, hosts: Sequence[Probe]) -> NodesSpec:
    """Hosts of one kind as a group of nodes, by the least that one has."""
    host_memory = min(host.host_memory_bytes for host in hosts) / 1e9
    if kind == CPU:
        return NodesSpec(len(hosts), CPU, host_memory_gb=host_memory)
    memory = min(gpu.memory_bytes for host in hosts for gpu in host.gpus) / 1e9
    return NodesSpec(len(hosts), kind, min(len(host.gpus) for host in hosts), memory, host_memory)


def _kind(host: Probe) -> str:
    return (kind_of_gpu(host.gpus[0].name) or "") if host.gpus else CPU


def _unreadable(name: str, host: Probe) -> Iterator[Problem]:
    where = Where(path="$.cluster")
    kinds = {gpu.name: kind_of_gpu(gpu.name) for gpu in host.gpus}
    hint = "say which cluster to plan for: cluster.nodes, kind, devices and memory_gb"
    if host.gpu_error:
        yield Problem(where, f"the GPUs of host {name} can't be read: {host.gpu_error}", hint, "cluster")
    elif None in kinds.values():
        unknown = next(gpu for gpu, kind in kinds.items() if kind is None)
        yield Problem(where, f"host {name} has a {unknown}, which is not in the table of devices", hint, "cluster")
    elif len(set(kinds.values())) > 1:
        yield Problem(where, f"host {name} mixes GPUs: {', '.join(sorted(kinds))}", hint, "cluster")
