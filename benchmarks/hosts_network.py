"""Samples and weights that cross between two hosts, which are network namespaces, beside bare streams of as many bytes:
ZeroMQ with the same encryption and frames, and gloo.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from benchmarks.data_plane import SIZES, Addresses, bare_turn, gather_turns, own
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.parallel.collectives.rendezvous import open_rendezvous, reach_store
from realgraph.runtime.parallel.cuts import Box, layout_boxes
from realgraph.runtime.parallel.exchange import BUCKET_BYTES, WeightPart, WorkerParts, reallocation
from realgraph.runtime.parallel.groups import Collectives, LayoutRanks, Member
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane
from realgraph.runtime.wire.curve import KeyPair, make_keys
from tests.namespaces import enter_namespace

Place = tuple[str, str]  # a namespace and its address
PATIENCE_SECONDS = 300.0

# --- samples ----------------------------------------------------------------------------------------------------------


def read(place: Place, keys: KeyPair, addresses: Addresses, plan: tuple[str, int], pipe: Connection) -> None:
    """The process of a reader. plan: the name of a size, and rounds. Sends seconds: contender -> one a round."""
    enter_namespace(place[0])
    torch.set_num_threads(1)
    size, rounds = plan
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with DataPlane(0, Store(), keys, place[1]) as plane:
        plane.connect([addresses.peer])
        assert plane.is_far(1), "owner and reader are on one host"
        turns = {
            "gather": gather_turns(plane)["gather tcp"],
            "bare zmq curve": bare_turn(addresses, context),
        }
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for n in range(rounds + 1):
            for name in turns if n % 2 else reversed(turns):
                began = time.perf_counter()
                turns[name](size)
                if n:  # the first round connects and warms up
                    seconds[name].append(time.perf_counter() - began)
    context.destroy(linger=0)
    pipe.send(seconds)


def gathered(spawn: Any, places: tuple[Place, Place], plan: tuple[str, int]) -> dict[str, list[float]]:
    """Seconds of gathers of a value from the first place to the second. spawn: a multiprocessing context."""
    assert plan[0] in SIZES
    keys = make_keys()
    owner_pipe, theirs = spawn.Pipe()
    reader_pipe, readers = spawn.Pipe()
    owner = spawn.Process(target=own, args=(keys, theirs, places[0]), daemon=True)
    owner.start()
    reader = None
    try:
        assert owner_pipe.poll(PATIENCE_SECONDS), "the owner did not start"
        addresses = msgspec.msgpack.decode(owner_pipe.recv_bytes(), type=Addresses)
        reader = spawn.Process(target=read, args=(places[1], keys, addresses, plan, readers), daemon=True)
        reader.start()
        assert reader_pipe.poll(PATIENCE_SECONDS), "the reader did not end"
        found: dict[str, list[float]] = reader_pipe.recv()
        return found
    finally:
        for process in (owner, reader):
            if process is not None:
                process.kill()
                process.join()


# --- weights ----------------------------------------------------------------------------------------------------------

WIDTH, N_LAYERS = 4096, 6  # 400 MB in float32
SHAPES = {f"layers.{n}.weight": (WIDTH, WIDTH) for n in range(N_LAYERS)}
ALONE = (Layout(DeviceMesh(0, 1)), Layout(DeviceMesh(1, 1)))
BOTH = DeviceMesh(0, 2)
CASES: dict[str, tuple[Layout, Layout]] = {
    "one host to the other": ALONE,
    "each host half to the other": (Layout(BOTH, dp=2, sharding="fsdp"), Layout(BOTH, dp=2)),
}


def _filled(boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """A tensor for each box."""
    return {name: torch.full(box.shape, float(n)) for n, (name, box) in enumerate(boxes.items())}


def _ours(worker: int, case: tuple[Layout, Layout], member: Member) -> Callable[[], None]:
    """A reallocation between two layouts, with the copies into the receiver's weights."""
    moves = reallocation(SHAPES, torch.float32, case, member)
    route = MappedRoute(moves, worker, member.host)
    boxes = layout_boxes(SHAPES, case[0], None).get(worker, {})
    local = {name: WeightPart(name, boxes[name], values) for name, values in _filled(boxes).items()}
    wants = moves.wants.get(worker, {})
    into = _filled(wants)
    place = WorkerParts(worker, torch.device("cpu"), local, wants, None)

    wanted = {name: WeightPart(name, wants[name], values) for name, values in into.items()}

    def turn() -> None:
        parts = route.bring(place)
        parts.land_in(wanted)
        for part in parts:
            own = into[part.name][part.box.within(wants[part.name]).slices]
            if own.data_ptr() != part.values.data_ptr():  # else it came right there
                own.copy_(part.values)
        route.settle()

    return turn


def _bare(worker: int, sends: tuple[int, ...], n_bytes: int) -> Callable[[], None]:
    """The same bytes by gloo alone, in messages as large, from and to memory that is there. sends: the senders."""
    count = BUCKET_BYTES["cpu"] // 4
    out, into = torch.ones(n_bytes // 4), torch.empty(n_bytes // 4)

    def turn() -> None:
        works = []
        if worker in sends:
            works += [dist.isend(piece, 1 - worker) for piece in out.split(count)]
        if 1 - worker in sends:
            works += [dist.irecv(piece, 1 - worker) for piece in into.split(count)]
        for work in works:
            assert work is not None
            work.wait()

    return turn


def move(places: tuple[Place, Place], worker: int, address: str, rounds: int, pipe: Connection) -> None:
    """The process of a worker. Sends the rendezvous' address, of worker 0, then case -> contender -> seconds."""
    enter_namespace(places[worker][0])
    torch.set_num_threads(1)
    interface = places[worker][1]
    rendezvous = open_rendezvous(interface) if worker == 0 else None
    if rendezvous is not None:
        address = rendezvous.address
        pipe.send(address)
    member = Member(worker, 2, torch.device("cpu"), PATIENCE_SECONDS, ("a", "b"), interface)
    whole = Layout(BOTH, dp=2)
    groups = Collectives(member, reach_store(address, 2, PATIENCE_SECONDS), [whole])
    ranks = groups.of_layout(whole)
    n_bytes = 4 * sum(math.prod(shape) for shape in SHAPES.values())
    found: dict[str, dict[str, list[float]]] = {}
    for name, case in CASES.items():
        one_way = case is ALONE
        turns = {
            "reallocation": _ours(worker, case, member),
            "bare gloo": _bare(worker, (0,) if one_way else (0, 1), n_bytes if one_way else n_bytes // 2),
        }
        found[name] = {contender: [] for contender in turns}
        for n in range(rounds + 1):
            for contender in turns if n % 2 else reversed(turns):
                seconds = _timed(ranks, turns[contender])
                if n:
                    found[name][contender].append(seconds)
    pipe.send(found)
    groups.close()
    if rendezvous is not None:
        rendezvous.close()


def _timed(ranks: LayoutRanks, turn: Callable[[], None]) -> float:
    """Seconds until both workers have ended their turns."""
    ranks.mesh.barrier()
    began = time.perf_counter()
    turn()
    ranks.mesh.barrier()
    return time.perf_counter() - began


def moved(spawn: Any, places: tuple[Place, Place], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of reallocations between two hosts: case -> contender -> one a round."""
    pipes, processes, address = [], [], ""
    try:
        for worker in range(2):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=move, args=(places, worker, address, rounds, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
            if worker == 0:
                assert ours.poll(PATIENCE_SECONDS), "the first worker did not start"
                address = ours.recv()
        assert all(pipe.poll(PATIENCE_SECONDS) for pipe in pipes), "a worker did not end"
        return next(pipe.recv() for pipe in pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median over rounds of theirs over ours within the round: how fast ours is beside theirs."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
