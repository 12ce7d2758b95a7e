"""The short runs of a profile: what a call costs beside its passes, measured by the runtime itself on a tiny GRPO.

A call has to be sent, its samples gathered, packed and stored, rewards go to a subprocess and back. Two sizes of batch
tell what a call costs from what a sample costs; a model that computes next to nothing leaves little else to see.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.commands.arithmetic import write_data, write_model
from realgraph.commands.run import execute
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Function
from realgraph.planner.costs.calibrate.calibrate import Point, fit_costs
from realgraph.planner.costs.calibrate.fit_profile import FORMULA_ERROR, Stage
from realgraph.planner.costs.calibrate.measurements import toy_model
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.options.calls import setting_of, setting_seconds
from realgraph.planner.options.holdings import candidate_of
from realgraph.planner.plan.option import CallOption
from realgraph.planner.request.request import PlanRequest
from realgraph.run.costs_record import steady, with_lengths
from realgraph.run.running import PreparedRun, prepare
from realgraph.runtime.master.observer import RunRecord, StepRecord
from realgraph.screen.terminal import Terminal

GROUPS = (8, 64)  # of the two runs
GROUP_SIZE = 4
STEPS = 12
FIELDS = ("call_seconds", "sample_seconds")
GPU_VOCABULARY = 16


class StepRecorder:
    """An observer that keeps the records of steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def observe(self, record: RunRecord) -> None:
        if isinstance(record, StepRecord):
            self.records.append(record)

    def close(self) -> None:
        """Nothing is held open."""


class ShortRun(Struct, frozen=True):
    """One short run: what was planned, and the steps after its warm-up. The request has the lengths that it had."""

    prepared: PreparedRun
    request: PlanRequest
    steps: Sequence[StepRecord]

    def least_seconds(self, call: str) -> float:
        """Seconds of the call's quickest step: what disturbs a machine only ever makes it slower."""
        return min(self._seconds(call))

    def spread(self, call: str) -> float:
        """ln(median / least) of the call's seconds over the steps."""
        return math.log(statistics.median(self._seconds(call)) / self.least_seconds(call))

    def _seconds(self, call: str) -> list[float]:
        return [step.metrics[f"{call}/seconds"] for step in self.steps]


def overheads(costs: EfficiencyFactors, cluster: Cluster, dtype: DType) -> tuple[EfficiencyFactors, Stage]:
    """`costs` with the seconds of a call, of each of its samples, and of a function's sample."""
    with tempfile.TemporaryDirectory(prefix="realgraph-profile-") as name:
        home = Path(name)
        write_home(home, cluster, dtype)
        runs = [short_run(home, cluster, dtype, groups) for groups in GROUPS]
    points = [point for run in runs for point in _points(run)]
    fit = fit_costs(costs, FIELDS, points)
    factors = replace(fit.costs, function_seconds=_function_seconds(runs[-1]))
    return factors, Stage("calls", (*FIELDS, "function_seconds"), fit.error, len(points))


def write_home(home: Path, cluster: Cluster, dtype: DType) -> None:
    """Model, tokenizer and data of the short runs."""
    from realgraph.runtime.profile.model import write_weights  # imports torch

    write_data(home, seed=0)
    write_model(home / "model", seed=0)
    hidden = 64 if cluster.is_cpu else 1024
    write_weights(home / "model", toy_model(hidden, 2, GPU_VOCABULARY), dtype)


def short_run(home: Path, cluster: Cluster, dtype: DType, groups: int) -> ShortRun:
    """GRPO with a reference model for a few steps. Raises ConfigError where it fails."""
    file = home / f"run-{groups}.yaml"
    file.write_bytes(msgspec.json.encode(run_file(home, cluster, dtype, groups)))
    prepared = prepare(file, (), None)
    seen = StepRecorder()
    outcome = execute(prepared, Terminal(quiet=True), (seen,))
    steps = steady(seen.records)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.ok or not steps:
        raise ConfigError([Problem(Where("profile"), f"a short run failed: {outcome.reason}", "", "profile")])
    return ShortRun(prepared, with_lengths(prepared.request, steps), steps)


def run_file(home: Path, cluster: Cluster, dtype: DType, groups: int) -> dict[str, Any]:
    """Every sample is trained on: the KL term sees to it whatever the rewards are."""
    return {
        "graph": "grpo",
        "name": "profile",
        "params": {"group_size": GROUP_SIZE, "kl_coef": 0.01, "lr": 1e-9},
        "models": {"actor": {"path": "model", "dtype": dtype}, "ref": {"path": "model", "dtype": dtype}},
        "data": {
            "path": "train.jsonl",
            "max_prompt_tokens": 8,
            "columns": {"prompt": "prompt", "answer": "answer"},
        },
        "calls": {"train": {"loss": {"terms": {"policy": {"off_policy": {"kind": "ignore"}}}}}},
        "batch": {"groups": groups, "max_new_tokens": 8},
        "cluster": {"nodes": 1, "devices": cluster.devices_per_node, "kind": cluster.kind},
        "outputs": {"dir": str(home / f"run-{groups}"), "transcripts_every": 0},
        "steps": STEPS,
        "seed": 1,
    }


def _points(run: ShortRun) -> Iterator[Point]:
    """The calls that hold a mesh, each by its quickest step."""
    request, plan = run.request, run.prepared.job.plan
    for name, allocation in plan.allocations.items():
        unfitted = setting_of(request, name, allocation.layout, request.cluster)
        chosen = candidate_of(request, plan.allocations, name)

        def predict(
            costs: EfficiencyFactors, name: str = name, unfitted: Setting = unfitted, chosen: CallOption = chosen
        ) -> float:
            return setting_seconds(request, name, replace(unfitted, factors=costs), chosen)

        yield Point(predict, run.least_seconds(name), math.hypot(FORMULA_ERROR, run.spread(name)))


def _function_seconds(run: ShortRun) -> float:
    """Seconds of one sample of a function in one worker's subprocess."""
    per_worker = run.request.workload.n_samples / run.request.cluster.n_devices
    functions = [name for name, call in run.request.graph.calls.items() if isinstance(call, Function)]
    return max(run.least_seconds(name) for name in functions) / per_worker
