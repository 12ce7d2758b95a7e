"""`realgraph rehearse`: a plan's very layouts and orders on this machine's CPU, at toy width, beside one process."""

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.codec import plan_to_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.format import layout_text
from realgraph.planner.request.request import PlanRequest
from realgraph.rehearsal.compare import Compared, compared, too_old
from realgraph.rehearsal.models import write_toy_models
from realgraph.rehearsal.observer import StepsSeen
from realgraph.rehearsal.order import misordered
from realgraph.rehearsal.plan import toy_plan
from realgraph.rehearsal.run import STEPS, THREADS, ToyRun, on_cluster, toy_run
from realgraph.rehearsal.scale import ToyScale, scale_of
from realgraph.rehearsal.sizes import Counted, counted_bytes
from realgraph.run.plan_warnings import departed
from realgraph.run.planning import plan_for, read_plan
from realgraph.run.requests import request_for
from realgraph.run.running import job_of, owned
from realgraph.run_file.compose import Checked, check_run
from realgraph.runtime.job.run_folder import RunFolder, write_atomic
from realgraph.runtime.master.master import Master, RunOutcome
from realgraph.runtime.master.observer import Observers
from realgraph.runtime.master.records import TraceFile
from realgraph.runtime.master.startup import PROGRAM
from realgraph.runtime.processes.launcher import LaunchError
from realgraph.runtime.processes.local import KeptLauncher
from realgraph.screen.output import say, say_warnings
from realgraph.screen.terminal import Terminal, run_terminal

DIFFERENT, INTERRUPTED = 3, 130
TRACE_BYTES = 1 << 26
KEPT_OUT = ("wait", "drop")  # what a run may do with samples over its bound; else they are trained on, or masked


class Rehearsed(Struct, frozen=True):
    """One of the two runs of a rehearsal."""

    outcome: RunOutcome
    seen: StepsSeen
    sizes: tuple[Counted, ...]
    misordered: tuple[str, ...]  # devices that ran their calls in another order than the plan's
    seconds: float  # starting the processes counts


def rehearse_command(file: Path, overrides: Sequence[str], plan_file: Path | None, keep: Path | None) -> None:
    """Rehearse a plan; exits with 3 where it fails or its numbers are not those of one process. Raises ConfigError."""
    console = run_terminal()
    checked = check_run(file, overrides, weights=False)
    say_warnings(checked.warnings)
    request = request_for(checked)
    with _home(keep) as home, closing(KeptLauncher(PROGRAM, THREADS)) as launcher:
        plan = read_plan(plan_file, request) if plan_file is not None else plan_for(checked, request)
        say_warnings(departed(checked, plan, request))
        scale = scale_of(request, plan)
        toy = toy_run(checked, scale, home)
        _say_plan(plan, request, scale, console)
        console.print(toy.data, soft_wrap=True)
        _write_models(toy, home, launcher)
        planned = _run(*_planned(toy, plan, request.cluster, scale), home / "planned", launcher)
        alone = _run(*_alone(toy), home / "alone", launcher) if planned.outcome.ok else None
    bound = checked.run.staleness if checked.run.overdue in KEPT_OUT else math.inf
    _conclude((planned, alone), bound if plan.staleness else None, console)


@contextmanager
def _home(keep: Path | None) -> Iterator[Path]:
    """The folder of everything that a rehearsal makes: `keep`, which must be new, or one that goes with it."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="realgraph-rehearsal-") as folder:
            yield Path(folder)
        return
    home = keep.expanduser().absolute()
    try:
        home.mkdir(parents=True)
    except OSError as error:
        text = f"{home} can't be made: {error.strerror or error}"
        raise ConfigError([Problem(Where("command line"), text, "name a new folder with --keep")]) from error
    yield home


def _write_models(toy: ToyRun, home: Path, launcher: KeptLauncher) -> None:
    """Exits where they can't be written."""
    payload = msgspec.msgpack.encode(toy.models)
    try:
        asyncio.run(launcher.call(write_toy_models, payload, home / "models.log"))
    except LaunchError as error:
        say(f"error: the rehearsal's models could not be written: {error}", err=True)
        sys.exit(DIFFERENT)


_ToRun = tuple[Checked, PlanRequest, Plan]


def _planned(toy: ToyRun, plan: Plan, cluster: Cluster, scale: ToyScale) -> _ToRun:
    """The toy run by the plan. Raises ConfigError where the engines can't follow it."""
    checked = on_cluster(toy.checked, cluster)
    request = request_for(checked)
    return checked, request, toy_plan(plan, request, scale, toy.typical)


def _alone(toy: ToyRun) -> _ToRun:
    """The toy run on one process, synchronously where it can be."""
    checked = on_cluster(toy.checked, None)
    request = request_for(checked)
    return checked, request, plan_for(checked, request)


def _run(checked: Checked, request: PlanRequest, plan: Plan, root: Path, launcher: KeptLauncher) -> Rehearsed:
    folder = RunFolder(root)
    job = job_of(checked, request, plan, folder)
    seen = StepsSeen()
    began = time.monotonic()
    with owned(folder):
        write_atomic(folder.plan, plan_to_json(plan).encode())
        observers = Observers((seen, TraceFile(folder.trace, TRACE_BYTES)))
        try:
            outcome = asyncio.run(Master(job, folder, observers, launcher=launcher).run())
        finally:
            observers.close()
    seconds = time.monotonic() - began
    if not outcome.ok:
        return Rehearsed(outcome, seen, (), (), seconds)
    streams = frozenset(request.graph.generates if len(request.graph.generates) > 1 else ())
    wrong = () if plan.staleness else tuple(misordered(plan, seen, STEPS, streams))
    return Rehearsed(outcome, seen, counted_bytes(seen, request, plan), wrong, seconds)


# --- what is printed --------------------------------------------------------------------------------------------------


def _say_plan(plan: Plan, request: PlanRequest, scale: ToyScale, console: Terminal) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("call", "layout", "devices"):
        table.add_column(name)
    for name, allocation in plan.allocations.items():
        mesh = allocation.layout.mesh
        table.add_row(name, layout_text(allocation.layout), f"{mesh.first} to {mesh.first + mesh.n_devices - 1}")
    console.print(table)
    devices = request.cluster.n_devices
    console.print(
        f"{devices} processes here in the place of {devices} x {request.cluster.kind}; samples of up to "
        f"{scale.sample} tokens in the place of {scale.prompt + scale.response}",
        soft_wrap=True,
    )
    if request.engine.own_devices:
        console.print(f"embedded engines generate here in the place of {request.engine.name}", soft_wrap=True)


def _conclude(runs: tuple[Rehearsed, Rehearsed | None], bound: float | None, console: Terminal) -> None:
    """Print both columns, and exit where they are not alike. bound: of an asynchronous plan's staleness."""
    planned, alone = runs
    for run in (planned, alone):
        if run is not None and not run.outcome.ok:
            _failed(run)
    assert alone is not None  # the plan's run is fine
    asynchronous = bound is not None
    rows = list(compared(planned.seen.metrics, alone.seen.metrics, STEPS, asynchronous=asynchronous))
    console.print(_metrics_table(rows))
    console.print(_sizes_table(planned.sizes, alone.sizes))
    for name, run in (("the plan", planned), ("one process", alone)):
        console.print(f"calls by {name}, as they began: {', '.join(run.seen.order)}", soft_wrap=True)
    if bound is not None:
        text = "the plan is asynchronous: which samples a step trains on depends on the clock; their ages are looked at"
        console.print(text, soft_wrap=True)
    sizes = [*planned.sizes, *alone.sizes]
    wrong = [f"{row.metric} of step {row.step + 1}" for row in rows if not row.alike]
    wrong += [f"{size.what} of {size.call}" for size in sizes if not size.alike]
    old = too_old(planned.seen.metrics, bound) if bound is not None else ()
    for what, texts in (("an order of calls", (*planned.misordered, *alone.misordered)), ("an age of samples", old)):
        for text in texts:
            say(f"error: {text}", err=True)
            wrong.append(what)
    n = len(rows) + sum(size.predicted is not None for size in sizes)
    took = f"{planned.seconds:.0f} s by the plan, {alone.seconds:.0f} s by one process"
    if wrong or not rows:
        text = f"{len(wrong)} of {n} numbers differ from those of one process, or of the plan"
        say(f"error: {text}: {', '.join(wrong)} ({took})", err=True)
        sys.exit(DIFFERENT)
    console.print(f"the plan runs: {n} numbers are those of one process, or of the plan ({took})", soft_wrap=True)


def _failed(run: Rehearsed) -> None:
    """Say why a run of the rehearsal ended, and exit."""
    say(f"error: the rehearsal failed: {run.outcome.reason}", err=True)
    failure = run.outcome.failure
    if failure is not None and failure.detail:
        say(failure.detail.rstrip(), err=True)
    sys.exit(INTERRUPTED if run.outcome.interrupted else DIFFERENT)


def _metrics_table(rows: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("metric")
    for name in ("by the plan", "by one process", ""):
        table.add_column(name, justify="right")
    for row in rows:
        mark = "" if row.alike else "differs"
        table.add_row(str(row.step + 1), row.metric, _number(row.planned), _number(row.alone), mark)
    return table


def _sizes_table(planned: Sequence[Counted], alone: Sequence[Counted]) -> Table:
    """Bytes of both runs, each beside what predicts them: moved ones of all workers in both steps, held ones of the
    fullest."""
    table = Table(box=None, pad_edge=False)
    for name in ("run", "call", "bytes"):
        table.add_column(name)
    for name in ("counted", "predicted", ""):
        table.add_column(name, justify="right")
    for run, sizes in (("the plan", planned), ("one process", alone)):
        for size in sizes:
            predicted = "-" if size.predicted is None else f"{size.predicted:,}"
            mark = "" if size.alike else "differs"
            table.add_row(run, size.call, size.what, f"{size.counted:,}", predicted, mark)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.10g}"
