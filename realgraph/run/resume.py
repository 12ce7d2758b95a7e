"""A run that goes on: read from its directory, compared with what it was, from its newest intact checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.graphs.spec import Train
from realgraph.graphs.yaml.document import COMMAND_LINE, child
from realgraph.graphs.yaml.files import read_file
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.plan.plan import PLAN_FORMAT, Plan
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.run.planning import plan_for, read_plan
from realgraph.run.requests import request_for
from realgraph.run.running import PreparedRun, job_of, owned, request_with, unwritable_folder, with_sums
from realgraph.run_file.compose import Checked, check_run
from realgraph.run_file.function_variables import refuse_unset
from realgraph.run_file.resolved import resolved_text
from realgraph.runtime.data.sums import differences
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.manifest import FileSum
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.checkpoint_folders import recover
from realgraph.runtime.master.checkpoints import Damaged, newest_intact, step_of
from realgraph.runtime.master.records import has_begun
from realgraph.runtime.processes.environment import variables

# What a resumed run may change: nothing that its next losses depend on, and by another plan on nothing but rounding.
CHANGEABLE = ("name", "steps", "eval", "checkpoint", "outputs", "runtime")
BY_PLAN = ("plan", "cluster")
_BY_PLAN_HINT = "add --replan, or --plan PLAN, to go on under another plan: losses are equal to rounding then"
# These may differ, or are compared by themselves.
APART = ("run_dir", "data_sums", "eval_sums", "frozen_sums", "gives_up_caches", "search")
AS_WRITTEN = ("data", "batch", "rollout", "params")  # sections of the run file that a job has as they are


class ResumeOptions(Struct, frozen=True):
    """Options of going on, beside overrides."""

    new_data: bool = False  # data files and frozen models may differ from those at the start
    plan_file: Path | None = None  # go on under this plan
    replan: bool = False  # go on under a plan that is searched anew
    costs_file: Path | None = None  # measured costs for another plan

    @property
    def plans(self) -> bool:
        """True where the run goes on under another plan."""
        return self.replan or self.plan_file is not None


@contextmanager
def resumed(root: Path, overrides: Sequence[str], options: ResumeOptions = ResumeOptions()) -> Iterator[PreparedRun]:
    """The run of a directory that is the caller's own from before it is read. Raises ConfigError."""
    with owned(run_at(root)):
        yield prepare_resume(root, overrides, options)


def run_at(root: Path) -> RunFolder:
    """A directory that holds a run. Raises ConfigError."""
    folder = RunFolder(root.expanduser().absolute())
    if not folder.job.is_file():
        above = next((path for path in folder.root.parents if RunFolder(path).job.is_file()), None)
        hint = "name a run directory" + (f": {above}" if above is not None else "")
        raise ConfigError([Problem(Where(str(root)), "this is not a run directory: it has no job.json", hint)])
    return folder


def prepare_resume(root: Path, overrides: Sequence[str], options: ResumeOptions = ResumeOptions()) -> PreparedRun:
    """Go on with a run from its newest intact checkpoint, under the plan it had or another one: checkpoints know no
    layout. The caller owns the directory. Raises ConfigError.
    """
    folder = run_at(root)
    old = read_job(folder)
    try:
        recover(folder)
    except OSError as error:
        raise unwritable_folder(folder, error) from None
    checkpoint, damaged = newest_intact(folder)
    if checkpoint is None:
        raise _nothing_left(folder, damaged)
    if not folder.config.exists():
        hint = f"put it back, or start a new run from the newest checkpoint: models.ROLE.path={checkpoint}/ROLE"
        raise ConfigError([Problem(Where(str(folder.config)), "the run file of this run is gone", hint)])
    checked = check_run(folder.config, overrides)
    _refuse_overrides(checked, folder, step_of(checkpoint))
    refuse_unset(checked, variables())
    plan, request = _planned_anew(checked, options) if options.plans else _kept_plan(old, checked)
    new = with_sums(replace(job_of(checked, request, plan, folder), user_dir=old.user_dir))
    if not options.plans:
        new = replace(new, gives_up_caches=old.gives_up_caches)  # it follows from the plan
    if not options.plans:
        _refuse_search(old, new, checked)
    refuse_changes(old, new, checked, (*CHANGEABLE, *(BY_PLAN if options.plans else ())))
    if not options.new_data:
        _refuse_data(old, new, checked)
    if not options.plans:
        _refuse_plan(old, request, folder)
    return PreparedRun(new, folder, checked, request, resolved_text(checked.composed), checkpoint, damaged=damaged)


def _planned_anew(checked: Checked, options: ResumeOptions) -> tuple[Plan, PlanRequest]:
    """The plan that the run goes on under, on the machine as it is now. Raises ConfigError."""
    request = request_with(checked, options.costs_file)
    plan = read_plan(options.plan_file, request) if options.plan_file is not None else plan_for(checked, request)
    return plan, request


def _kept_plan(old: Job, checked: Checked) -> tuple[Plan, PlanRequest]:
    request = request_for(checked)
    return old.plan, replace(request, cluster=_same_machine(old.cluster, request.cluster, checked.run.cluster))


def _nothing_left(folder: RunFolder, damaged: Sequence[Damaged]) -> ConfigError:
    elsewhere = " outputs.dir=ANOTHER" if has_begun(folder.metrics) else ""
    hint = f"start a new run: realgraph run {folder.config}{elsewhere}"
    where = Where(str(folder.root))
    if not damaged:
        return ConfigError([Problem(where, "the run has no checkpoint to resume from", hint)])
    return ConfigError(
        Problem(Where(str(one.path)), f"the checkpoint is damaged: {one.reason}", hint) for one in damaged
    )


class _Planned(Struct, frozen=True):
    """The fields of a plan, or of a job with one, that every version has."""

    format: int = PLAN_FORMAT
    plan: "_Planned | None" = None


def read_job(folder: RunFolder) -> Job:
    """The job of a run. Raises ConfigError, with a word for plans of other versions."""
    try:
        content = read_file(folder.job)
        head = msgspec.json.decode(content, type=_Planned).plan
        if head is not None and head.format != PLAN_FORMAT:
            text = f"this run's plan has format {head.format}; this version reads format {PLAN_FORMAT}"
            anew = f"realgraph run {folder.config} outputs.dir=ANOTHER"
            hint = f"resume with the version that started it, or start a new run: {anew}"
            raise ConfigError([Problem(Where(str(folder.job), path="$.plan.format"), text, hint, "plan_format")])
        return msgspec.json.decode(content, type=Job)
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error)
    except (msgspec.MsgspecError, RecursionError) as error:
        why = str(error)
    hint = f"put it back, or start a new run from a checkpoint: models.ROLE.path={folder.checkpoints}/step-N/ROLE"
    raise ConfigError([Problem(Where(str(folder.job)), f"the run can't be read: {why}", hint)])


# --- what must be equal -----------------------------------------------------------------------------------------------


def _refuse_search(old: Job, new: Job, checked: Checked) -> None:
    """Raises ConfigError for sections that only a new plan follows, whether overrides or hands have changed them."""
    if old.search is None or new.search is None:
        return
    calls = {**old.search.allocation, **new.search.allocation}  # one without a pin has one that sets nothing
    pins = [{call: one.allocation.get(call, Pin()) for call in calls} for one in (old.search, new.search)]
    before = msgspec.to_builtins(replace(old.search, allocation=pins[0]))
    after = msgspec.to_builtins(replace(new.search, allocation=pins[1]))
    paths = [_first_difference(before[name], after[name], f"$.{name}") for name in before]
    text = "a resumed run keeps its plan, which does not follow this"
    if problems := [Problem(checked.where(path), text, _BY_PLAN_HINT) for path in paths if path]:
        raise ConfigError(problems)


def _refuse_overrides(checked: Checked, folder: RunFolder, done: int) -> None:
    """Raises ConfigError for what a run can't follow that has its directory already, and `done` steps."""
    problems = []
    where, named = checked.where("$.outputs.dir"), checked.run.outputs.dir
    if named and where.file == COMMAND_LINE and Path(named).expanduser().resolve() != folder.root.resolve():
        hint = "leave it out; to have the run elsewhere, move or copy its directory first"
        problems.append(Problem(where, f"a resumed run stays in its directory, {folder.root}", hint))
    if (steps := checked.run.steps) < done:
        text = f"{done} steps of the run are done already: it can't end after {steps}"
        problems.append(Problem(checked.where("$.steps"), text, f"set at least {done}"))
    if problems:
        raise ConfigError(problems)


def _same_machine(old: Cluster, new: Cluster, spec: ClusterSpec) -> Cluster:
    """The cluster now, with the numbers that nobody has written but this machine was measured for as they were."""
    measured = {
        "nodes": spec.nodes is None,
        "devices_per_node": spec.devices is None,
        "memory_bytes": spec.memory_gb is None,
        "host_memory_bytes": spec.host_memory_gb is None,
        **dict.fromkeys((name for name in Cluster.__struct_fields__ if name.endswith("_per_s")), True),
        "flops": True,
    }
    if old.kind != new.kind:
        return new
    return replace(new, **{name: getattr(old, name) for name, is_measured in measured.items() if is_measured})


def refuse_changes(old: Job, new: Job, checked: Checked, changeable: Sequence[str] = CHANGEABLE) -> None:
    """Raises ConfigError for every change that would make the resumed run another run."""
    problems = []
    changed = {name: path for name in Job.__struct_fields__ if (path := _changed_path(old, new, name))}
    names = [name for name in changed if name not in (*changeable, *APART)]
    for name in names:
        path = changed[name]
        if path == "$.graph" and len(names) > 1:
            continue  # none of its values: it follows from what else has changed
        text = f"a resumed run can't change `{path[2:]}`: it would no longer be the run that was interrupted"
        hint = f"it may change {', '.join(CHANGEABLE)}; for anything else start a new run from the checkpoint's model"
        if name in BY_PLAN:
            hint = _BY_PLAN_HINT
        problems.append(Problem(checked.where(path), text, hint))
    if old.steps != new.steps:
        for name, call in new.graph.calls.items():
            if isinstance(call, Train) and call.optimizer.schedule != "constant":
                schedule = call.optimizer.schedule
                text = f"the {schedule} schedule of {name!r} depends on steps ({old.steps}), which can't change"
                problems.append(Problem(checked.where("$.steps"), text, "a constant schedule can be made longer"))
    if problems:
        raise ConfigError(problems)


def _changed_path(old: Job, new: Job, name: str) -> str:
    """The YAML path of the first value that differs in a field of a job; '' where none does."""
    before, after = msgspec.to_builtins(getattr(old, name)), msgspec.to_builtins(getattr(new, name))
    if msgspec.json.encode(before) == msgspec.json.encode(after):
        return ""
    if name in AS_WRITTEN:
        return _first_difference(before, after, f"$.{name}")
    if name == "graph":
        parts = (_first_difference(before[part], after[part], f"$.{part}") for part in ("calls", "models"))
        if path := next(filter(None, parts), ""):
            return path
    return f"$.{name}"


def _first_difference(before: object, after: object, path: str) -> str:
    """The path of the first value that differs; '' where none does."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return path if msgspec.json.encode(before) != msgspec.json.encode(after) else ""
    for key in {**before, **after}:
        if found := _first_difference(before.get(key), after.get(key), child(path, key)):
            return found
    return ""


def _refuse_data(old: Job, new: Job, checked: Checked) -> None:
    """Raises ConfigError for data files that have changed; held-out ones where the run names the same as before; and
    for frozen models that have."""
    problems = [*_changed(old.data_sums, new.data_sums, checked.where("$.data.path"))]
    if old.held_out == new.held_out:
        problems += _changed(old.eval_sums, new.eval_sums, checked.where("$.eval.data.path"))
    for role in old.frozen_sums.keys() & new.frozen_sums.keys():
        what = f"of the frozen model {role!r} "
        where = checked.where(f"$.models.{role}.path")
        problems += _changed(old.frozen_sums[role], new.frozen_sums[role], where, what, "losses")
    if problems:
        raise ConfigError(problems)


def _changed(
    before: Mapping[str, FileSum], now: Mapping[str, FileSum], where: Where, whose: str = "", follow: str = "samples"
) -> Iterator[Problem]:
    """A problem for each file that is not what it was. whose: says what it belongs to; follow: what depends on it."""
    for file, how in differences(before, now):
        text = f"{file} {whose}has changed since the run began: it {how}, and other {follow} would follow"
        yield Problem(where, text, "put the file back, or go on with it as it is now: --new-data", "data")


def _refuse_plan(old: Job, request: PlanRequest, folder: RunFolder) -> None:
    """Raises ConfigError for a plan that can't run: job.json is a file like any other. Its numbers are kept."""
    problems = validate(replace(old.plan, hashes=hashes(request)), request, str(folder.job))
    if problems:
        raise ConfigError(problems)
