"""The result of a graph without training: the keys in a line of `samples/`, and how they come to one worker."""

from msgspec.structs import replace

from realgraph.graphs.functions import GATHERED
from realgraph.graphs.graph import INPUT, Edge, Graph, Key
from realgraph.graphs.keys import KeyType
from realgraph.graphs.spec import Function, Generate, Train

_COPY = KeyType("sample", "json")  # no number of the metrics: the mean of what it copies is there already


def keeps_samples(graph: Graph) -> bool:
    """True where the samples are the result: something generates and nothing trains."""
    calls = graph.calls.values()
    return any(isinstance(call, Generate) for call in calls) and not any(isinstance(call, Train) for call in calls)


def is_shown(key: KeyType) -> bool:
    """True of the keys of a line, beside the text of prompts: values per token stay out, and the sequences of samples,
    which prompt and text say better."""
    return key.level in ("group", "sample") and key.dtype not in ("tokens", "experts")


def with_gathering(graph: Graph) -> Graph:
    """The graph with a last call, where its samples are the result, that copies what other workers may have of them,
    such as the scores of a reward model, to the worker that writes them down."""
    if not keeps_samples(graph):
        return graph
    away = [key for key in graph.keys.values() if is_shown(key.type) and _is_away(graph, key.producer)]
    if not away:
        return graph
    name = "samples"
    while name in graph.calls:
        name += "_"
    reads = {f"{name}.{key.name}": key.name for key in away}
    copies = {copy: Key(copy, _COPY, name) for copy in reads}
    read = {key.name: replace(key, consumers=(*key.consumers, name)) for key in away}
    producers = dict.fromkeys(key.producer for key in away)
    edges = [Edge(one, name, tuple([key.name for key in away if key.producer == one])) for one in producers]
    return replace(
        graph,
        calls={**graph.calls, name: Function(GATHERED, reads, dict.fromkeys(copies, str(_COPY)))},
        keys={**graph.keys, **read, **copies},
        reads={**graph.reads, name: tuple(read)},
        writes={**graph.writes, name: tuple(copies)},
        edges=(*graph.edges, *edges),
    )


def shown_name(graph: Graph, key: Key) -> str:
    """The name that a key has in a line: a copy has that of what it copies."""
    call = graph.calls.get(key.producer)
    copied = isinstance(call, Function) and call.fn == GATHERED
    return key.name.removeprefix(f"{key.producer}.") if copied else key.name


def _is_away(graph: Graph, producer: str) -> bool:
    """True of calls that do not run where the samples of a group are made: on a mesh, or over the whole batch."""
    if producer in (INPUT, *graph.generates[:1]):
        return False
    call = graph.calls[producer]
    return not isinstance(call, Function) or call.over == "batch"
