"""Tensors that leave the device while nobody uses them: for host memory, or for good. Knows no model."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]  # asked each time: optimizer states come into being at the first step


class HostStates:
    """The storages of an engine's tensors: on the device inside `used`, from any thread, else in host memory.

    Tensors keep their identity: their storages give up their memory and take as much again, and come back bit for bit.
    """

    def __init__(self, kept: Tensors) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._users = 0
        self._changed = True
        self._away: list[tuple[torch.UntypedStorage, int, Tensor]] = []  # with its size and its bytes
        self._host: dict[int, Tensor] = {}  # by storage: [bytes] uint8, pinned for a GPU
        self._put_away()

    @property
    def away(self) -> bool:
        """They wait in host memory."""
        return bool(self._away)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that they wait in."""
        return sum(host.nbytes for host in self._host.values())

    @contextmanager
    def used(self, *, changed: bool) -> Iterator[None]:
        """On the device inside. changed: the tensors that are kept are written to."""
        with self._lock:
            self._users += 1
            self._changed |= changed
            self._bring()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._put_away()

    def _bring(self) -> None:
        for storage, size, host in self._away:
            storage.resize_(size)
            _view(storage).copy_(host, non_blocking=True)  # ordered before whatever the device does next
        self._away = []

    @torch.no_grad()
    def _put_away(self) -> None:
        kept = _storages(self._kept())
        for key, storage in kept.items():
            if key not in self._host:
                pinned = storage.device.type == "cuda"
                self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            elif not self._changed:
                continue
            self._host[key].copy_(_view(storage))  # ends when the bytes are there
        self._changed = False
        self._away = [(storage, storage.nbytes(), self._host[key]) for key, storage in kept.items()]
        for storage, _, _ in self._away:
            storage.resize_(0)


class DroppedStorages:
    """Storages of tensors that are written anew before they are used: they give up their memory, and take it again.

    Tensors keep their identity.
    """

    def __init__(self) -> None:
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # with its size

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Give up the memory of these; what has none already is passed over."""
        for storage in _storages(tensors).values():
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)

    def restore(self) -> None:
        """Room again, zeros: nobody sends the padding of shards."""
        for storage, size in self._dropped:
            storage.resize_(size)
            _view(storage).zero_()
        self._dropped = []


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by a number that stays while its memory comes and goes; empty ones are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


def _view(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8 over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
