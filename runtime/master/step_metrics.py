"""The flat metrics of metrics.jsonl, made of what a step's calls reported. Pure."""

from collections.abc import Mapping

from realgraph.graphs.graph import Graph
from realgraph.planner.plan.plan import Plan
from realgraph.runtime.commands.actions import CallSpan, StepEnded
from realgraph.runtime.wire.protocol import PEAK_BYTES

PLANNED_BYTES = "planned_bytes"  # a metric: of `PEAK_BYTES`, as predicted


def flatten(ended: StepEnded, graph: Graph, plan: Plan) -> dict[str, float]:
    """Metrics by `call/name`: what the call reported, its seconds, tokens per second, and the time it was held up;
    beside the most bytes that it had on a device those that the plan has predicted.

    queue_seconds: from the moment its last producer of the same step ended to its start; negative values (a streaming
    function starts before generation has ended) count as 0.
    """
    flat = {f"{call}/{name}": metric.value for call, values in ended.metrics.items() for name, metric in values.items()}
    for call, allocation in plan.allocations.items():
        if f"{call}/{PEAK_BYTES}" in flat:
            flat[f"{call}/{PLANNED_BYTES}"] = float(allocation.peak_bytes)
    for call, span in ended.spans.items():
        flat[f"{call}/seconds"] = span.seconds
        flat[f"{call}/queue_seconds"] = queue_seconds(call, ended.spans, graph)
        if call not in graph.calls or not graph.role(call):
            continue  # reallocations, functions and advantages work on no tokens
        tokens = ended.n_new_tokens if "tokens" in graph.writes[call] else ended.n_tokens
        if span.seconds > 0:
            flat[f"{call}/tokens_per_second"] = tokens / span.seconds
    flat |= {
        "batch/groups": float(ended.n_groups),
        "batch/samples": float(ended.n_samples),
        "batch/tokens": float(ended.n_tokens),
        "batch/new_tokens": float(ended.n_new_tokens),
        "batch/skipped_groups": float(ended.n_skipped),
        "batch/dropped_groups": float(ended.n_dropped),
        "staleness/mean": ended.age.value,
        "staleness/max": float(ended.oldest),
    }
    return flat | {f"version/{role}": float(version) for role, version in ended.versions.items()}


def queue_seconds(call: str, spans: Mapping[str, CallSpan], graph: Graph) -> float:
    """Seconds between the end of the last producer of this step and the start of `call`."""
    before = [
        spans[edge.producer].ended
        for edge in graph.edges
        if edge.consumer == call and edge.distance == 0 and edge.producer in spans
    ]
    return max(0.0, spans[call].started - max(before)) if before else 0.0
