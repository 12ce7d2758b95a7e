"""The faults of `benchmarks.chaos`: which signal reaches which processes of a run, when, and what may follow."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.chaos_settings import EVERY, Setting
from realgraph.runtime.master.status import read_status
from tests.namespaces import Loopback
from tests.runs import Running, records
from tests.sglang_server import servers_at
from tests.traces import processes_at, title_of

SIGNALS = ("KILL", "STOP", "STOP, CONT", "TERM", "HUP", "INT", "INT, INT")
TARGETS = ("master", "worker", "fork server", "functions", "group", "all")
INSIDE = {  # moments that a run's status tells: what its workers do then
    "transfer": "the reallocation of weights",
    "switch": "the reallocation of weights",
    "checkpoint": "the checkpoint of",
    "in evaluation": "the evaluation after",
}
ROLLOUT_WORKER = 0  # where generation and training lie apart
MOMENTS = ("start", "steps", "save", "evaluation", "end")
INTERRUPTS = ("TERM", "HUP", "INT", "INT, INT")
TITLES = {"worker": "realgraph worker", "fork server": "realgraph fork server", "functions": "realgraph functions"}
START_SECONDS = 3.0  # of a warm start: faults at the start fall within
POLL_SECONDS = 0.003
STOPPED_SECONDS = {"worker": 1.5}  # less than a worker may be silent; of others as long as one likes
LONG_STOP_SECONDS = 5.0
LINKS = ("CUT", "CUT, JOIN", "SLOW")  # to the connections of a run that has a network of its own
CUT_SECONDS, SLOW_SECONDS = 1.5, 2.0  # less than a worker may be silent
SLOW = ("500kbit", "1s")  # rate, and what waits no longer


class Process(Protocol):
    """The run's own process: the master."""

    @property
    def pid(self) -> int: ...

    def ended(self) -> int | None:
        """The exit code, -N where signal N ended it; None while it lives."""
        ...

    def kill(self) -> None: ...


class Warm:
    """Forked from a process that has everything loaded."""

    def __init__(self, running: Running) -> None:
        self._running = running

    @property
    def pid(self) -> int:
        return self._running.pid

    def ended(self) -> int | None:
        self._running.process.join(0)
        return self._running.process.exitcode

    def kill(self) -> None:
        self._running.process.kill()
        self._running.process.join()


class Cold:
    """`python -m realgraph ...`, as a person starts it."""

    def __init__(self, home: Path, argv: list[str], output: Path) -> None:
        with output.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "realgraph", *argv],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "200"},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ended(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


@dataclass(frozen=True)
class Fault:
    """One fault. delay: seconds after its moment has come; at the start, after the start of the process."""

    signal: str
    target: str
    moment: str
    delay: float
    step: int  # steps done when the moment may come

    def __str__(self) -> str:
        return f"{self.signal} to {self.target}"

    @property
    def lasting(self) -> bool:
        """Nobody continues what it stops."""
        return self.signal in ("STOP", "CUT")


def draw(setting: Setting, rng: random.Random) -> Fault:
    """A fault that makes sense for the setting."""
    while True:
        number, target, moment = rng.choice(SIGNALS), rng.choice(TARGETS), rng.choice(MOMENTS)
        if target != "master" and number == "INT, INT":
            continue  # to others than the master an interrupt is nothing, or the same as to it
        if target == "functions" and number == "STOP" and moment == "start":
            continue  # a module may take minutes to import: no test waits for that
        steps = int(setting.run()["steps"])
        at = {"save": EVERY["checkpoint"], "evaluation": EVERY["eval"]}.get(moment, 1)
        step = steps if moment == "end" else at * rng.randint(1, max(1, (steps - 1) // at))
        slowness = 4.0 if setting.cold else 1.0
        delay = rng.uniform(0, START_SECONDS * slowness) if moment == "start" else rng.expovariate(20)
        return Fault(number, target, moment, delay, step)


def chosen(fault: Fault, home: Path, master: int, rng: random.Random) -> list[int]:
    """The processes that it reaches; none where there is no such process (yet)."""
    match fault.target:
        case "master" | "group" | "links" | "engine":
            return [master]
        case "server":
            return servers_at(home)[:1]
        case "all":
            return [master, *(pid for pid in processes_at(home) if pid != master)]
        case kind:
            found = sorted(pid for pid in processes_at(home) if title_of(pid).startswith(TITLES[kind]))
            return [rng.choice(found)] if found else []


def come(fault: Fault, folder: Path) -> bool:
    """True once the moment of the fault has come."""
    if fault.moment == "start":
        return True
    done = max((record["step"] + 1 for record in records(folder)), default=0)
    if fault.moment in INSIDE:
        return done >= fault.step and inside(folder, fault.moment)
    match fault.moment:
        case "save":
            return done >= fault.step and any((folder / "checkpoints").glob("*.partial"))
        case "evaluation":
            return done >= fault.step and all(record["step"] < done for record in records(folder, "eval"))
        case _:
            return done >= fault.step


def doing(folder: Path) -> dict[int, str]:
    """worker -> the call in hand, as the run's status has it."""
    try:
        status = read_status(folder / "status.json")
    except ValueError:  # it has just been replaced by a damaged one, which the next look tells
        return {}
    return {one.worker: one.doing for one in status.workers if one.doing} if status else {}


def inside(folder: Path, moment: str) -> bool:
    """True where the run says so: in a switch only the worker that generates has still to answer."""
    busy = {worker for worker, text in doing(folder).items() if text.startswith(INSIDE[moment])}
    return busy == {ROLLOUT_WORKER} if moment == "switch" else bool(busy)


def await_moment(fault: Fault, process: Process, folder: Path, seconds: float) -> bool:
    """Wait for the fault's moment; False where the run ends before, or it never comes."""
    deadline = time.monotonic() + seconds
    while not come(fault, folder):
        if process.ended() is not None or time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    time.sleep(fault.delay)
    return process.ended() is None


def deliver(fault: Fault, pids: list[int], process: Process) -> None:
    """Send it. A process that has just ended gets nothing; a stopped one is continued where the fault says so."""
    first, _, second = fault.signal.partition(", ")
    _send(fault, pids, first)
    if second:
        time.sleep(0.05 if second == "INT" else STOPPED_SECONDS.get(fault.target, LONG_STOP_SECONDS))
        _send(fault, pids, second)
    elif fault.lasting and fault.target in ("master", "group", "all"):
        time.sleep(1.0)  # they wait for each other as long as the master exists: so it must end
        process.kill()
        if fault.moment == "start":  # one that was stopped before it had tied itself to its parent ends once it goes on
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def strain(fault: Fault, network: Loopback) -> None:
    """Do it to all connections of a run; what lasts is left to the caller to end."""
    match fault.signal:
        case "SLOW":
            network.slow(*SLOW)
            time.sleep(SLOW_SECONDS)
            network.slow("", "")
        case "CUT, JOIN":
            network.link("down")
            time.sleep(CUT_SECONDS)
            network.link("up")
        case _:
            network.link("down")


def _send(fault: Fault, pids: list[int], name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if fault.target == "group":
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def codes(fault: Fault) -> set[int]:
    """The exit codes that may follow. 0 where the run was over, or what it hit was not needed any more."""
    if fault.target == "server":
        return {0}  # it is started again
    if fault.target == "engine":
        return {0, 3}  # 3 where a step needs what it had
    if fault.target == "links":
        return {0, 3} if fault.lasting else {0}
    ours = fault.target in ("master", "group", "all")
    if fault.signal in INTERRUPTS:
        # Python ends itself by SIGINT, which a shell calls 130, where one struck while it loaded a module
        return {0, 130, *([-signal.SIGINT] if fault.moment == "start" else [])} if ours else {0}
    if fault.signal == "STOP, CONT":
        return {0}
    if ours:
        return {0, -signal.SIGKILL}
    if fault.target == "functions" and fault.moment == "start":
        return {0, 2, 3}  # they are tried before anything starts
    return {0, 3}
