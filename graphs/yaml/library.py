"""The graphs that come with realgraph: their folder and their names."""

from importlib.resources import files
from pathlib import Path


def library_folder() -> Path:
    """The folder of the graphs that come with realgraph."""
    return Path(str(files("realgraph") / "graphs" / "library"))


def library_names() -> tuple[str, ...]:
    """The names of the library's graphs."""
    return tuple(sorted(file.stem for file in library_folder().glob("*.yaml")))
