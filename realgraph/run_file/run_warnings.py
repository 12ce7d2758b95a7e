"""Settings of a run file that nothing reads in this run, and what this host lacks: warnings. Refuses nothing."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.functions import scoring_call
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Advantage, Function, Inference, Train, role_of
from realgraph.graphs.steps import Overlong
from realgraph.graphs.yaml.document import COMMAND_LINE, Document
from realgraph.graphs.yaml.load import Resolved
from realgraph.graphs.yaml.merge import walk
from realgraph.run_file.run_spec import RunSpec
from realgraph.run_file.section_checks import Mistake
from realgraph.runtime.data.row_files import files_at
from realgraph.runtime.job.job import EvalSpec, OutputSpec, RuntimeSpec
from realgraph.runtime.job.launch import HostsLaunch, LaunchSpec
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.wire.interfaces import address_of_interface

OF_ENGINE_LOSS = ("min_engines", "replacements")
OF_SAMPLES = ("n", "temperature", "k", "threshold", "call", "key")  # of an evaluation
OF_ASYNCHRONY = ("interrupt", *OF_ENGINE_LOSS)
_PARAM = re.compile(r"\$\{params\.([^}.\[]+)\}")


def run_warnings(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    """All of them, but for `unread_params`."""
    yield from _rollout(run, graph)
    yield from _ages(run, graph)
    yield from _cut_samples(run, graph)
    yield from _evaluation(run, graph)
    yield from _data(run)
    yield from _outputs(run, graph)
    yield from _runtime(run, graph)
    yield from _launch(run.launch)
    for name in run.allocation:
        if name not in graph.calls:
            text = f"the call {name!r} is switched off, so it has no place"
            yield f"$.allocation.{name}", text, "leave it out, or switch it on"
    for name, role in run.models.items():
        if name in graph.models and role.revision is not None and role.path and Path(role.path).is_absolute():
            text = "a revision is of a model of the Hub, and the model is a local folder"
            yield f"$.models.{name}.revision", text, "leave it out"


def unread_params(graph: Document, resolved: Resolved) -> Iterator[Mistake]:
    """Parameters to which no value refers any more: all places of references to them have other values, or are gone."""
    kept = {name for _, value in walk(resolved.written.tree, "$") if isinstance(value, str) for name in _names(value)}
    defaults, final = dict(walk(graph.tree, "$")), dict(walk(resolved.document.tree, "$"))
    referring = dict[str, list[str]]()
    for path, value in defaults.items():
        for name in _names(value) if isinstance(value, str) else ():
            referring.setdefault(name, []).append(path)
    for name, paths in referring.items():
        param, left = f"$.params.{name}", [path for path in paths if path in final]
        written = resolved.document.where(param)
        default = final.get(param) == defaults.get(param)  # the graph's own, which the resolved file of a run has, too
        if name in kept or written == graph.where(param) or (default and written.file != COMMAND_LINE):
            continue
        other = next((path for path in left if final[path] != final.get(param)), "")
        if other:
            value, place = final[other], resolved.document.where(other)
            where = f"{place.file}:{place.line}" if place.line else place.file
            text = f"nothing follows it: {other[2:]} is {value} ({where}), in the place of ${{params.{name}}}"
            yield param, text, f"change {other[2:]} instead, or leave it out there"
        elif not left:
            text = f"nothing follows it: {paths[0][2:]}, which refers to it in the graph, is left out"
            yield param, text, "leave it out, too"


def _names(value: str) -> list[str]:
    return _PARAM.findall(value)


def changed_fields(section: Struct, default: Struct, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The fields of a section, or those of `names`, that have other values than by default."""
    for name in names or section.__struct_fields__:
        if getattr(section, name) != getattr(default, name):
            yield name


def _rollout(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    generates, default = graph.generates, RolloutSpec()
    if not generates:
        for name in changed_fields(run.rollout, default):
            yield f"$.rollout.{name}", "no call generates, so nothing reads it", "leave it out"
    elif not run.staleness:
        text = "it is for asynchronous runs, and this one is synchronous (staleness: 0)"
        for name in changed_fields(run.rollout, default, OF_ASYNCHRONY):
            yield f"$.rollout.{name}", text, "leave it out, or set staleness to 1 or more"
    elif len(generates) > 1:
        calls = " and ".join(map(repr, generates))
        text = f"{calls} generate: where several calls do, the loss of an engine ends the run, and none is replaced"
        for name in changed_fields(run.rollout, default, OF_ENGINE_LOSS):
            yield f"$.rollout.{name}", text, "leave it out; runtime.restarts goes on from the newest checkpoint"


def _ages(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    if run.overdue != "mask" and not run.staleness:
        text = "no sample is older than the weights that it trains (staleness: 0)"
        yield "$.overdue", text, "leave it out, or set staleness to 1 or more"


def _cut_samples(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    if run.data.truncated == "keep":
        return
    if not graph.generates:
        yield "$.data.truncated", "no call generates, so no sample is cut", "leave it out"
    for name, call in graph.calls.items():
        steps = call.steps.items() if isinstance(call, Advantage) else ()
        for overlong in (key for key, step in steps if isinstance(step, Overlong)):
            text = (
                f"samples that are cut count no tokens, so that {name}.steps.{overlong} takes nothing off their rewards"
            )
            yield "$.data.truncated", f"{text}, which count in their groups", "leave it out, or that step"


def _evaluation(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    if run.eval is not None and not graph.generates:
        for name in changed_fields(run.eval, EvalSpec(), OF_SAMPLES):
            yield f"$.eval.{name}", "no call generates, so that evaluations are of the loss", "leave it out"
    if run.eval is not None and graph.generates and run.eval.threshold is None and run.eval.k != EvalSpec().k:
        name = scoring_call(graph.calls, run.eval.call)
        if isinstance(graph.calls[name], Inference):
            text = f"no score of {name!r} is right by itself, so that pass@k is not known"
            yield "$.eval.k", text, "set eval.threshold to the least score that is right, or leave it out"


def _data(run: RunSpec) -> Iterator[Mistake]:
    held_out = [("$.eval.data", run.eval.data)] if run.eval is not None and run.eval.data is not None else []
    for path, data in (("$.data", run.data), *held_out):
        if data.subset is not None and files_at(data.path):
            yield f"{path}.subset", "a subset is of a data set of the Hub, and the data are local files", "leave it out"
    for path, data in held_out:
        if data.truncated != "keep":
            yield f"{path}.truncated", "nothing is trained on held-out data", "leave it out"


def _outputs(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    outputs, default = run.outputs, OutputSpec()
    packages: list[tuple[str, str]] = [("trackers", name) for name in outputs.trackers]
    packages += [("tensorboard", "tensorboard")] * outputs.tensorboard
    for name, package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # a folder of that name, as wandb leaves it, is no package
            text = f"{package} is not installed here, and `realgraph run` needs it"
            yield f"$.outputs.{name}", text, f"pip install {package}"
    if outputs.project != default.project and not outputs.trackers:
        yield "$.outputs.project", "it is for trackers, and outputs.trackers names none", "name one, or leave it out"
    if not graph.generates:
        for name in changed_fields(outputs, default, ("transcripts", "transcripts_every")):
            yield f"$.outputs.{name}", "no call generates, so there are no samples to write", "leave it out"
    if outputs.audit and not any(isinstance(call, Train) for call in graph.calls.values()):
        yield "$.outputs.audit", "it is for train calls, and nothing is trained", "leave it out"


def _runtime(run: RunSpec, graph: Graph) -> Iterator[Mistake]:
    default, calls = RuntimeSpec(), graph.calls.values()
    if not any(isinstance(call, Function) for call in calls):
        for name in changed_fields(run.runtime, default, ("function_processes", "function_max_processes")):
            yield f"$.runtime.{name}", "the graph has no function", "leave it out"
    trained = {call.model for call in calls if isinstance(call, Train)}
    others = {role_of(call) for call in calls if not isinstance(call, Train)}
    followed = {role.init for role in graph.models.values() if role.ema_rate is not None}
    if not trained & (others | followed):
        for name in changed_fields(run.runtime, default, ("max_logprob_gap", "verify_weights")):
            text = "it is for trained weights that other calls get, and there are none"
            yield f"$.runtime.{name}", text, "leave it out"


def _launch(spec: LaunchSpec) -> Iterator[Mistake]:
    """The host of a run that others join need not be one of them, and may have other networks."""
    if isinstance(spec, HostsLaunch) and spec.interface is not None:
        try:
            address_of_interface(spec.interface)
        except ConfigError as error:
            for problem in error.problems:
                yield problem.where.path, problem.text, f"{problem.hint}; `realgraph worker` needs it on every host"
