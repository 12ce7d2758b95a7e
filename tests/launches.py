"""Entry points of workers for tests of launchers, and what these tests ask of processes."""

import os
import sys
import time
from pathlib import Path

from realgraph.runtime.processes.launcher import WorkerBoot, WorkerProgram
from realgraph.runtime.processes.local import LocalFleet, LocalLauncher
from realgraph.runtime.processes.processes import die_with_parent
from realgraph.runtime.wire.curve import make_keys
from tests.traces import parent_of
from tests.waiting import becomes_true

# --- entry points, which run in the workers ---------------------------------------------------------------------------


def speak(boot: WorkerBoot) -> None:
    print(f"worker {boot.worker} of {boot.master}: {os.environ['OMP_NUM_THREADS']} threads")
    os.write(2, b"straight to the descriptor\n")
    assert boot.keys.secret
    assert boot.keys.secret not in "".join([*os.environ, *os.environ.values(), *sys.argv])
    raise SystemExit(boot.worker)


def fail(boot: WorkerBoot) -> None:
    raise RuntimeError(f"worker {boot.worker} is unwell")


def sleep(boot: WorkerBoot) -> None:
    """Sleep with a child, like a function's subprocess, and a grandchild that has forgotten its parent."""
    parent = os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        if os.fork() == 0:
            _mark(boot)
            time.sleep(1000)
        time.sleep(1000)
    time.sleep(1000)


def stubborn(boot: WorkerBoot) -> None:
    _mark(boot)
    while True:
        time.sleep(0.1)


def quitting(boot: WorkerBoot) -> None:
    """Ends by itself within the grace of a terminated fleet."""
    _mark(boot)
    time.sleep(0.5)
    sys.exit(7)


def leaving(boot: WorkerBoot) -> None:
    """Has a daemon that needs a moment to end once its parent has, as a guardian does, and one that never ends."""
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        _mark(boot)
        while os.getppid() == parent:
            time.sleep(0.01)
        time.sleep(0.3)
        Path(boot.log).with_suffix(".orderly").write_text("ended by itself")
        os._exit(0)
    if os.fork() == 0:
        os.setsid()
    time.sleep(1000)


def _mark(boot: WorkerBoot) -> None:
    Path(boot.log).with_suffix(".ready").write_text("ready")


SLEEP = f"{__name__}:{sleep.__name__}"

# --- helpers ----------------------------------------------------------------------------------------------------------


def boots_in(folder: Path, n: int, threads: int = 1) -> list[WorkerBoot]:
    return [
        WorkerBoot(i, "tcp://127.0.0.1:9", make_keys().public, make_keys(), str(folder / "logs" / f"{i}.log"), threads)
        for i in range(n)
    ]


async def start_entry(folder: Path, n: int, entry: str, threads: int = 1) -> LocalFleet:
    fleet = await LocalLauncher().start(boots_in(folder, n, threads), WorkerProgram(f"{__name__}:{entry}"), 60)
    if entry in ("sleep", "stubborn", "quitting", "leaving"):
        await becomes_true(lambda: all((folder / "logs" / f"{i}.ready").exists() for i in range(n)))
    return fleet


def children() -> set[int]:
    """Processes that this one has started."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid for pid in numbers if parent_of(pid) == os.getpid()}


def alive_with(marker: str) -> list[int]:
    """Processes, zombies left out, with `marker` among what they were started with or where they print to."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                links = [os.readlink(entry / "fd" / "1")]
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and (marker in command or any(marker in link for link in links)):
                found.append(int(entry.name))
    return found
