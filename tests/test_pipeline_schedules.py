"""Schedules of pipeline stages: those of torch and of the papers, live, and within what the planner counts as kept."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from realgraph.planner.costs.memory.activations import Running, in_flight
from realgraph.runtime.parallel.pipeline.schedules import (
    Action,
    Handover,
    Order,
    Pipe,
    Stuck,
    forward_orders,
    orders,
    timetable,
)
from realgraph.runtime.parallel.pipeline.turns import RolloutTurns

PIPES = st.builds(Pipe, st.integers(2, 8), st.integers(1, 4))
TURNS = st.integers(1, 5)


def microbatches(pipe: Pipe, turns: int) -> int:
    """Some that the pipe can take, not only multiples of its stages."""
    return pipe.rounded(turns * 3 - 2)


def torchs(pipe: Pipe, n: int) -> dict[int, list[Any]]:
    """torch's own table of the same schedule: stage -> actions, None where it waits."""
    if pipe.chunks == 1:
        stub = SimpleNamespace(_num_stages=pipe.stages, _n_microbatches=n)
        table: Any = theirs.Schedule1F1B._get_pipeline_order(stub)  # type: ignore[arg-type]
        # torch 2.13 prints the forward passes of the last stage, which makes none ahead, as of 1, 2, ...: one too many
        last = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and a.computation_type == theirs.FORWARD else a
            for a in table[pipe.stages - 1]
        ]
        return {**table, pipe.stages - 1: last}
    stub = SimpleNamespace(
        n_local_stages=pipe.chunks, microbatches_per_round=pipe.stages, pp_group_size=pipe.stages, _n_microbatches=n
    )
    calculate: Any = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
    return {stage: calculate(stub, stage) for stage in range(pipe.stages)}


def as_ours(pipe: Pipe, actions: list[Any]) -> Order:
    kinds = {theirs.FORWARD: "F", theirs.FULL_BACKWARD: "B"}
    passes = [a for a in actions if a is not None and a.computation_type in kinds]
    return tuple(Action(kinds[a.computation_type], a.microbatch_index, a.stage_index // pipe.stages) for a in passes)  # type: ignore[arg-type]


@given(PIPES, TURNS)
def test_orders_are_those_of_torch(pipe: Pipe, turns: int) -> None:
    n = pipe.rounded(max(pipe.stages, microbatches(pipe, turns)))  # torch wants as many as stages
    for stage, actions in torchs(pipe, n).items():
        assert orders(pipe, n)[stage] == as_ours(pipe, actions)


def test_orders_print_as_papers_write_them() -> None:
    def text(order: Order) -> str:
        return " ".join(map(str, order))

    # Narayanan et al. 2021, figure 4, with micro-batches from 0 and chunks behind a dot: devices 1 and 4 of 4
    first, *_, last = orders(Pipe(4), 8)
    assert text(first) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert text(last) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    interleaved = orders(Pipe(4, 2), 8)
    assert text(interleaved[3]).startswith("F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1")
    assert text(interleaved[0]).startswith("F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1")


@given(PIPES, TURNS)
def test_every_pass_is_made_once_and_nothing_waits_for_ever(pipe: Pipe, turns: int) -> None:
    n = microbatches(pipe, turns)
    ticks = timetable(pipe, orders(pipe, n))
    for stage in range(pipe.stages):
        done = [tick.actions[stage] for tick in ticks if tick.actions[stage] is not None]
        assert done == list(orders(pipe, n)[stage])
        assert sorted(map(str, done)) == sorted(
            str(Action(kind, i, chunk)) for kind in ("F", "B") for i in range(n) for chunk in range(pipe.chunks)
        )
    forward = timetable(pipe, forward_orders(pipe, n))
    assert len(forward) == n * pipe.chunks + pipe.stages - 1 or n % pipe.stages


@given(PIPES, TURNS)
def test_what_a_pass_needs_has_come_in_a_tick_before(pipe: Pipe, turns: int) -> None:
    n = microbatches(pipe, turns)
    for order in (orders(pipe, n), forward_orders(pipe, n)):
        arrived: set[tuple[int, Action]] = set()
        for tick in timetable(pipe, order):
            for stage, action in enumerate(tick.actions):
                if action is not None:
                    neighbour = (pipe.before if action.kind == "F" else pipe.next)(stage, action.chunk)
                    assert neighbour is None or (stage, action) in arrived
                    arrived.discard((stage, action))
            for handover in tick.handovers:
                assert tick.actions[handover.sender] is not None
                assert abs(handover.sender - handover.receiver) in (1, pipe.stages - 1)
                arrived.add((handover.receiver, handover.action))
        assert not arrived  # nothing is sent that nobody takes


@given(PIPES, TURNS)
def test_stages_keep_as_many_microbatches_as_the_planner_counts(pipe: Pipe, turns: int) -> None:
    n = microbatches(pipe, turns)
    counted = in_flight(pipe.stages, Running(chunks=pipe.chunks, microbatches=n))
    for order, most in zip(orders(pipe, n), counted, strict=True):
        kept = peak = 0
        for action in order:
            kept += 1 if action.kind == "F" else -1
            peak = max(peak, kept)
        assert peak <= most * pipe.chunks + 1e-9
        if n > 2 * pipe.stages:
            assert peak == pytest.approx(most * pipe.chunks)


def test_interleaved_stages_fill_in_half_the_time() -> None:
    """Waiting ticks of a stage: 2 (p - 1) chunks' worth, whatever their number (arXiv:2104.04473, sec. 2.2.2)."""
    n = 16
    plain, halved = (len(timetable(pipe, orders(pipe, n))) for pipe in (Pipe(4), Pipe(4, 2)))
    assert plain == 2 * n + 2 * 3
    assert halved == 2 * 2 * n + 2 * 3


def test_orders_that_can_not_go_on_are_told() -> None:
    wrong = ((Action("F", 0), Action("B", 0)), (Action("B", 0), Action("F", 0)))
    with pytest.raises(Stuck, match="stage 0 waits to do B0; stage 1 waits to do B0"):
        timetable(Pipe(2), wrong)
    with pytest.raises(ValueError, match="7 micro-batches are not a multiple of the 4 interleaved stages"):
        orders(Pipe(4, 2), 7)


STEPS = st.lists(st.integers(0, 30), min_size=1, max_size=4)  # passes of each step of generation
Turn = Action | Handover


def rollout_turns(pipe: Pipe, steps: list[int], meetings: random.Random | None = None) -> list[list[Turn]]:
    """Those of each stage, passes of a step numbered behind those of the step before. meetings: stages meet now and
    then between two passes, which a message from nobody to nobody stands for."""
    found: list[list[Turn]] = []
    meet = {(step, i) for step, n in enumerate(steps) for i in range(n) if meetings and meetings.random() < 0.2}
    for stage in range(pipe.stages):
        turns, made, base = RolloutTurns(pipe, stage), list[Turn](), 0
        for step, n in enumerate(steps):
            new: list[Turn] = []
            for i in range(n):
                if (step, i) in meet:
                    new += [*turns.returns(), Handover(-1, -1, Action("F", i))]
                new += turns.begin()
            new += turns.end()
            made += [numbered(turn, base) for turn in new]
            base += n
        found.append(made)
    return found


def numbered(turn: Turn, base: int) -> Turn:
    action = turn if isinstance(turn, Action) else turn.action
    action = action._replace(microbatch=action.microbatch + base)
    return action if isinstance(turn, Action) else turn._replace(action=action)


@given(PIPES, STEPS)
def test_generation_takes_passes_in_one_order_everywhere(pipe: Pipe, steps: list[int]) -> None:
    """In every chunk of every stage in the order in which they began, and in all chunks."""
    taken = [[turn for turn in turns if isinstance(turn, Action)] for turns in rollout_turns(pipe, steps)]
    assert all(each == taken[0] for each in taken)
    for chunk in range(pipe.chunks):
        assert [turn.microbatch for turn in taken[0] if turn.chunk == chunk] == list(range(sum(steps)))


@pytest.mark.slow
@given(PIPES, STEPS, st.randoms())
def test_generation_never_stands_still_where_sending_waits_for_the_other_end(
    pipe: Pipe, steps: list[int], rng: random.Random
) -> None:
    """Each stage does one thing after the other; a message leaves when both ends are at it, and stages meet when all
    are there."""
    rest = [deque(turns) for turns in rollout_turns(pipe, steps, rng)]
    came: set[tuple[int, Action]] = set()
    while any(rest):
        heads = [turns[0] if turns else None for turns in rest]
        movable: list[tuple[int, ...]] = []
        for stage, head in enumerate(heads):
            if isinstance(head, Action):
                assert pipe.before(stage, head.chunk) is None or (stage, head) in came
                movable.append((stage,))
            elif head is not None and head.sender == stage and heads[head.receiver] == head:
                movable.append((stage, head.receiver))
        if all(isinstance(head, Handover) and head.sender < 0 for head in heads):
            movable.append(tuple(range(pipe.stages)))
        assert movable, f"stages wait for each other: {heads}"
        chosen = rng.choice(movable)
        head = heads[chosen[0]]
        if isinstance(head, Handover) and head.sender >= 0:
            came.add((head.receiver, head.action))
        for stage in chosen:
            rest[stage].popleft()


@given(PIPES, st.integers(1, 40))
def test_stages_of_generation_are_busy_from_their_first_pass_to_their_last(pipe: Pipe, n: int) -> None:
    """Each takes one pass after the other, a tick later than the stage before it, where there are as many as stages. Of
    fewer each has to come back before it goes on."""
    done: dict[tuple[int, Action], int] = {}
    free = [0] * pipe.stages
    (taken, *_) = ([turn for turn in turns if isinstance(turn, Action)] for turns in rollout_turns(pipe, [n]))
    for action in taken:
        for stage in range(pipe.stages):
            before = pipe.before(stage, action.chunk)
            start = 0 if before is None else done[before[0], action._replace(chunk=before[1])]
            done[stage, action] = free[stage] = max(free[stage], start) + 1
    assert max(free) == pipe.chunks * max(n, pipe.stages) - max(0, pipe.stages - n) + pipe.stages - 1
