"""Predicted against measured: what a run's directory says of each call of its own plan."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

import msgspec

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.planner.codec import plan_from_json
from realgraph.planner.events import reallocation_node
from realgraph.planner.plan import Plan
from realgraph.planner.report.report import Measured
from realgraph.runtime.observer import RunRecord, RunStarted, StepRecord
from realgraph.runtime.run_folder import RunFolder

WARM_UP = 2  # steps after each start of a run: compilation, allocators, caches
FEWEST = 3  # steps to be left after warm-up; a shorter run is taken whole
STEP = "a whole step"


class RunRead(msgspec.Struct, frozen=True):
    """The plan that a run followed, and the records of its steps without the first ones after each start."""

    plan: Plan
    steps: tuple[StepRecord, ...]


def read_run(root: Path) -> RunRead:
    """Raises ConfigError where the directory holds no run, or one without a finished step."""
    folder = RunFolder(root)
    try:
        plan = plan_from_json(folder.plan.read_text(encoding="utf-8"), str(folder.plan))
        records = _records(folder.metrics)
    except OSError as error:
        hint = "name the directory of a run: it has plan.json and metrics.jsonl"
        raise ConfigError(
            [Problem(Where(str(root)), f"no run can be read here: {reason(error)}", hint, "run")]
        ) from error
    steps = tuple(_warm(records))
    if not steps:
        raise ConfigError([Problem(Where(str(folder.metrics)), "the run has finished no step", "", "run")])
    return RunRead(plan, steps)


def measured_calls(run: RunRead) -> tuple[Measured, ...]:
    """The period first, then each call and reallocation that the plan has a prediction for, medians over the steps."""
    predicted = {name: allocation.seconds for name, allocation in run.plan.allocations.items()}
    predicted |= {reallocation_node(name): seconds for name, seconds in run.plan.reallocation_seconds.items()}
    found = [_measured(STEP, run.plan.period_seconds, [record.seconds for record in run.steps])]
    for name, seconds in predicted.items():
        taken = [record.metrics[f"{name}/seconds"] for record in run.steps if f"{name}/seconds" in record.metrics]
        if taken and seconds > 0:
            found.append(_measured(name, seconds, taken))
    return tuple(found)


def _measured(call: str, predicted_seconds: float, taken: Sequence[float]) -> Measured:
    middle = median(taken)
    low, _, high = quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else (middle, middle, middle)
    return Measured(call, predicted_seconds, middle, (high - low) / 2 / middle if middle > 0 else 0.0, len(taken))


def _records(file: Path) -> list[RunRecord]:
    """Raises OSError, and ConfigError for a line that is no record."""
    decode = msgspec.json.Decoder(RunRecord).decode
    records: list[RunRecord] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError([Problem(Where(str(file), number), f"no record of a run: {error}")]) from error
    return records


def _warm(records: Sequence[RunRecord]) -> Iterator[StepRecord]:
    """The steps that count: the last record of each, without the first ones after a start where enough are left."""
    last: dict[int, tuple[StepRecord, bool]] = {}
    since_start = 0
    for record in records:
        match record:
            case RunStarted():
                since_start = 0
            case StepRecord():
                last[record.step] = (record, since_start >= WARM_UP)
                since_start += 1
            case _:
                pass
    warm = [record for record, is_warm in last.values() if is_warm]
    yield from warm if len(warm) >= FEWEST else (record for record, _ in last.values())
