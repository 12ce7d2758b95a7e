"""Tensors on disk: safetensors written by several processes at once, each its parts, and read back by name.

Every file is known before a byte of it is written: its header follows from the tensors' names, dtypes and shapes, and
with it the place of every element. So each writer puts its parts where they belong and syncs what it wrote; they need
no word of each other, and no part is ever larger in memory than a bucket. A system lets one process at a time write to
a file, so there are several, of which each writer begins with another one. A failed write is an OSError that says which
file. Knows no model and no optimizer.

Format: 8 bytes little-endian header length, a JSON header with dtype, shape and offsets of each tensor, then the bytes
(github.com/huggingface/safetensors).
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realgraph.runtime.files.messages import PIECE_BYTES, FileBox, runs
from realgraph.runtime.files.paths import RemotePath, RunPath, naming, sync_path, write_synced
from realgraph.runtime.job.run_folder import write_at
from realgraph.runtime.models.remote_tensors import DTYPES_BY_NAME, RemoteTensors, UnreadableTensors
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.routes import cut_to

SHARD_BYTES = 5 * 10**9  # the most of one file, as transformers wrote them
N_FILES, LEAST_BYTES = 8, 64 * 10**6  # so many files at least, where that leaves each as many bytes
BUCKET_BYTES = 16 << 20  # of a part that is cast, brought to the host, or read at a time
_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


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
    """Files `<stem>.safetensors`, or `<stem>-00001-of-0000N` with an index where one would exceed `shard_bytes`; None:
    as many as follow from the bytes of all tensors."""

    folder: RunPath
    stem: str
    shard_bytes: int | None = None


class Writer(NamedTuple):
    """One of the processes that write the same files. The first leads: it writes what the files have besides."""

    number: int = 0
    of: int = 1

    @property
    def leads(self) -> bool:
        return self.number == 0


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file as it will be. starts: the place of each tensor's first byte in the file."""

    name: str
    header: bytes  # with its length
    starts: Mapping[str, int]
    nbytes: int


def write_parts(
    target: CheckpointTarget, entries: Sequence[TensorEntry], parts: Iterable[WeightPart], writer: Writer
) -> None:
    """Write this process's parts of the tensors `entries`, in any order, cast to their dtypes, and sync them.

    All writers pass the same target and entries, and their parts together are all there is of the tensors. Parts of one
    among several stay as they are until the end; those of the only one may come and go. Raises OSError where the disk
    refuses.
    """
    files = _tensor_files(target, entries)
    with ExitStack() as stack:
        opened = {file.name: _opened(target.folder / file.name, file, stack) for file in files}
        if writer.leads:
            for file in opened.values():
                file.lead()
        places = {name: opened[file.name] for file in files for name in file.starts}
        by_name = {entry.name: entry for entry in entries}
        for part in parts if writer.of == 1 else _apart(parts, files, writer):
            places[part.name].write(by_name[part.name], part)
        for file in opened.values():
            file.sync()
    if writer.leads and len(files) > 1:
        where = {name: file.name for file in files for name in file.starts}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": where}
        write_json(target.folder / f"{target.stem}.safetensors.index.json", index)


def _apart(parts: Iterable[WeightPart], files: Sequence[TensorFile], writer: Writer) -> list[WeightPart]:
    """The parts file by file, from another one on for each writer, so that they do not wait for each other."""
    numbers = {name: i for i, file in enumerate(files) for name in file.starts}
    first = writer.number * len(files) // writer.of
    return sorted(parts, key=lambda part: (numbers[part.name] - first) % len(files))


def _opened(path: RunPath, file: TensorFile, stack: ExitStack) -> "_Opened | _OpenedThere":
    return _Opened(path, file, stack) if isinstance(path, Path) else _OpenedThere(path, file)


class _Opened:
    """A file that this process writes to, made where it is not there; opened at the first byte."""

    def __init__(self, path: Path, file: TensorFile, stack: ExitStack) -> None:
        self._path, self._file, self._stack = path, file, stack
        self._handle = -1

    def lead(self) -> None:
        """Write the header."""
        with naming(self._path):
            write_at(self._open(), memoryview(self._file.header), 0)

    def write(self, entry: TensorEntry, part: WeightPart) -> None:
        """Write a part of a tensor, a bucket at a time."""
        with naming(self._path):
            handle, start, size = self._open(), self._file.starts[entry.name], entry.dtype.itemsize
            for box, own in _in_buckets(entry, part, BUCKET_BYTES):
                data = _bytes_of(own)
                run, firsts = runs(entry.shape, box.start, box.shape)
                for i, first in enumerate(firsts):
                    write_at(handle, data[i * run * size : (i + 1) * run * size], start + first * size)

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


class _OpenedThere:
    """A file on the host of the run that this process writes to: its boxes travel, and are put in place there."""

    def __init__(self, path: RemotePath, file: TensorFile) -> None:
        self._path, self._file = path, file
        self._written = False

    def lead(self) -> None:
        """Write the header."""
        self._written = True
        self._path.write_at(0, self._file.header, self._file.nbytes)

    def write(self, entry: TensorEntry, part: WeightPart) -> None:
        """Write a part of a tensor, a piece at a time."""
        self._written = True
        start, size = self._file.starts[entry.name], entry.dtype.itemsize
        for box, own in _in_buckets(entry, part, PIECE_BYTES):
            at = FileBox(start, size, entry.shape, box.start, box.shape)
            self._path.write_box(at, bytes(_bytes_of(own)), self._file.nbytes)

    def sync(self) -> None:
        """Make durable what this process wrote."""
        if self._written:
            sync_path(self._path)


def _in_buckets(entry: TensorEntry, part: WeightPart, most_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a part, and their values as they are saved, on the host."""
    for box in _cut(part.box, entry.dtype.itemsize, most_bytes):
        values = part.values[box.within(part.box).slices]
        yield box, values.detach().to("cpu", entry.dtype).contiguous()


def _bytes_of(own: Tensor) -> memoryview:
    """The bytes of a tensor, which the caller holds: numpy would pin the storage's size for good, and offloaded states
    give theirs back."""
    return memoryview((ctypes.c_char * own.nbytes).from_address(own.data_ptr()))


def _cut(box: Box, element_bytes: int, most_bytes: int) -> Iterator[Box]:
    if box.numel:
        yield from cut_to(box, most_bytes // element_bytes)


def _tensor_files(target: CheckpointTarget, entries: Sequence[TensorEntry]) -> list[TensorFile]:
    """The files that hold the tensors, in order."""
    shards: list[list[TensorEntry]] = [[]]
    size, most = 0, target.shard_bytes
    if most is None:
        most = min(SHARD_BYTES, max(LEAST_BYTES, sum(entry.nbytes for entry in entries) // N_FILES))
    for entry in entries:
        if shards[-1] and size + entry.nbytes > most:
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


def open_tensors(file: RunPath) -> Any:
    """The package's `safe_open`, or what does the same on the host of the run. Raises UnreadableTensors where the file
    is cut short or is something else."""
    if isinstance(file, RemotePath):
        return RemoteTensors(file)
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UnreadableTensors(f"{file}: {error}") from error


def read_part(view: Any, part: WeightPart) -> None:
    """Fill a part of a tensor from its slice (`safe_open(...).get_slice`), cast, a bucket at a time."""
    for box in _cut(part.box, part.values.element_size(), BUCKET_BYTES):
        part.values[box.within(part.box).slices].copy_(view[box.slices] if box.shape else view[...])


class Reader:
    """The tensors of `<stem>*.safetensors` in a folder, by name, read where they are asked for. A context manager."""

    def __init__(self, folder: RunPath, stem: str) -> None:
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        files: list[RunPath] = [*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")]
        if not files:
            raise FileNotFoundError(f"{folder} holds no {stem}.safetensors")
        for file in sorted(files, key=str):
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


def write_json(path: RunPath, value: Mapping[str, Any]) -> None:
    """Write and sync a small JSON file."""
    write_synced(path, json.dumps(value, indent=2, sort_keys=True).encode())


def copy_file(source: Path, target: RunPath) -> None:
    """Copy and sync one file."""
    write_synced(target, source.read_bytes())
