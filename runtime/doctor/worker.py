"""One worker of a check of machines: looks at its host, and measures the way to others, one at a time. Worker side.

What it calls may hang for good, in a library or a driver: each task has a thread, and the master does not wait for it.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.cuda import nccl

from realgraph.runtime.doctor.facts import TorchFacts
from realgraph.runtime.doctor.messages import (
    Answer,
    Connected,
    Examine,
    Examined,
    JoinPair,
    OpenPair,
    PairMeasured,
    PairOpened,
    decode_task,
    encode,
)
from realgraph.runtime.doctor.pair import MEET_SECONDS, PairLink, measured
from realgraph.runtime.doctor.probes import look, look_at_network
from realgraph.runtime.processes.environment import set_for_library
from realgraph.runtime.processes.launcher import WorkerBoot
from realgraph.runtime.wire.interfaces import interface_of_address
from realgraph.runtime.wire.refusals import UNREADABLE, Refusals
from realgraph.runtime.wire.sockets import SecureClient, TransportError

log = logging.getLogger(__name__)


def main(boot: WorkerBoot) -> None:
    """The worker's process; its launcher ends it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    Path(boot.log).unlink(missing_ok=True)  # nothing of a check is left; what goes wrong is told
    set_for_library("NCCL_SOCKET_IFNAME", f"={interface_of_address(boot.interface)}")
    if torch.cuda.is_available():
        torch.cuda.set_device(boot.worker % torch.cuda.device_count())
    sys.exit(asyncio.run(_serve(boot)))


async def _serve(boot: WorkerBoot) -> int:
    client = SecureClient(boot.master, b"%d" % boot.worker, boot.keys, boot.master_key)
    loop = asyncio.get_running_loop()

    def reply(answer: Answer) -> None:
        asyncio.run_coroutine_threadsafe(client.send(encode(answer)), loop)

    await client.send(encode(Connected()))
    refusals = Refusals(log)
    try:
        while True:
            frames = await client.receive()
            try:
                task = decode_task.decode(frames[0])
            except UNREADABLE as error:
                refusals.add(f"refused a message of the master: {error}")
                continue
            match task:
                case Examine():
                    loop.run_in_executor(None, _examine, task, boot, reply)
                case OpenPair():
                    loop.run_in_executor(None, _open_pair, task, boot.interface, reply)
                case JoinPair():
                    loop.run_in_executor(None, _join_pair, task, boot.interface, reply)
    except TransportError as error:
        log.error("%s", error)
        return 1


def _examine(task: Examine, boot: WorkerBoot, reply: Callable[[Answer], None]) -> None:
    asked = time.time()
    network = look_at_network(boot.interface, interface_of_address(boot.interface))
    host = look(task.name, network, Path(task.folder))
    try:
        shares = Path(task.token).read_text(encoding="ascii") == task.content
    except (OSError, ValueError):
        shares = False
    reply(Examined(msgspec.structs.replace(host, torch=torch_facts(), shares_folder=shares), asked, time.time()))


def torch_facts() -> TorchFacts:
    """torch as it is in this process."""
    cuda = torch.version.cuda or ""
    version: Callable[[], tuple[object, ...]] = nccl.version
    built_with = ".".join(map(str, version())) if cuda and sys.platform == "linux" else ""
    return TorchFacts(cuda, built_with, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _open_pair(task: OpenPair, address: str, reply: Callable[[Answer], None]) -> None:
    def meet() -> PairMeasured:
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        reply(PairOpened(f"{address}:{port}", task.number))
        return measured(PairLink(task.backend, _named(store), 0, address), leads=True)

    reply(msgspec.structs.replace(_guarded(meet), number=task.number))


def _join_pair(task: JoinPair, address: str, reply: Callable[[Answer], None]) -> None:
    def meet() -> PairMeasured:
        host, _, port = task.address.rpartition(":")
        timeout = timedelta(seconds=MEET_SECONDS)
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        return measured(PairLink(task.backend, _named(store), 1, address), leads=False)

    reply(msgspec.structs.replace(_guarded(meet), number=task.number))


def _named(store: Store) -> Store:
    return PrefixStore("doctor", store)


def _guarded(meet: Callable[[], PairMeasured]) -> PairMeasured:
    """The result, or the error in one line: stores, gloo and NCCL raise RuntimeError and its subclasses."""
    try:
        return meet()
    except (RuntimeError, OSError) as error:
        log.exception("process %d: a pair has failed", os.getpid())
        return PairMeasured(error=str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error))
