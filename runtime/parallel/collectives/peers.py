"""Messages between two workers of the default group, and who of them can be gone without ending the others."""

import logging
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError

log = logging.getLogger(__name__)

T = TypeVar("T")
Said = tuple[int, Tensor, dist.Work]  # the other end, what must live until it has arrived, its arrival


class OtherEnds:
    """The workers at the other ends of one worker's messages. expendable: those without which it goes on where they are
    gone. `gone`: those that are."""

    def __init__(self, expendable: Set[int] = frozenset()) -> None:
        self.expendable, self.gone = frozenset(expendable), set[int]()

    def unless_gone(self, peer: int, message: Callable[[], T], otherwise: T) -> T:
        """Pass a message with a worker; with an expendable one that is gone, none is passed from there on. Raises
        CollectiveError with any other that is gone or far behind."""
        if peer in self.gone:
            return otherwise
        try:
            return message()
        except CollectiveError as error:
            if peer not in self.expendable:
                raise
            log.warning("going on without worker %d: %s", peer, error)
            self.gone.add(peer)
            return otherwise

    def arrived(self, said: Said | None) -> bool:
        """Wait until a message has; False for one with a worker that is gone, which may be none."""
        return said is not None and self.unless_gone(said[0], partial(_arrived, said), False)

    def wait_for(self, said: Iterable[Said]) -> None:
        """Until all has arrived that workers are there for."""
        for one in said:
            self.arrived(one)


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


def _arrived(said: Said) -> bool:
    wait_for([said])
    return True


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
