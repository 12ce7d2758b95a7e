"""What a worker holds besides models: its device, its store, its data plane, its place in the process groups."""

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import TCPStore

from realgraph.runtime.job import Job
from realgraph.runtime.launch import WorkerBoot
from realgraph.runtime.parallel import Collectives, Member, open_store, reach_store
from realgraph.runtime.protocol import Peer
from realgraph.runtime.store import Store
from realgraph.runtime.transfer import DataPlane

RENDEZVOUS_SECONDS = 180.0


class Resources:
    """One worker's. Made before the hand-shake, so that its addresses can be told to the others."""

    def __init__(self, boot: WorkerBoot) -> None:
        self.worker = boot.worker
        self.device = torch.device("cpu") if boot.cpu else pick_device(boot.worker)
        self.store = Store()
        self.plane = DataPlane(boot.worker, self.store, boot.keys, boot.interface)
        self.peer: Peer = self.plane.peer
        self._rendezvous: TCPStore | None = None
        self._collectives: Collectives | None = None
        self.collective_address = ""
        if boot.worker == 0:
            self._rendezvous, self.collective_address = open_store(boot.interface, boot.n_workers, RENDEZVOUS_SECONDS)

    def connect(self, peers: Sequence[Peer]) -> None:
        """From now on the peers' stores can be read, and they may read ours."""
        self.plane.connect(peers)

    def join(self, job: Job, address: str) -> Collectives:
        """Join the process groups of all meshes of the plan. Collective. Raises CollectiveError."""
        n_workers = job.cluster.n_devices
        seconds = job.runtime.min_deadline_seconds
        if self._rendezvous is None and n_workers > 1:
            self._rendezvous = reach_store(address, n_workers, seconds)
        meshes = {allocation.layout.mesh for allocation in job.plan.allocations.values()}
        member = Member(self.worker, n_workers, self.device, seconds)
        self._collectives = Collectives(member, self._rendezvous, meshes, one_host=job.cluster.nodes == 1)
        return self._collectives

    def close(self) -> None:
        """Stop serving, leave the groups, give the shared memory back."""
        self.plane.close()
        if self._collectives is not None:
            self._collectives.close()
        self.store.close()


def pick_device(worker: int) -> torch.device:
    """This worker's GPU where the host has any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
