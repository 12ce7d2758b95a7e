"""Messages of a reallocation, played on numpy arrays: right, least in bytes, bounded by the bucket, balanced."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from realgraph.runtime.parallel.cuts import Box, split
from realgraph.runtime.parallel.routes import Gap, Holdings, Message, Piece, rounds

Shapes = dict[str, tuple[int, ...]]
State = dict[int, dict[str, NDArray[np.float64]]]  # worker -> tensor, nan where an element is not there


@st.composite
def boxes(draw: st.DrawFn, shapes: Shapes, workers: range) -> dict[int, dict[str, Box]]:
    """Every tensor cut into a grid of uneven parts, each on one worker at least; one part of a tensor on a worker."""
    found: dict[int, dict[str, Box]] = {worker: {} for worker in workers}
    grids: dict[tuple[int, ...], dict[int, Box]] = {}
    for name, shape in shapes.items():
        if shape not in grids or draw(st.booleans()):
            parts, room = [Box((), ())], len(workers)
            for size in shape:
                n_cuts = draw(st.integers(0, min(size, room // len(parts)) - 1))
                cuts = sorted(
                    draw(st.sets(st.integers(1, size - 1), min_size=n_cuts, max_size=n_cuts)) if n_cuts else ()
                )
                spans = list(zip([0, *cuts], [*cuts, size], strict=True))
                parts = [Box((*p.start, a), (*p.shape, b - a)) for p in parts for a, b in spans]
            order = draw(st.permutations(workers))
            rest = [draw(st.sampled_from([None, *parts])) for _ in order[len(parts) :]]
            grids[shape] = {worker: box for worker, box in zip(order, [*parts, *rest], strict=True) if box is not None}
        for worker, box in grids[shape].items():
            found[worker][name] = box
    return found


@st.composite
def moves(draw: st.DrawFn) -> tuple[Shapes, Holdings, Holdings, tuple[int, ...]]:
    """Tensors, what lies where before and after, and the host of each worker."""
    some = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    shapes: Shapes = {f"t{i}": shape for i, shape in enumerate(draw(st.lists(some, min_size=1, max_size=3)))}
    shapes |= {f"{name}.again": shape for name, shape in shapes.items()}
    workers = draw(st.integers(1, 7))
    hosts = tuple(draw(st.integers(0, 2)) for _ in range(workers))
    first = draw(st.integers(0, workers - 1))
    return shapes, draw(boxes(shapes, range(workers))), draw(boxes(shapes, range(first, workers))), hosts


def values(shapes: Shapes) -> dict[str, NDArray[np.float64]]:
    return {
        name: np.arange(math.prod(shape), dtype=np.float64).reshape(shape) + 1000 * i
        for i, (name, shape) in enumerate(shapes.items())
    }


def held(shapes: Shapes, holdings: Holdings, workers: int) -> State:
    state: State = {
        worker: {name: np.full(shape, np.nan) for name, shape in shapes.items()} for worker in range(workers)
    }
    for worker, boxes in holdings.items():
        for name, box in boxes.items():
            state[worker][name][box.slices] = values(shapes)[name][box.slices]
    return state


def play(state: State, plan: tuple[tuple[Message, ...], ...]) -> Iterator[tuple[int, int, int]]:
    """Carry out the messages; (sender, receiver, elements) of each. What a round sends it had before the round."""
    for messages in plan:
        sent = [
            [state[m.sender][name][piece.box.slices].copy() for piece in m.pieces for name in piece.tensors]
            for m in messages
        ]
        for message, parts in zip(messages, sent, strict=True):
            places = [(name, piece.box) for piece in message.pieces for name in piece.tensors]
            assert sum(part.size for part in parts) == message.numel
            for receiver in message.receivers:
                for (name, box), part in zip(places, parts, strict=True):
                    assert not np.isnan(part).any(), "a worker sends what it does not have"
                    assert np.isnan(state[receiver][name][box.slices]).all(), "a worker receives what it has"
                    state[receiver][name][box.slices] = part
                yield message.sender, receiver, message.numel


def least(shapes: Shapes, source: Holdings, target: Holdings, hosts: tuple[int, ...]) -> tuple[int, int]:
    """Elements that workers lack, and that hosts lack: counted one by one."""
    workers, between = 0, 0
    has, wants = held(shapes, source, len(hosts)), held(shapes, target, len(hosts))
    for name, shape in shapes.items():
        for element in np.ndindex(shape):
            owners = [w for w in range(len(hosts)) if not np.isnan(has[w][name][element])]
            lacking = [w for w in range(len(hosts)) if not np.isnan(wants[w][name][element]) and w not in owners]
            workers += len(lacking)
            between += len({hosts[w] for w in lacking} - {hosts[w] for w in owners})
    return workers, between


@pytest.mark.slow
@given(moves(), st.integers(4, 60))
@settings(max_examples=150)
def test_every_box_is_filled_with_the_fewest_bytes(
    move: tuple[Shapes, Holdings, Holdings, tuple[int, ...]], bucket_bytes: int
) -> None:
    shapes, source, target, hosts = move
    plan = rounds(source, target, hosts, 4, bucket_bytes)
    state = held(shapes, source, len(hosts))
    sent = list(play(state, plan))
    for worker, boxes in target.items():
        for name, box in boxes.items():
            assert (state[worker][name][box.slices] == values(shapes)[name][box.slices]).all()
    between = sum(n for sender, receiver, n in sent if hosts[sender] != hosts[receiver])
    assert (sum(n for *_, n in sent), between) == least(shapes, source, target, hosts)
    for messages in plan:
        packed, received = Counter[int](), Counter[int]()
        for message in messages:
            packed[message.sender] += 4 * message.numel
            received.update(dict.fromkeys(message.receivers, 4 * message.numel))
        assert max((*packed.values(), *received.values())) <= bucket_bytes


@pytest.mark.slow
@given(moves(), st.integers(4, 60))
@settings(max_examples=150)
def test_a_worker_has_two_buckets_at_most_with_what_it_keeps_to_hand_on(
    move: tuple[Shapes, Holdings, Holdings, tuple[int, ...]], bucket_bytes: int
) -> None:
    _, source, target, hosts = move
    plan = rounds(source, target, hosts, 4, bucket_bytes)
    used, came = Counter[tuple[int, int]](), dict[tuple[int, Piece], int]()  # by round and worker; the round of a piece
    for number, messages in enumerate(plan):
        for message in messages:
            for worker in (message.sender, *message.receivers):
                used[number, worker] += 4 * message.numel
            came |= {(receiver, piece): number for receiver in message.receivers for piece in message.pieces}
    for number, messages in enumerate(plan):
        for message in messages:
            for piece in message.pieces:
                for between in range(came.get((message.sender, piece), number + 1), number + 1):
                    used[between, message.sender] += 4 * piece.numel
    assert max(used.values(), default=0) <= 2 * bucket_bytes


@given(moves(), st.integers(4, 60), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_workers_that_learn_of_boxes_in_any_order_derive_the_same_messages(
    move: tuple[Shapes, Holdings, Holdings, tuple[int, ...]], bucket_bytes: int, shuffle: Random
) -> None:
    _, source, target, hosts = move

    def shuffled(holdings: Holdings) -> Holdings:
        workers = list(holdings)
        shuffle.shuffle(workers)
        return {worker: holdings[worker] for worker in workers}

    assert rounds(shuffled(source), shuffled(target), hosts, 4, bucket_bytes) == rounds(
        source, target, hosts, 4, bucket_bytes
    )


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_holders_of_equal_parts_send_equal_shares(holders: int, receivers: int, cuts: int) -> None:
    whole = {f"layer.{i}": Box((0, 0), (24, 10)) for i in range(3)}
    source = dict.fromkeys(range(holders), whole)
    target = {
        holders + i: {
            name: Box((split(24, cuts, i % cuts)[0], 0), (split(24, cuts, i % cuts)[1], 10)) for name in whole
        }
        for i in range(receivers)
    }
    plan = rounds(source, target, [0] * (holders + receivers), 4, 400)
    sent = Counter(dict.fromkeys(range(holders), 0))
    for message in (message for messages in plan for message in messages):
        sent[message.sender] += message.numel * len(message.receivers)
    assert max(sent.values()) - min(sent.values()) <= max(p.numel for ms in plan for m in ms for p in m.pieces)


def test_a_part_that_no_worker_holds_is_named() -> None:
    source = {0: {"a": Box((0,), (4,))}, 1: {"a": Box((6,), (2,))}}
    with pytest.raises(Gap, match=r"no worker holds \[4:6\] of 'a'"):
        rounds(source, {2: {"a": Box((1,), (7,))}}, (0, 0, 0), 2, 100)
    with pytest.raises(Gap, match=r"no worker holds \[0:3\] of 'b'"):
        rounds(source, {1: {"b": Box((0,), (3,))}}, (0, 0), 2, 100)


def test_a_bucket_holds_an_element_at_least() -> None:
    with pytest.raises(ValueError, match="a bucket of 3 bytes holds no element of 4"):
        rounds({0: {}}, {0: {}}, (0,), 4, 3)


def test_messages_of_64_workers_and_400_tensors_take_seconds_at_most() -> None:
    """tp 8 over dp 8 with every copy cut by rows again, to tp 4 on 64 other workers, on hosts of 8: within 2 s."""
    shapes = {f"layer.{i}.{name}": (4096, 1024) for i in range(100) for name in "qkvo"}

    def rows(worker: int, tp: int, dp: int) -> Box:
        first, n = split(4096, tp, worker % tp)
        again, size = split(n, dp, worker // tp % dp)
        return Box((first + again, 0), (size, 1024))

    source = {worker: dict.fromkeys(shapes, rows(worker, 8, 8)) for worker in range(64)}
    target = {64 + worker: dict.fromkeys(shapes, rows(worker, 4, 1)) for worker in range(64)}
    begun = time.process_time()
    plan = rounds(source, target, [worker // 8 for worker in range(128)], 2, 1 << 28)
    assert time.process_time() - begun < 2
    assert sum(m.numel * len(m.receivers) for ms in plan for m in ms) == 16 * 400 * 4096 * 1024
