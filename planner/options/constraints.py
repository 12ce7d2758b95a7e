"""Faults of the user's pins and constraints, whatever the search would choose; and the places they name."""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations

from realgraph.graphs.errors import Problem, Where, suggest
from realgraph.graphs.spec import Generate, ModelCall, Train
from realgraph.planner.costs.memory.terms import DType
from realgraph.planner.inputs.model_spec import shape_faults, shape_fix
from realgraph.planner.options.calls import is_trained, phase_of, sample_tokens, sized, stays_on_devices
from realgraph.planner.options.choices import is_cut
from realgraph.planner.options.couplings import train_calls
from realgraph.planner.options.meshes import family, mesh_fault
from realgraph.planner.options.passes import pin_problems
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.option import TOKENS
from realgraph.planner.plan.plan import Transport
from realgraph.planner.request.engine_support import Axis, EngineSupport, axes_text
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

FEATURES: dict[Axis, str] = {
    "tp": "tensor parallelism: layers cut over devices",
    "pp": "pipeline parallelism: stages with ragged micro-batches",
    "ep": "expert parallelism: experts spread over devices",
    "cp": "context parallelism: sequences cut over devices",
}
ONE_SHARD = "fsdp cuts states over data-parallel ranks"  # in words, of layouts that have one such rank


def constraint_problems(request: PlanRequest) -> tuple[Problem, ...]:
    """All of them, each at its path of the run file."""
    return (*_dtypes(request), *_pins(request), *_constraints(request), *_servers(request))


def lacking_axis(support: EngineSupport, axis: Axis, size: int, *, generates: bool) -> str:
    """Reason why engines can't run so many ranks of an axis in a call, '' where they can."""
    axes = support.axes_of(generates=generates)
    if size == 1 or axis in axes:
        return ""
    if generates and axis == "cp":
        return "context parallelism shares out the tokens of a sequence, of which a decode step has one"
    run = "generate under" if generates and support.axes != axes else "run"
    return f"{axis} > 1 needs {FEATURES[axis]}; {support.name} {run} {axes_text(axes)} only"


def lacking_spread(support: EngineSupport, tp: int, ep: int, *, generates: bool) -> str:
    """Reason why engines can't spread a call's experts so over its ranks, '' where they can."""
    if not (generates and support.experts_in_replica) or tp % ep == 0:
        return ""
    return (
        f"{support.name} spread experts over the tensor-parallel ranks of one replica: ep {ep} does not divide tp {tp}"
    )


def lacking_offload(support: EngineSupport, call: ModelCall) -> str:
    """Reason why a call's weights can't wait in the host's memory, '' where they can."""
    phase = phase_of(call)
    return "" if phase in support.offload else f"{support.name} can't offload the weights of {phase} calls to the host"


def lacking_dtype(support: EngineSupport, dtype: DType) -> str:
    """Reason why engines can't compute in a number format, '' where they can."""
    return "" if dtype in support.dtypes else f"{support.name} don't compute in {dtype}"


def lacking_transport(support: EngineSupport, call: ModelCall, transport: Transport) -> str:
    """Reason why trained weights can't get to a call's copy that way, '' where they can."""
    offloaded = transport == "host" and "train" in support.offload  # what waits there is read there
    if transport == "in_place" or transport in support.transports_to(call) or offloaded:
        return ""
    return f"{support.name} don't bring weights by {transport!r}"


def server_meshes(request: PlanRequest) -> dict[str, DeviceMesh]:
    """generate call -> its pinned devices, where its engine shares devices with no other call."""
    if not request.engine.own_devices:
        return {}
    return {
        name: DeviceMesh(pin.first or 0, pin.devices)
        for name, pin in request.pins.items()
        if pin.devices is not None and isinstance(request.graph.calls.get(name), Generate)
    }


def named_meshes(request: PlanRequest) -> tuple[DeviceMesh, ...]:
    """The places that pins and constraints speak of: no other place of their size stands for them."""
    forbidden = [pin for pins in request.constraints.forbid.values() for pin in pins]
    return tuple(dict.fromkeys(mesh for pin in (*request.pins.values(), *forbidden) for mesh in _named(pin)))


def _named(pin: Pin) -> Iterator[DeviceMesh]:
    if pin.devices is not None:
        yield DeviceMesh(pin.first or 0, pin.devices)
    elif pin.first is not None:
        yield DeviceMesh(pin.first, 1)


def _dtypes(request: PlanRequest) -> Iterator[Problem]:
    """Roles in a number format that the engines lack."""
    for name in dict.fromkeys(request.graph.role(call) for call in request.mesh_calls):
        if text := lacking_dtype(request.engine, request.graph.models[name].dtype):
            hint = f"set it to {' or '.join(request.engine.dtypes)}"
            yield Problem(Where(path=f"$.models.{name}.dtype"), text, hint, "dtype")


# --- pins -------------------------------------------------------------------------------------------------------------


def _pins(request: PlanRequest) -> Iterator[Problem]:
    for name, pin in request.pins.items():
        where = Where(path=f"$.allocation.{name}")
        if name in request.mesh_calls:
            yield from _pin(request, name, pin, where)
        else:
            yield _stranger(request, name, where)
    yield from _train_places(request)


def _stranger(request: PlanRequest, name: str, where: Where) -> Problem:
    what = "holds no devices: it can't be placed" if name in request.graph.calls else "is no call of the graph"
    return Problem(where, f"{name!r} {what}", suggest(name, request.mesh_calls), "pin")


def _pin(request: PlanRequest, name: str, pin: Pin, where: Where) -> Iterator[Problem]:
    yield from _lacking(request, request.graph.calls[name], pin, where)
    yield from pin_problems(request, name, pin, where)
    if pin.devices is not None:
        fault = mesh_fault(DeviceMesh(pin.first or 0, pin.devices), request.cluster)
        if fault:
            yield Problem(where, fault, "", "pin")
            return
    yield from _sizes(request, name, pin, where)
    yield from _other_tokens(request, name, pin, where)
    if isinstance(request.graph.calls[name], Generate):
        yield from _generate_pin(sized(request, name), pin, where)
    elif pin.sharding == "fsdp" and request.engine.axes:
        yield from _sharded(pin, where)
    if pin.residency == "offloaded" and not lacking_offload(request.engine, request.graph.calls[name]):
        yield from _offloaded(request, name, _field(where, "residency"))


def _sharded(pin: Pin, where: Where) -> Iterator[Problem]:
    """Problems of fsdp where one rank is left to have all shards."""
    ranks, place = (pin.tp or 1) * (pin.pp or 1), _field(where, "sharding")
    if (pin.dp == 1 and (pin.cp or 1) == 1) or (pin.devices is not None and pin.devices == ranks):
        yield Problem(place, f"{ONE_SHARD}, of which this pin leaves one", "leave sharding out, or raise dp", "pin")


def _offloaded(request: PlanRequest, name: str, where: Where) -> Iterator[Problem]:
    """Problems of a pin that has weights wait in the host's memory."""
    if not request.constraints.offload:
        text = "the call is pinned to be offloaded, but constraints.offload is false"
        yield Problem(where, text, "leave one of them out", "pin")
    elif text := not_offloaded(request, name):
        reads = not isinstance(request.graph.calls[name], Train) and is_trained(request, request.graph.role(name))
        yield Problem(where, text, f"leave residency out{', or offload the train call' if reads else ''}", "pin")


def not_offloaded(request: PlanRequest, name: str) -> str:
    """Reason why the weights of a call can't wait in the host's memory, '' where they can."""
    call = request.graph.calls[name]
    other = next((n for n in train_calls(request, request.graph.role(name)) if n != name), "")
    if isinstance(call, Train) and other:
        return f"{other!r} trains the same role: the states that both use stay on the devices"
    if other:
        return f"the call reads weights that {other!r} trains: they are brought to it, none wait for it elsewhere"
    return stays_on_devices(request, name)


def _lacking(request: PlanRequest, call: ModelCall, pin: Pin, where: Where) -> Iterator[Problem]:
    """Problems of what the engines can't do."""
    generates = isinstance(call, Generate)
    for axis in FEATURES:
        if text := lacking_axis(request.engine, axis, getattr(pin, axis) or 1, generates=generates):
            instead = "use dp" if generates else "use dp, and sharding: fsdp for models that don't fit"
            yield Problem(_field(where, axis), text, instead, "pin")
    ep = pin.ep or 1
    tp = pin.tp or (1 if request.cluster.is_cpu else ep)  # on GPUs the search finds one
    if text := lacking_spread(request.engine, tp, ep, generates=generates):
        yield Problem(_field(where, "ep"), text, f"set tp to {ep}, or to a multiple of it", "pin")
    if pin.residency == "offloaded" and (text := lacking_offload(request.engine, call)):
        yield Problem(_field(where, "residency"), text, "leave residency out", "pin")


def _field(where: Where, name: str) -> Where:
    """The place of one field of a pin."""
    return Where(where.file, path=f"{where.path}.{name}")


def _sizes(request: PlanRequest, name: str, pin: Pin, where: Where) -> Iterator[Problem]:
    """The axes that are set against the mesh that is."""
    first, total = pin.first or 0, request.cluster.n_devices
    if first >= total:
        yield Problem(_field(where, "first"), f"device {first} is none of the cluster's, 0 to {total - 1}", "", "pin")
        return
    yield from _product(request, name, pin, where)
    for axis, fault in shape_faults(request.model(name), pin.tp or 1, pin.pp or 1, pin.ep or 1):
        yield Problem(_field(where, axis), fault, shape_fix(request.model(name), axis), "pin")
    samples, nodes = request.workload.n_samples, {group.devices_per_node for group in request.cluster.groups}
    if pin.dp is not None and pin.dp > samples:
        yield Problem(_field(where, "dp"), f"dp {pin.dp} is more than the {samples} samples of a step", "", "pin")
    stage = pin.devices // (pin.pp or 1) if pin.devices else (pin.dp or 0) * (pin.tp or 1) * (pin.cp or 1)
    if stage % (pin.ep or 1):
        text = f"ep {pin.ep} does not divide the {stage} devices of a stage, over which experts are spread"
        yield Problem(_field(where, "ep"), text, "", "pin")
    if pin.tp is not None and not any(pin.tp >= size or size % pin.tp == 0 for size in nodes):
        text = f"tp {pin.tp} does not divide the {' or '.join(map(str, sorted(nodes)))} devices of a node"
        yield Problem(_field(where, "tp"), text, "", "pin")


def _product(request: PlanRequest, name: str, pin: Pin, where: Where) -> Iterator[Problem]:
    """The ranks that are set fill the mesh that is, or divide the devices of one that there may be."""
    axes = {axis: getattr(pin, axis) for axis in ("dp", "tp", "pp", "cp") if getattr(pin, axis) is not None}
    product, shown = math.prod(axes.values()), " x ".join(axes)
    generates = isinstance(request.graph.calls[name], Generate)
    dp_only = pin.dp is not None and not request.engine.axes_of(generates=generates)
    if pin.devices is not None:
        if pin.devices % product or (dp_only and product != pin.devices):
            devices = f"{pin.devices} device{'s' * (pin.devices != 1)}"
            text = f"{shown} is {product}, the mesh has {devices}: dp x tp x pp x cp must be {pin.devices}"
            hint = "leave dp out, or set devices to the product" if pin.dp else "set devices to a multiple of that"
            yield Problem(_field(where, next(iter(axes))), text, hint, "pin")
        elif pin.dp is not None and product != pin.devices and not _filled(request, name, pin):
            rest = pin.devices // product
            text = f"{shown} is {product}, the mesh has {pin.devices} devices: dp x tp x pp x cp must be {pin.devices}"
            hint = f"set devices to {product}, leave dp out, or give another axis the factor of {rest} that is left"
            hint += ": on a CPU tp, pp and cp are 1 unless they are pinned" if request.cluster.is_cpu else ""
            yield Problem(_field(where, next(iter(axes))), text, hint, "pin")
        return
    known_meshes = family(request.cluster, request.constraints.reserve).meshes if axes else ()
    sizes = sorted({mesh.n_devices for mesh in known_meshes if pin.first in (None, mesh.first)})
    if sizes and not any(size == product if dp_only else size % product == 0 for size in sizes):
        text = f"{shown} is {product}, which no mesh can hold: there are meshes of {', '.join(map(str, sizes))} devices"
        hint = "dp x tp x pp x cp is the number of a mesh's devices"
        yield Problem(_field(where, next(iter(axes))), text, hint, "pin")


def _filled(request: PlanRequest, name: str, pin: Pin) -> bool:
    """True where axes that are not set may take what those that are leave of the mesh."""
    mesh = DeviceMesh(pin.first or 0, pin.devices or 0)
    known = family(request.cluster, request.constraints.reserve, (mesh,))
    group = request.cluster.groups[known.groups[known.meshes.index(mesh)]]
    return is_cut(request, name, mesh, group)


def _generate_pin(request: PlanRequest, pin: Pin, where: Where) -> Iterator[Problem]:
    if pin.sharding == "fsdp":
        text = "generation needs whole weights on a device"
        yield Problem(_field(where, "sharding"), text, "leave sharding out", "pin")
    tokens, longest = pin.kv_cache_tokens, sample_tokens(request)
    if tokens is not None and tokens < longest:
        text = f"a cache of {tokens} tokens holds no sample: the longest has {longest}"
        yield Problem(_field(where, "kv_cache_tokens"), text, f"set kv_cache_tokens to {longest} or more", "pin")


def _other_tokens(request: PlanRequest, name: str, pin: Pin, where: Where) -> Iterator[Problem]:
    """Tokens that another kind of call has."""
    own, other = token_fields(isinstance(request.graph.calls[name], Generate))
    if getattr(pin, other) is not None:
        yield Problem(_field(where, other), other_tokens(own, other), f"set {own}", "pin")


def token_fields(generates: bool) -> tuple[str, str]:
    """The field of a pin and an allocation that has a call's tokens, and the one that is of other calls."""
    return (TOKENS[1], TOKENS[0]) if generates else TOKENS


def other_tokens(own: str, other: str) -> str:
    """Reason why a call can't have the other tokens."""
    whose = "generate calls" if other == TOKENS[1] else "calls that take micro-batches"
    return f"{other} belongs to {whose}: this one has {own}"


def _train_places(request: PlanRequest) -> Iterator[Problem]:
    """One role is trained in one place: its optimizer states lie there."""
    places: dict[str, tuple[str, Pin]] = {}
    for name, call in request.graph.calls.items():
        if not isinstance(call, Train) or name not in request.pins:
            continue
        pin = request.pins[name]
        other, place = places.setdefault(call.model, (name, pin))
        if set(_named(pin)) != set(_named(place)) and set(_named(pin)) and set(_named(place)):
            text = f"{other!r} trains the same role on other devices"
            yield Problem(Where(path=f"$.allocation.{name}"), text, "pin both to the same devices", "pin")


def _servers(request: PlanRequest) -> Iterator[Problem]:
    """Engines with devices of their own, of which nobody says which they are, or which leave none to the others."""
    others = [name for name in request.mesh_calls if not isinstance(request.graph.calls[name], Generate)]
    if not request.engine.own_devices or len(request.mesh_calls) == 1:
        return
    meshes, total = server_meshes(request), request.cluster.n_devices
    generates = [name for name in request.mesh_calls if name not in others]
    if others and total <= len(generates):
        whose = f"{', '.join(map(repr, generates))} and the other calls need {len(generates) + 1} devices at least"
        text = f"{request.engine.name} generate on devices that no other call has: {whose}, and there are {total}"
        yield Problem(Where(path="$.cluster"), text, "give more devices", "constraint")
        return
    for name in generates:
        if name not in meshes:
            text = f"{request.engine.name} generate on devices that no other call has, and nothing says on which"
            hint = f"pin them, such as allocation: {{{name}: {{first: {total - 1}, devices: 1}}}}"
            yield Problem(Where(path=f"$.allocation.{name}"), text, hint, "constraint")
    for one, other in combinations(meshes, 2):
        if meshes[one].overlaps(meshes[other]):
            text = f"{other!r} is pinned to devices of {one!r}, and {request.engine.name} share none"
            yield Problem(Where(path=f"$.allocation.{other}"), text, "pin it to others", "constraint")
    taken = {device for mesh in meshes.values() for device in mesh.devices}
    if others and taken >= set(range(total)):
        text = f"{request.engine.name} have all {total} devices, which leaves none to {', '.join(map(repr, others))}"
        yield Problem(Where(path="$.allocation"), text, "leave devices to them", "constraint")
    for name, pin in request.pins.items():
        if name in others and any(device in taken for mesh in _named(pin) for device in mesh.devices):
            text = f"{name!r} is pinned to devices that {request.engine.name} have"
            yield Problem(Where(path=f"$.allocation.{name}"), text, "pin it to others", "constraint")
    if request.constraints.colocated:
        text = f"{request.engine.name} generate on devices that no other call has"
        yield Problem(Where(path="$.constraints.colocated"), text, "leave colocated out", "constraint")


# --- constraints ------------------------------------------------------------------------------------------------------


def _constraints(request: PlanRequest) -> Iterator[Problem]:
    constraints, total = request.constraints, request.cluster.n_devices
    if constraints.reserve >= total:
        text = f"{constraints.reserve} devices are reserved, the cluster has {total}"
        yield Problem(Where(path="$.constraints.reserve"), text, f"reserve at most {total - 1}", "constraint")
    for i, calls in enumerate(constraints.share):
        yield from _calls(request, calls, f"$.constraints.share[{i}]")
        if len(set(calls)) < 2:
            text = "binds nothing: one call lies on one mesh anyway" if calls else "binds nothing: it names no call"
            where = Where(path=f"$.constraints.share[{i}]")
            yield Problem(where, text, "name two calls or more, or leave it out", "constraint")
    yield from _calls(request, constraints.forbid, "$.constraints.forbid")
    for name, pins in constraints.forbid.items():
        for i, pin in enumerate(pins):
            where = Where(path=f"$.constraints.forbid.{name}[{i}]")
            yield from _forbidden(pin, where)
            if name in request.mesh_calls:
                yield from _other_tokens(request, name, pin, where)
    yield from _caps(request)
    if constraints.colocated:
        yield from _colocated(request)


def _caps(request: PlanRequest) -> Iterator[Problem]:
    """Caps on memory above what there is: they would bind nothing."""
    groups, constraints = request.cluster.groups, request.constraints
    device = max(group.memory_bytes for group in groups)
    node = max(group.host_memory_bytes for group in groups)
    for name, asked, has, whose in (
        ("memory_gb", constraints.memory_gb, device, "no device of the cluster has more than"),
        ("host_memory_gb", constraints.host_memory_gb, node, "no node of the cluster has more than"),
    ):
        if asked is not None and round(1e9 * asked) > has:
            text = f"{asked:,g} GB bind nothing: {whose} {has / 1e9:,.4g} GB"
            hint = f"set it below {has / 1e9:,.4g}, or leave it out; cluster.{name} says how much there is"
            yield Problem(Where(path=f"$.constraints.{name}"), text, hint, "constraint")


def _forbidden(pin: Pin, where: Where) -> Iterator[Problem]:
    """A mesh, or what is chosen there: all meshes of one size have the same options."""
    if pin == Pin():
        yield Problem(where, "forbids everything: it sets nothing", "name what is forbidden", "constraint")
    elif pin.first is not None and pin != Pin(first=pin.first, devices=pin.devices):
        text = "forbids a place and a layout in one: a layout is forbidden wherever it lies"
        yield Problem(where, text, "leave first out, or all but first and devices", "constraint")


def _calls(request: PlanRequest, names: Iterable[str], path: str) -> Iterator[Problem]:
    for name in names:
        if name not in request.mesh_calls:
            what = "holds no devices" if name in request.graph.calls else "is no call of the graph"
            where = Where(path=f"{path}.{name}" if path.endswith("forbid") else path)
            yield Problem(where, f"{name!r} {what}", suggest(name, request.mesh_calls), "constraint")


def _colocated(request: PlanRequest) -> Iterator[Problem]:
    whole = DeviceMesh(0, request.cluster.n_devices - request.constraints.reserve)
    where = Where(path="$.constraints.colocated")
    fault = mesh_fault(whole, request.cluster) if whole.n_devices > 0 else ""
    if fault:
        yield Problem(where, f"no mesh has all devices: {fault}", "leave colocated out", "constraint")
    for name, pin in request.pins.items():
        if any(mesh.n_devices not in (1, whole.n_devices) or mesh.first for mesh in _named(pin)):
            text = f"{name!r} is pinned to some of the devices"
            yield Problem(where, text, f"leave colocated or allocation.{name} out", "constraint")
