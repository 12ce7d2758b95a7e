"""Runs of many hosts on this machine: their start, their end, the master's time, what their network carries.

Hosts are network namespaces: Linux, as root. Run `OMP_NUM_THREADS=1 python -m benchmarks.hosts`; `--part NAME` measures
one part and writes nothing. The parts:

- `simulated`: 1,024 simulated workers behind 128 simulated agents (`hosts_simulated.py`): the real master, Scheduler
  and sockets, and workers that answer at once.
- `ready`: a real run of two hosts with eight workers each, from cold processes.
- `gather`, `reallocation`: 100 MB of samples and 400 MB of weights from host to host, beside bare streams.
- `hostile`: 100,000 wrong messages, and garbage, on the ports of a run.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.hosts_network import gathered, moved, ratio
from benchmarks.hosts_ready import start
from benchmarks.hosts_simulated import Figures, Size, run_master, serve_hosts
from benchmarks.machine import describe
from tests.attacked import attacked
from tests.namespaces import Network, network, why_not
from tests.test_hostile import MOST_GROWTH_BYTES, attacks_leave_no_trace

RESULTS = Path(__file__).parent / "results" / "hosts.json"
SPAWN = multiprocessing.get_context("spawn")
N_HOSTS, PER_HOST, STEPS = 128, 8, 4
N_PROCESSES = 2  # that simulate hosts
PATIENCE_SECONDS = 300.0
START_SECONDS, END_SECONDS, CALL_MS = 30.0, 5.0, 1.0
READY_SECONDS, READY_PER_HOST = 10.0, 8
STREAM = 0.8  # of a bare stream's speed
GATHERED, GATHERS, MOVES = "100 MB", 15, 7  # a size of data_plane.py, and rounds
N_STREAMS, N_MESSAGES = 2_000, 98_000  # of an attack on each port; a tenth more before, to warm up


class Verdict(Struct, frozen=True):
    """A target, and what was reached. least: the target is the least that counts, else the most."""

    what: str
    reached: float
    target: float
    least: bool = False

    @property
    def passed(self) -> bool:
        """True where the target is met."""
        return self.reached >= self.target if self.least else self.reached <= self.target

    @property
    def line(self) -> str:
        """For the screen."""
        sign = ">=" if self.least else "<="
        return f"{'PASS' if self.passed else 'FAIL'}  {self.what}: {self.reached:.3g} (target {sign} {self.target:g})"


class Part(Struct, frozen=True):
    """One part's verdicts, and all that it measured."""

    verdicts: tuple[Verdict, ...]
    found: dict[str, Any]


def simulated() -> Part:
    """A run of simulated workers, from the start of its master to the end of all."""
    with network(2) as net, tempfile.TemporaryDirectory() as base:
        pipes = [SPAWN.Pipe() for _ in range(N_PROCESSES)]
        names = [f"n{number}" for number in range(N_HOSTS)]
        processes = [
            SPAWN.Process(
                target=serve_hosts,
                args=(net.spaces[1], net.addresses[1], names[number::N_PROCESSES], theirs),
                daemon=True,
            )
            for number, (_, theirs) in enumerate(pipes)
        ]
        here, there = SPAWN.Pipe()
        size = Size(N_HOSTS, PER_HOST, STEPS, net.addresses[0], net.spaces[0])
        arguments = (size, Path(base) / "run", [ours for ours, _ in pipes], there)
        processes.append(SPAWN.Process(target=run_master, args=arguments, daemon=True))
        try:
            for process in processes:
                process.start()
            assert here.poll(PATIENCE_SECONDS), "the master did not end"
            figures = msgspec.msgpack.decode(here.recv_bytes(), type=Figures)
            ends = []
            for ours, _ in pipes:
                assert ours.poll(PATIENCE_SECONDS), "agents did not end"
                codes, ended = ours.recv()
                assert set(codes) == {0}, f"agents ended with {set(codes)}"
                ends.append(ended)
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert figures.outcome == "finished", figures.outcome
    return _of_figures(figures, max(ends))


def _of_figures(figures: Figures, last_agent: float) -> Part:
    ms = 1e3 * figures.cpu_seconds / figures.n_calls
    scale = f"{N_HOSTS * PER_HOST:,} workers behind {N_HOSTS} agents"
    found = {
        "workers": N_HOSTS * PER_HOST,
        "agents": N_HOSTS,
        "join_seconds": figures.joined - figures.began,
        "start_seconds": figures.ready - figures.began,
        "step_seconds": statistics.median(figures.step_seconds),
        "end_seconds": max(figures.ended, last_agent) - figures.last_step,
        "worker_calls": figures.n_calls,
        "master_ms_per_worker_call": ms,
        "of_which_event_loop_ms": 1e3 * figures.loop_seconds / figures.n_calls,
        "master_peak_mb": figures.peak_bytes / 1e6,
        "master_mb_after_the_steps": figures.steps_bytes / 1e6,
    }
    verdicts = (
        Verdict(f"{scale}: seconds to start", found["start_seconds"], START_SECONDS),
        Verdict(f"{scale}: seconds to end", found["end_seconds"], END_SECONDS),
        Verdict(f"{scale}: ms of the master's CPU time per call", ms, CALL_MS),
    )
    return Part(verdicts, found)


def ready() -> Part:
    """A real run of two hosts, from cold processes."""
    with network(2) as net, tempfile.TemporaryDirectory() as base:
        found = start(net, Path(base), READY_PER_HOST)
    what = f"2 hosts of {READY_PER_HOST} workers: seconds to be ready after the last agent has joined"
    return Part((Verdict(what, found["ready_seconds_after_the_last_agent"], READY_SECONDS),), found)


def gather() -> Part:
    """Samples from one host to the other, beside bare ZeroMQ."""
    with network(2) as net:
        seconds = gathered(SPAWN, _places(net), (GATHERED, GATHERS))
    verdict = Verdict(
        f"gather of {GATHERED} / bare ZeroMQ", ratio(seconds, "gather", "bare zmq curve"), STREAM, least=True
    )
    return Part((verdict,), {f"{name}, seconds": statistics.median(taken) for name, taken in seconds.items()})


def reallocation() -> Part:
    """Weights from host to host, beside bare gloo."""
    with network(2) as net:
        cases = moved(SPAWN, _places(net), MOVES)
    verdicts = tuple(
        Verdict(f"reallocation / bare gloo, {case}", ratio(seconds, "reallocation", "bare gloo"), STREAM, least=True)
        for case, seconds in cases.items()
    )
    found = {
        f"{case}: {name}, seconds": statistics.median(taken)
        for case, seconds in cases.items()
        for name, taken in seconds.items()
    }
    return Part(verdicts, found)


def hostile() -> Part:
    """Attacks on the encrypted ports of a run."""
    began = time.monotonic()
    with attacked() as target:
        growth = attacks_leave_no_trace(target, N_STREAMS, N_MESSAGES)
    found = {"messages_on_each_port": N_STREAMS + N_MESSAGES, "seconds": time.monotonic() - began}
    return Part(
        (Verdict("hostile traffic: MB that memory has grown by", growth / 1e6, MOST_GROWTH_BYTES / 1e6),), found
    )


def _places(net: Network) -> tuple[tuple[str, str], tuple[str, str]]:
    first, second = zip(net.spaces, net.addresses, strict=True)
    return first, second


PARTS: dict[str, Callable[[], Part]] = {
    part.__name__: part for part in (simulated, ready, gather, reallocation, hostile)
}


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), help="one part only: writes nothing")
    chosen = parser.parse_args().part
    if reason := why_not():
        print(f"hosts can't be made here: {reason}")
        return
    parts: dict[str, Part] = {}
    for name in (chosen,) if chosen else tuple(PARTS):
        load = os.getloadavg()[0]
        parts[name] = PARTS[name]()
        parts[name].found["load_average_before"] = load
        print(name)
        for label, value in parts[name].found.items():
            print(f"  {label:40}{value:>14.6g}" if isinstance(value, int | float) else f"  {label:40}{value}")
    verdicts = [verdict for part in parts.values() for verdict in part.verdicts]
    for verdict in verdicts:
        print(verdict.line)
    if not chosen:
        rows = [{**msgspec.structs.asdict(verdict), "pass": verdict.passed} for verdict in verdicts]
        measured = {name: part.found for name, part in parts.items()}
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "verdicts": rows, "measured": measured}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
