"""Collectives of CPU ranks of one host through shared memory against gloo's, and against one thread's memcpy.

Run from the repository root: `OMP_NUM_THREADS=1 python -m benchmarks.collectives [--quick]`. Both transports take turns
on the same float32 tensors in the same processes; the median of the rounds is kept. Small tensors are those of a
decode step and of a toy model's layers, large ones gradients and shards.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from tests.ranks import RankProcesses

RESULTS = Path(__file__).parent / "results" / "collectives.json"
N_RANKS = (2, 4)
SIZES = (2048, 1 << 16, 1 << 24)  # bytes that a rank puts in
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter")
TRANSPORTS = ("shared memory", "gloo")
ROUNDS = 7
ROUND_SECONDS = 0.2  # about, of each transport
SMALL, SMALL_TIMES, LARGE_TIMES = 2048, 3.0, 2.0  # claims: how much faster than gloo an all-reduce is


def operation(name: str, ranks: Ranks, nbytes: int) -> Callable[[], object]:
    """One collective in which each rank puts `nbytes` in."""
    own = torch.ones(nbytes // 4)
    match name:
        case "all-reduce":
            return lambda: ranks.add(own.fill_(1.0))
        case "all-gather":
            return lambda: ranks.gather_rows(own)
        case _:
            return lambda: ranks.scatter_rows(own)


def seconds(layout: LayoutRanks, name: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds of one collective by each transport, on one rank."""
    shared = layout.mesh
    calls = {
        "shared memory": operation(name, shared, nbytes),
        "gloo": operation(name, Ranks(shared.device, shared.group, shared.name), nbytes),
    }
    repeats = {}
    for transport, call in calls.items():
        call()
        once = _timed(shared, call, 3)
        repeats[transport] = int(shared.largest(torch.tensor([max(1.0, ROUND_SECONDS / once)])))
    times: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    for _ in range(rounds):
        for transport, call in calls.items():
            times[transport].append(_timed(shared, call, repeats[transport]))
    copied, source = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    copies = [_timed(shared, lambda: copied.copy_(source), repeats["shared memory"]) for _ in range(rounds)]
    return {transport: statistics.median(found) for transport, found in (times | {"memcpy": copies}).items()}


def _timed(ranks: Ranks, call: Callable[[], object], repeats: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def main() -> int:
    """Measure, print, record."""
    rounds = 2 if "--quick" in sys.argv[1:] else ROUNDS
    rows: list[dict[str, Any]] = []
    print(f"{'ranks':>5} {'operation':15} {'bytes':>10} {'shared':>10} {'gloo':>10} {'memcpy':>10}  times gloo")
    for n_ranks in N_RANKS:
        processes = RankProcesses(n_ranks, seconds=600.0)
        for name in OPERATIONS:
            for nbytes in SIZES:
                found = processes.run(seconds, name, nbytes, rounds)
                slowest = {transport: max(each[transport] for each in found) for transport in found[0]}
                times = slowest["gloo"] / slowest["shared memory"]
                rows.append({"ranks": n_ranks, "operation": name, "bytes": nbytes, "seconds": slowest, "times": times})
                shown = "".join(f"{slowest[key] * 1e6:8.0f} us" for key in (*TRANSPORTS, "memcpy"))
                print(f"{n_ranks:5} {name:15} {nbytes:10,}{shown}  {times:.1f}", flush=True)
        processes.close()
    sums = [row for row in rows if row["operation"] == "all-reduce"]
    claims = {
        f"an all-reduce of {SMALL} bytes takes at most 1/{SMALL_TIMES:g} of gloo's": (
            min(row["times"] for row in sums if row["bytes"] == SMALL) >= SMALL_TIMES
        ),
        f"an all-reduce of {SIZES[-1]} bytes takes at most 1/{LARGE_TIMES:g} of gloo's": (
            min(row["times"] for row in sums if row["bytes"] == SIZES[-1]) >= LARGE_TIMES
        ),
    }
    for claim, holds in claims.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    if "--quick" not in sys.argv[1:]:
        RESULTS.write_text(json.dumps({"machine": describe(), "rows": rows, "claims": claims}, indent=1) + "\n")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
