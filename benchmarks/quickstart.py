"""The quickstart over three seeds: held-out accuracy before and after, and how long it takes on this machine.

Claims: at least 0.95 greedy on 1,000 held-out sums, within 240 s from the command to its end (installation excluded).
Run on an idle machine: `python -m benchmarks.quickstart [--algorithm grpo] [--seeds 1 2 3]`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
LEAST_ACCURACY, MOST_SECONDS = 0.95, 240.0


def run(seed: int, algorithm: str, folder: Path) -> dict[str, Any]:
    """One quickstart in a process of its own."""
    command = [sys.executable, "-m", "realgraph.cli", "quickstart", "--dir", str(folder)]
    command += ["--seed", str(seed), "--algorithm", algorithm]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    seconds = time.monotonic() - began
    records = [json.loads(line) for line in (folder / algorithm / "metrics.jsonl").read_text().splitlines()]
    evals = [(record["step"], record["metrics"]["accuracy"]) for record in records if record["type"] == "eval"]
    steps = [record for record in records if record["type"] == "step"]
    return {
        "seed": seed,
        "seconds": seconds,
        "evaluations": evals,
        "before": evals[0][1],
        "after": evals[-1][1],
        "sampled_before": steps[0]["metrics"]["reward/reward"],
        "sampled_after": steps[-1]["metrics"]["reward/reward"],
        "median_step_seconds": sorted(step["seconds"] for step in steps)[len(steps) // 2],
        "steps": len(steps),
    }


def main() -> int:
    """Print a row a seed; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="grpo", choices=("grpo", "ppo"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args()
    rows = []
    print(f"{'seed':>4}  {'before':>6}  {'after':>6}  {'sampled':>14}  {'step':>7}  {'all':>6}")
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as folder:
            row = run(seed, asked.algorithm, Path(folder) / "quickstart")
        rows.append(row)
        sampled = f"{row['sampled_before']:.2f} -> {row['sampled_after']:.2f}"
        holds = row["after"] >= LEAST_ACCURACY and row["seconds"] <= MOST_SECONDS
        print(
            f"{seed:>4}  {row['before']:>6.3f}  {row['after']:>6.3f}  {sampled:>14}  "
            f"{row['median_step_seconds']:>5.2f} s  {row['seconds']:>4.0f} s  {'PASS' if holds else 'FAIL'}",
            flush=True,
        )
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": describe(), "algorithm": asked.algorithm, "runs": rows}
    (RESULTS / f"quickstart_{asked.algorithm}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(r["after"] >= LEAST_ACCURACY and r["seconds"] <= MOST_SECONDS for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
