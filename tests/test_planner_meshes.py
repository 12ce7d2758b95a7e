"""The family of meshes: it tiles the cluster, is small, and takes in what a user names."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.planner.options.meshes import family, group_of, mesh_fault, radices
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import DeviceBlock
from tests.planner_cases import MIXED, cluster


def blocks(block: DeviceBlock) -> Iterator[DeviceBlock]:
    yield block
    for child in block.children:
        yield from blocks(child)


def shape(block: DeviceBlock) -> tuple[object, ...]:
    return (block.n_devices, block.symmetric, tuple(shape(child) for child in block.children))


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 20))
def test_a_family_tiles_the_cluster_and_all_its_meshes_are_sound(per_node: int, nodes: int, reserved: int) -> None:
    machine = cluster(devices=per_node, nodes=nodes)
    reserved = min(reserved, machine.n_devices - 1)
    found = family(machine, reserved)
    assert not any(mesh_fault(mesh, machine) for mesh in found.meshes)
    assert len(set(found.meshes)) == len(found.meshes)
    assert {(m.first, m.n_devices) for m in found.meshes} >= {(d, 1) for d in range(machine.n_devices - reserved)}
    assert all(mesh.devices.stop <= machine.n_devices - reserved for mesh in found.meshes)
    if not reserved:
        assert DeviceMesh(0, machine.n_devices) in found.meshes
    for block in blocks(found.tree):
        if block.children:
            assert [d for c in block.children for d in range(c.first, c.first + c.n_devices)] == list(
                range(block.first, block.first + block.n_devices)
            )
        if block.symmetric:
            assert len({shape(child) for child in block.children}) <= 1


@pytest.mark.parametrize(("nodes", "sizes"), [(1, 4), (128, 14), (512, 17), (12, 9), (96, 13), (7, 10), (11, 10)])
def test_there_are_few_sizes(nodes: int, sizes: int) -> None:
    found = family(cluster(nodes=nodes))
    assert len({mesh.n_devices for mesh in found.meshes}) == sizes
    assert int(np.prod(radices(nodes), dtype=int)) == nodes


def test_groups_of_a_mixed_cluster_never_share_a_mesh() -> None:
    found = family(MIXED)
    for mesh, group in zip(found.meshes, found.groups, strict=True):
        assert {group_of(MIXED, device) for device in mesh.devices} == {group}
        assert mesh_fault(mesh, MIXED) == ""
    assert mesh_fault(DeviceMesh(8, 16), MIXED).endswith("a mesh lies within one kind")
    assert not found.tree.symmetric
    assert {DeviceMesh(0, 16), DeviceMesh(16, 24), DeviceMesh(40, 4)} <= set(found.meshes)


def test_a_named_mesh_belongs_to_the_family_and_breaks_the_symmetry_round_it() -> None:
    machine, named = cluster(nodes=8), DeviceMesh(24, 16)  # nodes 3 and 4: no run of one block
    assert named not in family(machine).meshes
    found = family(machine, named=(named,))
    assert named in found.meshes
    for block in blocks(found.tree):
        here = range(block.first, block.first + block.n_devices)
        inside = sum(device in named.devices for device in here)
        if 0 < inside < len(here):
            assert not block.symmetric
    untouched = [block for block in blocks(found.tree) if block.n_devices == 8]
    assert all(block.symmetric for block in untouched)
