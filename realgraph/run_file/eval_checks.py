"""Mistakes in a run file's section `eval`: evaluations that could not run, or whose numbers would mean nothing."""

from collections.abc import Iterator

from realgraph.graphs.check.switch import switch_off
from realgraph.graphs.errors import suggest
from realgraph.graphs.functions import judged_key
from realgraph.graphs.keys import EVALUATED
from realgraph.graphs.spec import Function, GraphSpec, Train, generate_calls, leading_call
from realgraph.run_file.rollout_checks import Mistake
from realgraph.run_file.run_spec import RunSpec
from realgraph.runtime.data.row_files import lacks_split
from realgraph.runtime.job.job import EvalSpec

LEAST_KEPT = 2  # checkpoints, so that one can be read while the next is saved


def eval_mistakes(run: RunSpec, spec: EvalSpec, graph: GraphSpec) -> Iterator[Mistake]:
    """All of them."""
    scoring = list(scoring_mistakes(spec, graph))
    yield from scoring
    if any(path == "$.eval" for path, *_ in scoring):
        return  # what it would be like does not matter
    if leading_call(switch_off(graph)[0]):
        yield from _sampling(spec)
    if spec.on is not None and not run.staleness:
        text = "the run is synchronous, so nothing goes on during an evaluation"
        yield "$.eval.on", text, "set staleness to 1 or more, or leave eval.on out"
    if spec.on == "checkpoint":
        yield from _unsaved(run, spec)
    if spec.data is None and spec.active and lacks_split(run.data, "test"):
        text = "the training data are files, which have no test split to evaluate on"
        yield "$.eval", text, "give eval.data: {path: ...}, or eval.every: 0"


def _sampling(spec: EvalSpec) -> Iterator[Mistake]:
    """Samples of a prompt that pass@k lacks, or that are all the same."""
    if max(spec.k, default=1) > spec.n:
        text = f"pass@{max(spec.k)} needs at least {max(spec.k)} samples a prompt, but eval.n is {spec.n}"
        yield "$.eval.k", text, f"set eval.n to {max(spec.k)} or more"
    if spec.n > 1 and spec.temperature == 0:
        text = f"greedy decoding gives the same text {spec.n} times"
        yield "$.eval.n", text, "set eval.temperature above 0, or eval.n to 1"


def _unsaved(run: RunSpec, spec: EvalSpec) -> Iterator[Mistake]:
    """An evaluation of each checkpoint needs some, which stay until their turn comes."""
    if spec.every:
        yield "$.eval.every", "eval.on: checkpoint evaluates whenever a checkpoint is saved", "leave eval.every out"
    if not run.checkpoint.every and not run.checkpoint.seconds:
        text = "no checkpoint is saved before the end of the run, so there is none to evaluate while it goes on"
        yield "$.eval.on", text, "set checkpoint.every or checkpoint.minutes, or leave eval.on out"
    if run.checkpoint.keep < LEAST_KEPT:
        text = "a checkpoint that waits for its evaluation is deleted when the next one is saved"
        yield "$.checkpoint.keep", text, f"set checkpoint.keep to {LEAST_KEPT} or more, or leave eval.on out"


def scoring_mistakes(spec: EvalSpec, graph: GraphSpec) -> Iterator[Mistake]:
    """An evaluation scores samples of the leading call, each for itself, by a function and those that it reads of. One
    of a graph that generates nothing is of the loss."""
    live, _ = switch_off(graph)
    if not leading_call(live):
        if not any(isinstance(call, Train) for call in live.calls.values()):
            yield "$.eval", "the graph neither generates nor trains, so there is nothing to evaluate", "leave eval out"
        return
    given = _given(live)
    able = [name for name in live.calls if not any(_unable(name, live, given))]
    for text in _unable(spec.call, live, given):
        hint = f"name a function that can: {', '.join(able)}" if able else "leave eval out, or add a function that can"
        yield "$.eval.call", text, suggest(spec.call, able) if able and spec.call not in live.calls else hint


def _given(live: GraphSpec) -> set[str]:
    """The keys that an evaluation has of a sample: inputs, what it generates, and what functions make of these."""
    several, leading = len(generate_calls(live)) > 1, leading_call(live)
    given = {f"{leading}.{key}" if several else key for key in EVALUATED} | live.inputs.keys()
    functions = [call for call in live.calls.values() if isinstance(call, Function) and call.over == "sample"]
    while more := [call for call in functions if given.issuperset(call.keywords.values())]:
        given |= {key for call in more for key in call.writes}
        functions = [call for call in functions if call not in more]
    return given


def _unable(name: str, live: GraphSpec, given: set[str]) -> Iterator[str]:
    """The reasons why the call `name` can't score held-out samples, of which there are the keys `given`."""
    call, leading = live.calls.get(name), leading_call(live)
    if not isinstance(call, Function):
        yield f"{name!r} is not a function call of the graph, so it can't score samples"
        return
    if call.over != "sample":
        yield f"{name!r} works over a {call.over}, but an evaluation scores each sample for itself"
    for key in call.keywords.values():
        maker = key.partition(".")[0]
        if maker != key and maker in live.calls and maker != leading:
            yield f"{name!r} reads {key!r}, but an evaluation generates by {leading!r} alone"
        elif key not in given:
            yield f"{name!r} reads {key!r}, but an evaluation has {', '.join(sorted(given))} alone"
    if not judged_key(live.calls, name):
        yield f"{name!r} writes no number a sample to judge it by"
