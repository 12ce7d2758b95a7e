"""The part of every tensor that each of its holders writes: all elements once, the holders with about as many each.

A pure function of the boxes that lie on the workers, so that all know their shares without a message. Knows no torch,
no layout and no file.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from realgraph.runtime.parallel.cuts import Box, whole_boxes
from realgraph.runtime.parallel.routes import Holdings, cells_by_tensors, cut_to

DIVIDED = 1 << 16  # elements: a part with fewer has one writer

Shares = Mapping[int, Mapping[str, tuple[Box, ...]]]  # worker -> tensor -> the boxes that it writes
_FILES = -1  # the receiver, beside the workers


def shares(holdings: Holdings, shapes: Mapping[str, tuple[int, ...]], apart: Collection[int] = ()) -> Shares:
    """Each worker's boxes of the tensors, of those that it holds. shapes: of the whole tensors. apart: workers that
    write what no other holds, and nothing else.

    Raises Gap with a part that no worker holds.
    """
    wanted = {_FILES: whole_boxes(shapes)}
    found: dict[int, dict[str, list[Box]]] = {worker: {} for worker in holdings}
    written: defaultdict[int, int] = defaultdict(int)  # elements, by worker
    for tensors, cells in cells_by_tensors(holdings, wanted):
        able = [(cell.box, [one for one in cell.holders if one not in apart] or cell.holders) for cell in cells]
        parts = [(writers, part) for box, writers in able for part in _parts(box, len(writers))]
        for tensor in tensors:
            for writers, part in parts:
                writer = min(writers, key=written.__getitem__)
                written[writer] += part.numel
                found[writer].setdefault(tensor, []).append(part)
    return {worker: {name: tuple(boxes) for name, boxes in mine.items()} for worker, mine in found.items()}


def _parts(box: Box, n_writers: int) -> Iterator[Box]:
    """A large box in one part for each of its writers, about; a small one whole."""
    return cut_to(box, max(DIVIDED, math.ceil(box.numel / n_writers)))
