"""The messages of two data planes on either route, how values lie in one stream of bytes, and what can go wrong.

In a bundle the values follow one another in the order they were asked for, each padded to the alignment of blocks.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from realgraph.runtime.memory.anonymous import ALIGN_BYTES, Bytes, aligned
from realgraph.runtime.store.store import DTYPE_NAMES, DTYPES, Store, StoredValue

FRAME_BYTES = 4 << 20
_ALONE_BYTES = 256 << 10  # values from this size on are sent from where they lie; smaller ones are joined first

Route = Literal["local", "tcp"]


class Item(Struct, frozen=True, array_like=True):
    """Values asked for: these ids of one key."""

    key: str
    ids: tuple[int, ...]


class Extent(Struct, frozen=True, array_like=True):
    """The type and place of one value, or of several of one dim that lie one after another."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    segment: int = -1  # on the local route the segment that it lies in
    offset: int = 0  # in the segment
    parts: tuple[int, ...] = ()  # lengths of several values; () of one


class FetchRequest(Struct, frozen=True, tag=True):
    """Show these values; they stay as they are until `Release`, the next request, or the end of the connection."""

    items: tuple[Item, ...]


class SharedFetch(Struct, frozen=True, tag=True):
    """Fetch these values of workers of other hosts, once for all `n_readers` of `task`, and show them as `FetchRequest`
    does."""

    task: int
    n_readers: int
    wants: Annotated[tuple[tuple[int, tuple[Item, ...]], ...], Meta(min_length=1)]  # worker, what is wanted of it
    deadline_seconds: float


class Release(Struct, frozen=True, tag=True):
    """The values of the last answer have been read."""


class Fetch(Struct, frozen=True, tag=True):
    """Send these values: `Bundle`, then frames, at most `window` of them ahead of the credits that follow."""

    items: tuple[Item, ...]
    window: int
    deadline_seconds: float


class Credit(Struct, frozen=True, tag=True):
    """So many more frames may be sent."""

    frames: int


class Deposit(Struct, frozen=True, tag=True):
    """Take these bytes, which are not a value of a store; answered with `Deposited`."""

    data: bytes


class Deposited(Struct, frozen=True, tag=True):
    """They were taken."""


class NewSegments(Struct, frozen=True, tag=True):
    """Segments, as (id, bytes), whose descriptors come with this message; `retired` ones will not be used again."""

    new: tuple[tuple[int, int], ...]
    retired: tuple[int, ...] = ()


class Bundle(Struct, frozen=True, tag=True):
    """The values asked for, in that order."""

    extents: tuple[Extent, ...]


class Missing(Struct, frozen=True, tag=True):
    """The answer where a value is not here; nothing else is answered."""

    key: str
    id: int


class Unfetched(Struct, frozen=True, tag=True):
    """The answer to `SharedFetch` where it failed. lost: the worker can't be reached."""

    worker: int
    text: str
    lost: bool


Request = FetchRequest | SharedFetch | Release | Fetch | Credit | Deposit
Answer = NewSegments | Bundle | Missing | Unfetched | Deposited
encode = msgspec.msgpack.Encoder().encode
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def decode_request(body: bytes | bytearray) -> Request:
    """Raises msgspec.MsgspecError."""
    return _REQUESTS.decode(body)


def decode_answer(body: bytes | bytearray) -> Answer:
    """Raises msgspec.MsgspecError."""
    return _ANSWERS.decode(body)


class TransferError(Exception):
    """Values could not be had from a worker."""

    def __init__(self, worker: int, text: str) -> None:
        super().__init__(text)
        self.worker = worker


class AbsentError(TransferError):
    """The worker answers, and holds no such value."""

    def __init__(self, worker: int, key: str, id: int) -> None:
        super().__init__(worker, f"worker {worker} holds no {key!r} of id {id}")
        self.key = key
        self.id = id


class PeerLostError(TransferError):
    """The worker cannot be reached, or hung up."""


class SlowPeerError(TransferError, TimeoutError):
    """The worker did not answer in time."""


class Deadline:
    """A point in time by which something has to be over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; never below a millisecond, since 0 means `at once` to a socket."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def slow(self, worker: int, doing: str) -> SlowPeerError:
        """The error to raise where it has passed."""
        return SlowPeerError(worker, f"worker {worker} did not {doing} within {self.seconds:g} s")


class Channel(Protocol):
    """A connection to one peer, used by one gather at a time."""

    def ask(self, items: Sequence[Item], deadline: Deadline) -> None:
        """Send the request. Raises TransferError."""
        ...

    def collect(self, deadline: Deadline, copy: bool) -> list[Tensor]:
        """The values in the order of the request. Raises TransferError; then the channel is to be closed."""
        ...

    def deposit(self, data: bytes, deadline: Deadline) -> None:
        """Have the peer take bytes. Raises TransferError; then the channel is to be closed."""
        ...

    def stale(self) -> bool:
        """The connection broke while nobody used it."""
        ...

    def close(self) -> None: ...


def find(store: Store, items: Sequence[Item]) -> list[StoredValue]:
    """The entries asked for, in order. Raises MissingValueError."""
    return [entry for item in items for entry in store.entries(item.key, item.ids)]


def _runs(entries: Sequence[StoredValue]) -> Iterator[Sequence[StoredValue]]:
    """The entries in order; those that lie one after another as values of one dim and type, together."""
    first = 0
    for at in range(1, len(entries) + 1):
        if at < len(entries):
            last, one = entries[at - 1], entries[at]
            if (
                one.block is last.block is not None
                and one.start == last.start + last.nbytes
                and one.tensor.dtype == last.tensor.dtype
                and one.tensor.dim() == last.tensor.dim() == 1
            ):
                continue
        yield entries[first:at]
        first = at


def extents(entries: Sequence[StoredValue]) -> tuple[Extent, ...]:
    """The extents of values, as the other side is told of them."""
    return tuple(_extent(run) for run in _runs(entries)) if entries else ()


def _extent(run: Sequence[StoredValue]) -> Extent:
    first, block = run[0], run[0].block
    name, shape = DTYPE_NAMES[first.tensor.dtype], tuple(first.tensor.shape)
    if block is None:
        return Extent(name, shape, 0)
    at = (block.segment, block.offset + first.start)
    if len(run) == 1:
        return Extent(name, shape, first.nbytes, *at)
    parts = tuple(len(entry.tensor) for entry in run)
    return Extent(name, (sum(parts),), sum(entry.nbytes for entry in run), *at, parts)


def landing(extents: Sequence[Extent]) -> Bytes:
    """Fresh private memory for a bundle: [sum of padded sizes] uint8 (numpy asks for huge pages by itself)."""
    return np.empty(sum(aligned(extent.nbytes) for extent in extents), dtype=np.uint8)


def carve(landed: Bytes, extents: Sequence[Extent]) -> list[Tensor]:
    """The values of a bundle as views of its bytes. Raises ValueError for an extent that contradicts itself."""
    values, offset = list[Tensor](), 0
    for one in extents:
        values += cut(shaped(landed, offset, one), one)
        offset += aligned(one.nbytes)
    return values


def shaped(data: Bytes, offset: int, extent: Extent) -> Tensor:
    """The value at `offset` of `data`, without a copy. Raises ValueError for an extent that contradicts itself."""
    dtype = DTYPES.get(extent.dtype)
    if dtype is None:
        raise ValueError(f"unknown dtype {extent.dtype!r}")
    count = torch.Size(extent.shape).numel()
    if count * dtype.itemsize != extent.nbytes:
        raise ValueError(f"{extent.nbytes} bytes for shape {extent.shape} of {extent.dtype}")
    if count == 0:
        return torch.empty(extent.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(extent.shape)


def cut(value: Tensor, extent: Extent) -> Sequence[Tensor]:
    """The values that an extent stands for. Raises ValueError for an extent that contradicts itself."""
    if not extent.parts:
        return (value,)
    if min(extent.parts) < 0 or extent.shape != (sum(extent.parts),):
        raise ValueError(f"parts {extent.parts} of shape {extent.shape}")
    return torch.split(value, list(extent.parts))


def frames(entries: Sequence[StoredValue], frame_bytes: int = FRAME_BYTES) -> Iterator[bytes | memoryview]:
    """The bytes of a bundle in pieces of at most `frame_bytes`: large values uncopied, small ones joined."""
    joined = bytearray()
    for run in _runs(entries) if entries else ():
        data, block = run[0].raw, run[0].block
        if block is not None and len(run) > 1:
            data = block.data.data[run[0].start : run[-1].start + run[-1].nbytes]
        if len(data) >= min(_ALONE_BYTES, frame_bytes):
            yield from _pieces(joined, frame_bytes)
            joined.clear()
            for start in range(0, len(data), frame_bytes):
                yield data[start : start + frame_bytes]
        else:
            joined += data
        joined += bytes(-len(data) % ALIGN_BYTES)
        if len(joined) >= frame_bytes:
            yield from _pieces(joined, frame_bytes)
            joined.clear()
    yield from _pieces(joined, frame_bytes)


def _pieces(joined: bytearray, frame_bytes: int) -> Iterator[bytes]:
    for start in range(0, len(joined), frame_bytes):
        yield bytes(joined[start : start + frame_bytes])
