"""The trainer's side of a weight broadcast to an SGLang server: rank 0 of a gloo group of its own."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
)
from torch.distributed.rendezvous import rendezvous

from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.messages import BroadcastBucket, BroadcastGroup

GROUP = "realgraph-weights"
SECONDS = timedelta(seconds=60)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def open_group(address: str, world: int) -> ProcessGroup:
    """Rank 0, which hosts the store at host:port. Returns when all have joined."""
    store, rank, world = next(rendezvous(f"tcp://{address}", 0, world, timeout=SECONDS))
    store.set_timeout(SECONDS)
    group, _ = _new_process_group_helper(
        world, rank, [], Backend("gloo"), PrefixStore(GROUP, store), group_name=GroupName(GROUP), timeout=SECONDS
    )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


class Trainer:
    """Sends the weights of a network."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @staticmethod
    @asynccontextmanager
    async def joined(client: SglangClient, tp: int) -> AsyncIterator["Trainer"]:
        """A group with the server's ranks, which leave it at the end."""
        port = free_port()
        server = BroadcastGroup("127.0.0.1", port, 1, 1 + tp, GROUP, "gloo")
        joining = asyncio.create_task(client.init_group(server))
        group = await asyncio.to_thread(open_group, f"127.0.0.1:{port}", 1 + tp)
        await joining
        try:
            yield Trainer(group)
        finally:
            await client.destroy_group(GROUP)
            dist.destroy_process_group(group)

    def bucket(self, network: Any) -> BroadcastBucket:
        """All weights in one."""
        weights = dict(network.named_parameters())
        return BroadcastBucket(
            tuple(weights),
            tuple(str(weight.dtype).removeprefix("torch.") for weight in weights.values()),
            tuple(tuple(weight.shape) for weight in weights.values()),
            GROUP,
        )

    async def send(self, client: SglangClient, network: Any, version: int) -> None:
        """In the order that servers of 0.5.21 and later want; the engine is paused."""
        announced = await client.begin_update()
        call = asyncio.create_task(client.update_from_distributed(self.bucket(network), version))
        await asyncio.to_thread(self._broadcast, network)
        await call
        if announced:
            await client.end_update()

    @torch.no_grad()
    def _broadcast(self, network: Any) -> None:
        flat = torch.cat([weight.contiguous().flatten().view(torch.uint8) for weight in network.parameters()])
        dist.broadcast(flat, src=0, group=self._group)
