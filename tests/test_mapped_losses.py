"""Weights that are read out of the memory of workers, one of which is killed: what the others say, and go on from."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.runtime.parallel.checksums import Checksums
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.routes import handed_on
from realgraph.runtime.worker.failures import failure
from tests.ranks import RankProcesses
from tests.test_mapped import SHAPES, WHOLE, Held, full, move, placed, taken


def run_losing(victim: int, n: int, run: Callable[[LayoutRanks, Path], None], place: Path) -> None:
    """Have `n` processes run, one of which is killed in it, and return when the others have ended."""
    processes = RankProcesses(n, seconds=20.0)
    others = [worker for worker in range(n) if worker != victim]
    try:
        with pytest.raises((EOFError, ConnectionResetError)):  # of the one that was killed
            processes.run(run, place)
    finally:
        processes._processes[victim].join(10)
        for worker in others:
            processes._pipes[worker].send(None)
        for worker in others:
            processes._processes[worker].join(30)


def without_worker_1(ranks: LayoutRanks, file: Path) -> None:
    """Worker 1 is killed while it reads; what the worker that it reads from says goes to `file`."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE}, ranks.mesh.rank
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(move(held, wanted), me, "")
    try:
        for _ in route.bring(place):
            os.kill(os.getpid(), signal.SIGKILL)
        route.settle()  # or before: a message with one that is gone may not even begin
    except CollectiveError as error:
        failed = failure(me, "rollout", error)
        file.write_text(f"{failed.kind}: {failed.error}")


def test_a_worker_that_is_killed_while_it_reads_is_named(tmp_path: Path) -> None:
    run_losing(1, 2, without_worker_1, tmp_path / "said")
    assert (tmp_path / "said").read_text().startswith("worker: weights to or from worker 1 did not arrive: ")


def verified_without_worker_1(ranks: LayoutRanks, file: Path) -> None:
    """Worker 1, without which worker 0 goes on, is killed before a reallocation that is verified; what both sides
    have is the same in the end, and what worker 0 has gone on from goes to `file`."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE, 2: WHOLE}, ranks.mesh.rank
    moves = move(held, wanted)
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(moves, me, "", frozenset({1}))
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums = Checksums(moves, place, SHAPES, {0: {name: (box,) for name, box in WHOLE.items()}})
    n_parts = sum(1 for _ in route.bring(place).through(sums.watch))
    route.lent += sums.compare(route.send)
    route.settle()
    (file / str(me)).write_text(str(n_parts))


def test_a_verified_reallocation_goes_on_without_a_worker_that_is_not_needed(tmp_path: Path) -> None:
    run_losing(1, 3, verified_without_worker_1, tmp_path)
    assert (tmp_path / "0").read_text() == "0"
    assert (tmp_path / "2").read_text() == str(len(WHOLE))


def without_worker_0(ranks: LayoutRanks, file: Path) -> None:
    """Worker 0 is killed while worker 1 reads its weights, which are whole all the same; what that says goes to
    `file`."""
    held, wanted, me = {0: WHOLE}, {1: WHOLE}, ranks.mesh.rank
    place, route = placed(me, held, wanted, full(SHAPES)), MappedRoute(move(held, wanted), me, "")
    if me == 0:
        taken(route.bring(place), SHAPES)
        os.kill(os.getpid(), signal.SIGKILL)
    n_right = 0
    try:
        for name, box, values in route.bring(place):
            time.sleep(0.2)
            n_right += int((values == full(SHAPES)[name][box.slices]).sum())
        route.settle()
    except CollectiveError as error:
        file.write_text(f"{n_right} {error}")


def test_a_worker_that_is_killed_while_it_is_read_is_named(tmp_path: Path) -> None:
    run_losing(0, 2, without_worker_0, tmp_path / "said")
    n = sum(box.numel for box in WHOLE.values())
    assert (tmp_path / "said").read_text().startswith(f"{n} weights to or from worker 0 did not arrive: ")


# --- by messages ------------------------------------------------------------------------------------------------------

HOSTS = (0, 0, 1, 1)  # two trainers, which divide the weights, and two engines, each of which hands on to the other
HALVES: Held = {
    0: {name: box for name, box in WHOLE.items() if name in sorted(WHOLE)[::2]},
    1: {name: box for name, box in WHOLE.items() if name in sorted(WHOLE)[1::2]},
}


def die_at(moment: str) -> None:
    """Have this process die at a moment of its next reallocation."""
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    n_sent, isend, irecv = [0], dist.isend, dist.irecv

    def sending(flat: Tensor, to: int) -> Any:
        if flat.is_floating_point():
            n_sent[0] += 1
            if moment == "handing on" or (moment == "handing on later" and n_sent[0] == 2):
                os.kill(os.getpid(), signal.SIGKILL)
        return isend(flat, to)

    def receiving(flat: Tensor, sender: int) -> Any:
        if moment == "receiving" and flat.is_floating_point():
            os.kill(os.getpid(), signal.SIGKILL)
        return irecv(flat, sender)

    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "isend", sending)
    patch.setattr(dist, "irecv", receiving)


def by_messages_without_worker_2(ranks: LayoutRanks, folder: Path, moment: str) -> None:
    """Worker 2 is killed in the second of three reallocations, all of which are verified; the third is without it.
    Whoever is left writes down what it has."""
    me, wants = ranks.mesh.rank, [{2: WHOLE, 3: WHOLE}, {2: WHOLE, 3: WHOLE}, {3: WHOLE}]
    shown = {worker: {name: (box,) for name, box in boxes.items()} for worker, boxes in HALVES.items()}
    moves = [move(HALVES, wanted, hosts=HOSTS) for wanted in wants]
    first, last = (MappedRoute(one, me, str(HOSTS[me]), frozenset({2, 3})) for one in moves[1:])
    for n, (route, one) in enumerate(zip((first, first, last), moves, strict=True)):
        values = {name: tensor + n for name, tensor in full(SHAPES).items()}
        place = placed(me, HALVES, wants[n], values)._replace(segment=None)
        if n == 1 and me == 2:
            die_at(moment)
        sums = Checksums(one, place, SHAPES, shown)
        found, n_came = taken(route.bring(place).through(sums.watch), SHAPES)
        route.lent += sums.compare(route.send)
        route.settle()
        right = all(torch.equal(found[name], values[name]) for name in SHAPES)
        whole = sum(box.numel for box in WHOLE.values())
        with (folder / str(me)).open("a") as file:
            file.write(f"{n} {right and n_came == whole if me == 3 else n_came} {route.arrivals.total.far > 0}\n")


@pytest.mark.parametrize("moment", ["before", "receiving", "handing on", "handing on later"])
def test_what_a_lost_worker_was_to_hand_on_comes_from_those_that_hold_it(tmp_path: Path, moment: str) -> None:
    """All others are through with every reallocation, the very one of the loss included, each element come once."""
    relays = handed_on(move(HALVES, {2: WHOLE, 3: WHOLE}, hosts=HOSTS).rounds, {2})
    assert relays == (3,)
    run_losing(2, 4, partial(by_messages_without_worker_2, moment=moment), tmp_path)
    assert (tmp_path / "3").read_text() == "0 True True\n1 True True\n2 True True\n"
    for trainer in ("0", "1"):
        assert (tmp_path / trainer).read_text() == "0 0 False\n1 0 False\n2 0 False\n"
