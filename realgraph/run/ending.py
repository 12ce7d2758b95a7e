"""The last lines of a run, however it ended: the newest checkpoint, and which commands come next."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median

import msgspec

from realgraph.graphs.spec import Generate, Train
from realgraph.planner.feasibility.diagnose import shown_bytes
from realgraph.planner.report.format import WHOLE_STEP, seconds_text
from realgraph.run.costs_record import counting_steps, planned_starts
from realgraph.run.rollout_alone import measured_lines
from realgraph.run.running import PreparedRun
from realgraph.runtime.master.master import RunOutcome
from realgraph.runtime.master.observer import PlannedSeconds, RunRecord, StepRecord
from realgraph.runtime.master.step_metrics import planned_of
from realgraph.runtime.wire.metrics import PEAK_BYTES
from realgraph.screen.output import say


def next_lines(outcome: RunOutcome, prepared: PreparedRun) -> Iterator[str]:
    """Lines for below the last one of the run; none for an evaluation, which is its own result."""
    job, root = prepared.job, prepared.folder.root
    calls = job.graph.calls.values()
    if not job.steps:
        return
    records = records_of(prepared)
    steps = [*chain.from_iterable(planned_starts(records))]
    if outcome.ok:
        yield from memory_lines(prepared, steps)
        yield from seconds_lines(planned_of(job), counting_steps(records))
    if job.rollout_alone:
        yield from measured_lines(job.graph, steps)
        yield f"  by step: {prepared.folder.metrics}"
        return
    place = shlex.quote(str(root))
    if not any(isinstance(call, Train) for call in calls):
        yield f"  samples: {prepared.folder.samples}"
        if outcome.saved is not None and outcome.steps < job.steps:
            yield f"  go on: realgraph run --resume {place}"
        return
    if outcome.saved is None:
        yield "  nothing was saved"
        return
    yield f"  saved: {outcome.saved}"
    more = "" if outcome.steps < job.steps else f" steps={2 * job.steps}"
    if not more or all(call.optimizer.schedule == "constant" for call in calls if isinstance(call, Train)):
        yield f"  go on: realgraph run --resume {place}{more}"
    if job.held_out is not None:
        yield f"  score it: realgraph eval {shlex.quote(str(prepared.folder.config))} --checkpoint {place}"
    if any(isinstance(call, Generate) for call in calls):
        yield f'  try it: realgraph generate {place} "..."'


def records_of(prepared: PreparedRun) -> list[RunRecord]:
    """All that the run has on record. A line that is no record, such as after a power failure, is a warning."""
    file, records = prepared.folder.metrics, list[RunRecord]()
    if not file.exists():
        return records
    decode = msgspec.json.Decoder(RunRecord).decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break  # a full disk has cut it off
            try:
                records.append(decode(line))
            except msgspec.MsgspecError as error:
                say(f"warning: {file}:{number}: no record of a run, left out: {error}", err=True)
    return records


def memory_lines(prepared: PreparedRun, steps: Sequence[StepRecord]) -> Iterator[str]:
    """The most bytes that each call had on a device, beside those that the plan predicted; nothing where no step has
    said."""
    allocations = prepared.job.plan.allocations
    most = {
        call: max((step.metrics.get(f"{call}/{PEAK_BYTES}", 0.0) for step in steps), default=0.0)
        for call in allocations
    }
    shown = [
        f"{call} {shown_bytes(int(nbytes))} ({shown_bytes(allocations[call].peak_bytes)} planned)"
        for call, nbytes in most.items()
        if nbytes
    ]
    if shown:
        yield f"  most memory: {', '.join(shown)}"


def seconds_lines(planned: PlannedSeconds, steps: Sequence[StepRecord]) -> Iterator[str]:
    """The median seconds of a step and of each call, beside those that the plan predicted; nothing where no step counts
    or nothing was predicted. steps: those that count, without the ones that warm up."""
    predicted = {WHOLE_STEP: planned.step} if planned.step else {}
    measured = {WHOLE_STEP: [step.seconds for step in steps]}
    for name in planned.calls:
        measured[name] = [step.metrics[f"{name}/seconds"] for step in steps if f"{name}/seconds" in step.metrics]
    shown = [
        f"{name} {seconds_text(median(measured[name]))} ({seconds_text(seconds)} planned)"
        for name, seconds in {**predicted, **planned.calls}.items()
        if measured[name]
    ]
    if shown:
        yield f"  median time: {', '.join(shown)}"
