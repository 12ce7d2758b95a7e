"""The user's functions as `check` sees them: modules are found and their text is read; none is imported."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.applied import applied_of
from realgraph.graphs.errors import Problem, Where, reason, suggest
from realgraph.graphs.functions import BUILTINS, name_hint
from realgraph.graphs.source import Absent, Definition, look_up, refusal
from realgraph.graphs.spec import Function, ModelCall
from realgraph.runtime.functions.functions import keyword_names
from realgraph.runtime.job.run_folder import RunFolder

RULE = "function"
_ONE_FILE = 4 << 20  # bytes of a module that is read; a longer one is not looked into


class Use(Struct, frozen=True):
    """A `module:function` that a graph names, and what it will be called with."""

    path: str  # of its `fn`, in YAML
    fn: str  # module:function
    positional: tuple[str, ...]  # names of arguments
    keywords: tuple[str, ...]  # names of arguments


class _Module(Struct, frozen=True):
    """A module of the import path."""

    file: Path | None  # None where its text can't be read (a compiled or built-in one)


def run_directory(file: Path) -> Path | None:
    """The run directory whose own copy of its run file this is; None for any other file."""
    folder = RunFolder(file.absolute().parent)
    return folder.root if file.absolute() == folder.config and folder.job.is_file() else None


def functions_folder(file: Path) -> Path:
    """The folder of a run file's functions: its own folder; of a run directory's copy, the folder it was made in."""
    root = run_directory(file)
    if root is None:
        return file.absolute().parent
    try:
        return Path(msgspec.json.decode(RunFolder(root).job.read_bytes(), type=_UserDir).user_dir or root)
    except (OSError, msgspec.MsgspecError):
        return root  # whoever reads the job says what is wrong with it


class _UserDir(Struct, frozen=True):
    """The part of a job that names the folder of its functions."""

    user_dir: str = ""


def function_problems(calls: Mapping[str, ModelCall], folder: Path, where: Callable[[str], Where]) -> Iterator[Problem]:
    """Modules that are not there, functions that they do not define, and parameters that do not fit."""
    importlib.invalidate_caches()
    for use in uses(calls):
        yield from _problems(use, folder, where(use.path))


def uses(calls: Mapping[str, ModelCall]) -> Iterator[Use]:
    """Every function of the user's own that these calls name."""
    for name, call in calls.items():
        if isinstance(call, Function) and call.fn not in BUILTINS:
            yield Use(f"$.calls.{name}.fn", call.fn, (), keyword_names(call))
    for applied in applied_of(calls):
        yield Use(f"{applied.path}.fn", applied.fn, applied.positional, tuple(applied.args))


def _problems(use: Use, folder: Path, where: Where) -> Iterator[Problem]:
    module, colon, path = use.fn.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        return  # a rule of the language says so
    source = _find(module, folder)
    if isinstance(source, str):
        expected = f"expected {Path(*module.split('.'))}.py in {folder}, or an installed module"
        hint = name_hint(use.fn) or _spelling(module, folder) or expected
        yield Problem(where, f"can't find the module of {use.fn!r}: {source}", hint, RULE)
    elif source.file is not None:
        yield from _text_problems(use, path, source.file, where)


def _text_problems(use: Use, path: str, file: Path, where: Where) -> Iterator[Problem]:
    """Problems that the module's text shows: whether it is Python, defines the function, and with which parameters."""
    try:
        if file.stat().st_size > _ONE_FILE:
            return
        definition = look_up(file.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(where, f"{file} can't be read: {reason(error)}", "", RULE)
        return
    except SyntaxError as error:
        yield Problem(where, f"{file}:{error.lineno or 0} is not valid Python: {error.msg}", "", RULE)
        return
    except (ValueError, RecursionError) as error:
        yield Problem(where, f"{file} is not valid Python: {error}", "", RULE)
        return
    part = path.partition(".")[0]
    if isinstance(definition, Absent) and file.name == "__init__.py" and _find_part(file.parent, part):
        return  # importing a package's part makes it a name of the package
    if isinstance(definition, Absent):
        yield Problem(where, f"{file} defines no {path!r}", suggest(path.rpartition(".")[2], definition.names), RULE)
    elif definition is not None:
        yield from _call_problems(use, definition, file, where)


def _call_problems(use: Use, definition: Definition, file: Path, where: Where) -> Iterator[Problem]:
    refused = refusal(definition, use.positional, use.keywords)
    if refused:
        hint = _parameters_hint(use, definition)
        yield Problem(where, f"{use.fn!r} ({file}:{definition.line}) does not fit: {refused}", hint, RULE)


def _parameters_hint(use: Use, definition: Definition) -> str:
    if definition.signature is None:
        return ""
    unknown = [name for name in use.keywords if name not in definition.signature.parameters]
    close = suggest(unknown[0], definition.signature.parameters) if unknown else ""
    if close.startswith("did"):
        return close
    if use.positional:
        shown = ", ".join((*use.positional, *use.keywords))
        return f"an `apply` function is called as ({shown}): what `reads` names it looks up in batch and outputs"
    taken = [name for name in definition.signature.parameters if name not in use.keywords]
    return "keys reach a function under their own names" + (f"; {taken[0]!r} is not in `reads`" if taken else "")


# --- finding modules without running anything -------------------------------------------------------------------------


def _find(module: str, folder: Path) -> _Module | str:
    """The module, or why there is none. A package's own code is not run: its parts are looked up by its paths."""
    names = module.split(".")
    spec: ModuleSpec | None = None
    for i, name in enumerate(names):
        whole = ".".join(names[: i + 1])
        if i and (spec is None or spec.submodule_search_locations is None):
            if whole in sys.modules:  # as `os.path`, which `os` puts there itself
                return _Module(None)
            return f"{'.'.join(names[:i])!r} is a module, not a package with a {name!r} in it"
        places = list(spec.submodule_search_locations or ()) if spec is not None else None
        spec = _spec(whole, folder, places)
        if spec is None:
            return f"there is no module {whole!r}"
    assert spec is not None
    if spec.origin is None and spec.submodule_search_locations is not None:
        return f"{module!r} is a folder of modules, not a module"
    readable = spec.origin is not None and spec.origin.endswith(".py")
    return _Module(Path(spec.origin) if readable and spec.origin is not None else None)


def _spec(whole: str, folder: Path, places: list[str] | None) -> ModuleSpec | None:
    """The spec of one module: of a top-level one from the folder, then as Python would; of a part, from its package."""
    if places is not None:
        return PathFinder.find_spec(whole, places)
    if (built_in := BuiltinImporter.find_spec(whole) or FrozenImporter.find_spec(whole)) is not None:
        return built_in
    if (spec := PathFinder.find_spec(whole, [str(folder), *sys.path])) is not None:
        return spec
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)  # editable installs have their own
    return next((spec for find in finders if find is not None and (spec := find(whole, None)) is not None), None)


def _find_part(package: Path, name: str) -> bool:
    return PathFinder.find_spec(name, [str(package)]) is not None


def _spelling(module: str, folder: Path) -> str:
    """The module of the folder whose name is close."""
    known = {".".join(file.relative_to(folder).with_suffix("").parts) for file in _modules(folder)}
    hint = suggest(module, known)
    return hint if hint.startswith("did") else ""


def _modules(folder: Path) -> Iterator[Path]:
    """Modules of the folder and of the folders right in it."""
    for pattern in ("*.py", "*/*.py"):
        for file in folder.glob(pattern):
            if all(part.isidentifier() for part in file.relative_to(folder).with_suffix("").parts):
                yield file
