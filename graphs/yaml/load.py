"""Loads files as a GraphSpec: finds graphs, lays a user's document over one, resolves references, decodes.

Knows the names of the library's graphs and the sections that a graph file shares with a run file; knows no rule of
the language (`check/compile.py` does) and no section of a run file but its type.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field, structs

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.spec import FORMAT, GraphSpec
from realgraph.graphs.yaml.document import Branch, Document, Tree, ancestors, child, read_document
from realgraph.graphs.yaml.library import library_folder, library_names
from realgraph.graphs.yaml.merge import interpolate, merge, references, walk
from realgraph.graphs.yaml.schema import check, fill, prepare, shown, type_of

S = TypeVar("S")
MOST_NAME_BYTES = 200  # a file system takes 255, and a time is added
SHARED = ("params", "models", "calls", "inputs")  # one namespace of graph file and run file


class _GraphFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The top level of a graph file; the shared sections are checked after the run file is laid over them."""

    name: str
    description: str = ""
    format: int = FORMAT
    params: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)


class Resolved(Struct, frozen=True):
    """A document made ready to decode."""

    written: Document  # after deletions, before defaults and references
    document: Document  # with both
    deleted: tuple[str, ...]  # paths that null removed


# --- finding ----------------------------------------------------------------------------------------------------------


def find_graph(name: str, folder: Path, where: Where) -> Path:
    """A library graph by its name, else a file by its path from `folder`. Raises ConfigError at `where`."""
    if name in library_names():
        return library_folder() / f"{name}.yaml"
    file = folder / name
    if file.is_file():
        return file
    known = library_names()
    looks_like_file = "/" in name or name.endswith((".yaml", ".yml"))
    looked = (
        f"there is no file {file}" if looks_like_file else f"{name!r} is neither a library graph nor the file {file}"
    )
    hint = suggest(name, known) if not looks_like_file else ""
    listing = f"library graphs: {', '.join(known)}"
    hint = hint if hint.startswith("did") else ""
    raise ConfigError([Problem(where, looked, " ".join(part for part in (hint, listing) if part), "graph")])


def shown_name(file: Path) -> str:
    """The name of a file in problems: short for the library, else relative to the working directory if shorter."""
    if file.parent == library_folder():
        return f"realgraph/graphs/library/{file.name}"
    try:
        return str(Path(os.path.realpath(file)).relative_to(os.path.realpath(Path.cwd())))
    except ValueError:
        return str(file)


# --- layers -----------------------------------------------------------------------------------------------------------


def read_graph(file: Path) -> tuple[Document, tuple[Problem, ...]]:
    """A graph file as the lower layer of a run. Raises ConfigError where it can't be read."""
    return graph_layer(read_document(file, shown_name(file)))


def graph_layer(document: Document) -> tuple[Document, tuple[Problem, ...]]:
    """A graph file with the kinds of its steps and terms named, without the top-level entries that are wrong."""
    problems = (*check(type_of(_GraphFile), document), *format_problems(document))
    wrong = {problem.where.path for problem in problems}
    right = {key: value for key, value in document.tree.items() if child("$", key) not in wrong}
    return _document(prepare(type_of(GraphSpec), right, "$", []), document), problems


def format_problems(document: Document) -> tuple[Problem, ...]:
    """Refuses a file of a later format than this version reads."""
    given = document.tree.get("format", FORMAT)
    if not isinstance(given, int) or 1 <= given <= FORMAT:
        return ()
    text = f"format {given} is unknown: this version reads formats 1 to {FORMAT}"
    return (Problem(document.where("$.format"), text, "a newer realgraph may read it", "format"),)


def name_problems(name: str, where: Where) -> tuple[Problem, ...]:
    """A name becomes part of a directory's name, `runs/NAME-TIME`: it is one component of a path."""
    if name.strip() and "/" not in name and name.isprintable() and len(name.encode()) <= MOST_NAME_BYTES:
        return ()
    text = f"{shown(name)} can't be the name of a run: a name is one printable word or several, without a slash"
    return (Problem(where, text, "to write elsewhere, set outputs.dir", "name"),)


def lay_over(graph: Document, user: Document) -> tuple[Document, tuple[Problem, ...]]:
    """The user's document over the shared sections of the graph, without entries that name nothing: those are problems.

    A section that the user leaves empty changes nothing. A whole number given for a parameter whose default is a float
    becomes one.
    """
    problems = {**_param_problems(graph, user), **_call_problems(graph, user), **_model_problems(graph, user)}
    tree = {key: value for key, value in user.tree.items() if value is not None or key not in SHARED}
    for name in SHARED:
        if isinstance(section := tree.get(name), dict):
            tree[name] = {key: v for key, v in section.items() if child(child("$", name), key) not in problems}
    below = Document({key: value for key, value in graph.tree.items() if key in SHARED}, graph.marks)
    merged = merge(below, Document(tree, user.marks))
    params = _section(merged, "params")
    for name, default in _section(graph, "params").items():
        value = params.get(name)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            params[name] = float(value)
    root = user.marks.get("$") or Where(path="$")
    return Document(merged.tree, {**merged.marks, "$": root}), tuple(problems.values())


def _section(document: Document, name: str) -> Branch:
    section = document.tree.get(name)
    return section if isinstance(section, dict) else {}


def _param_problems(graph: Document, user: Document) -> dict[str, Problem]:
    declared = _section(graph, "params")
    problems = {}
    for name, value in _section(user, "params").items():
        path = child("$.params", name)
        if name not in declared:
            text = f"the graph {graph.tree.get('name')} has no parameter {name!r}"
            problems[path] = Problem(user.where(path), text, suggest(name, declared), "params")
        elif value is None and declared[name] is not None:
            text = "a parameter can't be deleted: the graph refers to it"
            hint = f"leave it out for its default, {shown(declared[name])}"
            problems[path] = Problem(user.where(path), text, hint, "params")
        elif not _is_reference(value) and not _same_type(declared[name], value):
            problems[path] = _wrong_param(user.where(path), declared[name], value)
    return problems


def _call_problems(graph: Document, user: Document) -> dict[str, Problem]:
    """A call that the graph lacks must be a whole one: without a kind it is a wrong name."""
    calls = _section(graph, "calls")
    problems = {}
    for name, value in _section(user, "calls").items():
        if name in calls or (isinstance(value, dict) and "kind" in value):
            continue
        path = child("$.calls", name)
        if value is None and path in user.removed:
            continue
        text = f"the graph {graph.tree.get('name')} has no call {name!r}"
        hint = suggest(name, calls) or "a call of your own needs its kind"
        problems[path] = Problem(user.where(path), text, hint, "calls")
    return problems


def _model_problems(graph: Document, user: Document) -> dict[str, Problem]:
    """A role that the graph lacks must be run by a call of the user's, or start another role."""
    roles = _section(graph, "models")
    used = [call.get("model") for call in _section(user, "calls").values() if isinstance(call, dict)]
    used += [role.get("init") for role in _section(user, "models").values() if isinstance(role, dict)]
    problems = {}
    for name, value in _section(user, "models").items():
        path = child("$.models", name)
        if name not in roles and name not in used and not (value is None and path in user.removed):
            text = f"the graph {graph.tree.get('name')} has no role {name!r}, and no call of yours runs it"
            orphan = any(gone.startswith("$.calls.") for gone in user.removed)
            hint = f"where its call was deleted, delete it too: models.{name}=null" if orphan else suggest(name, roles)
            problems[path] = Problem(user.where(path), text, hint, "models")
    return problems


def _param_type_problems(graph: Document, resolved: Document) -> list[Problem]:
    """Parameters that refer to a value which is not of the type of the graph's default."""
    final = _section(resolved, "params")
    return [
        _wrong_param(resolved.where(child("$.params", name)), default, final[name])
        for name, default in _section(graph, "params").items()
        if final.get(name) is not None and not _same_type(default, final[name])
    ]


def _is_reference(value: Tree) -> bool:
    return isinstance(value, str) and "${" in value


def _same_type(default: Tree, value: Tree) -> bool:
    """True where a value may stand for the default; any may where the default is null or refers to another value."""
    whole_for_float = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
    return default is None or _is_reference(default) or whole_for_float or type(value) is type(default)


def _wrong_param(where: Where, default: Tree, value: Tree) -> Problem:
    text = f"expected {_type_words(default)}, as the graph's default {shown(default)} is; got {shown(value)}"
    return Problem(where, text, "", "params")


def _type_words(value: Tree) -> str:
    match value:
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "a mapping"


# --- resolving and decoding -------------------------------------------------------------------------------------------


def resolve(struct: type, merged: Document, graph: Document, defaults: Branch) -> Resolved:
    """Deletions, defaults, references and every check of types. Raises ConfigError with all problems.

    graph: the lower layer, whose defaults give parameters their types. defaults: what `${...}` may refer to beside the
    document, such as the defaults of a run where there is none.
    """
    kind = type_of(struct)
    deleted: list[str] = []
    written = _document(prepare(kind, merged.tree, "$", deleted), merged)
    filled = _document(fill(kind, written.tree), merged)
    referred, problems = interpolate(filled, defaults)
    final = _document(fill(kind, prepare(kind, referred.tree, "$", deleted)), merged)
    problems = (*problems, *_param_type_problems(graph, final))
    type_problems = list(check(kind, final))
    mistakes = [traced(problem, filled) for problem in (*type_problems, *_not_finite(final, type_problems))]
    if problems:  # what a failed reference (it is null now) or a wrong parameter breaks is no mistake of its own
        doubtful = {path for path, value in walk(filled.tree, "$") if _is_reference(value)}
        mistakes = [p for p in mistakes if doubtful.isdisjoint(ancestors(p.where.path))]
    if problems or mistakes:
        raise ConfigError(sorted([*problems, *mistakes]))
    return Resolved(written, final, tuple(dict.fromkeys(deleted)))


def _not_finite(document: Document, problems: Sequence[Problem]) -> Iterator[Problem]:
    """Infinite numbers, and those that are none, where any value may stand: JSON has no such numbers."""
    known = {problem.where.path for problem in problems}
    for path, value in walk(document.tree, "$"):
        if isinstance(value, float) and not math.isfinite(value) and path not in known:
            yield Problem(document.where(path), f"expected a finite number, got {shown(value)}", "", "schema")


def traced(problem: Problem, written: Document) -> Problem:
    """A problem about a value that is a reference also names the place that gave the value."""
    value = dict(walk(written.tree, "$")).get(problem.where.path)
    names = references(value) if isinstance(value, str) else ()
    places = [(name, written.where(f"$.{name}")) for name in names]
    sources = [
        f"{name}, {place.file}:{place.line}" if place.line else f"{name}, {place.file}" for name, place in places
    ]
    trace = f"its value comes from {' and '.join(sources)}" if sources else ""
    return structs.replace(problem, hint="; ".join(part for part in (problem.hint, trace) if part))


def _document(tree: Tree, like: Document) -> Document:
    assert isinstance(tree, dict)
    return Document(tree, like.marks)


def decode(struct: type[S], document: Document) -> S:
    """The typed value of a document that `resolve` has passed. Raises ConfigError on what only msgspec sees."""
    try:
        return msgspec.convert(document.tree, struct)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        raise ConfigError([Problem(document.where(path.rstrip("`") or "$"), text, "", "schema")]) from error


def load_graph(file: Path, user: Document, defaults: Branch) -> tuple[GraphSpec, Resolved]:
    """A graph file without a run, the user's overrides laid over it. Raises ConfigError with all problems.

    defaults: of a run, so that references to them can be resolved.
    """
    return load_graph_document(read_document(file, shown_name(file)), user, defaults)


def load_graph_document(document: Document, user: Document, defaults: Branch) -> tuple[GraphSpec, Resolved]:
    """The same from a parsed file."""
    graph, wrong = graph_layer(document)
    strange = [key for key in user.tree if key not in SHARED]
    problems = [
        *wrong,
        *(Problem(user.where(child("$", k)), f"a graph has no {k!r}", suggest(k, SHARED)) for k in strange),
    ]
    merged, misnamed = lay_over(graph, user)
    head = {key: value for key, value in graph.tree.items() if key not in SHARED}
    sections = {key: value for key, value in merged.tree.items() if key in SHARED}
    whole = Document(
        {**head, **sections}, {**merged.marks, **graph.marks} if not user.tree else {**graph.marks, **merged.marks}
    )
    try:
        resolved = resolve(GraphSpec, whole, graph, defaults)
    except ConfigError as error:
        raise ConfigError(all_problems([*problems, *misnamed], error.problems)) from None
    spec = decode(GraphSpec, resolved.document)
    problems += [*misnamed, *name_problems(spec.name, resolved.document.where("$.name"))]
    if problems:
        raise ConfigError(sorted(problems))
    return spec, resolved


def all_problems(earlier: Sequence[Problem], later: Sequence[Problem]) -> list[Problem]:
    """All problems in the order of their places; what was wrong already is not reported missing as well."""
    known = {problem.where.path for problem in earlier}
    return sorted([*earlier, *(problem for problem in later if problem.where.path not in known)])


def in_its_section(problem: Problem, merged: Document) -> Problem:
    """A key at the top of a run file that has no place there: its hint says where the graph has one of that name."""
    name = problem.where.path.removeprefix("$.")
    if not problem.text.startswith("unknown key") or name not in merged.tree or problem.hint.startswith("did"):
        return problem
    sections = {section: known for section in SHARED if isinstance(known := merged.tree.get(section), dict)}
    homes = [f"'{section}.{name}'" for section, known in sections.items() if name in known and section != "inputs"]
    close = suggest(name, sections.get("params", ()))
    if homes:
        return structs.replace(problem, hint=f"did you mean {' or '.join(homes)}?")
    closer = close.startswith("did") and problem.hint.startswith("known")
    return structs.replace(problem, hint=f"in params: {close}") if closer else problem


def user_document(file: Document, overrides: Sequence[Document]) -> Document:
    """A run file (or nothing) with the command line's overrides laid over it, the last one on top."""
    merged, removed = file, set(file.removed)
    for override in overrides:
        removed |= set(_removed(merged, override))
        merged = merge(merged, override)
    return structs.replace(merged, removed=frozenset(removed))


def _removed(lower: Document, upper: Document) -> Iterator[str]:
    """The entries of the shared sections that `upper` deletes out of `lower`."""
    for name in SHARED:
        there = _section(lower, name)
        yield from (
            child(child("$", name), key)
            for key, value in _section(upper, name).items()
            if value is None and there.get(key) is not None
        )
