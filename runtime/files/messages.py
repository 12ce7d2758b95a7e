"""Every message between a worker whose host does not see the run directory and the host of the run, both ways.

Paths are those of the host of the run. A file is written and read by boxes of the tensors in it, or of bytes where it
holds none; a message has at most PIECE_BYTES of them.
"""

import math
from collections.abc import Iterator

from msgspec import Struct, field
from msgspec.msgpack import Decoder, Encoder

PIECE_BYTES = 4 << 20
MOST_DIMS = 16
MOST_FILE_BYTES = 1 << 50


class FileBox(Struct, frozen=True, array_like=True):
    """A box of a tensor that lies in a file, as safetensors have them: whole, in row-major order."""

    start: int  # byte of the file at which the tensor begins
    element_bytes: int
    shape: tuple[int, ...]  # of the tensor
    first: tuple[int, ...]  # the box's first element
    size: tuple[int, ...]  # of the box

    @property
    def nbytes(self) -> int:
        return self.element_bytes * math.prod(self.size)

    @property
    def end(self) -> int:
        """The byte of the file behind the tensor."""
        return self.start + self.element_bytes * math.prod(self.shape)

    @property
    def fault(self) -> str:
        """The reason for which it is no box; '' where it is one."""
        if not len(self.shape) == len(self.first) == len(self.size) <= MOST_DIMS:
            return f"its tensor has another number of dims, or more than {MOST_DIMS}"
        if min(self.start, *self.first, *self.size, self.element_bytes - 1) < 0:
            return "it has a negative number"
        if self.end > MOST_FILE_BYTES:
            return "its file would be larger than any"
        ends = (first + size for first, size in zip(self.first, self.size, strict=True))
        return "it is not within its tensor" if any(end > n for end, n in zip(ends, self.shape, strict=True)) else ""

    def runs(self) -> tuple[int, Iterator[int]]:
        """The box as runs of bytes that lie in a row: their length, and the place of each in the file."""
        if not self.nbytes:
            return 0, iter(())
        run, firsts = runs(self.shape, self.first, self.size)
        return run * self.element_bytes, (self.start + first * self.element_bytes for first in firsts)


def bytes_at(start: int, n_bytes: int) -> FileBox:
    """So many bytes of a file, from `start` on."""
    return FileBox(start, 1, (n_bytes,), (0,), (n_bytes,))


def runs(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, Iterator[int]]:
    """The box at `start` of a tensor as runs of elements that lie in a row: their length, and the first element of
    each. Not for boxes without elements."""
    dim = len(shape)
    while dim and size[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer, inside = max(0, dim - 1), math.prod(shape[dim:])  # dims behind `dim` are whole; runs are along `outer`
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(first * stride for first, stride in zip(start, strides, strict=True))
    run = (size[outer] if dim else 1) * inside

    def firsts(i: int, at: int) -> Iterator[int]:
        if i == outer:
            yield at
            return
        for row in range(size[i]):
            yield from firsts(i + 1, at + row * strides[i])

    return run, firsts(0, base)


# --- worker -> host of the run ----------------------------------------------------------------------------------------


class _Request(Struct, frozen=True, tag=True):
    number: int  # of the request, for its answer
    path: str


class MakeFolder(_Request, frozen=True):
    """Make a folder, with those above it, where it is not there."""


class WriteBox(_Request, frozen=True):
    """Write a box of a file, which is made, and has `file_bytes` in the end."""

    file_bytes: int
    box: FileBox
    data: bytes


class AppendLine(_Request, frozen=True):
    """Append a line to a file, which is made; half a line that an earlier run has left is cut off."""

    line: bytes


class SyncPath(_Request, frozen=True):
    """Make durable what was written to a file, or the entries of a folder."""


class ReadBox(_Request, frozen=True):
    """Read a box of a file."""

    box: FileBox


class ListFolder(_Request, frozen=True):
    """Tell the files in a folder, with their bytes."""


FileRequest = MakeFolder | WriteBox | AppendLine | SyncPath | ReadBox | ListFolder


# --- host of the run -> worker ----------------------------------------------------------------------------------------


class FileAnswer(Struct, frozen=True, tag=True):
    """A request is done. data: what was read; sizes: bytes of each file of a folder."""

    number: int
    data: bytes = b""
    sizes: dict[str, int] = field(default_factory=dict)


class FileRefusal(Struct, frozen=True, tag=True):
    """A request has failed, as OSError has it."""

    number: int
    errno: int
    text: str
    path: str


FileReply = FileAnswer | FileRefusal

encode = Encoder().encode
decode_request: Decoder[FileRequest] = Decoder(FileRequest)
decode_reply: Decoder[FileReply] = Decoder(FileReply)
