"""Mistakes in a run file's section `eval`: evaluations that could not run, or whose numbers would mean nothing."""

from collections.abc import Iterator

from realgraph.graphs.check.switch import switch_off
from realgraph.graphs.errors import suggest
from realgraph.graphs.functions import judging_keys, scoring_call
from realgraph.graphs.infer import call_reads, call_writes, is_own
from realgraph.graphs.keys import EVALUATED, GENERATED, ROUTES, own_tokens
from realgraph.graphs.spec import (
    Function,
    Generate,
    GraphSpec,
    Inference,
    ModelCall,
    Train,
    generated_key,
    leading_call,
)
from realgraph.run_file.run_spec import RunSpec
from realgraph.run_file.section_checks import Mistake
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
    """An evaluation scores samples of the leading call, each for itself, by a function or by a model's scores, after
    the calls that these read of. One of a graph that generates nothing is of the loss."""
    live, _ = switch_off(graph)
    if not leading_call(live):
        if not any(isinstance(call, Train) for call in live.calls.values()):
            yield "$.eval", "the graph neither generates nor trains, so there is nothing to evaluate", "leave eval out"
        return
    name, known = scoring_call(live.calls, spec.call), _Known(live)
    able = [one for one in live.calls if not any(_unable(one, live, known))]
    for text in _unable(name, live, known):
        hint = f"name a call that can: {', '.join(able)}" if able else "leave eval out, or add a function that can"
        yield "$.eval.call", text, suggest(name, able) if able and name not in live.calls else hint
    keys = judging_keys(live.calls, name)
    if keys and spec.key and spec.key not in keys:
        yield "$.eval.key", f"{name!r} writes no number {spec.key!r} a sample", suggest(spec.key, keys)
    if spec.on is not None and name in known.by_models:
        text = f"{name!r} scores by what models compute, on devices where the run would go on meanwhile"
        functions = [one for one in able if one not in known.by_models]
        others = f", or name a function of the text alone as eval.call: {', '.join(functions)}" if functions else ""
        yield "$.eval.on", text, f"leave eval.on out{others}"


class _Known:
    """The keys that there are of a held-out sample, for functions and for models; by_models: calls that models make, or
    that read what these make."""

    def __init__(self, live: GraphSpec) -> None:
        self._live, leading = live, leading_call(live)
        own = {own_tokens(call.model) for call in live.calls.values() if is_own(call)}
        self.functions = {generated_key(live, leading, key) for key in EVALUATED} | live.inputs.keys()
        self.models = self.functions | own | {generated_key(live, leading, key) for key in (*GENERATED, ROUTES)}
        self.by_models = set[str]()
        made, left = set[str](), [name for name, call in live.calls.items() if name != leading and _scores(call)]
        while more := [name for name in left if self.missing(name) is None]:
            for name in more:
                call, keys = live.calls[name], {write.key for write in call_writes(name, live)}
                if not isinstance(call, Function) or made & _read(name, live):
                    self.by_models.add(name)
                    made |= keys
                self.models |= keys
                readable = {generated_key(live, name, key) for key in EVALUATED} if isinstance(call, Generate) else keys
                self.functions |= readable
            left = [name for name in left if name not in more]

    def missing(self, name: str) -> str | None:
        """A key that a call reads and that there is not; None where it has all."""
        known = self.functions if isinstance(self._live.calls[name], Function) else self.models
        return min(_read(name, self._live) - known, default=None)


def _read(name: str, live: GraphSpec) -> set[str]:
    return {read.key for read in call_reads(name, live)}


def _scores(call: ModelCall) -> bool:
    """True of calls that need no whole batch, and change no weights."""
    return isinstance(call, Inference | Generate) or (isinstance(call, Function) and call.over == "sample")


def _unable(name: str, live: GraphSpec, known: _Known) -> Iterator[str]:
    """The reasons why the call `name` can't score held-out samples."""
    call = live.calls.get(name)
    if not isinstance(call, Function | Inference):
        what = "no function and no inference of the graph" if call is not None else "no call of the graph"
        yield f"{name!r} is {what}, so it can't score samples"
        return
    if isinstance(call, Function) and call.over != "sample":
        yield f"{name!r} works over a {call.over}, but an evaluation scores each sample for itself"
    if (key := known.missing(name)) is not None:
        yield f"{name!r} reads {key!r}, but an evaluation has {', '.join(sorted(known.functions))} alone"
    if not judging_keys(live.calls, name):
        yield f"{name!r} writes no number a sample to judge it by"
