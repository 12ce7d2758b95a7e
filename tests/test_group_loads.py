"""The dealing of groups to engines: least outstanding tokens, held against engines with slots on a clock."""

import heapq
import random

import pytest

from realgraph.runtime.commands.loads import NEAR_LOAD, GroupLoads, UnexpectedReply


@pytest.mark.parametrize("seed", range(40))
def test_groups_of_one_length_are_dealt_evenly_and_those_of_others_to_who_has_least_left(seed: int) -> None:
    rng = random.Random(seed)
    workers = rng.sample(range(100), rng.randint(1, 9))
    loads = GroupLoads(workers)
    for _ in range(rng.randint(1, 30)):
        dealt = loads.deal(rng.randint(0, 20), None)
        assert max(loads.open.values()) - min(loads.open.values()) <= 1
        for worker in set(dealt):
            loads.answered(worker, loads.open[worker], 7 * loads.open[worker])
    first = loads.deal(2 * len(workers), None)
    assert sorted(first) == sorted([*workers, *workers])
    far = rng.choice(workers)  # has drawn all but a bit of what it has
    loads.answered(far, 0, drawn=14)
    assert loads.take() == far
    assert loads.load(far) > 0, "a group that has not ended has something left"


def run_engines(rng: random.Random, most: float, n_engines: int, slots: int, per_group: int) -> tuple[float, int]:
    """Give groups to engines as they have places, until all have been made. Returns the time, and the moments at which
    an engine had nothing while groups of another had not begun."""
    loads, now, n_idle, left = GroupLoads(range(n_engines)), 0.0, 0, 200
    queues: list[list[tuple[int, float]]] = [[] for _ in range(n_engines)]  # (group, length) of samples to begin
    running: list[list[tuple[float, int]]] = [[] for _ in range(n_engines)]  # (end, group)
    open_samples: dict[int, int] = {}
    in_flight = 3 * n_engines * (slots // per_group + 1)  # more than there is room for
    next_group = 0
    while left or open_samples:
        room = min(left, in_flight - len(open_samples))
        for worker in loads.deal(room, None, most):
            left -= 1
            open_samples[next_group] = per_group
            queues[worker] += [(next_group, rng.lognormvariate(3, 1.2)) for _ in range(per_group)]
            next_group += 1
        for queue, busy in zip(queues, running, strict=True):
            while queue and len(busy) < slots:
                group, length = queue.pop(0)
                heapq.heappush(busy, (now + length, group))
        waiting = [len({group for group, _ in queue}) for queue in queues]
        n_idle += max(waiting) > 1 and not all(running)
        now, engine = min((busy[0][0], number) for number, busy in enumerate(running) if busy)
        _, group = heapq.heappop(running[engine])
        open_samples[group] -= 1
        if not open_samples[group]:
            del open_samples[group]
            loads.answered(engine, 1, per_group * 41, rng.randrange(200))
    return now, n_idle


@pytest.mark.parametrize("seed", range(30))
def test_no_engine_is_idle_while_more_than_one_group_waits_in_the_queue_of_another(seed: int) -> None:
    rng = random.Random(seed)
    n_engines, per_group = rng.randint(2, 6), rng.randint(1, 4)
    slots = per_group * rng.randint(1, 6)
    _, n_idle = run_engines(rng, slots // per_group + 1, n_engines, slots, per_group)
    assert n_idle == 0


def test_a_group_stays_where_its_samples_are_unless_others_have_much_less_to_do() -> None:
    loads = GroupLoads(range(4))
    assert loads.take(near=(9, 3)) == 3
    assert [loads.take(near=(3,)) for _ in range(2)] == [3, 0], "two groups where others have none are enough"
    loads.deal(17, None)
    assert [loads.load(worker) for worker in range(4)] == [5, 5, 5, 5]
    taken = [loads.take(near=(2,)) for _ in range(4)]
    assert taken.count(2) == 3, f"up to {NEAR_LOAD} times and one group"


@pytest.mark.parametrize("seed", range(10))
def test_what_an_engine_may_not_have_yet_stays_for_it_and_a_copy_goes_on_alike(seed: int) -> None:
    rng = random.Random(seed)
    loads, copy = GroupLoads(range(5)), GroupLoads(range(5))
    for _ in range(100):
        owners, n_groups, before = set(rng.sample(range(5), rng.randint(1, 5))), rng.randint(0, 6), dict(loads.open)
        dealt = loads.deal(n_groups, owners, most=8)
        assert set(dealt) <= owners
        assert all(loads.open[worker] == before[worker] + dealt.count(worker) <= 8 for worker in range(5))
        assert copy.deal(n_groups, owners, most=8) == dealt
        worker = rng.randrange(5)
        ended, drawn = rng.randint(0, loads.open[worker]), rng.randrange(60)
        loads.answered(worker, ended, 30 * ended, drawn)
        copy.answered(worker, ended, 30 * ended, drawn)
        copy.restore(loads.image)
    with pytest.raises(UnexpectedReply, match="answered for more groups"):
        loads.answered(0, 100)
