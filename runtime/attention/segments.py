"""The places of the samples of a packed row, and the rectangles in which attention takes them. Knows no model, no
kernel.

A rectangle's row is a sample; or, where samples of a group have most of their tokens in common, the group's whole
prefix tree, each token of it once, under a mask by which a token sees what it follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.attention.sharing import Shared

MAX_PADDED_RATIO = (
    1.25  # padded / real tokens of a bucket: above this, one more kernel call costs less than the padding
)
MAX_TREE_SCORE_ENTRIES = 1 << 22  # entries of all trees' masks: what a pass may hold of them

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Slots:
    """Rectangles laid end to end. buckets: (rows, width) each. fill: [P] the run token of every slot (a padding slot
    repeats its row's last token). back: [U] a slot of every run token. again: [copies] and [copies], the other slots
    of shared tokens, and those tokens. ago: of each rectangle [rows, width, width], by how many tokens a query follows
    a key, -1 where it does not; () where a row is a sample, in order."""

    buckets: tuple[tuple[int, int], ...]
    fill: Ints
    back: Ints
    again: tuple[Ints, Ints]
    ago: tuple[Ints, ...] = ()


class Segments:
    """The samples of a packed row, and how they are bucketed for a kernel that wants rectangles.

    lengths: N ints, each at least 1, that sum to T. offsets: [N + 1] int32. buckets: (rows, width) of each rectangle.
    fill: [P] int64, the run token of every slot of all rectangles, laid end to end (a padding slot repeats its row's
    last token); back: [U] int64, a slot of every run token. Both are None where P slots are the U tokens. Where
    prefixes are `shared`, the row that is run holds the kept tokens only, and `again` names the slots of the copies
    and the run tokens ([copies] int64 each) that they stand for. Where rows are trees, `visible` has their masks.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, shared: Shared | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError("a packed row needs at least one sample, and every sample at least one token")
        self.lengths = tuple(lengths)
        self.longest = max(lengths)
        self.n_tokens = sum(lengths)
        self.shared = shared
        ends = np.cumsum(self.lengths)
        self.offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device)
        needed = np.array(self.lengths if shared is None else shared.needed)
        place = np.arange(self.n_tokens) if shared is None else shared.place.numpy()
        tokens = _tokens(ends - np.array(self.lengths), needed)
        slots = _rows(needed, place[tokens], self.n_rows)
        if shared is not None and shared.groups:
            trees = _trees(needed, place[tokens], np.array(shared.groups), self.n_rows)
            slots = slots if trees is None or _scores(trees) > min(_scores(slots), MAX_TREE_SCORE_ENTRIES) else trees
        self.buckets = slots.buckets
        self.fill: Tensor | None = None
        self.back: Tensor | None = None
        self.again: tuple[Tensor, Tensor] | None = None
        if not np.array_equal(slots.fill, np.arange(self.n_rows)):
            self.fill, self.back = torch.from_numpy(slots.fill).to(device), torch.from_numpy(slots.back).to(device)
        if len(slots.again[0]):
            self.again = torch.from_numpy(slots.again[0]).to(device), torch.from_numpy(slots.again[1]).to(device)
        self._ago = tuple(torch.from_numpy(ago).to(device) for ago in slots.ago)
        self._visible: dict[int | None, tuple[Tensor, ...]] = {}

    @property
    def n_rows(self) -> int:
        """Tokens that are run: fewer than `n_tokens` where some are shared or not needed."""
        return self.n_tokens if self.shared is None else len(self.shared.kept)

    @property
    def run(self) -> Tensor | None:
        """[n_rows] int64, the packed positions of the tokens that are run; None where that is all, in order."""
        return None if self.shared is None else self.shared.kept

    def visible(self, window: int | None) -> tuple[Tensor | None, ...]:
        """Masks of the rectangles: of each whose rows are trees [rows, 1, width, width] bool, whether a query sees a
        key; else None. window: tokens seen at most, the own included."""
        if not self._ago:
            return (None,) * len(self.buckets)
        if window not in self._visible:
            self._visible[window] = tuple(
                ((ago >= 0) if window is None else (ago >= 0) & (ago < window))[:, None] for ago in self._ago
            )
        return self._visible[window]


def _scores(slots: _Slots) -> int:
    return sum(rows * width * width for rows, width in slots.buckets)


def _tokens(starts: Ints, needed: Ints) -> Ints:
    """[M] packed positions of the first `needed` tokens of each sample, sample by sample."""
    return np.repeat(starts - (np.cumsum(needed) - needed), needed) + np.arange(needed.sum())


def _bucket(sizes: Ints) -> list[Ints]:
    """Rows of about one size together, in the given order where that costs nothing."""
    if sizes.max() == sizes.min():
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    buckets: list[Ints] = []
    first = 0
    for at, size in enumerate(sizes[order].tolist()):
        if size * MAX_PADDED_RATIO < sizes[order[first]]:
            buckets.append(order[first:at])
            first = at
    return [*buckets, order[first:]]


def _rectangles(sizes: Ints) -> tuple[tuple[tuple[int, int], ...], Ints, Ints, Ints]:
    """Rows of the given sizes in buckets: (rows, width) of each bucket; [P] the place of each slot's token in the
    rows laid end to end (a padding slot takes its row's last); [sum of sizes] the slot of each token; and the bucket
    of each row."""
    begins = np.cumsum(sizes) - sizes
    slot_of = np.empty(sizes.sum(), np.int64)
    bucket_of = np.empty(len(sizes), np.int64)
    shapes, pieces, n_slots = [], [], 0
    for number, rows in enumerate(_bucket(sizes)):
        width = int(sizes[rows].max())
        step, last = np.arange(width), sizes[rows, None] - 1
        taken = begins[rows, None] + np.minimum(step, last)
        real = step <= last
        slot_of[taken[real]] = (n_slots + np.arange(len(rows) * width).reshape(len(rows), width))[real]
        bucket_of[rows] = number
        pieces.append(taken.reshape(-1))
        shapes.append((len(rows), width))
        n_slots += len(rows) * width
    return tuple(shapes), np.concatenate(pieces), slot_of, bucket_of


def _laid(rows: Ints, taken: Ints, slot_of: Ints, n_run: int) -> tuple[Ints, Ints, tuple[Ints, Ints]]:
    """(fill, back, again) of `_Slots`. rows: [M] the run token of each token of the rows laid end to end."""
    back = np.empty(n_run, np.int64)
    back[rows[::-1]] = slot_of[::-1]  # the first of several copies
    copies = back[rows] != slot_of
    return rows[taken], back, (slot_of[copies], rows[copies])


def _rows(needed: Ints, place: Ints, n_run: int) -> _Slots:
    """A row for each sample. place: [M] the run token of each needed token, sample by sample."""
    shapes, taken, slot_of, _ = _rectangles(needed)
    return _Slots(shapes, *_laid(place, taken, slot_of, n_run))


def _trees(needed: Ints, place: Ints, groups: Ints, n_run: int) -> _Slots | None:
    """A row for each group, with every token of its samples once; None where no group shares anything."""
    _, group = np.unique(groups, return_inverse=True)
    keys = np.repeat(group, needed) * n_run + place
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return None
    sizes = np.bincount(distinct // n_run, minlength=int(group.max()) + 1)
    shapes, taken, slot_of, bucket_of = _rectangles(sizes)
    fill, back, again = _laid(distinct % n_run, taken, slot_of, n_run)
    slots = _Slots(shapes, fill, back, again)
    if _scores(slots) > MAX_TREE_SCORE_ENTRIES:
        return slots  # too much to be of use, and to be made
    depth = (_tokens(np.zeros(len(needed), np.int64), needed))[first]  # of each token in its samples
    # every token with each that it follows, itself included: those stand before it in its sample
    n_seen = depth + 1
    query = np.repeat(np.arange(len(distinct)), n_seen)
    ago = _tokens(np.zeros(len(n_seen), np.int64), n_seen)
    key = inverse[first[query] - ago]
    ends = np.cumsum([rows * width for rows, width in shapes])
    of = bucket_of[(distinct // n_run)[query]]
    masks = []
    for number, (rows, width) in enumerate(shapes):
        q, k, steps = (x[of == number] for x in (slot_of[query], slot_of[key], ago))
        begin = ends[number] - rows * width
        mask = np.full((rows * width, width), -1, np.int64)
        mask[q - begin, (k - begin) % width] = steps
        real = slot_of[taken[begin : begin + rows * width]] - begin  # a padding slot sees what its token does
        masks.append(mask[real].reshape(rows, width, width))
    return _Slots(shapes, fill, back, again, tuple(masks))
