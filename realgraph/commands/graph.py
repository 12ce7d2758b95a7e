"""`realgraph graph` and `realgraph graphs`: pictures of an algorithm, and what the library holds."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from realgraph.graphs.picture.render import mermaid, svg, tree
from realgraph.graphs.yaml.catalogue import library
from realgraph.run_file.open_graph import open_graph
from realgraph.screen.files import MERMAID, SVG, refuse_unwritable, write
from realgraph.screen.terminal import Terminal


def graph_command(
    name: str, overrides: Sequence[str] = (), mermaid_file: Path | None = None, svg_file: Path | None = None
) -> None:
    """Print the graph as a tree, or write its pictures. Raises ConfigError."""
    refuse_unwritable(mermaid_file, MERMAID)
    refuse_unwritable(svg_file, SVG)
    graph = open_graph(name, overrides)
    if mermaid_file is not None:
        write(mermaid_file, mermaid(graph))
    if svg_file is not None:
        write(svg_file, svg(graph))
    if mermaid_file is None and svg_file is None:
        Terminal().print(tree(graph))


def graphs_command() -> None:
    """Print the library."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, description in library().items():
        table.add_row(name, description)
    Terminal().print(table)
