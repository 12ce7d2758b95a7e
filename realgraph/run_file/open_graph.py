"""A graph by name or file, without a run: for pictures of it, and for checking an algorithm by itself."""

from collections.abc import Sequence
from pathlib import Path

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.check.warnings import warnings_of
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from realgraph.graphs.yaml.document import COMMAND_LINE, Document, read_document
from realgraph.graphs.yaml.library import library_names
from realgraph.graphs.yaml.load import find_graph, load_graph_document, shown_name, traced, user_document
from realgraph.graphs.yaml.schema import defaults_of
from realgraph.run_file.compose import compose, parse_overrides
from realgraph.run_file.run_spec import RunSpec


def is_graph(document: Document) -> bool:
    """True where a file holds an algorithm and no run: calls, but no `graph`."""
    return "graph" not in document.tree and "calls" in document.tree


def open_graph(name: str, overrides: Sequence[str] = ()) -> Graph:
    """A library graph, a graph file, or the graph of a run file, compiled without looking at data or model folders.

    Raises ConfigError with all problems.
    """
    file = find_graph(name, Path.cwd(), Where(COMMAND_LINE, 0, "$"))
    document = read_document(file, shown_name(file))
    if name in library_names() or is_graph(document):
        return graph_and_warnings(document, overrides)[0]
    composed = compose(file, overrides)
    return compile_graph(composed.spec, composed.where, Facts())


def graph_and_warnings(document: Document, overrides: Sequence[str] = ()) -> tuple[Graph, tuple[Problem, ...]]:
    """A graph file, checked by every rule that needs no run, with what is allowed and may not do what it seems to.

    Raises ConfigError with all problems.
    """
    user = user_document(Document({}), parse_overrides(overrides))
    spec, resolved = load_graph_document(document, user, defaults_of(RunSpec))
    try:
        graph = compile_graph(spec, resolved.document.where, Facts())
    except ConfigError as error:
        raise ConfigError(traced(problem, resolved.written) for problem in error.problems) from None
    warnings = warnings_of(spec, resolved.document.where, resolved.document.wrote)
    return graph, tuple(traced(warning, resolved.written) for warning in warnings)
