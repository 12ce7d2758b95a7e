"""Values that several workers of a host gather cross to it once: counted where the network delivers them."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch

from realgraph.runtime.store.shares import Share
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import Peer
from tests.namespaces import Network, enter_namespace, network, why_not
from tests.preloaded import CONTEXT

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
VALUES, VALUE_BYTES = 16, 1 << 20  # of each owner
PER_HOST = 4
DEADLINE_SECONDS = 60.0


def value(owner: int, number: int) -> torch.Tensor:
    """[VALUE_BYTES] uint8, different for each."""
    return torch.arange(VALUE_BYTES, dtype=torch.int64).mul(1 + 7 * number + owner).to(torch.uint8)


def serve(host: int, place: tuple[str, str], pipe: Connection) -> None:
    """The workers of a host, each with a data plane and a thread. place: its namespace and its address."""
    enter_namespace(place[0])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        numbers = range(host * PER_HOST, (host + 1) * PER_HOST)
        planes = [stack.enter_context(DataPlane(n, Store(), make_keys(), place[1])) for n in numbers]
        for plane in planes:
            if host == 0:
                n = plane.peer.worker
                plane._store.put("x", range(VALUES), [value(n, number) for number in range(VALUES)])
        pipe.send_bytes(msgspec.msgpack.encode([plane.peer for plane in planes]))
        peers = msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Peer])
        for plane in planes:
            plane.connect(peers)
        while task := pipe.recv():
            equal: list[bool] = []
            threads = [threading.Thread(target=gather, args=(plane, task, equal)) for plane in planes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipe.send(equal)


def gather(plane: DataPlane, task: tuple[int, tuple[int, ...]], equal: list[bool]) -> None:
    """Half of what two owners hold, each value looked at."""
    wants = [GatherRequest(owner, "x", tuple(range(owner, VALUES, 2))) for owner in (0, 1)]
    share = Share(*task) if task[1] else None
    found = plane.gather_now(wants, share=share, copy=False, deadline_seconds=DEADLINE_SECONDS)["x"]
    equal.append(all(torch.equal(found[n], value(n % 2, n)) for n in range(VALUES)))


class Workers:
    """Three hosts: the first owns, the others read."""

    def __init__(self, made: Network) -> None:
        self.network, self._pipes, self._processes = made, [], []
        for host in range(3):
            ours, theirs = CONTEXT.Pipe()
            place = made.spaces[host], made.addresses[host]
            self._processes.append(CONTEXT.Process(target=serve, args=(host, place, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        peers = [peer for host in range(3) for peer in msgspec.msgpack.decode(self._take(host), type=list[Peer])]
        for pipe in self._pipes:
            pipe.send_bytes(msgspec.msgpack.encode(peers))

    def _take(self, host: int) -> bytes:
        assert self._pipes[host].poll(DEADLINE_SECONDS)
        return self._pipes[host].recv_bytes()

    def gather(self, hosts: tuple[int, ...], task: tuple[int, tuple[int, ...]]) -> list[int]:
        """Have all workers of these hosts gather; the bytes that each host got."""
        before = [self.network.received_bytes(host) for host in hosts]
        for host in hosts:
            self._pipes[host].send(task)
        for host in hosts:
            assert self._pipes[host].poll(DEADLINE_SECONDS)
            assert self._pipes[host].recv() == [True] * PER_HOST
        return [self.network.received_bytes(host) - had for host, had in zip(hosts, before, strict=True)]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()


@contextmanager
def workers() -> Iterator[Workers]:
    with network(3) as made:
        running = Workers(made)
        try:
            yield running
        finally:
            running.close()


def test_a_share_crosses_to_each_host_once() -> None:
    share_bytes, readers = VALUES * VALUE_BYTES, tuple(range(PER_HOST, 3 * PER_HOST))
    with workers() as running:
        alone = running.gather((1,), (0, ()))  # each for itself
        assert alone[0] > 0.95 * PER_HOST * share_bytes
        for task in (1, 2, 3):
            found = running.gather((1, 2), (task, readers))
            assert all(share_bytes <= got <= 1.05 * share_bytes for got in found), found
