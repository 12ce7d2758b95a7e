"""Predicted against measured: what a run's directory says of each call of its own plan."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import msgspec

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.graphs.yaml.files import read_text
from realgraph.planner.plan.codec import plan_from_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.content import MeasuredSeconds
from realgraph.planner.report.format import WHOLE_STEP
from realgraph.run.costs_record import counting_steps
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.observer import RunRecord, StepRecord
from realgraph.runtime.master.step_metrics import planned_seconds


class RunRead(msgspec.Struct, frozen=True):
    """The plan that a run followed, and the records of its steps without the first ones after each start."""

    plan: Plan
    steps: tuple[StepRecord, ...]


def read_run(root: Path) -> RunRead:
    """Raises ConfigError where the directory holds no run, or one without a finished step."""
    folder = RunFolder(root)
    try:
        plan = plan_from_json(read_text(folder.plan), str(folder.plan))
        records = read_records(folder.metrics)
    except (OSError, UnicodeDecodeError) as error:
        hint = "name the directory of a run: it has plan.json and metrics.jsonl"
        raise ConfigError(
            [Problem(Where(str(root)), f"no run can be read here: {reason(error)}", hint, "run")]
        ) from error
    steps = counting_steps(records)
    if not steps:
        begun = any(isinstance(record, StepRecord) for record in records)
        text = "the run has finished no step" + (" after its first, which warms up" if begun else "")
        raise ConfigError([Problem(Where(str(folder.metrics)), text, "", "run")])
    return RunRead(plan, steps)


def measured_calls(run: RunRead) -> tuple[MeasuredSeconds, ...]:
    """The period first, then each call and the reallocation that the plan has a prediction for, medians over the
    steps."""
    measured = [_measured(WHOLE_STEP, run.plan.period_seconds, [record.seconds for record in run.steps])]
    for name, seconds in planned_seconds(run.plan).items():
        taken = [record.metrics[f"{name}/seconds"] for record in run.steps if f"{name}/seconds" in record.metrics]
        if taken:
            measured.append(_measured(name, seconds, taken))
    return tuple(measured)


def _measured(call: str, predicted_seconds: float, taken: Sequence[float]) -> MeasuredSeconds:
    middle = median(taken)
    low, _, high = quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else (middle, middle, middle)
    return MeasuredSeconds(
        call, predicted_seconds, middle, (high - low) / 2 / middle if middle > 0 else 0.0, len(taken)
    )


def read_records(file: Path) -> list[RunRecord]:
    """Raises OSError, and ConfigError for a line that is no record."""
    decode = msgspec.json.Decoder(RunRecord).decode
    records: list[RunRecord] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break  # a full disk has cut it off, or it is being written
            try:
                records.append(decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError([Problem(Where(str(file), number), f"no record of a run: {error}")]) from error
    return records
