"""Shares that several workers of a host read: they come to the host once, and no fault of one reader is a hang."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from torch import Tensor

from realgraph.runtime.store.bundle import TransferError
from realgraph.runtime.store.shares import Share, fetcher
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest, Values
from realgraph.runtime.wire.curve import LOOPBACK, make_keys
from tests.test_store import random_value
from tests.test_transfer import equal


@contextlib.contextmanager
def hosts_of(names: str) -> Iterator[list[DataPlane]]:
    """Connected data planes in this process, each on the host that its letter names."""
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(DataPlane(i, Store(1 << 16), make_keys(), LOOPBACK, host=name))
            for i, name in enumerate(names)
        ]
        for plane in made:
            plane.connect([other.peer for other in made])
        yield made


def in_threads(readers: list[DataPlane], wants: list[GatherRequest], share: Share, copy: bool) -> list[Values | str]:
    """The values that each reader gathers, or its error; all at once."""

    def one(plane: DataPlane) -> Values | str:
        try:
            return plane.gather_now(wants, share=share, copy=copy, deadline_seconds=20)
        except TransferError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(readers)) as threads:
        return list(threads.map(one, readers))


@pytest.mark.parametrize("seed", range(12))
def test_all_readers_of_a_share_have_its_values_and_nothing_is_kept(seed: int) -> None:
    """Owners and readers on up to three hosts, some of them both; several tasks one after another."""
    rng = random.Random(seed)
    names = "".join(rng.choice("abc"[: rng.randint(1, 3)]) for _ in range(rng.randint(2, 6)))
    with hosts_of(names) as made:
        for task in range(3):
            truth: dict[str, dict[int, Tensor]] = {}
            wants = []
            for plane in made:
                for key in rng.sample("xyz", rng.randint(0, 3)):
                    ids = [100 * plane.peer.worker + id for id in range(rng.randint(1, 5))]
                    values = [random_value(rng, 40_000) for _ in ids]
                    plane._store.put(key, ids, values)
                    wants.append(GatherRequest(plane.peer.worker, key, tuple(ids)))
                    truth.setdefault(key, {}).update({id: v.clone() for id, v in zip(ids, values, strict=True)})
            readers = rng.sample(made, rng.randint(1, len(made)))
            share = Share(task, tuple(plane.peer.worker for plane in readers))
            copy = rng.random() < 0.5
            results = in_threads(readers, wants, share, copy)
            assert all(isinstance(found, dict) and equal(found, truth) for found in results), results
            results.clear()
        assert not any(plane._shares._fetched for plane in made)


def test_a_share_comes_from_each_owner_to_one_worker_of_a_host() -> None:
    with hosts_of("abbbcc") as made:
        owner, readers = made[0], made[1:]
        owner._store.put("x", [0], [torch.arange(100)])
        share = Share(7, (1, 2, 3, 4, 5))
        for found in in_threads(readers, [GatherRequest(0, "x", (0,))], share, copy=False):
            assert isinstance(found, dict) and torch.equal(found["x"][0], torch.arange(100))
        asked = [plane.peer.worker for plane in readers if (0, "tcp") in plane._idle]
        assert len(asked) == 2 and sum(worker < 4 for worker in asked) == 1


def test_what_a_share_lacks_and_who_is_lost_is_an_error_of_every_reader() -> None:
    with hosts_of("abbb") as made:
        readers, share = made[1:], Share(1, (1, 2, 3))
        errors = in_threads(readers, [GatherRequest(0, "x", (5,))], share, copy=False)
        assert all(isinstance(error, str) and "worker 0 holds no 'x' of id 5" in error for error in errors), errors
        gone = msgspec.structs.replace(made[0].peer, address="tcp://127.0.0.1:1")
        for plane in readers:
            plane.connect([gone, *(other.peer for other in readers)])
        began = time.monotonic()
        errors = in_threads(readers, [GatherRequest(0, "x", (5,))], Share(2, share.readers), copy=False)
        assert all(isinstance(error, str) and error.startswith("PeerLostError: worker 0 at ") for error in errors)
        assert time.monotonic() - began < 15


def test_a_reader_that_waits_for_a_share_is_told_where_its_fetcher_ends() -> None:
    """The owner answers nobody: it knows no keys yet."""
    with contextlib.ExitStack() as stack:
        owner, *readers = [
            stack.enter_context(DataPlane(i, Store(1 << 16), make_keys(), LOOPBACK, host=name))
            for i, name in enumerate("abbb")
        ]
        for plane in readers:
            plane.connect([other.peer for other in (owner, *readers)])
        chosen = fetcher(0, (1, 2, 3))
        other = next(plane for plane in readers if plane.peer.worker != chosen)
        timer = threading.Timer(0.5, lambda: made_to_end(readers[chosen - 1]))
        timer.start()
        (error,) = in_threads([other], [GatherRequest(0, "x", (0,))], Share(1, (1, 2, 3)), copy=False)
        assert isinstance(error, str) and f"worker {chosen} on this host is lost" in error, error
        owner.connect([plane.peer for plane in readers])
        timer.join(20)


def made_to_end(plane: DataPlane) -> None:
    """Hang up on whoever reads here, as the end of the process does."""
    for connection in tuple(plane._local._connections):
        connection.shutdown(socket.SHUT_RDWR)
