"""A safetensors file on the host of the run, read from another: as the package's `safe_open`, as far as it is used."""

import json
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from realgraph.runtime.files.messages import PIECE_BYTES, FileBox
from realgraph.runtime.files.paths import RemotePath
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.routes import cut_to

DTYPES_BY_NAME = {  # of safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BOOL": torch.bool,
}


class UnreadableTensors(ValueError):
    """A file is no whole safetensors file; the text names it."""


class RemoteTensors:
    """The tensors of one file, by name. Raises UnreadableTensors where it is something else; OSError."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        try:
            length, n_bytes = int.from_bytes(path.read_at(0, 8), "little"), path.nbytes()
            if length > n_bytes - 8:
                raise ValueError(f"a header of {length} bytes in a file of {n_bytes}")
            header: dict[str, Any] = json.loads(path.read_at(8, length))
            header.pop("__metadata__", None)
            self._tensors = {name: _tensor(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableTensors(f"{path}: {error}") from error

    def __enter__(self) -> "RemoteTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held open."""

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "RemoteTensor":
        """A tensor of which nothing has been read. Raises KeyError."""
        return self._tensors[name]


class RemoteTensor:
    """One tensor of a file; indexing reads."""

    def __init__(self, path: RemotePath, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._path, self._start, self._dtype, self._shape = path, start, dtype, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        """index: a slice of each dim, or `...` for all of it."""
        slices = () if index is ... else tuple(index)
        start = tuple(one.start for one in slices) or (0,) * len(self._shape)
        box = Box(start, tuple(one.stop - one.start for one in slices) or self._shape)
        values = torch.empty(box.shape, dtype=self._dtype)
        for part in cut_to(box, PIECE_BYTES // self._dtype.itemsize) if box.numel else ():
            at = FileBox(self._start, self._dtype.itemsize, self._shape, part.start, part.shape)
            data = bytearray(self._path.read_box(at))
            values[part.within(box).slices] = torch.frombuffer(data, dtype=self._dtype).view(part.shape)
        return values


def _tensor(path: RemotePath, first: int, entry: dict[str, Any]) -> RemoteTensor:
    """first: byte of the file behind its header."""
    return RemoteTensor(path, first + entry["data_offsets"][0], DTYPES_BY_NAME[entry["dtype"]], tuple(entry["shape"]))
