"""The order in which pipeline stages take micro-batches: pure lists of actions, and the ticks in which they are done.

1F1B (Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2.1): a stage takes as many forward passes ahead as stages follow,
then one backward for each forward pass. Interleaved (ibid., sec. 2.2.2): each stage holds several chunks of layers, and
chunks take turns, a stage's worth of micro-batches at a time. Knows no tensor and no process.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct


class Action(NamedTuple):
    """A forward or a backward pass of one micro-batch through one chunk of a stage."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Order = tuple[Action, ...]  # of one stage


class Handover(NamedTuple):
    """Hidden states, or their gradient, that a stage has made and another one needs for `action`."""

    sender: int
    receiver: int
    action: Action


class PipelineTick(Struct, frozen=True):
    """A moment of all stages: what each does, None where it waits, and what they then send each other."""

    actions: tuple[Action | None, ...]
    handovers: tuple[Handover, ...]


class Stuck(ValueError):
    """Orders in which no stage can ever go on."""


class Pipe(Struct, frozen=True):
    """The shape of a pipeline: stages, and chunks of layers on each."""

    stages: int
    chunks: int = 1

    def next(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """The (stage, chunk) whose layers follow; None behind the last."""
        if stage + 1 < self.stages:
            return stage + 1, chunk
        return (0, chunk + 1) if chunk + 1 < self.chunks else None

    def before(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """The (stage, chunk) whose layers come before; None before the first."""
        if stage:
            return stage - 1, chunk
        return (self.stages - 1, chunk - 1) if chunk else None

    def rounded(self, microbatches: int) -> int:
        """Micro-batches that a step has to have for so many: interleaved stages take turns of one for each stage."""
        return microbatches if self.chunks == 1 else -(-microbatches // self.stages) * self.stages


def orders(pipe: Pipe, microbatches: int) -> tuple[Order, ...]:
    """The order of a training step, stage by stage: 1F1B, or interleaved where stages have chunks.

    Raises ValueError for interleaved stages whose number does not divide the micro-batches.
    """
    if pipe.rounded(microbatches) != microbatches:
        raise ValueError(f"{microbatches} micro-batches are not a multiple of the {pipe.stages} interleaved stages")
    return tuple(_order(pipe, microbatches, stage) for stage in range(pipe.stages))


def _order(pipe: Pipe, microbatches: int, stage: int) -> Order:
    total, later = microbatches * pipe.chunks, pipe.stages - 1 - stage
    ahead = min(total, later if pipe.chunks == 1 else (pipe.chunks - 1) * pipe.stages + 2 * later)
    order = [_turn(pipe, "F", i) for i in range(ahead)]
    for i in range(total - ahead):
        order += [_turn(pipe, "F", ahead + i), _turn(pipe, "B", i)]
    return tuple(order + [_turn(pipe, "B", i) for i in range(total - ahead, total)])


def _turn(pipe: Pipe, kind: Literal["F", "B"], number: int) -> Action:
    """The forward or backward pass that a stage makes as its `number`-th."""
    if pipe.chunks == 1:
        return Action(kind, number)
    turn, place = divmod(number, pipe.stages)
    chunk = turn % pipe.chunks
    return Action(kind, turn // pipe.chunks * pipe.stages + place, chunk if kind == "F" else pipe.chunks - 1 - chunk)


def forward_orders(pipe: Pipe, microbatches: int) -> tuple[Order, ...]:
    """The same for inference: forward passes alone, of any number of micro-batches."""
    rounds = [range(first, min(first + pipe.stages, microbatches)) for first in range(0, microbatches, pipe.stages)]
    one = tuple(Action("F", i, chunk) for turn in rounds for chunk in range(pipe.chunks) for i in turn)
    return (one,) * pipe.stages


@lru_cache(maxsize=64)
def step_ticks(pipe: Pipe, microbatches: int) -> tuple[PipelineTick, ...]:
    """The ticks of a training step."""
    return timetable(pipe, orders(pipe, microbatches))


@lru_cache(maxsize=64)
def forward_ticks(pipe: Pipe, microbatches: int) -> tuple[PipelineTick, ...]:
    """The ticks of inference."""
    return timetable(pipe, forward_orders(pipe, microbatches))


def timetable(pipe: Pipe, orders: Sequence[Order]) -> tuple[PipelineTick, ...]:
    """The ticks in which the orders can be done, every pass taking one; all stages derive the same.

    Messages go when they are made, so that both ends of a pair have theirs in one order, whatever passes really take:
    nobody waits for what is behind something else. Raises Stuck where stages wait for each other for ever.
    """
    done: set[tuple[int, Action]] = set()
    at = [0] * pipe.stages
    ticks = []
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        nexts = [order[place] if place < len(order) else None for place, order in zip(at, orders, strict=True)]
        actions = tuple(
            action if action is not None and _ready(pipe, stage, action, done) else None
            for stage, action in enumerate(nexts)
        )
        made = [(stage, action) for stage, action in enumerate(actions) if action is not None]
        if not made:
            raise Stuck("; ".join(f"stage {stage} waits to do {action}" for stage, action in enumerate(nexts)))
        for stage, action in made:
            done.add((stage, action))
            at[stage] += 1
        handovers = [handover for stage, action in made if (handover := _sent(pipe, stage, action)) is not None]
        ticks.append(PipelineTick(actions, tuple(handovers)))
    return tuple(ticks)


def _ready(pipe: Pipe, stage: int, action: Action, done: set[tuple[int, Action]]) -> bool:
    """True where all that the action needs was made in a tick before."""
    if action.kind == "B" and (stage, action._replace(kind="F")) not in done:
        return False
    place = (pipe.before if action.kind == "F" else pipe.next)(stage, action.chunk)
    return place is None or (place[0], action._replace(chunk=place[1])) in done


def _sent(pipe: Pipe, stage: int, action: Action) -> Handover | None:
    """The result of an action as it is handed over, None where nobody needs it."""
    place = (pipe.next if action.kind == "F" else pipe.before)(stage, action.chunk)
    return None if place is None else Handover(stage, place[0], action._replace(chunk=place[1]))
