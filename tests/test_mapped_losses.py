"""Weights that are read out of the memory of workers, one of which is killed: what the others say, and go on from."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from realgraph.runtime.parallel.checksums import Checksums
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.rendezvous import CollectiveError
from realgraph.runtime.worker.failures import failure
from tests.ranks import RankProcesses
from tests.test_mapped import SHAPES, WHOLE, full, move, placed, taken


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
    route.lent += sums.compare(route.tell)
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
