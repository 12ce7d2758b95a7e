"""Rules about functions: built-in names, `module:function`, what they get and write. Imports no user code."""

import re
from collections.abc import Iterator

from realgraph.graphs.applied import applied_of
from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import BUILTINS, SIGNATURES, USERS_OWN, Signature, name_hint
from realgraph.graphs.infer import Draft, parse_type
from realgraph.graphs.keys import REWARD_TYPE, ids_keyword, is_prompt
from realgraph.graphs.spec import Function

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMES = "list variables by name, such as env: [OPENAI_API_KEY]"


def function_name(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A function is built in, or named `module:function`; `apply` takes only the user's own."""
    for name, function in draft.of(Function):
        if function.fn not in BUILTINS and not USERS_OWN.fullmatch(function.fn):
            text = f"{function.fn!r} is neither a built-in function nor of the form module:function"
            hint = name_hint(function.fn) or suggest(function.fn, BUILTINS)
            yield draft.problem(f"$.calls.{name}.fn", text, hint)
    for applied in applied_of(draft.spec.calls):
        if not USERS_OWN.fullmatch(applied.fn):
            text = f"{applied.fn!r} is not of the form module:function"
            hint = name_hint(applied.fn) or "name a pure function of packed tensors, such as my_maths:my_term"
            yield draft.problem(f"{applied.path}.fn", text, hint)


def function_arguments(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A built-in function gets the keys and arguments that it takes, by name, and gives one value."""
    for name, call in draft.of(Function):
        for i, key in enumerate(call.reads if isinstance(call.reads, tuple) else ()):
            if "." in key:
                text = f"a function gets the keys of a list as keywords, and {key!r} can't be one"
                hint = f"write `reads` as a mapping from keywords to keys: {{{key.partition('.')[2]}: {key}}}"
                yield draft.problem(f"$.calls.{name}.reads[{i}]", text, hint)
        for key in call.args:
            if key in call.keywords:
                text = f"{key!r} is a key that the call reads, and an argument of the same name"
                yield draft.problem(f"$.calls.{name}.args.{key}", text, "remove one of the two, or rename the argument")
        signature = SIGNATURES.get(call.fn)
        if signature is None:
            continue
        yield from _needed(draft, name, call, signature)
        yield from _unknown(draft, name, call, signature)
        yield from _mistyped(draft, name, call)
        yield from _pattern(draft, name, call)
        if call.over != signature.over and not (call.over == "group" and _of_groups(draft, call)):
            text = f"{call.fn!r} works over a {signature.over}, not over a {call.over}"
            yield draft.problem(f"$.calls.{name}.over", text, f"write `over: {signature.over}`")
        if len(call.writes) != 1:
            text = f"{call.fn!r} gives one value, but the call writes {len(call.writes)} keys"
            yield draft.problem(f"$.calls.{name}.writes", text, "write one key, such as `{reward: sample float32}`")
        elif not signature.number and [text.split()[-1:] for text in call.writes.values()] != [["text"]]:
            text = f"{call.fn!r} gives a text"
            yield draft.problem(f"$.calls.{name}.writes", text, "write it as text, such as `{question: sample text}`")


def _of_groups(draft: Draft, call: Function) -> bool:
    """True where every key that a function reads has one value a group: then so has a function of single values."""
    types = [write.type for key in call.keywords.values() for write in draft.writes.get(key, ())[:1]]
    return SIGNATURES[call.fn].over == "sample" and all(one is None or one.level == "group" for one in types)


def _needed(draft: Draft, name: str, call: Function, signature: Signature) -> Iterator[Problem]:
    for key in signature.keys:
        if key not in call.keywords and key not in call.args:
            hint = f"keys reach a function under their own names: add {key!r} to `reads`"
            yield draft.problem(f"$.calls.{name}.reads", f"{call.fn!r} needs the key {key!r}", hint)
    for key in signature.args:
        if key not in call.args:
            text = f"{call.fn!r} needs the argument {key!r}"
            yield draft.problem(f"$.calls.{name}.args", text, f"write `args: {{{key}: ...}}`")


def _unknown(draft: Draft, name: str, call: Function, signature: Signature) -> Iterator[Problem]:
    named = isinstance(call.reads, dict)
    given = [(f"reads.{key}" if named else f"reads[{i}]", key) for i, key in enumerate(call.keywords)]
    for place, key in [*given, *((f"args.{key}", key) for key in call.args)]:
        if key not in signature.takes and "." not in key:
            hint = suggest(key, signature.takes)
            yield draft.problem(f"$.calls.{name}.{place}", f"{call.fn!r} does not take {key!r}", hint)


def _mistyped(draft: Draft, name: str, call: Function) -> Iterator[Problem]:
    """Rewards are numbers to a built-in function, and all other keys texts."""
    for i, (keyword, key) in enumerate(call.keywords.items()):
        numbers = keyword == "reward"
        for found in (write.type for write in draft.writes.get(key, ())[:1] if write.type is not None):
            if found.dtype in REWARD_TYPE.dtypes if numbers else found.dtype == "text" or is_prompt(found):
                continue
            place = f"reads.{keyword}" if isinstance(call.reads, dict) else f"reads[{i}]"
            text = f"{call.fn!r} takes {'numbers' if numbers else 'a text'} as {keyword!r}, and {key!r} is {found}"
            hint = "change its type where it is declared, or take a function of your own"
            yield draft.problem(f"$.calls.{name}.{place}", text, hint)


def _pattern(draft: Draft, name: str, call: Function) -> Iterator[Problem]:
    pattern = call.args.get("pattern", "")
    try:
        re.compile(pattern if call.fn == "format_match" else "")
    except (re.error, TypeError) as error:
        text = f"{pattern!r} is no regular expression: {error}"
        yield draft.problem(f"$.calls.{name}.args.pattern", text, "write one of Python's `re`, in single quotes")


def function_environment(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The variables that a function gets are listed by name; the values stand nowhere in the file."""
    for name, call in draft.of(Function):
        for i, variable in enumerate(call.env):
            own, _, value = variable.partition("=")
            if not _VARIABLE.fullmatch(own):
                yield draft.problem(
                    f"$.calls.{name}.env[{i}]", "this is not the name of an environment variable", _NAMES
                )
            elif value or own != variable:
                text = f"the value of {own!r} does not belong in the file"
                yield draft.problem(
                    f"$.calls.{name}.env[{i}]", text, f"write {own}, and set it where you start the run"
                )
            elif own.startswith("REALGRAPH_"):
                yield draft.problem(f"$.calls.{name}.env[{i}]", f"{own!r} belongs to realgraph itself", _NAMES)


def function_ids(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Token ids beside the text are those of a prompt that the function reads, under a keyword of their own."""
    for name, call in draft.of(Function):
        for i, key in enumerate(call.ids):
            place = f"$.calls.{name}.ids[{i}]"
            types = [
                write.type for write in draft.writes.get(call.keywords.get(key, key), ()) if write.type is not None
            ]
            if key not in call.keywords:
                yield draft.problem(place, f"{name!r} does not read {key!r}", f"add {key!r} to `reads`")
            elif types and not is_prompt(types[0]):
                text = f"{key!r} is {types[0]}, and reaches the function as it is"
                yield draft.problem(place, text, "`ids` is for prompts, of type group tokens")
            elif ids_keyword(key) in (*call.keywords, *call.args):
                text = f"the token ids of {key!r} come as {ids_keyword(key)!r}, which the call already has"
                yield draft.problem(place, text, f"rename the other {ids_keyword(key)!r}")


def function_level(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A function called per sample can't write a key of the group: its samples might disagree."""
    for name, call in draft.of(Function):
        for key, text in call.writes.items():
            key_type = parse_type(text)
            if key_type is not None and key_type.level == "group" and call.over == "sample":
                problem = f"{key!r} is one value a group, but the function is called for every sample"
                yield draft.problem(f"$.calls.{name}.writes.{key}", problem, "write `over: group`, or a sample key")
