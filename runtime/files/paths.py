"""Paths of a run directory, on this host or, where it does not see it, on the host of the run: one set of functions for
both. Raises OSError as the functions of `pathlib` do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from realgraph.runtime.files.client import FileClient
from realgraph.runtime.files.messages import PIECE_BYTES, FileBox, bytes_at
from realgraph.runtime.job.run_folder import fsync_path


@dataclass(frozen=True)
class RemotePath:
    """A path on the host of the run. What it has of `pathlib.Path` does the same."""

    client: FileClient
    text: str

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.client, f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        return PurePosixPath(self.text).name

    def is_file(self) -> bool:
        """False also where the folder is not there."""
        return self.name in self._beside()

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """The files of this folder whose names fit."""
        yield from (self / name for name in sorted(self.client.sizes(self.text)) if fnmatchcase(name, pattern))

    def nbytes(self) -> int:
        """The file's bytes."""
        sizes = self._beside()
        if self.name not in sizes:
            raise FileNotFoundError(2, os.strerror(2), self.text)
        return sizes[self.name]

    def read_bytes(self) -> bytes:
        return self.read_at(0, self.nbytes())

    def read_at(self, start: int, n_bytes: int) -> bytes:
        """So many bytes, from `start` on."""
        places = range(start, start + n_bytes, PIECE_BYTES)
        return b"".join(self.read_box(bytes_at(at, min(PIECE_BYTES, start + n_bytes - at))) for at in places)

    def read_box(self, box: FileBox) -> bytes:
        """At most PIECE_BYTES."""
        return self.client.read(self.text, box)

    def write_at(self, start: int, data: bytes, file_bytes: int) -> None:
        """Write bytes from `start` on; the file has `file_bytes` in the end."""
        for at in range(0, max(1, len(data)), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            self.write_box(bytes_at(start + at, len(piece)), piece, file_bytes)

    def write_box(self, box: FileBox, data: bytes, file_bytes: int) -> None:
        """At most PIECE_BYTES."""
        self.client.write(self.text, file_bytes, box, data)

    def append(self, line: bytes) -> None:
        """Append a line to the file, and wait until it is there."""
        self.client.append(self.text, line)

    def _beside(self) -> dict[str, int]:
        try:
            return dict(self.client.sizes(str(PurePosixPath(self.text).parent)))
        except FileNotFoundError:
            return {}


RunPath = Path | RemotePath


@contextmanager
def naming(path: RunPath) -> Iterator[None]:
    """Errors of writing say which file: a full disk is noticed where no name is at hand any more."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def make_folder(path: RunPath) -> None:
    """Make a folder, with those above it, where it is not there."""
    match path:
        case RemotePath():
            path.client.make_folder(path.text)
        case Path():
            path.mkdir(parents=True, exist_ok=True)


def sync_path(path: RunPath) -> None:
    """Make durable what was written to a file, or the entries of a folder."""
    match path:
        case RemotePath():
            path.client.sync(path.text)
        case Path():
            fsync_path(path)


def write_synced(path: RunPath, content: bytes) -> None:
    """Write and sync a file that fits into memory."""
    match path:
        case RemotePath():
            path.write_at(0, content, len(content))
            sync_path(path)
        case Path():
            with naming(path), path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
