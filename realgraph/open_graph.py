"""A graph by name or file, without a run: for pictures of it, and for checking an algorithm by itself."""

from collections.abc import Sequence
from pathlib import Path

from realgraph.compose import compose, parse_overrides
from realgraph.graphs.compile import compile_graph
from realgraph.graphs.document import COMMAND_LINE, Document, read_document
from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from realgraph.graphs.load import find_graph, library_names, load_graph, shown_name, traced, user_document
from realgraph.graphs.schema import defaults_of
from realgraph.run_spec import RunSpec


def is_graph_file(file: Path) -> bool:
    """Whether a file holds an algorithm and no run: calls, but no `graph`. Raises ConfigError if it can't be read."""
    tree = read_document(file, shown_name(file)).tree
    return "graph" not in tree and "calls" in tree


def open_graph(name: str, overrides: Sequence[str] = ()) -> Graph:
    """A library graph, a graph file, or the graph of a run file, compiled without looking at data or model folders.

    Raises ConfigError with all problems.
    """
    file = find_graph(name, Path.cwd(), Where(COMMAND_LINE, 0, "$"))
    if name in library_names() or is_graph_file(file):
        return graph_alone(file, overrides)
    composed = compose(file, overrides)
    return compile_graph(composed.spec, composed.where, Facts())


def graph_alone(file: Path, overrides: Sequence[str] = ()) -> Graph:
    """A graph file, checked by every rule that needs no run. Raises ConfigError with all problems."""
    user = user_document(Document({}), parse_overrides(overrides))
    spec, resolved = load_graph(file, user, defaults_of(RunSpec))
    try:
        return compile_graph(spec, resolved.document.where, Facts())
    except ConfigError as error:
        raise ConfigError(traced(problem, resolved.written) for problem in error.problems) from None
