"""Reallocation between workers of one host: a receiver copies what it lacks straight out of the senders' memory.

Every sender tells its receivers where its weights lie (`segments.py`). A receiver that can open that memory keeps it
mapped, read-only; from then on a reallocation is a word between each two of them before, one copy of each byte, and a
word after it, before which no sender goes on. One that can't open the memory of all its senders (another host, a
sandbox, weights that wait elsewhere) is sent messages instead.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from realgraph.runtime.memory.anonymous import Window, map_bytes
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import Arrivals, Reallocation, WeightPart, WorkerParts, exchange, naming
from realgraph.runtime.parallel.routes import cut_to
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

    def __init__(self, moves: Reallocation, worker: int, host: str) -> None:
        self._moves, self._worker, self._host = moves, worker, host
        self.arrivals = Arrivals()
        messages = [*moves.reads, *chain.from_iterable(moves.rounds)] if moves.reads else []
        self._receivers = sorted({r for message in messages if message.sender == worker for r in message.receivers})
        self._senders = sorted({message.sender for message in messages if worker in message.receivers})
        self._told: list[int] | None = None  # the places of the weights that the receivers know
        self._reach: dict[int, Mapping[str, WeightPart] | None] = {}  # the senders' weights; None: out of reach
        self._found: list[WeightPart] | None = None  # there, what this worker lacks; None: messages are to bring it

    def bring(self, place: WorkerParts) -> Iterator[WeightPart]:
        """Do as `exchange` does, with the parts in another order.

        Collective over all senders and receivers. Raises CollectiveError with the worker that is gone or far behind.
        """
        self._meet(place)
        reads = self._found is not None
        asked = [_say(_word(reads), sender) for sender in self._senders]
        readers = {receiver for receiver in self._receivers if _heard(_word(), receiver).item()}
        _settle(asked)
        yield from exchange(_without(self._moves, readers | {self._worker} if reads else readers), place, self.arrivals)
        yield from self._read()
        done = [_say(_word(), sender) for sender in self._senders if reads]
        for reader in sorted(readers):  # until then weights must not change
            _heard(_word(), reader)
        _settle(done)

    def _meet(self, place: WorkerParts) -> None:
        """Tell the receivers that the weights are final, and where they lie if that is new; hear it of the senders."""
        parts = place.holds.values() if place.segment is not None else ()
        places = [part.values.data_ptr() for part in parts]
        news = msgspec.msgpack.encode(_address(place, self._host)) if places != self._told else b""
        said = [_say(_word(len(news)), receiver) for receiver in self._receivers]
        if news:
            data = torch.frombuffer(bytearray(news), dtype=torch.uint8)
            said += [_say(data, receiver) for receiver in self._receivers]
        heard = {}
        for sender in self._senders:
            if size := int(_heard(_word(), sender)):
                heard[sender] = _heard(torch.empty(size, dtype=torch.uint8), sender).numpy().tobytes()
        _settle(said)
        self._told = places
        if heard:
            self._reach |= {sender: self._open(sender, told) for sender, told in heard.items()}
            self._found = self._find()
            way = "are read where they lie" if self._found is not None else "come as messages"
            log.info("weights of workers %s %s", ", ".join(map(str, self._senders)), way)

    def _open(self, sender: int, told: bytes) -> Mapping[str, WeightPart] | None:
        """The weights of a sender as they lie in its memory; None where that is out of reach."""
        address = _ADDRESS.decode(told)
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

    def _read(self) -> Iterator[WeightPart]:
        """The parts that were found, in the dtype in which weights travel."""
        dtype = self._moves.dtype
        for name, box, values in self._found or ():
            self.arrivals.add(box.numel * dtype.itemsize, far=False)
            if values.dtype == dtype:
                yield WeightPart(name, box, values)
                continue
            for part in cut_to(box, self._moves.bucket_bytes // dtype.itemsize):
                yield WeightPart(name, part, values[part.within(box).slices].to(dtype))


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


# --- messages ---------------------------------------------------------------------------------------------------------


def _without(moves: Reallocation, readers: Set[int]) -> Reallocation:
    """The messages to those that don't read."""
    left = (
        tuple(
            message._replace(receivers=receivers)
            for message in messages
            if (receivers := tuple(receiver for receiver in message.receivers if receiver not in readers))
        )
        for messages in moves.rounds
    )
    return moves._replace(rounds=tuple(left))


_Said = tuple[int, Tensor, dist.Work]  # receiver, what must live until it has arrived, its arrival


def _word(value: int = 0) -> Tensor:
    return torch.tensor([value])


def _say(values: Tensor, receiver: int) -> _Said:
    with naming(receiver):
        work = dist.isend(values, receiver)
    assert work is not None, "the default group has all workers"
    return receiver, values, work


def _settle(said: Iterable[_Said]) -> None:
    for receiver, _, work in said:
        with naming(receiver):
            work.wait()


def _heard(into: Tensor, sender: int) -> Tensor:
    with naming(sender):
        dist.recv(into, sender)
    return into
