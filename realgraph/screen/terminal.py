"""The console that everything in colour and in tables is printed by: data stay data.

rich reads `[bold]` as a style and `:pick:` as an emoji in any text; here neither is, anywhere, and control characters
are shown as in `output.py`. A style is given by a `Text`.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from realgraph.screen.output import forgiving_stdout, visible

PIPE_WIDTH = 140


class Terminal(Console):
    """A console for people: no markup, no emoji, no guessed colours, no control characters of data."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Text as it is: shown before it is measured, so that tables stay in line."""
        return super().render_str(visible(text), **{**settings, "markup": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The text of any renderable, a `Text` of data included; the console's own control codes stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def run_terminal() -> Terminal:
    """The terminal of a run: where nobody takes what it shows, that is lost, and the run goes on."""
    return Terminal(file=forgiving_stdout())


def wide_terminal() -> Terminal:
    """A terminal at its own width; files and pipes get room for the whole table."""
    own = Terminal()
    return own if own.is_terminal else Terminal(width=PIPE_WIDTH)


def error_terminal() -> Terminal:
    """The terminal for errors, on stderr."""
    return Terminal(stderr=True)
