"""A function as the text of its Python module defines it. Runs nothing of it and imports nothing."""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

_DYNAMIC = {"globals", "exec", "eval", "setattr", "vars", "locals"}  # calls that may bring names no text shows


class _Default:
    """Stands for a default value, whatever it is."""

    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


class Definition(Struct, frozen=True):
    """A name that a module binds."""

    line: int  # from 1
    kind: str  # "function", "async", "class", "value", "import" or "unknown"
    signature: inspect.Signature | None = None  # None where the text does not say it


class Absent(Struct, frozen=True):
    """A name that a module does not bind, with those that it does."""

    names: tuple[str, ...]


def look_up(source: str, path: str) -> Definition | Absent | None:
    """The definition of `name` or `Class.method` in a module's text; None where only running it could tell.

    Raises SyntaxError and ValueError (null bytes) for a text that is no Python.
    """
    tree = ast.parse(source)
    name, *inner = path.split(".")
    node = _in_body(tree.body, name)
    if node is None:
        return None if _is_dynamic(tree) else Absent(_names(tree.body))
    for part in inner:
        if not isinstance(node, ast.ClassDef):
            return None
        inside = _in_body(node.body, part)
        if inside is None:
            plain = not node.bases and not node.keywords and not node.decorator_list
            return Absent(_names(node.body)) if plain else None
        node = inside
    return _definition(node)


def refusal(definition: Definition, positional: Sequence[str], keywords: Iterable[str]) -> str:
    """The reason why the function can't be called with these arguments, '' where it can or nobody knows."""
    if definition.kind == "value":
        return "it is a plain value, not a function"
    if positional and definition.kind == "async":
        return "it is async, and a step or term is a plain function"
    if definition.signature is None:
        return ""
    return binding_error(definition.signature, positional, keywords)


def binding_error(signature: inspect.Signature, positional: Sequence[str], keywords: Iterable[str]) -> str:
    """The reason why a call with these arguments does not fit `signature`, '' where it does."""
    named = tuple(keywords)
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError as error:
        given = ", ".join((*positional, *(f"{name}=" for name in named))) if positional else ", ".join(named)
        return f"it is called with {given or 'nothing'}, but is defined with {signature}: {error}"
    return ""


def _in_body(body: Sequence[ast.stmt], name: str) -> ast.AST | None:
    """The last statement that binds `name`, as the last one wins when the module runs."""
    last: ast.AST | None = None
    for node in _statements(body):
        if name in _bound(node):
            last = node
    return last


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run in the scope of `body`: those inside if, try, with and loops too."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)
        for case in getattr(node, "cases", []):
            yield from _statements(case.body)


def _bound(node: ast.stmt) -> set[str]:
    """The names that one statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases):
            return {(alias.asname or alias.name).split(".")[0] for alias in aliases}
        case ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name for alias in aliases}
        case _:
            return {
                inner.id
                for inner in _walk_scope(node)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            }


_INNER = (
    ast.stmt,
    ast.Lambda,
    ast.ExceptHandler,
    ast.match_case,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what lies below it, without the statements inside it and without inner scopes."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _INNER):
            yield from _walk_scope(child)


def _is_dynamic(tree: ast.Module) -> bool:
    """True where the module may have names that its text does not show."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return True
            case ast.FunctionDef(name="__getattr__"):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in _DYNAMIC:
                return True
    return False


def _names(body: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Names that a person may have meant: functions and classes first, then everything else that is bound."""
    defined: list[str] = []
    others: list[str] = []
    for node in _statements(body):
        callable_one = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        (defined if callable_one else others).extend(sorted(_bound(node)))
    return tuple(dict.fromkeys(defined or others))


def _definition(node: ast.AST) -> Definition:
    line = getattr(node, "lineno", 0)
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            known = not node.decorator_list
            kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "function"
            return Definition(line, kind if known else "unknown", _signature(node.args) if known else None)
        case ast.ClassDef():
            return Definition(line, "class")
        case ast.Import() | ast.ImportFrom():
            return Definition(line, "import")
        case ast.Assign(value=ast.Lambda(args=args)) | ast.AnnAssign(value=ast.Lambda(args=args)):
            return Definition(line, "function", _signature(args))
        case ast.Assign(targets=[ast.Name()], value=value) if _is_plain(value):
            return Definition(line, "value")
        case _:
            return Definition(line, "unknown")


def _is_plain(value: ast.expr) -> bool:
    """True where an expression can only be data, never something to call."""
    return isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.JoinedStr | ast.ListComp)


def _signature(args: ast.arguments) -> inspect.Signature:
    """The signature that these arguments make; a default is shown as `...`."""
    kinds = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    parameters = [
        kinds(
            arg.arg,
            kinds.POSITIONAL_ONLY if i < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=_DEFAULT if i >= first_default else kinds.empty,
        )
        for i, arg in enumerate(positional)
    ]
    if args.vararg is not None:
        parameters.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else _DEFAULT))
    if args.kwarg is not None:
        parameters.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
