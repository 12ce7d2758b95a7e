"""The files that a user asks a command to write. A file is replaced only where it holds what the command writes."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where


class Kind(Struct, frozen=True):
    """A kind of file, and how one is known again by its content."""

    name: str
    holds: Callable[[bytes], bool]


def _json_with(*fields: str) -> Callable[[bytes], bool]:
    """A JSON object that has these fields."""

    def holds(content: bytes) -> bool:
        try:
            value = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError):  # no JSON
            return False
        return isinstance(value, dict) and value.keys() >= set(fields)

    return holds


def _begins(text: str) -> Callable[[bytes], bool]:
    """A text whose beginning matches a regular expression, in any case."""
    pattern = re.compile(text.encode(), re.IGNORECASE)
    return lambda content: pattern.match(content) is not None


PLAN = Kind("a plan", _json_with("allocations", "orders"))
SOLUTION = Kind("a problem's solution", _json_with("feasible", "scope"))
COSTS = Kind("a table of costs", _json_with("factors", "phases"))
TRACE = Kind("a trace", _json_with("traceEvents"))
PAGE = Kind("an HTML page", _begins(r"\s*<!doctype html"))
SVG = Kind("an SVG picture", _begins(r"\s*(<\?xml[^>]*>\s*)?<svg"))
MERMAID = Kind("a Mermaid flowchart", _begins(r"flowchart\b"))
REFERENCE = Kind("a YAML reference", _begins("# YAML reference"))
SCHEMA = Kind("a JSON Schema", _json_with("$schema"))


def refuse_unwritable(out: Path | None, kind: Kind) -> None:
    """Raise ConfigError for a file that can't be written, before anybody has waited for what goes there.

    A file that is there already may be replaced where it is empty, or of that kind.
    """
    if out is None:
        return
    folder = out.absolute().parent
    if out.is_dir():
        raise _unwritable(out, "it is a directory")
    if not folder.is_dir():
        raise _unwritable(out, f"there is no directory {folder}")
    if not os.access(out if out.exists() else folder, os.W_OK):
        raise _unwritable(out, "permission denied")
    if out.is_file() and (content := _content(out)) and not kind.holds(content):
        text = f"exists already, and is not {kind.name}: it is kept"
        raise ConfigError([Problem(Where(str(out)), text, "name another file, or remove this one", "out")])


def _content(out: Path) -> bytes:
    try:
        return out.read_bytes()
    except OSError as error:
        raise _unwritable(out, f"what is there can't be read: {(error.strerror or str(error)).lower()}") from error


def write(out: Path, text: str) -> None:
    """Write a file that the user asked for. Raises ConfigError where that can't be."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, (error.strerror or str(error)).lower()) from error


def make_folder(folder: Path) -> None:
    """Make a folder that the user named, where it is not there. Raises ConfigError where that can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder can't be made: {(error.strerror or str(error)).lower()}"
        raise ConfigError([Problem(Where(str(folder)), text, "name a folder that is yours", "out")]) from error


def _unwritable(out: Path, why: str) -> ConfigError:
    hint = "name a file in a directory that exists and is yours"
    return ConfigError([Problem(Where(str(out)), f"can't be written: {why}", hint, "out")])
