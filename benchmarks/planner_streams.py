"""The planner's search where samples may be stale: the gap between plans that stream and what is proven of all plans.

Run from the repository root: `python -m benchmarks.planner_streams` (PPO and GRPO, 8B on 8 to 1,024 devices and 70B on
64 to 1,024, staleness 1 and 4), `--only TEXT` (cases whose names have it), `--seconds N` (of CPU time, of each case;
120 unless told). A plan is what `realgraph plan --exact` finds: of every level of staleness up to the bound,
synchronous included, and its period that of its own stream, which option tables only bound from below.

Claim: every gap is at most 1 %. Results go to results/planner_streams.json, as far as the cases are known.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.machine import describe
from benchmarks.planner import RESULTS, Case, requested
from realgraph.planner.plan.problem import Limits
from realgraph.planner.search.search import search

MOST_GAP = 0.01
SEARCHED_GAP = 0.002  # at which a search ends
FEWEST = {"8B": 8, "70B": 64}  # devices that hold all roles
CASES = tuple(
    Case(algorithm, model, devices, staleness)
    for algorithm in ("grpo", "ppo")
    for model, fewest in FEWEST.items()
    for devices in (8, 64, 256, 1024)
    if devices >= fewest
    for staleness in (1, 4)
)
HEAD = f"{'case':32}{'period':>9}{'bound':>9}{'gap':>8}{'level':>7}{'wall s':>8}{'cpu s':>8}  stopped"


class StreamRow(Struct, frozen=True):
    """Seconds of a step of the best plan and of the bound; staleness: the level that the plan keeps to."""

    case: str
    period: float
    bound: float
    gap: float
    staleness: int
    wall_s: float
    cpu_s: float
    stopped: str


def measured(case: Case, seconds: float) -> StreamRow:
    """seconds: of CPU time, so that a busy machine does not cut the search short."""
    with tempfile.TemporaryDirectory() as name:
        request = requested(case, Path(name))
        wall, cpu = time.monotonic(), time.process_time()

        def stop() -> bool:
            return time.process_time() - cpu > seconds

        plan = search(request, Limits(gap=SEARCHED_GAP, seconds=10 * seconds, stop=stop))
    return StreamRow(
        case=case.name,
        period=plan.period_seconds,
        bound=plan.lower_bound_seconds,
        gap=plan.gap,
        staleness=plan.staleness,
        wall_s=time.monotonic() - wall,
        cpu_s=time.process_time() - cpu,
        stopped=plan.stopped,
    )


def line(row: StreamRow) -> str:
    return (
        f"{row.case:32}{row.period:9.2f}{row.bound:9.2f}{row.gap:8.2%}{row.staleness:7}{row.wall_s:8.2f}"
        f"{row.cpu_s:8.2f}  {row.stopped}" + (f"  above {MOST_GAP:.0%}" if row.gap > MOST_GAP else "")
    )


def verdict(rows: list[StreamRow]) -> str:
    """The claim, with the widest gap that there is."""
    widest = max(rows, key=lambda row: row.gap)
    met = "PASS" if widest.gap <= MOST_GAP else "FAIL"
    return f"{met}: gap of streams <= {MOST_GAP:.0%}: at most {widest.gap:.2%} of {len(rows)} cases ({widest.case})"


def main() -> int:
    """Measure, print, write the results; 1 where the claim is missed, 2 where no case is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=120.0)
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in case.name]
    if not cases:
        print(f"no case has {asked.only!r} in its name: {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    print(HEAD)
    rows: list[StreamRow] = []
    for case in cases:
        rows.append(measured(case, asked.seconds))
        print(line(rows[-1]), flush=True)
        if not asked.only:
            report = {"machine": describe(), "cpu_seconds": asked.seconds, "verdict": verdict(rows), "rows": rows}
            (RESULTS / "planner_streams.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print(verdict(rows))
    return 0 if all(row.gap <= MOST_GAP for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
