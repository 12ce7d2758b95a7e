"""Plans made by hand that the tests of `realgraph plan`'s output share: no search decides what they look like."""

from collections.abc import Mapping
from typing import Any

import msgspec

from realgraph.planner.advise.sweep import Hint
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.events import period
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Allocation, Plan, Transport, Turn
from realgraph.planner.report.content import (
    Comparison,
    Findings,
    MeasuredSeconds,
    PlannedSize,
    Price,
    Report,
    report_of,
)
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.search import events_of
from tests.planner_cases import cluster, grpo, ppo, request

TRAIN = {"microbatches": 32, "schedule": "interleaved", "chunks": 2, "recompute": "selective", "input_seconds": 0.5}
LOW, HIGH, ALL = DeviceMesh(0, 32), DeviceMesh(32, 32), DeviceMesh(0, 64)


def finished(asked: PlanRequest, allocations: Mapping[str, Allocation], orders: Mapping[int, tuple[Turn, ...]]) -> Plan:
    """A plan with the period that its orders give, and a bound 0.13 % below."""
    moved = {"generate": 0.9} if "generate" in allocations else {}
    ways: dict[str, Transport] = {"generate": "device", "values": "in_place"} if moved else {}
    plan = Plan(
        dict(allocations),
        dict(orders),
        hashes(asked),
        asked.workload.staleness,
        reallocation_seconds=moved,
        reallocation_transport=ways,
    )
    found = period(events_of(asked, plan))
    return msgspec.structs.replace(
        plan,
        period_seconds=found.seconds,
        bottleneck=found.circuit,
        lower_bound_seconds=found.seconds / 1.0013,
        scope="1-periodic schedules on blocks of the cluster's tree",
        stopped="proven",
        search_seconds=0.89,
    )


def overlapping() -> tuple[PlanRequest, Plan]:
    """PPO on eight nodes: the critic trains on one half beside the next step's generation on the other."""
    asked = request(ppo(), model="Qwen/Qwen3-8B", machine=cluster(nodes=8))
    allocations = {
        "generate": _at(HIGH, (4, 8, 1), 44.5, 21_000_000_000, "kv_cache", running=64, residency="reallocated"),
        "ref": _at(LOW, (8, 4, 1), 7.4, 38_100_000_000, "weights", residency="offloaded"),
        "values": _at(ALL, (16, 4, 1), 3.3, 37_700_000_000, "weights"),
        "actor_train": _at(ALL, (2, 4, 8), 11.3, 68_000_000_000, "optimizer", recompute="full", microbatches=16),
        "critic_train": _at(LOW, (1, 8, 4), 27.7, 71_300_000_000, "optimizer", **TRAIN),
    }
    first, last = Turn("reallocate:generate"), (Turn("reallocate:values"), Turn("values"), Turn("actor_train"))
    low = (first, Turn("critic_train", -1), Turn("ref"), *last)
    high = (first, Turn("generate"), *last)
    orders = {device: low if device < 32 else high for device in range(64)}
    return asked, finished(asked, allocations, orders)


def colocated() -> tuple[PlanRequest, Plan]:
    """GRPO on one node: every call on all devices, one after the other."""
    asked = request(grpo())
    mesh = DeviceMesh(0, 8)
    allocations = {
        "rollout": _at(mesh, (8, 1, 1), 6.5, 30_000_000_000, "kv_cache", running=64),
        "train": _at(mesh, (8, 1, 1), 2.5, 60_000_000_000, "activations", microbatches=4),
    }
    return asked, finished(asked, allocations, dict.fromkeys(range(8), (Turn("rollout"), Turn("train"))))


def _at(
    mesh: DeviceMesh, axes: tuple[int, int, int], seconds: float, peak_bytes: int, worst: str, **more: object
) -> Allocation:
    dp, tp, pp = axes
    field = "kv_cache_tokens" if worst == "kv_cache" else "max_tokens_per_microbatch"
    layout, tokens = Layout(mesh, dp, tp, pp), dict[str, Any]({field: 16_384})
    made = Allocation(layout, **tokens, seconds=seconds, peak_bytes=peak_bytes, worst_term=worst)
    return msgspec.structs.replace(made, **more)


def everything() -> Report:
    """A report with every part that there is."""
    asked, plan = overlapping()
    findings = Findings(
        comparisons=(
            Comparison("symmetric", plan.period_seconds * 1.273, "one layout per role, all devices, best of all"),
            Comparison("colocated", plan.period_seconds * 1.137, "every call on all devices"),
            Comparison("ReaL-style heuristic", plan.period_seconds * 1.31, "tp in a node, pp across, dp the rest"),
            Comparison("on half the devices", None, "train of actor lacks 12 GB"),
        ),
        hints=(Hint("128 devices", 52.8, 0.27), Hint("H200", 57.0, 0.18), Hint("without offload", 70.1, -0.04)),
        doubts=("no measured costs <b>here</b>",),
        notes=("synchronous is as good as staleness 1",),
        price=Price(2.5, 2.98, 894.0, 300),
        sweep=(
            PlannedSize(8, None, 0.0, "no plan fits: critic_train lacks 21 GB"),
            *(PlannedSize(16 << i, 204 * 0.574**i + 12, 203 * 0.574**i + 12) for i in range(7)),
        ),
        target_seconds=30.0,
        measured=(
            MeasuredSeconds("generate", 44.5, 49.1, 0.04, 20),
            MeasuredSeconds("actor_train", 11.3, 10.8, 0.01, 20),
        ),
    )
    facts = (("ppo-70b", "graph ppo, 512 groups x 1 samples"), ("cluster", f"8 nodes x 8 {_kind(asked.cluster)}"))
    return report_of(asked, plan, "ppo <70b> & friends", facts, findings)


def _kind(machine: Cluster) -> str:
    return machine.kind
