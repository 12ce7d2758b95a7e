"""A run as its directory has it: its job, the records that count, samples as text, and the slices of its trace."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.plan.view.measured import RunRead, read_records
from realgraph.run.costs_record import counting_steps, planned_starts
from realgraph.run.resume import read_job, run_at
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    RunEnded,
    RunStarted,
    StepRecord,
    Transcript,
)


class Slice(Struct, frozen=True):
    """One call on one worker, in Unix seconds. worker: -1 for the master."""

    worker: int
    call: str
    step: int
    started: float
    ended: float


class RunHistory(Struct, frozen=True):
    """A run as its files have it. steps, evaluations: by step, the last record of each; steady: the steps that count
    where seconds are compared; planned: all that ran by the present plan."""

    folder: RunFolder
    job: Job
    starts: tuple[RunStarted, ...]
    steps: tuple[StepRecord, ...]
    steady: tuple[StepRecord, ...]
    planned: tuple[StepRecord, ...]
    evaluations: tuple[EvalRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    end: RunEnded | None  # None: it runs, or was killed
    transcripts: tuple[Transcript, ...]
    slices: tuple[Slice, ...]

    @property
    def read(self) -> RunRead:
        """The part of it that is compared with the plan."""
        return RunRead(self.job.plan, self.steady)


class _TraceArguments(Struct):
    step: int = -1


class _TraceEvent(Struct):
    """An event of the Chrome trace event format, as far as it is read here."""

    name: str
    ph: str
    tid: int
    ts: float = 0.0
    dur: float = 0.0
    args: _TraceArguments = msgspec.field(default_factory=_TraceArguments)


def read_history(root: Path) -> RunHistory:
    """Raises ConfigError where the directory holds no run, or one whose files can't be read."""
    folder = run_at(root)
    job = read_job(folder)
    try:
        records = read_records(folder.metrics) if folder.metrics.exists() else []
        transcripts = tuple(_transcripts(folder.transcripts))
        slices = tuple(_slices(folder.trace))
    except OSError as error:
        where = Where(str(error.filename or root))
        raise ConfigError([Problem(where, f"the run can't be read: {reason(error)}")]) from error
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    evaluations = {record.step: record for record in records if isinstance(record, EvalRecord)}
    last = records[-1] if records else None
    return RunHistory(
        folder=folder,
        job=job,
        starts=tuple(record for record in records if isinstance(record, RunStarted)),
        steps=tuple(steps[step] for step in sorted(steps)),
        steady=counting_steps(records),
        planned=tuple(chain.from_iterable(planned_starts(records))),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        checkpoints=tuple(record for record in records if isinstance(record, CheckpointRecord)),
        end=last if isinstance(last, RunEnded) else None,
        transcripts=transcripts,
        slices=slices,
    )


def _transcripts(file: Path) -> Iterator[Transcript]:
    """Raises OSError."""
    for line in _lines(file):
        try:
            yield msgspec.json.decode(line, type=Transcript)
        except msgspec.MsgspecError:
            continue  # what a full disk has cut off


def _slices(file: Path) -> Iterator[Slice]:
    """One event a line, as TraceFile writes them. Raises OSError."""
    decode = msgspec.json.Decoder(_TraceEvent).decode
    for line in _lines(file):
        try:
            event = decode(line.strip().removesuffix(b"]").removesuffix(b","))
        except msgspec.MsgspecError:
            continue  # the bracket of the array, names of rows, what a full disk has cut off
        if event.ph == "X":
            started = event.ts / 1e6
            yield Slice(event.tid - 1, event.name, event.args.step, started, started + event.dur / 1e6)


def _lines(file: Path) -> Iterator[bytes]:
    if file.exists():
        with file.open("rb") as lines:
            yield from lines
