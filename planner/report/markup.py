"""The parts that all HTML pages share: one self-contained document, sections, tables, legends. See `page.html`."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from msgspec import Struct

from realgraph.planner.report.svg import chip_svg

NUMBERS = (
    "micro-batches",
    "seconds",
    "share",
    "memory",
    "slack",
    "period",
    "against this",
    "samples/s",
    "devices",
    "device seconds",
    "bound",
    "efficiency",
    "device memory at most",
    "predicted",
    "measured against predicted",
)
WORDS = ("what it is", "")  # columns of sentences


class PageContent(Struct, frozen=True):
    """One page. what: its kind, for the window's title; facts, tiles: (name or value, text) as text; sections, footer:
    HTML."""

    title: str
    what: str
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[tuple[str, str], ...]
    sections: tuple[str, ...]
    footer: tuple[str, ...] = ()


def document(made: PageContent) -> str:
    """The whole file: no script, no external resource, light and dark."""
    template = Template((files("realgraph.planner.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(made.title),
        what=escape(made.what),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in made.facts),
        tiles="".join(tile(value, label) for value, label in made.tiles),
        sections="\n".join(made.sections),
        footer="".join(f"<p>{line}</p>" for line in made.footer),
    )


def tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text; one that begins with NUL is HTML already."""
    kinds = [' class="n"' if head in NUMBERS else ' class="w"' if head in WORDS else "" for head in heads]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for text, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: str) -> str:
    return cell[1:] if cell.startswith("\0") else escape(cell)


def legend(entries: Sequence[tuple[str, str]], head: str = "") -> str:
    first = f"<li>{head}</li>" if head else ""
    items = "".join(f"<li>{chip_svg(kind)}{escape(text)}</li>" for kind, text in entries)
    return f'<ul class="legend">{first}{items}</ul>'
