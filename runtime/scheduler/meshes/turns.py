"""Turns of the calls on every device. Follows the plan's cyclic orders; knows neither messages nor readiness.

In round p a device runs `call` of step p + offset, for each of its turns in order; a reallocation may have a turn too.
Devices with the same order have the same calls on the same meshes, so they move together and are kept as one lane.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from realgraph.planner.plan.plan import REALLOCATION, Turn, reallocation_node


class NextTurn(Struct, frozen=True):
    """A call and the step it is run for."""

    call: str
    step: int


class LaneImage(Struct, frozen=True):
    """A lane as plain data; its order is the plan's."""

    position: int
    done: tuple[int, ...]
    task: int | None


class _Lane:
    """The devices of one order. `task`: what holds them, None where they are free."""

    def __init__(self, order: Sequence[Turn], first_step: int) -> None:
        self.order, self.first_step = tuple(order), first_step
        self.position = (first_step - max(turn.offset for turn in order)) * len(order)
        self.lowest = min(turn.offset for turn in order)
        self.done: set[int] = set()  # positions that ran before their turn
        self.task: int | None = None

    def at(self, position: int) -> tuple[str, int]:
        round_, index = divmod(position, len(self.order))
        turn = self.order[index]
        return turn.call, round_ + turn.offset

    def position_of(self, call: str, step: int) -> int:
        """The position at which `call` of `step` has its turn."""
        index = next(index for index, turn in enumerate(self.order) if turn.call == call)
        return (step - self.order[index].offset) * len(self.order) + index

    def passed(self, position: int, limit: int) -> bool:
        """True where nothing is left to do at `position`: it ran, or its step is none of this run's."""
        step = self.at(position)[1]
        return position in self.done or not self.first_step <= step < limit

    def end(self, limit: int) -> int:
        """A position from which on every step is `limit` or later."""
        return (limit - self.lowest) * len(self.order)


class Turns:
    """The lanes of a plan, from `first_step` on. `unbarred` calls never wait at a barrier: see `_head`.

    streaming: the turns of sessions beside which other calls run: their samples may be some steps late, or come
    together with those of other sessions. What comes after one in the lanes does not wait for its end: the session
    stands still meanwhile, and goes on where nothing else can run.
    """

    def __init__(self, orders: Mapping[int, Sequence[Turn]], first_step: int, unbarred: Iterable[str]) -> None:
        self._unbarred = {node for call in unbarred for node in (call, reallocation_node(call))}
        self.streaming: set[NextTurn] = set()
        lanes: dict[tuple[Turn, ...], _Lane] = {}
        for device in sorted(orders):
            order = tuple(orders[device])
            if order and order not in lanes:
                lanes[order] = _Lane(order, first_step)
        self.lanes = tuple(lanes.values())
        self._of: dict[str, list[_Lane]] = {}
        for lane in self.lanes:
            for turn in lane.order:
                self._of.setdefault(turn.call, []).append(lane)

    @property
    def image(self) -> tuple[LaneImage, ...]:
        """All lanes, in order."""
        return tuple([LaneImage(lane.position, tuple(sorted(lane.done)), lane.task) for lane in self.lanes])

    def restore(self, lanes: Sequence[LaneImage]) -> None:
        """Go on from an image."""
        for lane, image in zip(self.lanes, lanes, strict=True):
            lane.position, lane.done, lane.task = image.position, set(image.done), image.task

    def of(self, *calls: str) -> list[_Lane]:
        """The lanes that these calls hold."""
        return list({id(lane): lane for call in calls for lane in self._of[call]}.values())

    def _head(self, lane: _Lane, barrier: int, limit: int) -> NextTurn | None:
        """The lane's next turn, steps from `limit` on left out.

        Calls of steps behind `barrier` wait until that step is saved, generation excepted; a lane runs what
        is left of the steps up to the barrier meanwhile. So at a checkpoint no weights are ahead of the step's end,
        and nothing that the barrier needs waits behind what it holds back.
        """
        end = lane.end(limit)
        while lane.position < end and lane.passed(lane.position, limit):
            lane.done.discard(lane.position)
            lane.position += 1
        if lane.position >= end:
            return None
        call, step = lane.at(lane.position)
        if NextTurn(call, step) in self.streaming:
            return self._beside(lane, barrier, limit) or NextTurn(call, step)
        if step <= barrier or call in self._unbarred:
            return NextTurn(call, step)
        for position in range(lane.position + 1, lane.end(barrier + 1)):
            call, step = lane.at(position)
            if step <= barrier and not lane.passed(position, limit):
                return NextTurn(call, step)
        return None

    def _beside(self, lane: _Lane, barrier: int, limit: int) -> NextTurn | None:
        """The turn that follows the stream's, up to the stream's next; None where its step waits at the barrier.

        Where nothing is left of these, the sessions of other calls for the same step: the stream's batch waits for
        their samples, in whatever round they have their turn.
        """
        for position in range(lane.position + 1, lane.position + len(lane.order)):
            call, step = lane.at(position)
            if not lane.passed(position, limit) and NextTurn(call, step) not in self.streaming:
                return NextTurn(call, step) if step <= barrier or call in self._unbarred else None
        step = lane.at(lane.position)[1]
        others = [turn.call for turn in lane.order if turn.call in self._unbarred]
        return next((NextTurn(call, step) for call in others if self._awaits(lane, call, step, limit)), None)

    def _awaits(self, lane: _Lane, call: str, step: int, limit: int) -> bool:
        """True where a lane still has to open the session of `call` for `step`."""
        position = lane.position_of(call, step)
        ahead = position > lane.position and NextTurn(call, step) not in self.streaming
        return ahead and not lane.passed(position, limit)

    def next(self, barrier: int, limit: int) -> list[NextTurn]:
        """The calls that are next on every device of their mesh."""
        heads = [self._head(lane, barrier, limit) for lane in self.lanes]
        by_lane = dict(zip(map(id, self.lanes), heads, strict=True))
        return [
            head
            for head in dict.fromkeys(heads)
            if head is not None and all(by_lane[id(lane)] == head for lane in self._of[head.call])
        ]

    def heads(self, barrier: int, limit: int) -> list[NextTurn]:
        """The turn that each lane waits for, whether or not the other devices of that call are there too."""
        heads = [self._head(lane, barrier, limit) for lane in self.lanes]
        return [head for head in dict.fromkeys(heads) if head is not None]

    def awaits_batch(self, call: str, heads: Sequence[NextTurn], next_batch: int) -> bool:
        """True where the devices of `call` have nothing to do until a batch is there. heads: see `next`. next_batch:
        the first step whose batch is not there."""
        lanes = {id(lane) for lane in self._of.get(call, ()) if lane.task is None}
        return any(
            head.step >= next_batch
            and head.call not in self._unbarred
            and not lanes.isdisjoint(map(id, self._of[head.call]))
            for head in heads
        )

    def leave(self, call: str, step: int) -> None:
        """`call` of `step` has had its turn on all its devices. One whose step is none of the run's any more, since it
        was told to stop meanwhile, has been passed already."""
        for lane in self._of[call]:
            position = lane.position_of(call, step)
            if position == lane.position:
                lane.position += 1
            elif position > lane.position:
                lane.done.add(position)

    def had(self, call: str, step: int) -> bool:
        """True where `call` of `step` has had its turn."""
        lane = self._of[call][0]
        left = (lane.at(position) for position in itertools.count(lane.position) if position not in lane.done)
        return next(at for name, at in left if name == call) > step

    @staticmethod
    def idle(lanes: Iterable[_Lane]) -> bool:
        """True where no task holds any of these lanes."""
        return all(lane.task is None for lane in lanes)

    @staticmethod
    def hold(lanes: Iterable[_Lane], task: int) -> None:
        """Give `task` these lanes to itself from now on."""
        for lane in lanes:
            assert lane.task is None, f"task {task} would run beside task {lane.task} on one device"
            lane.task = task

    def release(self, task: int) -> None:
        """`task` has ended."""
        for lane in self.lanes:
            if lane.task == task:
                lane.task = None


def comes_next(name: str, order: Sequence[Turn]) -> bool:
    """True where in a device's round `name` follows the reallocation to it, but for other reallocations."""
    turns = [turn.call for turn in order]
    if reallocation_node(name) not in turns:
        return False
    first = turns.index(reallocation_node(name))
    later = [call for call in (*turns[first:], *turns[:first]) if not call.startswith(REALLOCATION)]
    return later[0] == name
