"""The library: the names and descriptions of the graphs that come with realgraph."""

from importlib.resources import files

import msgspec
import yaml


class _Heading(msgspec.Struct, frozen=True):
    """The name and the description in a graph file."""

    name: str
    description: str = ""


def library() -> dict[str, str]:
    """Name -> one-line description of every library graph, sorted by name."""
    folder = files("realgraph") / "graphs" / "library"
    documents = sorted((file.name, file.read_text("utf-8")) for file in folder.iterdir() if file.name.endswith(".yaml"))
    headings = [msgspec.convert(yaml.safe_load(text), _Heading) for _, text in documents]
    return {heading.name: heading.description for heading in headings}
