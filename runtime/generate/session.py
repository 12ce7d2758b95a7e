"""Workers that generate together as one session: what the heads decide, the others follow.

The workers of a data-parallel rank have the same sequences and so make the same batch of each step; only what comes
from outside, requests and their ends, is told by their head. Ranks whose experts are spread over each other's workers
have requests of their own, and make each step together. Before each step all exchange a few numbers, and with them the
heads' news. A step runs where nobody objects: a worker whose callers are at work, that is paused, or whose weights are
of another version, holds all of them up. So no worker waits inside a step for one that is not in it.

Where passes of one step are under way on pipeline stages while the next step begins, so is its exchange: it begins with
the step before it, and no stage waits for the others between the two. A step that is not made lets all passes end.

Messages travel by CPU tensors over a group of their own, beside the calls of other threads. On GPUs the threads of two
sessions launch collectives in an order that may differ from worker to worker: on one stream each would wait for the
other's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from realgraph.planner.plan.axes import Coordinates, device_at, head_worker, session_groups
from realgraph.runtime.engine import Request
from realgraph.runtime.parallel.groups import LayoutRanks


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


News = Submitted | Aborted | SetAside | Restored
Made = TypeVar("Made")
_DECODER = msgspec.msgpack.Decoder(tuple[News, ...])


@dataclass(frozen=True)
class RankState:
    """One worker before a step. halted: it takes part in none now. busy: it has sequences. closed: it never will take
    part again. failed: nor can it. version: of its weights. dismissals: that its callers have made, if it is a head.
    releases: times that it has given up its caches."""

    halted: bool
    busy: bool
    closed: bool
    failed: bool
    version: int
    dismissals: int
    releases: int


@dataclass(frozen=True)
class Agreement:
    """The outcome of an exchange. news: of this worker's head, in order. quiet: no head had any. go: all take the step
    now. busy: somebody has sequences. dismissals: that all heads have made. releases: the most of any worker."""

    news: tuple[News, ...]
    quiet: bool
    go: bool
    busy: bool
    closed: bool
    failed: bool
    dismissals: int
    releases: int


class GenerationSession:
    """One worker's end of a session. Used by one thread. own_stream: see `RolloutLimits`."""

    def __init__(self, ranks: LayoutRanks, *, own_stream: bool = False) -> None:
        self._device = ranks.device
        apart = own_stream and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if apart else None  # type: ignore[no-untyped-call]
        layout, self._ranks = ranks.layout, ranks.session
        at = Coordinates(pp=ranks.pp.rank, dp=ranks.dp.rank, cp=ranks.cp.rank, tp=ranks.tp.rank)
        workers = next(group for group in session_groups(layout) if device_at(layout, at) in group)
        heads = [head_worker(layout, rank) for rank in range(layout.dp)]
        self._heads = [workers.index(head) for head in heads if head in workers]
        self._head = workers.index(heads[at.dp])
        self._staged = layout.pp > 1

    @property
    def leads(self) -> bool:
        """True on a head."""
        return self._ranks.rank == self._head

    @property
    def sets_the_pace(self) -> bool:
        """True on the head that waits between two exchanges; all others wait for it inside them."""
        return self._ranks.rank == self._heads[0]

    @property
    def n_heads(self) -> int:
        """Data-parallel ranks that generate together."""
        return len(self._heads)

    @property
    def steps_overlap(self) -> bool:
        """Passes of a step are under way while the next one begins."""
        return self._staged

    @property
    def name(self) -> str:
        """The workers, for messages."""
        return self._ranks.name

    def run(self, step: Callable[[], Made]) -> Made:
        """Run a part of generation, on the stream that it has: after all that was launched on the default one, where
        weights come and the first session generates, which waits for no other."""
        if self._stream is None:
            return step()
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            return step()

    def begin_exchange(self, own: RankState, news: Sequence[News]) -> Callable[[], Agreement]:
        """Collective, and so is the call of what comes back, which alone waits for the others. news: of a head; the
        others have none. Both raise CollectiveError where a worker is gone."""
        text = msgspec.msgpack.encode(news) if news else b""
        counts = [own.version, own.dismissals, own.releases, len(text)]
        numbers = [own.halted, own.busy, own.closed, own.failed, *counts]
        collected = self._ranks.begin_collect(torch.tensor(numbers, dtype=torch.int64))
        return lambda: self._agreed(text, collected())

    def _agreed(self, text: bytes, gathered: torch.Tensor) -> Agreement:
        """The outcome. text: this worker's news; gathered: the numbers of all."""
        halted, busy, closed, failed, version, dismissals, releases, sizes = gathered.unbind(1)
        alike = bool((version == version[0]).all())
        stopped = bool((halted + closed + failed).any())
        return Agreement(
            news=self._heads_news(text, sizes.tolist()) if sizes.any() else (),
            quiet=not sizes.any(),
            go=alike and not stopped and bool(busy.any()),
            busy=bool(busy.any()),
            closed=bool(closed.any()),
            failed=bool(failed.any()),
            dismissals=int(dismissals[self._heads].min()),
            releases=int(releases.max()),
        )

    def _heads_news(self, text: bytes, sizes: Sequence[int]) -> tuple[News, ...]:
        """The news of this worker's head. sizes: bytes of every worker's. Collective."""
        everybodys = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = torch.split(everybodys, list(sizes))
        if text:
            parts[self._ranks.rank].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._ranks.add(everybodys)
        return _DECODER.decode(parts[self._head].numpy().tobytes()) if sizes[self._head] else ()
