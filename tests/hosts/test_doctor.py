"""`realgraph doctor` over hosts that share no loopback: links that are whole, slow, closed to some, and down."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Network, ip, network, why_not
from tests.runs import Running, Special, start, stop
from tests.traces import traces

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
IMPATIENT = {"wire.curve.PING_SECONDS": 1, "wire.curve.SILENT_SECONDS": 3, "hosts.agent.MASTER_LOST_SECONDS": 4.0}


@pytest.fixture(scope="module")
def three() -> Iterator[Network]:
    with network(3) as made:
        yield made


class Check:
    """`realgraph doctor` in the first namespace, which waits for so many hosts, and agents in some of them."""

    def __init__(self, made: Network, folder: Path, n_hosts: int, *words: str) -> None:
        self._made, self._folder, self.traces = made, folder, traces(folder)
        self._listen = f"{made.addresses[0]}:7000"
        self.agents: list[Running] = []
        told = ("doctor", "--hosts", str(n_hosts), "--listen", self._listen, "--dir", str(folder), "--json", *words)
        self.running = start(folder, *told, name="doctor", special=self._in(0))
        self.running.until((folder / "doctor.key").exists, "the key")

    def _in(self, number: int) -> Special:
        return Special(namespace=self._made.spaces[number], limits=dict(IMPATIENT))

    def join(self, number: int, n_joined: int) -> None:
        """An agent in a namespace, named by it; returns once it has joined."""
        words = ("worker", "--connect", self._listen, "--key", str(self._folder / "doctor.key"), "--name", f"h{number}")
        self.agents.append(start(self._folder, *words, name=f"agent-{number}", special=self._in(number)))
        self.running.until(lambda: f"has joined: {n_joined} of" in self.running.output(), "a host")

    def report(self, code: int) -> dict[str, Any]:
        """Its findings and facts, once all has ended and nothing is left."""
        found = self.running.wait(90)
        output = self.running.output()
        assert found == code, output
        for one in self.agents:
            one.wait(60)
        self.traces.gone(10)
        assert not (self._folder / "doctor.key").exists()
        report: dict[str, Any] = json.loads(output[output.index("\n{") :])
        return report

    def close(self) -> None:
        stop(self._folder)


def texts(report: dict[str, Any]) -> list[str]:
    return [f"{one['where']}: {one['text']}" for one in report["findings"] if "/dev/shm" not in one["text"]]


def test_two_hosts_are_described_and_measured(three: Network, tmp_path: Path) -> None:
    check = Check(three, tmp_path, 2)
    check.join(0, 1)
    began = time.monotonic()
    check.join(1, 2)
    report = check.report(0)
    assert time.monotonic() - began < 30
    assert [(host["name"], host["network"]["address"]) for host in report["hosts"]] == [
        ("h0", three.addresses[0]),
        ("h1", three.addresses[1]),
    ]
    assert report["hosts"][0]["id"] != report["hosts"][1]["id"]
    assert all(host["network"]["interface"] == "eth0" and host["shares_folder"] for host in report["hosts"])
    assert all(abs(host["clock_ahead_seconds"]) < 0.5 for host in report["hosts"]), "they have one clock"
    (pair,) = report["pairs"]
    assert (pair["first"], pair["second"], pair["backend"], pair["error"]) == ("h0", "h1", "gloo", "")
    assert min(pair["there_bytes_per_s"], pair["back_bytes_per_s"]) > 0.05e9
    assert 0 < pair["latency_seconds"] < 0.05


def test_a_link_of_one_gigabit_is_seen_in_its_direction(three: Network, tmp_path: Path) -> None:
    """tbf shapes what a host sends."""
    shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(["ip", "netns", "exec", three.spaces[1], *shape], check=True)
    check = Check(three, tmp_path, 2)
    try:
        check.join(0, 1)
        check.join(1, 2)
        report = check.report(0)
    finally:
        check.close()
        subprocess.run(
            ["ip", "netns", "exec", three.spaces[1], "tc", "qdisc", "del", "dev", "eth0", "root"], check=True
        )
    (pair,) = report["pairs"]
    assert 0.03e9 < pair["back_bytes_per_s"] < 0.13e9, pair
    assert pair["there_bytes_per_s"] > pair["back_bytes_per_s"]
    assert any("as over 1 Gbit/s" in text for text in texts(report))


def test_hosts_that_reach_the_first_and_not_each_other_are_named(three: Network, tmp_path: Path) -> None:
    """As behind a firewall that lets only some through."""
    ip("-n", three.spaces[2], "route", "add", "blackhole", f"{three.addresses[1]}/32")
    check = Check(three, tmp_path, 3)
    try:
        for number in range(3):
            check.join(number, number + 1)
        report = check.report(2)
    finally:
        check.close()
        ip("-n", three.spaces[2], "route", "del", "blackhole", f"{three.addresses[1]}/32")
    assert {(pair["first"], pair["second"]): bool(pair["error"]) for pair in report["pairs"]} == {
        ("h0", "h1"): False,
        ("h0", "h2"): False,
        ("h1", "h2"): True,
    }
    (fatal,) = [one for one in report["findings"] if one["fails"]]
    assert fatal["where"] == "h1 - h2" and fatal["text"].startswith("no gloo between them: "), fatal


def test_a_host_whose_link_goes_down_is_named_and_the_others_are_checked(three: Network, tmp_path: Path) -> None:
    check = Check(three, tmp_path, 3)
    try:
        check.join(0, 1)
        check.join(2, 2)
        three.link(2, "down")
        check.join(1, 3)
        report = check.report(2)
    finally:
        three.link(2, "up")
        check.close()
    assert [host["name"] for host in report["hosts"]] == ["h0", "h1"]
    assert [(pair["first"], pair["second"], pair["error"]) for pair in report["pairs"]] == [("h0", "h1", "")]
    (fatal,) = [one for one in report["findings"] if one["fails"]]
    assert fatal["where"] == f"host h2 ({three.addresses[2]})"


def test_a_host_that_never_joins_is_missed(three: Network, tmp_path: Path) -> None:
    check = Check(three, tmp_path, 2, "--join-seconds", "4")
    check.join(0, 1)
    report = check.report(2)
    assert [host["name"] for host in report["hosts"]] == ["h0"]
    assert "hosts: 1 of 2 have joined (h0): no more within 4 s" in texts(report)
