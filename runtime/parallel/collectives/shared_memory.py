"""Collectives of the CPU ranks of one host through memory that they share. Linux; nothing passes through a socket.

A collective goes in rounds. Each rank writes its slot, posts one semaphore of every peer, waits for every peer's post
and reads the peers' slots. Rounds use two slots of a rank in turn: who has seen all posts of a round knows that all
peers have read the slots of the round before. Sums add the ranks in their order, so all get the same bits.

gloo sends the same tensors through TCP sockets and two threads a rank; under it the ranks of a busy host spend most of
their time in the kernel.
"""

import ctypes
import errno
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from realgraph.runtime.memory.anonymous import aligned, open_anonymous
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError

SLOT_BYTES = 1 << 21  # a rank's part of one round
PARTED_BYTES = 1 << 16  # of a sum: from here each rank adds its part of it and reads the parts of the others
LOOK_SECONDS = 0.5  # between two looks at the peers of a rank that waits
_SEMAPHORE_BYTES = 64  # at least a `sem_t` of any Linux system, and a cache line
_NOTE = torch.int64


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """The memory that the ranks of one group share, seen from one of them. Its calls are collective, in one order on
    all ranks, from one thread at a time; they raise CollectiveError where a rank has ended or misses the deadline."""

    def __init__(self, file: int, rank: int, workers: Sequence[int], pids: Sequence[int], seconds: float):
        """file: a descriptor of the memory, which this object takes over. workers, pids: of the ranks in order;
        seconds: the deadline of a collective."""
        self.rank, self.size = rank, len(workers)
        self._file, self._workers, self._seconds = file, workers, seconds
        self._looks = {peer: os.pidfd_open(pids[peer]) for peer in range(self.size) if peer != rank}
        whole = torch.frombuffer(mmap.mmap(file, _bytes_of(self.size)), dtype=torch.uint8)
        first = whole.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._posts = [ctypes.c_void_p(first + _semaphore(peer, rank, self.size)) for peer in self._looks]
        self._waits = [(peer, ctypes.c_void_p(first + _semaphore(rank, peer, self.size))) for peer in self._looks]
        notes = _notes_at(self.size)
        self._notes = whole[notes : notes + 3 * self.size * _NOTE.itemsize].view(_NOTE).view(3, self.size)
        # Read while a rank waits, so as often as chance will have it: by no operation of torch, since selective
        # recomputation counts those of a forward pass and of its repetition.
        self._left = self._notes[2].numpy()
        slots = whole[_slots_at(self.size) :].view(2, self.size, SLOT_BYTES)
        self._slots: dict[torch.dtype, Tensor] = {torch.uint8: slots}
        self._round = 0
        self._begun: Callable[[], Tensor] | None = None

    @torch.inference_mode()  # writes into tensors of that mode, too
    def reduce(self, flat: Tensor, *, largest: bool = False) -> None:
        """Sum, or largest, over the ranks, in place. flat: [n], of n alike on all ranks."""
        for piece in torch.split(flat, SLOT_BYTES // flat.element_size()):
            slots = self._share(piece)
            if self.size == 2 or len(piece) * piece.element_size() < PARTED_BYTES:
                _combine(slots, largest, piece)
                continue
            each = -(-len(piece) // self.size)
            own = slots[:, each * self.rank : each * (self.rank + 1)]
            own[self.rank] = _combine(own, largest, torch.empty_like(own[0]))
            self._meet()
            for rank in range(self.size):
                piece[each * rank : each * (rank + 1)] = slots[rank, each * rank : each * (rank + 1)]

    @torch.inference_mode()
    def gather(self, own: Tensor, rows: Tensor) -> None:
        """[n] of every rank -> rows: [ranks, n]."""
        per_round = SLOT_BYTES // own.element_size()
        rows[self.rank] = own
        for first in range(0, len(own), per_round):
            slots = self._share(own[first : first + per_round])
            for peer in self._looks:
                rows[peer, first : first + per_round] = slots[peer]

    @torch.no_grad()
    def begin_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """[n] of every rank, which fit a slot -> [ranks, n], by the call of what comes back, which alone waits for the
        others."""
        self._finish()
        slots = self._write(own)
        self._post()
        rows: list[Tensor] = []

        def finish() -> Tensor:
            if not rows:
                self._begun = None
                self._wait()
                rows.append(slots.clone())
            return rows[0]

        self._begun = finish
        return finish

    @torch.inference_mode()
    def scatter(self, rows: Tensor, own: Tensor) -> None:
        """[ranks, n] of every rank -> own: [n], this rank's row of their sum."""
        per_round = SLOT_BYTES // rows.element_size() // self.size
        for first in range(0, len(own), per_round):
            part = rows[:, first : first + per_round]
            self._finish()
            slots = self._typed(rows.dtype)[self._round % 2, :, : part.numel()].view(self.size, *part.shape)
            for peer in self._looks:  # its own row a rank adds from where it is
                slots[self.rank, peer] = part[peer]
            self._round += 1
            self._meet()
            parts = [part[rank] if rank == self.rank else slots[rank, self.rank] for rank in range(self.size)]
            _combine(parts, False, own[first : first + per_round])

    @torch.inference_mode()
    def broadcast(self, flat: Tensor, source: int) -> None:
        """The values of rank `source` on every rank, in place. flat: [n], of n alike on all ranks."""
        for piece in torch.split(flat, SLOT_BYTES // flat.element_size()):
            if self.rank == source:
                self._share(piece)
            else:
                piece.copy_(self._share(piece[:0], len(piece))[source])

    @torch.inference_mode()
    def exchange(self, rows: Tensor, came: Tensor, out: Sequence[int], into: Sequence[int]) -> None:
        """rows: [sum of out] -> came: [sum of into]. The first `out[0]` values go to rank 0, and so on; `into[r]` come
        from rank r."""
        leaving, arriving = torch.split(rows, list(out)), torch.split(came, list(into))
        per_round = SLOT_BYTES // rows.element_size() // self.size  # to each rank
        first, rounds = 0, 1
        while first < rounds * per_round:
            self._finish()
            slots = self._typed(rows.dtype)[self._round % 2, :, : self.size * per_round]
            slots = slots.view(self.size, self.size, per_round)
            for rank, values in enumerate(leaving):
                part = values[first : first + per_round]
                slots[self.rank, rank, : len(part)] = part
            notes = self._notes[self._round % 2]
            notes[self.rank] = -(-max(out) // per_round)
            self._meet()
            self._round += 1
            for rank, values in enumerate(arriving):
                part = values[first : first + per_round]
                part.copy_(slots[rank, self.rank, : len(part)])
            first, rounds = first + per_round, int(notes.max())

    def close(self) -> None:
        """Leave: peers that wait for this rank, now or later, get an error. Not collective."""
        self._left[self.rank] = 1
        for descriptor in (self._file, *self._looks.values()):
            os.close(descriptor)

    def _share(self, own: Tensor, n: int | None = None) -> Tensor:
        """One round -> [ranks, n], the slots as all have written them; valid until this rank's next round but one."""
        self._finish()
        slots = self._write(own, n)
        self._meet()
        return slots

    def _finish(self) -> None:
        if self._begun is not None:
            self._begun()

    def _write(self, own: Tensor, n: int | None = None) -> Tensor:
        slots = self._typed(own.dtype)[self._round % 2, :, : len(own) if n is None else n]
        slots[self.rank, : len(own)] = own
        self._round += 1
        return slots

    def _typed(self, dtype: torch.dtype) -> Tensor:
        """[2, ranks, values of a slot]."""
        if dtype not in self._slots:
            with torch.inference_mode(False):
                self._slots[dtype] = self._slots[torch.uint8].view(dtype)
        return self._slots[dtype]

    def _meet(self) -> None:
        self._post()
        self._wait()

    def _post(self) -> None:
        for semaphore in self._posts:
            self._libc.sem_post(semaphore)

    def _wait(self) -> None:
        now = time.monotonic()
        end = now + self._seconds
        until = _time_spec(min(end, now + LOOK_SECONDS))
        for peer, semaphore in self._waits:
            while self._libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until):
                if (code := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
                    raise CollectiveError(f"a semaphore failed: {os.strerror(code)}")
                self._look_at(peer, semaphore, end)
                until = _time_spec(min(end, time.monotonic() + LOOK_SECONDS))

    def _look_at(self, peer: int, semaphore: ctypes.c_void_p, end: float) -> None:
        """Raises CollectiveError where a peer that this rank waits for will not come."""
        ended = select.poll()
        ended.register(self._looks[peer], select.POLLIN)
        left = bool(self._left[peer]) or bool(ended.poll(0))
        value = ctypes.c_int()
        self._libc.sem_getvalue(semaphore, ctypes.byref(value))
        if value.value > 0:  # it came before it left
            return
        if left:
            raise CollectiveError(f"worker {self._workers[peer]} has ended")
        if time.monotonic() >= end:
            raise CollectiveError(f"worker {self._workers[peer]} did not come within {self._seconds:g} s")


def open_shared_memory(
    store: Store, workers: Sequence[int], worker: int, timeout: timedelta, name: str
) -> SharedMemory | None:
    """The memory of a group of workers of one host, of which this is one; None where the system has none. Collective
    over them. name: of the group in the store. Raises CollectiveError, OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not _is_supported(libc):
        return None
    key, file = f"realgraph/memory/{name}", -1
    if worker == workers[0]:
        file = _make_file(libc, len(workers))
        store.set(f"{key}/file", str(file))
    store.set(f"{key}/{worker}", str(os.getpid()))
    try:
        pids = [int(store.get(f"{key}/{peer}")) for peer in workers]
        if worker != workers[0]:
            file = os.open(f"/proc/{pids[0]}/fd/{int(store.get(f'{key}/file'))}", os.O_RDWR | os.O_CLOEXEC)
    except RuntimeError as error:
        raise CollectiveError(f"no shared memory for workers {', '.join(map(str, workers))}: {error}") from error
    return SharedMemory(file, workers.index(worker), workers, pids, timeout.total_seconds())


def _is_supported(libc: ctypes.CDLL) -> bool:
    """True where the system has what this module takes: sem_clockwait is glibc's since 2.30, pidfd_open Linux's since
    5.3, and not every sandbox allows it. Alike on all workers of a host."""
    if sys.platform != "linux" or not hasattr(libc, "sem_clockwait"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _make_file(libc: ctypes.CDLL, size: int) -> int:
    """A descriptor of memory for as many ranks, with its semaphores. Raises OSError."""
    file = open_anonymous(_bytes_of(size))
    os.fchmod(file, 0o600)
    memory = mmap.mmap(file, _slots_at(size))
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for semaphore in range(0, _notes_at(size), _SEMAPHORE_BYTES):
        if libc.sem_init(ctypes.c_void_p(first + semaphore), 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore can't be made")
    return file


def _combine(slots: Tensor | Sequence[Tensor], largest: bool, into: Tensor) -> Tensor:
    """[n] of each rank -> into: [n], the sum, or the largest, rank after rank."""
    operation = torch.maximum if largest else torch.add
    operation(slots[0], slots[1], out=into)
    for row in slots[2:]:
        operation(into, row, out=into)
    return into


def _semaphore(of: int, by: int, size: int) -> int:
    """The byte at which the semaphore of one rank lies that another posts."""
    return (of * size + by) * _SEMAPHORE_BYTES


def _notes_at(size: int) -> int:
    """Behind the semaphores: int64 [3, ranks], of the two slots' rounds still to come, and of who has left."""
    return size * size * _SEMAPHORE_BYTES


def _bytes_of(size: int) -> int:
    return _slots_at(size) + 2 * size * SLOT_BYTES


def _slots_at(size: int) -> int:
    """The first whole page behind the notes."""
    end = _notes_at(size) + aligned(3 * size * _NOTE.itemsize)
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _time_spec(seconds: float) -> object:
    whole = int(seconds)
    return ctypes.byref(_TimeSpec(whole, int((seconds - whole) * 1e9)))
