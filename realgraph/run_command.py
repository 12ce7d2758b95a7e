"""`realgraph run`: check, plan, first rows, then the workers. Turns the outcome into an exit code."""

import asyncio
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from realgraph.console import RunConsole, screen
from realgraph.costs_record import CostsFile, Planned
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.plan_command import print_plan
from realgraph.planner.detect import probe
from realgraph.running import Prepared, claim, prepare, prepare_resume
from realgraph.runtime.master import Master, Outcome
from realgraph.runtime.observer import Observer, Observers
from realgraph.runtime.preflight import preflight, refuse_machine
from realgraph.runtime.records import MetricsFile, TraceFile, TranscriptsFile
from realgraph.runtime.run_folder import RunFolder, disk_text, exclusive
from realgraph.runtime.trackers import make_trackers

FAILED, INTERRUPTED = 3, 130


def run_command(
    file: Path | None, overrides: Sequence[str], plan_file: Path | None, resume: Path | None, dry_run: bool
) -> None:
    """Run or resume; exits with 3 where the run failed, 130 where it was interrupted. Raises ConfigError."""
    prepared = open_run(file, overrides, plan_file, resume)
    console = RunConsole()
    if dry_run:
        print_plan(prepared.job.plan, prepared.checked, prepared.request, console)
        for line in preflight(prepared.job):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print("dry run: nothing was started")
        return
    outcome = execute(prepared, console)
    report(outcome, prepared)
    if not outcome.ok:
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)


def open_run(file: Path | None, overrides: Sequence[str], plan_file: Path | None, resume: Path | None) -> Prepared:
    """The run that the command line asks for. Raises ConfigError."""
    if resume is not None:
        if plan_file is not None:
            raise ConfigError([Problem(Where("command line"), "a resumed run keeps its plan", "leave out --plan")])
        # With --resume there is no run file: a word in its place is an override.
        return prepare_resume(resume, [*([str(file)] if file is not None else []), *overrides])
    if file is None:
        hint = "realgraph run FILE, or realgraph run --resume DIR; realgraph init writes a run file"
        raise ConfigError([Problem(Where("command line"), "which run?", hint)])
    return prepare(file, overrides, plan_file)


def execute(prepared: Prepared, console: Console, extra: Sequence[Observer] = ()) -> Outcome:
    """Start the workers and run to the end, watched by files, trackers and the screen. Raises ConfigError."""
    job, folder = prepared.job, prepared.folder
    refuse_machine(job, len(probe().gpus))
    for line in preflight(job):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder))
        except BlockingIOError:
            text = f"another run is writing to {folder.root}"
            raise ConfigError([Problem(Where(path="$.outputs.dir"), text, "wait for it, or choose another")]) from None
        except OSError as error:
            raise unwritable_folder(folder, error) from None
        try:
            claim(prepared)
            files = (MetricsFile(folder.metrics), TranscriptsFile(folder.transcripts), TraceFile(folder.trace))
        except OSError as error:
            raise unwritable_folder(folder, error) from None
        trackers = make_trackers(job.outputs.trackers, job.outputs.tensorboard, job.outputs.project, folder.root)
        costs = CostsFile(Planned(job.name, prepared.request, job.plan), folder.costs)
        observers = Observers((*files, *trackers, costs, screen(console), *extra))
        try:
            return asyncio.run(Master(job, folder, observers, prepared.resume).run())
        finally:
            try:
                observers.close()
            except OSError as error:
                print(f"warning: a file of {folder.root} could not be closed: {error}", file=sys.stderr)


def write_detail(detail: str, file: Path) -> None:
    """A failure's traceback to its file; on the screen where the disk takes no file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(detail, encoding="utf-8")
    except OSError as error:
        print(f"  details could not be written ({disk_text(error)}):", file=sys.stderr)
        print(textwrap.indent(detail.rstrip(), "    "), file=sys.stderr)
    else:
        print(f"  details: {file}", file=sys.stderr)


def unwritable_folder(folder: RunFolder, error: OSError) -> ConfigError:
    """The run directory can't be written to."""
    text = f"the run directory {folder.root} can't be written to: {error.strerror or error}"
    return ConfigError([Problem(Where(path="$.outputs.dir"), text, "choose another outputs.dir, or make room")])


def report(outcome: Outcome, prepared: Prepared) -> None:
    """What a person needs to know at the end; of a failure: what, where the details are, and how to go on."""
    if outcome.ok:
        return
    err = sys.stderr
    failure = outcome.failure
    if failure is None:
        print(f"{outcome.reason} after step {outcome.steps}", file=err)
    else:
        print(f"error: {outcome.reason}", file=err)
        if failure.detail:
            write_detail(failure.detail, prepared.folder.logs / "failure.txt")
        if failure.worker >= 0:
            print(f"  log: {prepared.folder.logs / f'worker-{failure.worker}.log'}", file=err)
    if outcome.saved is not None:
        print(f"  saved: {outcome.saved}", file=err)
        print(f"  go on: realgraph run --resume {prepared.folder.root}", file=err)
    else:
        print("  nothing was saved", file=err)
