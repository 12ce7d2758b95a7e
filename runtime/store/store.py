"""One worker's tensor store: values by key and id, in shared memory that other processes of the host can map.

Knows no socket and no peer. A value is immutable once put. Dropping or replacing a value frees its memory only when the
last tensor over it is gone, so a view that someone still holds never changes under their eyes.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realgraph.runtime.memory.anonymous import aligned
from realgraph.runtime.store.memory import SEGMENT_BYTES, Arena, SharedBlock

_SHARED_BYTES = 64 << 10  # of a block for several small values: what one of them can at most keep from reuse
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64, torch.complex128),
)
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class MissingValueError(LookupError):
    """The store holds no value of this key and id."""

    def __init__(self, key: str, id: int) -> None:
        super().__init__(f"the store holds no {key!r} of id {id}")
        self.key = key
        self.id = id


class StoredValue(NamedTuple):
    """A stored value and where its bytes lie: `start` in a block, which small neighbours share. Empty: no block."""

    tensor: Tensor
    block: SharedBlock | None
    start: int
    nbytes: int

    @property
    def raw(self) -> memoryview:
        """[nbytes] of the value."""
        return memoryview(b"") if self.block is None else self.block.data.data[self.start : self.start + self.nbytes]


class Store:
    """Values by (key, id). Safe to use from several threads: compute puts and drops while the data plane serves."""

    def __init__(self, host_segment_bytes: int = SEGMENT_BYTES) -> None:
        self.arena = Arena(host_segment_bytes)
        self._lock = threading.Lock()
        self._entries: dict[str, dict[int, StoredValue]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all values held, without what the allocator rounds up."""
        with self._lock:
            return self._nbytes

    def put(self, key: str, ids: Sequence[int], values: Sequence[Tensor]) -> None:
        """Copy one value per id, replacing what was there. Values: CPU tensors of any shape and any dtype of DTYPES.

        Raises ValueError where the numbers of ids and values differ or a value is not a dense CPU tensor; then nothing
        is stored.
        """
        if len(ids) != len(values):
            raise ValueError(f"{key!r}: {len(ids)} ids but {len(values)} values")
        for id, value in zip(ids, values, strict=True):
            if value.device.type != "cpu" or value.layout != torch.strided:
                raise ValueError(f"{key!r} of id {id} is a {value.layout} tensor on {value.device}: move it to the CPU")
        if len(values) > 1 and _small(values):
            self.put_pieces(key, ids, torch.cat([value.detach() for value in values]), [len(value) for value in values])
            return
        self._insert(key, ids, self.shared_copies(values))

    def shared_copies(self, values: Sequence[Tensor]) -> list[StoredValue]:
        """Copies of dense CPU tensors in shared memory, under no key: they live as long as somebody holds them."""
        entries = self._blank([(value.shape, value.dtype) for value in values])
        with torch.no_grad():
            for entry, value in zip(entries, values, strict=True):
                entry.tensor.copy_(value)
        return entries

    def put_pieces(self, key: str, ids: Sequence[int], whole: Tensor, sizes: Sequence[int]) -> None:
        """Copy one piece of `whole` per id, [sum of sizes] on the CPU, cut one after the other: for many small values.

        They lie one after the other in the store, too. Raises ValueError where the numbers of ids and sizes differ.
        """
        if len(ids) != len(sizes):
            raise ValueError(f"{key!r}: {len(ids)} ids but {len(sizes)} values")
        if whole.dtype not in DTYPE_NAMES:
            raise ValueError(f"the store takes no {whole.dtype}: it knows {', '.join(DTYPES)}")
        entries: list[StoredValue] = []
        done, most = 0, _SHARED_BYTES // whole.element_size()
        while len(entries) < len(sizes):
            first = len(entries)
            end, total = first + 1, sizes[first]
            while end < len(sizes) and total + sizes[end] <= most:
                total += sizes[end]
                end += 1
            entries += self._pieces(whole[done : done + total].detach(), sizes[first:end])
            done += total
        self._insert(key, ids, entries)

    def _pieces(self, whole: Tensor, sizes: Sequence[int]) -> list[StoredValue]:
        """One block with a copy of `whole`, cut."""
        if not len(whole):
            return [StoredValue(piece, None, 0, 0) for piece in torch.split(whole.clone(), list(sizes))]
        block = self.arena.allocate(whole.nbytes)
        copied = torch.from_numpy(block.data).view(whole.dtype)
        copied.copy_(whole)
        item = whole.element_size()
        starts = itertools.accumulate(sizes, initial=0)
        pieces = torch.split(copied, list(sizes))
        return [
            StoredValue(p, block, start * item, n * item) for p, start, n in zip(pieces, starts, sizes, strict=False)
        ]

    def put_text(self, key: str, ids: Sequence[int], values: Sequence[str | bytes]) -> None:
        """Store texts as uint8 tensors of their UTF-8 bytes."""
        raw = [value.encode() if isinstance(value, str) else value for value in values]
        self.put_pieces(key, ids, as_bytes(b"".join(raw)), [len(value) for value in raw])

    def reserve(self, key: str, id: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised value to be filled in place, without a copy; readers must not be told of it before."""
        entries = self._blank([(torch.Size(shape), dtype)])
        self._insert(key, (id,), entries)
        return entries[0].tensor

    def get(self, key: str, id: int) -> Tensor:
        """The value, without a copy; it stays valid after a drop. Raises MissingValueError."""
        return self.entries(key, (id,))[0].tensor

    def text(self, key: str, id: int) -> str:
        """A value of `put_text`. Raises MissingValueError."""
        return as_text(self.get(key, id))

    def entries(self, key: str, ids: Iterable[int]) -> list[StoredValue]:
        """Values with their places, in the order of `ids`. Raises MissingValueError for the first that is not there."""
        with self._lock:
            values = self._entries.get(key, {})
            try:
                return [values[id] for id in ids]
            except KeyError as error:
                raise MissingValueError(key, error.args[0]) from None

    def has(self, key: str, id: int) -> bool:
        with self._lock:
            return id in self._entries.get(key, {})

    def keys(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._entries)

    def ids(self, key: str) -> tuple[int, ...]:
        """The ids held of a key, in the order of their putting."""
        with self._lock:
            return tuple(self._entries.get(key, {}))

    def drop(self, keys: Iterable[str], ids: Iterable[int]) -> int:
        """Forget these ids of these keys; those not held are passed over. Returns how many values went."""
        gone = set(ids)
        with self._lock:
            return sum(self._forget(key, gone & self._entries.get(key, {}).keys()) for key in tuple(keys))

    def drop_where(self, gone: Callable[[str, int], bool]) -> int:
        """Forget every value whose (key, id) `gone` says; it must not call the store. Returns how many values went."""
        with self._lock:
            return sum(
                self._forget(key, {id for id in values if gone(key, id)})
                for key, values in tuple(self._entries.items())
            )

    def close(self) -> None:
        """Forget everything and close the segments."""
        self.drop_where(lambda key, id: True)
        self.arena.close()

    def _blank(self, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[StoredValue]:
        """Uninitialised values of these shapes and dtypes; small ones share blocks, so many cost few allocations."""
        sizes = []
        for shape, dtype in kinds:
            if dtype not in DTYPE_NAMES:
                raise ValueError(f"the store takes no {dtype}: it knows {', '.join(DTYPES)}")
            sizes.append(shape.numel() * dtype.itemsize)
        entries: list[StoredValue] = []
        while len(entries) < len(kinds):
            first = len(entries)
            end, total = first + 1, aligned(sizes[first])
            while end < len(kinds) and total + aligned(sizes[end]) <= _SHARED_BYTES:
                total += aligned(sizes[end])
                end += 1
            entries += self._fill(kinds[first:end], sizes[first:end], total)
        return entries

    def _fill(
        self, kinds: Sequence[tuple[torch.Size, torch.dtype]], sizes: Sequence[int], total: int
    ) -> Iterator[StoredValue]:
        """One block of `total` bytes, cut into values, each aligned."""
        if total == 0:
            return (StoredValue(torch.empty(shape, dtype=dtype), None, 0, 0) for shape, dtype in kinds)
        block = self.arena.allocate(total)
        whole = torch.from_numpy(block.data)  # holds the block, and every view holds this storage
        typed = {dtype: whole.view(dtype) for dtype in {dtype for _, dtype in kinds}}  # once: a step puts thousands
        ends = itertools.accumulate(map(aligned, sizes))
        return (
            StoredValue(_cut(typed[dtype], start := end - aligned(n), shape), block, start, n)
            for (shape, dtype), n, end in zip(kinds, sizes, ends, strict=True)
        )

    def _insert(self, key: str, ids: Sequence[int], entries: Sequence[StoredValue]) -> None:
        with self._lock:
            values = self._entries.setdefault(key, {})
            for id, entry in zip(ids, entries, strict=True):
                replaced = values.get(id)
                self._nbytes += entry.nbytes - (replaced.nbytes if replaced else 0)
                values[id] = entry

    def _forget(self, key: str, ids: set[int]) -> int:
        values = self._entries.get(key, {})
        for id in ids:
            self._nbytes -= values.pop(id).nbytes
        if not values:
            self._entries.pop(key, None)
        return len(ids)


def _cut(whole: Tensor, start: int, shape: torch.Size) -> Tensor:
    """The value of this shape at byte `start` of a block seen as its dtype."""
    first = start // whole.element_size()
    piece = whole[first : first + shape.numel()]
    return piece if len(shape) == 1 else piece.view(shape)


def as_text(value: Tensor) -> str:
    """The text of a uint8 tensor [n] of UTF-8 bytes, as `put_text` stores it."""
    return value.numpy().tobytes().decode()


def _small(values: Sequence[Tensor]) -> bool:
    """True where values are best copied as one: of one dim and dtype, many to a block."""
    dtype = values[0].dtype
    if any(value.dim() != 1 or value.dtype != dtype for value in values):
        return False
    return sum(map(len, values)) * dtype.itemsize * 4 <= _SHARED_BYTES * len(values)


def as_bytes(value: bytes) -> Tensor:
    """[n] uint8, the tensor's own."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
