"""The connection of two workers, measured: seconds of a small message, bytes a second each way. Worker side."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from realgraph.runtime.doctor.messages import BackendName, PairMeasured

MEET_SECONDS = 5.0  # for two workers to find each other, and for any one message
_PIECE_BYTES = 4 << 20
_STREAM_SECONDS = 0.25  # each way
_PINGS, _WARM_PINGS = 40, 10


class PairLink:
    """A process group of two ranks, seen from one of them. Every wait raises RuntimeError after MEET_SECONDS."""

    def __init__(self, backend: BackendName, store: Store, rank: int, address: str) -> None:
        """Collective. address: of this host, for gloo to listen on."""
        self._peer = 1 - rank
        self._cuda = backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._cuda else torch.device("cpu")
        timeout = timedelta(seconds=MEET_SECONDS)
        store.set_timeout(timeout)
        self._group: Any = _nccl(store, rank, timeout) if self._cuda else _gloo(store, rank, address, timeout)

    def send(self, tensor: Tensor) -> None:
        """To the other rank."""
        self._group.send([tensor], self._peer, 0).wait()
        self._finish()

    def receive(self, tensor: Tensor) -> None:
        """From the other rank, into the tensor."""
        self._group.recv([tensor], self._peer, 0).wait()
        self._finish()

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)


def _gloo(store: Store, rank: int, address: str, timeout: timedelta) -> object:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [gloo.create_device(hostname=address)], 2, timeout
    return gloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, timeout: timedelta) -> object:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, 2, options)


def measured(link: PairLink, *, leads: bool) -> PairMeasured:
    """Measure together with the other rank: the one that leads gets the numbers. Raises RuntimeError."""
    ping, piece = torch.zeros(1, device=link.device), torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device=link.device)
    latency = _ping_pong(link, ping, leads=leads)
    speed = torch.zeros(1, dtype=torch.float64, device=link.device)
    if not leads:
        _drain(link, piece, ping)
        speed.fill_(_stream(link, piece, ping, time.perf_counter))
        link.send(speed)
        return PairMeasured()
    there = _stream(link, piece, ping, time.perf_counter)
    _drain(link, piece, ping)
    link.receive(speed)
    return PairMeasured(there, float(speed), latency)


def _ping_pong(link: PairLink, ping: Tensor, *, leads: bool) -> float:
    """Seconds of a small message one way: half of the median round."""
    rounds = []
    for _ in range(_WARM_PINGS + _PINGS):
        began = time.perf_counter()
        if leads:
            link.send(ping)
            link.receive(ping)
        else:
            link.receive(ping)
            link.send(ping)
        rounds.append(time.perf_counter() - began)
    ordered = sorted(rounds[_WARM_PINGS:])
    return ordered[len(ordered) // 2] / 2


def _stream(link: PairLink, piece: Tensor, ping: Tensor, clock: Callable[[], float]) -> float:
    """Bytes a second at which the other rank takes pieces, by the time it says that it has the last. The last has a 1
    in its first byte."""
    began, n_pieces, last = clock(), 0, False
    while not last:
        last = clock() - began > _STREAM_SECONDS
        piece[0] = int(last)
        link.send(piece)
        n_pieces += 1
    link.receive(ping)
    return n_pieces * _PIECE_BYTES / (clock() - began)


def _drain(link: PairLink, piece: Tensor, ping: Tensor) -> None:
    """Take what `_stream` sends."""
    last = False
    while not last:
        link.receive(piece)
        last = bool(piece[0])
    link.send(ping)
