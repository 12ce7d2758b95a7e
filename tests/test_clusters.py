"""Pure parts of running on clusters: what is left out of `cluster`, batch scripts, what Slurm's commands print."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.allocated import cluster_from, is_whole
from realgraph.planner.inputs.cluster import ClusterSpec, NodesSpec
from realgraph.planner.inputs.detect import Gpu, Probe, resolve
from realgraph.runtime.clusters import slurm
from realgraph.runtime.clusters.ray_cluster import RayCluster, RayNode, bundles_of, check_room, usable
from realgraph.runtime.clusters.sbatch import BatchScript
from realgraph.runtime.clusters.slurm import SlurmJob, current_allocation, requeue_due, restarts_of

H100, A100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30), Gpu("NVIDIA A100-SXM4-80GB", 80 << 30)


def host(*gpus: Gpu, memory: int = 512 << 30, error: str = "") -> Probe:
    return Probe(64, memory, gpus, error)


def named(*hosts: Probe) -> list[tuple[str, Probe]]:
    return [(f"n{number}", one) for number, one in enumerate(hosts)]


def test_a_cluster_that_is_left_out_is_that_of_its_hosts_by_the_least_of_them() -> None:
    small = Gpu(H100.name, 79 << 30)
    spec = cluster_from(ClusterSpec(), named(host(*[H100] * 8), host(*[H100] * 7, small, memory=400 << 30)))
    cluster = resolve(spec, Probe(1, 0))
    assert (cluster.nodes, cluster.devices_per_node, cluster.kind) == (2, 8, "H100-SXM")
    assert cluster.memory_bytes == 79 << 30
    assert cluster.host_memory_bytes == 400 << 30
    mixed = cluster_from(ClusterSpec(), named(host(*[A100] * 4), *[host(*[H100] * 8)] * 2))
    groups = resolve(mixed, Probe(1, 0)).groups
    assert [(g.kind, g.nodes, g.devices_per_node) for g in groups] == [("H100-SXM", 2, 8), ("A100-80", 1, 4)]


@given(st.integers(1, 9), st.none() | st.integers(1, 20), st.none() | st.integers(1, 4))
def test_what_a_user_says_of_a_cluster_stays(n_hosts: int, nodes: int | None, devices: int | None) -> None:
    spec = cluster_from(ClusterSpec(nodes=nodes, devices=devices), named(*[host()] * n_hosts))
    assert spec.nodes == (nodes or n_hosts)
    assert spec.devices == devices
    assert spec.kind == "cpu"
    assert not is_whole(ClusterSpec(nodes=nodes, devices=devices))


@pytest.mark.parametrize(
    ("spec", "hosts", "wanted"),
    [
        (ClusterSpec(), named(host(error="no driver")), "the GPUs of host n0 can't be read: no driver"),
        (ClusterSpec(), named(host(Gpu("Abacus", 1))), "host n0 has a Abacus"),
        (ClusterSpec(), named(host(H100, A100)), "host n0 mixes GPUs"),
        (ClusterSpec(), named(host(H100), host()), "1 of 2 hosts have no GPU"),
        (ClusterSpec(kind="A100-80"), named(host(H100)), "no host has A100-80: they have H100-SXM"),
    ],
)
def test_hosts_that_no_cluster_can_be_made_of(spec: ClusterSpec, hosts: list[tuple[str, Probe]], wanted: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cluster_from(spec, hosts)
    assert wanted in str(raised.value)


def test_a_batch_script_says_what_it_is_given_and_options_come_last(tmp_path: Path) -> None:
    options: dict[str, str | int | bool] = {"nodes": 3, "partition": "gpu", "exclusive": True, "requeue": False}
    script = BatchScript(
        "a run", tmp_path, tmp_path, ("echo", "a b", "$HOME"), 90, 2, 8, 0, options, ("X='set up'", "export X")
    )
    lines = script.text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=3", "#SBATCH --gpus-per-node=8", "#SBATCH --partition=gpu"} <= set(lines)
    assert {"#SBATCH --exclusive", '#SBATCH --job-name="a run"'} <= set(lines)
    assert "#SBATCH --signal=B:TERM@90" in lines
    assert not any("--requeue" in line or "cpus-per-task" in line for line in lines)
    ran = subprocess.run(["bash", "-c", script.text], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "a b $HOME\n"


def test_an_allocation_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def answer(*words: str) -> str:
        asked.append(words)
        return "n1\nn2\n"

    monkeypatch.setattr(slurm, "ask", answer)
    assert current_allocation({"SLURM_JOB_ID": "7"}) is None
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2"}
    assert current_allocation(environment) == SlurmJob("7", ("n1", "n2"), 2)
    assert asked == [("scontrol", "show", "hostnames", "n[1-2]")]
    assert restarts_of({}) == 0


@pytest.mark.parametrize(
    ("left", "batch", "due"), [(30, "1", True), (120, "1", False), (30, "0", False), (None, "1", False)]
)
def test_a_job_goes_back_where_its_limit_was_why(
    monkeypatch: pytest.MonkeyPatch, left: int | None, batch: str, due: bool
) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    end = "Unknown" if left is None else (now + timedelta(seconds=left)).isoformat()
    monkeypatch.setattr(slurm, "ask", lambda *_: f"JobId=7 BatchFlag={batch} EndTime={end} Name=x y\n")
    assert requeue_due(SlurmJob("7", ("n1",)), now, 60) is due


def test_commands_that_are_missing_or_fail_are_errors_of_the_launch() -> None:
    for words, wanted in {
        ("no-such-command",): "there is no `no-such-command` here",
        ("false",): "exit status 1",
    }.items():
        with pytest.raises(ConfigError) as raised:
            slurm.ask(*words)
        assert wanted in str(raised.value)
        assert raised.value.problems[0].where.path == "$.launch"


# --- Ray --------------------------------------------------------------------------------------------------------------


def ray_nodes(*gpus: float) -> list[RayNode]:
    return [RayNode(str(i), f"n{i}", f"10.0.0.{i}", {"CPU": 8.0, "GPU": n}) for i, n in enumerate(gpus)]


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9)), min_size=1))
def test_a_ray_cluster_has_room_where_each_node_of_the_plan_finds_one_of_its_own(
    gpus: list[int], groups: list[tuple[int, int]]
) -> None:
    """The oracle tries all ways to place the plan's nodes."""
    more = tuple(NodesSpec(nodes, "A100-80", devices) for nodes, devices in groups[1:3])
    spec = ClusterSpec(groups[0][0], groups[0][1], "H100-SXM", more=more)
    bundles = bundles_of(resolve(spec, Probe(cores=1, host_memory_bytes=0)))
    wanted = [bundle["GPU"] for bundle in bundles]
    fits = any(
        all(has >= wants for has, wants in zip(placed, wanted, strict=True))
        for placed in itertools.permutations(gpus, len(wanted))
    )
    if fits:
        check_room(ray_nodes(*gpus), bundles)
        return
    with pytest.raises(ConfigError) as raised:
        check_room(ray_nodes(*gpus), bundles)
    assert all(f"n{number} (10.0.0.{number}) with 8 CPUs" in str(raised.value) for number in range(len(gpus)))


def test_nodes_of_a_ray_cluster_without_gpus_work_only_where_none_has_any() -> None:
    assert [node.name for node in usable(ray_nodes(0, 4, 0))] == ["n1"]
    assert len(usable(ray_nodes(0, 0))) == 2


def test_an_environment_without_ray_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed here") as raised:
        RayCluster("auto", {}).nodes()
    assert "pip install 'realgraph[ray]'" in str(raised.value)
