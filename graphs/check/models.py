"""Rules about roles: who exists, who is trained, which head they have, where their weights come from."""

from collections.abc import Iterator

from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.infer import Draft, is_own
from realgraph.graphs.maths import (
    HEAD_OF_OUTPUT,
    ApplyTerm,
    PolicyGradient,
)
from realgraph.graphs.spec import Generate, Inference, Optimizer, Train, role_of

_HEAD_GIVES = {"lm": "log-probabilities", "value": "values", "score": "scores"}


def unknown_role(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A call runs a role that the graph has."""
    for name, call in draft.spec.calls.items():
        role = role_of(call)
        if role and role not in draft.spec.models:
            hint = suggest(role, draft.spec.models)
            yield draft.problem(f"$.calls.{name}.model", f"no model has the role {role!r}", hint)


def frozen_trained(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A train call trains a trainable role."""
    for name, call in draft.of(Train):
        role = draft.spec.models.get(call.model)
        if role is not None and not role.trainable:
            text = f"the call {name!r} trains {call.model!r}, which is frozen"
            hint = f"set `trainable: true` under models.{call.model}, or train another role"
            yield draft.problem(f"$.calls.{name}.model", text, hint)


def trainable_untrained(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A trainable role is trained: it would hold an optimizer's memory for nothing."""
    trained = {call.model for _, call in draft.of(Train)}
    misspelt = not trained <= draft.spec.models.keys()  # `unknown_role` says so
    for name, role in draft.spec.models.items():
        if role.trainable and name not in trained and not misspelt:
            hint = f"add a train call of {name!r}, or set `trainable: false`"
            yield draft.problem(f"$.models.{name}.trainable", f"{name!r} is trainable, but no call trains it", hint)


def policy_not_sampled(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The role that a policy gradient trains is the one that generates, in RL."""
    sampled = {name: call.model for name, call in draft.of(Generate)}
    for name, call in draft.of(Train):
        learns = any(isinstance(term, PolicyGradient) for term in call.loss.terms.values())
        generate = draft.samplers.get(name, "")
        if learns and generate in sampled and call.model != sampled[generate]:
            other = sampled[generate]
            text = f"{call.model!r} is trained by a policy gradient, but {generate!r} samples from {other!r}"
            hint = f"set `model: {call.model}` in calls.{generate}"
            own = f"set `samples` to a call that samples {call.model!r}, or {hint}"
            yield draft.problem(f"$.calls.{name}.model", text, hint if call.samples is None else own)


def head_mismatch(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Each call and each loss term runs a role with the head that it needs."""
    for name, generate in draft.of(Generate):
        yield from _head(draft, f"$.calls.{name}.model", generate.model, "lm", f"the generate call {name!r}")
    for name, inference in draft.of(Inference):
        needed = HEAD_OF_OUTPUT[inference.output]
        yield from _head(draft, f"$.calls.{name}.output", inference.model, needed, f"the inference call {name!r}")
    for name, train in draft.of(Train):
        for entry, term in train.loss.terms.items():
            path = f"$.calls.{name}.loss.terms.{entry}"
            if isinstance(term, ApplyTerm):
                yield from _applied_heads(draft, path, train.model, term)
            else:
                for head in dict.fromkeys(HEAD_OF_OUTPUT[output] for output in term.outputs):
                    yield from _head(draft, path, train.model, head, f"the term {entry!r}")


def _applied_heads(draft: Draft, path: str, role: str, term: ApplyTerm) -> Iterator[Problem]:
    """A term of the user's own reads outputs of one head, that of the trained role."""
    model = draft.spec.models.get(role)
    for output in term.outputs:
        if model is None or HEAD_OF_OUTPUT[output] == model.head:
            continue
        fitting = [name for name, head in HEAD_OF_OUTPUT.items() if head == model.head]
        gives = f"the head of {role!r} gives {' and '.join(fitting)}"
        if output in term.reads:
            place = f"{path}.reads[{term.reads.index(output)}]"
            hint = f"read {' or '.join(fitting)} here, or set `head: {HEAD_OF_OUTPUT[output]}` under models.{role}"
            if output in draft.writes:
                writer = draft.producer(output) or "the data set"
                hint += f"; {output!r} in `reads` is the output of {role!r}, not the key of {writer!r}: rename that key"
            yield draft.problem(place, f"{output!r} is not an output of the trained role: {gives}", hint)
        else:
            text = f"a term that reads no output gets log-probabilities, but {gives}"
            yield draft.problem(path, text, f"write `reads: [{fitting[0]}, ...]`")


def _head(draft: Draft, path: str, role: str, needed: str, by: str) -> Iterator[Problem]:
    model = draft.spec.models.get(role)
    if model is not None and model.head != needed:
        text = f"{by} needs {_HEAD_GIVES[needed]}, but the head of {role!r} gives {_HEAD_GIVES[model.head]}"
        yield draft.problem(path, text, f"set `head: {needed}` under models.{role}, or use another role")


def own_tokenizer(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A role reads samples by its own tokenizer where one number a sample is all that comes back, of a frozen role."""
    for name, call in draft.of(Inference):
        role = draft.spec.models.get(call.model)
        if not is_own(call) or role is None:
            continue
        path = f"$.calls.{name}.tokenizer"
        if call.output != "scores":
            what = _HEAD_GIVES[HEAD_OF_OUTPUT[call.output]]
            text = f"{name!r} would give {what} of tokens of its own, which do not match the sampled ones"
            hint = (
                "only `output: scores`, one number a sample, can have a tokenizer of its own; take a model of the same"
            )
            yield draft.problem(path, text, f"{hint} family")
        elif not any(True for _ in draft.of(Generate)):
            text = f"{name!r} reads samples of the data, which have no text to tokenize again: no call generates"
            yield draft.problem(path, text, "leave `tokenizer` out")
        elif draft.samplers[name] != draft.leading:
            text = f"{name!r} reads samples of {draft.samplers[name]!r}, which answer no conversation of the data"
            yield draft.problem(path, text, f"write `samples: {draft.leading}`, or leave `tokenizer` out")
        elif role.trainable or role.ema_rate is not None:
            text = f"{call.model!r} is trained, on the tokens of the role that generates"
            yield draft.problem(path, text, "leave `tokenizer` out, or freeze the role")


def init_unknown(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """`init` names another role, so that the chain ends at a role with a path of its own."""
    models = draft.spec.models
    for name, role in models.items():
        if role.init is None or role.path is not None:
            continue
        if role.init not in models:
            others = [other for other in models if other != name]
            yield draft.problem(
                f"$.models.{name}.init", f"no model has the role {role.init!r}", suggest(role.init, others)
            )
            continue
        chain = [name]
        while (after := models[chain[-1]].init) in models and models[chain[-1]].path is None and after not in chain:
            chain.append(str(after))
        closes = models[chain[-1]].path is None and models[chain[-1]].init == name
        if closes and name == min(chain, key=list(models).index):
            ring = " -> ".join((*chain, name))
            yield draft.problem(
                f"$.models.{name}.init", f"roles start from each other: {ring}", "give one of them a path"
            )


def model_without_path(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Every role of a run knows where its weights come from."""
    if facts.groups is None:
        return
    for name, role in draft.spec.models.items():
        if role.path is None and role.init is None:
            text = f"the weights of {name!r} have no source"
            yield draft.problem(f"$.models.{name}", text, f"give models.{name} a `path`: a directory or a Hub id")


def ema_rate(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A moving average follows a trained role, and is not trained itself."""
    for name, role in draft.spec.models.items():
        if role.ema_rate is None:
            continue
        followed = draft.spec.models.get(role.init) if role.init else None
        if role.trainable or followed is None or not followed.trainable:
            text = f"{name!r} has an `ema_rate`: it must be frozen, and follow a trainable role by `init`"
            yield draft.problem(f"$.models.{name}.ema_rate", text, "set `trainable: false` and `init: <trained role>`")


def routing_replay(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Choices of experts are replayed where there are such choices, and a training to replay them in: the role is
    trained on samples of its own."""
    trained = {call.model for _, call in draft.of(Train)}
    sampled = {call.model: name for name, call in draft.of(Generate)}
    for name, role in draft.spec.models.items():
        if not role.routing_replay:
            continue
        path = f"$.models.{name}.routing_replay"
        if name not in trained:
            text = f"{name!r} has `routing_replay`, but no call trains it: nothing would replay its choices of experts"
            yield draft.problem(path, text, "leave it out, or set it for the role that is trained")
        elif not sampled:
            text = f"{name!r} has `routing_replay`, but its samples come from the data, with no choice of experts"
            yield draft.problem(path, text, "leave it out: it takes a generate call of the role")
        elif name not in sampled:
            other, generate = next(iter(sampled.items()))
            text = f"{name!r} has `routing_replay`, but {generate!r} samples from {other!r}, whose experts are others"
            yield draft.problem(path, text, f"leave it out, or set `model: {name}` in calls.{generate}")


def optimizer_disagreement(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The optimizer belongs to the role, so two train calls of one role give it the same settings."""
    first: dict[str, tuple[str, Optimizer]] = {}
    for name, call in draft.of(Train):
        other, optimizer = first.setdefault(call.model, (name, call.optimizer))
        fields = [field for field in optimizer.__struct_fields__ if _differ(optimizer, call.optimizer, field)]
        if fields:
            text = (
                f"{name!r} and {other!r} train {call.model!r} with one optimizer, but disagree on {', '.join(fields)}"
            )
            yield draft.problem(f"$.calls.{name}.optimizer", text, "write the same `optimizer` in both calls")


def _differ(one: Optimizer, other: Optimizer, field: str) -> bool:
    return bool(getattr(one, field) != getattr(other, field))
