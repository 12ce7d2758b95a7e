"""The lives of a prompt group and of the generate session, as tables: (state, event) -> state. What is in no table is a
bug of ours, and says so by name.

    group     admitted -> generated -> ready -> batched -> trained
              discarded from admitted (prompt too long), generated (filtered out) and ready (overdue), as surplus from
              each of these
              lost, to be admitted anew, from any state before batched, or moved and so admitted elsewhere; from
              batched back to ready first
    session   closed -> open -> closed
"""

from collections.abc import Mapping
from enum import StrEnum


class GroupState(StrEnum):
    """The state of a prompt group. One of a graph that trains nothing is `trained` when its step has ended."""

    ADMITTED = "admitted"
    GENERATED = "generated"
    READY = "ready"  # all that is computed group by group has been
    BATCHED = "batched"  # a step's batch has it
    TRAINED = "trained"
    DISCARDED = "discarded"
    LOST = "lost"  # with its worker; it is admitted anew, under its number


class GroupEvent(StrEnum):
    """The events in the life of a prompt group."""

    MADE = "made"  # its samples are in a store
    SKIPPED = "skipped"  # its prompt is too long
    COMPUTED = "computed"  # by every streaming function
    FILTERED = "filtered out"
    OVERDUE = "overdue"  # too old for the next batch, and dropped for it
    SURPLUS = "surplus"  # begun beyond what batches need, and too old for the next one
    TAKEN = "taken into a batch"
    STEP_ENDED = "trained by the end of its step"
    PUT_BACK = "put back from a batch"  # which other groups of it have left
    WORKER_LOST = "lost with its worker"
    MOVED = "moved to another worker, with its tokens"


class SessionState(StrEnum):
    """The state of the generate session."""

    CLOSED = "closed"
    OPEN = "open"  # groups are admitted, and generate wherever nothing else holds their mesh


class SessionEvent(StrEnum):
    """The events in the life of the generate session."""

    TURN = "given its turn"
    BATCH_MADE = "ended by a batch"  # that of its step, or of a later one
    RUN_ENDS_BEFORE = "abandoned"  # a stop: no step of the run needs what it makes


GROUP: Mapping[tuple[GroupState, GroupEvent], GroupState] = {
    (GroupState.ADMITTED, GroupEvent.MADE): GroupState.GENERATED,
    (GroupState.ADMITTED, GroupEvent.SKIPPED): GroupState.DISCARDED,
    (GroupState.GENERATED, GroupEvent.COMPUTED): GroupState.READY,
    (GroupState.GENERATED, GroupEvent.FILTERED): GroupState.DISCARDED,
    (GroupState.READY, GroupEvent.TAKEN): GroupState.BATCHED,
    (GroupState.READY, GroupEvent.OVERDUE): GroupState.DISCARDED,
    (GroupState.ADMITTED, GroupEvent.SURPLUS): GroupState.DISCARDED,
    (GroupState.GENERATED, GroupEvent.SURPLUS): GroupState.DISCARDED,
    (GroupState.READY, GroupEvent.SURPLUS): GroupState.DISCARDED,
    (GroupState.BATCHED, GroupEvent.STEP_ENDED): GroupState.TRAINED,
    (GroupState.BATCHED, GroupEvent.PUT_BACK): GroupState.READY,
    (GroupState.ADMITTED, GroupEvent.MOVED): GroupState.ADMITTED,
    (GroupState.GENERATED, GroupEvent.MOVED): GroupState.ADMITTED,
    (GroupState.READY, GroupEvent.MOVED): GroupState.ADMITTED,
    (GroupState.ADMITTED, GroupEvent.WORKER_LOST): GroupState.LOST,
    (GroupState.GENERATED, GroupEvent.WORKER_LOST): GroupState.LOST,
    (GroupState.READY, GroupEvent.WORKER_LOST): GroupState.LOST,
}

SESSION: Mapping[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.CLOSED, SessionEvent.TURN): SessionState.OPEN,
    (SessionState.OPEN, SessionEvent.BATCH_MADE): SessionState.CLOSED,
    (SessionState.OPEN, SessionEvent.RUN_ENDS_BEFORE): SessionState.CLOSED,
}


class IllegalTransition(AssertionError):
    """Something happened to what cannot have it happen in its state: a bug of ours."""


def group_after(state: GroupState, event: GroupEvent, number: int) -> GroupState:
    """The state that `event` leads to from `state`. Raises IllegalTransition, naming the group, where none does."""
    try:
        return GROUP[state, event]
    except KeyError:
        raise IllegalTransition(f"group {number} is {state} and cannot be {event}") from None


def session_after(state: SessionState, event: SessionEvent) -> SessionState:
    """The state that `event` leads to from `state`. Raises IllegalTransition where none does."""
    try:
        return SESSION[state, event]
    except KeyError:
        raise IllegalTransition(f"the generate session is {state} and cannot be {event}") from None
