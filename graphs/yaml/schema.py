"""Typed structs against a tree of values: names of kinds, deletions, defaults, and every mismatch at once.

msgspec stops at its first error, so `check` walks the types itself; what it passes, `msgspec.convert` takes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import cast, get_args

import msgspec
from msgspec import inspect

from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.maths import Term
from realgraph.graphs.spec import Inference, Train
from realgraph.graphs.steps import Step
from realgraph.graphs.yaml.document import Branch, Document, Tree, child

# An entry of `steps` or `terms` that leaves its kind out is of the kind that its name says.
# What is meant where 0 is given for a field that must be above it.
_ZERO_HINTS: dict[tuple[type, str], str] = dict.fromkeys(
    [(Train, "temperature"), (Inference, "temperature")],
    "log-probabilities have no temperature 0; greedy decoding is `temperature: 0` of a generate call (and of `eval`, "
    "where it is the default), without a policy gradient",
)
NAMED: frozenset[type] = frozenset((*get_args(Step), *get_args(Term)))
_SHOWN = 60  # characters of a wrong value that a problem quotes


@cache
def type_of(struct: type) -> inspect.Type:
    """msgspec's description of a type."""
    return inspect.type_info(struct)


def members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The alternatives of a union; any other type is its only one."""
    return tuple(kind.types) if isinstance(kind, inspect.UnionType) else (kind,)


def structs(kind: inspect.Type) -> tuple[inspect.StructType, ...]:
    """The structs among the alternatives."""
    return tuple(member for member in members(kind) if isinstance(member, inspect.StructType))


def admits_null(kind: inspect.Type) -> bool:
    """True where null is a value of this type."""
    return any(isinstance(member, inspect.NoneType | inspect.AnyType) for member in members(kind))


def struct_for(kind: inspect.Type, value: Branch) -> inspect.StructType | None:
    """The struct that a mapping is meant to be: the only one, or the one its `kind` names."""
    choices = structs(kind)
    if len(choices) == 1:
        return choices[0]
    for choice in choices:
        if choice.tag_field is not None and value.get(choice.tag_field) == choice.tag:
            return choice
    return None


def dict_of(kind: inspect.Type) -> inspect.DictType | None:
    """The mapping type among the alternatives."""
    return next((member for member in members(kind) if isinstance(member, inspect.DictType)), None)


def item_types(kind: inspect.Type, n_items: int) -> Sequence[inspect.Type] | None:
    """The types of a list's items where one alternative is a list, else None."""
    for member in members(kind):
        if isinstance(member, inspect.VarTupleType | inspect.ListType):
            return [member.item_type] * n_items
        if isinstance(member, inspect.TupleType):
            return member.item_types
    return None


def prepare(kind: inspect.Type, value: Tree, path: str, deleted: list[str]) -> Tree:
    """Name the kinds of steps and terms, and carry out deletions: their paths are appended to `deleted`.

    Null deletes an entry of a mapping and resets a field to its default; where null is a value of the field, and in
    the free mappings `params` and `args`, it stays. Where `off` is a choice, and false is none, that is the word: YAML
    reads one as the other.
    """
    if isinstance(value, list):
        types = item_types(kind, len(value)) or ()
        done = [
            prepare(t, item, child(path, i), deleted) for i, (t, item) in enumerate(zip(types, value, strict=False))
        ]
        return done + value[len(done) :]
    if value is False and any(
        isinstance(member, inspect.LiteralType) and "off" in member.values for member in members(kind)
    ):
        return "off"
    if not isinstance(value, dict):
        return value
    kept: Branch = {}
    mapping, struct = dict_of(kind), struct_for(kind, value)
    fields = {field.encode_name: field.type for field in struct.fields} if struct else {}
    for key, item in value.items():
        inner = fields.get(key) or (mapping.value_type if mapping else inspect.AnyType())
        entry = mapping is not None and not isinstance(inner, inspect.AnyType)
        if item is None and (entry or not admits_null(inner)):
            deleted.append(child(path, key))
            continue
        if mapping and isinstance(item, dict):
            item = _named(inner, key, item)
        kept[key] = prepare(inner, item, child(path, key), deleted)
    return kept


def _named(kind: inspect.Type, name: str, entry: Branch) -> Branch:
    for choice in structs(kind):
        if choice.cls in NAMED and choice.tag == name and choice.tag_field and choice.tag_field not in entry:
            return {choice.tag_field: name, **entry}
    return entry


def fill(kind: inspect.Type, value: Tree) -> Tree:
    """The value with the defaults of what it leaves out, in the struct's order. Wrong types stay as they are."""
    if isinstance(value, list):
        types = item_types(kind, len(value)) or ()
        done = [fill(t, item) for t, item in zip(types, value, strict=False)]
        return done + value[len(done) :]
    if not isinstance(value, dict):
        return value
    struct, mapping = struct_for(kind, value), dict_of(kind)
    if struct is None:
        return {key: fill(mapping.value_type, item) for key, item in value.items()} if mapping else value
    filled: Branch = {key: value[key] for key in (struct.tag_field,) if key is not None and key in value}
    for field in struct.fields:
        if field.encode_name in value:
            filled[field.encode_name] = fill(field.type, value[field.encode_name])
        elif not field.required:
            filled[field.encode_name] = default_of(field)
    return filled | {key: item for key, item in value.items() if key not in filled}


def default_of(field: inspect.Field) -> Tree:
    """A field's default as plain values, the defaults within it included."""
    made = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return fill(field.type, plain(made))


def plain(value: object) -> Tree:
    """A struct or a tuple as the mappings and lists that a file would hold."""
    built = msgspec.to_builtins(value)
    if isinstance(built, dict):
        return {key: plain(item) for key, item in built.items()}
    if isinstance(built, list | tuple):
        return [plain(item) for item in built]
    return cast(Tree, built)


def defaults_of(struct: type) -> Branch:
    """The defaults of a struct, sections of required fields left out."""
    kind = type_of(struct)
    assert isinstance(kind, inspect.StructType)
    return {field.encode_name: default_of(field) for field in kind.fields if not field.required}


# --- checking ---------------------------------------------------------------------------------------------------------


def check(kind: inspect.Type, document: Document) -> Iterator[Problem]:
    """Every place where the document is not of this type."""
    for path, text, hint in mismatches(kind, document.tree, "$"):
        yield Problem(document.where(path), text, hint, "schema")


Mismatch = tuple[str, str, str]  # path, text, hint


def mismatches(kind: inspect.Type, value: Tree, path: str, beside: Sequence[str] = ()) -> Iterator[Mismatch]:
    """Path, text and hint of everything in `value` that is not of the type. beside: names of sibling entries."""
    if any(isinstance(member, inspect.AnyType) for member in members(kind)):
        return
    if isinstance(value, dict) and (structs(kind) or dict_of(kind)):
        yield from _mapping(kind, value, path, beside)
    elif isinstance(value, list) and (types := item_types(kind, len(value))) is not None:
        if len(types) != len(value):
            yield path, f"expected {describe(kind)}, got {len(value)} items", ""
            return
        for i, (item_type, item) in enumerate(zip(types, value, strict=True)):
            yield from mismatches(item_type, item, child(path, i))
    elif not any(_is_scalar_of(member, value) for member in members(kind)):
        yield path, f"expected {describe(kind)}, got {shown(value)}", _hint(kind, value)


def _mapping(kind: inspect.Type, value: Branch, path: str, beside: Sequence[str]) -> Iterator[Mismatch]:
    struct, mapping = struct_for(kind, value), dict_of(kind)
    if struct is not None:
        yield from _fields(kind, struct, value, path)
    elif mapping is not None:
        for key, item in value.items():
            yield from mismatches(mapping.value_type, item, child(path, key), [name for name in value if name != key])
    else:
        yield from _unknown_kind(structs(kind), value, path, beside)


def _unknown_kind(
    choices: Sequence[inspect.StructType], value: Branch, path: str, beside: Sequence[str]
) -> Iterator[Mismatch]:
    tag_field = choices[0].tag_field or "kind"
    tags = [str(choice.tag) for choice in choices]
    if tag_field not in value:  # where the name is to say the kind, it may be the name that is wrong
        names = [*tags, *beside] if choices[0].cls in NAMED else beside
        near = suggest(path.rpartition(".")[2], names)
        hint = near if near.startswith("did") else ""
        yield child(path, tag_field), f"required, but not given: one of {', '.join(tags)}", hint
        return
    given = value[tag_field]
    hint = suggest(given, tags) if isinstance(given, str) else ""
    yield child(path, tag_field), f"unknown kind {shown(given)}: expected one of {', '.join(tags)}", hint


def _fields(kind: inspect.Type, struct: inspect.StructType, value: Branch, path: str) -> Iterator[Mismatch]:
    fields = {field.encode_name: field for field in struct.fields}
    known = [*fields, struct.tag_field] if struct.tag_field else [*fields]
    meant: set[str] = set()
    for key in value:
        if key not in known:
            hint = suggest(key, known)
            meant.update(name for name in known if repr(name) in hint)
            yield (
                child(path, key),
                f"unknown key {key!r}{_of(struct)}",
                _elsewhere(kind, struct, key) or _inside(fields, key) or hint,
            )
    for name, field in fields.items():
        if name in value:
            wrong = mismatches(field.type, value[name], child(path, name))
            own = _ZERO_HINTS.get((struct.cls, name), "") if value[name] == 0 else ""
            beside = _sections_beside(fields, name, value[name], child(path, name))
            yield from ((at, text, beside.get(at) or hint or own) for at, text, hint in wrong)
        elif field.required and name not in meant:
            yield child(path, name), f"required, but not given: expected {describe(field.type)}", ""


def _of(struct: inspect.StructType) -> str:
    return f" of kind {struct.tag}" if struct.tag_field else ""


def _sections_beside(fields: Mapping[str, inspect.Field], name: str, section: Tree, path: str) -> Mapping[str, str]:
    """For the keys of a section that it does not have: those beside it that do, by path."""
    own = _keys(fields[name].type)
    if not own or not isinstance(section, dict):
        return {}
    found = {key: [f"`{other}`" for other in fields if key in _keys(fields[other].type)] for key in section}
    return {
        child(path, key): f"it belongs to {' or '.join(others)}"
        for key, others in found.items()
        if others and key not in own
    }


def _inside(fields: Mapping[str, inspect.Field], key: str) -> str:
    """Names the sections at this place that do have the key."""
    sections = [f"`{name}`" for name, field in fields.items() if key in _keys(field.type)]
    return f"it belongs to {' or '.join(sections)}" if sections else ""


def _keys(kind: inspect.Type) -> Collection[str]:
    """The keys of a section; none where it is something else, or has a kind of its own."""
    sections = structs(kind)
    plain = len(sections) == 1 and not sections[0].tag_field
    return [field.encode_name for field in sections[0].fields] if plain else ()


def _elsewhere(kind: inspect.Type, struct: inspect.StructType, key: str) -> str:
    """Names the kinds beside this one that do have the key."""
    tags = [str(s.tag) for s in structs(kind) if s is not struct and key in {field.encode_name for field in s.fields}]
    return f"it belongs to kind {' and '.join(tags)}" if tags else ""


def _is_scalar_of(kind: inspect.Type, value: Tree) -> bool:
    match kind:
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool) and _in_range(kind, value)
        case inspect.FloatType():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and math.isfinite(cast(float, value)) and _in_range(kind, cast(float, value))
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.LiteralType():
            return any(type(value) is type(choice) and value == choice for choice in kind.values)
        case _:
            return False


def _in_range(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        (kind.gt is None or value > kind.gt)
        and (kind.ge is None or value >= kind.ge)
        and (kind.lt is None or value < kind.lt)
        and (kind.le is None or value <= kind.le)
    )


def _hint(kind: inspect.Type, value: Tree) -> str:
    types = members(kind)
    text_wanted = any(isinstance(member, inspect.StrType) for member in types)
    number_wanted = any(isinstance(member, inspect.IntType | inspect.FloatType) for member in types)
    choices = [str(c) for member in types if isinstance(member, inspect.LiteralType) for c in member.values]
    if isinstance(value, str) and choices:
        return suggest(value, choices)
    if isinstance(value, bool) and (text_wanted or choices):
        return "YAML reads on, off, yes and no as true and false: quote the word"
    if isinstance(value, int | float) and text_wanted:
        return f'quote it: "{value}"'
    if isinstance(value, float) and value.is_integer() and any(_is_scalar_of(member, int(value)) for member in types):
        return f"write {int(value)}"
    if isinstance(value, str) and number_wanted and _looks_like_number(value):
        return "leave the quotes out"
    items = item_types(kind, 1) or ()
    if len(items) == 1 and not isinstance(value, dict | list) and value is not None:
        return f"write [{value}]" if any(_is_scalar_of(one, value) for one in members(items[0])) else ""
    return ""


def _looks_like_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- words for people -------------------------------------------------------------------------------------------------


def shown(value: Tree) -> str:
    """A wrong value, for a problem."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
        case _:
            return repr(value)


def describe(kind: inspect.Type) -> str:
    """The values of a type in words, for a problem and for the reference."""
    match kind:
        case inspect.UnionType():
            parts = [describe(member) for member in kind.types if not isinstance(member, inspect.StructType)]
            return " or ".join([*_describe_structs(structs(kind)), *parts])
        case inspect.StructType():
            return "a mapping"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType():
            choices = ", ".join(str(choice) for choice in kind.values)
            return f"one of {choices}" if len(kind.values) > 1 else choices
        case inspect.VarTupleType() | inspect.ListType():
            return f"a list, each item {describe(kind.item_type)}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)} items, each {describe(kind.item_types[0])}"
        case inspect.DictType():
            return "a mapping"
        case _:
            return "any value"


def _describe_structs(choices: Sequence[inspect.StructType]) -> list[str]:
    tags = [str(choice.tag) for choice in choices if choice.tag_field]
    return [f"a mapping with kind {', '.join(tags)}"] if tags else ["a mapping"] if choices else []


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le)]
    return " and".join(f" {sign} {_number(bound)}" for sign, bound in bounds if bound is not None)


def _number(value: float) -> str:
    """`0.5`, `1`, `1,000,000`."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
