"""Clusters with every number known, from what a user says of the machine and what is found of it."""

import re
from pathlib import Path

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec, NodesSpec
from realgraph.planner.inputs.detect import Gpu, Probe, probe, resolve
from realgraph.planner.inputs.devices import device_kinds
from realgraph.planner.options.meshes import mesh_fault
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import Limits
from realgraph.planner.search.search import search
from tests.planner_cases import MACHINE, cluster, ppo, request

replace = msgspec.structs.replace


def test_meshes_are_aligned_powers_of_two_or_whole_nodes() -> None:
    machine = cluster(devices=8, nodes=3)
    good = {(d, n) for n in (1, 2, 4) for d in range(0, 24, n)} | {(0, 8), (8, 8), (16, 8), (0, 16), (8, 16), (0, 24)}
    for first in range(-1, 25):
        for n in range(26):
            assert (mesh_fault(DeviceMesh(first, n), machine) == "") == ((first, n) in good), (first, n)
    six = cluster(devices=6)
    assert mesh_fault(DeviceMesh(0, 6), six) == ""
    assert mesh_fault(DeviceMesh(0, 3), six)


def resolved(spec: ClusterSpec, machine: Probe = MACHINE) -> Cluster:
    return resolve(spec, machine)


def test_auto_is_this_machine() -> None:
    here = resolved(ClusterSpec())
    assert (here.kind, here.devices_per_node, here.memory_bytes) == ("cpu", 2, 12_000_000_000)
    gpus = Probe(16, 128 * 10**9, (Gpu("NVIDIA H200", 150 * 10**9),) * 4)
    there = resolved(ClusterSpec(), gpus)
    assert (there.kind, there.n_devices, there.memory_bytes) == ("H200", 4, 150 * 10**9)
    assert resolved(ClusterSpec(memory_gb=70), gpus).memory_bytes == 70 * 10**9
    assert resolved(ClusterSpec(kind="cpu", devices=4), gpus).kind == "cpu"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_a_driver_name_is_one_kind(name: str, kind: str) -> None:
    assert resolved(ClusterSpec(), Probe(8, 10**11, (Gpu(name, 10**10),))).kind == kind
    assert [one for one, row in device_kinds().items() if any(re.search(each, name) for each in row.names)] == [kind]


def test_devices_that_meet_over_pcie_have_no_rate_of_a_switch() -> None:
    over_pcie = {name: kind for name, kind in device_kinds().items() if name.endswith(("PCIe", "NVL"))}
    assert over_pcie
    for name, kind in over_pcie.items():
        assert kind.link_gb_per_s <= 50 < device_kinds()["A100-80"].link_gb_per_s, name


@pytest.mark.parametrize(
    ("spec", "machine", "says"),
    [
        (ClusterSpec(kind="H100"), MACHINE, "did you mean 'H100-PCIe' or 'H100-SXM'?"),
        (ClusterSpec(kind="h100-sxm", devices=8), MACHINE, "did you mean 'H100-SXM'"),
        (ClusterSpec(kind="H200"), MACHINE, "set cluster.devices: 8 is usual"),
        (ClusterSpec(), Probe(8, 10**11, (Gpu("NVIDIA Titan", 10**10),)), "'NVIDIA Titan' is not in the table"),
        (ClusterSpec(), Probe(8, 10**11, (Gpu("NVIDIA H200", 1), Gpu("NVIDIA H20", 1))), "mixes GPUs"),
        (ClusterSpec(), Probe(8, 10**11, gpu_error="nvidia-smi failed"), "can't be read"),
    ],
)
def test_an_unclear_cluster_is_refused(spec: ClusterSpec, machine: Probe, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(spec, machine)


def test_further_nodes_are_their_kind_s_own() -> None:
    spec = ClusterSpec(2, 8, "H100-SXM", more=(NodesSpec(3, "A100-80"), NodesSpec(1, "H20", 4, memory_gb=90)))
    mixed = resolved(spec)
    assert mixed.n_devices == 16 + 24 + 4
    assert [(group.kind, group.nodes, group.devices_per_node) for group in mixed.groups] == [
        ("H100-SXM", 2, 8),
        ("A100-80", 3, 8),
        ("H20", 1, 4),
    ]
    assert [mixed.first_of(i) for i in range(3)] == [0, 16, 40]
    assert mixed.groups[2].memory_bytes == 90 * 10**9
    assert mixed.groups[1] == replace(resolved(ClusterSpec(3, 8, "A100-80")), more=())


@pytest.mark.parametrize(
    ("spec", "path", "says"),
    [
        (ClusterSpec(1, 8, "H100-SXM", more=(NodesSpec(1, "cpu"),)), "$.cluster.more[0].kind", "do not share"),
        (ClusterSpec(1, 8, "H100-SXM", more=(NodesSpec(1, "A100"),)), "$.cluster.more[0].kind", "did you mean"),
        (ClusterSpec(kind="cpu", more=(NodesSpec(1, "H200"),)), "$.cluster.more[0].kind", "do not share"),
    ],
)
def test_further_nodes_that_make_no_sense_are_refused(spec: ClusterSpec, path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(spec)
    assert any(p.where.path == path and says in str(p) for p in caught.value.problems), caught.value


def test_a_mixed_cluster_is_planned_within_and_across_its_kinds() -> None:
    mixed = resolved(ClusterSpec(1, 8, "H100-SXM", more=(NodesSpec(1, "A100-80"),)))
    asked = request(ppo(), "meta-llama/Llama-3.1-8B", mixed)
    plan = search(asked, Limits(gap=0.01, seconds=10.0))
    assert validate(plan, asked) == ()
    alone = search(replace(asked, cluster=resolved(ClusterSpec(1, 8, "H100-SXM"))), Limits(gap=0.01, seconds=10.0))
    assert plan.lower_bound_seconds <= alone.period_seconds * (1 + 1e-9)
    assert any(allocation.layout.mesh.first >= 8 for allocation in plan.allocations.values())


SMI = {
    "good": ("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'\n", 2, ""),
    "broken": ("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'\nexit 9\n", 0, "no driver"),
    "odd": ("#!/bin/sh\necho 'something else'\n", 0, "something else"),
}


@pytest.mark.parametrize("case", SMI)
def test_this_machine_is_read_through_nvidia_smi(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, count, error = SMI[case]
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    machine = probe()
    assert machine.cores >= 1
    assert machine.host_memory_bytes > 10**8
    assert len(machine.gpus) == count
    assert error in machine.gpu_error
    assert bool(error) == bool(machine.gpu_error)
    if count:
        assert resolve(ClusterSpec(), machine).memory_bytes == 81559 << 20
