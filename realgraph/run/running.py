"""Turns a checked run into a Job in a run directory. Imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import chain, count
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.yaml.document import COMMAND_LINE
from realgraph.planner.plan.codec import plan_to_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.cost_table import CostTable, load_costs
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.streams import gives_up_caches
from realgraph.run.planning import plan_for, read_plan
from realgraph.run.requests import RequestOptions, request_for
from realgraph.run_file.compose import Checked, check_run
from realgraph.run_file.function_variables import refuse_unset
from realgraph.run_file.resolved import resolved_text
from realgraph.run_file.user_code import run_directory
from realgraph.runtime.data.sums import sums_of, sums_of_frozen
from realgraph.runtime.job.evaluations import eval_on_mistake
from realgraph.runtime.job.job import Job, SearchSpec
from realgraph.runtime.job.run_folder import RunFolder, exclusive, write_atomic
from realgraph.runtime.job.samples import with_gathering
from realgraph.runtime.master.checkpoint_folders import point_best, set_aside
from realgraph.runtime.master.checkpoints import Damaged, read_state
from realgraph.runtime.master.records import drop_repeated, has_begun
from realgraph.runtime.processes.environment import variables


class PreparedRun(Struct, frozen=True):
    """A run that is ready to start."""

    job: Job
    folder: RunFolder  # its directory
    checked: Checked
    request: PlanRequest
    config: str  # the resolved run file
    resume: Path | None = None  # the checkpoint that it goes on from
    begun_at: int = 0  # completed steps of the weights, of a run that has no steps of its own
    damaged: tuple[Damaged, ...] = ()  # newer checkpoints than that one, which are passed over


@contextmanager
def owned(folder: RunFolder) -> Iterator[None]:
    """Have the run directory to oneself. Raises ConfigError where another run has it, or it can't be written to."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder))
        except BlockingIOError:
            text = f"another run is writing to {folder.root}"
            raise ConfigError([Problem(Where(path="$.outputs.dir"), text, "wait for it, or choose another")]) from None
        except OSError as error:
            raise unwritable_folder(folder, error) from None
        yield


def unwritable_folder(folder: RunFolder, error: OSError) -> ConfigError:
    """The run directory can't be written to."""
    name = str(error.filename or folder.root)
    at = "" if name == str(folder.root) else f" at {name}"
    text = f"the run directory {folder.root} can't be written to{at}: {error.strerror or error}"
    hint = "make room, or repair it; a new run may have another outputs.dir"
    return ConfigError([Problem(Where(path="$.outputs.dir"), text, hint)])


def prepare(
    file: Path, overrides: Sequence[str], plan_file: Path | None, costs_file: Path | None = None
) -> PreparedRun:
    """Check, plan and name a new run. Nothing is written. costs_file: a table of measured costs, or a finished run.

    The run's directory is `outputs.dir`, which like all paths of a run file is relative to that file; where nobody
    names one, `runs/<name>-<date>` of the working directory. Raises ConfigError.
    """
    return prepare_checked(check_run(file, overrides), plan_file, costs_file)


def prepare_checked(checked: Checked, plan_file: Path | None = None, costs_file: Path | None = None) -> PreparedRun:
    """`prepare` for a run that is checked already."""
    refuse_unset(checked, variables())
    request = request_with(checked, costs_file)
    plan = read_plan(plan_file, request) if plan_file is not None else plan_for(checked, request)
    folder = RunFolder(root_of(checked))
    job = job_of(checked, request, plan, folder)
    return PreparedRun(job, folder, checked, request, resolved_text(checked.composed))


def root_of(checked: Checked) -> Path:
    """The directory of a new run. Absolute."""
    named = checked.run.outputs.dir
    root = Path(named) if named else Path("runs") / f"{checked.name}-{datetime.now():%Y%m%d-%H%M%S}"
    return root.expanduser().absolute()


def request_with(checked: Checked, costs_file: Path | None) -> PlanRequest:
    """The planner's request for a run, with measured costs: a table, or a finished run. Raises ConfigError."""
    costs = load_costs(costs_file) if costs_file is not None else CostTable()
    return request_for(checked, asked=RequestOptions(costs=costs, costs_file=str(costs_file or "")))


def job_of(checked: Checked, request: PlanRequest, plan: Plan, folder: RunFolder) -> Job:
    """Everything the runtime needs. Raises ConfigError where the plan has no engine that could evaluate as asked."""
    run = checked.run
    on = run.eval.on if run.eval is not None and run.eval.active else None
    if on is not None and (mistake := eval_on_mistake(checked.graph, plan, on)) is not None:
        raise ConfigError([Problem(checked.where("$.eval.on"), *mistake, "eval")])
    return Job(
        name=checked.name,
        graph=with_gathering(checked.graph),
        plan=plan,
        cluster=request.cluster,
        data=run.data,
        batch=run.batch,
        steps=run.steps,
        seed=run.seed,
        run_dir=str(folder.root),
        user_dir=str(checked.folder),
        staleness=run.staleness,
        gives_up_caches=gives_up_caches(request, plan),
        overdue=run.overdue,
        eval=run.eval,
        checkpoint=run.checkpoint,
        outputs=run.outputs,
        runtime=run.runtime,
        rollout=run.rollout,
        params=dict(run.params),
        search=SearchSpec(run.allocation, run.constraints, run.memory),
    )


def beside(prepared: PreparedRun, job: Job, what: str) -> PreparedRun:
    """The run with another job, in a directory of its own next to it: `<run>-<what>`, or `<run>-<what>-2`, ...

    A run directory may have been moved since its run file was written: next to it is where it lies now.
    """
    root, named = prepared.folder.root, prepared.checked.where("$.outputs.dir").file == COMMAND_LINE
    if (moved := run_directory(prepared.checked.composed.file)) is not None and not named:
        root = moved
    first = root.with_name(f"{root.name}-{what}")
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    own = RunFolder(next(path for path in chain([first], others) if not path.exists()))
    return msgspec.structs.replace(prepared, job=msgspec.structs.replace(job, run_dir=str(own.root)), folder=own)


def with_sums(job: Job) -> Job:
    """The job with the checksums of its data files and frozen models, which are read for it. Raises ConfigError."""
    frozen = sums_of_frozen(job.graph)
    return msgspec.structs.replace(
        job, data_sums=sums_of(job.data), eval_sums=sums_of(job.held_out), frozen_sums=frozen
    )


def refuse_unfree(checked: Checked) -> None:
    """`refuse_taken` before anybody has waited for a plan, and for a run that is under way. Raises ConfigError."""
    folder = RunFolder(root_of(checked))
    if folder.job.exists():
        with owned(folder):
            refuse_taken(checked, folder)


def refuse_taken(checked: Checked, folder: RunFolder) -> None:
    """Raises ConfigError where the directory of a new run, which is ours alone, holds another run that has begun."""
    if folder.job.exists() and has_begun(folder.metrics):
        text = f"{folder.root} holds a run already"
        going_on = f"go on with it: realgraph run --resume {folder.root}"
        hint = f"{going_on if folder.steps() else 'it saved nothing: remove it'}; or choose another outputs.dir"
        raise ConfigError([Problem(checked.where("$.outputs.dir"), text, hint)])


def claim(prepared: PreparedRun) -> None:
    """Write what a run directory starts with; of a resumed run, what it has changed.

    The caller owns the directory, which is not taken. Raises OSError.
    """
    folder = prepared.folder
    folder.logs.mkdir(parents=True, exist_ok=True)
    for checkpoint in prepared.damaged:
        set_aside(checkpoint.path)
    if prepared.resume is not None:
        state = read_state(prepared.resume)
        point_best(folder, state.best_step)
        for file in folder.samples.glob("worker-*.jsonl"):
            drop_repeated(file, state.next_group, frozenset(state.open))
    write_atomic(folder.config, prepared.config.encode())
    write_atomic(folder.plan, plan_to_json(prepared.job.plan).encode())
    write_atomic(folder.job, msgspec.json.format(msgspec.json.encode(prepared.job)))
