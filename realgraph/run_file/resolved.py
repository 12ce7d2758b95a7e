"""The final run file as text: every value, and beside it where it came from. It can be run again as it is."""

import json

import yaml

from realgraph.graphs.errors import Where
from realgraph.graphs.yaml.document import Branch, Dumper, Tree, ancestors, child
from realgraph.graphs.yaml.merge import escape
from realgraph.run_file.compose import Composed

COMMENT_COLUMN = 56
_MISSING = object()  # of what was written before defaults: the value is a default


def resolved_text(composed: Composed) -> str:
    """YAML with a comment per value: its file and line, `command line`, or `default`; references keep their text."""
    printer = _Printer(composed)
    printer.mapping(composed.resolved.document.tree, composed.resolved.written.tree, "$", 0)
    return "\n".join((f"# {composed.file.name}, resolved: realgraph check --resolved", *printer.lines)) + "\n"


class _Printer:
    """Collects the lines of one document."""

    def __init__(self, composed: Composed) -> None:
        self.lines: list[str] = []
        self._where = composed.where
        self._deleted: dict[str, list[str]] = {}
        for path in composed.resolved.deleted:
            parent = list(ancestors(path))[1]
            self._deleted.setdefault(parent, []).append(path)

    def mapping(self, tree: Branch, written: object, path: str, depth: int) -> None:
        """The entries of a mapping, then what null deleted from it."""
        for key, value in tree.items():
            here = child(path, key)
            before = written.get(key, _MISSING) if isinstance(written, dict) else written
            if isinstance(value, dict) and value:
                self.lines.append(f"{'  ' * depth}{plain(key)}:")
                self.mapping(value, before, here, depth + 1)
            else:
                self._line(f"{'  ' * depth}{plain(key)}: {inline(value)}", self._origin(before, here))
        for gone in self._deleted.get(path, ()):
            key = _last_key(gone, path)
            if key not in tree:
                self._line(f"{'  ' * depth}{plain(key)}: null", f"{_short(self._where(gone))}, deleted")

    def _line(self, text: str, comment: str) -> None:
        self.lines.append(f"{text:<{COMMENT_COLUMN}}  # {comment}")

    def _origin(self, written: object, path: str) -> str:
        if written is _MISSING:
            return "default"
        place = _short(self._where(path))
        return f"{place}, {written}" if isinstance(written, str) and "${" in written else place


def _last_key(path: str, parent: str) -> str:
    last = path[len(parent) :]
    return last[1:] if last.startswith(".") else str(json.loads(last[1:-1]))


def _short(where: Where) -> str:
    return f"{where.file}:{where.line}" if where.line else where.file or "default"


def scalar(value: Tree) -> str:
    """One value in YAML that the loader reads back as the same value."""
    return plain(escape(value) if isinstance(value, str) else value)


def plain(value: Tree) -> str:
    """One value in YAML as it is: a key, in which the loader resolves no reference."""
    readable = not isinstance(value, str) or value.isprintable()
    style = None if readable else '"'  # the one style that keeps line breaks on one line
    text = yaml.dump(
        value, Dumper=Dumper, default_flow_style=True, default_style=style, width=10**9, allow_unicode=readable
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


def inline(value: Tree) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{plain(key)}: {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return scalar(value)
