"""The stand-in's side of weights that a trainer broadcasts: groups over a TCP store of the trainer's."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
)
from torch.distributed.rendezvous import rendezvous

JOIN_SECONDS = 60.0


def open_group(address: str, rank: int, world: int, name: str, backend: str = "gloo") -> ProcessGroup:
    """A process group beside any other of the process; all of its ranks call it. address: of the store, host:port."""
    wait = timedelta(seconds=JOIN_SECONDS)
    store, rank, world = next(rendezvous(f"tcp://{address}", rank, world, timeout=wait))
    store.set_timeout(wait)
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=wait
    )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


class Broadcasts:
    """The groups of one server, and the tensors that come by them into its network, under their Hugging Face names."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._groups = network, dict[str, ProcessGroup]()

    def join(self, body: dict[str, Any]) -> None:
        """/init_weights_update_group: returns when all are there."""
        name = body.get("group_name", "weight_update_group")
        address = f"{body['master_address']}:{body['master_port']}"
        self._groups[name] = open_group(address, body["rank_offset"], body["world_size"], name, body["backend"])

    def leave(self, name: str) -> bool:
        group = self._groups.pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)
        return group is not None

    @torch.no_grad()
    def receive(self, body: dict[str, Any]) -> None:
        """/update_weights_from_distributed: while the trainer broadcasts. Raises KeyError, ValueError."""
        own = dict(self._network.named_parameters())
        group = self._groups[body.get("group_name", "weight_update_group")]
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        if body.get("load_format") == "flattened_bucket":
            flat = torch.empty(sum(one.nbytes for one in tensors), dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=group)
            tensors = self._cut(flat, tensors)
        else:
            for one in tensors:
                dist.broadcast(one, src=0, group=group)
        for name, values in zip(body["names"], tensors, strict=True):
            if own[name].shape != values.shape:
                raise ValueError(f"{name} is {tuple(values.shape)}, not {tuple(own[name].shape)}")
            own[name].copy_(values)

    @staticmethod
    def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
        """The tensors that lie one behind the other. Raises RuntimeError where one is not aligned to its elements."""
        parts = torch.split(flat, [one.nbytes for one in like])
        return [part.view(one.dtype).view(one.shape) for part, one in zip(parts, like, strict=True)]
