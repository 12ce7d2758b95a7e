"""Changes of a request that may make a plan fit, the nearest to what was asked first. Tries none. Pure."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate
from realgraph.planner.cluster import Cluster
from realgraph.planner.options import is_trained, sample_tokens
from realgraph.planner.request import PlanRequest

MOST_NODES = 4096
LOCAL_DEVICES = 8  # devices that a node usually has room for


class Change(Struct, frozen=True):
    """A changed request in words. Of one sort the earlier changes are smaller."""

    sort: str
    text: str
    request: PlanRequest


def changes(request: PlanRequest) -> Iterator[Change]:
    """Fewer tokens at once, recomputation, sharding, offload, narrower weights, shorter responses, more devices."""
    yield from _fewer_tokens(request)
    yield from _recomputation(request)
    yield from _sharding(request)
    yield from _offload(request)
    yield from _narrower(request)
    yield from _more_devices(request)
    yield from _shorter(request)


def combined(request: PlanRequest) -> Iterator[Change]:
    """Two or three changes at once, where no single one is enough: all that saves memory, then more devices with it."""
    saving = request
    texts: list[str] = []
    for sort in (_narrower, _recomputation, _sharding, _offload):
        last = None
        for change in sort(saving):
            last = change  # the widest of its sort comes last
        if last is not None:
            saving = last.request
            texts.append(last.text)
            yield Change("combined", " and ".join(texts), saving)
    for more in _more_devices(saving):
        yield Change("combined", " and ".join([*texts, more.text]), more.request)


def _fewer_tokens(request: PlanRequest) -> Iterator[Change]:
    longest = sample_tokens(request)
    fixed = request.workload.max_tokens_per_microbatch
    for size in _halves(fixed, longest):
        workload = replace(request.workload, max_tokens_per_microbatch=size)
        text = f"lower batch.max_tokens_per_microbatch to {size} (now {fixed})"
        yield Change("tokens", text, replace(request, workload=workload))
    for call, pin in request.pins.items():
        now = pin.max_tokens_per_microbatch
        for size in _halves(now, longest):
            pins = {**request.pins, call: replace(pin, max_tokens_per_microbatch=size)}
            text = f"lower allocation.{call}.max_tokens_per_microbatch to {size} (now {now})"
            yield Change(f"tokens of {call}", text, replace(request, pins=pins))


def _halves(size: int | None, least: int) -> list[int]:
    """Half of it, a quarter, and so on, down to `least`."""
    found = []
    while size is not None and size > least:
        size = max(least, size // 2)
        found.append(size)
    return found


def _recomputation(request: PlanRequest) -> Iterator[Change]:
    """Only where the planner may not choose it: the installed engines follow the model's setting."""
    if request.engine == "any":
        return
    trained = [name for name in request.graph.models if is_trained(request, name)]
    off = [name for name in trained if not request.graph.models[name].gradient_checkpointing]
    for names in [[name] for name in off] + ([off] if len(off) > 1 else []):
        models = dict(request.graph.models)
        for name in names:
            models[name] = replace(models[name], gradient_checkpointing=True)
        text = "set " + " and ".join(f"models.{name}.gradient_checkpointing: true" for name in names)
        yield Change("recompute", text, replace(request, graph=replace(request.graph, models=models)))


def _sharding(request: PlanRequest) -> Iterator[Change]:
    for call, pin in request.pins.items():
        if pin.sharding == "replicated" and not isinstance(request.graph.calls.get(call), Generate):
            pins = {**request.pins, call: replace(pin, sharding="fsdp")}
            yield Change("sharding", f"set allocation.{call}.sharding: fsdp", replace(request, pins=pins))


def _offload(request: PlanRequest) -> Iterator[Change]:
    if request.engine == "any" and not request.constraints.offload:
        constraints = replace(request.constraints, offload=True)
        yield Change("offload", "set constraints.offload: true", replace(request, constraints=constraints))


def _narrower(request: PlanRequest) -> Iterator[Change]:
    wide = [name for name, role in request.graph.models.items() if role.dtype in ("float32", "float64")]
    for names in [[name] for name in wide] + ([wide] if len(wide) > 1 else []):
        models = dict(request.graph.models)
        for name in names:
            models[name] = replace(models[name], dtype="bfloat16")
        text = "set " + " and ".join(f"models.{name}.dtype: bfloat16" for name in names)
        yield Change("dtype", text, replace(request, graph=replace(request.graph, models=models)))


def _more_devices(request: PlanRequest) -> Iterator[Change]:
    """More devices in one node, then more nodes of the first kind."""
    cluster = request.cluster
    if cluster.nodes == 1 and not cluster.more and not cluster.is_cpu:
        size = 2 * cluster.devices_per_node
        while size <= LOCAL_DEVICES:
            yield _devices(request, replace(cluster, devices_per_node=size))
            size *= 2
    for factor in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        if cluster.nodes * factor <= MOST_NODES:
            yield _devices(request, replace(cluster, nodes=cluster.nodes * factor))


def _devices(request: PlanRequest, cluster: Cluster) -> Change:
    more = cluster.n_devices - request.cluster.n_devices
    text = f"use {more} more devices: {cluster.nodes} x {cluster.devices_per_node} {cluster.kind}"
    return Change("devices", text, replace(request, cluster=cluster))


def _shorter(request: PlanRequest) -> Iterator[Change]:
    now = request.workload.max_new_tokens
    for size in _halves(now, 128):
        mean = min(request.workload.mean_new_tokens, float(size))
        lengths = tuple(min(length, size) for length in request.workload.lengths)
        workload = replace(request.workload, max_new_tokens=size, mean_new_tokens=mean, lengths=lengths)
        text = f"lower batch.max_new_tokens to {size} (now {now})"
        yield Change("length", text, replace(request, workload=workload))
