"""Runs on a real Ray cluster of two nodes: as one host trains, and every end of what Ray has started."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import LONG, own
from tests.namespaces import network, why_not
from tests.ray_cluster import RayNodes, ray_nodes
from tests.runs import GRPO, finish, home, numbers, records, write_run
from tests.traces import processes_at, title_of, traces

__all__ = ["home", "own"]

REASON = why_not() or ("" if importlib.util.find_spec("ray") else "Ray is not installed: make test-hosts does it")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
REALGRAPH = (sys.executable, "-m", "realgraph")
CPUS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    state = Path(f"/tmp/rg{os.getpid()}ray")  # Ray's sockets have short paths
    with network(2) as made, ray_nodes(made, state, CPUS) as running:
        yield running


def written(folder: Path, cluster: RayNodes, *parts: dict[str, Any], devices: bool = True) -> str:
    launch = {"launch": {"kind": "ray", "address": cluster.address, "join_seconds": 60}, "steps": 4}
    shape = {"cluster": {"devices": 2, "nodes": 2 if devices else None}}
    return str(write_run(folder, "run", GRPO, shape, launch, *parts))


def test_the_nodes_of_a_cluster_are_taken_and_train_as_one_host(cluster: RayNodes, own: Path, home: Path) -> None:
    """The number of nodes and their memory are not in the run file."""
    done = cluster.call(*REALGRAPH, "run", written(own, cluster, devices=False), cwd=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"host \S+ \(10[\d.]+\) has joined", done.stdout)) == 2, done.stdout
    plan = json.loads((own / "run/job.json").read_text())["cluster"]
    assert (plan["nodes"], plan["devices_per_node"], plan["kind"]) == (2, 2, "cpu")
    finish(own, "run", str(write_run(own, "one", GRPO, {"cluster": {"devices": 4}, "steps": 4})), name="one")
    found, expected = numbers(own / "run"), numbers(own / "one")
    assert found.keys() == expected.keys() == set(range(4))
    for step, metrics in expected.items():
        assert found[step]["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3, abs=1e-5)
        assert found[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-3)
    traces(own).gone(20)
    assert "has ended with exit code 0" in (own / "run/logs/ray.log").read_text()


@pytest.mark.parametrize("victim", ["actor", "driver", "master"])
def test_what_is_killed_ends_the_run_on_all_nodes(cluster: RayNodes, own: Path, victim: str) -> None:
    running = begun(cluster, own, written(own, cluster, LONG))
    try:
        until((own / "run/join.key").exists, 60, own / "out")
        secret = (own / "run/join.key").read_text().split()[-1]
        until(lambda: len(numbers(own / "run")) > 1, 90, own / "out")
        found = found_processes(own)
        assert not [title for title in map(title_of, found.values()) if secret in title]
        assert secret not in (own / "run/logs/ray.log").read_text() + (own / "out").read_text()
        os.kill(found[victim], signal.SIGKILL)
        code = running.wait(90)
        said = (own / "out").read_text()
        if victim != "master":
            assert code == 3, said
            assert len(re.findall(r"^error: .*host \S+ \(10[\d.]+\)", said, re.MULTILINE)) == 1, said
        traces(own).gone(75)
        assert "Traceback" not in said
    finally:
        running.kill()
        running.wait()


def test_a_run_goes_on_by_itself_on_the_nodes_that_are_left(cluster: RayNodes, own: Path) -> None:
    running = begun(cluster, own, written(own, cluster, LONG, {"runtime": {"restarts": 1}, "steps": 30}))
    try:
        until(lambda: len(numbers(own / "run")) > 1, 90, own / "out")
        os.kill(found_processes(own)["agent"], signal.SIGKILL)
        assert running.wait(120) == 0, (own / "out").read_text()
    finally:
        running.kill()
        running.wait()
    assert [record["restarts"] for record in records(own / "run", "start")] == [0, 1]
    assert set(numbers(own / "run")) == set(range(30))


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("smaller", r"run.yaml:\d+.*the plan has 3 nodes with 2 CPUs each, and the Ray cluster has \S+ "),
        ("nothing", r"the Ray cluster can't be asked: nothing listens on 10[\d.]+:1: "),
        ("no token", "the Ray cluster can't be asked: "),
    ],
)
def test_what_a_cluster_cannot_do_is_said_at_once(cluster: RayNodes, own: Path, case: str, wanted: str) -> None:
    environment = cluster.environment
    parts: tuple[dict[str, Any], ...] = ()
    match case:
        case "smaller":
            parts = ({"cluster": {"nodes": 3}},)
        case "nothing":
            parts = ({"launch": {"address": f"{cluster.network.addresses[0]}:1"}},)
        case _:
            environment["RAY_AUTH_TOKEN"] = "0" * 64
    done = cluster.call(*REALGRAPH, "run", written(own, cluster, *parts), cwd=own, environment=environment)
    assert done.returncode == 2, done.stdout
    assert re.search(wanted, " ".join(done.stderr.split())), done.stderr
    assert cluster.token not in done.stdout + done.stderr


def test_a_cluster_whose_room_is_taken_is_waited_for_and_then_named(cluster: RayNodes, own: Path) -> None:
    taken = begun(cluster, own, written(own, cluster, LONG))
    try:
        until(lambda: len(numbers(own / "run")) > 0, 90, own / "out")
        other = own / "other"
        done = cluster.call(
            *REALGRAPH, "run", str(own / "run.yaml"), f"outputs.dir={other}", "launch.join_seconds=4", cwd=own
        )
        assert done.returncode == 3, done.stdout + done.stderr
        assert "0 of 2 hosts have joined (none): no more within 4 s" in " ".join(done.stderr.split()), done.stderr
    finally:
        taken.send_signal(signal.SIGINT)
        taken.wait(60)
    traces(own).gone(20)


def test_a_cluster_that_asks_for_no_token_is_refused(own: Path) -> None:
    state = Path(f"/tmp/rg{os.getpid()}open")
    with network(1) as made, ray_nodes(made, state, CPUS, token=False) as cluster:
        file = written(own, cluster, {"cluster": {"nodes": 1}})
        done = cluster.call(*REALGRAPH, "run", file, cwd=own)
        assert done.returncode == 2, done.stdout
        assert re.search(r"the Ray cluster at \S+ asks for no token", " ".join(done.stderr.split())), done.stderr


def begun(cluster: RayNodes, own: Path, file: str) -> subprocess.Popen[bytes]:
    with (own / "out").open("w") as out:
        words = cluster.words(*REALGRAPH, "run", file)
        return subprocess.Popen(words, env=cluster.environment, cwd=own, stdout=out, stderr=out)


def until(holds: Callable[[], bool], seconds: float, log: Path) -> None:
    last = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < last, log.read_text()
        time.sleep(0.1)


def found_processes(folder: Path) -> dict[str, int]:
    """A process of each kind of the one run of a folder."""
    found: dict[str, int] = {}
    for pid in processes_at(folder):
        for kind, text in {"worker": "realgraph worker ", "master": "realgraph run", "driver": "ray_driver"}.items():
            if text in title_of(pid).partition("--key")[0]:
                found.setdefault(kind, pid)
    server = _parent(found["worker"])
    agent = _parent(server)
    return found | {"agent": agent, "actor": _parent(agent)}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
