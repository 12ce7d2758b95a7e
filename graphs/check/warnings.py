"""Requests that are allowed and do not do what they seem to: warned of once, with the reason. Refuses nothing."""

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from msgspec import structs

from realgraph.graphs.check.maths import terms_of
from realgraph.graphs.check.switch import switch_off
from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.infer import Draft, infer, step_reads, term_reads
from realgraph.graphs.keys import parse_key_type
from realgraph.graphs.maths import KL, NoClip, PolicyGradient
from realgraph.graphs.spec import Advantage, Function, Generate, GraphSpec, Inference, ModelCall, Train, role_of

Written = Callable[[str], bool]  # whether a file or the command line gave the value at a YAML path
Warn = Callable[[Draft, Written], Iterator[Problem]]


def warnings_of(
    spec: GraphSpec, where: Callable[[str], Where], written: Written, steps: int | None = None
) -> tuple[Problem, ...]:
    """Warnings of a graph that compiles, in the order of their places; `rule` names the warning.

    steps: of the run, where it is known.
    """
    live, switched_off = switch_off(spec)
    draft = infer(live, where, switched_off)
    warnings = [problem for warn in WARNINGS for problem in _named(warn, draft, written)]
    return tuple(sorted([*warnings, *_named(entries_left_out, spec, draft), *_named(endless_warmup, draft, steps)]))


def _named(warn: Callable[..., Iterator[Problem]], *given: Any) -> Iterator[Problem]:
    """The problems that a warning finds, with its name as their rule."""
    return (structs.replace(problem, rule=warn.__name__) for problem in warn(*given))


def kl_without_gradient(draft: Draft, written: Written) -> Iterator[Problem]:
    """k1 of the policy's own samples has the gradient of log p, whose mean is zero: it holds nothing back."""
    for path, _, entry, term in terms_of(draft):
        if isinstance(term, KL) and term.estimator == "k1" and term.coef != 0:
            text = f"the term {entry!r} estimates the KL with k1, whose expected gradient is zero: it only adds noise"
            hint = (
                "as a loss, use k2 (the gradient of KL(policy || to)) or k3; k1 is for the kl_penalty step of rewards"
            )
            yield draft.problem(f"{path}.estimator", text, hint)


def several_steps_without_ratio(draft: Draft, written: Written) -> Iterator[Problem]:
    """The plain policy gradient holds for samples of the present weights, which every optimizer step changes."""
    for path, call, entry, term in terms_of(draft):
        n_steps = call.epochs * call.minibatches
        if not isinstance(term, PolicyGradient) or term.ratio != "none" or n_steps == 1:
            continue
        times = [f"{n} {name}" for name in ("epochs", "minibatches") if (n := getattr(call, name)) > 1]
        text = (
            f"the term {entry!r} has no ratio, but {' x '.join(times)} are {n_steps} optimizer steps on one batch: "
            "after the first the samples are no longer the policy's, and nothing corrects for it"
        )
        hint = "set `ratio: token` (or sequence), or epochs and minibatches to 1"
        yield draft.problem(f"{path}.ratio", text, hint)


def clip_without_ratio(draft: Draft, written: Written) -> Iterator[Problem]:
    """The clip cuts the ratio; one that a file wrote beside `ratio: none` has no effect."""
    for path, _, entry, term in terms_of(draft):
        unread = isinstance(term, PolicyGradient) and term.ratio == "none" and not isinstance(term.clip, NoClip)
        if unread and written(f"{path}.clip"):
            text = f"the term {entry!r} has no ratio, so nothing reads its clip"
            yield draft.problem(f"{path}.clip", text, "write `clip: {kind: none}`, or `ratio: token`")


def unused_model(draft: Draft, written: Written) -> Iterator[Problem]:
    """A role that no call runs, and that no role in use starts from, is never loaded."""
    models = draft.spec.models
    used = {role_of(call) for call in draft.spec.calls.values()}
    todo = list(used)
    while todo:
        role = models.get(todo.pop())
        if role is not None and role.init is not None and role.init not in used:
            used.add(role.init)
            todo.append(role.init)
    for name in models:
        if name not in used:
            text = f"no call uses the model {name!r}: it is not loaded"
            yield draft.problem(f"$.models.{name}", text, f"delete it (models.{name}=null), or name it in a call")


def entries_left_out(spec: GraphSpec, draft: Draft) -> Iterator[Problem]:
    """A step or term falls with the call that would write what it reads; a KL of coefficient 0 is meant to."""
    for name, call in draft.spec.calls.items():
        before = spec.calls[name]
        for parent, entries, left in _entries(before, call):
            for entry, value in entries.items():
                if value is None or entry in left or (value.switched_by_coefficient and value.coefficient == 0):
                    continue
                path = f"$.calls.{name}.{parent}.{entry}"
                reads = step_reads("", entry, value) if parent == "steps" else term_reads("", entry, value)
                lost = next(read.key for read in reads if read.key in draft.switched_off)
                why = draft.switched_off[lost]
                text = f"{entry!r} is left out: it reads {lost!r} of the call {why.call!r}, and {why.switch} is off"
                yield draft.problem(path, text, f"switch {why.switch} on, or delete {entry!r}")


def _entries(before: ModelCall, after: ModelCall) -> Iterator[tuple[str, Mapping[str, Any], Container[str]]]:
    if isinstance(before, Advantage) and isinstance(after, Advantage):
        yield "steps", before.steps, after.steps
    if isinstance(before, Train) and isinstance(after, Train):
        yield "loss.terms", before.loss.terms, after.loss.terms


def pairs_without_order(draft: Draft, written: Written) -> Iterator[Problem]:
    """Losses of pairs prefer sample 0: in the data that is the chosen one, among samples it is any."""
    if not any(True for _ in draft.of(Generate)):
        return
    for path, _, entry, term in terms_of(draft):
        if term.of_pairs:
            text = f"the term {entry!r} prefers sample 0 of a group to sample 1, but samples are not ordered by quality"
            hint = "take pairs from the data (columns chosen and rejected), or write the loss as an `apply` term"
            yield draft.problem(path, text, hint)


def endless_warmup(draft: Draft, steps: int | None) -> Iterator[Problem]:
    """A warm-up that is longer than the run: the learning rate never reaches the one that the file names."""
    if steps is None:
        return
    trains = list(draft.of(Train))
    for name, call in trains:
        n_steps = steps * sum(other.epochs * other.minibatches for _, other in trains if other.model == call.model)
        n_warmup = call.optimizer.warmup_steps
        if n_warmup > n_steps:
            text = (
                f"the warm-up takes {n_warmup:,} optimizer steps, but the whole run has {n_steps:,}: "
                f"the learning rate ends at {n_steps / n_warmup:.0%} of {call.lr:g}"
            )
            hint = f"set it to at most {n_steps}, or raise `steps`"
            yield draft.problem(f"$.calls.{name}.optimizer.warmup_steps", text, hint)


def unread_setting(draft: Draft, written: Written) -> Iterator[Problem]:
    """A value beside another one under which nothing reads it."""
    for name, role in draft.spec.models.items():
        if role.gradient_checkpointing and not role.trainable:
            text = f"{name!r} is not trained, so there are no activations to compute again"
            yield draft.problem(f"$.models.{name}.gradient_checkpointing", text, "leave it out")
        if role.master_dtype is not None and not role.trainable and role.ema_rate is None:
            text = f"{name!r} is not trained, so it has no optimizer with a copy of its own"
            yield draft.problem(f"$.models.{name}.master_dtype", text, "leave it out, or set dtype")
    for name, call in draft.spec.calls.items():
        for field, text, hint in _unread_of(call, draft):
            yield draft.problem(f"$.calls.{name}.{field}", text, hint)


def _whole_numbers(call: Function) -> list[str]:
    """The keys of whole numbers that a function writes."""
    return [repr(name) for name, text in call.writes.items() if parse_key_type(text).dtype in ("int32", "int64")]


def _unread_of(call: ModelCall, draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Field, text and hint of each."""
    match call:
        case Function(on_error="fail") if call.error_value != 0:
            text = "an exception ends the run (on_error: fail), so no sample gets the error_value"
            yield "error_value", text, "set `on_error: score`, or leave it out"
        case Function(on_error="score") if call.error_value % 1 and (names := _whole_numbers(call)):
            text = f"{' and '.join(names)} take whole numbers, so that it is {int(call.error_value)} there"
            yield "error_value", text, "give a whole number, or write float32"
        case Generate(temperature=0):
            for field in ("top_p", "top_k"):
                if getattr(call, field) != getattr(Generate(call.model), field):
                    text = f"greedy decoding (temperature: 0) takes the likeliest token, so nothing reads {field}"
                    yield field, text, "leave it out, or set a temperature above 0"
        case Inference() if call.output != "logprobs" and call.temperature != 1:
            yield "temperature", f"{call.output} have no temperature", "leave it out"
        case Train():
            role = draft.spec.models.get(call.model)
            if role is not None and role.head != "lm" and call.temperature != 1:
                yield "temperature", f"{call.model!r} has a {role.head} head, which has no temperature", "leave it out"
            if call.optimizer.schedule == "constant" and call.optimizer.final_lr_fraction != 0:
                text = "the learning rate stays as it is (schedule: constant)"
                yield "optimizer.final_lr_fraction", text, "set `schedule: cosine` or `linear`, or leave it out"
        case _:
            return


WARNINGS: tuple[Warn, ...] = (
    kl_without_gradient,
    several_steps_without_ratio,
    clip_without_ratio,
    unused_model,
    pairs_without_order,
    unread_setting,
)
