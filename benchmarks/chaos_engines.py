"""Faults of `benchmarks.chaos_async` to an engine that a new process replaces: it is killed, or stands still, and its
replacement is killed in turn, while it takes its weights or as soon as it has joined."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from benchmarks.chaos_faults import INSIDE, POLL_SECONDS, Fault, Process, doing
from benchmarks.chaos_settings import ENGINES
from tests.traces import processes_at, title_of

KINDS = (
    "KILL",
    "STOP",
    "KILL, KILL in handover",
    "KILL, KILL joined",
    "KILL, KILL joined, KILL in handover",
)
LAST_STEP = 8  # steps done when the first fault comes, at most: most of the run is left to replacements
JOINED_TEXT = "has taken the place of worker"


def draw(rng: random.Random) -> Fault:
    """A fault to an engine, between steps."""
    return Fault(rng.choice(KINDS), "engine", "steps", rng.expovariate(20), rng.randint(1, LAST_STEP))


def engine_at(home: Path, worker: int) -> int | None:
    """The process of a worker of the run in `home`; None where it has none right now."""
    for pid in processes_at(home):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
            if log == f"worker-{worker}.log" and title_of(pid).startswith("realgraph worker"):
                return pid
    return None


class EngineFault:
    """One fault under way, to the processes of one worker, one after another."""

    def __init__(self, fault: Fault, home: Path, output: Path, rng: random.Random) -> None:
        self._fault, self._home, self._output = fault, home, output
        self.worker = rng.randrange(ENGINES)
        self._hit: list[int] = []

    def deliver(self, process: Process, seconds: float) -> bool:
        """Strike the engine, then its replacements at their moments, and wait for the last to join. False where one of
        these moments has not come within so many seconds, or the run has ended before."""
        for strike in self._fault.signal.split(", "):
            name, _, moment = strike.partition(" ")
            pid = self._await(moment, process, seconds)
            if pid is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[f"SIG{name}"])
            self._hit.append(pid)
        return self._await("joined", process, seconds) is not None

    def _await(self, moment: str, process: Process, seconds: float) -> int | None:
        """The worker's process that is not hit yet, at its moment; None where there is none in time."""
        deadline = time.monotonic() + seconds
        while process.ended() is None and time.monotonic() < deadline:
            if self._come(moment):
                pid = engine_at(self._home, self.worker)
                if pid is not None and pid not in self._hit:
                    return pid
            time.sleep(POLL_SECONDS)
        return None

    def _come(self, moment: str) -> bool:
        joined = self._output.read_text().count(f"{JOINED_TEXT} {self.worker}:") >= len(self._hit)
        if moment != "in handover":
            return joined
        now = doing(self._home / "run").get(self.worker, "")
        return joined and now.startswith(INSIDE["transfer"])
