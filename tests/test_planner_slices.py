"""Slices that devices and nodes hold of a model, and those that two layouts share: against sets of pieces."""

import timeit
from fractions import Fraction
from itertools import pairwise, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.planner.costs.compute.slices import Runs, Weights, common_bytes, cuts_of, resident_bytes
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.meshes import family
from realgraph.planner.options.moves import Moves, Place, move_matrix
from realgraph.planner.options.pricing import PricedOption
from realgraph.planner.plan.axes import Coordinates, coordinates_of, expert_copies, expert_groups
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.problem import Move
from tests.planner_cases import cluster, grpo, request

WEIGHTS = (Weights(1e9, 0.0), Weights(1e9, 7e9))
NODE = 4  # devices
Interval = tuple[Fraction, Fraction]
Box = tuple[Interval, ...]


@st.composite
def layouts(draw: st.DrawFn, *, shards: bool = True) -> Layout:
    """On one to three nodes of four, or an aligned part of one."""
    n = draw(st.sampled_from((1, 2, 4, 8, 12)))
    first = draw(st.sampled_from(range(0, 12 - n + 1, min(n, NODE))))
    tp = draw(st.sampled_from([k for k in (1, 2, 3, 4, 8) if n % k == 0]))
    pp = draw(st.sampled_from([k for k in (1, 2, 3, 4, 6) if n // tp % k == 0]))
    cp = draw(st.sampled_from([k for k in (1, 2) if n // tp // pp % k == 0]))
    dp = n // tp // pp // cp
    ep = draw(st.sampled_from([k for k in (1, 2, 4) if dp % k == 0]))
    sharding: Literal["replicated", "fsdp"] = "fsdp" if shards and draw(st.booleans()) else "replicated"
    return Layout(DeviceMesh(first, n), dp=dp, tp=tp, pp=pp, ep=ep, cp=cp, sharding=sharding)


def interval(number: int, parts: int) -> Interval:
    return Fraction(number, parts), Fraction(number + 1, parts)


def boxes(layout: Layout, serves: bool) -> dict[int, tuple[Box, Box]]:
    """Each device's box of the dense weights and of the routed experts."""
    held: dict[int, tuple[Box, Box]] = {}
    expert = {device: group.index(device) for group in expert_groups(layout) for device in group}
    alike = {device: (group.index(device), len(group)) for group in expert_copies(layout) for device in group}
    for device in layout.mesh.devices:
        at: Coordinates = coordinates_of(layout, device)
        fsdp = layout.sharding == "fsdp"
        shard = interval(at.dp * layout.cp + at.cp, layout.dp * layout.cp) if fsdp else interval(0, 1)
        stage, part = interval(at.pp, layout.pp), interval(at.tp, layout.tp)
        whole = layout.ep > 1 and (layout.ep >= layout.tp or not serves)
        routed = (interval(expert[device], layout.ep), interval(0, 1)) if whole else (interval(0, 1), part)
        own = interval(*alike[device]) if fsdp and whole else shard
        held[device] = ((stage, part, shard), (stage, *routed, own))
    return held


def volume(held: list[Box], also: list[Box] | None = None) -> Fraction:
    """The volume of the union of boxes; also: of the part that lies in the union of these too. Cell by cell."""
    total = Fraction(0)
    edges = [sorted({edge for box in (*held, *(also or ())) for edge in box[axis]}) for axis in range(len(held[0]))]
    for cell in product(*(list(pairwise(axis)) for axis in edges)):
        inside = [
            any(all(low <= a and b <= high for (low, high), (a, b) in zip(box, cell, strict=True)) for box in many)
            for many in (held, held if also is None else also)
        ]
        if all(inside):
            size = Fraction(1)
            for a, b in cell:
                size *= b - a
            total += size
    return total


def counted(one: list[tuple[Box, Box]], other: list[tuple[Box, Box]] | None, weights: Weights) -> float:
    """Bytes that holders have together; other: of what these have too."""
    parts = []
    for kind, nbytes in enumerate((weights.dense, weights.routed)):
        also = None if other is None else [box[kind] for box in other]
        parts.append(nbytes * float(volume([box[kind] for box in one], also)) if also != [] else 0.0)
    return sum(parts)


def nodes_of(layout: Layout) -> Runs:
    length = min(layout.mesh.n_devices, NODE)
    return Runs(np.arange(0, layout.mesh.n_devices, length), length)


def devices_of(layout: Layout, offset: int = 0) -> Runs:
    return Runs(np.arange(layout.mesh.n_devices) + offset, 1)


def even(layout: Layout, runs: Runs) -> bool:
    """True where tp, ep and the shards of fsdp fill runs, or runs them."""
    stage = layout.dp * layout.tp * layout.cp if layout.sharding == "fsdp" else 1
    return all(runs.length % size == 0 or size % runs.length == 0 for size in (layout.tp, layout.ep, stage))


@settings(max_examples=200)
@given(layouts(), st.sampled_from(WEIGHTS), st.booleans())
def test_bytes_of_the_fullest_device_and_node_are_counted_slice_by_slice(
    layout: Layout, weights: Weights, serves: bool
) -> None:
    cuts, _ = cuts_of([layout], serves)
    held = boxes(layout, serves)
    first = layout.mesh.first
    for runs in (devices_of(layout), nodes_of(layout)):
        most = max(
            counted([held[first + start + i] for i in range(runs.length)], None, weights) for start in runs.starts
        )
        found = float(resident_bytes(cuts, runs, weights)[0])
        assert found >= most * (1 - 1e-9)
        if even(layout, runs):
            assert found == pytest.approx(most)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(layouts(), min_size=1, max_size=3), layouts(), st.sampled_from(WEIGHTS), st.booleans())
def test_what_two_layouts_have_in_common_is_counted_slice_by_slice(
    sources: list[Layout], target: Layout, weights: Weights, serves: bool
) -> None:
    """Exact on devices; on nodes never more than there is, and exact where stages lie on whole nodes alike. Where both
    are cut into shards it is a lower bound."""
    mesh = sources[0].mesh
    sources = [one for one in sources if one.mesh == mesh]
    if not (mesh.first <= target.mesh.first and target.mesh.devices.stop <= mesh.devices.stop):
        target = sources[-1]
    cuts, number = cuts_of(sources, serves)
    wanted, _ = cuts_of([target], serves)
    offset = target.mesh.first - mesh.first
    runs = devices_of(target, offset), devices_of(target)
    on_device = common_bytes(cuts, wanted, runs, weights)[number, 0]
    there = boxes(target, serves)
    for source, found in zip(sources, on_device, strict=True):
        have = boxes(source, serves)
        least = min(counted([there[device]], [have[device]], weights) for device in target.mesh.devices)
        spread = any(one.sharding == "fsdp" and one.ep > 1 for one in (source, target))
        if not spread and (source.sharding, target.sharding) != ("fsdp", "fsdp"):
            assert found == pytest.approx(least, abs=1e-3)
        assert found <= least * (1 + 1e-9) + 1e-3
    nodes = nodes_of(target)
    near = nodes_of(sources[0])
    first = offset // near.length
    runs = Runs(near.starts[first : first + len(nodes.starts)], near.length), nodes
    on_node = common_bytes(cuts, wanted, runs, weights)[number, 0]
    for source, found in zip(sources, on_node, strict=True):
        have = boxes(source, serves)
        least = min(
            counted(
                [there[target.mesh.first + start + i] for i in range(nodes.length)],
                [have[mesh.first + begin + i] for i in range(near.length)],
                weights,
            )
            for start, begin in zip(nodes.starts, runs[0].starts, strict=True)
        )
        assert found <= least * (1 + 1e-9) + 1e-3
        plain = "fsdp" not in (source.sharding, target.sharding)
        if plain and even(source, near) and even(target, nodes):
            assert found == pytest.approx(least, abs=1e-3)


def test_places_alike_have_equal_moves() -> None:
    """The search computes the moves of one pair of meshes for all pairs that lie to each other and to nodes alike."""
    asked = request(grpo(), "Qwen/Qwen3-1.7B", cluster(nodes=3))
    meshes = [mesh for mesh in family(asked.cluster).meshes if mesh.n_devices >= 2]
    moves, options = Moves(asked, [(mesh, 0) for mesh in meshes]), dict[str, dict[int, list[PricedOption]]]()
    for call in ("rollout", "train"):
        options[call] = {}
        for i, mesh in enumerate(meshes):
            ways = {(c.layout, c.residency): c for c in candidates(asked, call, mesh, asked.cluster)}
            options[call][i] = [PricedOption(way, 1.0, 1.0, (0, 0, 0)) for way in ways.values()]
        moves.add(call, options[call])
    zero = 0
    for i, j in product(range(len(meshes)), repeat=2):
        source, target = (Place(meshes[k], 0, options[call][k]) for k, call in ((i, "train"), (j, "rollout")))
        alone = move_matrix(asked, "rollout", source, target)
        assert np.array_equal(moves.seconds(Move("train", "rollout", 1), i, j), alone)
        zero += int((alone == 0).sum())
    assert zero > 0


def test_a_large_cluster_takes_no_longer_than_a_search_can_bear() -> None:
    """About sixty layouts each way, of experts, on 4,096 devices."""
    mesh = DeviceMesh(0, 4096)
    many = [
        Layout(mesh, dp=4096 // tp // pp, tp=tp, pp=pp, ep=ep)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8, 16)
        for ep in (1, 8, 64)
    ]
    source, target = cuts_of(many, serves=False)[0], cuts_of(many, serves=True)[0]
    for runs in (devices_of(many[0]), Runs(np.arange(0, 4096, 8), 8)):

        def both(runs: Runs = runs) -> object:
            return common_bytes(source, target, (runs, runs), WEIGHTS[1])

        assert min(timeit.repeat(both, number=1, repeat=3)) < 0.5
