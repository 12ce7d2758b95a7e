"""The slices of a model that devices and nodes hold under a layout, and what of them two layouts have in common.

Every tensor is cut evenly over pp stages and tp parts; routed experts over groups of whole experts or over parts of
each (`memory.trained_expert_ranks`, `served_expert_ranks`), and under fsdp each slice over the devices that have it:
the dp x cp copies, of experts that are spread those in other groups of ep. So a device holds a box of the model, an
interval on every axis, which follows from its coordinates (`plan/axes.py`), and neighbours on one node hold a box too.
Two boxes have the product of their overlaps in common, and the worst device that least. Where stages overlap alike on
all devices, or are whole multiples of the patterns within them, so that every pattern occurs in every stage, the least
product is the product of the least; else all devices are looked at. Arrays over layouts.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.axes import stride_of
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.problem import Bools, Floats, Ints

EQUAL = 1e-9  # share of a model: what rounding leaves, below any tensor


class Cuts(Struct, frozen=True, eq=False):
    """Different ways to cut a model over one mesh: arrays [cuts] of the number of parts on each axis."""

    devices: int  # of the mesh
    stages: Ints
    parts: Ints  # of what is no routed expert, on neighbours
    groups: Ints  # of whole experts, on neighbours
    expert_parts: Ints  # of each expert, on neighbours
    shards: Ints  # of each slice that is no routed expert's under fsdp, else 1
    expert_shards: Ints  # the same of routed experts

    @property
    def table(self) -> Ints:
        """[cuts, axes]: equal rows hold equal slices on each device."""
        return np.stack(
            [self.stages, self.parts, self.groups, self.expert_parts, self.shards, self.expert_shards], axis=1
        )


class Runs(Struct, frozen=True, eq=False):
    """Devices of a mesh that hold slices together, `length` neighbours from each of `starts`, in the mesh's numbers."""

    starts: Ints
    length: int


class Weights(Struct, frozen=True):
    """Bytes of a whole model."""

    dense: float  # all but routed experts
    routed: float


def cuts_of(layouts: Sequence[Layout], serves: bool) -> tuple[Cuts, Ints]:
    """The different cuts of layouts on one mesh, and each layout's number among them. serves: in an engine that
    generates, which cuts experts over tp where that is more than ep, else one that trains or scores."""
    rows = [_row(layout, serves) for layout in layouts]
    number = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    table = np.array(list(number), dtype=np.int64)
    return Cuts(layouts[0].mesh.n_devices, *table.T), np.array([number[row] for row in rows], dtype=np.int64)


def _row(layout: Layout, serves: bool) -> tuple[int, int, int, int, int, int]:
    whole = layout.ep > 1 and not (serves and layout.ep < layout.tp)  # experts lie whole on devices
    groups, expert_parts = (layout.ep, 1) if whole else (1, layout.tp)
    devices = stride_of(layout, "pp") if layout.sharding == "fsdp" else 0  # of a stage, which share all its weights
    shards, expert_shards = max(1, devices // layout.tp), max(1, devices // (groups * expert_parts))
    return layout.pp, layout.tp, groups, expert_parts, shards, expert_shards


def resident_bytes(cuts: Cuts, runs: Runs, weights: Weights) -> Floats:
    """[cuts]: bytes of the different slices on the fullest run; of runs that are not even, all of their stages."""
    size = cuts.devices // cuts.stages[:, None]
    stages = (runs.starts + runs.length - 1) // size - runs.starts // size + 1
    inner = weights.dense * _share_of(cuts.parts, runs.length) * _shards(cuts, runs.length)
    experts = _share_of(cuts.groups, runs.length) * _share_of(cuts.expert_parts, runs.length)
    inner = inner + weights.routed * experts * _shards(cuts, runs.length, routed=True)
    inner = np.where(_even(cuts, runs.length), inner, weights.dense + weights.routed)
    return np.asarray(stages.max(axis=1) / cuts.stages * inner)


def _even(cuts: Cuts, length: int) -> Bools:
    """[cuts]: whether runs from multiples of their length have whole patterns of a stage, or even parts of one.

    Those of nodes have, but where tp is more than a node's devices and no multiple, or fsdp's stages end inside nodes.
    """
    size = cuts.devices // cuts.stages
    axes = (cuts.parts, cuts.groups, cuts.expert_parts, np.where((cuts.shards > 1) | (cuts.expert_shards > 1), size, 1))
    even: Bools = np.logical_and.reduce([(axis % length == 0) | (length % axis == 0) for axis in axes])
    return even


def _share_of(parts: Ints, length: int) -> Floats:
    return np.minimum(1.0, length / parts)


def _shards(cuts: Cuts, length: int, *, routed: bool = False) -> Floats:
    """[cuts]: share of the shards of its slices that a run holds."""
    parts, shards = cuts.parts, cuts.shards
    if routed:
        parts, shards = cuts.groups * cuts.expert_parts, cuts.expert_shards
    return np.minimum(1.0, np.maximum(1, length // parts) / shards)


def common_bytes(source: Cuts, target: Cuts, runs: tuple[Runs, Runs], weights: Weights) -> Floats:
    """[cuts of source, cuts of target]: bytes that a run of the source holds of the target's slices on the run of the
    same number, where that is least. Nothing of two different cuts into shards where no run has all, and of runs that
    are not even. Where experts have other shards than the rest, the least of each, wherever that is."""
    common = _common(source, target, runs, weights)
    apart = (source.shards != source.expert_shards)[:, None] | (target.shards != target.expert_shards)[None]
    if weights.routed and apart.any():
        dense, routed = Weights(weights.dense, 0.0), Weights(0.0, weights.routed)
        both = _common(source, target, runs, dense) + _common(source, target, runs, routed)
        common = np.where(apart, both, common)
    return common


def _common(source: Cuts, target: Cuts, runs: tuple[Runs, Runs], weights: Weights) -> Floats:
    """The same where all weights have as many shards, those of routed experts where there are no others."""
    here, there = runs
    kind = weights.dense == 0
    shards = _shards(source, here.length, routed=kind)[:, None], _shards(target, there.length, routed=kind)[None, :]
    shared = np.where(np.maximum(*shards) >= 1, shards[0] * shards[1], 0.0)
    stages, varied = _least_stages(source, target, runs)
    common = stages * _least_inner(source, target, runs, weights)
    i, j = np.nonzero(varied)
    period = np.lcm(_period(source, here.length)[i], _period(target, there.length)[j])
    size = np.gcd((source.devices // source.stages)[i], (target.devices // target.stages)[j])
    mixed = np.gcd(size, int(here.starts[0] - there.starts[0])) % period != 0
    i, j = i[mixed], j[mixed]
    if len(i):
        common[i, j] = _least_of_pairs((source, i), (target, j), runs, weights)
    return np.asarray(common * shared * (_even(source, here.length)[:, None] & _even(target, there.length)))


def _chosen(cuts: Cuts, numbers: Ints) -> Cuts:
    """The cuts with these numbers."""
    return Cuts(cuts.devices, *cuts.table[numbers].T)


def _period(cuts: Cuts, length: int) -> Ints:
    """[cuts]: devices after which the slices of runs within one stage repeat."""
    axes = (cuts.parts, cuts.groups, cuts.expert_parts)
    repeats: Ints = np.lcm.reduce([np.where(axis <= length, 1, axis) for axis in axes])
    return repeats


def _least_stages(source: Cuts, target: Cuts, runs: tuple[Runs, Runs]) -> tuple[Floats, Bools]:
    """[cuts of source, cuts of target]: the least overlap of stages, and whether there is some everywhere, here more
    than there. Else the least product is the product of the least, whatever patterns lie within stages."""
    (ours, i), (theirs, j) = (np.unique(cuts.stages, return_inverse=True) for cuts in (source, target))
    one = _stages(ours, source.devices, runs[0])
    other = _stages(theirs, target.devices, runs[1])
    overlaps = _overlap((one[0][:, None], one[1][:, None]), (other[0][None], other[1][None]))
    least, most = overlaps.min(axis=-1), overlaps.max(axis=-1)
    varied = (least > EQUAL) & (most > least * (1 + EQUAL))
    both = np.ix_(i.reshape(-1), j.reshape(-1))
    return least[both], varied[both]


def _least_inner(source: Cuts, target: Cuts, runs: tuple[Runs, Runs], weights: Weights) -> Floats:
    """[cuts of source, cuts of target]: the least bytes in common of a whole stage, shards aside."""
    (ours, i), (theirs, j) = (_inner(cuts, weights) for cuts in (source, target))
    here, there = runs
    period = int(np.lcm.reduce([*_period(ours, here.length), *_period(theirs, there.length), there.length]))
    n = max(1, np.searchsorted(there.starts - there.starts[0], period))
    near, far = Runs(here.starts[:n], here.length), Runs(there.starts[:n], there.length)
    pairs = np.indices((len(ours.parts), len(theirs.parts))).reshape(2, -1)
    shared = _inner_overlap(_chosen(ours, pairs[0]), _chosen(theirs, pairs[1]), (near, far), weights).min(axis=-1)
    least: Floats = shared.reshape(len(ours.parts), -1)[np.ix_(i, j)]
    return least


def _inner(cuts: Cuts, weights: Weights) -> tuple[Cuts, Ints]:
    """The different cuts of a stage, and the number of each cut among them; of experts only where there are any."""
    key = cuts.parts
    if weights.routed:
        key = (key << 40) + (cuts.groups << 20) + cuts.expert_parts
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return _chosen(cuts, first), number.reshape(-1)


def _least_of_pairs(
    source: tuple[Cuts, Ints], target: tuple[Cuts, Ints], runs: tuple[Runs, Runs], weights: Weights
) -> Floats:
    """[pairs]: the least of the whole product over all runs, shards aside. source, target: cuts, and the number of one
    of them in each pair."""
    rows = [cuts.table[:, :4][numbers] for cuts, numbers in (source, target)]  # shards aside
    pairs, number = np.unique(np.concatenate(rows, axis=1), axis=0, return_inverse=True)
    whole = np.ones((len(pairs), 2), dtype=np.int64)  # of shards
    one = Cuts(source[0].devices, *np.concatenate([pairs[:, :4], whole], axis=1).T)
    other = Cuts(target[0].devices, *np.concatenate([pairs[:, 4:], whole], axis=1).T)
    stages = _overlap(_stages(one.stages, one.devices, runs[0]), _stages(other.stages, other.devices, runs[1]))
    least = (stages * _inner_overlap(one, other, runs, weights)).min(axis=-1)
    return np.asarray(least[number.reshape(-1)])


def _inner_overlap(source: Cuts, target: Cuts, runs: tuple[Runs, Runs], weights: Weights) -> Floats:
    """[pairs, runs]: bytes in common of a whole stage, shards aside."""
    here, there = runs

    def along(one: Ints, other: Ints) -> Floats:
        return _overlap(_slices(one, here), _slices(other, there))

    common = weights.dense * along(source.parts, target.parts)
    if weights.routed:
        experts = along(source.groups, target.groups) * along(source.expert_parts, target.expert_parts)
        common = common + weights.routed * experts
    return common


Interval = tuple[Floats, Floats]  # from, to: shares of an axis


def _stages(stages: Ints, devices: int, runs: Runs) -> Interval:
    """[cuts, runs]: the layers of each run's stages."""
    size = devices // stages[:, None]
    first, last = runs.starts // size, (runs.starts + runs.length - 1) // size
    return first / stages[:, None], (last + 1) / stages[:, None]


def _slices(parts: Ints, runs: Runs) -> Interval:
    """[cuts, runs]: the parts of each run, which lie on neighbours in turn; of a run past the last part those up to
    it."""
    count = parts[:, None]
    first = np.where(count <= runs.length, 0, runs.starts % count)
    return first / count, np.minimum(first + runs.length, count) / count


def _overlap(one: Interval, other: Interval) -> Floats:
    shared: Floats = np.maximum(0.0, np.minimum(one[1], other[1]) - np.maximum(one[0], other[0]))
    return shared
