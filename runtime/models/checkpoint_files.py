"""Tensors on disk: safetensors written as a stream, synced, and read back by name. Knows no model and no optimizer.

The safetensors package holds a whole file in memory and hides a full disk behind an error of its own; this writer holds
one tensor, and a failed write is an OSError. Format: 8 bytes little-endian header length, a JSON header with
dtype, shape and offsets of each tensor, then the bytes (github.com/huggingface/safetensors).
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SHARD_BYTES = 5 * 10**9  # of one file, as transformers writes them
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
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class CheckpointTarget:
    """Files `<stem>.safetensors`, or `<stem>-00001-of-0000N` with an index where one would exceed `shard_bytes`."""

    folder: Path
    stem: str
    shard_bytes: int = SHARD_BYTES


def write(target: CheckpointTarget, entries: Sequence[TensorEntry], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors`, which come in the order of `entries`. Raises OSError where the disk refuses."""
    shards = _shards(entries, target.shard_bytes)
    names = _file_names(target.stem, len(shards))
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(target.folder / name, shard, source)
    if len(shards) > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": where}
        write_json(target.folder / f"{target.stem}.safetensors.index.json", index)


def _shards(entries: Sequence[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _file_names(stem: str, n: int) -> list[str]:
    if n == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]


def _write_file(path: Path, entries: Sequence[TensorEntry], tensors: Iterator[tuple[str, Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        ends = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            name, tensor = next(tensors)
            if name != entry.name or tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(f"expected {entry}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


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

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor. Raises KeyError."""
        view = self._where[name].get_slice(name)
        tensor: Tensor = view[where] if where else view[...]
        return tensor


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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
