"""Mistakes in a run file's section `eval`: evaluations that could not run, or whose numbers would mean nothing."""

from collections.abc import Iterator

from realgraph.graphs.check.switch import switch_off
from realgraph.graphs.errors import suggest
from realgraph.graphs.spec import Function, GraphSpec, leading_call
from realgraph.run_file.rollout_checks import Mistake
from realgraph.run_file.run_spec import RunSpec
from realgraph.runtime.data.row_files import lacks_split
from realgraph.runtime.job.job import EvalSpec

LEAST_KEPT = 2  # checkpoints, so that one can be read while the next is saved


def eval_mistakes(run: RunSpec, spec: EvalSpec, graph: GraphSpec) -> Iterator[Mistake]:
    """All of them."""
    functions = [name for name, call in graph.calls.items() if isinstance(call, Function)]
    if not functions:
        text = "an evaluation samples and scores held-out prompts, and the graph has no function that scores"
        yield "$.eval", text, "leave eval out, or add a function call that reads the text of samples"
        return
    if spec.call not in functions:
        text = f"{spec.call!r} is not a function call of the graph, so it can't score samples"
        yield "$.eval.call", text, suggest(spec.call, functions)
    yield from _later_texts(spec, graph)
    if max(spec.k, default=1) > spec.n:
        text = f"pass@{max(spec.k)} needs at least {max(spec.k)} samples a prompt, but eval.n is {spec.n}"
        yield "$.eval.k", text, f"set eval.n to {max(spec.k)} or more"
    if spec.n > 1 and spec.temperature == 0:
        text = f"greedy decoding gives the same text {spec.n} times"
        yield "$.eval.n", text, "set eval.temperature above 0, or eval.n to 1"
    if spec.on is not None and not run.staleness:
        text = "the run is synchronous, so nothing goes on during an evaluation"
        yield "$.eval.on", text, "set staleness to 1 or more, or leave eval.on out"
    if spec.on == "checkpoint":
        yield from _unsaved(run, spec)
    if spec.data is None and spec.active and lacks_split(run.data, "test"):
        text = "the training data are files, which have no test split to evaluate on"
        yield "$.eval", text, "give eval.data: {path: ...}, or eval.every: 0"


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


def _later_texts(spec: EvalSpec, graph: GraphSpec) -> Iterator[Mistake]:
    """An evaluation generates by the call that makes the samples of groups, and by no other."""
    live, _ = switch_off(graph)
    call, leading = live.calls.get(spec.call), leading_call(live)
    for key in call.keywords.values() if isinstance(call, Function) else ():
        name = key.partition(".")[0]
        if name != key and name in live.calls and name != leading:
            text = f"{spec.call!r} reads {key!r}, but an evaluation generates by {leading!r} alone"
            yield "$.eval.call", text, f"name a call that reads {leading}.text"
