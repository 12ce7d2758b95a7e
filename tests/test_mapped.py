"""Weights that are read out of other workers' memory: who reads, who is sent messages, and what both sides wait for."""

import gc
import math
import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import UNBOUNDED, Arriving, Reallocation, WeightPart, WorkerParts, exchange
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.routes import rounds
from realgraph.runtime.parallel.segments import WeightSegment, share_weights
from realgraph.runtime.wire.metrics import ArrivedBytes
from tests.engines import CPU
from tests.ranks import RankProcesses
from tests.waiting import until

BUCKET = 256  # bytes
Held = dict[int, dict[str, Box]]


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    processes = RankProcesses(3)
    yield processes
    processes.close()


def full(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {
        name: torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1000 * i
        for i, (name, shape) in enumerate(shapes.items())
    }


def move(
    held: Held, wanted: Held, dtype: torch.dtype = torch.float64, hosts: tuple[int, ...] = (0, 0, 0)
) -> Reallocation:
    reads = tuple(message for each in rounds(held, wanted, hosts, 1, UNBOUNDED) for message in each)
    by_messages = rounds(held, wanted, hosts, dtype.itemsize, BUCKET)
    return Reallocation(by_messages, wanted, dtype, BUCKET, reads, hosts, held)


def placed(worker: int, held: Held, wanted: Held, whole: dict[str, Tensor]) -> WorkerParts:
    """A worker's own parts, in a segment."""
    model = torch.nn.ParameterDict(
        {name.replace(".", "/"): whole[name][box.slices].clone() for name, box in held.get(worker, {}).items()}
    )
    segment = share_weights(model) if len(model) else None
    holds = {
        name: WeightPart(name, box, model[name.replace(".", "/")].detach())
        for name, box in held.get(worker, {}).items()
    }
    return WorkerParts(worker, CPU, holds, wanted.get(worker, {}), segment)


def taken(
    parts: Iterator[WeightPart], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], int]:
    """The tensors, nan where nothing came, and how many elements came: right there, if they can."""
    into = {name: torch.full(shape, math.nan, dtype=dtype) for name, shape in shapes.items()}
    n = 0
    if isinstance(parts, Arriving):
        whole = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
        parts.land_in({name: WeightPart(name, whole[name], tensor) for name, tensor in into.items()})
    for name, box, values in parts:
        if into[name][box.slices].data_ptr() != values.data_ptr():
            into[name][box.slices] = values
        n += box.numel
    return {name: tensor.double() for name, tensor in into.items()}, n


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].nan_to_num(-1), other[name].nan_to_num(-1)) for name in one)


# --- random boxes -----------------------------------------------------------------------------------------------------


def drawn(rng: Random, shapes: dict[str, tuple[int, ...]], workers: list[int]) -> Held:
    """Every tensor cut in one dim, each part on a worker, some on others too."""
    found: Held = {worker: {} for worker in workers}
    for name, shape in shapes.items():
        dim = rng.randrange(len(shape))
        n = rng.randint(1, min(len(workers), shape[dim]))
        cuts = [0, *sorted(rng.sample(range(1, shape[dim]), n - 1)), shape[dim]]
        order = rng.sample(workers, len(workers))
        for i, worker in enumerate(order):
            part = i if i < n else rng.randrange(n)
            start = tuple(cuts[part] if d == dim else 0 for d in range(len(shape)))
            size = tuple(cuts[part + 1] - cuts[part] if d == dim else s for d, s in enumerate(shape))
            found[worker][name] = Box(start, size)
    return found


def drawn_move(seed: int) -> tuple[dict[str, tuple[int, ...]], Held, Held, torch.dtype]:
    """Shapes of tensors, where they lie and where they are to lie, and their dtype on the way."""
    rng = Random(seed)
    shapes = {f"t.{i}": tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))) for i in range(rng.randint(1, 6))}
    held = drawn(rng, shapes, rng.sample(range(3), rng.randint(1, 3)))
    wanted = drawn(rng, shapes, rng.sample(range(3), rng.randint(1, 3)))
    return shapes, held, wanted, rng.choice([torch.float64, torch.float64, torch.float32])


def both_ways(ranks: LayoutRanks, seed: int, hosts: tuple[int, ...]) -> tuple[bool, bool, int, int, ArrivedBytes]:
    """The parts that this worker wants, by both ways: right, alike; elements that came, and that it wants; bytes that
    came from others, over and above the least there can be."""
    me, (shapes, held, wanted, dtype) = ranks.mesh.rank, drawn_move(seed)
    whole, moves = full(shapes), move(held, wanted, dtype, hosts)
    place = placed(me, held, wanted, whole)
    sent, _ = taken(exchange(moves, place), shapes)
    route = MappedRoute(moves, me, str(hosts[me]))
    read, n = taken(route.bring(place), shapes, dtype)  # cast on the way, if they are
    route.settle()
    with torch.no_grad():
        for part in place.holds.values():  # training goes on in place
            part.values.add_(1)
    again, _ = taken((part for part in route.bring(place)), shapes)  # and not right there
    route.settle()
    expected = {name: torch.full_like(tensor, math.nan) for name, tensor in whole.items()}
    for name, box in place.wants.items():
        expected[name][box.slices] = whole[name][box.slices]
    right = same(read, expected) and same(again, {name: tensor + 1 for name, tensor in expected.items()})
    return right, same(read, sent), n, sum(box.numel for box in place.wants.values()), route.arrivals.total


def lacking(held: Held, wanted: Held, shapes: dict[str, tuple[int, ...]], hosts: tuple[int, ...]) -> tuple[int, int]:
    """Elements that workers lack, and of them those that their hosts lack, each of these once a host."""
    missing, far = 0, set()
    for name, shape in shapes.items():
        for place in product(*map(range, shape)):
            at = Box(place, (1,) * len(shape))
            have = {w for w, boxes in held.items() if name in boxes and boxes[name].intersect(at)}
            want = {w for w, boxes in wanted.items() if name in boxes and boxes[name].intersect(at)} - have
            missing += len(want)
            far |= {(name, place, hosts[w]) for w in want if hosts[w] not in {hosts[h] for h in have}}
    return missing, len(far)


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(12))
def test_reading_gives_what_messages_give_and_no_element_twice(
    three: RankProcesses, seed: int, hosts: tuple[int, ...]
) -> None:
    """On one host, and between hosts, where each element comes to a host once and is handed on inside it."""
    found = three.run(both_ways, seed, hosts)
    for right, alike, came, wanted, _ in found:
        assert right
        assert alike
        assert came == wanted
    shapes, held, wants, dtype = drawn_move(seed)
    missing, far = (2 * dtype.itemsize * n for n in lacking(held, wants, shapes, hosts))  # brought twice
    assert sum(one[-1].far for one in found) == far
    assert sum(one[-1].near for one in found) == missing - far


# --- what both sides wait for -----------------------------------------------------------------------------------------

SHAPES = {"a": (8, 3), "b": (5,), "c": (40, 2)}
WHOLE = {name: Box((0,) * len(shape), shape) for name, shape in SHAPES.items()}


def spoiled(ranks: LayoutRanks) -> bool:
    """Worker 0 changes its weights as soon as it may, while the others take their time. True where all came."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE, 2: WHOLE}, ranks.mesh.rank
    place = placed(me, held, wanted, full(SHAPES))

    def slowly(parts: Iterator[WeightPart]) -> Iterator[WeightPart]:
        for part in parts:
            time.sleep(0.1)
            yield part

    route = MappedRoute(move(held, wanted), me, "")
    found, _ = taken(slowly(route.bring(place)), SHAPES)
    route.settle()
    for part in place.holds.values():
        part.values.fill_(math.nan)
    return me == 0 or same(found, full(SHAPES))


def test_weights_do_not_change_until_all_have_read_them(three: RankProcesses) -> None:
    assert three.run(spoiled) == [True] * 3


def late(ranks: LayoutRanks) -> bool:
    """Worker 0 changes its weights just before it comes. True where the others read the last ones."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE, 2: WHOLE}, ranks.mesh.rank
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(move(held, wanted), me, "")
    taken(route.bring(place), SHAPES)
    route.settle()
    if me == 0:
        time.sleep(0.2)
        for part in place.holds.values():
            part.values.mul_(2)
    found, _ = taken(route.bring(place), SHAPES)
    route.settle()
    return me == 0 or same(found, {name: 2 * tensor for name, tensor in full(SHAPES).items()})


def test_nothing_is_read_before_it_is_final(three: RankProcesses) -> None:
    assert three.run(late) == [True] * 3


def unread(ranks: LayoutRanks, file: Path) -> bool:
    """Worker 0 goes on before the others have begun to read: they read once it has left a file. True where all came."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE, 2: WHOLE}, ranks.mesh.rank
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(move(held, wanted), me, "")
    taken(route.bring(place), SHAPES)
    parts, found = route.bring(place), dict[str, Tensor]()
    if me == 0:
        taken(parts, SHAPES)
        file.touch()
    else:
        assert until(file.exists)
        found, _ = taken(parts, SHAPES)
    route.settle()
    return me == 0 or same(found, full(SHAPES))


def test_a_sender_does_not_wait_for_readers(three: RankProcesses, tmp_path: Path) -> None:
    assert three.run(unread, tmp_path / "on") == [True] * 3


def versions_read(ranks: LayoutRanks, seed: int) -> list[tuple[int, set[float]]]:
    """Two routes from random holders, in a random order of updates, at random speeds: each update's version, and the
    values that came. A holder's weights change as soon as nobody has them on loan."""
    me, order, pace = ranks.mesh.rank, Random(seed), Random(10 * seed + ranks.mesh.rank)
    held = drawn(order, SHAPES, order.sample(range(3), order.randint(1, 2)))
    wants = [drawn(order, SHAPES, order.sample(range(3), order.randint(1, 3))) for _ in range(2)]
    places = [placed(me, held, wants[0], full(SHAPES))]
    places.append(places[0]._replace(wants=wants[1].get(me, {})))
    routes = [MappedRoute(move(held, wanted), me, "") for wanted in wants]
    found = list[tuple[int, set[float]]]()
    for version in range(1, 9):
        for part in places[0].holds.values():
            part.values.fill_(math.nan).fill_(version)
        for at in order.choices(range(2), k=order.randint(0, 3)):  # a version may go one way twice, or none
            came = set[float]()
            for _, _, values in routes[at].bring(places[at]):
                time.sleep(pace.choice([0.0, 0.0, 0.002]))
                came |= set(values.flatten().tolist())
            found.append((version, came))
        time.sleep(pace.choice([0.0, 0.01]))
        for route in routes:
            route.settle()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_weight_changes_under_a_reader_and_nobody_waits_for_good(three: RankProcesses, seed: int) -> None:
    """Whoever is slow, and in whatever order updates go to several copies."""
    found = three.run(versions_read, seed)
    assert all(came <= {version} for one in found for version, came in one)
    assert any(came for one in found for _, came in one)


# --- who can't read ---------------------------------------------------------------------------------------------------


def out_of_reach(ranks: LayoutRanks, why: str) -> tuple[int, bool]:
    """Worker 2 can't read the memory of worker 0, 1 mostly can: bytes of weights that this one sent; if all came."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE, 2: WHOLE}, ranks.mesh.rank
    place, n_sent, isend = placed(me, held, wanted, full(SHAPES)), [0], dist.isend
    host = "another" if why == "other host" and me == 2 else "one"

    def counted(flat: Tensor, to: int) -> Any:
        n_sent[0] += flat.nbytes if flat.is_floating_point() else 0
        return isend(flat, to)

    def refused(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        if why == "sandbox" and me == 2:
            patch.setattr(os, "open", refused)
        other = WeightSegment(place.segment.nbytes - 64) if me == 0 and place.segment is not None else None
        if why == "other process" and me == 0 and place.segment is not None and other is not None:
            patch.setattr(place.segment, "descriptor", other.descriptor)  # as numbers mean others in a namespace
        if why == "not shared":
            place = place._replace(segment=None)
        route = MappedRoute(move(held, wanted), me, host)
        found = [taken(route.bring(place), SHAPES)[0] for _ in range(2)]
        route.settle()
    return n_sent[0] // 2, me == 0 or all(same(one, full(SHAPES)) for one in found)


@pytest.mark.parametrize(
    ("why", "sent"), {"nothing": 0, "sandbox": 1, "other host": 1, "other process": 2, "not shared": 2}.items()
)
def test_who_cannot_read_is_sent_messages(three: RankProcesses, why: str, sent: int) -> None:
    found = three.run(out_of_reach, why)
    n_bytes = sum(box.numel for box in WHOLE.values()) * 8
    assert [right for _, right in found] == [True] * 3
    assert [n for n, _ in found] == [sent * n_bytes, 0, 0]


# --- what is left -----------------------------------------------------------------------------------------------------


def left_over(ranks: LayoutRanks) -> tuple[tuple[int, int], ...]:
    """Open descriptors and mapped segments: before, amid, and after a reallocation whose ends are gone."""

    def counts() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("memfd:realgraph " in line for line in maps)

    held, wanted, me = {0: WHOLE}, {1: WHOLE}, ranks.mesh.rank
    moves = move(held, wanted)
    gc.collect()
    before = counts()
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(moves, me, "")
    for _ in range(3):
        taken(route.bring(place), SHAPES)
        route.settle()
    amid = counts()
    del place, route
    gc.collect()
    return before, amid, counts()


def test_no_descriptor_and_no_mapping_is_left(three: RankProcesses) -> None:
    for me, (before, amid, after) in enumerate(three.run(left_over)):
        assert before == after
        n_descriptors, n_mapped = amid[0] - before[0], amid[1] - before[1]
        assert (n_descriptors, n_mapped) == [(2, 1), (1, 1), (0, 0)][me]  # Python's mmap has a descriptor of its own
