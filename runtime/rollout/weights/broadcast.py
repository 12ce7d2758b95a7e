"""Broadcasts of new weights from a trainer to all ranks of all servers of a generate call: what both ends agree on, and
the trainer's end. The servers' end is SGLang's own, which their workers ask for (`serving.py`).

The process group is the trainer's: rank 0, with the store that the others meet at, on this host's loopback address
alone. Weights go in buckets, each one flat tensor of bytes, out of the folder in which the trainer has gathered them.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Backend, GroupName, ProcessGroup, _new_process_group_helper, _world

from realgraph.runtime.engine import WeightSpec
from realgraph.runtime.models.checkpoint_files import open_tensors
from realgraph.runtime.parallel.collectives.rendezvous import LOOPBACK
from realgraph.runtime.rollout.weights.agreement import BroadcastFailed, UpdateWords, WorkerGone
from realgraph.runtime.wire.ports import listening_sockets, refuse_connections

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOOPBACK_GLOO = "realgraph_loopback_gloo"
GROUP_SECONDS = 60.0  # for all to join a group, and for one bucket; a server that dies meanwhile holds nobody up longer
BUCKET_BYTES = 256 << 20  # of one broadcast, where a tensor is not larger
_LOOK_SECONDS = (0.0002, 0.005)  # between two looks whether a bucket has gone: the first, and the longest
# the words: of the trainer, and with the place of a server behind them, of its worker
STAGED, GROUP, READY, DONE = "staged", "group", "ready/", "done/"

BackendName = Literal["gloo", "nccl"]


class GroupAddress(Struct, frozen=True):
    """The group that an update goes by: members of an older one join it anew."""

    name: str
    port: int


class Servers(NamedTuple):
    """The servers of a call, each with so many ranks. workers: that head them, by the servers' places."""

    workers: tuple[int, ...]
    ranks: int

    def offset(self, place: int) -> int:
        """The rank of a server's first."""
        return 1 + place * self.ranks

    @property
    def world(self) -> int:
        """All ranks, with the trainer's."""
        return 1 + len(self.workers) * self.ranks


class Broadcast(NamedTuple):
    """One update as a server's worker takes part in it."""

    agreement: UpdateWords
    update: int
    servers: Servers
    place: int  # of the server among them
    backend: BackendName
    buckets: tuple[tuple[WeightSpec, ...], ...]


def buckets_of(specs: Sequence[WeightSpec], nbytes: int = BUCKET_BYTES) -> tuple[tuple[WeightSpec, ...], ...]:
    """The weights in buckets of at most `nbytes`, a larger tensor alone; alike wherever they are asked for."""
    buckets, room = list[list[WeightSpec]](), 0
    for spec in specs:
        size = spec.dtype.itemsize * torch.Size(spec.shape).numel()
        if not buckets or size > room:
            buckets.append([])
            room = nbytes
        buckets[-1].append(spec)
        room -= size
    return tuple(map(tuple, buckets))


def decode_group(text: str) -> GroupAddress:
    """The word GROUP."""
    return msgspec.json.decode(text, type=GroupAddress)


class Broadcaster:
    """The trainer's end of one call's broadcasts. A server that fails, or whose worker ends, does not hold it up: it
    leaves the group, and the next update has another one."""

    def __init__(self, agreement: UpdateWords, call: str, servers: Servers, device: torch.device) -> None:
        self._agreement, self._call, self._servers, self._device = agreement, call, servers, device
        self._group: ProcessGroup | None = None
        self._name, self._n_groups = "", 0

    def send(self, update: int, folder: Path, specs: Sequence[WeightSpec]) -> None:
        """Send the weights of a folder. Where it fails, servers get them out of that folder, and the log says so."""
        words = self._agreement
        try:
            words.post(update, STAGED, str(folder))
            self._meet(update)
            for flat in self._flat(folder / "model.safetensors", specs):
                self._broadcast(update, flat)
        except (BroadcastFailed, RuntimeError) as error:  # gloo and NCCL raise RuntimeError
            words.fail(update, f"the trainer: {error}")
            self._leave()
            log.warning("servers of %r read their weights from %s: no broadcast: %s", self._call, folder, error)

    def await_done(self, update: int) -> None:
        """Wait for all servers that there are to have the weights of an update, by whichever way. Raises
        BroadcastFailed."""
        for place, worker in enumerate(self._servers.workers):
            with contextlib.suppress(WorkerGone):
                self._agreement.hear(update, f"{DONE}{place}", worker, whatever_fails=True)

    def _meet(self, update: int) -> None:
        """All servers are paused and wait for the weights, members of one group."""
        words = self._agreement
        names = {words.hear(update, f"{READY}{place}", worker) for place, worker in enumerate(self._servers.workers)}
        if self._group is not None and names == {self._name}:
            words.post(update, GROUP, msgspec.json.encode(GroupAddress(self._name, 0)).decode())
            return
        self._leave()
        self._n_groups += 1
        self._name = f"realgraph-{self._call}-{self._n_groups}"
        wait, before = timedelta(seconds=GROUP_SECONDS), listening_sockets()
        with socket.create_server((HOST, 0)) as listener:  # the port is ours from its choice on
            port = listener.getsockname()[1]
            store = TCPStore(
                HOST, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
            )
        words.post(update, GROUP, msgspec.json.encode(GroupAddress(self._name, port)).decode())
        ranks = (0, self._servers.world)
        self._group = open_group(PrefixStore(self._name, store), self._name, ranks, self._backend, wait)
        refuse_connections(listening_sockets() - before)

    @property
    def _backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else register_loopback_gloo()

    def _flat(self, file: Path, specs: Sequence[WeightSpec]) -> Iterator[Tensor]:
        """[bytes] uint8 on the device: the buckets, tensor behind tensor."""
        source = open_tensors(file)
        for bucket in buckets_of(specs):
            parts = [source.get_tensor(spec.name).contiguous().flatten().view(torch.uint8) for spec in bucket]
            yield torch.cat(parts).to(self._device)

    def _broadcast(self, update: int, flat: Tensor) -> None:
        """Raises BroadcastFailed, RuntimeError."""
        assert self._group is not None
        work = dist.broadcast(flat, group_src=0, group=self._group, async_op=True)
        assert work is not None, "the trainer is a member"
        began, (pause, longest) = time.monotonic(), _LOOK_SECONDS
        while not work.is_completed():
            if (why := self._agreement.failure(update)) is not None:
                raise BroadcastFailed(why)
            self._agreement.check_there(self._servers.workers)
            if time.monotonic() - began > GROUP_SECONDS:
                raise BroadcastFailed(f"a bucket of {flat.nbytes} bytes has not gone in {GROUP_SECONDS:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()

    def _leave(self) -> None:
        """Give the group up; what is still on its way in it ends by itself, with its peers or at its deadline."""
        if self._group is not None:
            threading.Thread(target=_end, args=(self._group,), name="leave", daemon=True).start()
            self._group = None


def open_group(store: Store, name: str, rank: tuple[int, int], backend: str, wait: timedelta) -> ProcessGroup:
    """A process group beside any other of this process, as SGLang opens its end. rank: ours, and how many there are.

    Returns when all have joined. Raises RuntimeError where they have not in time.
    """
    group, _ = _new_process_group_helper(
        rank[1], rank[0], [], Backend(backend), store, group_name=GroupName(name), timeout=wait
    )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {i: i for i in range(rank[1])}
    return group


def register_loopback_gloo() -> str:
    """The name of a backend that is gloo with a port of its own on the loopback address for each group: that which the
    groups of a run's workers have (`register_gloo`) answers nobody any more."""
    gloo: Any = ProcessGroupGloo

    def open_one(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [gloo.create_device(interface=LOOPBACK)], 1, timeout
        return ProcessGroupGloo(store, rank, size, options)

    if LOOPBACK_GLOO not in Backend.backend_list:
        Backend.register_backend(LOOPBACK_GLOO, open_one, devices=["cpu"])
    return LOOPBACK_GLOO


def _end(group: ProcessGroup) -> None:
    group.abort()
    dist.destroy_process_group(group)
