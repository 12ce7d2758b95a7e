"""The comments beside the fields of a struct, from its source: the one place where a field is explained."""

import ast
import inspect
import io
import textwrap
import tokenize
from functools import cache


@cache
def field_notes(struct: type) -> dict[str, str]:
    """Field -> the comment on its lines; fields without one are left out."""
    source = textwrap.dedent(inspect.getsource(struct))
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if text := " ".join(comments[line] for line in lines if line in comments):
                notes[node.target.id] = text
    return notes


def summary(struct: type) -> str:
    """The docstring as one paragraph of plain text."""
    return " ".join((inspect.getdoc(struct) or "").split())
