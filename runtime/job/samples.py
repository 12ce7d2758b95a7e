"""The result of a graph without training: its samples."""

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Train


def keeps_samples(graph: Graph) -> bool:
    """True where the samples are the result: something generates and nothing trains."""
    calls = graph.calls.values()
    return any(isinstance(call, Generate) for call in calls) and not any(isinstance(call, Train) for call in calls)
