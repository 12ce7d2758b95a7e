"""One worker's part in the messages of a reallocation: what it holds is packed and sent, what comes is handed out.

All messages of a round are on their way at once, on CPUs those of several, and every worker goes through them in the
same order. Beside what it holds, a worker has a bucket of what it sends and one of what it receives for each round that
is under way; where a run has several hosts, also what has come to a host and is still to be handed on there. On CPUs
they travel by gloo, between GPUs by NCCL. Workers that can read each other's memory need no messages: `mapped.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.plan.axes import coordinates_of, expert_copies, expert_rank
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.stages import layer_ranges, stages_of
from realgraph.runtime.parallel.cuts import Box, Shard, cut, is_expert, overlap, rows
from realgraph.runtime.parallel.groups import Member
from realgraph.runtime.parallel.rendezvous import CollectiveError
from realgraph.runtime.parallel.routes import Holdings, Message, Piece, cut_to, rounds
from realgraph.runtime.parallel.segments import WeightSegment
from realgraph.runtime.wire.protocol import ArrivedBytes

UNBOUNDED = 1 << 62  # elements of a bucket that nothing is copied to
BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # by kind of device
ROUNDS_AT_ONCE = {"cpu": 4, "cuda": 1}  # under way, each with buckets of its own: hides what gloo waits for


class WeightPart(NamedTuple):
    """A part of a weight, and where in it."""

    name: str  # of Hugging Face
    box: Box
    values: Tensor  # of the box's shape


class Reallocation(NamedTuple):
    """The messages of a reallocation, alike on all workers. reads: what a receiver that can read the senders' memory
    takes from where, instead of messages; in pieces as large as can be."""

    rounds: tuple[tuple[Message, ...], ...]
    wants: Holdings
    dtype: torch.dtype  # of elements as they travel
    bucket_bytes: int
    reads: tuple[Message, ...] = ()
    hosts: tuple[int, ...] = ()  # of every worker; (): all are on one


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
    between: tuple[Layout, Layout],
    member: Member,
    model: tuple[ModelSpec, Head] | None = None,
) -> Reallocation:
    """The messages from the first layout to the second. shapes: of the whole tensors, by name. model: where tensor
    pipeline or expert parallelism cuts it."""
    in_order = dict(sorted(shapes.items()))  # as on every other worker
    held, wanted = (layout_boxes(in_order, layout, model) for layout in between)
    bucket = BUCKET_BYTES[member.device.type]
    names = member.hosts or ("",) * member.n_workers
    hosts = [names.index(name) for name in names]
    messages = rounds(held, wanted, hosts, dtype.itemsize, bucket)
    whole = rounds(held, wanted, hosts, 1, UNBOUNDED) if member.device.type == "cpu" else ()
    return Reallocation(messages, wanted, dtype, bucket, tuple(chain.from_iterable(whole)), tuple(hosts))


def layout_boxes(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, model: tuple[ModelSpec, Head] | None
) -> dict[int, dict[str, Box]]:
    """The boxes that each device of a layout holds: the piece of its stage and tensor-parallel rank, and FSDP's rows of
    it, which are cut over the dp x cp workers that hold the same piece."""
    boxes: dict[int, dict[str, Box]] = {}
    for device in layout.mesh.devices:
        held = {name: _box(name, shape, (layout, device), model) for name, shape in shapes.items()}
        boxes[device] = {name: box for name, box in held.items() if box is not None}
    return boxes


def _box(
    name: str, shape: tuple[int, ...], place: tuple[Layout, int], model: tuple[ModelSpec, Head] | None
) -> Box | None:
    """The box of one tensor on one device of a layout; None where it has nothing of it."""
    layout = place[0]
    piece: Box | None = Box((0,) * len(shape), shape)
    if layout.tp > 1 or layout.pp > 1 or layout.ep > 1:
        assert model is not None, "heads, widths, layers and experts say how a model is cut"
        piece = cut(*model, name, shape, _shard(model, *place))
    if piece is None or layout.sharding != "fsdp":
        return piece
    own = rows(piece.shape, *_shards(name, *place))
    return own and Box((own.start[0] + piece.start[0], *piece.start[1:]), own.shape)


@lru_cache(maxsize=1 << 10)
def _shard(model: tuple[ModelSpec, Head], layout: Layout, device: int) -> Shard:
    """The place of a device among those that hold one copy."""
    at = coordinates_of(layout, device)
    chunks = layer_ranges(stages_of(*model, layout))[at.pp]
    layers = tuple(number for chunk in chunks for number in chunk)
    ends = (at.pp == 0, at.pp == layout.pp - 1)
    return Shard(layers, *ends, at.tp, layout.tp, expert_rank(layout, device), layout.ep)


def _shards(name: str, layout: Layout, device: int) -> tuple[int, int]:
    """The ranks over which FSDP shards a tensor, and this device's among them."""
    if layout.ep > 1 and is_expert(name):
        copies = next(group for group in expert_copies(layout) if device in group)
        return len(copies), copies.index(device)
    at = coordinates_of(layout, device)
    return layout.dp * layout.cp, at.dp * layout.cp + at.cp


class Arrivals:
    """Counts what comes to one worker from others."""

    def __init__(self) -> None:
        self.total = ArrivedBytes()

    def add(self, n_bytes: int, *, far: bool) -> None:
        """So many more; far: from another host."""
        self.total += ArrivedBytes(0, n_bytes) if far else ArrivedBytes(n_bytes)


def exchange(moves: Reallocation, place: WorkerParts, arrivals: Arrivals | None = None) -> Iterator[WeightPart]:
    """Send what others lack, and yield what this worker wants: from its own parts and from those of others.

    Collective over all senders and receivers. A yielded part is good until the next is asked for. Raises
    CollectiveError with the worker that is gone or far behind.
    """
    own = [*_own(place, moves)]
    to_cast = max((part.box.numel for part in own if part.values.dtype != moves.dtype), default=0)
    flight = _Flight(moves, place, to_cast)
    for name, box, values in own:
        same = values.dtype == moves.dtype
        yield WeightPart(name, box, values if same else flight.cast(box, values))
    for message, flat in flight.arrivals():
        if arrivals is not None:
            far = bool(moves.hosts) and moves.hosts[message.sender] != moves.hosts[place.worker]
            arrivals.add(flat.nbytes, far=far)
        for piece, those in zip(message.pieces, _split(message, flat), strict=True):
            for name, one in zip(piece.tensors, those.view(-1, *piece.box.shape), strict=True):
                yield WeightPart(name, piece.box, one)


def _own(place: WorkerParts, moves: Reallocation) -> Iterator[WeightPart]:
    """All that this worker both wants and holds, as it is; what is to be cast in parts that fit into a bucket."""
    most = moves.bucket_bytes // moves.dtype.itemsize
    for name, box in place.wants.items():
        held = place.holds.get(name)
        common = overlap(held.box, box) if held is not None else None
        if held is None or common is None:
            continue
        if held.values.dtype == moves.dtype:
            yield WeightPart(name, common.box, held.values[common.in_first])
            continue
        for part in cut_to(common.box, most):
            yield WeightPart(name, part, _values(held, part))


class _Buffers(NamedTuple):
    """Memory of a round: as many elements as the fullest one takes."""

    out: Tensor
    into: Tensor


def _most(by_round: Iterable[Sequence[Message]]) -> int:
    """Elements of the fullest round."""
    return max((sum(message.numel for message in messages) for messages in by_round), default=0)


_Wait = tuple[int, dist.Work | None]  # the peer at the other end


class _Round(NamedTuple):
    """A round's messages of one worker, under way."""

    sent: list[_Wait]
    coming: list[_Wait]
    arrived: list[tuple[Message, Tensor]]  # once `coming` is over


class _Flight:
    """The rounds of one worker. Several are under way at a time: while one comes, those after it are packed and sent,
    as far as this worker has what they hand on."""

    def __init__(self, moves: Reallocation, place: WorkerParts, to_cast: int) -> None:
        """to_cast: the most elements that `cast` takes."""
        worker = place.worker
        own = [[m for m in messages if worker in (m.sender, *m.receivers)] for messages in moves.rounds]
        self._place, self._rounds = place, [messages for messages in own if messages]
        out = [[m for m in messages if m.sender == worker] for messages in self._rounds]
        into = [[m for m in messages if m.sender != worker] for messages in self._rounds]
        self._sends = {piece for messages in out for message in messages for piece in message.pieces}
        self._comes = {piece for messages in into for message in messages for piece in message.pieces}
        self._passing: dict[Piece, Tensor] = {}  # what has come and is to be handed on
        sizes = [[_most(out), _most(into)] for _ in range(ROUNDS_AT_ONCE[place.device.type])]
        sizes[0][1] = max(sizes[0][1], to_cast)
        self._buffers = [
            _Buffers(*(torch.empty(size, dtype=moves.dtype, device=place.device) for size in both)) for both in sizes
        ]

    def cast(self, box: Box, values: Tensor) -> Tensor:
        """Own values in the dtype in which weights travel. Before `arrivals`, whose memory this is."""
        return self._buffers[0].into[: box.numel].view(box.shape).copy_(values)

    def arrivals(self) -> Iterator[tuple[Message, Tensor]]:
        """Every message that comes, each as one flat tensor, which is good until the next is asked for."""
        under_way: list[_Round] = []
        depth = len(self._buffers)
        for number in range(len(self._rounds)):
            while len(under_way) < min(number + depth, len(self._rounds)) and self._has(len(under_way), number):
                if len(under_way) >= depth:
                    _wait(under_way[len(under_way) - depth].sent)
                under_way.append(self._begin(len(under_way)))
            _wait(under_way[number].coming)
            for message, flat in under_way[number].arrived:
                for piece, those in zip(message.pieces, _split(message, flat), strict=True):
                    if piece in self._sends:
                        self._passing[piece] = those.clone()
                yield message, flat
        for each in under_way[-depth:]:
            _wait(each.sent)

    def _has(self, ahead: int, number: int) -> bool:
        """True where all that a round sends is here, as it is once the rounds before it have come."""
        pieces = (piece for m in self._rounds[ahead] if m.sender == self._place.worker for piece in m.pieces)
        return ahead == number or all(piece in self._passing for piece in pieces if piece in self._comes)

    def _begin(self, number: int) -> _Round:
        """Send and receive a round's messages, in the order that both ends have."""
        worker, buffers = self._place.worker, self._buffers[number % len(self._buffers)]
        begun = _Round([], [], [])
        n_out = n_into = 0
        for message in self._rounds[number]:
            if message.sender == worker:
                flat = buffers.out[n_out : n_out + message.numel]
                n_out += message.numel
                _pack(message, flat, self._place, self._passing)
                for receiver in message.receivers:
                    with naming(receiver):
                        begun.sent.append((receiver, dist.isend(flat, receiver)))
            else:
                flat = buffers.into[n_into : n_into + message.numel]
                n_into += message.numel
                with naming(message.sender):
                    begun.coming.append((message.sender, dist.irecv(flat, message.sender)))
                begun.arrived.append((message, flat))
        return begun


def _split(message: Message, flat: Tensor) -> Sequence[Tensor]:
    """The pieces of a message, each flat."""
    return torch.split(flat, [piece.numel for piece in message.pieces])


def _wait(waits: list[_Wait]) -> None:
    for peer, work in waits:
        assert work is not None, "the default group has all workers"
        with naming(peer):
            work.wait()
    waits.clear()


@contextmanager
def naming(peer: int) -> Iterator[None]:
    """Turn what gloo and NCCL raise into an error with the worker at the other end."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"weights to or from worker {peer} did not arrive: {error}") from error


def _pack(message: Message, flat: Tensor, place: WorkerParts, passing: dict[Piece, Tensor]) -> None:
    """Fill the message from what this worker holds, cast, or hands on."""
    for piece, into in zip(message.pieces, _split(message, flat), strict=True):
        if piece in passing:
            into.copy_(passing.pop(piece))
            continue
        for name, one in zip(piece.tensors, into.view(-1, *piece.box.shape), strict=True):
            one.copy_(_values(place.holds[name], piece.box))


def _values(held: WeightPart, box: Box) -> Tensor:
    assert held.box.intersect(box) == box, f"{held.name} at {held.box} does not hold {box}"
    return held.values[box.within(held.box).slices]
