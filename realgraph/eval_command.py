"""`realgraph eval`: one held-out evaluation by the run's own runtime, with no step of training."""

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec

from realgraph.console import RunConsole
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Generate
from realgraph.run_command import FAILED, execute, report
from realgraph.running import Prepared, prepare
from realgraph.runtime.job import CheckpointSpec, EvalSpec
from realgraph.runtime.run_folder import RunFolder


def eval_command(file: Path, overrides: Sequence[str], checkpoint: Path | None) -> None:
    """Evaluate the role that generates; exits with 3 where it failed. Raises ConfigError."""
    prepared = for_evaluation(prepare(file, overrides, None), checkpoint)
    outcome = execute(prepared, RunConsole())
    report(outcome, prepared)
    if not outcome.ok:
        sys.exit(FAILED)


def for_evaluation(prepared: Prepared, checkpoint: Path | None) -> Prepared:
    """The same run with no steps and one evaluation at its start, of `checkpoint` if one is given."""
    job = prepared.job
    spec = job.eval or EvalSpec()
    if spec.data is None and Path(job.data.path).exists():
        text = "the run names no held-out data"
        hint = "add eval: {data: {path: ..., columns: ...}} to the run file"
        raise ConfigError([Problem(prepared.checked.where("$.eval"), text, hint)])
    graph = job.graph
    if checkpoint is not None:
        roles = {call.model for call in graph.calls.values() if isinstance(call, Generate)}
        models = dict(graph.models)
        for role in roles:
            models[role] = msgspec.structs.replace(models[role], path=str(model_folder(checkpoint, role)))
        graph = msgspec.structs.replace(graph, models=models)
    changed = msgspec.structs.replace(
        job,
        graph=graph,
        steps=0,
        eval=msgspec.structs.replace(spec, every=spec.every or 1, at_start=True),
        checkpoint=CheckpointSpec(),
    )
    folder = beside(prepared.folder)
    changed = msgspec.structs.replace(changed, run_dir=str(folder.root))
    return msgspec.structs.replace(prepared, job=changed, folder=folder)


def beside(folder: RunFolder) -> RunFolder:
    """A directory of its own for an evaluation, next to the run's: `<run>-eval`, or `<run>-eval-2`, ..."""
    first = folder.root.with_name(f"{folder.root.name}-eval")
    return RunFolder(next(path for path in _numbered(first) if not path.exists()))


def _numbered(first: Path) -> Iterator[Path]:
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def model_folder(path: Path, role: str | None = None) -> Path:
    """The model in a model folder, a checkpoint (its `role`) or a run directory (its best or newest checkpoint).

    Raises ConfigError naming what was looked for.
    """
    path = path.expanduser().absolute()
    for base in (path, path / "checkpoints" / "best", *sorted((path / "checkpoints").glob("step-*"), reverse=True)):
        if (base / "config.json").is_file():
            return base
        parts = [base / role] if role is not None else [base / "actor", *sorted(base.glob("*"))]
        for part in parts:
            if (part / "config.json").is_file():
                return part
    hint = "name a folder with a config.json, a checkpoint, or a run directory that has a checkpoint"
    raise ConfigError([Problem(Where(str(path)), "no model lies here", hint)])
