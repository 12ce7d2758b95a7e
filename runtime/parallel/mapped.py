"""Reallocation between workers of one host: a receiver copies what it lacks straight out of the senders' memory.

Every sender tells its receivers where its weights lie (`segments.py`). A receiver that can open that memory keeps it
mapped, read-only. From then on a reallocation lends it the weights as they lie there: the sender says a word and goes
on, the receiver copies each byte once and says one, too. Until all have, weights must not change: `settle` waits for
it. One that can't open the memory of all its senders (another host, a sandbox, weights that wait elsewhere) is sent
messages instead.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from realgraph.runtime.memory.anonymous import Window, map_bytes
from realgraph.runtime.parallel.collectives.peers import OtherEnds, Said, awaited, heard, say, wait_for, word
from realgraph.runtime.parallel.cuts import Box, overlap
from realgraph.runtime.parallel.exchange import (
    Arrivals,
    Arriving,
    Reallocation,
    WeightPart,
    WorkerParts,
    messages,
    own_views,
    travelling,
)
from realgraph.runtime.parallel.routes import Message, handed_on, rounds
from realgraph.runtime.parallel.segments import MARK_BYTES

log = logging.getLogger(__name__)

DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class PlacedPart(Struct, frozen=True, array_like=True):
    """The part of a weight that lies in a segment, and where in both."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes from the segment's beginning
    dtype: str


class SegmentAddress(Struct, frozen=True):
    """All that another process of the host needs to read a worker's weights."""

    host: str
    process: int
    descriptor: int  # of that process
    nbytes: int
    mark: bytes  # with which the segment begins
    parts: dict[str, PlacedPart]  # by weight


_ADDRESS = msgspec.msgpack.Decoder(SegmentAddress | None)


class OutOfReach(OSError):
    """The memory that a worker spoke of is not what is found here under its address."""


class MappedRoute:
    """One worker's end of the reallocations between two layouts. The senders' memory stays mapped as long as it lives.

    host: the name of this worker's. Workers under another one are sent messages, whatever memory they could open.
    """

    def __init__(self, moves: Reallocation, worker: int, host: str, expendable: Set[int] = frozenset()) -> None:
        """expendable: receivers without which this worker goes on where they are gone; what they were to hand on to
        others, those that hold it send these."""
        self._moves, self._worker, self._host = moves, worker, host
        self._peers, self.arrivals = OtherEnds(expendable), Arrivals()
        self._handed_on = handed_on(moves.rounds, expendable)
        every = [*moves.reads, *chain.from_iterable(moves.rounds)] if moves.reads else []
        self._receivers = sorted({r for message in every if message.sender == worker for r in message.receivers})
        self._senders = sorted({message.sender for message in every if worker in message.receivers})
        self._shared = {  # weights of which others have a part, too, that this worker lacks
            name
            for message in moves.reads
            if worker in message.receivers
            for piece in message.pieces
            for name in piece.tensors
        }
        self._registered: list[int] | None = None  # addresses of the weights, once the receivers have them
        self._messages: dict[frozenset[int], Reallocation] = {}  # of this worker, by the workers that read
        self._reach: dict[int, Mapping[str, WeightPart] | None] = {}  # the senders' weights; None: out of reach
        self._found: list[WeightPart] | None = None  # there, what this worker lacks; None: messages are to bring it
        self._readers: frozenset[int] = frozenset()  # the receivers that have found what they lack in senders' memory
        self.lent: list[Said] = []  # on its way to receivers, and the words of readers, since the last `settle`
        self._returned: list[Said] = []  # the words that this worker, as a reader, has said last

    def bring(self, place: WorkerParts) -> Arriving:
        """Do as `exchange` does, with the parts in another order. Readers have theirs on loan until `settle`.

        Collective over all senders and receivers. Raises CollectiveError with the worker that is gone or far behind.
        """
        return Arriving(lambda wanted: self._bring(place, wanted))

    def _bring(self, place: WorkerParts, wanted: Mapping[str, WeightPart]) -> Iterator[WeightPart]:
        wait_for(self._returned)
        first = self._registered is None
        self._announce(place, first)
        own = list(own_views(place))
        yield from copied((part for part in own if part.name not in self._shared), self._moves, wanted)
        self._hear(first)
        reads = self._found is not None
        apart = self._readers | self._peers.gone
        left = self._left(apart | {self._worker} if reads else apart)
        yield from messages(left, place, wanted, self.arrivals, self._peers)
        yield from self._brought_again(place, wanted)
        for part in self._found or ():
            self.arrivals.add(part.box.numel * self._moves.dtype.itemsize, far=False)
        rest = [*(part for part in own if part.name in self._shared), *(self._found or ())]
        yield from copied(rest, self._moves, wanted)
        self._returned = [say(word(), sender) for sender in self._senders if reads]
        self._lend(awaited, self._readers)

    def settle(self) -> None:
        """Before the weights change: wait until no reader has them on loan. Raises CollectiveError with the one that is
        gone or far behind."""
        lent, returned, self.lent, self._returned = self.lent, self._returned, [], []
        wait_for(returned)
        self._peers.wait_for(lent)

    def send(self, values: Tensor, receiver: int) -> Said | None:
        """Send `values` to a receiver, and wait for nothing; None where it is gone, and this worker goes on."""
        return self._peers.unless_gone(receiver, partial(say, values, receiver), None)

    def _lend(self, begin: Callable[[int], Said], receivers: Iterable[int]) -> None:
        """Begin a message with each of some receivers, which ends before the next `settle` does."""
        self.lent += self._said(begin, receivers)

    def _said(self, begin: Callable[[int], Said], peers: Iterable[int]) -> list[Said]:
        """Begin a message with each of some workers; what is begun."""
        begun = [self._peers.unless_gone(peer, partial(begin, peer), None) for peer in sorted(peers)]
        return [one for one in begun if one is not None]

    def _says_yes(self, peer: int, *, gone: bool) -> bool:
        """The word of a worker; `gone` for one that is."""
        return self._peers.unless_gone(peer, lambda: bool(heard(word(), peer).item()), gone)

    def _announce(self, place: WorkerParts, first: bool) -> None:
        """Tell the receivers that the weights are final; at first also where they lie."""
        parts = place.holds.values() if place.segment is not None else ()
        addresses = [part.values.data_ptr() for part in parts]
        assert first or addresses == self._registered, "weights that others read stay where they are"
        news = msgspec.msgpack.encode(_address(place, self._host)) if first else b""
        self._lend(partial(say, word(len(news))), self._receivers)
        if first:
            data = torch.frombuffer(bytearray(news), dtype=torch.uint8)
            self._lend(partial(say, data), self._receivers)
        self._registered = addresses

    def _hear(self, first: bool) -> None:
        """Hear of the senders that their weights are final; at first also where they lie, and who of the receivers can
        read them there."""
        sizes = {sender: self._size_from(sender) for sender in self._senders}
        if not first:
            return
        addresses = {sender: self._news_from(sender, size) for sender, size in sizes.items()}
        self._reach = {sender: self._open(sender, news) for sender, news in addresses.items()}
        self._found = self._find()
        if addresses:
            way = "are read where they lie" if self._found is not None else "come as messages"
            log.info("weights of workers %s %s", ", ".join(map(str, self._senders)), way)
        answers = self._said(partial(say, word(self._found is not None)), self._senders)
        # one that is gone is sent nothing either
        self._readers = frozenset(receiver for receiver in self._receivers if self._says_yes(receiver, gone=True))
        self._peers.wait_for(answers)

    def _size_from(self, sender: int) -> int:
        """The word of a sender that its weights are final: bytes of what it says next; 0 of one that is gone."""
        return self._peers.unless_gone(sender, lambda: int(heard(word(), sender)), 0)

    def _news_from(self, sender: int, size: int) -> bytes:
        """The place of a sender's weights; b"" of one that is gone."""
        data = torch.empty(size, dtype=torch.uint8)
        return self._peers.unless_gone(sender, lambda: heard(data, sender).numpy().tobytes(), b"")

    def _open(self, sender: int, data: bytes) -> Mapping[str, WeightPart] | None:
        """The weights of a sender as they lie in its memory; None where that is out of reach, or it is gone."""
        address = _ADDRESS.decode(data) if data else None
        if address is None or address.host != self._host:
            return None
        try:
            return _mapped(address)
        except OSError as error:
            log.info("worker %d sends its weights, as its memory can't be read: %s", sender, error)
            return None

    def _find(self) -> list[WeightPart] | None:
        """The parts that this worker lacks, in the senders' memory; None where one of those is out of reach."""
        found = []
        for message in self._moves.reads:
            if self._worker not in message.receivers:
                continue
            there = self._reach[message.sender]
            if there is None:
                return None
            for piece in message.pieces:
                for name in piece.tensors:
                    part = there.get(name)
                    if part is None or part.box.intersect(piece.box) != piece.box:
                        return None  # that worker only hands on what comes from another host
                    values = part.values[piece.box.within(part.box).slices]
                    found.append(WeightPart(part.name, piece.box, values))
        return found

    def _brought_again(self, place: WorkerParts, wanted: Mapping[str, WeightPart]) -> Iterator[WeightPart]:
        """Parts that workers that are gone were to hand on, from those that hold them. Whoever gets anything from one
        that may go says to all of these whether it lacks some."""
        moves, missing = self._moves, self.arrivals.missing
        if self._worker in self._handed_on:
            self._peers.wait_for(self._said(partial(say, word(bool(missing))), moves.holds))
            if missing:
                again = messages(self._direct(self._worker), place, wanted, self.arrivals, self._peers)
                yield from parts_of(missing, again)
        if self._worker in moves.holds:
            for receiver in self._handed_on:
                if self._says_yes(receiver, gone=False):
                    log.warning("sending worker %d what it was to get from one that is gone", receiver)
                    yield from messages(self._direct(receiver), place, wanted, self.arrivals, self._peers)

    def _direct(self, receiver: int) -> Reallocation:
        """The messages that bring all that a receiver lacks, handed on by nobody."""
        moves = self._moves
        wants, one_host = {receiver: moves.wants[receiver]}, [0] * len(moves.hosts)
        again = rounds(moves.holds, wants, one_host, moves.dtype.itemsize, moves.bucket_bytes)
        return moves._replace(rounds=again, wants=wants, reads=())

    def _left(self, readers: frozenset[int]) -> Reallocation:
        """The messages of this worker to those that don't read."""
        if readers not in self._messages:
            left = (
                tuple(
                    message._replace(receivers=receivers)
                    for message in together
                    if (receivers := tuple(receiver for receiver in message.receivers if receiver not in readers))
                    and self._worker in (message.sender, *receivers)
                )
                for together in self._moves.rounds
            )
            self._messages[readers] = self._moves._replace(rounds=tuple(filter(None, left)))
        return self._messages[readers]


# --- memory -----------------------------------------------------------------------------------------------------------


def _address(place: WorkerParts, host: str) -> SegmentAddress | None:
    """The address of what a worker holds; None where not all of it lies in a segment."""
    segment, parts = place.segment, dict[str, PlacedPart]()
    if segment is None:
        return None
    for name, box, values in place.holds.values():
        offset = segment.offset(values)
        if offset is not None:
            parts[name] = PlacedPart(box.start, box.shape, values.stride(), offset, str(values.dtype))
        elif values.numel():
            return None
    return SegmentAddress(host, os.getpid(), segment.descriptor, segment.nbytes, segment.mark, parts)


def _mapped(address: SegmentAddress) -> dict[str, WeightPart]:
    """The weights at an address, to be read and never written. Raises OSError where they can't be reached."""
    path = f"/proc/{address.process}/fd/{address.descriptor}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_size != address.nbytes:
            raise OutOfReach(f"{path} is something else here")
        data = map_bytes(descriptor, address.nbytes, writable=False)
    finally:
        os.close(descriptor)
    if data[:MARK_BYTES].tobytes() != address.mark:  # of another namespace of processes
        raise OutOfReach(f"{path} is something else here")
    storage = torch.from_numpy(np.asarray(Window(data))).untyped_storage()
    parts = {}
    for name, placed in address.parts.items():
        empty = torch.empty(0, dtype=DTYPES[placed.dtype])
        values = empty.set_(storage, placed.offset // empty.element_size(), placed.shape, placed.stride)
        parts[name] = WeightPart(name, Box(placed.start, placed.shape), values)
    return parts


def parts_of(these: Iterable[Message], parts: Iterable[WeightPart]) -> Iterator[WeightPart]:
    """The parts, as far as they lie in the boxes of some messages."""
    boxes: dict[str, list[Box]] = {}
    for piece in chain.from_iterable(message.pieces for message in these):
        for name in piece.tensors:
            boxes.setdefault(name, []).append(piece.box)
    for part in parts:
        for box in boxes.get(part.name, ()):
            if (common := part.box.intersect(box)) is not None:
                yield WeightPart(part.name, common, part.values[common.within(part.box).slices])


def copied(parts: Iterable[WeightPart], moves: Reallocation, wanted: Mapping[str, WeightPart]) -> Iterator[WeightPart]:
    """The same parts where they are wanted, those that have no such place as they travel. All copies follow each other:
    between two that empty the caches a line of Python costs as much as a hundred kilobytes."""
    by_name: dict[str, list[WeightPart]] = {}
    found, landed = list[WeightPart](), list[WeightPart]()  # the same: where they lie, and are to lie
    for part in parts:
        into = wanted.get(part.name)
        common = overlap(into.box, part.box) if into is not None and into.values.dtype == moves.dtype else None
        if into is None or common is None or common.in_second:
            yield from travelling(part, moves)
        else:
            by_name.setdefault(part.name, []).append(part)
            found.append(part)
            landed.append(WeightPart(part.name, part.box, into.values[common.in_first]))
    joined = {name for name, some in by_name.items() if len(some) > 1 and _columns(some, wanted[name])}
    sources, targets = ([part.values for part in some if part.name not in joined] for some in (found, landed))
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        for name in joined:  # row by row: each page of memory is written once
            columns = sorted(by_name[name], key=lambda part: part.box.start)
            torch.cat([part.values for part in columns], 1, out=wanted[name].values)
    yield from landed


def _columns(parts: Sequence[WeightPart], whole: WeightPart) -> bool:
    """True for the columns of all of a matrix, in its dtype."""
    matrix, boxes = whole.box, [part.box for part in parts]
    return (
        len(matrix.shape) == 2
        and sum(box.numel for box in boxes) == matrix.numel
        and all(box.start[0] == matrix.start[0] and box.shape[0] == matrix.shape[0] for box in boxes)
        and all(part.values.dtype == whole.values.dtype for part in parts)
    )
