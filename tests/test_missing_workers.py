"""The error of a collective over gloo names the worker that is missing, as each of the others sees it."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, Store

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.collectives.roll_call import Attendance, RollCall
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from tests.ranks import RankProcesses
from tests.waiting import killed

DEADLINE = 1.0
N_RANKS = 4  # the last is missing


def call(ranks: Ranks, what: str) -> None:
    match what:
        case "broadcast":
            ranks.broadcast(torch.ones(3), ranks.size - 1)
        case "all-to-all":
            ranks.exchange_rows(torch.ones(0), [0] * ranks.size, [0] * ranks.size)
        case "begun all-gather":
            begun = ranks.begin_collect(torch.ones(3))
            time.sleep(0.7 * DEADLINE)  # which counts from the beginning
            begun()
        case _:
            ranks.add(torch.ones(3))


def without_the_last(layout: LayoutRanks, how: str, what: str, folder: Path) -> None:
    """The last rank leaves a collective over gloo in its way; the others write down what they are told."""
    layout.mesh.memory = None  # as where they are on several hosts
    ranks, pid = layout.mesh, folder / "pid"
    if ranks.rank == ranks.size - 1:
        pid.write_text(str(os.getpid()))
        if how == "is killed":
            time.sleep(0.2)  # amid the collective
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        return
    if ranks.rank == 1 and how != "is killed":
        time.sleep(0.5 * DEADLINE)  # one that comes late, and must not be taken for the missing one
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        call(ranks, what)
    took, cause = time.monotonic() - began, caught.value.__cause__
    assert isinstance(cause, RuntimeError) and str(caught.value).endswith(f"; {cause}")
    (folder / str(ranks.rank)).write_text(f"{took}\n{str(caught.value).removesuffix(f'; {cause}')}")
    if how == "is stopped":
        os.kill(int(pid.read_text()), signal.SIGCONT)


ALIVE = "the processes of all of them live"
SILENT = f"{ALIVE}, worker 3 gave no sign when the others met the deadline of 1 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "what", "text"),
    [
        ("is killed", "all-reduce", "worker 3 has ended"),
        ("is killed", "broadcast", "worker 3 has ended"),
        ("is killed", "begun all-gather", "worker 3 has ended"),
        ("is stopped", "all-to-all", SILENT),
        ("stays away", "begun all-gather", SILENT),
        ("stays away", "broadcast", ALIVE),  # which others may have ended, so silence says nothing
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_the_missing_worker_is_named(tmp_path: Path, how: str, what: str, text: str) -> None:
    processes = RankProcesses(N_RANKS, seconds=DEADLINE)
    try:
        with suppress(EOFError):  # of the rank that was killed
            processes.run(without_the_last, how, what, tmp_path)
            assert how != "is killed"
    finally:
        processes.close()
    told = [(tmp_path / str(rank)).read_text().split("\n") for rank in range(N_RANKS - 1)]
    assert [one for _, one in told] == [f"{what.split()[-1]} over workers 0 to 3 failed: {text}"] * len(told)
    seconds = [float(took) for took, _ in told]
    assert max(seconds) < 2 * DEADLINE + 2.0
    # those with a connection to one that is killed see its end, the others meet their deadline
    if how == "is killed" and "begun" not in what:
        assert min(seconds) < DEADLINE


# --- several hosts, and stores that fail ------------------------------------------------------------------------------

WORKERS = (4, 5, 6, 7)  # by rank: the first two on one host, the others on another
HOSTS = ((0, 1), (2, 3))


def attend(store: Store, pids: Sequence[int]) -> list[Attendance]:
    """Every worker's view, once all have arrived. Each stands for the process of its number."""
    views = [Attendance(store, WORKERS, rank, HOSTS[rank // 2], WORKERS[0]) for rank in range(4)]
    for view, pid in zip(views, pids, strict=True):
        view.arrive(range(4))
        key = f"realgraph/0-1-2-3/{view.rank}"
        store.set(key, store.get(key).decode().replace(str(os.getpid()), str(pid), 1))
    for view in views:
        view.watch()
    return views


def asked(views: Sequence[Attendance], what: str, waited: float, seconds: float = 0.5) -> list[str]:
    """The answers of some, at once, whose collective over all four has failed."""
    calls = [RollCall(view, range(4), "test", seconds) for view in views]
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call.missing(what, waited), calls))


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with killed(subprocess.Popen(["sleep", "60"])) as process:
        yield process


def test_a_death_on_another_host_is_known_from_the_survivors_there() -> None:
    with sleeper() as process:
        views = attend(HashStore(), [os.getpid()] * 3 + [process.pid])
        process.kill()  # and nobody waits for it, so its number stays its own
        try:
            assert asked(views[:3], "all-reduce", 0.1) == ["worker 7 has ended"] * 3
            assert asked(views[1:2], "broadcast", 0.1) == ["worker 7 has ended"]
        finally:
            for view in views:
                view.close()


def test_who_gives_no_sign_is_named_after_a_deadline_alone() -> None:
    views = attend(HashStore(), [os.getpid()] * 4)
    near = "the processes of workers 4 and 5 live, and workers 6 and 7 can't be seen from their host"
    try:
        assert asked(views[:1], "all-reduce", 0.1) == [near]  # of a death, others may know nothing yet
        found = asked(views[:2], "all-reduce", 0.6)
        assert found == [f"{near}, workers 6 and 7 gave no sign when the others met the deadline of 0.5 s"] * 2
        assert asked(views[:2], "broadcast", 0.6) == [near] * 2
        assert near in asked(views, "all-reduce", 0.6)  # all came, if late
    finally:
        for view in views:
            view.close()


def test_a_worker_that_ends_before_it_can_be_watched_is_seen() -> None:
    with sleeper() as process:
        process.kill()
        process.wait()
        views = attend(HashStore(), [os.getpid(), process.pid] + [os.getpid()] * 2)
    assert asked(views[:1], "all-reduce", 0.0) == ["worker 5 has ended"]
    views[0].close()


def test_a_store_that_is_gone_or_hangs_costs_no_more_than_the_roll_call(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch()
    views = attend(FileStore(str(path), 4), [os.getpid()] * 4)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a worker that was stopped amid a change
        began = time.monotonic()
        (hanging,) = asked(views[:1], "all-reduce", 1.0)
        assert time.monotonic() - began < 2.0
    assert hanging.endswith("host, what the others saw is not known: the store of worker 4 does not answer")
    path.unlink()
    (gone,) = asked(views[1:2], "all-reduce", 1.0)
    assert gone.endswith("what the others saw is not known: the store of worker 4 is gone")
    for view in views:
        view.close()
