"""Rules about functions: built-in names, `module:function`, what they get and write. Imports no user code."""

import re
from collections.abc import Iterator

from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import BUILTINS, SIGNATURES, Signature
from realgraph.graphs.infer import Draft, parse_type
from realgraph.graphs.maths import ApplyStep, ApplyTerm
from realgraph.graphs.spec import Advantage, Function, Train

_USERS_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def function_name(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A function is built in, or named `module:function`; `apply` takes only the user's own."""
    for name, function in draft.of(Function):
        if function.fn not in BUILTINS and not _USERS_OWN.fullmatch(function.fn):
            text = f"{function.fn!r} is neither a built-in function nor of the form module:function"
            yield draft.problem(f"$.calls.{name}.fn", text, suggest(function.fn, BUILTINS))
    for path, fn in _applied(draft):
        if not _USERS_OWN.fullmatch(fn):
            text = f"{fn!r} is not of the form module:function"
            yield draft.problem(path, text, "name a pure function of packed tensors, such as my_maths:my_term")


def _applied(draft: Draft) -> Iterator[tuple[str, str]]:
    for name, advantage in draft.of(Advantage):
        for entry, step in advantage.steps.items():
            if isinstance(step, ApplyStep):
                yield f"$.calls.{name}.steps.{entry}.fn", step.fn
    for name, train in draft.of(Train):
        for entry, term in train.loss.terms.items():
            if isinstance(term, ApplyTerm):
                yield f"$.calls.{name}.loss.terms.{entry}.fn", term.fn


def function_arguments(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A built-in function gets the keys and arguments that it takes, by name, and gives one value."""
    for name, call in draft.of(Function):
        signature = SIGNATURES.get(call.fn)
        if signature is None:
            continue
        yield from _needed(draft, name, call, signature)
        yield from _unknown(draft, name, call, signature)
        if call.over != signature.over:
            text = f"{call.fn!r} works over a {signature.over}, not over a {call.over}"
            yield draft.problem(f"$.calls.{name}.over", text, f"write `over: {signature.over}`")
        if len(call.writes) != 1:
            text = f"{call.fn!r} gives one value, but the call writes {len(call.writes)} keys"
            yield draft.problem(f"$.calls.{name}.writes", text, "write one key, such as `{reward: sample float32}`")


def _needed(draft: Draft, name: str, call: Function, signature: Signature) -> Iterator[Problem]:
    for key in signature.keys:
        if key not in call.reads and key not in call.args:
            hint = f"keys reach a function under their own names: add {key!r} to `reads`"
            yield draft.problem(f"$.calls.{name}.reads", f"{call.fn!r} needs the key {key!r}", hint)
    for key in signature.args:
        if key not in call.args:
            text = f"{call.fn!r} needs the argument {key!r}"
            yield draft.problem(f"$.calls.{name}.args", text, f"write `args: {{{key}: ...}}`")


def _unknown(draft: Draft, name: str, call: Function, signature: Signature) -> Iterator[Problem]:
    given = [(f"reads[{i}]", key) for i, key in enumerate(call.reads)] + [(f"args.{key}", key) for key in call.args]
    for place, key in given:
        if key not in signature.takes:
            hint = suggest(key, signature.takes)
            yield draft.problem(f"$.calls.{name}.{place}", f"{call.fn!r} does not take {key!r}", hint)


def function_level(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A function called per sample can't write a key of the group: its samples might disagree."""
    for name, call in draft.of(Function):
        for key, text in call.writes.items():
            key_type = parse_type(text)
            if key_type is not None and key_type.level == "group" and call.over == "sample":
                problem = f"{key!r} is one value a group, but the function is called for every sample"
                yield draft.problem(f"$.calls.{name}.writes.{key}", problem, "write `over: group`, or a sample key")
