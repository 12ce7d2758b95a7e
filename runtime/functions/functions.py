"""User functions: what they are given, what they must return, how they are found. Runs none. No torch.

A function gets keywords: every key its call reads, under the key's own name or the one that `reads` gives it, and the
call's `args`.

    over: sample   the sample's values: text, a number, a JSON value, or a list of numbers for tokens and token keys;
                   a prompt as text, without special tokens, and under `<its name>_ids` where the call's `ids` names it
    over: group    sample and token keys: a list with one such value a sample; group keys: the group's one value
    over: batch    every key: a list with one such value a sample (group keys repeated)

It returns the value of the one key its call writes, or a mapping from key to value where it writes several:

    over: sample   sample key: a number, bool, text or JSON value; token key: a list, one number a token
    over: group    sample key: a list, one value a sample; group key: one value
    over: batch    sample key: a list, one value a sample; group key: a list, one value a group, in the order of the
                   groups' first samples

It may be `async def`: then many units run at once in one process. It may print, and take `timeout_seconds` a unit.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import DType, KeyType, fits, ids_keyword, parse_key_type
from realgraph.graphs.spec import Function
from realgraph.runtime.functions.rewards import FUNCTIONS
from realgraph.runtime.functions.user_errors import error_text


class Unit(Struct, frozen=True):
    """One call of a function."""

    samples: tuple[int, ...]
    kwargs: dict[str, Any]
    groups: tuple[int, ...] = ()  # of each sample; () for a unit of one group
    lengths: tuple[int, ...] = ()  # tokens of each sample; () where the call writes no token key

    @property
    def n_groups(self) -> int:
        return len(set(self.groups)) if self.groups else 1

    @property
    def name(self) -> str:
        """`sample 7`, `samples 8 to 15`."""
        if len(self.samples) == 1:
            return f"sample {self.samples[0]}"
        return f"samples {min(self.samples)} to {max(self.samples)}" if self.samples else "no samples"


class UnitResult(Struct, frozen=True):
    """The result of a unit. With `on_error: score` it has values in spite of an error."""

    values: dict[str, Any] = field(default_factory=dict)  # key -> value, checked, plain (float, int, bool, str, JSON)
    error: str = ""  # one line that names the sample; '' if all went well
    detail: str = ""  # the traceback
    sample: int = -1  # the one to blame; -1 for a group or batch
    seconds: float = 0.0


def keywords_of(
    call: Function, given: Mapping[str, Any], prompts: Collection[str], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The keywords of one unit, from the values of the keys that the call reads.

    prompts: the keys of `given` that hold prompts' token ids, one list or one a sample; decode: ids to text.
    """
    words = call.keywords
    keywords = {**call.args, **{word: given[key] for word, key in words.items()}}
    for word in [word for word, key in words.items() if key in prompts]:
        value = keywords[word]
        single = all(isinstance(item, int) for item in value)
        keywords[word] = decode(value) if single else [decode(ids) for ids in value]
    return keywords | {ids_keyword(word): given[words[word]] for word in call.ids}


def keyword_names(call: Function) -> tuple[str, ...]:
    """The names under which a function gets what its call reads, and its `args`."""
    return tuple(dict.fromkeys([*call.keywords, *call.args, *map(ids_keyword, call.ids)]))


def load_function(fn: str, user_dir: str) -> Callable[..., Any]:
    """The function that a name stands for: a built-in, or `module:function` imported with `user_dir` first in the path.

    Raises ImportError, AttributeError, TypeError, or whatever the user's module raises on import.
    """
    if fn in FUNCTIONS:
        return FUNCTIONS[fn]
    if user_dir not in sys.path:
        sys.path.insert(0, user_dir)
    module, _, path = fn.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        if not hasattr(target, name):
            raise AttributeError(f"module {module!r} ({_origin(module, target, user_dir)}) has no {path!r}")
        target = getattr(target, name)
    if not callable(target):
        raise TypeError(f"{fn!r} is no function but {type(target).__name__}")
    checked: Callable[..., Any] = target
    return checked


def _origin(module: str, found: Any, user_dir: str) -> str:
    """The file that a module came from, and the user's own of that name where another was found before it."""
    file, own = getattr(found, "__file__", None) or "of Python itself", Path(user_dir, *module.split("."))
    mine = own.with_suffix(".py")
    return file if not mine.is_file() or str(mine) == file else f"{file}, which comes before {mine}: rename that"


def load_applied(entries: Mapping[str, str], user_dir: str) -> dict[str, Callable[..., Any]]:
    """The functions of `apply` entries: YAML path -> name in, name -> function out. Raises ConfigError."""
    functions: dict[str, Callable[..., Any]] = {}
    for path, fn in entries.items():
        try:
            functions[fn] = load_function(fn, user_dir)
        except Exception as error:  # the user's module may raise anything while it is imported
            text = f"can't load {fn!r}: {error_text(error)}"
            hint = f"`module:function` is imported from {user_dir}"
            raise ConfigError([Problem(Where(path=path), text, hint, "function")]) from error
    return functions


def refuse_keywords(function: Callable[..., Any], keywords: Sequence[str]) -> str:
    """Reason why `function` can't be called with just these keywords, '' if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins of C modules tell nothing
        return ""
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        return f"it is called with {', '.join(keywords) or 'nothing'}, but is defined with {signature}: {error}"
    return ""


def check_output(call: Function, unit: Unit, returned: object) -> dict[str, Any]:
    """The written keys' values out of what a function returned. Raises ValueError saying what was expected."""
    names = list(call.writes)
    if not names:
        return {}
    mapping = returned if isinstance(returned, Mapping) else None
    if mapping is not None and set(mapping) == set(names):
        return {name: _value(call, unit, name, mapping[name]) for name in names}
    if len(names) > 1:
        what = f"the keys {sorted(map(str, mapping))}" if mapping is not None else _show(returned)
        raise ValueError(f"returned {what}; expected a mapping with the keys {', '.join(names)}")
    try:
        return {names[0]: _value(call, unit, names[0], returned)}
    except ValueError as error:
        if mapping is None:
            raise
        keys = ", ".join(map(str, mapping))
        raise ValueError(f"{error} (or name each of its keys, {keys}, under the call's `writes`)") from None


def error_output(call: Function, unit: Unit) -> dict[str, Any]:
    """`error_value` for every written key, in the shape that the unit needs."""
    output: dict[str, Any] = {}
    for name, text in call.writes.items():
        key = parse_key_type(text)
        one = _plain_error(call.error_value, key.dtype)
        output[name] = _fill(call, unit, key, one)
    return output


def _plain_error(value: float, dtype: DType) -> Any:
    match dtype:
        case "bool":
            return bool(value)
        case "int32" | "int64":
            return int(value)
        case "float32" | "float64":
            return value
        case "tokens":
            return []
        case "text":
            return ""
        case "json" | "experts":
            return None


def _fill(call: Function, unit: Unit, key: KeyType, one: Any) -> Any:
    if key.level == "token":
        rows = [[one] * length for length in unit.lengths]
        return rows[0] if call.over == "sample" else rows
    n = _n_values(call, unit, key)
    return one if n is None else [one] * n


def _n_values(call: Function, unit: Unit, key: KeyType) -> int | None:
    """Number of values that a key has in one unit: None is a single bare one."""
    if call.over == "sample" or (key.level == "group" and call.over == "group"):
        return None
    return unit.n_groups if key.level == "group" else len(unit.samples)


def _value(call: Function, unit: Unit, name: str, value: object) -> Any:
    key = parse_key_type(call.writes[name])
    if key.level == "token":
        return _token_values(call, unit, name, key, value)
    n = _n_values(call, unit, key)
    if n is None:
        return _scalar(name, key.dtype, value)
    return [_scalar(name, key.dtype, item) for item in _list_of(name, value, n, f"one a {key.level}")]


def _token_values(call: Function, unit: Unit, name: str, key: KeyType, value: object) -> Any:
    rows = [value] if call.over == "sample" else _list_of(name, value, len(unit.samples), "one list a sample")
    lengths = unit.lengths or tuple(len(row) if isinstance(row, list) else 0 for row in rows)
    checked = [
        [_scalar(name, key.dtype, item) for item in _list_of(name, row, n, "one a token")]
        for row, n in zip(rows, lengths, strict=True)
    ]
    return checked[0] if call.over == "sample" else checked


def _list_of(name: str, value: object, n: int, meaning: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != n:
        what = f"a list of {len(value)}" if isinstance(value, list) else _show(value)
        raise ValueError(f"returned {what} for {name!r}; expected a list of {n}, {meaning}")
    return value


def _scalar(name: str, dtype: DType, value: object) -> Any:
    """One value of a dtype; a whole number may stand for a float, and 0, 1 and floats of them for a bool."""
    match dtype:
        case "float32" | "float64":
            if isinstance(value, int | float) and fits(value, dtype):
                return float(value)
            expected = f"a finite number within {dtype}"
        case "int32" | "int64":
            if isinstance(value, int | float) and fits(value, dtype) and int(value) == value:
                return int(value)
            expected = f"a whole number within {dtype}"
        case "bool":
            if isinstance(value, int | float) and value in (0, 1):
                return bool(value)
            expected = "true or false"
        case "text":
            if isinstance(value, str):
                return value
            expected = "text"
        case "tokens":
            if isinstance(value, list) and all(isinstance(item, int) and 0 <= item < 2**31 for item in value):
                return value
            expected = "a list of token ids"
        case "json":
            return value
        case "experts":
            expected = "nothing: the experts of tokens are generation's to choose"
    raise ValueError(f"returned {_show(value)} for {name!r}; expected {expected}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
