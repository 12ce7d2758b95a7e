"""Changes of a request that may make a plan fit, the nearest to what was asked first. Tries none. Pure."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate
from realgraph.planner.costs.memory.margin import LEAST_QUANTILE, MemorySpec
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.calls import is_trained, sample_tokens
from realgraph.planner.plan.layout import Recompute
from realgraph.planner.plan.option import TOKENS
from realgraph.planner.request.request import PlanRequest

MOST_NODES = 512
NODE_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of the nodes, as offered
LOCAL_DEVICES = 8  # that a node usually has room for
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")  # of keeping activations, the one that keeps most first
QUANTILES = (0.9, 0.75, LEAST_QUANTILE)  # of memory peaks, as offered
LEAST_NEW_TOKENS = 128  # shorter responses are no help


class Change(Struct, frozen=True):
    """A changed request in words."""

    text: str
    request: PlanRequest


Series = tuple[Change, ...]  # the smallest change first; what fits under one fits under all later ones


def changes(request: PlanRequest) -> Iterator[Series]:
    """Fewer tokens at once, recomputation, sharding, offload, narrower weights, shorter responses, more risk."""
    yield from _fewer_tokens(request)
    yield _recomputation(request)
    yield from _pinned_passes(request)
    yield from _sharding(request)
    yield _offload(request)
    yield _narrower(request)
    yield _shorter(request)
    yield _riskier(request)


def combined(request: PlanRequest) -> Series:
    """Several changes at once, where no single one is enough: all that saves memory, then more devices with it."""
    saving, texts = request, list[str]()
    combinations: list[Change] = []
    for sort in (_narrower, _recomputation, _offload):
        for change in sort(saving)[-1:]:  # the widest of its sort comes last
            saving = change.request
            texts.append(change.text)
            combinations.append(Change(" and ".join(texts), saving))
    more = more_devices(saving)
    return (*combinations, *(Change(" and ".join([*texts, change.text]), change.request) for change in more))


def _fewer_tokens(request: PlanRequest) -> Iterator[Series]:
    longest = sample_tokens(request)
    fixed = request.workload.max_tokens_per_microbatch
    yield tuple(
        Change(
            f"lower batch.max_tokens_per_microbatch to {size} (now {fixed})",
            replace(request, workload=replace(request.workload, max_tokens_per_microbatch=size)),
        )
        for size in _halves(fixed, longest)
    )
    for call, pin in request.pins.items():
        for field in TOKENS:
            now = getattr(pin, field)
            yield tuple(
                Change(
                    f"lower allocation.{call}.{field} to {size} (now {now})",
                    replace(request, pins={**request.pins, call: replace(pin, **{field: size})}),
                )
                for size in _halves(now, longest)
            )


def _halves(size: int | None, least: int) -> list[int]:
    """Half of it, a quarter, and so on, down to `least`."""
    sizes = []
    while size is not None and size > least:
        size = max(least, size // 2)
        sizes.append(size)
    return sizes


def _recomputation(request: PlanRequest) -> Series:
    """Only where the planner may not choose it: the engines follow the model's setting."""
    if len(request.engine.recompute) > 1:
        return ()
    trained = [name for name in request.graph.models if is_trained(request, name)]
    off = [name for name in trained if not request.graph.models[name].gradient_checkpointing]
    return tuple(
        _of_models(request, off[: i + 1], "gradient_checkpointing", True)  # one role more with each
        for i in range(len(off))
    )


def _pinned_passes(request: PlanRequest) -> Iterator[Series]:
    """Less of the activations that pins keep; stages whose schedule keeps fewer micro-batches."""
    for call, pin in request.pins.items():
        if pin.recompute is not None and len(request.engine.recompute) > 1:
            yield tuple(_pinned(request, call, "recompute", way) for way in WAYS[WAYS.index(pin.recompute) + 1 :])
        if pin.schedule == "interleaved":
            yield (_pinned(request, call, "schedule", "1f1b"),)


def _pinned(request: PlanRequest, call: str, field: str, value: str) -> Change:
    """One field of a pin set to a value; groups of layers belong to one schedule alone."""
    pin = replace(request.pins[call], **{field: value})
    kept = replace(pin, chunks=None) if field == "schedule" else pin
    return Change(f"set allocation.{call}.{field}: {value}", replace(request, pins={**request.pins, call: kept}))


def _sharding(request: PlanRequest) -> Iterator[Series]:
    for call, pin in request.pins.items():
        if pin.sharding == "replicated" and not isinstance(request.graph.calls.get(call), Generate):
            pins = {**request.pins, call: replace(pin, sharding="fsdp")}
            yield (Change(f"set allocation.{call}.sharding: fsdp", replace(request, pins=pins)),)


def _offload(request: PlanRequest) -> Series:
    if not request.engine.offload or request.constraints.offload:
        return ()
    constraints = replace(request.constraints, offload=True)
    return (Change("set constraints.offload: true", replace(request, constraints=constraints)),)


def _narrower(request: PlanRequest) -> Series:
    if "bfloat16" not in request.engine.dtypes:
        return ()
    wide = [name for name, role in request.graph.models.items() if role.dtype in ("float32", "float64")]
    return tuple(_of_models(request, wide[: i + 1], "dtype", "bfloat16") for i in range(len(wide)))


def _of_models(request: PlanRequest, names: list[str], field: str, value: bool | str) -> Change:
    """One field of several roles set to a value."""
    models = dict(request.graph.models)
    for name in names:
        models[name] = replace(models[name], **{field: value})
    shown = str(value).lower() if isinstance(value, bool) else value
    text = "set " + " and ".join(f"models.{name}.{field}: {shown}" for name in names)
    return Change(text, replace(request, graph=replace(request.graph, models=models)))


def more_devices(request: PlanRequest) -> Series:
    """More devices in one node, then more nodes of the first kind."""
    cluster = request.cluster
    larger: list[Change] = []
    size = 2 * cluster.devices_per_node
    while cluster.nodes == 1 and not cluster.more and not cluster.is_cpu and size <= LOCAL_DEVICES:
        larger.append(_devices(request, replace(cluster, devices_per_node=size)))
        cluster = replace(cluster, devices_per_node=size)
        size *= 2
    for factor in NODE_FACTORS:
        if cluster.nodes * factor <= MOST_NODES:
            larger.append(_devices(request, replace(cluster, nodes=cluster.nodes * factor)))
    return tuple(larger)


def _devices(request: PlanRequest, cluster: Cluster) -> Change:
    """A larger cluster in the run file's words: nodes, and where they change devices of a node."""
    now = request.cluster
    sizes = [f"cluster.nodes: {cluster.nodes}"] if cluster.nodes != now.nodes else []
    if cluster.devices_per_node != now.devices_per_node:
        sizes.append(f"cluster.devices: {cluster.devices_per_node}")
    text = f"set {' and '.join(sizes)} ({cluster.n_devices:,} devices, now {now.n_devices:,})"
    return Change(text, replace(request, cluster=cluster))


def _shorter(request: PlanRequest) -> Series:
    now = request.workload.max_new_tokens
    shorter = []
    for size in _halves(now, LEAST_NEW_TOKENS):
        mean = min(request.workload.mean_new_tokens, float(size))
        lengths = tuple(min(length, size) for length in request.workload.lengths)
        workload = replace(request.workload, max_new_tokens=size, mean_new_tokens=mean, lengths=lengths)
        text = f"lower batch.max_new_tokens to {size} (now {now})"
        shorter.append(Change(text, replace(request, workload=workload)))
    return tuple(shorter)


def _riskier(request: PlanRequest) -> Series:
    """A bound that fewer peaks stay below."""
    now = request.memory.quantile
    return tuple(
        Change(
            f"lower memory.quantile to {quantile:g} (now {now:g}), at more risk of running out of memory",
            replace(request, memory=MemorySpec(quantile)),
        )
        for quantile in QUANTILES
        if quantile < now
    )
