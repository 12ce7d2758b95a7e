"""Hostile traffic on the encrypted ports of a run of two hosts, while it trains, and 100,000 messages on each port."""

import random
import resource
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from realgraph.runtime.hosts.join_key import JoinKey, read_join_key
from tests.attacked import attacked
from tests.broken_runs import own
from tests.host_runs import Hosts
from tests.hostile import FOR_HUB, garbage, insider, strangers
from tests.namespaces import enter_namespace, network, why_not
from tests.preloaded import CONTEXT
from tests.runs import home, records
from tests.test_hostile import MOST_GROWTH_BYTES, attacks_leave_no_trace, least_growth
from tests.traces import processes_at

__all__ = ["home", "own"]

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
_LISTENS = "0A"  # proc(5)
N_STREAMS, N_MESSAGES = 300, 5_000


def listening(address: str) -> list[int]:
    """The ports of this namespace at an address that speak ZeroMQ's protocol: those of the run that are encrypted."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = []
    for port in sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}):
        try:
            with socket.create_connection((address, port), 1) as one:
                one.settimeout(1)
                greeting = one.recv(10)
        except OSError:
            continue
        if greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f":
            found.append(port)
    return found


def attack(place: tuple[str, str], key: JoinKey, hub: int, pipe: Connection) -> None:
    """The process of an attacker on a host. place: its namespace and address. Sends the ports that it attacked."""
    enter_namespace(place[0])
    rng = random.Random(hub)
    ports = listening(place[1])
    for port in ports:
        address = f"tcp://{place[1]}:{port}"
        garbage(address, N_STREAMS, rng)
        strangers(address, key.server, N_STREAMS // 10, rng)
        if port == hub:
            insider(address, (key.client, key.server), b"", (FOR_HUB, N_MESSAGES), 1)
    pipe.send(ports)


def attacked_ports(place: tuple[str, str], key: JoinKey, hub: int) -> list[int]:
    """Attack one host of a run; the ports."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=attack, args=(place, key, hub, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(120), "the attack did not end"
        found: list[int] = ours.recv()
        return found
    finally:
        process.kill()
        process.join()


def resident(home: Path) -> dict[int, int]:
    """Bytes in memory of each process of a run."""
    sizes = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes_at(home)}
    return {pid: pages * resource.getpagesize() for pid, pages in sizes.items()}


def test_a_run_goes_on_under_hostile_traffic(own: Path) -> None:
    with network(2) as two:
        places = list(zip(two.spaces, two.addresses, strict=True))
        running = Hosts(own, names="", network=two)
        key = read_join_key(str(own / "run/join.key"))
        running.join("ab")
        try:
            running.at_step(3)
            first = [attacked_ports(place, key, 7000) for place in places]
            assert [len(ports) for ports in first] == [4, 2], "hub, control, and a data plane of each worker"
            assert 7000 in first[0]

            def growth() -> int:
                before, step = resident(own), len(records(own / "run"))
                assert [attacked_ports(place, key, 7000) for place in places] == first
                running.at_step(step + 3)
                after = resident(own)
                assert before.keys() == after.keys()
                return max(after[pid] - before[pid] for pid in before)

            assert least_growth(growth) < MOST_GROWTH_BYTES
            running.running.interrupt()
            running.ends(130)
        finally:
            running.close()


def test_a_hundred_thousand_wrong_messages_leave_memory_as_it_was() -> None:
    with attacked() as target:
        assert attacks_leave_no_trace(target, 2_000, 98_000) < MOST_GROWTH_BYTES
