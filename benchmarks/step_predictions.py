"""Predicted against measured seconds of a whole step, after `realgraph profile` and one run on this machine.

The quickstart's fine-tuning, GRPO and PPO, each in five layouts and with two batches. Each setting runs twice: planned
with the profile's costs, and then with those that its first run has left, as `realgraph run --costs RUN_DIR` does. The
period of the plan that a run itself follows stands beside the median of its steps, without those that warm up.

Claims, of the second runs: the median error is at most 10 %, and nine in ten errors are at most 25 %. The first runs
are printed beside them: what is known before anything has run. About ten minutes on two idle cores:
`python -m benchmarks.step_predictions [--costs FILE] [--only TEXT]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.predictions import RESULTS, warm_model
from realgraph.commands.quickstart import prepare_folder
from realgraph.commands.run import execute
from realgraph.profile.command import ProfileRequest, profile_command
from realgraph.profile.runs import StepRecorder
from realgraph.run.running import prepare
from realgraph.screen.terminal import Terminal

MEDIAN_ERROR, WORST_ERROR = 0.10, 0.25  # at most; the second of nine in ten
DEVICES = 2
STEPS, WARM_UP = 22, 6  # of a run, and of them left out
CALLS = {"sft": ("train",), "grpo": ("ref_logp", "train"), "ppo": ("ref_logp", "values", "train_actor", "train_critic")}
GROUPS = {"sft": (128, 64), "grpo": (64, 32), "ppo": (256, 128)}
STILL: dict[str, dict[str, Any]] = {  # next to no learning, so that all steps of all runs do the same work
    "sft": {"calls.train.lr": 1e-9},
    "grpo": {"params.lr": 1e-9, "params.kl_coef": 0.01},
    "ppo": {"params.actor_lr": 1e-9, "params.critic_lr": 1e-9},
}
LAYOUTS: dict[str, dict[str, Any]] = {  # of the calls that don't generate; generation is data-parallel on as many
    "dp 1": {"devices": 1, "dp": 1},
    "dp 2": {"devices": 2, "dp": 2, "sharding": "replicated"},
    "tp 2": {"devices": 2, "tp": 2, "dp": 1},
    "pp 2": {"devices": 2, "pp": 2, "dp": 1},
    "fsdp 2": {"devices": 2, "dp": 2, "sharding": "fsdp"},
}
EVERYWHERE = ("dp 1", "dp 2", "tp 2", "pp 2")


@dataclass(frozen=True)
class Setting:
    """An algorithm of the quickstart, how it is laid out, and the prompt groups of a step."""

    algorithm: str
    layout: str
    groups: int

    def __str__(self) -> str:
        return f"{self.algorithm:<4} {self.layout:<11} {self.groups:>3} groups"

    def overrides(self) -> dict[str, Any]:
        """Changes to the run file."""
        calls = CALLS[self.algorithm]
        generates = self.algorithm != "sft"
        if self.layout == "staleness 2":
            pins: dict[str, Any] = {name: {"first": 1, "devices": 1} for name in calls}
            loss = "calls.train_actor.loss" if self.algorithm == "ppo" else "calls.train.loss"
            corrected = {f"{loss}.terms.policy.off_policy": {"kind": "decoupled"}}
            return {"staleness": 2, "allocation": {"rollout": {"first": 0, "devices": 1}, **pins}, **corrected}
        pins = dict.fromkeys(calls, LAYOUTS[self.layout])
        return {"allocation": {"rollout": {"devices": pins[calls[0]]["devices"]}, **pins} if generates else pins}


@dataclass(frozen=True)
class Row:
    """One run: the period of its plan and the median of its steps, in seconds."""

    setting: Setting
    costs: str  # of the plan: "profile", or "run"
    predicted: float
    measured: float
    spread: float  # half the distance of the steps' quartiles, over the median

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    def __str__(self) -> str:
        seconds = f"{self.predicted * 1e3:>6.0f} ms, measured {self.measured * 1e3:>6.0f} ms +/- {self.spread:.0%}"
        return f"{self.setting!s:<28} by the {self.costs:<7} {seconds}: {self.predicted / self.measured - 1:+.0%}"


def all_settings() -> list[Setting]:
    """Thirty: without generation nothing can be stale, so that fine-tuning shards its model instead."""
    return [
        Setting(algorithm, layout, groups)
        for algorithm in CALLS
        for layout in (*EVERYWHERE, "fsdp 2" if algorithm == "sft" else "staleness 2")
        for groups in GROUPS[algorithm]
    ]


def measure(home: Path, setting: Setting, costs: Path, run_dir: Path) -> Row:
    """One run, planned with the costs in a file or of a finished run."""
    changes = {
        **STILL[setting.algorithm],
        **setting.overrides(),
        "batch.groups": setting.groups,
        "eval": None,
        "steps": STEPS,
        "cluster.devices": DEVICES,
        "checkpoint": {"minutes": 0},
        "outputs.dir": str(run_dir),
    }
    overrides = [f"{path}={json.dumps(value)}" for path, value in changes.items()]
    run, seen = prepare(home / f"{setting.algorithm}.yaml", overrides, None, costs), StepRecorder()
    outcome = execute(run, Terminal(quiet=True), (seen,))
    if not outcome.ok:
        raise RuntimeError(f"{setting}: {outcome.reason}")
    steady = seen.records[WARM_UP : STEPS - run.job.staleness]  # at the end of a run nothing is made any more
    first, median, third = statistics.quantiles([step.seconds for step in steady], n=4, method="inclusive")
    kind = "run" if costs.is_dir() else "profile"
    return Row(setting, kind, run.job.plan.period_seconds, median, (third - first) / 2 / median)


def report(rows: Sequence[Row]) -> bool:
    """Print the errors of both kinds of plans; True where the claims hold."""
    passed = False
    for kind in ("profile", "run"):
        errors = [row.error for row in rows if row.costs == kind]
        median, worst = statistics.median(errors), statistics.quantiles(errors, n=10, method="inclusive")[8]
        passed = median <= MEDIAN_ERROR and worst <= WORST_ERROR
        print(f"costs of the {kind}: median error {median:.0%}, nine in ten at most {worst:.0%}")
    print("PASS" if passed else "FAIL", f"of the run: median <= {MEDIAN_ERROR:.0%}, nine in ten <= {WORST_ERROR:.0%}")
    return passed


def main() -> int:
    """Profile, run each setting twice, compare; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, help="a table of `realgraph profile` on this machine, to save the time")
    parser.add_argument("--only", default="", help="settings whose names have this, with no verdict")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="realgraph-steps-") as name:
        home, profile = Path(name) / "quickstart", asked.costs or Path(name) / "costs.json"
        if asked.costs is None:
            profile_command(ProfileRequest(devices=DEVICES), profile)
        for algorithm in ("grpo", "ppo"):
            prepare_folder(home, algorithm, seed=1)
        warm_model(home)
        for number, setting in enumerate(one for one in all_settings() if asked.only in str(one)):
            first, second = home / f"run-{number}", home / f"run-{number}-again"
            for costs, run_dir in ((profile, first), (first, second)):
                rows.append(measure(home, setting, costs, run_dir))
                print(rows[-1], flush=True)
    if asked.only:
        return 0
    passed = report(rows)
    found = {
        "machine": describe(),
        "load_average": os.getloadavg(),
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }
    (RESULTS / "step_predictions.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
