"""Everything that a check of machines finds out: of one host, of a pair of hosts, and what is wrong. Plain data."""

from msgspec import Struct

from realgraph.planner.inputs.detect import Probe

UNLIMITED = -1


class ProcessLimits(Struct, frozen=True):
    """The most that the system lets one process have, or UNLIMITED. open_files: the hard limit, to which a run raises
    the soft one by itself."""

    open_files: int
    processes: int
    locked_bytes: int


class Disk(Struct, frozen=True):
    """The file system of a folder. error: why nothing could be written there."""

    folder: str
    total_bytes: int = 0
    free_bytes: int = 0
    write_bytes_per_s: float = 0.0
    error: str = ""


class Network(Struct, frozen=True):
    """The address that a host listens on. error: why it can't, or does not answer there."""

    address: str
    interface: str = ""  # its name
    ports: int = 0  # that the kernel gives away, of which a run takes some
    error: str = ""


class TorchFacts(Struct, frozen=True):
    """torch as a worker has it. cuda, nccl: the versions it is built with; '' for a CPU build. n_gpus: that it can
    use."""

    cuda: str = ""
    nccl: str = ""
    n_gpus: int = 0


class HostReport(Struct, frozen=True):
    """One host. versions: of Python and packages, by name; missing ones are left out. torch: None where no worker could
    be started."""

    name: str
    id: str  # of its boot and network namespace
    network: Network
    machine: Probe
    available_bytes: int  # memory that nothing uses now
    shm_bytes: int  # of /dev/shm
    shm_free_bytes: int
    limits: ProcessLimits
    disk: Disk
    versions: dict[str, str]
    infiniband: bool = False
    torch: TorchFacts | None = None
    shares_folder: bool = True  # it sees a file that was written there on the host of the command
    clock_ahead_seconds: float = 0.0  # of the clock of the host of the command


class PairReport(Struct, frozen=True):
    """Two workers that have sent to each other. there: from `first` to `second`. error: why they could not."""

    first: str
    second: str
    backend: str  # gloo, nccl
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    latency_seconds: float = 0.0  # one way
    error: str = ""


class Finding(Struct, frozen=True):
    """Something to fix. fails: a run would be refused or fail; else it would be slow, or may fail later."""

    where: str  # the host, or the pair
    text: str
    fix: str
    fails: bool = True


class DoctorReport(Struct, frozen=True):
    """The whole check."""

    hosts: tuple[HostReport, ...]
    pairs: tuple[PairReport, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True where nothing would make a run fail."""
        return not any(finding.fails for finding in self.findings)
