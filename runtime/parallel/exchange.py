"""One worker's part in the messages of a reallocation: what it holds is sent, what comes is handed out.

All messages of a round are on their way at once, on CPUs those of several, and every worker goes through them in the
same order. A large piece travels alone: from the memory where it lies, and into the memory where it is wanted, where
that is in one run and of the dtype in which weights travel. What is not so is packed. Beside what it holds and wants, a
worker never has more than two buckets: of packed pieces that it sends and receives, in as many rounds as fit, of what
has come to a host and is still to be handed on there, and of its own parts that are cast. On CPUs messages travel by
gloo, between GPUs by NCCL. Workers that can read each other's memory need none: `mapped.py`.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.parallel.collectives.peers import OtherEnds, Said, expect, say
from realgraph.runtime.parallel.cuts import Box, layout_boxes, overlap, whole_boxes
from realgraph.runtime.parallel.groups import Member
from realgraph.runtime.parallel.routes import Holdings, Message, Piece, cut_to, rounds
from realgraph.runtime.parallel.segments import WeightSegment
from realgraph.runtime.wire.metrics import ArrivedBytes

UNBOUNDED = 1 << 62  # elements of a bucket that nothing is copied to
BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # by kind of device
STAGED_BUCKETS = 2  # what a worker has at most besides what it holds and wants: one that it sends, one that it receives
ROUNDS_AT_ONCE = {"cpu": 32, "cuda": 1}  # under way at all
NO_PARTS: Holdings = {}
ALONE = 16  # pieces of this part of a bucket travel alone: their copies take longer than a message of their own


class WeightPart(NamedTuple):
    """A part of a weight, and where in it."""

    name: str  # of Hugging Face
    box: Box
    values: Tensor  # of the box's shape


class Reallocation(NamedTuple):
    """The messages of a reallocation, alike on all workers. reads: what a receiver that can read the senders' memory
    takes from where, instead of messages; in pieces as large as can be. holds: the boxes of the senders."""

    rounds: tuple[tuple[Message, ...], ...]
    wants: Holdings
    dtype: torch.dtype  # of elements as they travel
    bucket_bytes: int
    reads: tuple[Message, ...] = ()
    hosts: tuple[int, ...] = ()  # of every worker; (): all are on one
    holds: Holdings = NO_PARTS


class WorkerParts(NamedTuple):
    """A worker's own: its number, its device, and what it holds and wants of the tensors. segment: that what it holds
    lies in."""

    worker: int
    device: torch.device
    holds: Mapping[str, WeightPart]
    wants: Mapping[str, Box]
    segment: WeightSegment | None = None


def reallocation(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    between: tuple[Layout, Layout | tuple[int, ...]],
    member: Member,
    model: tuple[ModelSpec, Head] | None = None,
    receivers: Container[int] | None = None,
) -> Reallocation:
    """The messages from the first layout to the second, or to workers that each get all. shapes: of the whole tensors,
    by name. model: where tensor pipeline or expert parallelism cuts it. receivers: the workers of the second side that
    take part; None: all."""
    in_order = dict(sorted(shapes.items()))  # as on every other worker
    source, target = between
    present = layout_boxes(in_order, source, model)
    if isinstance(target, Layout):
        wanted = layout_boxes(in_order, target, model)
    else:
        wanted = dict.fromkeys(target, whole_boxes(in_order))
    if receivers is not None:
        wanted = {worker: boxes for worker, boxes in wanted.items() if worker in receivers}
    bucket = BUCKET_BYTES[member.device.type]
    names = member.hosts or ("",) * member.n_workers
    hosts = [names.index(name) for name in names]
    messages = rounds(present, wanted, hosts, dtype.itemsize, bucket)
    whole = rounds(present, wanted, hosts, 1, UNBOUNDED) if member.device.type == "cpu" else ()
    return Reallocation(messages, wanted, dtype, bucket, tuple(chain.from_iterable(whole)), tuple(hosts), present)


class Arriving(Iterator[WeightPart]):
    """Parts as they come. Who takes them may say, before the first, in which memory it wants them: some then come right
    there."""

    def __init__(self, begin: Callable[[Mapping[str, WeightPart]], Iterator[WeightPart]]) -> None:
        """begin: brings the parts; given the memory in which they are wanted."""
        self._begin = begin
        self._wanted: Mapping[str, WeightPart] = {}
        self._parts: Iterator[WeightPart] | None = None

    def land_in(self, wanted: Mapping[str, WeightPart]) -> None:
        """Say where they are wanted. Some may be overwritten before the first part is there."""
        assert self._parts is None, "parts are on their way"
        self._wanted = wanted

    def through(self, look: Callable[[Iterator[WeightPart]], Iterator[WeightPart]]) -> "Arriving":
        """The same parts, looked at on their way."""
        return Arriving(lambda wanted: look(self._begin(wanted)))

    def __next__(self) -> WeightPart:
        if self._parts is None:
            self._parts = self._begin(self._wanted)
        return next(self._parts)


class Arrivals:
    """Counts what comes to one worker from others. `missing`: what has not come last, as its sender is gone."""

    def __init__(self) -> None:
        self.total = ArrivedBytes()
        self.missing: tuple[Message, ...] = ()

    def add(self, n_bytes: int, *, far: bool) -> None:
        """So many more; far: from another host."""
        self.total += ArrivedBytes(0, n_bytes) if far else ArrivedBytes(n_bytes)


def exchange(moves: Reallocation, place: WorkerParts, arrivals: Arrivals | None = None) -> Arriving:
    """Send what others lack, and yield what this worker wants: from its own parts and from those of others.

    Collective over all senders and receivers. A yielded part is good until the next is asked for. Raises
    CollectiveError with the worker that is gone or far behind.
    """

    def begin(wanted: Mapping[str, WeightPart]) -> Iterator[WeightPart]:
        yield from own_parts(moves, place)
        yield from messages(moves, place, wanted, arrivals)

    return Arriving(begin)


def messages(
    moves: Reallocation,
    place: WorkerParts,
    wanted: Mapping[str, WeightPart],
    arrivals: Arrivals | None,
    peers: OtherEnds | None = None,
) -> Iterator[WeightPart]:
    """The parts that come from others. wanted: the memory where they are wanted, as far as it is known. peers: who may
    be gone; None: nobody."""
    flight = _Flight(moves, place, wanted, peers or OtherEnds())
    for message, flat in flight.arrivals():
        if arrivals is not None:
            far = bool(moves.hosts) and moves.hosts[message.sender] != moves.hosts[place.worker]
            arrivals.add(flat.nbytes, far=far)
        for piece, those in zip(message.pieces, _split(message, flat), strict=True):
            for name, one in zip(piece.tensors, those.view(-1, *piece.box.shape), strict=True):
                yield WeightPart(name, piece.box, one)
    if arrivals is not None:
        arrivals.missing = tuple(flight.missing)


def own_parts(moves: Reallocation, place: WorkerParts) -> Iterator[WeightPart]:
    """All that this worker both wants and holds, as it travels."""
    for part in own_views(place):
        yield from travelling(part, moves)


def own_views(place: WorkerParts) -> Iterator[WeightPart]:
    """All that a worker both wants and holds, where it lies."""
    for name, box in place.wants.items():
        own = place.holds.get(name)
        common = overlap(own.box, box) if own is not None else None
        if own is not None and common is not None:
            yield WeightPart(name, common.box, own.values[common.in_first])


def travelling(part: WeightPart, moves: Reallocation) -> Iterator[WeightPart]:
    """A part in the dtype in which weights travel: as it is, or cast, a bucket at a time."""
    if part.values.dtype == moves.dtype:
        yield part
        return
    for box in cut_to(part.box, moves.bucket_bytes // moves.dtype.itemsize):
        cast = _values(part, box).to(moves.dtype)
        yield WeightPart(part.name, box, cast)
        _free(cast)


class _Needs(NamedTuple):
    """Elements of a round that one worker packs, has come into memory besides where they are wanted, and then keeps to
    hand on."""

    out: int
    into: int
    kept: int


class _Round(NamedTuple):
    """A round's messages of one worker, under way."""

    out: Tensor
    into: Tensor
    sent: list[Said | None]
    coming: list[Said | None]  # None: the other end is gone
    arrived: list[tuple[Message, Tensor]]  # once `coming` is over


class _Flight:
    """The rounds of one worker. Several are under way at a time: while one comes, those after it are packed and sent,
    as far as this worker has what they hand on."""

    def __init__(
        self, moves: Reallocation, place: WorkerParts, wanted: Mapping[str, WeightPart], peers: OtherEnds
    ) -> None:
        """wanted: the memory where parts are wanted."""
        self._peers, self.missing = peers, list[Message]()
        worker, least = place.worker, moves.bucket_bytes // moves.dtype.itemsize // ALONE
        own = [[m for m in messages if worker in (m.sender, *m.receivers)] for messages in moves.rounds]
        self._place, self._wanted, self._dtype = place, wanted, moves.dtype
        self._rounds = [[one for m in messages for one in _travelling(m, least)] for messages in own if messages]
        out = [[m for m in messages if m.sender == worker] for messages in self._rounds]
        into = [[m for m in messages if m.sender != worker] for messages in self._rounds]
        self._sends = {piece for messages in out for message in messages for piece in message.pieces}
        self._comes = {piece for messages in into for message in messages for piece in message.pieces}
        self._passing: dict[Piece, Tensor] = {}  # what has come and is to be handed on
        self._kept: dict[Piece, int] = {}  # elements of that which are copies
        self._needs = [self._needed(*both) for both in zip(out, into, strict=True)]  # by round
        self._room = STAGED_BUCKETS * moves.bucket_bytes // moves.dtype.itemsize  # elements that are not in use
        self._unsent: deque[_Round] = deque()  # begun, with what they send still there
        self._lost = list[Tensor]()  # memory of messages with workers that are gone

    def _needed(self, out: Iterable[Message], into: Sequence[Message]) -> _Needs:
        packed = (m.numel for m in out if self._lying(m, sent=True) is None)
        unpacked = [m for m in into if self._lying(m, sent=False) is None]
        kept = (piece.numel for m in unpacked for piece in m.pieces if piece in self._sends)
        return _Needs(sum(packed), sum(m.numel for m in unpacked), sum(kept))

    def arrivals(self) -> Iterator[tuple[Message, Tensor]]:
        """Every message that comes, each as one flat tensor, which is good until the next is asked for."""
        under_way: deque[_Round] = deque()  # begun, with what they receive still to come
        for number in range(len(self._rounds)):
            while self._goes(number + len(under_way), number):
                under_way.append(self._begin(number + len(under_way)))
            this = under_way.popleft()
            there = self._wait(this.coming)
            self.missing += [message for message, _ in compress(this.arrived, map(not_, there))]
            for message, flat in compress(this.arrived, there):
                for piece, those in zip(message.pieces, _split(message, flat), strict=True):
                    if piece in self._sends:  # where it is wanted, it stays
                        self._kept[piece] = piece.numel if self._lying(message, sent=False) is None else 0
                        self._passing[piece] = those.clone() if self._kept[piece] else those
                yield message, flat
            self._room += self._give_back(this.into, there)
        while self._unsent:
            self._end_sends()

    def _wait(self, waits: list[Said | None]) -> list[bool]:
        """Until all has arrived that there is anybody for: True for each that has."""
        arrived = [self._peers.arrived(said) for said in waits]
        waits.clear()
        return arrived

    def _give_back(self, values: Tensor, there: Iterable[bool]) -> int:
        """Give memory back, whoever still has a view of it; what a message with a worker that is gone may still use
        stays until the end. Returns its elements."""
        if not all(there):
            self._lost.append(values)
            return values.numel()
        return _free(values)

    def _goes(self, ahead: int, number: int) -> bool:
        """True where a round may begin while `number` is still to come: all that it sends is here, as it is once the
        rounds before it have come, and there is room for it."""
        if ahead >= min(number + ROUNDS_AT_ONCE[self._place.device.type], len(self._rounds)):
            return False
        pieces = (piece for m in self._rounds[ahead] if m.sender == self._place.worker for piece in m.pieces)
        here = ahead == number or all(piece in self._passing for piece in pieces if piece in self._comes)
        return here and (self._makes_room(ahead, number) or ahead == number)

    def _makes_room(self, ahead: int, number: int) -> bool:
        """Wait for what rounds before `number` send where a round needs the room. False where that is not enough."""
        while sum(self._needs[ahead]) > self._room and len(self._unsent) > ahead - number:
            self._end_sends()
        return sum(self._needs[ahead]) <= self._room

    def _end_sends(self) -> None:
        """Wait until the first of the rounds that are not yet sent is."""
        first = self._unsent.popleft()
        self._room += self._give_back(first.out, self._wait(first.sent))

    def _begin(self, number: int) -> _Round:
        """Send and receive a round's messages, in the order that both ends have."""
        worker, needs = self._place.worker, self._needs[number]
        assert self._room >= sum(needs), f"round {number} of worker {worker} needs more than {STAGED_BUCKETS} buckets"
        out, into = (torch.empty(n, dtype=self._dtype, device=self._place.device) for n in needs[:2])
        self._room -= sum(needs)
        begun = _Round(out, into, [], [], [])
        self._unsent.append(begun)
        n_out = n_into = 0
        for message in self._rounds[number]:
            flat = self._lying(message, sent=message.sender == worker)
            if message.sender == worker:
                if flat is None:
                    flat = out[n_out : n_out + message.numel]
                    n_out += message.numel
                    self._pack(message, flat)
                for receiver in message.receivers:
                    begun.sent.append(self._peers.unless_gone(receiver, partial(say, flat, receiver), None))
            else:
                if flat is None:
                    flat = into[n_into : n_into + message.numel]
                    n_into += message.numel
                sender = message.sender
                begun.coming.append(self._peers.unless_gone(sender, partial(expect, flat, sender), None))
                begun.arrived.append((message, flat))
        return begun

    def _pack(self, message: Message, flat: Tensor) -> None:
        """Fill the message from what this worker holds, cast, or hands on."""
        for piece, into in zip(message.pieces, _split(message, flat), strict=True):
            if piece in self._passing:
                into.copy_(self._passing.pop(piece))
                self._room += self._kept.pop(piece)
                continue
            for name, one in zip(piece.tensors, into.view(-1, *piece.box.shape), strict=True):
                one.copy_(_values(self._place.holds[name], piece.box))

    def _lying(self, message: Message, *, sent: bool) -> Tensor | None:
        """The memory that a message is sent from, or comes into, as it lies here; None where it has to be packed."""
        parts = self._place.holds if sent else self._wanted
        piece, *more = message.pieces
        if more or len(piece.tensors) != 1 or (sent and piece in self._comes):
            return None
        part = parts.get(piece.tensors[0])
        if part is None or part.values.dtype != self._dtype or part.box.intersect(piece.box) != piece.box:
            return None
        values = _values(part, piece.box)
        return values.detach().view(-1) if values.is_contiguous() else None


def _travelling(message: Message, least: int) -> Iterator[Message]:
    """A message as it travels, alike at both ends: pieces of a tensor that have `least` elements alone, the others
    together."""
    alone = tuple(len(piece.tensors) == 1 and piece.numel >= least for piece in message.pieces)
    for piece in compress(message.pieces, alone):
        yield message._replace(pieces=(piece,))
    if not all(alone):
        yield message._replace(pieces=tuple(compress(message.pieces, map(not_, alone))))


def _split(message: Message, flat: Tensor) -> Sequence[Tensor]:
    """The pieces of a message, each flat."""
    return torch.split(flat, [piece.numel for piece in message.pieces])


def _free(values: Tensor) -> int:
    """Give memory back, whoever still has a view of it. Returns its elements."""
    values.untyped_storage().resize_(0)
    return values.numel()


def _values(part: WeightPart, box: Box) -> Tensor:
    assert part.box.intersect(box) == box, f"{part.name} at {part.box} does not hold {box}"
    return part.values[box.within(part.box).slices]
