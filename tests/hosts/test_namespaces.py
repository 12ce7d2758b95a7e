"""Runs over hosts that share no memory and no loopback: what crosses goes through the network, and can be cut off."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import own
from tests.host_runs import Hosts
from tests.namespaces import Network, network, why_not
from tests.runs import GRPO, finish, home, numbers, records, write_run
from tests.traces import descends, processes_at, title_of

__all__ = ["home", "own"]

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
STEPS = {"steps": 4}
IMPATIENT = {"hosts.agent.MASTER_LOST_SECONDS": 4.0, "wire.curve.PING_SECONDS": 1, "wire.curve.SILENT_SECONDS": 5}
QUICK = {"runtime": {"heartbeat_seconds": 0.2, "lost_after_seconds": 10}}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with network(2) as made:
        yield made


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # devices of a host, and pins
    "dp 4": (2, {}),
    "fsdp 4": (2, {"train": {"sharding": "fsdp", "devices": 4}}),
    "tp 2 pp 2": (2, {"train": {"tp": 2, "pp": 2, "devices": 4}}),
    "tp 2": (1, {"rollout": {"tp": 2, "devices": 2}, "train": {"tp": 2, "devices": 2}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_hosts_train_as_one_does(two: Network, own: Path, name: str) -> None:
    before = two.received_bytes(1)
    devices, pins = LAYOUTS[name]
    running = Hosts(own, STEPS, {"allocation": pins, "cluster": {"devices": devices}}, network=two)
    running.ends(0)
    assert two.received_bytes(1) - before > 100_000
    one = {"allocation": pins, "cluster": {"devices": 2 * devices}}
    finish(own, "run", str(write_run(own, "one", GRPO, STEPS, one)), name="one")
    found, expected = numbers(own / "run"), numbers(own / "one")
    assert found.keys() == expected.keys() == set(range(4))
    for step, metrics in expected.items():
        assert found[step]["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3, abs=1e-5)
        assert found[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("killed", [1, 2])
def test_a_worker_that_dies_while_others_share_its_part_is_named(two: Network, own: Path, killed: int) -> None:
    running = Hosts(own, {"allocation": LAYOUTS["tp 2 pp 2"][1], "cluster": {"devices": 2}}, QUICK, network=two)
    try:
        running.at_step(2)
        os.kill(next(pid for pid in processes_at(own) if title_of(pid) == f"realgraph worker {killed}"), signal.SIGKILL)
        error = running.error()
        assert re.search(rf"worker {killed} was lost .*: was killed by SIGKILL, on host [ab] ", error), error
    finally:
        running.close()


def test_a_link_that_is_down_for_less_than_the_deadline_is_waited_for(two: Network, own: Path) -> None:
    running = Hosts(own, network=two)
    try:
        running.at_step(2)
        two.link(1, "down")
        time.sleep(3)
        steps = len(records(own / "run"))
        two.link(1, "up")
        running.at_step(steps + 3)
        running.running.interrupt()
        running.ends(130)
    finally:
        two.link(1, "up")
        running.close()


def test_a_host_that_is_cut_off_is_named_and_ends_its_workers_by_itself(two: Network, own: Path) -> None:
    running = Hosts(own, QUICK, network=two, limits=IMPATIENT)
    try:
        running.at_step(2)
        two.link(1, "down")
        assert running.running.wait(60) == 3
        assert re.search(rf"host b \({two.addresses[1]}\)", running.running.output()), running.running.output()
        for one in running.agents.values():
            one.wait(60)
        running.traces.gone(10)
    finally:
        two.link(1, "up")
        running.close()


def test_a_host_that_stands_still_is_named_as_a_whole(two: Network, own: Path) -> None:
    running = Hosts(own, QUICK, network=two, limits=IMPATIENT)
    stopped: list[int] = []
    try:
        running.at_step(2)
        agent = running.agents["b"].pid
        stopped = [agent, *(pid for pid in processes_at(own) if descends(pid, agent))]
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # one that was about to end
                os.kill(pid, signal.SIGSTOP)
        assert running.running.wait(60) == 3
        error = running.running.output()
        assert re.search(r"host b \([\d.]+\) with workers 2, 3 has not been heard of for \d+ s", error), error
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for one in running.agents.values():
            one.wait(60)
        running.close()
    running.traces.gone(10)


def test_four_hosts_of_four_workers_train_as_one_host_does(own: Path) -> None:
    many = {"cluster": {"nodes": 4, "devices": 4}, "runtime": {"lost_after_seconds": 60}, "batch": {"groups": 16}}
    with network(4) as four:
        running = Hosts(own, {"steps": 2}, many, names="abcd", network=four)
        running.ends(0, 150)
        assert min(map(four.received_bytes, range(4))) > 100_000
    one = {"steps": 2, "cluster": {"devices": 16}, "batch": {"groups": 16}}
    finish(own, "run", str(write_run(own, "one", GRPO, one)), name="one")
    found, expected = numbers(own / "run"), numbers(own / "one")
    assert found.keys() == expected.keys() == {0, 1}
    for step, metrics in expected.items():
        assert found[step]["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3, abs=1e-5)
        assert found[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("pins", [{"dp": 2, "sharding": "replicated"}, {"tp": 2}], ids=["dp 2", "tp 2"])
def test_sums_of_two_are_the_same_bits_over_two_hosts(two: Network, own: Path, pins: dict[str, Any]) -> None:
    """One worker on each host: a sum of two numbers has one order."""
    allocation = {"allocation": {"train": {"devices": 2, **pins}, "rollout": {"devices": 2, "dp": 2}}}
    Hosts(own, STEPS, allocation, {"cluster": {"devices": 1}}, network=two).ends(0)
    finish(own, "run", str(write_run(own, "one", GRPO, STEPS, allocation, {"cluster": {"devices": 2}})), name="one")
    assert numbers(own / "run") == numbers(own / "one")
    weights = [own / name / "checkpoints/step-000004/actor/model.safetensors" for name in ("run", "one")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
