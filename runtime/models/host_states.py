"""Tensors that leave the device while nobody uses them: for host memory, or for good. Knows no model."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]  # asked each time: optimizer states come into being at the first step
Away = Sequence[tuple[torch.UntypedStorage, int, Tensor]]  # storages without memory, with their sizes and their bytes
# Of states that come beside other work. The deadline of the call that waits for them ends it long before: its owner
# knows what a call may take, and whether this process was stopped meanwhile (Ctrl-Z).
ABANDONED_SECONDS = 86_400.0


class HostStates:
    """The storages of an engine's tensors: on the device inside `used` or `prefetched`, from any thread, else in host
    memory.

    Tensors keep their identity: their storages give up their memory and take as much again, and come back bit for bit.
    """

    def __init__(self, kept: Tensors) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._users = 0
        self._changed = True
        self._away: Away = ()
        self._coming: Future[None] | None = None  # of what is away
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
            self._bring()
            self._users += 1
            self._changed |= changed
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._leave()

    @contextmanager
    def prefetched(self) -> Iterator[int]:
        """Inside, they come to the device and stay there: the copy begins at once, on a thread of its own, beside what
        runs. Whoever uses them first waits until they are there, and gets the error where they can't come; where nobody
        has used them, the end of this does. Yields their bytes."""
        with self._lock:
            self._users += 1
            if self._away and self._coming is None:
                self._coming = _begin_copy(self._away)
        try:
            yield self.nbytes
        finally:
            with self._lock:
                self._users -= 1
                if self._coming is not None:
                    self._bring()
                self._leave()

    def _bring(self) -> None:
        """Wait for what is coming, or bring what is away."""
        if self._coming is not None:
            try:
                error = self._coming.exception(ABANDONED_SECONDS)
            except TimeoutError:
                raise TimeoutError(f"states did not come from host memory in {ABANDONED_SECONDS:g} s") from None
            self._coming = None
            if error is not None:
                raise error
        else:
            for storage, size, host in self._away:
                storage.resize_(size)
                _view(storage).copy_(host, non_blocking=True)  # ordered before whatever the device does next
        self._away = ()

    def _leave(self) -> None:
        if not (self._users or self._away):
            self._put_away()

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


def _begin_copy(away: Away) -> Future[None]:
    """Copy the bytes of storages back on a thread of its own. Where that fails they are without memory, as before."""
    coming: Future[None] = Future()

    def bring() -> None:
        try:
            _copy_beside(away)
        except BaseException as error:
            for storage, _, _ in away:
                storage.resize_(0)
            coming.set_exception(error)
        else:
            coming.set_result(None)

    threading.Thread(target=bring, name="prefetch", daemon=True).start()
    return coming


def _copy_beside(away: Away) -> None:
    """Copy the bytes of storages back; on a GPU by a stream of their own. They are there when this returns."""
    for storage, size, _ in away:
        storage.resize_(size)
    device = away[0][0].device
    if device.type != "cuda":
        for storage, _, host in away:
            _view(storage).copy_(host)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be using what had this memory
    with torch.cuda.stream(stream):
        for storage, _, host in away:
            _view(storage).copy_(host, non_blocking=True)
    stream.synchronize()


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
