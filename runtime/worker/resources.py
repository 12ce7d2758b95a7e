"""The resources of a worker besides models: its device, its store, its data plane, its place in the process groups."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from realgraph.runtime.drawn.kept import KeptTokens
from realgraph.runtime.drawn.sharing import GIVE_SECONDS
from realgraph.runtime.files.client import FileClient
from realgraph.runtime.files.paths import RemotePath, RunPath
from realgraph.runtime.job.engine_loss import meeting_worker
from realgraph.runtime.job.job import Job
from realgraph.runtime.parallel.collectives.rendezvous import open_rendezvous, reach_store
from realgraph.runtime.parallel.groups import Collectives, Member
from realgraph.runtime.processes.environment import set_for_library
from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.processes.launcher import WorkerBoot
from realgraph.runtime.store.bundle import TransferError
from realgraph.runtime.store.mail import Mail
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest, Values
from realgraph.runtime.weights.handover import WeightHandover
from realgraph.runtime.wire.curve import is_local
from realgraph.runtime.wire.interfaces import interface_of_address
from realgraph.runtime.wire.protocol import Peer

# Of a collective or a gather that nobody ends. The master's deadlines end them long before: it knows what a call may
# take, and whether its processes were stopped meanwhile (Ctrl-Z), which a worker's own clock can't tell.
ABANDONED_SECONDS = 86_400.0
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux


class DeviceMemory:
    """The most bytes that a worker's device has held since `begin`.

    On a GPU those of torch's tensors. On a CPU what the process's resident set has grown by, at its peak, since the
    worker began, before which there are an interpreter and its libraries: as the kernel counts it, so memory that the
    allocator keeps for later and pages of other processes' weights that were read are part of it. Pages of files are
    not, which are code of libraries that ran for the first time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _bytes_without_files("VmRSS") if _reset_peak() else None
        self._most = 0

    def begin(self) -> None:
        """Count anew from what is there now."""
        self._most = max(self._most, self.peak() or 0)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._before is not None:
            _reset_peak()

    def peak(self) -> int | None:
        """Bytes; None on systems that don't tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return None if self._before is None else max(0, _bytes_without_files("VmHWM") - self._before)

    def most(self) -> int:
        """The most since the worker began."""
        return max(self._most, self.peak() or 0)


def _reset_peak() -> bool:
    """Count the process's peak from what is resident now. False on systems that don't."""
    try:
        PEAK_RESET.write_text("5")  # proc(5): VmHWM
    except OSError:
        return False
    return True


def _bytes_without_files(field: str) -> int:
    """A field of this process's status less the pages of files that it has now, in bytes."""
    fields = {words[0]: words[1] for line in STATUS.read_text().splitlines() if len(words := line.split()) > 1}
    return 1024 * (int(fields[f"{field}:"]) - int(fields.get("RssFile:", 0)))


class Resources:
    """One worker's. Made before the hand-shake, so that its addresses can be told to the others."""

    def __init__(self, boot: WorkerBoot) -> None:
        self.worker, self._interface = boot.worker, boot.interface
        self.device = torch.device("cpu") if boot.cpu else pick_device(boot.worker)
        if self.device.type == "cuda" and not is_local(boot.interface):
            set_for_library("NCCL_SOCKET_IFNAME", f"={interface_of_address(boot.interface)}")  # it would take any
        self.memory = DeviceMemory(self.device)
        self.store = Store()
        self.kept = KeptTokens()
        place = f"{host_id()}/{boot.node}"
        self.mail = Mail(boot.worker, self.deposit, boot.process)
        self.plane = DataPlane(boot.worker, self.store, boot.keys, boot.interface, place, self._deposited)
        self.handover = WeightHandover(self.store, self._views, self.mail)
        self.peer: Peer = msgspec.structs.replace(self.plane.peer, apart=bool(boot.files))
        self._files = FileClient(boot.files, boot.files_key, boot.keys) if boot.files else None
        self._hosts: tuple[str, ...] = ()
        self._apart: frozenset[int] = frozenset()
        self._collectives: Collectives | None = None
        self._rendezvous = open_rendezvous(boot.interface) if boot.rendezvous else None
        self.collective_address = self._rendezvous.address if self._rendezvous is not None else ""

    def _deposited(self, data: bytes) -> None:
        """Another worker has had this one take bytes."""
        if Mail.is_letter(data):
            self.mail.take(data)
        else:
            self.kept.take(data)

    def _views(self, wants: Sequence[GatherRequest]) -> Values:
        return self.plane.gather_now(wants, deadline_seconds=ABANDONED_SECONDS, copy=False)

    def meet(self, peer: Peer, process: int) -> None:
        """A new process stands for a worker that was lost. process: its number there, from 1."""
        self.mail.join(peer.worker, process)
        self.plane.join(peer)

    def deposit(self, worker: int, data: bytes) -> str:
        """Have another worker take bytes. Returns why that has failed, '' where it has not."""
        try:
            self.plane.deposit(worker, data, GIVE_SECONDS)
        except TransferError as error:
            return str(error)
        return ""

    def run_path(self, text: str) -> RunPath:
        """A path of the run directory, as the master names it."""
        return Path(text) if self._files is None else RemotePath(self._files, text)

    def connect(self, peers: Sequence[Peer]) -> None:
        """From now on the peers' stores can be read, and they may read ours."""
        self.plane.connect(peers)
        self._hosts = tuple(peer.host for peer in sorted(peers, key=lambda peer: peer.worker))
        self._apart = frozenset(peer.worker for peer in peers if peer.apart)

    def join(self, job: Job, address: str, engine: tuple[int, ...] = ()) -> Collectives:
        """Join the process groups of all layouts of the plan; of an `engine` that stands for a lost one, those of its
        workers. Collective over them. Raises CollectiveError."""
        n_workers = job.cluster.n_devices
        n_meeting = len(engine) or n_workers
        store = reach_store(address, n_meeting, job.runtime.start_seconds) if n_meeting > 1 else None
        layouts = {name: allocation.layout for name, allocation in job.plan.allocations.items()}
        beside = {name: layouts[name] for name in job.graph.generates[1:]}  # the first one generates beside these
        near = (self._hosts, self._interface, self._apart)
        opener = min(engine) if engine else meeting_worker(job.graph, job.plan, n_workers)
        member = Member(self.worker, n_workers, self.device, ABANDONED_SECONDS, *near, engine, opener)
        self._collectives = Collectives(member, store, set(layouts.values()), beside)
        return self._collectives

    def close(self) -> None:
        """Stop serving, leave the groups, give the shared memory back."""
        self.mail.close()
        self.plane.close()
        if self._collectives is not None:
            self._collectives.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self.store.close()
        if self._files is not None:
            self._files.close()


def pick_device(worker: int) -> torch.device:
    """This worker's GPU where the host has any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
