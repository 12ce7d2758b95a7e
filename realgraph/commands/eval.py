"""`realgraph eval`: one held-out evaluation by the run's own runtime, with no step of training."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from realgraph.commands.run import FAILED, INTERRUPTED, execute, report
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.functions import scoring_call
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.run.running import PreparedRun, beside, prepare_checked
from realgraph.run_file.compose import Checked, check_run
from realgraph.run_file.eval_checks import scoring_mistakes
from realgraph.runtime.data.row_files import lacks_split
from realgraph.runtime.job.evaluations import evaluated_graph, scoring_of
from realgraph.runtime.job.job import CheckpointSpec, EvalSpec
from realgraph.runtime.job.manifest import MANIFEST, damage
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.screen.console import EvaluationLines
from realgraph.screen.terminal import run_terminal

OPTIMIZER = "optimizer"  # files of a checkpoint that only training reads
CONFIG = "config.json"


class _AnyCall(Struct, frozen=True):
    kind: str
    model: str = ""
    stop: tuple[str, ...] = ()


class _Graph(Struct, frozen=True):
    calls: dict[str, _AnyCall] = field(default_factory=dict)
    leading: str = ""

    @property
    def generates(self) -> list[_AnyCall]:
        """The calls that generate, the leading one first."""
        calls = sorted(self.calls.items(), key=lambda item: item[0] != self.leading)
        return [call for _, call in calls if call.kind == "generate"]


class _Data(Struct, frozen=True):
    """The part of a run's data that says how its chats were rendered."""

    chat: bool | None = None
    system: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] | None = None


class RunOfModel(Struct, frozen=True):
    """The part of a run's job.json that says what its models do."""

    data: _Data = _Data()
    graph: _Graph = _Graph()


def eval_command(file: Path, overrides: Sequence[str], checkpoint: Path | None) -> None:
    """Evaluate the role that generates, or those that are trained where none does. Exits with 3 where it failed, with
    130 where it was interrupted.

    Raises ConfigError.
    """
    prepared = for_evaluation(prepare_checked(evaluation_of(check_run(file, overrides))), checkpoint)
    step = prepared.begun_at
    what = f"{checkpoint or 'the model of the run file'}{f', after step {step}' if step else ''}"
    console = run_terminal()
    outcome = execute(prepared, console, view=EvaluationLines(console, what))
    report(outcome, prepared, console)
    if not outcome.ok:
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)


def evaluation_of(checked: Checked) -> Checked:
    """A run of nothing but its evaluation: where calls generate, those that train or serve training have no place in
    its plan. Raises ConfigError where there is nothing to evaluate by, or on."""
    run, graph = checked.run, checked.graph
    spec = run.eval or EvalSpec()
    if spec.data is None and lacks_split(run.data, "test"):
        text = "the run names no held-out data"
        hint = "add eval: {data: {path: ..., columns: ...}} to the run file"
        raise ConfigError([Problem(checked.where("$.eval"), text, hint)])
    spec = replace(spec, every=spec.every or 1, at_start=True, on=None)
    mistakes = scoring_mistakes(spec, checked.composed.spec)  # run files without `eval` come unchecked
    problems = [Problem(checked.where(path), text, hint, "eval") for path, text, hint in mistakes]
    if problems:
        raise ConfigError(problems)
    if not graph.generates:
        return replace(checked, run=replace(run, eval=spec))
    call, given = scoring_call(graph.calls, spec.call), run.constraints
    spec = replace(spec, call=call, key=scoring_of(graph, spec).key)  # which advantages say, that are left out
    graph = evaluated_graph(graph, call)
    share = [tuple(name for name in names if name in graph.calls) for names in given.share]
    forbid = {name: pins for name, pins in given.forbid.items() if name in graph.calls}
    constraints = replace(given, share=tuple(names for names in share if len(names) > 1), forbid=forbid)
    return replace(checked, graph=graph, run=replace(run, staleness=0, eval=spec, constraints=constraints))


def for_evaluation(prepared: PreparedRun, checkpoint: Path | None) -> PreparedRun:
    """The same run with no steps and one evaluation at its start, of `checkpoint` if one is given."""
    job = prepared.job
    graph, begun_at = job.graph, 0
    if checkpoint is not None:
        for role in evaluated_roles(graph):
            folder = model_folder(checkpoint, role)
            model = replace(graph.models[role], path=str(folder))
            graph, begun_at = replace(graph, models={**graph.models, role: model}), step_of(folder)
    changed = replace(job, graph=graph, steps=0, checkpoint=CheckpointSpec())
    return replace(beside(prepared, changed, "eval"), begun_at=begun_at)


def evaluated_roles(graph: Graph) -> tuple[str, ...]:
    """The roles whose weights an evaluation is of: the one that it generates by, else those that are trained."""
    trained = [name for name, call in graph.calls.items() if isinstance(call, Train)]
    return tuple(dict.fromkeys(graph.role(name) for name in graph.generates[:1] or trained))


def step_of(model: Path) -> int:
    """Completed steps of the weights in a checkpoint's folder, or in a role's within it; 0 where no name says so."""
    for path in (model.resolve(), model.resolve().parent):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match:
            return int(match.group(1))
    return 0


def model_folder(path: Path, role: str | None = None) -> Path:
    """The model in a model folder, a checkpoint (its `role`; without one, what `answering_roles` has first) or a run
    directory (its best or newest checkpoint).

    Raises ConfigError naming what was looked for, or the file of the model that is not what was written.
    """
    path = path.expanduser().absolute()
    folder = RunFolder(path)
    for base in (path, folder.best, *map(folder.checkpoint, reversed(folder.steps()))):
        if (base / CONFIG).is_file():
            roles = [""]
        else:
            roles = [role] if role is not None else answering_roles(base)[:1]
        for part in (base / one for one in roles):
            if (part / CONFIG).is_file():
                refuse_damage(part)
                return part
    hint = "name a folder with a config.json, a checkpoint, or a run directory that has a checkpoint"
    raise ConfigError([Problem(Where(str(path)), "there is no model here", hint)])


def answering_roles(checkpoint: Path) -> list[str]:
    """The roles in a checkpoint that answer prompts: those that generate in its run, by the leading call first. Where
    there is no telling, a role of the name `actor` or the only one. Raises ConfigError where others are as good."""
    found = sorted(part.name for part in checkpoint.glob("*") if (part / CONFIG).is_file())
    run = RunFolder(checkpoint.resolve().parent.parent).job
    if len(found) > 1 and run.is_file():
        calls = read_run(run).graph.generates
        roles = [role for role in dict.fromkeys(call.model for call in calls) if role in found]
        if roles:
            return roles
    if "actor" in found or len(found) < 2:
        return ["actor"] if "actor" in found else found
    text = f"there are several models: {', '.join(found)}"
    raise ConfigError(
        [Problem(Where(str(checkpoint)), text, f"name the folder of one, such as {checkpoint / found[0]}")]
    )


def read_run(job: Path) -> RunOfModel:
    """The run of a checkpoint, by its job.json. Raises ConfigError."""
    try:
        return msgspec.json.decode(job.read_bytes(), type=RunOfModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError([Problem(Where(str(job)), f"the model's run can't be read: {error}")]) from error


def refuse_damage(model: Path) -> None:
    """Compare a model of a checkpoint with what was written, the optimizer left out. Raises ConfigError."""
    checkpoint = model.parent
    if not (checkpoint / MANIFEST).exists():
        return  # a model folder of any other origin
    part = (f"{model.name}/", f"{model.name}/{OPTIMIZER}")
    reason = damage(checkpoint, *part)
    if reason:
        others = [path for path in sorted(checkpoint.parent.glob("step-*")) if path.name[5:].isdigit()]
        intact = [path for path in others if path != checkpoint.resolve() and not damage(path, *part)]
        hint = f"take another one: {intact[-1]}" if intact else ""
        raise ConfigError([Problem(Where(str(checkpoint.resolve())), f"the checkpoint is damaged: {reason}", hint)])
