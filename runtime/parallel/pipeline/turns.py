"""The order in which a stage takes the passes of generation through its chunks, and sends and receives.

Nobody knows at the start of a step how many passes it has: they begin one by one, and each goes through the first chunk
at once. Later chunks take turns, as those of interleaved training do, one pass for each stage at a time: what stage 0
needs next has come back by then. One turn is left for the end of the step, so that the last passes are as many as there
are stages, too. Every chunk takes the passes in the order in which they began. So all stages have one order of passes
and chunks without being told. Knows no tensor.

Messages have one order, too, that of an ideal run in which a pass through a chunk takes one tick: by the tick in which
they are made, those of later stages first. A stage posts its own in this order, so that none waits for what is behind
something else, also where sending takes as long as it takes the other end to receive.
"""

import math
from collections import deque
from collections.abc import Iterator

from realgraph.runtime.parallel.pipeline.schedules import Action, Handover, Pipe


class RolloutTurns:
    """The turns of one stage. What to do comes as it is to be done: a pass through a chunk, or a message of this stage,
    to be sent now or to be received from now on."""

    def __init__(self, pipe: Pipe, stage: int) -> None:
        self._pipe, self._stage = pipe, stage
        self.begun = 0  # passes since `end`
        self._open: list[int] = []  # those that have later chunks before them, the first one first
        self._tick = 0  # in which stage 0 takes, ideally, what this stage took last
        self._ticks: dict[int, int] = {}  # the same of each open pass
        self._returns: deque[tuple[int, Handover]] = deque()  # that stage 0 has not posted, and when they are made

    def begin(self) -> Iterator[Action | Handover]:
        """Another pass, numbered from 0 on since `end`."""
        number, stages = self.begun, self._pipe.stages
        if len(self._open) == 2 * stages:
            yield from self._go_on(stages)
        self.begun += 1
        yield from self._take(Action("F", number, 0))
        if self._pipe.chunks > 1:
            self._open.append(number)

    def end(self) -> Iterator[Action | Handover]:
        """The rest of all passes that have begun."""
        yield from self._go_on(len(self._open))
        self.begun = 0

    def returns(self, tick: float = math.inf) -> Iterator[Handover]:
        """Messages that come back to stage 0 and are made until a tick; to be taken whole before stages meet."""
        while self._returns and self._returns[0][0] <= tick:
            yield self._returns.popleft()[1]

    def _go_on(self, n: int) -> Iterator[Action | Handover]:
        """The later chunks of the first n open passes."""
        passes, self._open = self._open[:n], self._open[n:]
        for chunk in range(1, self._pipe.chunks):
            for number in passes:
                yield from self._take(Action("F", number, chunk))

    def _take(self, action: Action) -> Iterator[Action | Handover]:
        pipe, stage, number = self._pipe, self._stage, action.microbatch
        self._tick = max(self._tick + 1, self._ticks.pop(number, 0) + pipe.stages if action.chunk else 0)
        yield from self.returns(self._tick - 1)
        if stage and (before := pipe.before(stage, action.chunk)) is not None:
            yield Handover(before[0], stage, action)
        yield action
        if action.chunk + 1 < pipe.chunks:
            self._ticks[number] = self._tick
            if stage == 0:
                back = Handover(pipe.stages - 1, 0, action._replace(chunk=action.chunk + 1))
                self._returns.append((self._tick + pipe.stages - 1, back))
        yield from self.returns(self._tick)
        if (after := pipe.next(stage, action.chunk)) is not None:
            yield Handover(stage, after[0], action._replace(chunk=after[1]))
