"""`realgraph run --no-train`: a run without its training, for measuring what generation does by itself."""

from collections.abc import Container, Iterator, Sequence

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Advantage, Train
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.run.running import PreparedRun, beside
from realgraph.runtime.master.observer import StepRecord

WARM_UP_STEPS = 1  # that the figures leave out, where others follow


def rollout_alone(prepared: PreparedRun) -> PreparedRun:
    """The run with its rollouts on the devices, with the memory and in the order that they have beside training, and
    nothing of training. Nothing is evaluated or kept, and its records have a directory of their own.

    Raises ConfigError where there are no rollouts.
    """
    job = prepared.job
    if not job.graph.generates:
        text = f"the graph {job.graph.name!r} generates nothing, so without training nothing is left"
        raise ConfigError([Problem(prepared.checked.where("$.graph"), text, "leave --no-train out", "no_train")])
    graph = without_training(job.graph)
    alone = replace(job, graph=graph, plan=without_calls(job.plan, graph.calls), eval=None, rollout_alone=True)
    return beside(prepared, alone, "no-train")


def without_training(graph: Graph) -> Graph:
    """The graph without its train calls, and without the advantages that nothing else reads."""
    dropped: set[str] = set()
    for name, call in reversed(graph.calls.items()):  # readers first
        readers = {reader for key in graph.writes[name] for reader in graph.keys[key].consumers}
        if isinstance(call, Train) or (isinstance(call, Advantage) and readers <= dropped):
            dropped.add(name)
    return graph.of_calls(graph.calls.keys() - dropped)


def without_calls(plan: Plan, kept: Container[str]) -> Plan:
    """The plan of the calls that are kept, as it has them. No weights are brought to any of them: none change."""
    allocations = {name: _of_frozen(one, kept) for name, one in plan.allocations.items() if name in kept}
    orders = {device: tuple(turn for turn in order if turn.call in kept) for device, order in plan.orders.items()}
    return replace(
        plan,
        allocations=allocations,
        orders=orders,
        starts={name: seconds for name, seconds in plan.starts.items() if name in kept},
        bottleneck=tuple(name for name in plan.bottleneck if name in kept),
        reallocation_seconds={},
        reallocation_transport={},
    )


def _of_frozen(allocation: Allocation, kept: Container[str]) -> Allocation:
    """A call's allocation where nothing refreshes its weights, nor brings them while another call runs that is gone."""
    stays = "resident" if allocation.residency == "reallocated" else allocation.residency
    during = allocation.prefetch_during if allocation.prefetch_during in kept else ""
    return replace(allocation, residency=stays, prefetch_during=during)


def measured_lines(graph: Graph, steps: Sequence[StepRecord]) -> Iterator[str]:
    """The speed, lengths and sequences at once of generation in the steps of a run, by its records."""
    steady = steps[WARM_UP_STEPS:] or steps
    seconds = sum(step.seconds for step in steady)
    if not seconds:
        return
    tokens = sum(step.metrics["batch/new_tokens"] for step in steady)
    longest = max((max(step.lengths, default=0.0) for step in steady), default=0.0)
    mean = tokens / max(1.0, sum(step.metrics["batch/samples"] for step in steady))
    of = f" of {graph.leading}" if graph.leading else ""  # the others' are told call by call
    yield f"  rollout alone, steps {steady[0].step + 1} to {steady[-1].step + 1}: {tokens / seconds:,.0f} tokens/s{of}"
    yield f"  tokens of a sample{of}: {mean:.0f} on average, up to about {longest:.0f}"
    for name in graph.generates[1:]:
        lengths = [step.metrics[f"{name}/new_tokens"] for step in steady if f"{name}/new_tokens" in step.metrics]
        if lengths:
            yield f"  tokens of a sample of {name}: {sum(lengths) / len(lengths):.0f} on average"
    for name in graph.generates:
        running = [step.metrics[f"{name}/running"] for step in steady if f"{name}/running" in step.metrics]
        if any(running):  # 0 of steps whose groups end together: none says how many there were before
            yield f"  sequences that {name} ran at once on an engine: {sum(running) / len(running):.1f} on average"
