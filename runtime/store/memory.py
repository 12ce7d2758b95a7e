"""An arena that hands out blocks of anonymous shared memory. Knows no tensor and no socket."""

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

from realgraph.runtime.memory.anonymous import ALIGN_ORDER, Bytes, map_bytes, open_anonymous

SEGMENT_BYTES = 1 << 30
_DEDICATED = -1  # the order of a block that is a whole segment of its own


@dataclass
class Segment:
    """A mapped piece of memory."""

    id: int
    fd: int
    nbytes: int
    data: Bytes
    free: list[set[int]] = field(default_factory=list)  # offsets of the free blocks of 2^k bytes, for each order k
    orders: int = 0  # bit k: `free[k]` holds any
    n_live: int = 0

    def give(self, offset: int, order: int) -> None:
        """Take back a block and join it with its free neighbours (buddies)."""
        while order + 1 < len(self.free) and (buddy := offset ^ (1 << order)) in self.free[order]:
            self._remove(buddy, order)
            offset &= ~(1 << order)
            order += 1
        self.free[order].add(offset)
        self.orders |= 1 << order

    def take(self, order: int) -> int | None:
        """The offset of a block of 2^order bytes, cut from the smallest free one that holds it; None if none does."""
        larger = self.orders >> order
        if not larger:
            return None
        free_order = order + (larger & -larger).bit_length() - 1
        offset = next(iter(self.free[free_order]))
        self._remove(offset, free_order)
        while free_order > order:
            free_order -= 1
            self.free[free_order].add(offset + (1 << free_order))
            self.orders |= 1 << free_order
        return offset

    def _remove(self, offset: int, order: int) -> None:
        self.free[order].remove(offset)
        if not self.free[order]:
            self.orders &= ~(1 << order)


@dataclass(frozen=True)
class SharedBlock:
    """`data`: [nbytes] uint8 at `offset` of a segment. The memory is free again once nothing refers to `data`."""

    segment: int
    offset: int
    data: Bytes

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Arena:
    """A buddy allocator over segments of `segment_bytes` (a power of two); larger blocks get a segment of their own.

    A block ends with the last array over it: whoever still looks at the bytes keeps them. Segments that are free as a
    whole are kept for reuse up to the live bytes plus one segment, and given back to the system beyond that.
    Safe to use from several threads.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        if segment_bytes < mmap.PAGESIZE or segment_bytes & (segment_bytes - 1):
            raise ValueError(f"segment_bytes is {segment_bytes}: expected a power of two of at least {mmap.PAGESIZE}")
        self.segment_bytes = segment_bytes
        self._segments: dict[int, Segment] = {}
        self._next_id = 0
        self._lock = threading.Lock()
        self._freed: deque[tuple[int, int, int]] = deque()  # filled by finalizers, which may not take the lock
        self._live_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of blocks in use, as rounded up by the allocator."""
        with self._lock:
            self._collect()
            return self._live_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments: address space, of which only the pages once written take memory."""
        with self._lock:
            return sum(segment.nbytes for segment in self._segments.values())

    def allocate(self, nbytes: int) -> SharedBlock:
        """A block of `nbytes` > 0, its contents undefined. Raises OSError where the system gives no more."""
        assert nbytes > 0
        order = max(ALIGN_ORDER, (nbytes - 1).bit_length())
        with self._lock:
            self._collect()
            if 1 << order > self.segment_bytes:
                segment, offset, order = self._dedicated(nbytes), 0, _DEDICATED
            else:
                segment, offset = self._shared(order)
            segment.n_live += 1
            self._live_bytes += segment.nbytes if order == _DEDICATED else 1 << order
            data = segment.data[offset : offset + nbytes]
        weakref.finalize(data, self._freed.append, (segment.id, offset, order)).atexit = False
        return SharedBlock(segment.id, offset, data)

    def segments(self) -> frozenset[int]:
        """The ids of the segments there are. Ids are never used twice."""
        with self._lock:
            return frozenset(self._segments)

    def descriptor(self, segment: int) -> tuple[int, int]:
        """File descriptor and size in bytes of a segment that holds a live block."""
        with self._lock:
            shared_memory = self._segments[segment]
            return shared_memory.fd, shared_memory.nbytes

    def close(self) -> None:
        """Close all descriptors. Arrays that are still in use stay valid; nothing can be allocated any more."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            self._segments.clear()
            self._freed.clear()

    def _shared(self, order: int) -> tuple[Segment, int]:
        for segment in self._segments.values():
            if segment.free and (offset := segment.take(order)) is not None:
                return segment, offset
        segment = self._open(self.segment_bytes)
        segment.free = [set() for _ in range(self.segment_bytes.bit_length())]
        segment.give(0, self.segment_bytes.bit_length() - 1)
        offset = segment.take(order)
        assert offset is not None
        return segment, offset

    def _dedicated(self, nbytes: int) -> Segment:
        fitting = [s for s in self._segments.values() if not s.free and not s.n_live and nbytes <= s.nbytes]
        best = min(fitting, key=lambda s: s.nbytes, default=None)
        if best is not None and best.nbytes <= nbytes + nbytes // 4:
            return best
        return self._open(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def _open(self, nbytes: int) -> Segment:
        fd = open_anonymous(nbytes)
        try:
            data = map_bytes(fd, nbytes, writable=True)
        except (OSError, ValueError):
            os.close(fd)
            raise
        segment = Segment(self._next_id, fd, nbytes, data)
        self._next_id += 1
        self._segments[segment.id] = segment
        return segment

    def _collect(self) -> None:
        """Take back what finalizers queued; then give back segments that are free beyond what may be kept."""
        emptied = False
        while self._freed:
            segment_id, offset, order = self._freed.popleft()
            segment = self._segments.get(segment_id)
            if segment is None:  # the arena was closed meanwhile
                continue
            segment.n_live -= 1
            if order == _DEDICATED:
                self._live_bytes -= segment.nbytes
            else:
                segment.give(offset, order)
                self._live_bytes -= 1 << order
            emptied |= segment.n_live == 0
        if not emptied:
            return
        idle = [segment for segment in self._segments.values() if segment.n_live == 0]
        surplus = sum(s.nbytes for s in idle) - self._live_bytes - self.segment_bytes
        for segment in sorted(idle, key=lambda s: s.nbytes):
            if surplus > 0:
                surplus -= segment.nbytes
                os.close(segment.fd)
                del self._segments[segment.id]
