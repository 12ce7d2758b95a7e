"""The workers of one tensor-parallel replica as one generation session: what the head decides, the others follow.

Every worker has the same sequences and so makes the same batch of each step; only what comes from outside, requests and
their ends, is told by the head (rank 0). Before each step the ranks exchange a few numbers, and with them the head's
news. A step runs where nobody objects: a rank whose callers are at work, that is paused, or whose weights are of
another version, holds all of them up. So no rank waits inside a step for one that is not in it.

Messages travel by CPU tensors over a group of their own, beside the calls of other threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from realgraph.runtime.engine import Request
from realgraph.runtime.parallel.groups import Ranks


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """Requests to queue."""

    requests: tuple[Request, ...]


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Requests to forget."""

    ids: tuple[int, ...]


class SetAside(msgspec.Struct, frozen=True, tag=True):
    """Everything that runs and waits is set aside."""


class Restored(msgspec.Struct, frozen=True, tag=True):
    """Those that were set aside go on."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """Those who only follow may go their ways."""


News = Submitted | Aborted | SetAside | Restored | Dismissed
_DECODER = msgspec.msgpack.Decoder(tuple[News, ...])


@dataclass(frozen=True)
class RankState:
    """One rank before a step. halted: it takes part in none now. closed: it never will again. failed: nor can it.
    version: of its weights."""

    halted: bool
    closed: bool
    failed: bool
    version: int


@dataclass(frozen=True)
class Agreement:
    """The outcome of an exchange. news: of the head, in order. go: all ranks take the step now."""

    news: tuple[News, ...]
    go: bool
    closed: bool
    failed: tuple[int, ...]  # ranks


class ReplicaSession:
    """One rank's end of a replica's session. Used by one thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def leads(self) -> bool:
        """True on the head."""
        return self._ranks.rank == 0

    @property
    def name(self) -> str:
        """The workers, for messages."""
        return self._ranks.name

    def exchange(self, own: RankState, news: Sequence[News]) -> Agreement:
        """Collective. news: of the head; the others have none. Raises CollectiveError where a rank is gone."""
        text = msgspec.msgpack.encode(news) if news else b""
        numbers = torch.tensor([own.halted, own.closed, own.failed, own.version, len(text)])
        halted, closed, failed, version, size = self._ranks.collect(numbers).unbind(1)
        said: tuple[News, ...] = ()
        if n := int(size[0]):
            buffer = torch.zeros(n, dtype=torch.uint8)
            if self.leads:
                buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            said = _DECODER.decode(self._ranks.add(buffer).numpy().tobytes())
        alike = bool((version == version[0]).all())
        stopped = bool((halted + closed + failed).any())
        return Agreement(said, alike and not stopped, bool(closed.any()), tuple(failed.nonzero().flatten().tolist()))
