"""Devices of a layout and their coordinates, the groups of every axis, and the head worker of a data-parallel rank.

Ranks are ordered as in Megatron-Core (core/parallel_state.py, RankGenerator: tp-cp-ep-dp-pp; Narayanan et al. 2021,
arXiv:2104.04473, sec. 3): tp innermost, then cp, dp, pp outermost. So what talks most lies closest: tensor and context
parallelism and the sums of gradients stay inside nodes as far as they can, and only stages lie far apart. An ep group
is `ep` neighbours of one stage. Costs, the Scheduler and the engines read this module; it knows no tensor.
"""

import math
from itertools import product
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.plan.layout import DeviceMesh, Layout

MeshAxis = Literal["tp", "cp", "dp", "pp"]
MESH_AXES: tuple[MeshAxis, ...] = ("tp", "cp", "dp", "pp")  # innermost first


class Coordinates(Struct, frozen=True, order=True):
    """A device's rank on each axis, from 0: stage `pp`, data-parallel rank `dp`, `cp` and `tp`."""

    pp: int
    dp: int
    cp: int
    tp: int


def coordinates_of(layout: Layout, device: int) -> Coordinates:
    """The inverse of `device_at`. Raises ValueError for a device outside the layout's mesh."""
    place = _place(layout, device)
    ranks = {axis: place // stride_of(layout, axis) % getattr(layout, axis) for axis in MESH_AXES}
    return Coordinates(**ranks)


def device_at(layout: Layout, at: Coordinates) -> int:
    """The device with these coordinates. Raises ValueError where an axis has no such rank."""
    for axis in MESH_AXES:
        if not 0 <= getattr(at, axis) < getattr(layout, axis):
            raise ValueError(f"{axis} {getattr(layout, axis)} has no rank {getattr(at, axis)}")
    return layout.mesh.first + sum(int(getattr(at, axis)) * stride_of(layout, axis) for axis in MESH_AXES)


def stride_of(layout: Layout, axis: MeshAxis) -> int:
    """Devices from one member of an axis's group to the next: tp 1, cp tp, dp tp x cp, pp a whole stage."""
    return math.prod(getattr(layout, inner) for inner in MESH_AXES[: MESH_AXES.index(axis)])


def stage_devices(layout: Layout, stage: int) -> range:
    """The devices of one pipeline stage, tp x cp x dp neighbours. Raises ValueError where there is no such stage."""
    if not 0 <= stage < layout.pp:
        raise ValueError(f"pp {layout.pp} has no stage {stage}")
    size = stride_of(layout, "pp")
    first = layout.mesh.first + stage * size
    return range(first, first + size)


def groups_of(layout: Layout, *axes: MeshAxis) -> tuple[tuple[int, ...], ...]:
    """The devices that differ in `axes` alone, ascending: prod(axes) in a group, groups in order of first members.

    Several axes make one group together: gradients of whole copies are summed over ("cp", "dp").
    """
    inside = [range(getattr(layout, axis)) if axis in axes else range(1) for axis in reversed(MESH_AXES)]
    outside = [range(1) if axis in axes else range(getattr(layout, axis)) for axis in reversed(MESH_AXES)]
    members = [device_at(layout, Coordinates(*ranks)) - layout.mesh.first for ranks in product(*inside)]
    firsts = [device_at(layout, Coordinates(*ranks)) for ranks in product(*outside)]
    return tuple(tuple(first + member for member in members) for first in sorted(firsts))


def expert_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The groups over which routed experts are spread: `ep` neighbours of one stage each, ascending.

    Raises ValueError where `ep` does not divide the devices of a stage.
    """
    size = stride_of(layout, "pp")
    if size % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide the {size} devices of a stage")
    firsts = range(layout.mesh.first, layout.mesh.first + layout.pp * size, layout.ep)
    return tuple(tuple(range(first, first + layout.ep)) for first in firsts)


def expert_copies(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The devices of one stage that hold the same routed experts where those are spread: over which gradients of
    experts are summed, and which FSDP shards them over. Each alone where `ep` is 1: experts then follow the other axes.
    """
    if layout.ep == 1:
        return tuple((device,) for device in layout.mesh.devices)
    size = stride_of(layout, "pp")
    stages = range(layout.mesh.first, layout.mesh.first + layout.pp * size, size)
    return tuple(tuple(range(stage + at, stage + size, layout.ep)) for stage in stages for at in range(layout.ep))


def expert_rank(layout: Layout, device: int) -> int:
    """A device's rank in its group of `expert_groups`."""
    return _place(layout, device) % stride_of(layout, "pp") % layout.ep


def head_worker(layout: Layout, rank: int) -> int:
    """The worker that owns the requests and outputs of a data-parallel rank: its last stage's tp 0, cp 0.

    Logits are made in the last stage, so outputs are where they are owned. On dp alone each worker is its rank's head.
    """
    return device_at(layout, Coordinates(pp=layout.pp - 1, dp=rank, cp=0, tp=0))


def is_head(layout: Layout, worker: int) -> bool:
    """True where a worker is the head of its data-parallel rank. Raises ValueError outside the layout's mesh."""
    return head_worker(layout, coordinates_of(layout, worker).dp) == worker


def rank_workers(layout: Layout, rank: int) -> tuple[int, ...]:
    """The tp x cp x pp workers of a data-parallel rank: its head worker first, the others ascending."""
    head = head_worker(layout, rank)
    size = stride_of(layout, "dp")
    firsts = [stage_devices(layout, stage).start + rank * size for stage in range(layout.pp)]
    return (head, *(worker for first in firsts for worker in range(first, first + size) if worker != head))


def session_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The workers that take every step of generation together, ascending: all of a data-parallel rank, and of those
    ranks that share experts with it."""
    inner = stride_of(layout, "dp")
    together = math.lcm(inner, layout.ep) // inner
    sessions = (range(first, first + together) for first in range(0, layout.dp, together))
    return tuple(tuple(sorted(w for rank in ranks for w in rank_workers(layout, rank))) for ranks in sessions)


def session_layout(layout: Layout) -> Layout:
    """The layout of one of `session_groups` by itself, whose workers are numbered from 0 in their order there."""
    n = len(session_groups(layout)[0])
    return replace(layout, mesh=DeviceMesh(0, n), dp=n * layout.dp // layout.mesh.n_devices)


def _place(layout: Layout, device: int) -> int:
    """A device's number in its mesh, from 0."""
    if device not in layout.mesh.devices:
        last = layout.mesh.first + layout.mesh.n_devices - 1
        raise ValueError(f"device {device} is none of the layout's, {layout.mesh.first} to {last}")
    return device - layout.mesh.first
