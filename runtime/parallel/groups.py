"""Process groups of a run's workers, and the sums and shards made over them. Knows no loss and no optimizer.

Worker 0 opens a file that nobody else's processes can read; all workers join one default group through it and then make
the sub-group of every mesh in one order. CPU tensors travel by gloo over the loopback interface, GPU tensors by NCCL.
Once the groups stand, gloo's ports answer nobody. Every collective has a deadline.
"""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import DistError, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.runtime.parallel.ports import listening_sockets, refuse_connections
from realgraph.runtime.processes.environment import set_for_library

FLAT_BYTES = 1 << 28  # of one all-reduce: larger buffers go in pieces, so that a backend's copy stays small


class CollectiveError(RuntimeError):
    """A collective failed or missed its deadline: a rank of the group is gone or far behind."""


@dataclass(frozen=True)
class Member:
    """This worker among all of a run; timeout in seconds."""

    worker: int
    n_workers: int
    device: torch.device
    timeout_seconds: float


class Rendezvous:
    """Worker 0's file through which the workers of one host meet: nobody but this user can open it.

    On Linux it is anonymous memory, reached through /proc, so that nothing is left of it after any end; elsewhere a
    file in a folder of its own. `close` it once the groups have ended.
    """

    def __init__(self) -> None:
        self._folder = ""
        if sys.platform == "linux":
            self._file = os.memfd_create("realgraph-rendezvous", os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)
            self.address = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._folder = tempfile.mkdtemp(prefix="realgraph-")  # mode 0700
            self.address = os.path.join(self._folder, "rendezvous")
            self._file = os.open(self.address, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def close(self) -> None:
        """The file is gone; the address means nothing any more."""
        os.close(self._file)
        if self._folder:
            shutil.rmtree(self._folder)


def reach_store(address: str, n_workers: int, timeout_seconds: float) -> Store:
    """The store in the file of a Rendezvous. Raises CollectiveError where there is none, or it can't be opened."""
    if not os.path.exists(address):  # torch would make a file of its own
        raise CollectiveError(f"worker 0's rendezvous {address} is gone, and so is worker 0")
    try:
        store = FileStore(address, n_workers)
    except RuntimeError as error:
        raise CollectiveError(f"worker 0's rendezvous {address} can't be opened: {error}") from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


class Ranks:
    """The data-parallel ranks of one mesh, seen from one of them. One alone does nothing, and needs no group."""

    def __init__(self, device: torch.device, group: ProcessGroup | None = None, name: str = "one rank") -> None:
        self.device = device
        self.group = group
        self.name = name
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; a large flat tensor goes in pieces."""
        if self.group is not None:
            flat = tensor.view(-1)
            for piece in torch.split(flat, max(1, FLAT_BYTES // flat.element_size())):
                self._guard("all-reduce", partial(dist.all_reduce, piece, group=self.group))
        return tensor

    def collect(self, values: Tensor) -> Tensor:
        """[n] of every rank -> [ranks, n]; on the CPU."""
        if self.group is None:
            return values[None]
        rows = [torch.empty_like(values) for _ in range(self.size)]
        self._guard("all-gather", partial(dist.all_gather, rows, values, group=self.group))
        return torch.stack(rows)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.add(torch.zeros(1))

    def mesh(self) -> TorchMesh:
        """The ranks as torch's own one-dimensional mesh, for sharding."""
        if self.group is None:
            raise ValueError("a mesh of one rank shards nothing")
        return TorchMesh.from_group(self.group, self.device.type, mesh_dim_names=("dp",))

    def _guard(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo and NCCL raise RuntimeError and its subclasses
            raise CollectiveError(f"{what} over {self.name} failed: {error}") from error


class Collectives:
    """All process groups of one worker: the default one, and one for each mesh."""

    def __init__(self, member: Member, store: Store | None, meshes: Iterable[DeviceMesh], *, one_host: bool) -> None:
        """Collective: every worker passes the same `meshes` (any order). With one worker there is no store to need."""
        self.member = member
        self._groups: dict[DeviceMesh, Ranks] = {}
        if member.n_workers == 1:
            return
        assert store is not None, "more than one worker needs a store"
        if one_host:
            # Nobody outside may connect; and what the host's name resolves to is wrong or absent on many laptops.
            set_for_library("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")
        deadline = timedelta(seconds=member.timeout_seconds)
        open_before = listening_sockets()
        backend = "cpu:gloo,cuda:nccl" if member.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend, store=store, rank=member.worker, world_size=member.n_workers, timeout=deadline
            )
            for mesh in sorted(set(meshes)):
                self._open(mesh, backend, deadline)
        except DistError as error:
            raise CollectiveError(f"the {member.n_workers} workers could not form their group: {error}") from error
        refuse_connections(listening_sockets() - open_before)

    def _open(self, mesh: DeviceMesh, backend: str, deadline: timedelta) -> None:
        if mesh.n_devices == 1:
            return
        if mesh.n_devices == self.member.n_workers:
            group = dist.group.WORLD
        else:
            group = dist.new_group(list(mesh.devices), timeout=deadline, backend=backend)
        if self.member.worker in mesh.devices and isinstance(group, ProcessGroup):
            name = f"workers {mesh.first} to {mesh.first + mesh.n_devices - 1}"
            self._groups[mesh] = Ranks(self.member.device, group, name)

    def ranks(self, mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh that this worker belongs to. Raises KeyError for a mesh that was not announced."""
        if mesh.n_devices == 1:
            return Ranks(self.member.device)
        return self._groups[mesh]

    def close(self) -> None:
        """Leave all groups; not collective."""
        self._groups.clear()
        if self.member.n_workers > 1 and dist.is_initialized():
            dist.destroy_process_group()


def shard(model: nn.Module, layers: Iterable[nn.Module], ranks: Ranks, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Cut the parameters over the ranks by FSDP2, a group per layer and one for the rest.

    dtypes: of computation, and of the sharded parameters and the sums of gradients. Gradients are summed, not averaged:
    losses carry global denominators.
    """
    compute, master = dtypes
    policy = MixedPrecisionPolicy(param_dtype=None if compute == master else compute, reduce_dtype=master)
    mesh = ranks.mesh()
    for part in (*layers, model):
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
