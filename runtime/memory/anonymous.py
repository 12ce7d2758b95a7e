"""Shared memory without a name, as files and as arrays. Knows no tensor and no socket.

A file is a memfd on Linux. macOS has none: there it is a temporary file, unlinked before its first use. Neither has a
name, so the memory goes with the last process that maps it, however that process ends. Files are sparse: only pages
that were written take memory.
"""

import contextlib
import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGN_ORDER = 6  # blocks start on multiples of 64 bytes, a cache line, which also fits every dtype
ALIGN_BYTES = 1 << ALIGN_ORDER


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to the alignment of blocks."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def open_anonymous(nbytes: int) -> int:
    """A file descriptor of `nbytes` of nameless, sparse, zeroed memory. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("realgraph", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="realgraph-")
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_bytes(fd: int, nbytes: int, *, writable: bool) -> Bytes:
    """[nbytes] uint8 over the file; the mapping lives as long as any array over it. Does not take over `fd`."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    mapping = mmap.mmap(fd, nbytes, access=access)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower first touches, nothing else
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


class Window:
    """Lets numpy look at `data`, which is mapped read-only, without the warning that torch gives for such arrays.
    loan: whatever shall live as long as the arrays."""

    def __init__(self, data: Bytes, loan: object = None) -> None:
        self.__array_interface__ = data.__array_interface__ | {"data": (data.ctypes.data, False)}
        self.keeps = (data, loan)
