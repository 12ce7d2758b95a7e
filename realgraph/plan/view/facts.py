"""The facts that a plan was made for, and what may be wrong with its predictions, in words."""

from collections.abc import Iterator

from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.format import bytes_text, count_text, counted
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.run.requests import with_lengths
from realgraph.run_file.compose import Checked


def facts_of(checked: Checked, request: PlanRequest) -> tuple[tuple[str, str], ...]:
    """Lines of (name, text): the run, its models, its cluster."""
    workload = request.workload
    mode = f"staleness {workload.staleness}" if workload.staleness else "synchronous"
    samples = f"{counted(workload.groups, 'group')} x {counted(workload.samples_per_group, 'sample')}"
    roles = request.graph.models.items()
    sizes = ", ".join(f"{name} {count_text(request.models[name].n_params(role.head))}" for name, role in roles)
    run = f"graph {request.graph.name}, {samples}, {_lengths(workload)}, {mode}"
    nodes = "; ".join(_nodes(group, device_bytes(request, group)) for group in request.cluster.groups)
    return ((checked.name, run), ("models", sizes), ("cluster", nodes))


def _lengths(workload: Workload) -> str:
    return (
        f"prompts of {workload.expected_prompt_tokens:,.0f} (at most {workload.prompt_tokens:,}) and "
        f"{workload.mean_new_tokens:,.0f} (at most {workload.max_new_tokens:,}) new tokens expected"
    )


def _nodes(group: Cluster, usable: int) -> str:
    nodes = f"{counted(group.nodes, 'node')} x {group.devices_per_node:,} {group.kind}"
    return f"{nodes} ({bytes_text(group.memory_bytes)} each, {usable / 1e9:.1f} usable)"


def fresher(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """That the plan uses less of the staleness bound than the run allows."""
    if plan.staleness < request.workload.staleness:
        yield (
            f"runs at staleness {plan.staleness} of the {request.workload.staleness} allowed: with more in flight, "
            f"samples would be older and no plan was found to be faster"
        )


def doubts_of(checked: Checked, request: PlanRequest, plan: Plan) -> Iterator[str]:
    """The assumptions of the predictions that nobody has measured."""
    costs, workload = request.costs, request.workload
    if plan.hashes.costs and not hashes(request).costs:
        yield "the plan's own seconds, by a table of measured costs that was not given: --costs judges edits by it"
    elif not costs.phases and not costs.calls and costs.factors is None:
        shipped = (
            "are of server cores" if request.cluster.is_cpu else "were fitted to published speeds of other systems"
        )
        yield f"no measured costs: the shipped factors {shipped} (--costs TABLE)"
    elif costs.kind and costs.kind != request.cluster.kind:
        yield f"the costs were measured on {costs.kind}, the cluster is {request.cluster.kind}"
    expected = checked.run.batch.expected_new_tokens
    if expected is not None and costs.lengths and with_lengths(workload, costs.lengths) == workload:
        mean, guess = f"{workload.mean_new_tokens:,.0f} tokens on average", f"batch.expected_new_tokens, {expected:,}"
        yield f"lengths are the measured ones of the costs, {mean}, not {guess} (--lengths)"
    if not workload.lengths and not costs.lengths:
        if expected is None:
            guess = f"half of batch.max_new_tokens, {workload.mean_new_tokens:,.0f}"
            yield f"the mean length of a response is guessed: {guess} (batch.expected_new_tokens, or --lengths)"
        else:
            yield "the lengths of responses are drawn around batch.expected_new_tokens, not measured (--lengths)"
