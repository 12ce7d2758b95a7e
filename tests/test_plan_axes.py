"""Coordinates of devices, groups of axes and head workers of a layout: properties, and Megatron-Core's own example."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.comm import axis_link
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.axes import (
    MESH_AXES,
    Coordinates,
    MeshAxis,
    coordinates_of,
    device_at,
    expert_groups,
    groups_of,
    head_worker,
    is_head,
    rank_workers,
    session_groups,
    stage_devices,
    stride_of,
)
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.scheduler.program import ranks_of
from tests.planner_cases import cluster, known

SIZES = (1, 2, 3, 4, 8)


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES, most: int = 64) -> Layout:
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for _ in MESH_AXES)
    ep = draw(st.sampled_from([ep for ep in range(1, dp + 1) if dp % ep == 0]))
    mesh = DeviceMesh(draw(st.integers(0, most)), tp * cp * dp * pp)
    return Layout(mesh, dp=dp, tp=tp, pp=pp, ep=ep, cp=cp)


@given(layouts())
def test_each_device_has_coordinates_of_its_own(layout: Layout) -> None:
    found = [coordinates_of(layout, device) for device in layout.mesh.devices]
    sizes = [range(getattr(layout, axis)) for axis in reversed(MESH_AXES)]
    assert found == [Coordinates(*ranks) for ranks in product(*sizes)]  # pp slowest, tp fastest
    assert [device_at(layout, at) for at in found] == list(layout.mesh.devices)


@given(layouts(), st.sets(st.sampled_from(MESH_AXES)))
def test_groups_cover_the_mesh_once_and_differ_in_their_axes_alone(layout: Layout, axes: set[MeshAxis]) -> None:
    groups = groups_of(layout, *axes)
    assert sorted(device for group in groups for device in group) == list(layout.mesh.devices)
    assert list(groups) == sorted(groups)
    others = [axis for axis in MESH_AXES if axis not in axes]
    for group in groups:
        assert list(group) == sorted(group)
        at = [coordinates_of(layout, device) for device in group]
        assert len({tuple(getattr(one, axis) for axis in others) for one in at}) == 1
        inside = {tuple(getattr(one, axis) for axis in sorted(axes)) for one in at}
        assert inside == set(product(*(range(getattr(layout, axis)) for axis in sorted(axes))))


@given(layouts(), st.sampled_from(MESH_AXES))
def test_neighbours_in_a_group_are_a_stride_apart(layout: Layout, axis: MeshAxis) -> None:
    for group in groups_of(layout, axis):
        assert {after - before for before, after in pairwise(group)} <= {stride_of(layout, axis)}


@given(layouts())
def test_experts_are_spread_over_neighbours_of_one_stage(layout: Layout) -> None:
    groups = expert_groups(layout)
    assert sorted(device for group in groups for device in group) == list(layout.mesh.devices)
    for group in groups:
        assert len(group) == layout.ep and group == tuple(range(group[0], group[0] + layout.ep))
        assert len({coordinates_of(layout, device).pp for device in group}) == 1


@given(layouts(), st.sampled_from((1, 2, 3, 6)))
def test_a_session_is_the_fewest_whole_ranks_that_share_experts(layout: Layout, ep: int) -> None:
    layout = replace(layout, ep=ep if stride_of(layout, "pp") % ep == 0 else layout.ep)
    sessions = session_groups(layout)
    assert sorted(device for session in sessions for device in session) == list(layout.mesh.devices)
    ranks = [set(rank_workers(layout, rank)) for rank in range(layout.dp)]
    groups = [set(group) for group in expert_groups(layout)]
    for session in sessions:
        assert list(session) == sorted(session)
        reached = {session[0]}
        while more := set().union(*(one for one in (*ranks, *groups) if one & reached)) - reached:
            reached |= more
        assert reached == set(session)


@given(layouts())
def test_a_head_is_the_first_device_of_its_ranks_last_stage(layout: Layout) -> None:
    ranks = [rank_workers(layout, rank) for rank in range(layout.dp)]
    assert sorted(device for rank in ranks for device in rank) == list(layout.mesh.devices)
    assert ranks_of(layout) == tuple(ranks)
    for number, rank in enumerate(ranks):
        at = [coordinates_of(layout, device) for device in rank]
        assert {one.dp for one in at} == {number}
        assert rank[0] == head_worker(layout, number) == min(set(rank) & set(stage_devices(layout, layout.pp - 1)))
        assert list(rank[1:]) == sorted(rank[1:])
        assert [worker for worker in rank if is_head(layout, worker)] == [rank[0]]


@given(st.integers(1, 64), st.integers(0, 64))
def test_on_data_parallelism_alone_each_worker_is_a_rank_and_its_head(dp: int, first: int) -> None:
    layout = Layout(DeviceMesh(first, dp), dp=dp)
    assert ranks_of(layout) == tuple((first + rank,) for rank in range(dp))


def test_the_order_is_megatrons() -> None:
    """Two nodes of 8, tp 2 and pp 4: the groups that Megatron-Core names in the docstring of its
    `initialize_model_parallel`, data-parallel ones 0 2, 1 3, ... and stages 0 4 8 12, 1 5 9 13, ..."""
    layout = Layout(DeviceMesh(0, 16), dp=2, tp=2, pp=4)
    assert groups_of(layout, "tp")[:2] == ((0, 1), (2, 3))
    assert groups_of(layout, "dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert groups_of(layout, "pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert groups_of(layout, "tp", "pp")[1] == (2, 3, 6, 7, 10, 11, 14, 15)
    assert [head_worker(layout, rank) for rank in range(2)] == [12, 14]
    assert rank_workers(layout, 0) == (12, 0, 1, 4, 5, 8, 9, 13)
    assert expert_groups(replace(layout, ep=2))[:3] == ((0, 1), (2, 3), (4, 5))


@given(layouts((1, 2, 4, 8), most=0), st.sampled_from(MESH_AXES))
def test_a_link_has_as_many_members_inside_a_node_as_the_fullest_group(layout: Layout, axis: MeshAxis) -> None:
    """Costs count the members on one node from the stride: right where groups lie alike on all nodes."""
    setting = Setting(known("Qwen/Qwen3-8B"), ModelRole(), layout, cluster(nodes=-(-layout.mesh.n_devices // 8)))
    link = axis_link(setting, getattr(layout, axis), stride_of(layout, axis))
    groups = groups_of(layout, axis)
    assert link.inside == max(sum(device // 8 == node for device in g) for g in groups for node in {d // 8 for d in g})


def test_what_a_layout_does_not_have_is_refused() -> None:
    layout = Layout(DeviceMesh(8, 8), dp=2, tp=2, pp=2)
    with pytest.raises(ValueError, match="device 16 is none of the layout's, 8 to 15"):
        coordinates_of(layout, 16)
    with pytest.raises(ValueError, match="dp 2 has no rank 2"):
        device_at(layout, Coordinates(0, 2, 0, 0))
    with pytest.raises(ValueError, match="pp 2 has no stage 2"):
        stage_devices(layout, 2)
    with pytest.raises(ValueError, match="ep 3 does not divide the 4 devices of a stage"):
        expert_groups(replace(layout, ep=3))
