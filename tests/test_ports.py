"""The machine's other users: what they can reach of the workers' process groups."""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError, FileRendezvous, reach_store
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.wire.ports import listening_sockets, refuse_connections
from tests.ranks import RankProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    processes = RankProcesses(3, (Layout(DeviceMesh(0, 2), dp=2), Layout(DeviceMesh(1, 2), dp=2)))
    yield processes
    processes.close()


def ports(ranks: LayoutRanks) -> tuple[list[Any], int]:
    """Addresses on which this rank listens, and how many descriptors it has open."""
    found = []
    for fd in listening_sockets():
        with socket.socket(fileno=os.dup(fd)) as listener:
            found.append(listener.getsockname())
    return found, len(os.listdir("/proc/self/fd"))


def loops(ranks: LayoutRanks) -> int:
    """Threads of this rank that wait for gloo's messages."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo") for name in names)


def total(ranks: LayoutRanks) -> float:
    import torch

    return float(ranks.mesh.add(torch.tensor(10.0**ranks.mesh.rank, dtype=torch.float64)))


def answers(address: Any) -> bool:
    try:
        with socket.create_connection(address, timeout=0.2):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_groups_listen_on_the_loopback_only_and_answer_nobody(three: RankProcesses) -> None:
    before = three.run(ports)
    addresses = [address for found, _ in before for address in found]
    assert addresses, "gloo listens nowhere: the test looks in the wrong place"
    assert len(addresses) == 3, "one port a process, however many groups it is in"
    assert three.run(loops) == [1] * 3
    assert {host for host, _ in addresses} == {"127.0.0.1"}  # and no store of torch's, which listens on every address
    assert not any(answers(address) for address in addresses)
    assert three.run(ports) == before
    assert three.run(total) == [111.0] * 3


def test_a_port_that_is_refused_answered_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.fileno() in listening_sockets()
        client = socket.create_connection(server.getsockname(), timeout=5)
        accepted, _ = server.accept()
        refuse_connections([server.fileno()])
        assert not answers(server.getsockname())
        client.sendall(b"still here")
        assert accepted.recv(64) == b"still here"
        client.close()
        accepted.close()


def test_the_rendezvous_is_this_users_and_leaves_nothing() -> None:
    rendezvous = FileRendezvous()
    assert stat.S_IMODE(os.stat(rendezvous.address).st_mode) == 0o600
    assert os.stat(rendezvous.address).st_nlink == 0  # it stands in no folder
    assert stat.S_IMODE(Path(f"/proc/{os.getpid()}/fd").stat().st_mode) == 0o500
    first, second = (reach_store(rendezvous.address, 2, 5.0) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    rendezvous.close()
    with pytest.raises(CollectiveError, match="is gone, and so is the worker that opened it"):
        reach_store(rendezvous.address, 2, 5.0)
