"""Tensors on disk: safetensors written by several processes at once, each its parts, and read back by name.

The whole file is known before a byte of it is written: its header follows from the tensors' names, dtypes and shapes,
and with it the place of every element. So each writer puts its parts where they belong and syncs what it wrote; they
need no word of each other, and no part is ever larger in memory than a bucket. A failed write is an OSError that says
which file. Knows no model and no optimizer.

Format: 8 bytes little-endian header length, a JSON header with dtype, shape and offsets of each tensor, then the bytes
(github.com/huggingface/safetensors).
"""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.routes import cut_to

SHARD_BYTES = 5 * 10**9  # of one file, as transformers writes them
BUCKET_BYTES = 16 << 20  # of a part that is cast, brought to the host, or read at a time
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointTarget:
    """Files `<stem>.safetensors`, or `<stem>-00001-of-0000N` with an index where one would exceed `shard_bytes`."""

    folder: Path
    stem: str
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file as it will be. starts: the place of each tensor's first byte in the file."""

    name: str
    header: bytes  # with its length
    starts: Mapping[str, int]
    nbytes: int


def write_parts(
    target: CheckpointTarget, entries: Sequence[TensorEntry], parts: Iterable[WeightPart], *, leads: bool
) -> None:
    """Write this process's parts of the tensors `entries`, in any order, cast to their dtypes, and sync them.

    All writers pass the same target and entries, and their parts together are all there is of the tensors. One of them
    leads: it writes what the files have besides. Raises OSError where the disk refuses.
    """
    files = _tensor_files(target, entries)
    with ExitStack() as stack:
        opened = {file.name: _Opened(target.folder / file.name, file, stack) for file in files}
        if leads:
            for file in opened.values():
                file.lead()
        places = {name: opened[file.name] for file in files for name in file.starts}
        by_name = {entry.name: entry for entry in entries}
        for part in parts:
            places[part.name].write(by_name[part.name], part)
        for file in opened.values():
            file.sync()
    if leads and len(files) > 1:
        where = {name: file.name for file in files for name in file.starts}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": where}
        write_json(target.folder / f"{target.stem}.safetensors.index.json", index)


class _Opened:
    """A file that this process writes to, made where it is not there; opened at the first byte."""

    def __init__(self, path: Path, file: TensorFile, stack: ExitStack) -> None:
        self._path, self._file, self._stack = path, file, stack
        self._handle = -1

    def lead(self) -> None:
        """Write the header."""
        with naming(self._path):
            _write_at(self._open(), memoryview(self._file.header), 0)

    def write(self, entry: TensorEntry, part: WeightPart) -> None:
        """Write a part of a tensor, a bucket at a time."""
        with naming(self._path):
            handle, start, size = self._open(), self._file.starts[entry.name], entry.dtype.itemsize
            for box in _in_buckets(part.box, size):
                values = part.values[box.within(part.box).slices]
                own = values.detach().to("cpu", entry.dtype).contiguous()
                # numpy would pin the storage's size for good, and offloaded states give theirs back
                data = memoryview((ctypes.c_char * own.nbytes).from_address(own.data_ptr()))
                run, firsts = _runs(entry.shape, box)
                for i, first in enumerate(firsts):
                    _write_at(handle, data[i * run * size : (i + 1) * run * size], start + first * size)

    def sync(self) -> None:
        """Make durable what this process wrote."""
        if self._handle >= 0:
            with naming(self._path):
                os.fsync(self._handle)

    def _open(self) -> int:
        if self._handle < 0:
            self._handle = os.open(str(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._stack.callback(os.close, self._handle)
            os.ftruncate(self._handle, self._file.nbytes)  # whoever comes first makes room; to the others it is so
        return self._handle


def _in_buckets(box: Box, element_bytes: int) -> Iterator[Box]:
    if box.numel:
        yield from cut_to(box, BUCKET_BYTES // element_bytes)


def _runs(shape: tuple[int, ...], box: Box) -> tuple[int, Iterator[int]]:
    """The box of a tensor as runs of elements that lie in a row: their length, and the first element of each."""
    dim = len(shape)
    while dim and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer, inside = max(0, dim - 1), math.prod(shape[dim:])  # dims behind `dim` are whole; runs are along `outer`
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(first * stride for first, stride in zip(box.start, strides, strict=True))
    run = (box.shape[outer] if dim else 1) * inside

    def firsts(i: int, at: int) -> Iterator[int]:
        if i == outer:
            yield at
            return
        for row in range(box.shape[i]):
            yield from firsts(i + 1, at + row * strides[i])

    return run, firsts(0, base)


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. Raises OSError."""
    while data:
        n = os.pwrite(handle, data, offset)
        data, offset = data[n:], offset + n


def _tensor_files(target: CheckpointTarget, entries: Sequence[TensorEntry]) -> list[TensorFile]:
    """The files that hold the tensors, in order."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > target.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    n, stem = len(shards), target.stem
    if n == 1:
        return [_tensor_file(f"{stem}.safetensors", shards[0])]
    return [_tensor_file(f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors", shard) for i, shard in enumerate(shards)]


def _tensor_file(name: str, entries: Sequence[TensorEntry]) -> TensorFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for entry in entries:
        offsets[entry.name], end = end, end + entry.nbytes
        place = [offsets[entry.name], end]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    starts = {tensor: first + offset for tensor, offset in offsets.items()}
    return TensorFile(name, len(text).to_bytes(8, "little") + text, starts, first + end)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing say which file: a full disk is noticed where no name is at hand any more."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class UnreadableTensors(ValueError):
    """A file is no whole safetensors file; the text names it."""


def open_tensors(file: Path) -> Any:
    """The package's `safe_open`. Raises UnreadableTensors where the file is cut short or is something else."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UnreadableTensors(f"{file}: {error}") from error


def read_part(view: Any, part: WeightPart) -> None:
    """Fill a part of a tensor from its slice (`safe_open(...).get_slice`), cast, a bucket at a time."""
    for box in _in_buckets(part.box, part.values.element_size()):
        part.values[box.within(part.box).slices].copy_(view[box.slices] if box.shape else view[...])


class Reader:
    """The tensors of `<stem>*.safetensors` in a folder, by name, read where they are asked for. A context manager."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        files = sorted({*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")})
        if not files:
            raise FileNotFoundError(f"{folder} holds no {stem}.safetensors")
        for file in files:
            source = self._stack.enter_context(open_tensors(file))
            self._where.update(dict.fromkeys(source.keys(), source))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def read(self, name: str, part: WeightPart) -> None:
        """Fill the values of `part` from the tensor `name`. Raises KeyError."""
        read_part(self._where[name].get_slice(name), part)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write and sync a small JSON file."""
    with naming(path), path.open("w") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy and sync one file."""
    with naming(target):
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
