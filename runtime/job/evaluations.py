"""Evaluations: the calls that score held-out samples, and the engines that a plan must have for those that the run does
not wait for (`eval.on`)."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.functions import judging_keys, scoring_call
from realgraph.graphs.graph import INPUT, Graph
from realgraph.graphs.spec import Generate, Inference, Train
from realgraph.planner.plan.axes import session_groups
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.residency import dropped_copies, shares_trained_copy
from realgraph.runtime.job.job import EvalOn, EvalSpec


class Scoring(Struct, frozen=True):
    """The scoring of held-out samples. Calls that models compute, and functions that these read of, run as those of a
    batch do: `on_devices`. The other functions run where the samples were drawn: `beside`. Both in order."""

    call: str
    key: str  # that samples are judged by
    on_devices: tuple[str, ...]
    beside: tuple[str, ...]
    gathered: tuple[str, ...]  # the keys that the former write and the latter read, or that samples are judged by


def scoring_of(graph: Graph, spec: EvalSpec) -> Scoring:
    """That of a graph that generates and was checked."""
    name = scoring_call(graph.calls, spec.call)
    chain = _with_makers(graph, [name])
    on_devices = _with_makers(graph, [one for one in chain if isinstance(graph.calls[one], Inference | Generate)])
    beside = tuple([one for one in chain if one not in on_devices])
    key = spec.key or judging_keys(graph.calls, name)[0]
    read = dict.fromkeys([*(key for one in beside for key in graph.reads[one]), key])
    return Scoring(
        name, key, on_devices, beside, tuple([key for key in read if graph.keys[key].producer in on_devices])
    )


def evaluated_graph(graph: Graph, call: str) -> Graph:
    """A graph that generates as an evaluation alone runs it, without training: the calls that make samples and score
    them by `call`, and the other generate calls, by which keys are named."""
    calls = {*graph.generates[:1], *_with_makers(graph, [*graph.generates[1:], call])}
    roles = {graph.role(name) for name in calls}
    models = {name: role for name, role in graph.models.items() if name in roles}
    return replace(graph.of_calls(calls), models=models)


def _with_makers(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Calls after those whose keys they read, and so on, without the one that makes the samples."""
    known, wanted = {INPUT, *graph.generates[:1]}, list(names)
    found = set[str]()
    while wanted:
        found.add(name := wanted.pop())
        wanted += [maker for maker in graph.producers(name) if maker not in known | found]
    return tuple([name for name in graph.calls if name in found])


def eval_on_mistake(graph: Graph, plan: Plan, on: EvalOn) -> tuple[str, str] | None:
    """The reason why no engine can evaluate while the run goes on, and what to do about it; None where nothing does."""
    name = next(iter(graph.generates), "")
    trains = [n for n, c in graph.calls.items() if isinstance(c, Train) and name and c.model == graph.role(name)]
    if not plan.staleness or not trains:
        what = "nothing generates by weights that are trained" if not trains else "the plan is synchronous"
        return f"{what}, so nothing goes on during an evaluation", "set staleness to 1 or more, or leave eval.on out"
    if len(graph.generates) > 1:
        return "the graph generates more than once, and only one of the calls evaluates", "leave eval.on out"
    own = plan.allocations[name]
    shared = shares_trained_copy(graph.calls[name], own, plan.allocations[trains[-1]])
    if shared or name in dropped_copies(graph, plan.allocations, plan.staleness):
        text = f"{name!r} generates on the devices of other calls, whose weights change during an evaluation"
        return text, f"pin it to devices of its own: allocation: {{{name}: {{first: ..., devices: ...}}}}"
    if on != "interleaved":
        n_engines = len(session_groups(own.layout))
        if own.layout.dp < 2 or n_engines < own.layout.dp:
            text = f"{name!r} has one engine, which can't be set aside"
            return text, "give the call more devices as dp, or set eval.on to interleaved"
    return None
