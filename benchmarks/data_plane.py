"""Bytes per second and latency of a gather on both routes, beside memcpy, bare ZeroMQ, pickle over ZeroMQ and Ray.

An owner process holds one value of each size; this process reads it, all contenders in turn in every round. Run
`OMP_NUM_THREADS=1 python -m benchmarks.data_plane`. What counts is the median over rounds of the ratio within a round:
absolute times depend on the machine. Everybody ends with the value in fresh memory of the reader, but for two rows:
`reused` copies into one buffer every time, and `views` looks at the owner's memory and copies from it into one buffer.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from benchmarks.machine import describe
from realgraph.runtime.store.bundle import FRAME_BYTES, Route
from realgraph.runtime.store.remote import WINDOW_FRAMES
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest
from realgraph.runtime.wire.curve import LOOPBACK, KeyPair, bound_address, make_keys, secure_client, secure_server
from realgraph.runtime.wire.protocol import Peer
from tests.namespaces import enter_namespace

SIZES = {"1 KB": 1_000, "1 MB": 1_000_000, "16 MB": 16_000_000, "100 MB": 100_000_000}
ROUNDS = 15
RESULTS = Path(__file__).parent / "results" / "data_plane.json"
Turn = Callable[[str], object]  # reads the value of this size once


class Addresses(msgspec.Struct, frozen=True):
    """Addresses at which the owner process serves its tensors, one for each way of moving them."""

    peer: Peer
    bare: str
    bare_key: str
    pickled: str


@dataclass(frozen=True)
class Target:
    """The median of `unit` of `ours` over `theirs` shall reach `least` for each of `sizes`."""

    ours: str
    theirs: str
    least: float
    sizes: tuple[str, ...]


TARGETS = (
    Target("gather local", "memcpy fresh", 0.6, ("16 MB", "100 MB")),
    Target("gather local views", "memcpy reused", 0.6, ("16 MB", "100 MB")),
    Target("gather tcp", "bare zmq curve", 0.8, ("16 MB", "100 MB")),
)
LATENCY_TARGET_SECONDS = 0.3e-3


def values() -> dict[str, torch.Tensor]:
    """One value per size, uint8."""
    return {name: torch.arange(n, dtype=torch.int64).to(torch.uint8) for name, n in SIZES.items()}


# --- the owner process ------------------------------------------------------------------------------------------------


def own(reader: KeyPair, pipe: Connection, place: tuple[str, str] = ("", LOOPBACK)) -> None:
    """Serve every contender's protocol until the pipe closes. place: a network namespace, if any, and its address."""
    if place[0]:
        enter_namespace(place[0])
    torch.set_num_threads(1)
    store, stored, keys = Store(), values(), make_keys()
    for name, value in stored.items():
        store.put(name, [0], [value])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bare, pickled = context.socket(zmq.ROUTER), context.socket(zmq.REP)
    secure_server(bare, keys)
    for socket in (bare, pickled):
        socket.bind(f"tcp://{place[1]}:0")
        threading.Thread(
            target=_serve_bare if socket is bare else _serve_pickled, args=(socket, stored), daemon=True
        ).start()
    with DataPlane(1, store, make_keys(), place[1]) as plane:
        plane.connect([Peer(0, "", "", "", reader.public)])
        pipe.send_bytes(
            msgspec.msgpack.encode(Addresses(plane.peer, bound_address(bare), keys.public, bound_address(pickled)))
        )
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()


def _serve_bare(socket: "zmq.Socket[bytes]", stored: dict[str, torch.Tensor]) -> None:
    """Frames of the gather's own size and window, but nothing else: no headers, no deadlines, no index."""
    waiting: dict[bytes, Iterator[memoryview]] = {}
    while True:
        reader, request = socket.recv_multipart()
        if not request.isdigit():
            data = stored[request.decode()].numpy().data
            waiting[reader] = iter([data[i : i + FRAME_BYTES] for i in range(0, len(data), FRAME_BYTES)])
        for _ in range(int(request) if request.isdigit() else WINDOW_FRAMES):
            if (frame := next(waiting[reader], None)) is None:
                break
            socket.send_multipart([reader, frame], copy=False)


def _serve_pickled(socket: "zmq.Socket[bytes]", stored: dict[str, torch.Tensor]) -> None:
    while True:
        socket.send(pickle.dumps(stored[socket.recv().decode()]))


# --- the contenders, in the reader ------------------------------------------------------------------------------------


def memcpy_turns() -> dict[str, Turn]:
    sources = {name: value.numpy() for name, value in values().items()}
    reused = {name: np.empty_like(value) for name, value in sources.items()}
    return {
        "memcpy fresh": lambda size: sources[size].copy(),
        "memcpy reused": lambda size: np.copyto(reused[size], sources[size]),
    }


def gather_turns(plane: DataPlane) -> dict[str, Turn]:
    reused = {name: np.empty(n, dtype=np.uint8) for name, n in SIZES.items()}

    def copied(route: Route) -> Turn:
        return lambda size: plane.gather_now([GatherRequest(1, size, (0,))], route=route)[size][0]

    def views(size: str) -> None:
        np.copyto(reused[size], plane.gather_now([GatherRequest(1, size, (0,))], copy=False)[size][0].numpy())

    return {"gather local": copied("local"), "gather tcp": copied("tcp"), "gather local views": views}


def bare_turn(addresses: Addresses, context: "zmq.Context[zmq.Socket[bytes]]") -> Turn:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    secure_client(socket, make_keys(), addresses.bare_key)
    socket.connect(addresses.bare)

    def turn(size: str) -> object:
        socket.send(size.encode())
        landed, filled, credit = np.empty(SIZES[size], dtype=np.uint8), 0, 0
        while filled < SIZES[size]:
            piece = np.frombuffer(socket.recv(copy=False).buffer, dtype=np.uint8)
            landed[filled : filled + piece.nbytes] = piece
            filled, credit = filled + piece.nbytes, credit + 1
            if credit == WINDOW_FRAMES // 2 and filled < SIZES[size]:
                socket.send(b"%d" % credit)
                credit = 0
        return landed

    return turn


def pickle_turn(addresses: Addresses, context: "zmq.Context[zmq.Socket[bytes]]") -> Turn:
    socket = context.socket(zmq.REQ)
    socket.linger = 0
    socket.connect(addresses.pickled)

    def turn(size: str) -> object:
        socket.send(size.encode())
        return pickle.loads(socket.recv())  # noqa: S301 (what this row measures; the bytes are our own)

    return turn


@contextlib.contextmanager
def ray_turns() -> Iterator[dict[str, Turn]]:
    """`ray get` of a value that an actor of another process put: the view it gives, and copied. Nothing without Ray."""
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: its rows are left out (pip install ray)")
        yield {}
        return
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self, n_bytes: int) -> list[Any]:
            return [ray.put(np.arange(n_bytes, dtype=np.int64).astype(np.uint8))]

    try:
        owner = Owner.remote()
        stored = {name: ray.get(owner.put.remote(n))[0] for name, n in SIZES.items()}
        yield {"ray get view": lambda size: ray.get(stored[size]), "ray get": lambda size: ray.get(stored[size]).copy()}
    finally:
        ray.shutdown()


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(turns: dict[str, Turn], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per read: size -> contender -> one figure per round, the best of some reads in a row."""
    seconds: dict[str, dict[str, list[float]]] = {size: {name: [] for name in turns} for size in SIZES}
    names = list(turns)
    for n in range(rounds + 1):
        for size, n_bytes in SIZES.items():
            for name in names[n % len(names) :] + names[: n % len(names)]:
                repeats = 20 if n_bytes <= 1_000_000 else 3
                taken = [_timed(turns[name], size) for _ in range(repeats)]
                if n > 0:  # the first round connects, maps and warms up
                    seconds[size][name].append(statistics.median(taken))
    return seconds


def _timed(turn: Turn, size: str) -> float:
    start = time.perf_counter()
    turn(size)
    return time.perf_counter() - start


def judge(seconds: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Every target with what was reached: the median over rounds of the ratio within the round."""
    verdicts: list[dict[str, Any]] = []
    for target in TARGETS:
        for size in target.sizes:
            pairs = zip(seconds[size][target.theirs], seconds[size][target.ours], strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
            what = f"{target.ours} / {target.theirs}, {size}"
            verdicts.append({"what": what, "reached": ratio, "target": target.least, "pass": ratio >= target.least})
    for name in ("gather local", "gather tcp"):
        latency = statistics.median(seconds["1 KB"][name])
        what = f"{name}, 1 KB, milliseconds"
        passed = latency <= LATENCY_TARGET_SECONDS
        verdicts.append(
            {"what": what, "reached": latency * 1e3, "target": LATENCY_TARGET_SECONDS * 1e3, "pass": passed}
        )
    return verdicts


def show(seconds: dict[str, dict[str, list[float]]], verdicts: list[dict[str, Any]]) -> None:
    print(f"{'':20}" + "".join(f"{size:>16}" for size in SIZES))
    for name in seconds["1 KB"]:
        row = ""
        for size, n_bytes in SIZES.items():
            median = statistics.median(seconds[size][name])
            row += f"{median * 1e3:>11.3f} ms  " if n_bytes < 1_000_000 else f"{n_bytes / median / 1e9:>9.2f} GB/s  "
        print(f"{name:20}{row}")
    for verdict in verdicts:
        print(
            f"{'PASS' if verdict['pass'] else 'FAIL'}  {verdict['what']}: {verdict['reached']:.3f} "
            f"(target {verdict['target']})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer than the default: writes nothing")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    keys = make_keys()
    here, there = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=own, args=(keys, there), daemon=True)
    owner.start()
    assert here.poll(120), "the owner process did not start"
    addresses = msgspec.msgpack.decode(here.recv_bytes(), type=Addresses)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with DataPlane(0, Store(), keys, LOOPBACK) as plane, ray_turns() as ray:
        plane.connect([addresses.peer])
        turns = memcpy_turns() | gather_turns(plane)
        turns |= {"bare zmq curve": bare_turn(addresses, context), "pickle over zmq": pickle_turn(addresses, context)}
        seconds = measure(turns | ray, rounds)
    context.destroy(linger=0)
    owner.kill()
    owner.join()
    verdicts = judge(seconds)
    show(seconds, verdicts)
    if rounds >= ROUNDS:
        medians = {
            size: {name: statistics.median(taken) for name, taken in some.items()} for size, some in seconds.items()
        }
        RESULTS.parent.mkdir(exist_ok=True)
        found = {"machine": describe(), "rounds": rounds, "verdicts": verdicts, "median_seconds": medians}
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
