"""The data plane: on both routes a gather equals a lookup in dicts, and no fault of a peer is silent or a hang."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.store.bundle import AbsentError, PeerLostError, Route, SlowPeerError, TransferError
from realgraph.runtime.store.local import connect_local
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest, Values
from realgraph.runtime.wire.curve import LOOPBACK, KeyPair, make_keys
from realgraph.runtime.wire.protocol import Peer
from realgraph.runtime.worker.failures import failure
from tests.preloaded import CONTEXT
from tests.test_store import random_value, same
from tests.traces import enter_shared_memory, shared_memory

ROUTES: tuple[Route, ...] = ("local", "tcp")


@contextlib.contextmanager
def planes(n: int, segment_bytes: int = 1 << 16) -> Iterator[list[DataPlane]]:
    """`n` connected data planes in this process."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(DataPlane(i, Store(segment_bytes), make_keys(), LOOPBACK)) for i in range(n)]
        for plane in made:
            plane.connect([other.peer for other in made])
        yield made


def equal(values: Values, truth: dict[str, dict[int, Tensor]]) -> bool:
    return {k: set(v) for k, v in values.items()} == {k: set(v) for k, v in truth.items()} and all(
        same(value, truth[key][id]) for key, some in values.items() for id, value in some.items()
    )


@pytest.fixture(scope="module")
def four() -> Iterator[list[DataPlane]]:
    with planes(4) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("route", ["local", "tcp", None])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_a_gather_equals_a_lookup_in_dicts(four: list[DataPlane], route: Route | None, seed: int) -> None:
    """Random values in random stores; the owners drop and overwrite all of it before the copies are looked at."""
    rng = random.Random(seed)
    truth: dict[tuple[int, str], dict[int, Tensor]] = {}
    for plane in four:
        plane._store.drop_where(lambda key, id: True)
        for key in ("a", "b"):
            ids = [100 * plane.peer.worker + id for id in rng.sample(range(20), rng.randint(0, 10))]
            values = [random_value(rng, 40_000) for _ in ids]
            plane._store.put(key, ids, values)
            truth[plane.peer.worker, key] = {id: v.clone() for id, v in zip(ids, values, strict=True)}
    wants, expected = list[GatherRequest](), dict[str, dict[int, Tensor]]()
    for (worker, key), held in truth.items():
        if rng.random() < 0.8:
            wanted = tuple(rng.sample(sorted(held), rng.randint(0, len(held))))
            wants.append(GatherRequest(worker, key, wanted))
            expected.setdefault(key, {}).update({id: held[id] for id in wanted})
    reader = rng.choice(four)
    copies = reader.gather_now(wants, route=route, deadline_seconds=20)
    views = reader.gather_now(wants, route=route, deadline_seconds=20, copy=False)
    for plane in four:
        plane._store.drop_where(lambda key, id: True)
        plane._store.put("c", range(20), [torch.full((3000,), 7, dtype=torch.int64) for _ in range(20)])
    assert equal(copies, expected)
    assert equal(views, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_gathers_at_once_do_not_mix(four: list[DataPlane], route: Route) -> None:
    for plane in four:
        worker = plane.peer.worker
        plane._store.put("x", range(50), [torch.full((1000,), 100 * worker + i) for i in range(50)])

    async def one(rng: random.Random) -> None:
        wants = [GatherRequest(w, "x", tuple(range(10 * w, 10 * w + rng.randint(1, 10)))) for w in range(4)]
        values = await rng.choice(four).gather(wants, route=route, copy=rng.random() < 0.5)
        assert len(values["x"]) == sum(len(want.ids) for want in wants)
        for want in wants:
            for id in want.ids:
                assert torch.equal(values["x"][id], torch.full((1000,), 100 * want.worker + id))

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for n in range(40):
                tasks.create_task(one(random.Random(n)))

    asyncio.run(run())


@pytest.mark.parametrize("route", ROUTES)
def test_a_large_value_and_many_small_ones(route: Route) -> None:
    """More than the window of frames, more segments than fit one message."""
    with planes(2, segment_bytes=1 << 16) as (reader, owner):
        large = torch.arange(12_000_000, dtype=torch.int32)
        owner._store.put("large", [0], [large])
        owner._store.put("own segment", range(150), [torch.full((9_000,), i) for i in range(150)])
        owner._store.put("small", range(2000), [torch.tensor([float(i)]) for i in range(2000)])
        wants = [
            GatherRequest(1, "large", (0,)),
            GatherRequest(1, "own segment", tuple(range(150))),
            GatherRequest(1, "small", tuple(range(2000))),
        ]
        for _ in range(2):
            values = reader.gather_now(wants, route=route)
            assert torch.equal(values["large"][0], large)
            assert all(values["own segment"][i][-1] == i for i in range(150))
            assert all(values["small"][i].item() == i for i in range(2000))


def test_lent_views_keep_their_bytes_and_then_give_the_memory_back() -> None:
    with planes(2, segment_bytes=1 << 20) as (reader, owner):
        for step in range(60):
            owner._store.put("w", [0, 1], [torch.full((50_000,), step), torch.full((10,), step)])
            views = reader.gather_now([GatherRequest(1, "w", (0, 1))], copy=False)["w"]
            owner._store.drop(["w"], [0, 1])
            owner._store.put("other", [0], [torch.zeros(50_000)])
            assert torch.equal(views[0], torch.full((50_000,), step))
            small = views[1]
            del views
            assert small.tolist() == [step] * 10
            del small
        owner._store.drop(["other"], [0])
        deadline = time.monotonic() + 10
        while owner._store.arena.live_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert owner._store.arena.reserved_bytes <= 8 << 20


@pytest.mark.parametrize("route", ROUTES)
def test_a_missing_value_is_named_and_the_next_gather_works(four: list[DataPlane], route: Route) -> None:
    four[1]._store.put("y", [1], [torch.ones(3)])
    for _ in range(3):
        with pytest.raises(AbsentError, match="worker 1 holds no 'y' of id 77") as caught:
            four[0].gather_now([GatherRequest(1, "y", (1, 77))], route=route)
        assert (caught.value.worker, caught.value.key, caught.value.id) == (1, "y", 77)
    assert torch.equal(four[0].gather_now([GatherRequest(1, "y", (1,))], route=route)["y"][1], torch.ones(3))
    with pytest.raises(AbsentError, match="worker 0 holds no 'y' of id 5"):
        four[0].gather_now([GatherRequest(0, "y", (5,))])
    with pytest.raises(TransferError, match=r"worker 9 is not among the known peers \(0, 1, 2, 3\)"):
        four[0].gather_now([GatherRequest(9, "y", (5,))])


def test_peers_are_served_while_the_compute_thread_is_busy(four: list[DataPlane]) -> None:
    four[1]._store.put("z", [1], [torch.ones(300)])
    stop = threading.Event()

    def compute() -> None:
        n = 0
        while not stop.is_set():
            n += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for route in ROUTES:
            for _ in range(5):
                four[0].gather_now([GatherRequest(1, "z", (1,))], route=route, deadline_seconds=5)
    finally:
        stop.set()
        thread.join(20)


def test_a_peer_that_is_not_configured_yet_is_waited_for() -> None:
    with (
        DataPlane(0, Store(1 << 16), make_keys(), LOOPBACK) as reader,
        DataPlane(1, Store(1 << 16), make_keys(), LOOPBACK) as owner,
    ):
        owner._store.put("a", [0], [torch.ones(3)])
        reader.connect([owner.peer])
        timer = threading.Timer(0.3, owner.connect, ([reader.peer],))
        timer.start()
        assert torch.equal(reader.gather_now([GatherRequest(1, "a", (0,))], route="tcp")["a"][0], torch.ones(3))
        timer.join(20)


def test_routes_follow_hosts() -> None:
    with planes(2) as (reader, owner):
        owner._store.put("a", [0], [torch.arange(3)])
        assert owner.peer.host == host_id()
        assert torch.equal(reader.gather_now([GatherRequest(1, "a", (0,))])["a"][0], torch.arange(3))
        assert [way for (_, way), idle in reader._idle.items() if idle] == ["local"]
        reader.connect([msgspec.structs.replace(owner.peer, host="elsewhere", local="@nowhere")])
        assert torch.equal(reader.gather_now([GatherRequest(1, "a", (0,))])["a"][0], torch.arange(3))
        assert {way for (_, way), idle in reader._idle.items() if idle} == {"local", "tcp"}


@pytest.mark.slow
def test_a_thousand_peers_are_asked_by_one_worker() -> None:
    """One owner under as many names: more channels than ZeroMQ has sockets by itself, of which few are kept."""
    n = 1000
    with planes(2) as (reader, owner):
        owner._store.put("a", range(n), [torch.full((3,), i) for i in range(n)])
        reader.connect([msgspec.structs.replace(owner.peer, worker=i, host="elsewhere") for i in range(1, n)])
        for _ in range(2):
            values = reader.gather_now([GatherRequest(i, "a", (i,)) for i in range(1, n)])["a"]
            assert all(values[i].tolist() == [i] * 3 for i in range(1, n))
            assert sum(map(len, reader._idle.values())) == 256


# --- owners and readers in processes of their own, which are killed ---------------------------------------------------


def own(keys: KeyPair, peers: list[KeyPair], pipe: Connection, home: Path) -> None:
    """An owner: 40 MB of ones under (`w`, 0), a small value under (`s`, 0)."""
    enter_shared_memory(home)
    store = Store()
    store.put("w", [0], [torch.ones(10_000_000)])
    store.put("s", [0], [torch.ones(2)])
    with DataPlane(1, store, keys, LOOPBACK) as plane:
        plane.connect([Peer(i, "", "", "", pair.public) for i, pair in enumerate(peers)])
        pipe.send_bytes(msgspec.msgpack.encode(plane.peer))
        pipe.poll(100)


def read(peer: Peer, pipe: Connection) -> None:
    """A reader that borrows and holds on."""
    with DataPlane(2, Store(1 << 16), make_keys(), LOOPBACK) as plane:
        plane.connect([peer])
        views = plane.gather_now([GatherRequest(0, "w", (0,))], copy=False)
        pipe.send_bytes(b"borrowed")
        pipe.poll(100)
        del views


@contextlib.contextmanager
def owner_process(home: Path) -> Iterator[tuple[DataPlane, int]]:
    """A reader in this process, connected to an owner in another: the reader and the owner's process id."""
    keys, owner_keys = make_keys(), make_keys()
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=own, args=(owner_keys, [keys], there, home))
    process.start()
    assert process.pid is not None
    try:
        assert here.poll(60)
        peer = msgspec.msgpack.decode(here.recv_bytes(), type=Peer)
        with DataPlane(0, Store(1 << 16), keys, LOOPBACK) as reader:
            reader.connect([peer])
            yield reader, process.pid
    finally:
        process.kill()
        process.join(10)


@pytest.mark.parametrize("route", ROUTES)
def test_a_killed_owner_is_an_error_that_names_it_at_once(route: Route, tmp_path: Path) -> None:
    shared = shared_memory(tmp_path)
    with owner_process(tmp_path) as (reader, pid):
        small = [GatherRequest(1, "s", (0,))]
        assert torch.equal(reader.gather_now(small, route=route)["s"][0], torch.ones(2))
        views = reader.gather_now([GatherRequest(1, "w", (0,))], copy=False)["w"] if route == "local" else {}
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerLostError, match=r"worker 1 .*(lost|cannot be reached)") as caught:
                reader.gather_now(small, route=route, deadline_seconds=20)
            assert failure(0, "reward", caught.value).kind == "worker"  # so that the master waits for the owner's end
        assert time.monotonic() - start < 10
        assert all(torch.equal(view, torch.ones(10_000_000)) for view in views.values())
    assert not shared.left()


@pytest.mark.parametrize("route", ROUTES)
def test_an_owner_killed_in_the_middle_of_gathers_is_an_error(route: Route, tmp_path: Path) -> None:
    with owner_process(tmp_path) as (reader, pid):
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(PeerLostError, match="worker 1"):
            _gather_for_ever(reader, route)
        timer.join(20)


@pytest.mark.parametrize("route", ROUTES)
def test_an_owner_that_stops_answering_is_an_error_at_the_deadline(route: Route, tmp_path: Path) -> None:
    with owner_process(tmp_path) as (reader, pid):
        wants = [GatherRequest(1, "w", (0,))]
        before = reader.gather_now(wants, route=route)["w"][0]
        os.kill(pid, signal.SIGSTOP)
        while not all(state == "T" for state in _states(pid)):
            time.sleep(0.01)
        start = time.monotonic()
        with pytest.raises(SlowPeerError, match=r"worker 1 did not .* within 0\.5 s"):
            reader.gather_now(wants, route=route, deadline_seconds=0.5)
        assert 0.4 < time.monotonic() - start < 5
        os.kill(pid, signal.SIGCONT)
        assert torch.equal(reader.gather_now(wants, route=route)["w"][0], before)
        assert before.min() == before.max() == 1


def _gather_for_ever(reader: DataPlane, route: Route) -> None:
    while True:
        values = reader.gather_now([GatherRequest(1, "w", (0,))], route=route, deadline_seconds=20)
        assert values["w"][0][-1] == 1


def _states(pid: int) -> list[str]:
    """States of all threads of a process: `T` where stopped."""
    folder = Path(f"/proc/{pid}/task")
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in folder.iterdir()]


def test_what_a_killed_reader_borrowed_comes_back() -> None:
    store = Store()
    store.put("w", [0], [torch.ones(1_000_000)])
    here, there = CONTEXT.Pipe()
    with DataPlane(0, store, make_keys(), LOOPBACK) as owner:
        process = CONTEXT.Process(target=read, args=(owner.peer, there))
        process.start()
        assert here.poll(60)
        store.drop(["w"], [0])
        gc.collect()
        assert store.arena.live_bytes >= 4_000_000
        process.kill()
        process.join(10)
        deadline = time.monotonic() + 10
        while store.arena.live_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_closed_plane_leaves_nothing_behind() -> None:
    gc.collect()
    before, threads = len(os.listdir("/dev/fd")), threading.active_count()
    with planes(3) as made:
        for plane in made:
            plane._store.put("a", [plane.peer.worker], [torch.full((3,), plane.peer.worker)])
        for route in ROUTES:
            values = made[0].gather_now([GatherRequest(w, "a", (w,)) for w in (1, 2)], route=route)
            values["a"][3] = made[0].gather_now([GatherRequest(1, "a", (1,))], copy=False)["a"][1].clone()
            assert {id: value.tolist() for id, value in values["a"].items()} == {1: [1] * 3, 2: [2] * 3, 3: [1] * 3}
        names = [plane.peer.local for plane in made]
        addresses = [plane.peer.address for plane in made]
    while made[1:]:
        made.pop()._store.close()
    made[0]._store.close()
    with pytest.raises(TransferError, match="this data plane is closed"):
        made[0].gather_now([GatherRequest(1, "a", (1,))])
    for name in names:
        with pytest.raises(OSError):
            connect_local(name)
    for address in addresses:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with pytest.raises(OSError):
            socket.create_connection((host, int(port)), timeout=1)
    del made
    gc.collect()
    assert len(os.listdir("/dev/fd")) <= before + 1
    assert threading.active_count() <= threads + 1  # pyzmq's own collector may have started
