"""Messages of a reallocation: which part of which tensor goes from which worker to which, and in which order.

Every worker derives the same rounds from the same boxes, so that nothing is agreed on over the wire. Bytes are the
least there can be: a worker receives what it lacks once, and each element comes to a host once, where the worker that
took it in hands it on. Knows no torch, dtype or layout.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product, zip_longest
from typing import NamedTuple

from realgraph.runtime.parallel.cuts import Box

PIECES_PER_BUCKET = 4  # at least: small ones fill it better and balance senders, and take longer to plan and to send
BUCKETS_PER_HOLDER = 4  # of a cell that is cut into pieces of a whole bucket: so large that senders are balanced anyway
FULL = 7 / 8  # of a bucket: what is left of it waits for no further piece
WINDOW = 16  # rounds, up to a worker's last one, that a further piece may go into

Holdings = Mapping[int, Mapping[str, Box]]  # worker -> tensor -> the box of it that lies there
_Pattern = tuple[tuple[tuple[int, Box], ...], tuple[tuple[int, Box], ...]]  # (worker, box) of source and target


class Piece(NamedTuple):
    """The same box of some tensors."""

    tensors: tuple[str, ...]
    box: Box

    @property
    def numel(self) -> int:
        return len(self.tensors) * self.box.numel


class Message(NamedTuple):
    """Pieces that go as one flat buffer, one behind the other, from a worker to each of the receivers."""

    sender: int
    receivers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


class Cell(NamedTuple):
    """A part of a tensor that workers hold, and lack, as a whole."""

    box: Box
    holders: tuple[int, ...]
    lacking: tuple[int, ...]


class Gap(ValueError):
    """A part of a tensor lies on no worker that sends."""


def rounds(
    source: Holdings, target: Holdings, hosts: Sequence[int], element_bytes: int, bucket_bytes: int
) -> tuple[tuple[Message, ...], ...]:
    """The messages that fill every box of `target` from those of `source`, in rounds.

    hosts: the host of each worker. element_bytes: of an element as it is sent, in the target's dtype. In a round a
    worker receives `bucket_bytes` at most, and packs as many at most; what it hands on has come in a round before, and
    with what it keeps for that, both rounds included, it has twice as many at most.
    Raises Gap where no worker holds what one lacks.
    """
    most = bucket_bytes // element_bytes
    if most < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds no element of {element_bytes}")
    timetable = _Timetable(most)
    sent: defaultdict[int, int] = defaultdict(int)
    cells = [(tensors, cell) for tensors, found in cells_by_tensors(source, target) for cell in found]
    for in_turn in zip_longest(*(_pieces(*each, most) for each in cells)):  # so that all holders send at a time
        for (_, cell), piece in zip(cells, in_turn, strict=True):
            if piece is not None:
                for hops in _hops(cell, hosts, sent, piece.numel):
                    timetable.add(piece, hops)
    return timetable.rounds()


def handed_on(found: Iterable[Iterable[Message]], by: Container[int]) -> tuple[int, ...]:
    """Those, ascending, that get any of the messages from one of the workers `by`."""
    return tuple(sorted({r for messages in found for m in messages if m.sender in by for r in m.receivers}))


# --- cells ------------------------------------------------------------------------------------------------------------


def cells_by_tensors(source: Holdings, target: Holdings) -> Iterator[tuple[tuple[str, ...], tuple[Cell, ...]]]:
    """Tensors of the target that lie in equal boxes on all workers, and the cells of one of them."""
    holders, alike = _by_tensor(source), defaultdict[_Pattern, list[str]](list)
    for tensor, boxes in _by_tensor(target).items():
        alike[tuple(holders.get(tensor, ())), tuple(boxes)].append(tensor)
    for pattern, tensors in alike.items():
        try:
            yield tuple(tensors), tuple(_cells(*pattern))
        except Gap as error:
            raise Gap(f"no worker holds {error} of {tensors[0]!r}") from None


def _by_tensor(holdings: Holdings) -> dict[str, list[tuple[int, Box]]]:
    """tensor -> (worker, box) in the order of workers; tensors in the order in which the first of those holds them."""
    holders: dict[str, list[tuple[int, Box]]] = {}
    for worker in sorted(holdings):
        for tensor, box in holdings[worker].items():
            holders.setdefault(tensor, []).append((worker, box))
    return holders


def _cells(source: Iterable[tuple[int, Box]], target: Iterable[tuple[int, Box]]) -> Iterator[Cell]:
    """The cells, between the edges of all boxes, that a worker of the target lacks. Raises Gap with a cell's place."""
    holding, wanting = _by_box(source), _by_box(target)
    n_dims = len(next(iter(wanting)).start)
    edges = [sorted({edge for box in (*holding, *wanting) for edge in _ends(box, dim)}) for dim in range(n_dims)]
    holders, wanted = _covered(holding, edges), _covered(wanting, edges)
    for place in sorted(wanted):
        here = holders.get(place, ())
        lacking = tuple(sorted(set(wanted[place]).difference(here)))
        if not lacking:
            continue
        start = tuple(edges[dim][i] for dim, i in enumerate(place))
        ends = tuple(edges[dim][i + 1] for dim, i in enumerate(place))
        if not here:
            raise Gap(f"[{', '.join(f'{first}:{end}' for first, end in zip(start, ends, strict=True))}]")
        shape = tuple(end - first for first, end in zip(start, ends, strict=True))
        yield Cell(Box(start, shape), tuple(sorted(here)), lacking)


def _by_box(boxes: Iterable[tuple[int, Box]]) -> dict[Box, list[int]]:
    workers: dict[Box, list[int]] = {}
    for worker, box in boxes:
        workers.setdefault(box, []).append(worker)
    return workers


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.start[dim], box.start[dim] + box.shape[dim]


def _covered(boxes: Mapping[Box, Sequence[int]], edges: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Place of a cell (index between the edges of each dim) -> the workers whose boxes cover it."""
    sizes: dict[tuple[int, ...], list[int]] = {}
    for box, workers in boxes.items():
        spans = (
            range(bisect_left(edges[dim], first), bisect_left(edges[dim], end))
            for dim in range(len(edges))
            for first, end in (_ends(box, dim),)
        )
        for place in product(*spans):
            sizes.setdefault(place, []).extend(workers)
    return sizes


def _pieces(tensors: Sequence[str], cell: Cell, most: int) -> Iterator[Piece]:
    """The cell of all tensors, in pieces that leave room for others in a bucket, if it is not large; one for each
    holder, if it can be."""
    large = cell.box.numel >= BUCKETS_PER_HOLDER * len(cell.holders) * most
    size = most if large else max(1, most // PIECES_PER_BUCKET)
    together = max(1, min(size // cell.box.numel, math.ceil(len(tensors) / len(cell.holders))))
    for box in cut_to(cell.box, size):
        for i in range(0, len(tensors), together):
            yield Piece(tuple(tensors[i : i + together]), box)


def cut_to(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements: rows together where they fit, else each cut in the dims behind."""
    if box.numel <= most:
        yield box
        return
    dim = next(i for i, n in enumerate(box.shape) if n > 1)
    rows = max(1, most * box.shape[dim] // box.numel)
    bounds = [*range(0, box.shape[dim], rows), box.shape[dim]]
    for first, end in pairwise(bounds):
        start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
        yield from cut_to(Box(start, (*box.shape[:dim], end - first, *box.shape[dim + 1 :])), most)


# --- who sends, and when ----------------------------------------------------------------------------------------------

_Hop = tuple[int, tuple[int, ...]]  # sender, receivers
_End = tuple[int, bool]  # a worker, True where it sends


def _hops(cell: Cell, hosts: Sequence[int], sent: defaultdict[int, int], numel: int) -> Iterator[tuple[_Hop, ...]]:
    """The way of a piece of a cell to all that lack it: hops in a row, for each sender or host one chain.

    The sender is the least loaded of those that have the piece: on the receivers' host where there are such, else
    anywhere, for one receiver, which hands it on. `sent`, elements by worker, counts along.
    """
    by_host: dict[int, list[int]] = {}
    for worker in cell.lacking:
        by_host.setdefault(hosts[worker], []).append(worker)
    for host, lacking in by_host.items():
        near = [worker for worker in cell.holders if hosts[worker] == host]
        if near:
            receivers: dict[int, list[int]] = {}
            for worker in lacking:
                sender = min(near, key=sent.__getitem__)
                sent[sender] += numel
                receivers.setdefault(sender, []).append(worker)
            for sender, those in receivers.items():
                yield ((sender, tuple(those)),)
            continue
        sender, first = min(cell.holders, key=sent.__getitem__), min(lacking, key=sent.__getitem__)
        rest = tuple(worker for worker in lacking if worker != first)
        sent[sender] += numel
        sent[first] += numel * len(rest)
        yield ((sender, (first,)), (first, rest)) if rest else ((sender, (first,)),)


class _Timetable:
    """Rounds as they fill: each hop into the first that has room for it at both ends, and where it is handed on, so
    that there is room to keep it until then."""

    def __init__(self, most: int) -> None:
        self._most = most  # elements that a worker receives, and sends, in a round; twice as many with those it keeps
        self._rounds: list[dict[_Hop, list[Piece]]] = []
        self._used: defaultdict[_End, list[int]] = defaultdict(list)  # elements in each round
        self._open: defaultdict[_End, int] = defaultdict(int)  # the first round that is worth a look
        self._kept: defaultdict[int, list[int]] = defaultdict(list)  # by worker, in each round: to be handed on
        self._spare: defaultdict[int, int] = defaultdict(int)  # the first round that is worth a look to keep more in

    def add(self, piece: Piece, hops: Sequence[_Hop]) -> None:
        """Put a piece's hops into rounds, each behind the one before."""
        numbers = self._free(piece.numel, hops, max((self._spare[worker] for worker, _ in hops[1:]), default=0))
        while (full := self._first_full(piece.numel, hops, numbers)) is not None:
            numbers = self._free(piece.numel, hops, full + 1)
        for number, hop in zip(numbers, hops, strict=True):
            for end in _ends_of(hop):
                used = self._used[end]
                _count(used, number, piece.numel)
                first = max(self._open[end], len(used) - WINDOW)
                while first < len(used) and used[first] > FULL * self._most:
                    first += 1
                self._open[end] = first
            self._rounds.extend({} for _ in range(number + 1 - len(self._rounds)))
            self._rounds[number].setdefault(hop, []).append(piece)
        for (come, gone), (worker, _) in zip(pairwise(numbers), hops[1:], strict=True):
            kept = self._kept[worker]
            for number in range(come, gone + 1):
                _count(kept, number, piece.numel)
            first = max(self._spare[worker], len(kept) - WINDOW)
            while first < len(kept) and self._load(worker, first) > FULL * 2 * self._most:
                first += 1
            self._spare[worker] = first

    def _free(self, numel: int, hops: Sequence[_Hop], number: int) -> list[int]:
        """The first round from `number` on for each hop, in which its ends send and receive few enough."""
        found, room = list[int](), self._most - numel
        for hop in hops:
            ends = _ends_of(hop)
            number = max(number, *(self._open[end] for end in ends))
            uses = [self._used[end] for end in ends]
            while any(number < len(used) and used[number] > room for used in uses):
                number += 1
            found.append(number)
            number += 1
        return found

    def _first_full(self, numel: int, hops: Sequence[_Hop], numbers: Sequence[int]) -> int | None:
        """The first of these rounds in which a worker that keeps something would have more than there is room for."""
        if len(hops) == 1 and not self._kept:
            return None
        more: defaultdict[tuple[int, int], int] = defaultdict(int)  # by round and worker
        for number, hop in zip(numbers, hops, strict=True):
            for worker, _ in _ends_of(hop):
                more[number, worker] += numel
        for (come, gone), (worker, _) in zip(pairwise(numbers), hops[1:], strict=True):
            for number in range(come, gone + 1):
                more[number, worker] += numel
        full = (number for (number, worker), n in more.items() if self._load(worker, number) + n > 2 * self._most)
        return min(full, default=None)

    def _load(self, worker: int, number: int) -> int:
        """Elements that a worker sends, receives and keeps in a round."""
        counted = (self._used[worker, True], self._used[worker, False], self._kept[worker])
        return sum(each[number] for each in counted if number < len(each))

    def rounds(self) -> tuple[tuple[Message, ...], ...]:
        return tuple(
            tuple(Message(*hop, tuple(pieces)) for hop, pieces in sorted(each.items())) for each in self._rounds
        )


def _ends_of(hop: _Hop) -> list[_End]:
    sender, receivers = hop
    return [(sender, True), *((receiver, False) for receiver in receivers)]


def _count(by_round: list[int], number: int, numel: int) -> None:
    by_round.extend([0] * (number + 1 - len(by_round)))
    by_round[number] += numel
