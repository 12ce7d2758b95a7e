"""Trainings drawn at random, under a layout of up to four processes and by one: the largest difference of each kind.

Four optimizer steps of ragged mini-batches in float64, in which layouts may differ by rounding alone. Run
`OMP_NUM_THREADS=1 python -m benchmarks.equivalence [--cases N] [--seed S]`. Every case that differs or fails is printed
with its seed, so that it can be run again alone: `--cases 1 --seed S`.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.machine import describe
from tests.equivalence.comparing import alone, check
from tests.equivalence.drawn import RANKS, drawn, every_layout
from tests.equivalence.training import Case, save_models, train
from tests.ranks import RankProcesses

CASES = 2000
TOLERANCE = 1e-10  # of the largest entry of each tensor
RESULTS = Path(__file__).parent / "results" / "equivalence.json"


def said(case: Case) -> str:
    """A case in a line."""
    layout = case.layout
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    stages = f" stages {layout.stages}" if layout.stages else ""
    return f"{case.model}, {case.loss}, {axes} {layout.sharding}{stages}, recompute {case.recompute}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES, help="fewer than the default: writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has the next one")
    asked = parser.parse_args()
    failed, by_axis, began = [], Counter[str](), time.monotonic()
    processes = RankProcesses(RANKS, every_layout())
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder))
        for seed in range(asked.seed, asked.seed + asked.cases):
            case = drawn(Random(seed).choice, every_layout())
            by_axis.update(axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(case.layout, axis) > 1)
            try:
                check(case, processes.run(train, case, models), alone(case, models), TOLERANCE)
            except AssertionError as error:
                failed.append({"seed": seed, "case": said(case), "why": str(error)[-2000:]})
                print(f"seed {seed}: {said(case)}\n{error}", flush=True)
                if "did not answer" in str(error):  # the ranks are no longer at the same case
                    processes.close()
                    processes = RankProcesses(RANKS, every_layout())
    processes.close()
    verdict = "FAIL" if failed else "PASS"
    print(f"{verdict}  {asked.cases - len(failed)} of {asked.cases} trainings equal one process's to {TOLERANCE}")
    print("cases by axis: " + ", ".join(f"{axis} {n}" for axis, n in sorted(by_axis.items())))
    if asked.cases >= CASES:
        report: dict[str, Any] = {"machine": describe(), "cases": asked.cases, "seed": asked.seed, "failed": failed}
        report |= {"tolerance": TOLERANCE, "cases_by_axis": by_axis, "seconds": time.monotonic() - began}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
