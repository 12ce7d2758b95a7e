"""Before a run starts: each of the user's own steps and terms is called once, in a functions' subprocess. No torch."""

from collections.abc import Iterator, Sequence

import msgspec

from realgraph.graphs.applied import Applied, applied_of
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.functions import sample_filter
from realgraph.graphs.graph import Graph
from realgraph.graphs.maths import TokenMean
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, Train
from realgraph.runtime.functions.functions import Unit
from realgraph.runtime.functions.host import FunctionError, FunctionHost

TRIAL = "realgraph.runtime.algorithms.trial:try_entry"
TRIAL_SECONDS = 60.0  # of one call on a few dozen tokens


def try_applied(graph: Graph, host: FunctionHost, folder: str) -> list[str]:
    """Lines about every `apply` entry; `folder` is that of the functions. Raises ConfigError with every problem."""
    lines: list[str] = []
    problems: list[Problem] = []
    for name, entries in _by_call(graph):
        for i, entry in enumerate(entries):
            problem, note = _tried(graph, host, entries[: i + 1], folder)
            if problem:
                problems.append(Problem(Where(path=f"{entry.path}.fn"), problem, _hint(entry), "function"))
                break  # the steps after it run on what it gives
            lines.append(f"{name}.{entry.entry}: {entry.fn}: {note or 'called on a made-up batch'}")
    if problems:
        raise ConfigError(problems)
    return lines


def _by_call(graph: Graph) -> Iterator[tuple[str, list[Applied]]]:
    entries = list(applied_of(graph.calls))
    for name in dict.fromkeys(entry.call for entry in entries):
        yield name, [entry for entry in entries if entry.call == name]


def _tried(graph: Graph, host: FunctionHost, entries: Sequence[Applied], folder: str) -> tuple[str, str]:
    """The fault of the last entry, and what should be known of it."""
    entry = entries[-1]
    needed = entries if entry.kind == "step" else entries[-1:]
    n = graph.samples_per_group
    trial = {
        "call": msgspec.to_builtins(_part(graph.calls[entry.call], entry)),
        "entry": entry.entry,
        "fns": {f"{one.path}.fn": one.fn for one in needed},
        "keys": {key: msgspec.to_builtins(graph.keys[key].type) for key in graph.reads[entry.call]},
        "group_sizes": (n, graph.least_samples if sample_filter(graph.calls) else n),
        "dtype": graph.models[graph.role(entry.call)].dtype if graph.role(entry.call) else "float32",
        "folder": folder,
    }
    call = Function(TRIAL, writes={"found": "sample json"}, timeout_seconds=TRIAL_SECONDS)
    try:
        (result,) = host.run(entry.entry, call, [Unit((0,), {"trial": trial})])
    except (FunctionError, TimeoutError) as error:
        return f"{entry.fn} can't be tried: {error}", ""
    if result.error:
        return f"{entry.fn} {result.error.removeprefix(f'{entry.entry}: {TRIAL} on sample 0: ')}", ""
    return result.values["found"]["problem"], result.values["found"]["note"]


def _part(call: ModelCall, entry: Applied) -> ModelCall:
    """An advantage call up to a step; a train call with a term alone."""
    match call:
        case Advantage(steps=steps):
            names = list(steps)
            kept = {name: steps[name] for name in names[: names.index(entry.entry) + 1]}
            return msgspec.structs.replace(call, steps=kept)
        case Train(loss=loss):
            alone = msgspec.structs.replace(loss, terms={entry.entry: loss.terms[entry.entry]}, aggregate=TokenMean())
            return msgspec.structs.replace(call, loss=alone)
        case Generate() | Inference() | Function():
            raise AssertionError(f"{entry.call!r} has no `apply` entry")


def _hint(entry: Applied) -> str:
    gets = ", ".join((*entry.positional, *(f"{name}=" for name in entry.args)))
    gives = "a tensor, one number a sample or a token" if entry.kind == "step" else "a tensor, one loss a token"
    keys = f"keys it may look up: {', '.join(entry.reads) or 'none'}"
    outputs = f"; outputs: {', '.join(entry.outputs)}" if entry.outputs else ""
    return f"it is called as ({gets}) and returns {gives}; {keys}{outputs}; `reads` declares more"
