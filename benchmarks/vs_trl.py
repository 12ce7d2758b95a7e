"""GRPO in this project and in TRL's GRPOTrainer: samples and tokens per second on the same two cores, in one run.

Run from the root of the repository: `python -m benchmarks.vs_trl` (7 minutes on an idle machine), `--quick` 2 minutes.
TRL gets the best of its batch sizes, micro-batches, generation back-ends, and of one process with two threads or two
data-parallel processes with one thread each; then both systems run by turns, so that a drift of the machine hits both.

Equal: model, tokenizer, prompts, group size, lengths (the same model at the same temperature draws them), reward,
loss (token mean, clip 0.2 / 0.28, no KL), AdamW and its settings, float32, two cores. Not equal: the order of prompts,
the random draws, and that this project also returns the sampler's log-probabilities and weighs by them. Only steps in
steady state count: no start, no saving, no logging.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.grpo_runs import GROUP, Case, Measured, Setting, make_folder, run_ours, run_trl
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "vs_trl.json"
GROUPS = 64  # prompts a step, of our runs
ROUNDS = 2
SECONDS = 6.0  # of steady state, each run


@dataclass(frozen=True)
class Contest:
    """A kind of work, the settings that TRL may choose from (of which `quick` are enough for a look), and the ratio to
    reach."""

    case: Case
    settings: tuple[Setting, ...]
    quick: tuple[Setting, ...]
    target: float


LONG = Contest(
    Case("long-tailed", "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY", 256, warm_up=0, rate=100.0),
    (
        Setting(16, 2, 8),
        Setting(64, 1, 64),
        Setting(64, 2, 32),
        Setting(512, 2, 32),
        Setting(64, 1, 64, continuous=True),
    ),
    (Setting(16, 2, 8), Setting(64, 2, 32)),
    5.0,
)
SUMS = Contest(
    Case("short sums", "0123456789+=", 8, warm_up=60, rate=1200.0),
    (
        Setting(64, 2, 32),
        Setting(512, 1, 512),
        Setting(512, 2, 256),
        Setting(512, 2, 64),
        Setting(512, 1, 512, continuous=True),
    ),
    (Setting(512, 2, 256), Setting(512, 2, 64)),
    2.0,
)


def compare(home: Path, contest: Contest, quick: bool) -> dict[str, Any]:
    """The case's results: TRL's settings, then both systems by turns, then ours at the size of step that suits TRL."""
    case = contest.case
    make_folder(home, case)

    def turn(label: str, run: Callable[[], Measured]) -> Measured:
        found = run()
        row = found.row()
        print(
            f"{case.name:12} {label:62} {row['samples_per_s']:9.1f} samples/s {row['tokens_per_s']:9.0f} tokens/s "
            f"{row['samples_per_cpu_s']:8.1f} samples/cpu-s   lengths {row['length_mean']:.1f} / {row['length_p95']} / "
            f"{row['length_max']}   {found.steps} steps",
            flush=True,
        )
        return found

    settings = contest.quick if quick else contest.settings
    tried = {s: [turn(f"trl: {s}", lambda s=s: run_trl(home, case, s, SECONDS))] for s in settings}  # type: ignore[misc]
    best = max(settings, key=lambda s: tried[s][0].rate)
    ours: list[Measured] = []
    theirs: list[Measured] = []
    for _ in range(1 if quick else ROUNDS):
        ours.append(turn(f"ours: {GROUPS * GROUP} a step", lambda: run_ours(home, case, GROUPS, SECONDS)))
        theirs.append(turn(f"trl: {best}", lambda: run_trl(home, case, best, SECONDS)))
    sizes = {GROUPS * GROUP: ours}
    if best.samples not in sizes and not quick:
        label = f"ours: {best.samples} a step"
        sizes[best.samples] = [turn(label, lambda: run_ours(home, case, best.samples // GROUP, SECONDS))]
    return summary(contest, best, (ours, theirs), tried, sizes)


def summary(
    contest: Contest,
    best: Setting,
    turns: tuple[list[Measured], list[Measured]],
    tried: dict[Setting, list[Measured]],
    sizes: dict[int, list[Measured]],
) -> dict[str, Any]:
    """The case as plain data; prints the ratios."""
    ours, theirs = turns
    rates = [statistics.median(run.rate for run in runs) for runs in turns]
    pairs = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
    ratio = rates[0] / rates[1]
    per_cpu = [statistics.median(run.samples / max(run.cpu_seconds, 1e-9) for run in runs) for runs in turns]
    same = {}
    for size, runs in sizes.items():
        others = [run.rate for setting, found in tried.items() if setting.samples == size for run in found]
        if others:
            same[size] = round(statistics.median(run.rate for run in runs) / max(others), 2)
    verdict = "PASS" if ratio >= contest.target else "FAIL"
    print(
        f"{verdict} {contest.case.name}: {ratio:.2f} x the best of TRL ({best}), each pair {min(pairs):.2f} to "
        f"{max(pairs):.2f}, wanted {contest.target:g}; by CPU seconds {per_cpu[0] / per_cpu[1]:.2f}; "
        f"at equal samples a step: {same}\n",
        flush=True,
    )
    return {
        "case": contest.case.name,
        "target": contest.target,
        "passed": ratio >= contest.target,
        "ratio": round(ratio, 2),
        "ratio_of_each_pair": [round(pair, 2) for pair in pairs],
        "ratio_by_cpu_seconds": round(per_cpu[0] / per_cpu[1], 2),
        "ratio_at_equal_samples_per_step": same,
        "best_trl_setting": str(best),
        "ours": [run.row() for runs in sizes.values() for run in runs],
        "trl_best": [run.row() for run in theirs],
        "trl_settings": [{"setting": str(s), **run.row()} for s, runs in tried.items() for run in runs],
    }


def main() -> int:
    """Measure, print, write the results; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two settings of TRL, one round")
    parser.add_argument("--only", choices=(LONG.case.name, SUMS.case.name), help="one kind of work; writes no results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    contests = [contest for contest in (SUMS, LONG) if options.only in (None, contest.case.name)]
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as home:
        found = [compare(Path(home) / one.case.name.replace(" ", "-"), one, options.quick) for one in contests]
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "load_before": round(load, 2), "quick": options.quick, "cases": found}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(case["passed"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
