"""The flat metrics of metrics.jsonl, made of what a step's calls reported. Pure."""

from collections.abc import Mapping
from typing import Final

from realgraph.graphs.graph import Graph
from realgraph.planner.plan.plan import Plan
from realgraph.runtime.commands.actions import CallSpan, StepEnded
from realgraph.runtime.job.job import Job
from realgraph.runtime.master.observer import PlannedSeconds
from realgraph.runtime.wire.metrics import PEAK_BYTES

PLANNED_BYTES = "planned_bytes"  # a metric: of `PEAK_BYTES`, as predicted
PLANNED_SECONDS = "planned_seconds"  # a metric: of `seconds`, as predicted
REALLOCATE: Final = "reallocate"  # the name of all reallocations of a step among its calls


def flatten(ended: StepEnded, graph: Graph, plan: Plan) -> dict[str, float]:
    """Metrics by `call/name`: what the call reported, its seconds, tokens per second, and the time it was held up;
    beside its seconds, and the most bytes that it had on a device, those that the plan has predicted.

    queue_seconds: from the moment its last producer of the same step ended to its start; negative values (a streaming
    function starts before generation has ended) count as 0.
    """
    flat = {f"{call}/{name}": metric.value for call, values in ended.metrics.items() for name, metric in values.items()}
    flat |= _effective_shares(flat)
    for call, allocation in plan.allocations.items():
        if f"{call}/{PEAK_BYTES}" in flat:
            flat[f"{call}/{PLANNED_BYTES}"] = float(allocation.peak_bytes)
    planned = planned_seconds(plan)
    for call, span in ended.spans.items():
        flat[f"{call}/seconds"] = span.seconds
        if call in planned:
            flat[f"{call}/{PLANNED_SECONDS}"] = planned[call]
        flat[f"{call}/queue_seconds"] = queue_seconds(call, ended.spans, graph)
        if call in ended.tokens and span.seconds > 0:
            flat[f"{call}/tokens_per_second"] = ended.tokens[call] / span.seconds
    flat |= {
        "batch/groups": float(ended.n_groups),
        "batch/samples": float(ended.n_samples),
        "batch/tokens": float(ended.n_tokens),
        "batch/new_tokens": float(ended.n_new_tokens),
        "batch/trained_tokens": float(ended.n_trained_tokens),
        "batch/skipped_groups": float(ended.n_skipped),
        "batch/dropped_groups": float(ended.n_dropped),
        "batch/surplus_groups": float(ended.n_surplus),
        "batch/dropped_samples": float(ended.n_left_out),
        "staleness/mean": ended.age.value,
        "staleness/max": float(ended.oldest),
        "staleness/p95": float(ended.age_p95),
    }
    if ended.n_engines:
        flat[f"{graph.generates[0]}/engines"] = float(ended.n_engines)
    return flat | {f"version/{role}": float(version) for role, version in ended.versions.items()}


def planned_seconds(plan: Plan) -> dict[str, float]:
    """Predicted seconds by the names that a step's metrics have for the measured ones.

    Left out are calls of which the plan predicts none, and reallocations where there are several: a step measures them
    as one, from the start of the first to the end of the last.
    """
    predicted = {call: one.seconds - one.step_end_seconds for call, one in plan.allocations.items()}
    if len(plan.reallocation_seconds) == 1:
        (predicted[REALLOCATE],) = plan.reallocation_seconds.values()
    return {name: seconds for name, seconds in predicted.items() if seconds > 0}


def planned_of(job: Job) -> PlannedSeconds:
    """The predictions of a run's plan; the period is that of a whole step, which rollouts alone are not."""
    return PlannedSeconds(0.0 if job.rollout_alone else job.plan.period_seconds, planned_seconds(job.plan))


def _effective_shares(flat: Mapping[str, float]) -> dict[str, float]:
    """`effective_share` of each loss that corrects for the policy that drew its tokens: so many tokens of the trained
    policy itself, for each of them, would be worth as much. From means over the whole batch."""
    shares = {}
    for name, square in flat.items():
        mean = flat.get(name.removesuffix("_square"), 0.0)
        if name.endswith("behaviour_ratio_square") and square > 0:
            shares[name.replace("behaviour_ratio_square", "effective_share")] = mean * mean / square
    return shares


def queue_seconds(call: str, spans: Mapping[str, CallSpan], graph: Graph) -> float:
    """Seconds between the end of the last producer of this step and the start of `call`."""
    before = [
        spans[edge.producer].ended
        for edge in graph.edges
        if edge.consumer == call and edge.distance == 0 and edge.producer in spans
    ]
    return max(0.0, spans[call].started - max(before)) if before else 0.0
