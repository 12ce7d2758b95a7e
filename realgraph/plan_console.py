"""Where `realgraph plan` writes to: the terminal, or a pipe with room for the whole table; and files."""

from pathlib import Path

from rich.console import Console

from realgraph.graphs.errors import ConfigError, Problem, Where

PIPE_WIDTH = 140


def console() -> Console:
    """A terminal at its own width; files and pipes get room for the whole table."""
    own = Console(highlight=False)
    return own if own.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def write(out: Path, text: str) -> None:
    """Write a file that the user asked for. Raises ConfigError where that can't be."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "give it a name in a folder that exists"
        raise ConfigError([Problem(Where(str(out)), f"can't be written: {error.strerror}", hint, "out")]) from error
