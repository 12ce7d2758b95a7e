"""Facts about hosts and pairs to what has to be fixed. Pure: looks at nothing itself."""

from collections import Counter
from collections.abc import Iterator, Sequence

from realgraph.planner.inputs.detect import kind_of_gpu
from realgraph.runtime.doctor.facts import UNLIMITED, Disk, Finding, HostReport, Network, PairReport
from realgraph.runtime.processes.open_files import FILES_PER_WORKER, OWN_FILES, USUAL_FILES

NEEDED = ("torch", "transformers", "pyzmq", "safetensors", "msgspec")
ALIKE = ("python", "realgraph", *NEEDED)  # versions that all hosts of a run share
LEAST_SHM_BYTES = 1 << 30  # that NCCL may want beside 8 GPUs
SMALL_SHM_BYTES = 65 << 20  # containers get 64 MiB unless told otherwise
LEAST_PROCESSES = 4096
LEAST_PORTS = 1000
LEAST_DISK_BYTES, SMALL_DISK_BYTES = 10**9, 20 * 10**9
SLOW_DISK_BYTES_PER_S = 50e6
LEAST_MEMORY_SHARE = 0.1  # of a host's, unused
CLOCK_SECONDS = 1.0
SLOW_LINK_BYTES_PER_S = 0.13e9  # what 1 Gbit/s gives is less
UNEVEN_SHARE = 1 / 3  # of the usual speed between hosts


def findings(
    hosts: Sequence[HostReport], pairs: Sequence[PairReport], others: Sequence[Finding] = ()
) -> Iterator[Finding]:
    """All that is wrong, those first that make a run fail. others: that are known already."""
    found = [*others, *(finding for host in hosts for finding in host_findings(host))]
    found += [*together(hosts), *between(pairs)]
    yield from sorted(found, key=lambda finding: not finding.fails)


def host_findings(host: HostReport) -> Iterator[Finding]:
    """All that is wrong with one host by itself."""
    yield from _software(host)
    yield from _gpus(host)
    yield from _limits(host)
    yield from _memory(host)
    yield from _disk(host.name, host.disk)
    yield from _network(host.name, host.network)


def _software(host: HostReport) -> Iterator[Finding]:
    for package in NEEDED:
        if package not in host.versions:
            fix = "pip install 'realgraph[run]', with the build of torch for its GPUs first"
            yield Finding(host.name, f"{package} is not installed", fix)
    if host.torch is not None and host.machine.gpus and not host.torch.cuda:
        text = f"torch {host.versions.get('torch', '')} is a CPU build, and there are {len(host.machine.gpus)} GPUs"
        yield Finding(host.name, text, "install a CUDA build of torch: see https://pytorch.org/get-started")
    elif host.torch is not None and host.torch.n_gpus < len(host.machine.gpus):
        text = f"torch can use {host.torch.n_gpus} of {len(host.machine.gpus)} GPUs"
        fix = f"the driver must be new enough for CUDA {host.torch.cuda}, and CUDA_VISIBLE_DEVICES must not hide any"
        yield Finding(host.name, text, fix)


def _gpus(host: HostReport) -> Iterator[Finding]:
    if host.machine.gpu_error:
        text = f"the GPUs can't be read: {host.machine.gpu_error}"
        yield Finding(host.name, text, "repair the driver: nvidia-smi must work")
    names = sorted({gpu.name for gpu in host.machine.gpus})
    if len(names) > 1:
        text = f"its GPUs are of several kinds: {', '.join(names)}"
        yield Finding(host.name, text, "leave the odd ones out by CUDA_VISIBLE_DEVICES, or give them a node of `more`")
    for name in names:
        if kind_of_gpu(name) is None:
            fix = "set cluster.kind to the closest kind of device, and cluster.memory_gb"
            yield Finding(host.name, f"the GPU {name!r} is not in the table of devices", fix, fails=False)


def _limits(host: HostReport) -> Iterator[Finding]:
    limits, n_workers = host.limits, max(1, len(host.machine.gpus))
    needed = OWN_FILES + FILES_PER_WORKER * n_workers
    if _below(limits.open_files, needed):
        text = f"a process may open {limits.open_files} files, and {n_workers} workers need {needed} each"
        yield Finding(host.name, text, f"raise the hard limit: `ulimit -Hn {USUAL_FILES}` as root, or limits.conf")
    if _below(limits.processes, LEAST_PROCESSES):
        text = f"a user may have {limits.processes} processes and threads, and a worker has dozens"
        yield Finding(host.name, text, f"ulimit -u {LEAST_PROCESSES}, or nproc in limits.conf", fails=False)
    if host.infiniband and host.machine.gpus and limits.locked_bytes != UNLIMITED:
        text = f"a process may lock {limits.locked_bytes / 1e6:.0f} MB of memory, and InfiniBand wants more"
        yield Finding(host.name, text, "ulimit -l unlimited; for Slurm LimitMEMLOCK=infinity of slurmd's service")


def _memory(host: HostReport) -> Iterator[Finding]:
    total = host.machine.host_memory_bytes
    if host.available_bytes < LEAST_MEMORY_SHARE * total:
        text = f"{host.available_bytes / 1e9:.1f} of {total / 1e9:.1f} GB of memory are free"
        yield Finding(host.name, text, "end what else runs there: the plan counts on nearly all of it", fails=False)
    if host.machine.gpus and host.shm_free_bytes < LEAST_SHM_BYTES:
        text = f"/dev/shm has {host.shm_free_bytes / 1e6:.0f} MB free, and NCCL needs up to {LEAST_SHM_BYTES >> 30} GiB"
        yield Finding(host.name, text, "give the container more: --shm-size=16g, or --ipc=host")
    elif host.shm_bytes < SMALL_SHM_BYTES:
        text = f"/dev/shm has {host.shm_bytes / 1e6:.0f} MB: libraries of functions may want more"
        yield Finding(host.name, text, "give the container more: --shm-size=1g", fails=False)


def _disk(name: str, disk: Disk) -> Iterator[Finding]:
    if disk.error:
        yield Finding(
            name, f"nothing can be written to {disk.folder}: {disk.error}", "choose another folder: --dir DIR"
        )
        return
    if disk.free_bytes < SMALL_DISK_BYTES:
        text = f"{disk.folder} has {disk.free_bytes / 1e9:.1f} GB free; a checkpoint of a large model is larger"
        yield Finding(name, text, "make room, or choose another folder", fails=disk.free_bytes < LEAST_DISK_BYTES)
    if disk.write_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        text = f"{disk.folder} takes {disk.write_bytes_per_s / 1e6:.0f} MB/s: checkpoints will be slow"
        yield Finding(name, text, "choose a folder on a faster file system", fails=False)


def _network(name: str, network: Network) -> Iterator[Finding]:
    if network.error:
        text = f"nothing can listen on {network.address} and be reached there: {network.error}"
        yield Finding(name, text, "see that the interface is up and no firewall drops its own packets")
    if 0 < network.ports < LEAST_PORTS:
        text = f"the kernel has {network.ports} ports to give away, and each worker takes some"
        yield Finding(name, text, "sysctl net.ipv4.ip_local_port_range='32768 60999'", fails=False)


def together(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """All that is wrong with hosts as the hosts of one run. The first one's versions are what others are held to."""
    names, ids = Counter(host.name for host in hosts), Counter(host.id for host in hosts)
    for name, count in names.items():
        if count > 1 and len({host.id for host in hosts if host.name == name}) > 1:
            yield Finding(name, f"{count} hosts have this name", "give each its own: realgraph worker --name NAME")
    for id, count in ids.items():
        if count > 1:
            same = [host.name for host in hosts if host.id == id]
            text = f"{count} agents run on this one host"
            yield Finding(" = ".join(dict.fromkeys(same)), text, "start one agent on each host", fails=False)
    for host in hosts[1:]:
        for package in ALIKE:
            ours, theirs = hosts[0].versions.get(package), host.versions.get(package)
            if theirs and ours and not _alike(package, theirs, ours):
                text = f"it has {package} {theirs}, and {hosts[0].name} has {ours}"
                yield Finding(host.name, text, f"install {package} {ours} there: workers of one run must be alike")
        if sorted(gpu.name for gpu in host.machine.gpus) != sorted(gpu.name for gpu in hosts[0].machine.gpus):
            text = f"it has {gpus_text(host)}, and {hosts[0].name} has {gpus_text(hosts[0])}"
            yield Finding(host.name, text, "say so in the run file: cluster.more", fails=False)
    for host in hosts:
        if not host.shares_folder and not host.disk.error:
            text = f"it does not see {host.disk.folder} of the host of this command"
            yield Finding(host.name, text, "choose an outputs.dir on a file system that all hosts share", fails=False)
        if abs(host.clock_ahead_seconds) > CLOCK_SECONDS:
            ahead = "ahead of" if host.clock_ahead_seconds > 0 else "behind"
            text = f"its clock is {abs(host.clock_ahead_seconds):.1f} s {ahead} that of the host of this command"
            yield Finding(host.name, text, "let chrony or ntpd set it: times in logs do not agree", fails=False)


def between(pairs: Sequence[PairReport]) -> Iterator[Finding]:
    """All that is wrong between hosts: no way, or a slow one."""
    usual_of = {backend: _usual(pairs, backend) for backend in {pair.backend for pair in pairs}}
    for pair in pairs:
        usual = usual_of[pair.backend]
        where = f"{pair.first} - {pair.second}"
        least = min(pair.there_bytes_per_s, pair.back_bytes_per_s)
        if pair.error:
            fix = "let all ports of this network through between the hosts, or name another one by --interface"
            yield Finding(where, f"no {pair.backend} between them: {pair.error}", fix)
        elif least < SLOW_LINK_BYTES_PER_S:
            text = f"{pair.backend} moves {least / 1e9:.3g} GB/s, as over 1 Gbit/s: weights and gradients wait for it"
            yield Finding(where, text, "name a faster network by --interface", fails=False)
        elif least < UNEVEN_SHARE * usual:
            text = f"{pair.backend} moves {least / 1e9:.3g} GB/s, and {usual / 1e9:.3g} GB/s between most hosts"
            yield Finding(
                where, text, "look at cable, switch and driver of these hosts, or leave them out", fails=False
            )


def _usual(pairs: Sequence[PairReport], backend: str) -> float:
    """The median bytes a second of the pairs that work, each by its slower way; 0 where none does."""
    alike = [pair for pair in pairs if pair.backend == backend and not pair.error]
    speeds = sorted(min(pair.there_bytes_per_s, pair.back_bytes_per_s) for pair in alike)
    return speeds[len(speeds) // 2] if speeds else 0.0


def gpus_text(host: HostReport) -> str:
    """`8 x NVIDIA H100 80GB HBM3`, or `no GPU`."""
    counts = Counter(gpu.name for gpu in host.machine.gpus)
    return ", ".join(f"{n} x {name}" for name, n in sorted(counts.items())) or "no GPU"


def _alike(package: str, theirs: str, ours: str) -> bool:
    """True where workers with these versions may work in one run; of Python the last number does not matter."""
    if package == "python":
        return theirs.split(".")[:2] == ours.split(".")[:2]
    return theirs == ours


def _below(limit: int, number: int) -> bool:
    return limit != UNLIMITED and limit < number
