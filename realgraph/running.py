"""From a checked run to a Job in a run directory, and back again for a resume. Imports no torch."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.compose import Checked, check_run
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Train
from realgraph.planner.codec import plan_to_json
from realgraph.planner.plan import PLAN_FORMAT, Plan
from realgraph.planner.request import PlanRequest
from realgraph.planning import plan_for, read_plan, request_for
from realgraph.resolved import resolved_text
from realgraph.runtime.job import Job
from realgraph.runtime.run_folder import RunFolder, write_atomic

# What a resumed run may change: nothing that its next losses depend on.
CHANGEABLE = ("name", "steps", "eval", "checkpoint", "outputs", "runtime")


class Prepared(Struct, frozen=True):
    """A run that is ready to start: its job, its directory, and the checkpoint it goes on from."""

    job: Job
    folder: RunFolder
    checked: Checked
    request: PlanRequest
    config: str  # the resolved run file
    resume: Path | None = None


def prepare(file: Path, overrides: Sequence[str], plan_file: Path | None) -> Prepared:
    """Check, plan and name a new run. Nothing is written. Raises ConfigError."""
    checked = check_run(file, overrides)
    request = request_for(checked)
    plan = read_plan(plan_file, request) if plan_file is not None else plan_for(checked, request)
    run = checked.run
    root = Path(run.outputs.dir) if run.outputs.dir else Path("runs") / f"{checked.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = RunFolder(root.expanduser().absolute())
    job = job_of(checked, request, plan, folder)
    return Prepared(job, folder, checked, request, resolved_text(checked.composed))


def job_of(checked: Checked, request: PlanRequest, plan: Plan, folder: RunFolder) -> Job:
    """Everything the runtime needs."""
    run = checked.run
    return Job(
        name=checked.name,
        graph=checked.graph,
        plan=plan,
        cluster=request.cluster,
        data=run.data,
        batch=run.batch,
        steps=run.steps,
        seed=run.seed,
        run_dir=str(folder.root),
        user_dir=str(checked.folder),
        staleness=run.staleness,
        overdue=run.overdue,
        eval=run.eval,
        checkpoint=run.checkpoint,
        outputs=run.outputs,
        runtime=run.runtime,
        params=dict(run.params),
    )


def claim(prepared: Prepared) -> None:
    """Write what a run directory starts with; of a resumed run, what it has changed.

    Raises ConfigError where a new run's directory holds another run, and OSError.
    """
    folder = prepared.folder
    if prepared.resume is None and folder.job.exists():
        text = f"{folder.root} holds a run already"
        hint = f"go on with it: realgraph run --resume {folder.root}; or choose another outputs.dir"
        raise ConfigError([Problem(Where(path="$.outputs.dir"), text, hint)])
    write_atomic(folder.config, prepared.config.encode())
    write_atomic(folder.plan, plan_to_json(prepared.job.plan).encode())
    write_atomic(folder.job, msgspec.json.format(msgspec.json.encode(prepared.job)))


def prepare_resume(root: Path, overrides: Sequence[str]) -> Prepared:
    """Go on with a run from its newest checkpoint, under the plan it had. Raises ConfigError."""
    folder = RunFolder(root.expanduser().absolute())
    if not folder.job.is_file():
        raise ConfigError([Problem(Where(str(root)), "no run lies here: there is no job.json", "name a run directory")])
    old = _old_job(folder)
    checkpoint = folder.latest()
    if checkpoint is None:
        text = "the run has no checkpoint to go on from"
        hint = f"start it anew: realgraph run {folder.config} outputs.dir=ANOTHER"
        raise ConfigError([Problem(Where(str(root)), text, hint)])
    checked = check_run(folder.config, overrides)
    request = request_for(checked)
    new = msgspec.structs.replace(job_of(checked, request, old.plan, folder), user_dir=old.user_dir)
    refuse_changes(old, new, checked)
    return Prepared(new, folder, checked, request, resolved_text(checked.composed), checkpoint)


class _Planned(Struct, frozen=True):
    """Of a plan, or of a job with one, what every version has."""

    format: int = PLAN_FORMAT
    plan: "_Planned | None" = None


def _old_job(folder: RunFolder) -> Job:
    """The job of a run that goes on. Raises ConfigError, with a word for plans of other versions."""
    try:
        content = folder.job.read_bytes()
        head = msgspec.json.decode(content, type=_Planned).plan
        if head is not None and head.format != PLAN_FORMAT:
            text = f"this run's plan has format {head.format}; this version reads format {PLAN_FORMAT}"
            hint = f"go on with the version that began it, or anew: realgraph run {folder.config} outputs.dir=ANOTHER"
            raise ConfigError([Problem(Where(str(folder.job), path="$.plan.format"), text, hint, "plan_format")])
        return msgspec.json.decode(content, type=Job)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError([Problem(Where(str(folder.job)), f"the run can't be read: {error}")]) from None


def refuse_changes(old: Job, new: Job, checked: Checked) -> None:
    """Raises ConfigError for every change that would make the resumed run another run."""
    problems = []
    for name in Job.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if name not in (*CHANGEABLE, "run_dir") and msgspec.json.encode(before) != msgspec.json.encode(after):
            text = f"a resumed run can't change `{name}`: it would no longer be the run that was interrupted"
            hint = (
                f"it may change {', '.join(CHANGEABLE)}; for anything else start a new run from the checkpoint's model"
            )
            problems.append(Problem(checked.where(f"$.{name}"), text, hint))
    if old.steps != new.steps:
        for name, call in new.graph.calls.items():
            if isinstance(call, Train) and call.optimizer.schedule != "constant":
                schedule = call.optimizer.schedule
                text = f"the {schedule} schedule of {name!r} depends on steps ({old.steps}), which can't change"
                problems.append(Problem(checked.where("$.steps"), text, "a constant schedule can be made longer"))
    if problems:
        raise ConfigError(problems)
