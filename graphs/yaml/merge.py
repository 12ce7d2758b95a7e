"""Laying one document over another, and `${...}` references inside the result. Knows no field of the language."""

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realgraph.graphs.errors import Problem, Where, suggest
from realgraph.graphs.yaml.document import Branch, Document, Tree, child

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
_OPENING = re.compile(r"(\\*)\$\{")  # an odd number of backslashes makes it text, as in OmegaConf
MISSING = "???"
Keys: TypeAlias = tuple[str | int, ...]


def merge(lower: Document, upper: Document) -> Document:
    """`upper` over `lower`: mappings merge, everything else replaces, null stays as a mark of deletion.

    A call, a part of one, or `launch` of another `kind` replaces the lower one, whose fields are those of its own kind.
    A new entry stands before the lower entry that follows it in `upper`, and at the end where none does: so
    `steps: {overlong: {...}, center: {}}` runs `overlong` before the graph's `center`.
    """
    marks: dict[str, Where] = {}
    tree = _merge(lower, upper, marks)
    if "$" in upper.marks or "$" in lower.marks:
        marks["$"] = upper.marks.get("$") or lower.marks["$"]
    return Document(tree, marks)


def _merge(lower: Document, upper: Document, marks: dict[str, Where]) -> Branch:
    def join(low: Branch, high: Branch, path: str) -> Branch:
        joined: Branch = {}
        for key in _in_order(low, high):
            here = child(path, key)
            if key not in high:
                joined[key] = low[key]
                _keep(low[key], here, lower.marks, marks)
                continue
            old, new = low.get(key), high[key]
            if isinstance(old, dict) and isinstance(new, dict) and not _other_variant(here, old, new):
                if here in upper.marks or here in lower.marks:
                    marks[here] = upper.marks.get(here) or lower.marks[here]
                joined[key] = join(old, new, here)
            else:
                joined[key] = new
                _keep(new, here, upper.marks, marks)
        return joined

    return join(lower.tree, upper.tree, "$")


def _in_order(low: Branch, high: Branch) -> list[str]:
    """The keys of `low` as they stand, each new one before the key of `low` that follows it in `high`."""
    before: dict[str, list[str]] = {}
    waiting: list[str] = []
    for key in high:
        if key in low:
            before[key] = waiting
            waiting = []
        else:
            waiting.append(key)
    return [*(name for key in low for name in (*before.get(key, ()), key)), *waiting]


def _other_variant(path: str, old: Branch, new: Branch) -> bool:
    """True where two mappings are different variants of one thing: elsewhere `kind` is plain data."""
    return path.startswith(("$.calls.", "$.launch")) and "kind" in old and "kind" in new and old["kind"] != new["kind"]


def _keep(value: Tree, path: str, source: dict[str, Where], marks: dict[str, Where]) -> None:
    for here, _ in walk(value, path):
        if here in source:
            marks[here] = source[here]


def walk(value: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    """Every value with its path, parents first."""
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, child(path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from walk(item, child(path, i))


def interpolate(document: Document, defaults: Branch) -> tuple[Document, tuple[Problem, ...]]:
    """Replace `${a.b}` by the value at that path of the document, or of `defaults` where the document has none.

    Only plain references: a resolver such as `${oc.env:HOME}` would make a run depend on what no file says. A
    reference that fails becomes null, with its problem.
    """
    problems: list[Problem] = []

    def refuse(keys: Keys, value: str) -> Tree:
        problem = _refusal(value, document.where(show(keys)))
        if problem is None:
            return value
        problems.append(problem)
        return None

    clean = replace_text(document.tree, refuse)
    assert isinstance(clean, dict)
    whole = merge(Document(defaults), Document(clean)).tree
    config = OmegaConf.create(whole)

    def resolve(keys: Keys, value: str) -> Tree:
        if "${" not in value:
            return value
        try:
            return _read(config, keys)
        except OmegaConfBaseException as error:
            problems.append(_unresolved(value, str(error), document.where(show(keys)), whole))
            return None

    tree = replace_text(clean, resolve)
    assert isinstance(tree, dict)
    return Document(tree, document.marks), tuple(problems)


def references(value: str) -> tuple[str, ...]:
    """The paths that a text refers to."""
    matches = (_REFERENCE.match(value, start) for start in _openings(value))
    return tuple(match[1] for match in matches if match)


def show(keys: Keys) -> str:
    """("calls", "train", 0) -> `$.calls.train[0]`."""
    path = "$"
    for key in keys:
        path = child(path, key)
    return path


def replace_text(value: Tree, change: Callable[[Keys, str], Tree], keys: Keys = ()) -> Tree:
    """A copy in which `change(keys, text)` stands for every text."""
    if isinstance(value, dict):
        return {key: replace_text(item, change, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_text(item, change, (*keys, i)) for i, item in enumerate(value)]
    return change(keys, value) if isinstance(value, str) else value


def _refusal(value: str, where: Where) -> Problem | None:
    if value.strip() == MISSING:
        return Problem(where, f"{MISSING} stands for a value that is still to be given")
    for start in _openings(value):
        if not _REFERENCE.match(value, start):
            reference = "".join(value[start:].partition("}")[:2])
            ways = "write ${params.name} or another path of this file, or \\${ for the text ${"
            hint = f"{ways}; ${{...:...}} (environment, files, code) is refused"
            return Problem(where, f"{reference} is not a plain reference", hint)
    return None


def _openings(value: str) -> Iterator[int]:
    """Positions where `${` begins a reference: not after an odd number of backslashes."""
    return (match.end() - 2 for match in _OPENING.finditer(value) if len(match[1]) % 2 == 0)


def escape(value: str) -> str:
    """Text that `interpolate` turns into `value`."""
    return _OPENING.sub(lambda match: f"{match[1]}{match[1]}\\${{", value)


def _read(config: DictConfig, keys: Keys) -> Tree:
    node: DictConfig | ListConfig = config
    for key in keys[:-1]:
        node = node[key]  # type: ignore[index]
    value = node[keys[-1]]  # type: ignore[index]
    if isinstance(value, DictConfig | ListConfig):
        return cast(Tree, OmegaConf.to_container(value, resolve=True))
    return cast(Tree, value)


def _unresolved(value: str, error: str, where: Where, tree: Tree) -> Problem:
    """The reference of `value` that leads nowhere (or round in a circle), and the closest name beside it."""
    for name in references(value):
        parent = tree
        for part in name.split("."):
            if not isinstance(parent, dict):
                break
            if part not in parent:
                return Problem(where, f"${{{name}}} refers to nothing: there is no {part!r}", suggest(part, parent))
            parent = parent[part]
    reason = "it refers to itself" if "ecursi" in error else error.splitlines()[0]
    return Problem(where, f"{value!r} can't be resolved: {reason}")
