"""`realgraph run`: check, plan, first rows, then the workers. Turns the outcome into an exit code."""

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.plan.command import print_plan
from realgraph.run.costs_record import CostsFile, Planned
from realgraph.run.ending import next_lines
from realgraph.run.given_servers import check_given_servers
from realgraph.run.launching import launcher_of, loading, print_needs
from realgraph.run.plan_warnings import plan_warnings
from realgraph.run.restarts import back_off, give_up, prepared_again
from realgraph.run.resume import ResumeOptions, resumed
from realgraph.run.rollout_alone import rollout_alone
from realgraph.run.running import (
    PreparedRun,
    claim,
    owned,
    prepare_checked,
    refuse_taken,
    refuse_unfree,
    unwritable_folder,
    with_sums,
)
from realgraph.run.submitting import Submission, come_back, goes_back, script_of, submitted
from realgraph.run_file.compose import Checked, check_run
from realgraph.runtime.clusters.sbatch import LOG
from realgraph.runtime.job.rotation import MEGABYTE
from realgraph.runtime.job.run_folder import disk_text
from realgraph.runtime.master.master import Master, RunOutcome
from realgraph.runtime.master.observer import Observer, Observers, WatcherLost
from realgraph.runtime.master.records import MetricsFile, TraceFile, TranscriptsFile
from realgraph.runtime.master.trackers import make_trackers, settings_of
from realgraph.runtime.preflight.preflight import preflight
from realgraph.runtime.processes.launcher import Launcher
from realgraph.screen.console import screen
from realgraph.screen.output import say, say_warnings
from realgraph.screen.terminal import Terminal, run_terminal

FAILED, INTERRUPTED = 3, 130


class RunOptions(Struct, frozen=True):
    """Options of a run on the command line, beside its file and overrides."""

    plan_file: Path | None = None
    costs_file: Path | None = None
    resume: Path | None = None
    dry_run: bool = False
    new_data: bool = False
    replan: bool = False
    submit: bool = False
    no_train: bool = False


def run_command(file: Path | None, overrides: Sequence[str], options: RunOptions) -> None:
    """Run or resume; exits with 3 where the run failed, 130 where it was interrupted. Raises ConfigError."""
    console = run_terminal()
    if options.no_train and (options.submit or options.resume is not None):
        text = "--no-train measures a run in its place, from its start"
        hint = "leave --submit out" if options.submit else "name a run file in place of --resume"
        raise ConfigError([Problem(Where("command line"), text, hint)])
    if options.submit:
        submit_command(file, overrides, options, console)
        return
    with open_run(file, overrides, options) as prepared:
        say_warnings(prepared.checked.warnings)
        say_warnings(plan_warnings(prepared.checked, prepared.job.plan, prepared.request))
        if options.dry_run:
            print_plan(prepared.job.plan, prepared.checked, prepared.request, console)
            say_warnings(check_given_servers(prepared))
            _first_rows(prepared, console)
            console.print("dry run: nothing was started")
            return
        prepared = rollout_alone(prepared) if options.no_train else prepared
        outcome = execute(prepared, console)
    report(outcome, prepared, console)
    if outcome.interrupted and outcome.steps < prepared.job.steps:
        for line in goes_back(prepared.checked):
            say(line, err=True)
    if not outcome.ok:
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)


def submit_command(file: Path | None, overrides: Sequence[str], options: RunOptions, console: Terminal) -> None:
    """Write the run's batch script and submit it; with `dry_run` show it. Raises ConfigError."""
    words = words_of(file, options.resume)
    further = [
        *(["--plan", str(options.plan_file.absolute())] if options.plan_file is not None else []),
        *(["--costs", str(options.costs_file.absolute())] if options.costs_file is not None else []),
        *(["--new-data"] if options.new_data else []),
        *(["--replan"] if options.replan else []),
    ]
    if file is None and options.resume is None:
        raise no_run()
    script, warning = script_of(
        Submission(file, [*words, *overrides], further, options.resume, options.plan_file, options.costs_file)
    )
    if warning:
        say(f"warning: {warning}", err=True)
    if options.dry_run:
        say(script.text.rstrip())
        return
    job = submitted(script)
    console.print(f"submitted as job {job} of Slurm", soft_wrap=True)
    console.print(f"  its output: {script.folder / LOG.replace('%j', job)}", soft_wrap=True)
    console.print(f"  what it does: realgraph status {script.folder}", soft_wrap=True)


def no_run() -> ConfigError:
    """The command line names no run."""
    hint = "realgraph run FILE, or realgraph run --resume DIR; realgraph init writes a run file"
    return ConfigError([Problem(Where("command line"), "which run?", hint)])


def words_of(file: Path | None, resume: Path | None) -> list[str]:
    """The override that stands in the place of the run file, which a resumed run has already. Raises ConfigError."""
    if file is None or resume is None:
        return []
    if "=" not in str(file):
        text = f"a resumed run has a run file of its own, {resume / 'config.yaml'}: it reads no {str(file)!r}"
        hint = "leave that out; what may change is an override, such as steps=400"
        raise ConfigError([Problem(Where("command line"), text, hint)])
    return [str(file)]


@contextmanager
def open_run(file: Path | None, overrides: Sequence[str], options: RunOptions) -> Iterator[PreparedRun]:
    """The run that the command line asks for; of one that goes on, its directory is ours meanwhile.

    Raises ConfigError.
    """
    if options.replan and options.plan_file is not None:
        text = "--plan and --replan say two things: go on under this plan, and search for one"
        raise ConfigError([Problem(Where("command line"), text, "give --plan or --replan")])
    if options.resume is not None:
        going_on = ResumeOptions(options.new_data, options.plan_file, options.replan, options.costs_file)
        if options.costs_file is not None and not going_on.plans:
            hint = "leave out --costs, or add --replan"
            raise ConfigError([Problem(Where("command line"), "a resumed run keeps its plan", hint)])
        with resumed(options.resume, [*words_of(file, options.resume), *overrides], going_on) as prepared:
            yield prepared
        return
    for given, name in ((options.new_data, "--new-data"), (options.replan, "--replan")):
        if given:
            text = f"{name} is for a resumed run"
            raise ConfigError([Problem(Where("command line"), text, "add --resume DIR")])
    if file is None:
        raise no_run()
    if (left := come_back(file, overrides)) is not None:
        with resumed(left, ()) as prepared:
            yield prepared
        return
    checked = check_run(file, overrides)
    if not (options.no_train or options.dry_run):
        with _placed(checked):
            refuse_unfree(checked)
    yield prepare_checked(checked, options.plan_file, options.costs_file)


def execute(
    prepared: PreparedRun, console: Terminal, extra: Sequence[Observer] = (), view: Observer | None = None
) -> RunOutcome:
    """Start the workers and run to the end, watched by files, trackers and the screen. Raises ConfigError.

    The directory of a resumed run is the caller's own already (`resumed`). view: shows the run on the screen, where a
    run's own view would not fit.
    """
    say_warnings(check_given_servers(prepared))
    with _placed(prepared.checked):
        launcher = launcher_of(prepared, lambda line: console.print(line, soft_wrap=True))
    with loading(launcher, prepared.job):  # seconds, while the rows and the functions are looked at
        return _execute(prepared, console, launcher, lambda: (view or screen(console), *extra))


def _execute(
    prepared: PreparedRun, console: Terminal, launcher: Launcher, watchers: Callable[[], Sequence[Observer]]
) -> RunOutcome:
    for line in passed_over(prepared):
        console.print(line, soft_wrap=True)
    _first_rows(prepared, console)
    if prepared.job.steps and not prepared.job.rollout_alone:
        when = prepared.job.checkpoint.text
        console.print(f"checkpoints: {when} (checkpoint.every: steps, checkpoint.minutes)", soft_wrap=True)
    if prepared.resume is not None:
        return _with_restarts(prepared, watchers, launcher)
    with _placed(prepared.checked), owned(prepared.folder):
        prepared = replace(prepared, job=with_sums(prepared.job))
        print_needs(launcher, prepared)
        return _with_restarts(prepared, watchers, launcher)


def _with_restarts(prepared: PreparedRun, watchers: Callable[[], Sequence[Observer]], launcher: Launcher) -> RunOutcome:
    """Train, and go on after a lost worker or host as often as `runtime.restarts` allows. watchers: those of one start.
    Raises ConfigError."""
    restarts = 0
    while True:
        outcome = _train(prepared, watchers(), launcher, restarts)
        if not outcome.again:
            return outcome
        restarts += 1
        seconds = back_off(restarts)
        count = f"restart {restarts} of {prepared.job.runtime.restarts} (runtime.restarts)"
        say(f"error: {outcome.reason}", err=True)
        for line in outcome.failure.frames if outcome.failure is not None else ():
            say(f"  {line}", err=True)
        say(f"{count} in {seconds:g} s, from {outcome.saved}", err=True)
        if outcome.failure is not None and outcome.failure.detail:
            write_detail(outcome.failure.detail, prepared.folder.logs / f"failure-{restarts}.txt")
        try:
            time.sleep(seconds)
            prepared = prepared_again(prepared, launcher)
        except KeyboardInterrupt:
            give_up(launcher)
            return replace(outcome, again=False, interrupted=True)
        except ConfigError:
            give_up(launcher)
            raise


def passed_over(prepared: PreparedRun) -> Iterator[str]:
    """Lines about checkpoints that nothing can go on from."""
    for checkpoint in prepared.damaged:
        yield f"warning: the checkpoint {checkpoint.path} is damaged: {checkpoint.reason}"
    if prepared.damaged:
        yield f"resuming from {prepared.resume}, the newest intact one; damaged ones are kept as step-N.damaged"


def _train(prepared: PreparedRun, watchers: Sequence[Observer], launcher: Launcher, restarts: int) -> RunOutcome:
    """Train in a directory that no other run has. Raises ConfigError, placed in the user's files."""
    job, folder = prepared.job, prepared.folder
    if prepared.resume is None:
        refuse_taken(prepared.checked, folder)
    try:
        with _placed(prepared.checked):
            trackers = make_trackers(job.outputs, folder.root, job.name, settings_of(job))
        claim(prepared)
        most = job.outputs.rotate_mb * MEGABYTE
        files = (MetricsFile(folder.metrics), TranscriptsFile(folder.transcripts, most), TraceFile(folder.trace, most))
    except OSError as error:
        raise unwritable_folder(folder, error) from None
    costs = CostsFile(Planned(job.name, prepared.request, job.plan), folder.costs)
    observers = Observers((*files, *trackers, costs, *watchers), prepared.begun_at)
    try:
        with _placed(prepared.checked):
            return asyncio.run(Master(job, folder, observers, prepared.resume, launcher, restarts).run())
    finally:
        try:
            observers.close()
        except OSError as error:
            say(f"warning: a file of {folder.root} could not be closed: {error}", err=True)
        except WatcherLost as error:
            say(f"warning: {error}", err=True)


def _first_rows(prepared: PreparedRun, console: Terminal) -> None:
    """Show what the first rows and the functions gave. Raises ConfigError, placed in the user's files."""
    with _placed(prepared.checked):
        lines = preflight(prepared.job)
    for line in lines:
        console.print(line, soft_wrap=True)


@contextmanager
def _placed(checked: Checked) -> Iterator[None]:
    """Problems that know their YAML path alone get their place in the user's files. Raises ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            problem if problem.where.file else replace(problem, where=checked.where(problem.where.path))
            for problem in error.problems
        ) from error


def write_detail(detail: str, file: Path) -> None:
    """A failure's traceback to its file; on the screen where the disk takes no file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(detail, encoding="utf-8")
    except OSError as error:
        say(f"  details could not be written ({disk_text(error)}):", err=True)
        say(textwrap.indent(detail.rstrip(), "    "), err=True)
    else:
        say(f"  details: {file}", err=True)


def report(outcome: RunOutcome, prepared: PreparedRun, console: Terminal) -> None:
    """Print how the run ended; of a failure: what, where the details are, and how to go on, on stderr.

    The screen has said after which step the run has ended.
    """
    failure = outcome.failure
    if failure is not None:
        say(f"error: {outcome.reason}", err=True)
        for line in failure.frames:
            say(f"  {line}", err=True)
        if failure.detail:
            write_detail(failure.detail, prepared.folder.logs / "failure.txt")
        if failure.worker >= 0:
            say(f"  log: {prepared.folder.logs / f'worker-{failure.worker}.log'}", err=True)
    for line in next_lines(outcome, prepared):
        if outcome.ok:
            console.print(line, soft_wrap=True)
        else:
            say(line, err=True)
