"""A YAML document as plain values plus the place of each of them. Knows the grammar, no field of the language.

The grammar is OmegaConf's: YAML 1.1 without dates, with `1e-5` a number, and a key given twice an error.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from msgspec import Struct, field

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.yaml.files import read_text
from realgraph.graphs.yaml.library import library_names

Tree: TypeAlias = bool | int | float | str | list["Tree"] | dict[str, "Tree"] | None
Branch: TypeAlias = dict[str, Tree]

COMMAND_LINE = "command line"
MAX_NODES = 20_000  # values of one document after its aliases are expanded: stops a bomb of nested aliases
MOST_BYTES = 1 << 20  # of a file, which is parsed at 100 kB a second
MAX_DEPTH = 32  # mappings and lists within each other: no language of ours needs ten
MAX_INTEGER = 2**63 - 1
MAX_DIGITS = 80  # of a whole number as it is written, in binary too
_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
_QUOTED = re.compile(r"\[\"((?:[^\"\\]|\\.)*)\"\]", re.DOTALL)
_SEGMENT = re.compile(r"\.[A-Za-z_][\w-]*|\[\d+\]|\[\"(?:[^\"\\]|\\.)*\"\]")
_PATH = re.compile(rf"\$(?:{_SEGMENT.pattern})*", re.DOTALL)
_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_FLOAT_TAG, _MERGE_TAG = "tag:yaml.org,2002:float", "tag:yaml.org,2002:merge"
_INT_TAG, _BOOL_TAG, _NULL_TAG, _STR_TAG = (f"tag:yaml.org,2002:{name}" for name in ("int", "bool", "null", "str"))
_SCALARS = {_INT_TAG: "a whole number", _FLOAT_TAG: "a number", _BOOL_TAG: "true or false", _NULL_TAG: "null"}
_NO_TEXT = re.compile("[\\x00\\ud800-\\udfff]")  # NUL ends text for the system; a lone surrogate is no character
_UNUSED = (_FLOAT_TAG, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")  # replaced, or left as text


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with OmegaConf's scalars, which ends where a document is no run file by its size."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._n_nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next value. Raises MarkedYAMLError where there are too many, or too many within each other."""
        self._n_nodes += 1
        self._depth += 1
        excess = f"more than {MAX_NODES} values" if self._n_nodes > 2 * MAX_NODES else ""  # keys are nodes too
        excess = f"nested more than {MAX_DEPTH} deep" if self._depth > MAX_DEPTH else excess
        if excess:
            place = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=excess, problem_mark=place)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that quotes what `Loader` would take for another type."""


for _side in (Loader, Dumper):
    _side.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in _UNUSED]
        for first, resolvers in _side.yaml_implicit_resolvers.items()
    }
    _side.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))


class Document(Struct, frozen=True):
    """A mapping, and where its values were written."""

    tree: Branch
    marks: dict[str, Where] = field(default_factory=dict)  # YAML path -> place; a value without one is a default
    removed: frozenset[str] = (
        frozenset()
    )  # paths of entries that an upper layer of the user's deleted out of a lower one

    def where(self, path: str) -> Where:
        """The place of `path`: its own mark, else that of its nearest ancestor."""
        known = next((known for known in ancestors(path) if known in self.marks), "")
        if _PATH.fullmatch(path) and known:
            return Where(self.marks[known].file, self.marks[known].line, path)
        near = [known for known in self.marks if re.match(re.escape(_bare(known)) + r"(?:[.\[]|$)", path)]
        if not near:
            return Where(path=path)
        known = max(near, key=len)  # of a name that a path quotes, where the path was put together without quotes
        mark = self.marks[known]
        return Where(mark.file, mark.line, known + path[len(_bare(known)) :])

    def wrote(self, path: str) -> bool:
        """True where a file or the command line gave the value at `path`: it is no default."""
        return path in self.marks


def _bare(path: str) -> str:
    """`$.calls["a b"].lr` -> `$.calls.a b.lr`."""
    return _QUOTED.sub(lambda match: "." + re.sub(r"\\(.)", r"\1", match.group(1)), path) if '"' in path else path


def child(path: str, key: str | int) -> str:
    """`$.calls` and `train` -> `$.calls.train`; a number indexes a list; other keys are quoted."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if _PLAIN.fullmatch(key):
        return f"{path}.{key}"
    return path + '["' + key.replace("\\", "\\\\").replace('"', '\\"') + '"]'


def ancestors(path: str) -> Iterator[str]:
    """`$.a.b[0]` -> `$.a.b[0]`, `$.a.b`, `$.a`, `$`."""
    yield path
    for segment in reversed(_SEGMENT.findall(path[1:])):
        path = path[: -len(segment)]
        yield path


def read_document(file: Path, shown: str) -> Document:
    """Read and parse a file; `shown` names it in problems. Raises ConfigError with file and line."""
    try:
        text = read_text(file, MOST_BYTES)
    except OSError as error:
        hint = ""
        if isinstance(error, IsADirectoryError):
            hint = _files_inside(file, shown)
        elif isinstance(error, FileNotFoundError):
            hint = _files_beside(file)
        raise ConfigError([Problem(Where(shown), f"can't be read: {error.strerror or error}", hint)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(Where(shown), f"is not UTF-8 text: byte {error.start}")]) from error
    return parse_document(text, shown)


def _files_beside(file: Path) -> str:
    """A hint for a file that is not there."""
    if file.name in library_names():
        return f"a run file names this library graph: realgraph init --graph {file.name} writes one"
    return suggest(file.name, (path.name for path in file.parent.glob("*.yaml"))) or "realgraph init writes a run file"


def _files_inside(folder: Path, shown: str) -> str:
    """A hint for a folder in the place of a file: of a run directory, its run file and how to go on."""
    if (folder / "job.json").exists():
        return f"go on with this run: realgraph run --resume {shown}; its run file is {shown}/config.yaml"
    return suggest("run.yaml", (path.name for path in folder.glob("*.yaml"))) or "name a file"


def parse_document(text: str, shown: str) -> Document:
    """Parse a mapping with the place of everything in it. Raises ConfigError with all problems of the text."""
    loader, node = _compose(text, shown)
    if node is None:
        return Document({}, {"$": Where(shown, 1)})
    if not isinstance(node, yaml.MappingNode):
        given = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise ConfigError([Problem(Where(shown, node.start_mark.line + 1), f"expected a mapping, found {given}")])
    builder = _Builder(loader, shown)
    tree = builder.build(node, "$", node.start_mark.line + 1)
    if builder.problems:
        raise ConfigError(builder.problems)
    assert isinstance(tree, dict)
    return Document(tree, builder.marks)


def parse_value(text: str, shown: str) -> Tree:
    """One YAML value, such as the right side of an override. Raises ConfigError."""
    loader, node = _compose(text, shown)
    if node is None:
        return None
    builder = _Builder(loader, shown)
    tree = builder.build(node, "$", 0)
    if builder.problems:
        raise ConfigError(builder.problems)
    return tree


def parse_override(text: str) -> Document:
    """`calls.train.lr=1e-5`, or `$.calls.train.lr=1e-5` as messages have it -> a document with that one value.

    Raises ConfigError.
    """
    name, equals, value = text.partition("=")
    keys = name.strip().removeprefix("$.").split(".")
    if not equals or not all(keys):
        hint = "write path=value, such as calls.train.lr=1e-5"
        raise ConfigError([Problem(Where(COMMAND_LINE), f"{text!r} is not an override", hint)])
    path = "$"
    marks = {}
    for key in keys:
        path = child(path, key)
        marks[path] = Where(COMMAND_LINE, 0, path)
    if not value.strip():
        hint = f"write {name}=null to delete it, {name}='\"\"' for empty text"
        raise ConfigError([Problem(Where(COMMAND_LINE, 0, path), "no value after '='", hint)])
    try:
        tree = parse_value(value, COMMAND_LINE)
    except ConfigError as error:
        raise ConfigError([Problem(Where(COMMAND_LINE, 0, path), p.text, p.hint) for p in error.problems]) from None
    branch: Branch = {keys[-1]: tree}
    for key in reversed(keys[:-1]):
        branch = {key: branch}
    return Document(branch, marks)


def _compose(text: str, shown: str) -> tuple[Loader, yaml.Node | None]:
    try:
        loader = Loader(text)
        return loader, loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        what = f"the character U+{int(error.character):04X} can't stand in YAML"
        raise ConfigError([Problem(Where(shown, line), f"YAML syntax: {what}", "delete it")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        text = " ".join(part for part in (error.context, error.problem) if part) or "not YAML"
        raise ConfigError([Problem(Where(shown, mark.line + 1 if mark else 0), f"YAML syntax: {text}")]) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem(Where(shown), f"YAML syntax: {error}")]) from None
    except RecursionError:
        raise ConfigError([Problem(Where(shown), "is nested too deeply")]) from None


class _Builder:
    """Turns nodes into values; collects marks and problems."""

    def __init__(self, loader: Loader, shown: str) -> None:
        self.loader, self.shown = loader, shown
        self.marks: dict[str, Where] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.n_nodes = 0

    def build(self, node: yaml.Node, path: str, line: int) -> Tree:
        """The value of `node`, whose key or item starts at `line`."""
        self.n_nodes += 1
        here = Where(self.shown, line, path)
        self.marks[path] = here
        if id(node) in self.open or self.n_nodes > MAX_NODES:
            text = "an alias inside its own anchor" if id(node) in self.open else f"more than {MAX_NODES} values"
            raise ConfigError([*self.problems, Problem(here, text)])
        if len(self.open) >= MAX_DEPTH:
            raise ConfigError([*self.problems, Problem(here, f"is nested more than {MAX_DEPTH} deep")])
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, child(path, i), item.start_mark.line + 1) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self.scalar(node, here)
        finally:
            self.open.remove(id(node))

    def mapping(self, node: yaml.MappingNode, path: str) -> Branch:
        """Keys are text; a key given twice is a problem; `<<` merges, and what is written out wins."""
        tree: Branch = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                tree = self.merged(value_node, path) | tree
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            line = key_node.start_mark.line + 1
            key = self.key(key_node, Where(self.shown, line, path))
            if key is None:
                continue
            if key in first:
                where = Where(self.shown, line, child(path, key))
                self.problems.append(Problem(where, f"given twice: first at line {first[key]}"))
            first.setdefault(key, line)
            tree[key] = self.build(value_node, child(path, key), line)
        return tree

    def merged(self, node: yaml.Node, path: str) -> Branch:
        """The mapping that `<<:` brings in: a mapping, or a list of mappings of which the first wins."""
        line = node.start_mark.line + 1
        parts = list(node.value) if isinstance(node, yaml.SequenceNode) else [node]
        tree: Branch = {}
        for part in parts:
            value = self.build(part, path, line)
            if isinstance(value, dict):
                tree = value | tree
            else:
                self.problems.append(Problem(Where(self.shown, line, path), "'<<' merges mappings only"))
        return tree

    def key(self, node: yaml.Node, here: Where) -> str | None:
        key = self.scalar(node, here) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str | bool):
            return str(node.value)  # `on: engine` is a name there: no key is true or false
        plain = isinstance(node, yaml.ScalarNode)
        if isinstance(node, yaml.ScalarNode) and self._refusal(node):
            return None  # and that is a problem already
        shown = repr(node.value) if plain else "that is a list or a mapping"
        hint = f'quote it: "{node.value}"' if plain else ""
        self.problems.append(Problem(here, f"the key {shown} is not text", hint))
        return None

    def scalar(self, node: yaml.ScalarNode, here: Where) -> bool | int | float | str | None:
        """The value of a scalar; where it has none, None and a problem."""
        text = self._refusal(node)
        if text:
            self.problems.append(Problem(here, text))
            return None
        value = self.loader.construct_object(node)
        assert value is None or isinstance(value, bool | int | float | str), "the tag is one of ours"
        return value

    def _refusal(self, node: yaml.ScalarNode) -> str:
        """The reason why a scalar is no value of ours; empty where it is one."""
        value: str = node.value
        if node.tag == _STR_TAG:
            character = _NO_TEXT.search(value)
            return f"the character U+{ord(character.group()):04X} can't stand in text" if character else ""
        if node.tag not in _SCALARS:
            return f"{node.tag} is not a plain value: expected text, a number or true/false"
        resolved = self.loader.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
        if resolved != node.tag:  # by a tag, such as `!!int x`
            return f"{value!r} is not {_SCALARS[node.tag]}"
        if node.tag == _INT_TAG and (len(value) > MAX_DIGITS or abs(self.loader.construct_object(node)) > MAX_INTEGER):
            shown = value if len(value) <= MAX_DIGITS else value[:MAX_DIGITS] + "..."
            return f"{shown} is too large: whole numbers end at 2^63 - 1"
        return ""
