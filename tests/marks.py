"""The marks of the structure: `python tests/marks.py` prints them, and test_layout.py holds those that are met.

Reads the sources and nothing else; needs the standard library alone.
"""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parent.parent
LAYERS = {"graphs": 0, "planner": 1, "runtime": 2, "": 3}  # '' is the command line; imports go downwards
PRODUCTION = ("graphs", "planner", "runtime", "configs", "realgraph")
_PATH_TEXT = re.compile(r"[\w.]+[.:]\w+")  # `module:function` and dotted names in texts

T = TypeVar("T")


class Source(NamedTuple):
    """A file of Python."""

    path: Path
    layer: str

    @property
    def file(self) -> str:
        """Its path below the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """Its folder, as it is imported."""
        inner = self.path.parent.relative_to(ROOT).parts
        return ".".join(inner if inner[0] in ("realgraph", "tests", "benchmarks") else ("realgraph", *inner))

    @property
    def module(self) -> str:
        """Its name, as it is imported."""
        return f"{self.package}.{self.path.stem}"

    @property
    def n_lines(self) -> int:
        """Lines of the file."""
        return len(self.path.read_text().splitlines())

    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parse(self.path)


class Place(NamedTuple):
    """A name in a file."""

    file: str
    line: int  # from 1
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


class Import(NamedTuple):
    """A module that a source imports."""

    source: Source
    module: str


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# --- sources ----------------------------------------------------------------------------------------------------------


def python_of(folders: Sequence[str]) -> Iterator[Source]:
    """The sources in these folders of the root; `realgraph/graphs` and its like are links, and left out."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield Source(path, folder if folder in LAYERS else "")


@cache
def production() -> tuple[Source, ...]:
    """Every source that is installed."""
    return tuple(python_of(PRODUCTION))


# --- sizes ------------------------------------------------------------------------------------------------------------


def file_sizes() -> dict[str, int]:
    """File -> lines, of files that have any."""
    return {source.file: source.n_lines for source in production() if source.n_lines}


def function_sizes() -> dict[Place, int]:
    """Function -> lines from `def` to its end, methods and inner functions too."""
    sizes = {}
    for source in production():
        for node in ast.walk(source.tree()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end = node.end_lineno or node.lineno
                sizes[Place(source.file, node.lineno, node.name)] = end - node.lineno + 1
    return sizes


def percentile(values: Collection[int], share: float) -> int:
    """The least value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def package_sizes() -> Counter[str]:
    """Package -> modules, `__init__` not counted."""
    return Counter(source.package for source in production() if source.path.name != "__init__.py")


# --- imports ----------------------------------------------------------------------------------------------------------


@cache
def imports_of(source: Source) -> tuple[str, ...]:
    """The modules that a source imports, with the names that it takes from them; relative imports as `.module`."""
    return tuple(_imports_of(source))


def _imports_of(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree()):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                base = "." * level + (module or "")
                yield base
                yield from (f"{base}.{name.name}" for name in names)


def layer_of(module: str) -> str | None:
    """The layer of a module of ours, None for others."""
    parts = module.split(".")
    if parts[0] != "realgraph":
        return parts[0] if parts[0] in LAYERS else None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def upward_imports() -> list[Import]:
    """Imports of a higher layer; and those that name a layer without `realgraph`, or are relative."""
    wrong = []
    for source in production():
        for module in imports_of(source):
            layer = layer_of(module)
            direct = module.split(".")[0] in LAYERS  # from the root of a checkout this would be a second copy
            if direct or (layer is not None and LAYERS[layer] > LAYERS[source.layer]):
                wrong.append(Import(source, module))
    return wrong


def package_imports() -> dict[tuple[str, str], str]:
    """(package, package that it imports) -> a file that does."""
    owner = {source.module: source.package for source in production()}
    edges: dict[tuple[str, str], str] = {}
    for source in production():
        for module in imports_of(source):
            # `from package import module` names a module too; what is neither lies outside
            target = owner.get(module)
            if target is not None and target != source.package:
                edges.setdefault((source.package, target), source.file)
    return edges


def layer_imports() -> dict[tuple[str, str], str]:
    """(layer, layer that it imports) -> a file that does."""
    edges: dict[tuple[str, str], str] = {}
    for source in production():
        for layer in map(layer_of, imports_of(source)):
            if layer is not None and layer != source.layer:
                edges.setdefault((source.layer, layer), source.file)
    return edges


def reached(edges: Collection[tuple[str, str]], start: str) -> set[str]:
    """All that `start` imports, over any number of others."""
    after: dict[str, list[str]] = {}
    for one, other in edges:
        after.setdefault(one, []).append(other)
    seen: set[str] = set()
    todo = [start]
    while todo:
        for node in after.get(todo.pop(), []):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def cycles(edges: Collection[tuple[str, str]]) -> list[list[str]]:
    """Sets of nodes that all reach each other, without those of one node."""
    nodes = sorted({node for edge in edges for node in edge})
    reach = {node: reached(edges, node) for node in nodes}
    found: list[list[str]] = []
    for node in nodes:
        if node in reach[node] and not any(node in one for one in found):
            found.append([other for other in nodes if other in reach[node] and node in reach[other]])
    return found


# --- names ------------------------------------------------------------------------------------------------------------


def duplicate_classes() -> dict[str, list[str]]:
    """Class -> its files, of classes at the top of more than one module."""
    files: dict[str, list[str]] = {}
    for source in production():
        for node in source.tree().body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(source.file)
    return {name: where for name, where in sorted(files.items()) if len(where) > 1}


def unused_symbols() -> list[Place]:
    """Functions, classes and constants at the top of modules that neither production nor benchmarks name."""
    elsewhere = _uses([*production(), *python_of(["benchmarks"])])
    return [
        place
        for source in production()
        for place in _defined(source)
        if elsewhere[place.name] == 0 and not place.name.startswith("__")
    ]


def _defined(source: Source) -> Iterator[Place]:
    """The names bound at the top of a module, but for those that a decorator of its own registers."""
    body = source.tree().body
    bound = {target.id for node in body if isinstance(node, ast.Assign) for target in _targets(node)}
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if not any(_root(decorator) in bound for decorator in node.decorator_list):
                    yield Place(source.file, node.lineno, name)
            case ast.Assign():
                yield from (Place(source.file, node.lineno, target.id) for target in _targets(node))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield Place(source.file, node.lineno, name)


def _targets(node: ast.Assign) -> Iterator[ast.Name]:
    return (target for target in node.targets if isinstance(target, ast.Name))


def _root(node: ast.expr) -> str:
    """The first name of `app.command()`."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _uses(sources: Sequence[Source] | Iterator[Source]) -> Counter[str]:
    """Name -> how often it is read, as a name, an attribute or in a text such as `module:function`."""
    uses: Counter[str] = Counter()
    for source in sources:
        for node in ast.walk(source.tree()):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                    uses[name] += 1
                case ast.Constant(value=str(text)) if _PATH_TEXT.fullmatch(text):
                    uses.update(re.split(r"[.:]", text))
    return uses


# --- statements -------------------------------------------------------------------------------------------------------


def global_statements() -> list[Place]:
    """`global` and its names."""
    return [
        Place(source.file, node.lineno, ", ".join(node.names))
        for source in production()
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Global)
    ]


def environment_readers() -> list[str]:
    """Files that name `os.environ` or `os.getenv`."""
    return [source.file for source in production() if any(map(_is_environment, ast.walk(source.tree())))]


def _is_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=name):
            return name in names
        case ast.ImportFrom(module="os", names=aliases):
            return any(alias.name in names for alias in aliases)
        case _:
            return False


# --- printing ---------------------------------------------------------------------------------------------------------


def _listed(name: str, values: Sequence[object]) -> Iterator[str]:
    yield f"{name}: {len(values)}"
    yield from (f"  {value}" for value in values)


def _largest(sizes: Mapping[T, int]) -> str:
    name = max(sizes, key=lambda one: sizes[one])
    return f"{sizes[name]} ({name})"


def report() -> Iterator[str]:
    """Every mark, a line each, with the places under it."""
    files, functions, packages = file_sizes(), function_sizes(), package_sizes()
    yield f"largest file: {_largest(files)} lines"
    yield f"median file: {statistics.median(files.values()):g} lines of {len(files)} files"
    yield f"function p95: {percentile(functions.values(), 0.95)} lines of {len(functions)} functions"
    yield f"longest function: {_largest(functions)} lines"
    yield f"modules per package: at most {_largest(packages)}"
    yield from (f"  {package}: {n}" for package, n in sorted(packages.items()))
    yield from _listed("upward imports", [f"{one.source.file}: {one.module}" for one in upward_imports()])
    yield from _listed("cycles of layers", cycles(layer_imports()))
    yield from _listed("cycles of packages", cycles(package_imports()))
    yield from _listed("class names that stand twice", [f"{n}: {', '.join(w)}" for n, w in duplicate_classes().items()])
    yield from _listed("symbols that at most tests use", unused_symbols())
    yield from _listed("global statements", global_statements())
    yield from _listed("files that read the environment", environment_readers())


if __name__ == "__main__":
    print("\n".join(report()))
