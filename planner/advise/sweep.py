"""The same request on other clusters and with other settings: how the period scales, and what would help most."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import Generate
from realgraph.planner.feasibility.diagnose import Infeasible
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kinds
from realgraph.planner.options.calls import is_trained
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.request import PlanRequest, at_staleness
from realgraph.planner.search.search import search

QUICK_LIMITS = Limits(gap=0.01, seconds=3.0)  # of one of many searches
STALENESS_LEVELS = (0, 1, 2, 4)
MOST_GAP = 0.02  # of the search behind a hint
LEAST_GAIN = 0.005  # of throughput: a smaller one is not worth a hint
SYNCHRONOUS_LOSS = 0.01  # relative: synchronous is as good where it is no slower than this


class Hint(Struct, frozen=True):
    """A change and what it would bring."""

    text: str
    period_seconds: float | None  # predicted of a step under it, None where no plan would fit
    gain: float  # samples a second against now, 0.18 is 18 % more, a loss is negative


# --- cluster sizes ----------------------------------------------------------------------------------------------------


def resize(cluster: Cluster, size: int) -> Cluster:
    """The cluster with `size` devices of its first kind. Raises ValueError where they are no whole nodes."""
    per_node = cluster.devices_per_node
    if size <= per_node:
        return replace(cluster, nodes=1, devices_per_node=size, more=())
    if size % per_node:
        raise ValueError(f"{size} devices are no whole nodes of {per_node}")
    return replace(cluster, nodes=size // per_node, more=())


# --- what if ----------------------------------------------------------------------------------------------------------


class Tried(Struct, frozen=True):
    """A change that was planned for."""

    text: str
    hint: Hint | None = None  # what it would bring, None where that is not worth a hint
    conclusive: bool = True  # whether the search came near enough to its bound to say so, in the time that it had


def hints(request: PlanRequest, plan: Plan, limits: Limits = QUICK_LIMITS) -> Iterator[Hint]:
    """Changes with their predicted gain in samples a second, each from a search of its own, one by one as they are
    found. A search that ended so far from its bound that it would mislead gives none (see `is_conclusive`)."""
    yield from (tried.hint for tried in changes_tried(request, plan, limits) if tried.hint is not None)


def changes_tried(request: PlanRequest, plan: Plan, limits: Limits = QUICK_LIMITS) -> Iterator[Tried]:
    """Every change, also those that were not tried any more because the limits said to stop."""
    for variant in (*_clusters(request), *_batches(request)):
        yield from _tried(request, plan, variant, limits)
    if _may_be_stale(request):
        yield from _staler(request, plan, limits)
    for variant in _freer(request, plan):
        yield from _tried(request, plan, variant, limits)


def _staler(request: PlanRequest, plan: Plan, limits: Limits) -> Iterator[Tried]:
    """Other staleness bounds, the smallest first. A plan of less staleness, synchronous included, runs under a larger
    bound too: where a short search of the larger level finds a worse one, or none, there is that."""
    least = float("inf")  # of the plans of smaller bounds
    for staleness in STALENESS_LEVELS:
        if staleness == request.workload.staleness:
            least = min(least, plan.best_seconds)
            continue
        for tried in _tried(request, plan, (f"staleness {staleness}", at_staleness(request, staleness)), limits):
            found = tried.hint.period_seconds if tried.hint is not None else None
            if tried.hint is None and tried.conclusive:
                found = plan.best_seconds  # within LEAST_GAIN
            least = min(least, found or float("inf"))
            if tried.hint is None or least == float("inf"):
                yield tried
                continue
            gain = plan.best_seconds / least - 1
            yield Tried(tried.text, Hint(tried.text, least, gain) if abs(gain) >= LEAST_GAIN else None)


def _tried(request: PlanRequest, plan: Plan, variant: tuple[str, PlanRequest], limits: Limits) -> Iterator[Tried]:
    """Nothing where the change can't be asked: a pinned place that the changed cluster does not have."""
    text, changed = variant
    if limits.stop():
        yield Tried(text, conclusive=False)
        return
    other_kind = changed.cluster.kind != request.cluster.kind
    asked = changed.workload.staleness  # of the levels below it one or none: there are many hints
    levels = {asked} if asked != request.workload.staleness else {asked, plan.staleness}
    try:
        best = search(changed, limits, sorted(levels, reverse=True))
    except Infeasible:
        if not other_kind:
            yield Tried(text, Hint(f"{text}: no plan fits", None, -1.0))
        return
    except ConfigError as error:
        if any(problem.rule == "search" for problem in error.problems):
            yield Tried(text, conclusive=False)
        return
    gain = changed.workload.n_samples / best.period_seconds * plan.best_seconds / request.workload.n_samples - 1
    if other_kind and gain <= best.gap:
        yield Tried(text)  # nobody buys other devices to be as fast
    elif is_conclusive(gain, best.gap, limits.gap):
        yield Tried(text, Hint(text, best.period_seconds, gain))
    else:
        yield Tried(text, conclusive=best.gap <= max(MOST_GAP, limits.gap))


def is_conclusive(gain: float, gap: float, asked: float) -> bool:
    """True where a hint of `gain` is worth showing, whose search ended at `gap` where `asked` was enough.

    A better plan can only add to a gain, and can't undo a loss that is larger than the gap; what is smaller than the
    gap needs a search that came near its bound.
    """
    return abs(gain) >= LEAST_GAIN and gap <= max(MOST_GAP, asked, gain, 1 / (1 + gain) - 1)


def _freer(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, PlanRequest]]:
    if any(allocation.residency == "offloaded" for allocation in plan.allocations.values()):
        yield "no offload", replace(request, constraints=replace(request.constraints, offload=False))
    if request.pins or request.constraints != Constraints():
        yield "without pins and constraints", replace(request, pins={}, constraints=Constraints())


def _clusters(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    cluster = request.cluster
    if cluster.is_cpu:
        return
    twice = replace(cluster, nodes=2 * cluster.nodes)
    if cluster.more:
        if not (request.pins or request.constraints.forbid):  # they name devices, whose numbers would be others
            first = twice.nodes * twice.devices_per_node
            yield f"{twice.n_devices} devices, {first} of them {cluster.kind}", replace(request, cluster=twice)
        return
    yield f"{twice.n_devices} devices", replace(request, cluster=twice)
    if cluster.nodes > 1 and cluster.nodes % 2 == 0:
        half = replace(cluster, nodes=cluster.nodes // 2)
        yield f"{half.n_devices} devices", replace(request, cluster=half)
    larger = larger_memory(cluster)
    if larger is not None:
        text = f"{larger.kind} ({larger.memory_bytes / 1e9:.0f} GB)"
        yield text, replace(request, cluster=larger)


def larger_memory(cluster: Cluster) -> Cluster | None:
    """The same nodes with the device of next larger memory that computes no slower; None where there is none."""
    kinds = device_kinds()
    fitting = [
        (kind.memory_gb, name)
        for name, kind in kinds.items()
        if 1e9 * kind.memory_gb > 1.05 * cluster.memory_bytes and kind.flops >= cluster.flops
    ]
    if not fitting:
        return None
    kind = kinds[min(fitting)[1]]
    return replace(
        cluster,
        kind=min(fitting)[1],
        memory_bytes=round(1e9 * kind.memory_gb),
        flops=kind.flops,
        memory_bytes_per_s=1e9 * kind.memory_gb_per_s,
        link_bytes_per_s=1e9 * kind.link_gb_per_s,
        nic_bytes_per_s=1e9 * kind.nic_gb_per_s,
        pcie_bytes_per_s=1e9 * kind.pcie_gb_per_s,
    )


def _batches(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    workload = request.workload
    larger = replace(workload, groups=2 * workload.groups)
    yield f"batch.groups {larger.groups}", replace(request, workload=larger)
    mean = min(2 * workload.mean_new_tokens, float(workload.max_new_tokens))
    if mean > 1.2 * workload.mean_new_tokens:
        lengths = tuple(min(2 * length, workload.max_new_tokens) for length in workload.lengths)
        if lengths:
            mean = sum(lengths) / len(lengths)
        longer = replace(workload, mean_new_tokens=mean, lengths=lengths)
        yield f"responses of {mean:.0f} tokens", replace(request, workload=longer)


def _may_be_stale(request: PlanRequest) -> bool:
    """True where some trained role generates: only its samples can be stale."""
    calls = request.graph.calls.values()
    return any(isinstance(call, Generate) and is_trained(request, call.model) for call in calls)


def synchronous(request: PlanRequest, plan: Plan, limits: Limits = QUICK_LIMITS) -> Hint | None:
    """The best synchronous plan beside an asynchronous one; None where the request is synchronous already.

    gain: of samples a second, that synchronous runs would bring; within SYNCHRONOUS_LOSS of 0 they are as good,
    and on-policy.
    """
    if request.workload.staleness == 0:
        return None
    best = search(at_staleness(request, 0), limits)
    gain = plan.best_seconds / best.period_seconds - 1
    word = "as good as" if gain >= -SYNCHRONOUS_LOSS else "slower than"
    return Hint(f"synchronous is {word} staleness {request.workload.staleness}", best.period_seconds, gain)
