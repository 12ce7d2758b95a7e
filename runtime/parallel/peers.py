"""Messages between two workers of the default group."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.runtime.parallel.rendezvous import CollectiveError

Said = tuple[int, Tensor, dist.Work]  # the other end, what must live until it has arrived, its arrival


@contextmanager
def naming(peer: int) -> Iterator[None]:
    """Turn what gloo and NCCL raise into an error with the worker at the other end."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"weights to or from worker {peer} did not arrive: {error}") from error


def word(value: int = 0) -> Tensor:
    """One number, to be sent or to be taken into."""
    return torch.tensor([value])


def say(values: Tensor, receiver: int) -> Said:
    """Send `values`, and wait for nothing."""
    with naming(receiver):
        work = dist.isend(values, receiver)
    assert work is not None, "the default group has all workers"
    return receiver, values, work


def wait_for(said: Iterable[Said]) -> None:
    """Until all has arrived. Raises CollectiveError with the worker that is gone or far behind."""
    for peer, _, work in said:
        with naming(peer):
            work.wait()


def expect(values: Tensor, sender: int) -> Said:
    """Take what a worker is going to send into `values`, and wait for nothing."""
    with naming(sender):
        work = dist.irecv(values, sender)
    assert work is not None, "the default group has all workers"
    return sender, values, work


def awaited(sender: int) -> Said:
    """A word that a worker is going to say."""
    return expect(word(), sender)


def heard(into: Tensor, sender: int) -> Tensor:
    """Take what a worker sends into `into`, and wait for it. Raises CollectiveError with the worker that is gone."""
    with naming(sender):
        dist.recv(into, sender)
    return into
