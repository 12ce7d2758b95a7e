"""Compiles a GraphSpec to a checked Graph: switch off, infer keys, apply every rule, order the calls. Reads no file."""

from collections.abc import Callable, Iterator

import networkx as nx
from msgspec import structs

from realgraph.graphs.check.filters import few_samples
from realgraph.graphs.check.functions import (
    function_arguments,
    function_environment,
    function_ids,
    function_level,
    function_name,
)
from realgraph.graphs.check.generates import (
    ambiguous_samples,
    data_sequences,
    later_samples,
    leading_prompt,
    mixed_samples,
    unknown_samples,
)
from realgraph.graphs.check.keys import (
    call_shape,
    cycle,
    duplicate_producer,
    input_shape,
    keep_type,
    key_meaning,
    key_type,
    key_type_text,
    late_prompt,
    missing_producer,
    no_calls,
    plain_name,
)
from realgraph.graphs.check.maths import (
    adaptive_horizon,
    behaviour_temperature,
    center_key,
    empty_loss,
    empty_mask,
    greedy_sampling,
    group_of_one,
    overlong_after_baseline,
    overlong_limits,
    pair_aggregate,
    pair_size,
    reference_temperature,
    reward_after_return,
    truncated_sampling,
    two_returns,
)
from realgraph.graphs.check.models import (
    ema_rate,
    frozen_trained,
    head_mismatch,
    init_unknown,
    model_without_path,
    optimizer_disagreement,
    own_tokenizer,
    policy_not_sampled,
    routing_replay,
    trainable_untrained,
    unknown_role,
)
from realgraph.graphs.check.run import (
    missing_column,
    small_data,
    stale_uncorrected,
    stale_without_cause,
    surplus_without_cause,
    uneven_minibatches,
    unknown_input,
)
from realgraph.graphs.check.switch import switch_off, switch_problems
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import least_samples
from realgraph.graphs.graph import INPUT, Edge, Graph, Key
from realgraph.graphs.infer import Draft, infer
from realgraph.graphs.keys import DATA, OF_DATA
from realgraph.graphs.spec import Function, Generate, GraphSpec, Inference, ModelCall, ModelRole, Train, works_on_data

Rule = Callable[[Draft, Facts], Iterator[Problem]]

RULES: tuple[Rule, ...] = (
    no_calls,
    plain_name,
    key_type_text,
    missing_producer,
    duplicate_producer,
    cycle,
    key_type,
    key_meaning,
    keep_type,
    late_prompt,
    input_shape,
    call_shape,
    leading_prompt,
    later_samples,
    unknown_samples,
    ambiguous_samples,
    data_sequences,
    mixed_samples,
    unknown_role,
    frozen_trained,
    trainable_untrained,
    policy_not_sampled,
    head_mismatch,
    own_tokenizer,
    init_unknown,
    model_without_path,
    ema_rate,
    routing_replay,
    optimizer_disagreement,
    function_name,
    function_arguments,
    function_level,
    function_environment,
    function_ids,
    few_samples,
    group_of_one,
    two_returns,
    reward_after_return,
    overlong_after_baseline,
    center_key,
    overlong_limits,
    adaptive_horizon,
    greedy_sampling,
    behaviour_temperature,
    truncated_sampling,
    reference_temperature,
    empty_loss,
    pair_aggregate,
    pair_size,
    empty_mask,
    unknown_input,
    missing_column,
    small_data,
    uneven_minibatches,
    stale_uncorrected,
    stale_without_cause,
    surplus_without_cause,
)


def compile_graph(spec: GraphSpec, where: Callable[[str], Where], facts: Facts) -> Graph:
    """The checked graph. Raises ConfigError with every problem that any rule finds, in the order of their places."""
    live, switched_off = switch_off(spec)
    draft = infer(live, where, switched_off)
    problems = [*switch_problems(spec, where), *check(draft, facts)]
    if problems:
        raise ConfigError(sorted(problems))
    return _build(draft, facts, spec)


def check(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The problems that the rules find; each problem carries its rule's name."""
    for rule in RULES:
        for problem in rule(draft, facts):
            yield structs.replace(problem, rule=rule.__name__)


def _build(draft: Draft, facts: Facts, spec: GraphSpec) -> Graph:
    data_edges = tuple(_data_edges(draft))
    order = _order(draft, data_edges)
    reads = {name: tuple(dict.fromkeys(read.key for read in draft.reads[name])) for name in order}
    writes: dict[str, list[str]] = {name: [] for name in order}
    for key, (write, *_) in draft.writes.items():
        if write.call != INPUT:
            writes[write.call].append(key)
    several = sum(1 for _ in draft.of(Generate)) > 1
    return Graph(
        name=draft.spec.name,
        calls={name: _with_full_names(draft, name) for name in order},
        models={name: _with_path(role, spec.models) for name, role in draft.spec.models.items()},
        keys=_keys(draft, order, reads, writes),
        reads=reads,
        writes={name: tuple(keys) for name, keys in writes.items()},
        edges=(*data_edges, *_weight_edges(draft, order, facts.staleness)),
        samples_per_group=draft.samples_per_group,
        leading=draft.leading if several else "",
        samplers=draft.samplers if several else _on_data(draft),
        least_samples=least_samples(draft.spec.calls, draft.samples_per_group),
    )


def _on_data(draft: Draft) -> dict[str, str]:
    """The calls that work on sequences of the data beside generated samples."""
    return {name: DATA for name, call in draft.spec.calls.items() if works_on_data(draft.spec, call)}


def _with_full_names(draft: Draft, name: str) -> ModelCall:
    """A call as the runtime needs it: keywords of functions with the keys that the graph has."""
    call = draft.spec.calls[name]
    if not isinstance(call, Function) or not isinstance(call.reads, dict):
        return call
    keys = {read.path: read.key for read in draft.reads[name]}
    full = {word: keys.get(f"$.calls.{name}.reads.{word}", key) for word, key in call.reads.items()}
    return structs.replace(call, reads=full)


def _data_edges(draft: Draft) -> Iterator[Edge]:
    """An edge per pair of calls that share keys, within a step."""
    for consumer, reads in draft.reads.items():
        keys: dict[str, list[str]] = {}
        for read in reads:
            producer = draft.writes[read.key][0].call
            if producer != INPUT:
                keys.setdefault(producer, []).append(read.key)
        for producer, shared in keys.items():
            yield Edge(producer, consumer, tuple(dict.fromkeys(shared)))


def _order(draft: Draft, edges: tuple[Edge, ...]) -> tuple[str, ...]:
    """Topological; among calls that are free to run, the file's order."""
    graph = nx.DiGraph()
    graph.add_nodes_from(draft.spec.calls)
    graph.add_edges_from((edge.producer, edge.consumer) for edge in edges)
    place = {name: i for i, name in enumerate(draft.spec.calls)}
    return tuple(nx.lexicographical_topological_sort(graph, key=place.__getitem__))


def _weight_edges(draft: Draft, order: tuple[str, ...], staleness: int) -> Iterator[Edge]:
    """Weights flow from a step's training to later steps; two train calls of one role in a step follow each other.

    The moving average of a trained role (`ema_rate`) is made of what training leaves, so it flows like that.
    """
    calls, models = draft.spec.calls, draft.spec.models
    last: dict[str, str] = {}
    for name in order:
        call = calls[name]
        if isinstance(call, Train):
            if call.model in last:
                yield Edge(last[call.model], name, role=call.model)
            last[call.model] = name
    for name in order:
        call = calls[name]
        if isinstance(call, Generate) and call.model in last:
            yield Edge(last[call.model], name, role=call.model, distance=1 + staleness)
        if isinstance(call, Inference):
            role = models[call.model]
            source = role.init if role.ema_rate is not None and role.init is not None else call.model
            if source in last:
                yield Edge(last[source], name, role=call.model, distance=1)


def _keys(
    draft: Draft, order: tuple[str, ...], reads: dict[str, tuple[str, ...]], writes: dict[str, list[str]]
) -> dict[str, Key]:
    """Inputs that are read, then what the calls write, in the order of the calls."""
    consumers: dict[str, list[str]] = {}
    for name in order:
        for key in reads[name]:
            consumers.setdefault(key, []).append(name)
    inputs = dict.fromkeys((*draft.spec.inputs, *(key for key in OF_DATA if draft.producer(key) == INPUT)))
    names = [key for key in inputs if key in consumers] + [key for name in order for key in writes[name]]
    keys = {}
    for key in names:
        write = draft.writes[key][0]
        assert write.type is not None, f"{key!r} passed the rules without a type"
        keys[key] = Key(key, write.type, write.call, tuple(consumers.get(key, ())))
    return keys


def _with_path(role: ModelRole, models: dict[str, ModelRole]) -> ModelRole:
    """The role with the path and revision of the role that `init` leads to, where it has no path of its own."""
    source = role
    while source.path is None and source.init is not None and source.init in models:
        source = models[source.init]
    return structs.replace(role, path=source.path, revision=source.revision) if role.path is None else role
