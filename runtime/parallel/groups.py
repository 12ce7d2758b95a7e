"""Process groups of a run's workers, and the collectives made over them. Knows no loss and no optimizer.

All workers join one default group through the store that worker 0 opens (`Rendezvous`); those of an engine that stands
for a lost one have a default group by themselves. The groups of every layout
(its whole mesh, and each axis) are counted by all in one order, and made by their members alone. CPU tensors travel
through shared memory inside a host and by gloo between hosts, GPU tensors by NCCL. Once the groups stand, gloo's ports
answer nobody. Every collective has a deadline.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistError, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from realgraph.planner.plan.axes import (
    MeshAxis,
    expert_copies,
    expert_groups,
    groups_of,
    session_groups,
    session_layout,
)
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError, register_gloo
from realgraph.runtime.parallel.collectives.roll_call import Attendance, RollCall, key_of
from realgraph.runtime.parallel.collectives.shared_memory import SharedMemory, open_shared_memory
from realgraph.runtime.wire.curve import LOOPBACK
from realgraph.runtime.wire.ports import listening_sockets, refuse_connections

T = TypeVar("T")

FLAT_BYTES = 1 << 28  # of one all-reduce: larger buffers go in pieces, so that a backend's copy stays small
# the groups of engines: along an axis, and of all that hold the same part of the weights and sum their gradients
_AXES: tuple[tuple[MeshAxis, ...], ...] = (("dp",), ("cp",), ("tp",), ("pp",), ("cp", "dp"))
_LAYOUT, _SESSION = "layout/", "session/"  # purposes of groups, before the call that has them to itself
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames both
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Member:
    """This worker among all of a run; timeout in seconds. hosts: of every worker; those of one can read each other's
    memory. (): all are on one. interface: this host's address for the others. apart: workers whose hosts do not see the
    run directory."""

    worker: int
    n_workers: int
    device: torch.device
    timeout_seconds: float
    hosts: tuple[str, ...] = ()
    interface: str = LOOPBACK
    apart: frozenset[int] = frozenset()
    engine: tuple[int, ...] = ()  # of one that stands for a lost engine: its workers, the only ones of its groups
    opener: int = 0  # the worker in whose store they meet

    @property
    def host(self) -> str:
        """This worker's."""
        return self.hosts[self.worker] if self.hosts else ""

    @property
    def grouped(self) -> tuple[int, ...]:
        """The workers that form groups with this one, by their rank in the default group."""
        return self.engine or tuple(range(self.n_workers))


class Ranks:
    """The workers of one group, seen from one of them: of a mesh, or along one axis of a layout. One alone does
    nothing, and needs no group. Tensors on the CPU travel through the memory that workers of one host share."""

    def __init__(
        self,
        device: torch.device,
        group: ProcessGroup | None = None,
        name: str = "one rank",
        memory: SharedMemory | None = None,
        roll: RollCall | None = None,
    ) -> None:
        """roll: tells who is missing where a collective fails."""
        self.device = device
        self.group = group
        self.name = name
        self.memory = memory
        self._roll = roll
        self.rank = memory.rank if memory is not None else 0 if group is None else dist.get_rank(group)
        self.size = memory.size if memory is not None else 1 if group is None else dist.get_world_size(group)

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; a large flat tensor goes in pieces."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of every rank's, entry by entry, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return tensor
        flat = tensor.view(-1)
        if (memory := self._memory_for(flat)) is not None:
            largest = operation == dist.ReduceOp.MAX
            self._guard("all-reduce", lambda: memory.reduce(flat, largest=largest))
            return tensor
        for piece in torch.split(flat, max(1, FLAT_BYTES // flat.element_size())):
            self._guard("all-reduce", partial(dist.all_reduce, piece, op=operation, group=self.group))
        return tensor

    def collect(self, values: Tensor) -> Tensor:
        """[...] of every rank -> [ranks, ...]; on the CPU."""
        return self.begin_collect(values)()

    def begin_collect(self, values: Tensor) -> Callable[[], Tensor]:
        """`collect` in two halves: the call of what comes back waits for the others."""
        if self.size == 1:
            return lambda: values[None]
        if (memory := self._memory_for(values)) is not None:
            begun, shape = memory.begin_gather(values.reshape(-1)), (memory.size, *values.shape)
            return lambda: self._guard("all-gather", begun).view(shape)
        rows = [torch.empty_like(values) for _ in range(self.size)]
        began = time.monotonic()
        gather = partial(dist.all_gather, rows, values, group=self.group, async_op=True)
        work = self._guard("all-gather", gather)

        def rows_of_all() -> Tensor:
            if work is not None:
                self._guard("all-gather", work.wait, began)
            return torch.stack(rows)

        return rows_of_all

    def gather_rows(self, own: Tensor) -> Tensor:
        """[n, ...] of every rank -> [ranks x n, ...], in the order of the ranks."""
        if self.size == 1:
            return own
        own = own.contiguous()
        rows = own.new_empty((self.size * own.shape[0], *own.shape[1:]))
        if (memory := self._memory_for(own)) is not None:
            self._guard("all-gather", lambda: memory.gather(own.view(-1), rows.view(memory.size, -1)))
        else:
            self._guard("all-gather", partial(_ALL_GATHER, rows, own, group=self.group))
        return rows

    def scatter_rows(self, rows: Tensor) -> Tensor:
        """[ranks x n, ...] of every rank -> [n, ...]: this rank's rows of their sum."""
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        own = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        if (memory := self._memory_for(own)) is not None:
            self._guard("reduce-scatter", lambda: memory.scatter(rows.view(memory.size, -1), own.view(-1)))
        else:
            self._guard("reduce-scatter", partial(_REDUCE_SCATTER, own, rows, group=self.group))
        return own

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source` on every rank, in place."""
        if self.size == 1:
            return tensor
        if (memory := self._memory_for(tensor)) is not None:
            self._guard("broadcast", lambda: memory.broadcast(tensor.view(-1), source))
        else:
            self._guard("broadcast", partial(dist.broadcast, tensor, group=self.group, group_src=source))
        return tensor

    def swap(self, own: Tensor, peer: int) -> Tensor:
        """The tensor of rank `peer`, which calls this alike with one of this shape and gets this rank's."""
        other = torch.empty_like(own)
        if peer == self.rank:
            return other.copy_(own)
        both = [dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)]
        both.append(dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer))
        self._guard("exchange", lambda: [work.wait() for work in dist.batch_isend_irecv(both)])
        return other

    def exchange_rows(self, rows: Tensor, out: Sequence[int], into: Sequence[int]) -> Tensor:
        """[sum of out, ...] -> [sum of into, ...]: the first `out[0]` rows go to rank 0, and so on; `into[r]` rows come
        from rank r, in the order of the ranks. out and into may be 0 here and there."""
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        came = rows.new_empty((sum(into), *rows.shape[1:]))
        if (memory := self._memory_for(rows)) is not None:
            width = math.prod(rows.shape[1:])
            counts = [n * width for n in out], [n * width for n in into]
            self._guard("all-to-all", lambda: memory.exchange(rows.view(-1), came.view(-1), *counts))
        else:
            call = partial(dist.all_to_all_single, came, rows, list(into), list(out), group=self.group)
            self._guard("all-to-all", call)
        return came

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.add(torch.zeros(1))

    def mesh(self) -> TorchMesh:
        """The ranks as torch's own one-dimensional mesh, for sharding."""
        if self.group is None:
            raise ValueError("a mesh of one rank shards nothing")
        return TorchMesh.from_group(self.group, self.device.type, mesh_dim_names=("dp",))

    def _memory_for(self, tensor: Tensor) -> SharedMemory | None:
        return self.memory if tensor.device.type == "cpu" else None

    def _guard(self, what: str, call: Callable[[], T], began: float | None = None) -> T:
        """Raises CollectiveError, with the workers that are missing where that is known."""
        began = time.monotonic() if began is None else began
        try:
            return call()
        except CollectiveError as error:  # of shared memory, which names them
            raise CollectiveError(f"{what} over {self.name} failed: {error}") from error
        except RuntimeError as error:  # gloo and NCCL raise RuntimeError and its subclasses
            missing = self._roll.missing(what, time.monotonic() - began) if self._roll is not None else ""
            raise CollectiveError(f"{what} over {self.name} failed: {missing}{'; ' * bool(missing)}{error}") from error


@dataclass(frozen=True)
class LayoutRanks:
    """The workers of one layout, seen from one of them: all of the mesh, those along each axis, and `copies`, the dp x
    cp workers with the same part of the weights, who sum gradients and shard by FSDP."""

    layout: Layout
    mesh: Ranks
    dp: Ranks
    cp: Ranks
    tp: Ranks
    pp: Ranks  # the stages
    copies: Ranks
    ep: Ranks  # over which whole experts are spread
    expert_copies: Ranks  # of one stage that hold the same experts, where they are spread
    session: Ranks  # those of `axes.session_groups`, for messages between threads that generate
    apart: frozenset[int] = frozenset()  # workers, of all, whose hosts do not see the run directory

    @classmethod
    def alone(cls, device: torch.device) -> "LayoutRanks":
        """One worker without peers."""
        one = Ranks(device)
        layout = Layout(DeviceMesh(0, 1))
        return cls(layout, one, one, one, one, one, one, one, one, Ranks(torch.device("cpu")))

    @property
    def device(self) -> torch.device:
        """This worker's."""
        return self.mesh.device

    @property
    def leads(self) -> bool:
        """True on the one worker that speaks for the whole mesh."""
        return self.heads and self.dp.rank == 0

    @property
    def heads(self) -> bool:
        """True on the head worker of a data-parallel rank (`axes.head_worker`), which speaks for it: of the last stage,
        where outputs and losses are, those with another part of the tokens or the layers know the same."""
        return self.tp.rank == self.cp.rank == 0 and self.pp.rank == self.pp.size - 1


class Collectives:
    """All process groups of one worker: the default one, and for each layout that of its mesh and of its axes."""

    def __init__(
        self,
        member: Member,
        store: Store | None,
        layouts: Iterable[Layout],
        beside: Mapping[str, Layout] = MappingProxyType({}),
    ) -> None:
        """Collective: every worker passes the same layouts. beside: of calls that run while others do, which get groups
        of their own: two threads on one would take each other's messages. One worker alone needs no store."""
        self.member, self._store = member, store
        self._rank = member.grouped.index(member.worker)  # in the default group
        self._beside = frozenset(beside)
        self._groups: dict[tuple[str, tuple[int, ...]], Ranks] = {}  # by purpose, and ranks in the default group
        n_grouped = len(member.grouped)
        if n_grouped == 1:
            return
        assert store is not None, "more than one worker needs a store"
        deadline = timedelta(seconds=member.timeout_seconds)
        open_before = listening_sockets()
        everybody = tuple(range(n_grouped))
        on_host = [*filter(self._is_near, everybody)]
        self._attendance = Attendance(store, member.grouped, self._rank, on_host, member.opener)
        self._attendance.arrive(everybody)
        try:
            gloo = register_gloo(member.interface)
            backend = f"cpu:{gloo},cuda:nccl" if member.device.type == "cuda" else gloo
            dist.init_process_group(backend, store=store, rank=self._rank, world_size=n_grouped, timeout=deadline)
        except RuntimeError as error:
            raise self._attendance.unformed(everybody, error) from error
        self._attendance.watch()
        for call, its in (("", layouts), *((call, [layout]) for call, layout in beside.items())):
            own = [layout for layout in its if not member.engine or member.worker in layout.mesh.devices]
            near = {self._grouped(layout) for layout in own}
            for ranks in sorted(_groups_of(near)):
                self._open(ranks, _LAYOUT + call, backend, deadline)
            for ranks in sorted({w for layout in near for w in session_groups(layout) if len(w) > 1}):
                self._open(ranks, _SESSION + call, gloo, deadline)
        refuse_connections(listening_sockets() - open_before)

    def _grouped(self, layout: Layout) -> Layout:
        """A layout of this worker's by ranks in the default group: of an engine that stands for a lost one, its own."""
        return session_layout(layout) if self.member.engine else layout

    def _open(self, ranks: tuple[int, ...], purpose: str, backend: str, deadline: timedelta) -> None:
        """Make one group, or count one of others: torch names groups by how many it was told of (its
        `use_local_synchronization` by how many it has made, which differs between the members)."""
        is_member = self._rank in ranks
        if len(ranks) == len(self.member.grouped) and purpose == _LAYOUT:
            group: Any = dist.group.WORLD
        else:
            if is_member:
                self._attendance.arrive(ranks)
            try:
                group = dist.new_group(list(ranks), timeout=deadline, backend=backend)
            except DistError as error:
                raise self._attendance.unformed(ranks, error) from error
        if is_member:
            self._groups[purpose, ranks] = self._made(group, ranks, purpose)

    def _made(self, group: object, ranks: tuple[int, ...], purpose: str) -> Ranks:
        """The workers of a new group, with the memory that they share where all are on this host."""
        assert isinstance(group, ProcessGroup)
        seconds = self.member.timeout_seconds
        roll = RollCall(self._attendance, ranks, purpose, seconds)
        memory = None
        if all(self._is_near(rank) for rank in ranks):
            key = f"{purpose}/{key_of(ranks)}"
            memory = open_shared_memory(self.store, ranks, self._rank, timedelta(seconds=seconds), key)
        device = torch.device("cpu") if purpose.startswith(_SESSION) else self.member.device
        return Ranks(device, group, self._attendance.named(ranks), memory, roll)

    def _is_near(self, rank: int) -> bool:
        """True of the workers on this one's host, by their rank in the default group."""
        return not self.member.hosts or self.member.hosts[self.member.grouped[rank]] == self.member.host

    @property
    def store(self) -> Store:
        """That through which all workers have met, for words between them."""
        assert self._store is not None, "one worker alone has nobody to talk to"
        return self._store

    def ranks(self, mesh: DeviceMesh) -> Ranks:
        """The workers of a mesh that this one belongs to. Raises KeyError for a mesh that was not announced."""
        return self._of(tuple(mesh.devices), _LAYOUT)

    def of_layout(self, layout: Layout, call: str = "") -> LayoutRanks:
        """A layout's workers along every axis, in the groups of `call` where it has its own. Raises KeyError for one
        that was not announced, or lies elsewhere."""
        if self.member.worker not in layout.mesh.devices:
            raise KeyError(layout)
        layout, call = self._grouped(layout), call if call in self._beside else ""
        mesh = self._of(tuple(layout.mesh.devices), _LAYOUT + call)
        dp, cp, tp, pp, *others = (self._of(self._own(groups), _LAYOUT + call) for groups in _axis_groups(layout))
        copies, ep, expert_copies = others
        session = self._groups.get((_SESSION + call, self._own(session_groups(layout))), Ranks(torch.device("cpu")))
        return LayoutRanks(layout, mesh, dp, cp, tp, pp, copies, ep, expert_copies, session, self.member.apart)

    def _own(self, groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """The one of the groups that this worker is in."""
        return next(group for group in groups if self._rank in group)

    def _of(self, ranks: tuple[int, ...], purpose: str) -> Ranks:
        return Ranks(self.member.device) if len(ranks) == 1 else self._groups[purpose, ranks]

    def close(self) -> None:
        """Leave all groups; not collective."""
        for ranks in self._groups.values():
            if ranks.memory is not None:
                ranks.memory.close()
        if len(self.member.grouped) > 1:
            self._attendance.close()
        self._groups.clear()
        if len(self.member.grouped) > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _groups_of(layouts: Iterable[Layout]) -> set[tuple[int, ...]]:
    """Every group of at least two workers that these layouts need."""
    keys = set()
    for layout in layouts:
        keys.add(tuple(layout.mesh.devices))
        for groups in _axis_groups(layout):
            keys.update(groups)
    return {workers for workers in keys if len(workers) > 1}


def _axis_groups(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The groups of each kind, in the order of the fields of `LayoutRanks` behind its mesh."""
    along = tuple(groups_of(layout, *axes) for axes in _AXES)
    return (*along, expert_groups(layout), expert_copies(layout))
