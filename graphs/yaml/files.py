"""Small text files of a user's: read whole, of any kind that ends, and never for ever. Knows no format."""

import errno
import os
import select
import stat
import time
from pathlib import Path

MOST_BYTES = 64 << 20  # of a run file, a plan, a table of costs: what is longer is no such file
PATIENCE_SECONDS = 10.0  # for a pipe, from its last byte
_CHUNK = 1 << 20


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file, a pipe or a terminal. Raises OSError, also for what has no end or does not answer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in its name
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return _drain(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The same as UTF-8 text. Raises OSError, UnicodeDecodeError."""
    return read_file(path, most_bytes).decode("utf-8")


def _drain(descriptor: int, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size, until = 0, time.monotonic() + PATIENCE_SECONDS
    while True:
        if not _readable(descriptor, until):  # a pipe whose writer has not written yet, or has not come
            raise TimeoutError(errno.ETIMEDOUT, f"it gave no data for {PATIENCE_SECONDS:.0f} s")
        part = os.read(descriptor, _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        until = time.monotonic() + PATIENCE_SECONDS
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it is longer than {most_bytes >> 20} MiB")


def _readable(descriptor: int, until: float) -> bool:
    return bool(select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0])
