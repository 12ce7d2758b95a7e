"""The searched plan of the PPO quickstart against one call at a time and the best symmetric plan, on real processes.

Claim: the planner's periods are within 15 % of measured step seconds, by the median over the plans, and order the plans
as they are measured. One call at a time: every call on all devices, each with the layout that suits it. Symmetric: one
layout per role besides. All plans are made and priced with the costs that `realgraph profile` measures on this machine,
with the lengths of a first run. Runs are short, their steps do the same work every time (next to no learning), and they
take turns; the quickest repeat of each plan counts, and the spread of the repeats stands beside it. Plans that come out
the same are run once. About 6 minutes on two cores: `python -m benchmarks.concurrency [--rounds 5] [--devices 2]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.machine import describe
from realgraph.commands.quickstart import prepare_folder
from realgraph.commands.run import execute
from realgraph.planner.options.tables import problem_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Solution
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.baselines import symmetric
from realgraph.planner.search.search import search
from realgraph.planner.search.whole_problem import whole_problem
from realgraph.profile.command import ProfileRequest, profile_command
from realgraph.profile.runs import StepRecorder
from realgraph.run.costs_record import with_lengths
from realgraph.run.running import PreparedRun, prepare
from realgraph.runtime.master.observer import StepRecord
from realgraph.screen.terminal import Terminal

RESULTS = Path(__file__).parent / "results"
MOST_ERROR = 0.15
WARM_STEPS = 40  # of fine-tuning: until responses have the length of an answer
STEPS, WARM_UP = 8, 2  # of a run, and of them left out
NAMES = ("searched", "one call at a time", "symmetric")


@dataclass
class PlanRow:
    """One plan: its step seconds in the quickest repeat, (median - least) / least of all repeats, and its period."""

    plan: str
    placed: dict[str, str]
    measured: float
    spread: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def make_home(home: Path, devices: int) -> None:
    """The quickstart's folder with a model that answers in the right form."""
    prepare_folder(home, "ppo", seed=1)
    changes = [f"outputs.dir={home / 'sft'}", f"steps={WARM_STEPS}", "eval=null", f"cluster.devices={devices}"]
    outcome = execute(prepare(home / "sft.yaml", changes, None), Terminal(quiet=True))
    if outcome.saved is None:
        raise RuntimeError(f"the warm-up failed: {outcome.reason}")
    (home / "warm").symlink_to(outcome.saved / "actor")


def prepared(home: Path, devices: int, number: int, plan: Plan | None = None) -> PreparedRun:
    """The quickstart's run file, under a plan or the search's own."""
    changes = {
        "params.actor_lr": 1e-9,
        "params.critic_lr": 1e-9,
        "eval": None,
        "steps": STEPS,
        "cluster.devices": devices,
        "outputs.dir": str(home / f"run-{number}"),
    }
    run = prepare(home / "ppo.yaml", [f"{path}={json.dumps(value)}" for path, value in changes.items()], None)
    return run if plan is None else replace(run, job=replace(run.job, plan=plan))


def steps_of(run: PreparedRun) -> list[StepRecord]:
    """The steps of one short run after its warm-up."""
    seen = StepRecorder()
    outcome = execute(run, Terminal(quiet=True), (seen,))
    if not outcome.ok:
        raise RuntimeError(outcome.reason)
    return seen.records[WARM_UP:]


def plans_of(request: PlanRequest) -> dict[str, Plan]:
    """The plans that are compared, each the best of its kind at the same costs."""
    together = replace(request, constraints=Constraints(colocated=True))
    found = dict(zip(NAMES, (search(request), search(together)), strict=False))
    whole = whole_problem(problem_of(request))
    best = symmetric(whole.prepared.problem, whole.shapes) if whole is not None else None
    if whole is not None and best is not None:
        schedule = best.schedule
        proof = Solution(best.choices, best.period, 0.0, schedule.starts, schedule.critical, "exhausted", 0.0, 0)
        found["symmetric"] = plan_of(whole.prepared, proof)
    return found


def placed(plan: Plan) -> dict[str, str]:
    """Each call's devices and layout in words."""
    words = {}
    for name, allocation in plan.allocations.items():
        layout = allocation.layout
        axes = [f"{axis} {size}" for axis in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(layout, axis)) > 1]
        first, last = layout.mesh.first, layout.mesh.devices.stop - 1
        where = f"device {first}" if first == last else f"devices {first}-{last}"
        words[name] = " ".join([where, *axes, *(["fsdp"] if layout.sharding == "fsdp" else [])])
    return words


def different(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Without plans that do what an earlier one does."""
    kept: dict[str, Plan] = {}
    for name, plan in plans.items():
        alike = [n for n, other in kept.items() if (other.orders, _chosen(other)) == (plan.orders, _chosen(plan))]
        if alike:
            print(f"the plan {name!r} is the plan {alike[0]!r}")
        else:
            kept[name] = plan
    return kept


def _chosen(plan: Plan) -> dict[str, object]:
    return {name: (one.layout, one.settings) for name, one in plan.allocations.items()}


def compare(home: Path, table: CostTable, devices: int, rounds: int) -> list[PlanRow]:
    """Run the plans in turns, and set their quickest repeats beside the predictions."""
    first = prepared(home, devices, 0)
    request = replace(with_lengths(first.request, steps_of(first)), costs=table)
    plans = different(plans_of(request))
    repeats: dict[str, list[float]] = {name: [] for name in plans}
    number = 1
    for _ in range(rounds):
        for name, plan in plans.items():
            steps = steps_of(prepared(home, devices, number, plan))
            repeats[name].append(statistics.mean(step.seconds for step in steps))
            number += 1
    return [
        PlanRow(name, placed(plan), least := min(repeats[name]), _spread(repeats[name], least), plan.period_seconds)
        for name, plan in plans.items()
    ]


def _spread(repeats: Sequence[float], least: float) -> float:
    return statistics.median(repeats) / least - 1


def show(rows: Sequence[PlanRow]) -> None:
    """A line a plan, and where its calls lie."""
    print(f"{'plan':<20} {'measured':>9} {'spread':>7} {'predicted':>9} {'error':>6}")
    for row in rows:
        measured, predicted = f"{row.measured * 1e3:.1f} ms", f"{row.predicted * 1e3:.1f} ms"
        print(f"{row.plan:<20} {measured:>9} {row.spread:>6.0%} {predicted:>9} {row.error:>6.0%}")
        print("    " + "; ".join(f"{call}: {where}" for call, where in row.placed.items()))


def main() -> int:
    """Profile, plan, run, compare; 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--costs", type=Path, help="a table of `realgraph profile` on this machine, to save the time")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "quickstart"
        if asked.costs is None:
            table = profile_command(ProfileRequest(devices=asked.devices), Path(name) / "costs.json")
        else:
            table = msgspec.json.decode(asked.costs.read_bytes(), type=CostTable)
        make_home(home, asked.devices)
        rows = compare(home, table, asked.devices, asked.rounds)
    show(rows)
    error = statistics.median(row.error for row in rows)
    by_measure, by_plan = (
        [row.plan for row in sorted(rows, key=lambda row: (getattr(row, field), row.plan))]
        for field in ("measured", "predicted")
    )
    met = error <= MOST_ERROR and by_measure == by_plan
    print(f"quickest first, measured: {', '.join(by_measure)}; predicted: {', '.join(by_plan)}")
    verdict = "PASS" if met else "FAIL"
    print(f"{verdict} median error {error:.0%} <= {MOST_ERROR:.0%}, and one order; {time.monotonic() - began:.0f} s")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "machine": describe(),
        "load_average": os.getloadavg(),
        "median_error": error,
        "order_measured": by_measure,
        "order_predicted": by_plan,
        "rounds": asked.rounds,
        "devices": asked.devices,
        "costs": msgspec.to_builtins(table),
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }
    (RESULTS / "concurrency.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
