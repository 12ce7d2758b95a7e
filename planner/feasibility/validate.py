"""Validation of a plan, perhaps edited by hand, against what is asked: every reason why it can't run, with its place in
the file."""

from collections.abc import Iterator

from msgspec.structs import replace

from realgraph.graphs.errors import Problem, Where, suggest
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.feasibility.diagnose import needed_text, shown_bytes
from realgraph.planner.inputs.model_spec import ModelSpec, shape_faults, shape_fix
from realgraph.planner.options.calls import is_trained, sample_tokens, sized
from realgraph.planner.options.constraints import (
    FEATURES,
    ONE_SHARD,
    lacking_axis,
    lacking_dtype,
    lacking_offload,
    lacking_spread,
    lacking_transport,
    not_offloaded,
    other_tokens,
    token_fields,
)
from realgraph.planner.options.couplings import ties_of
from realgraph.planner.options.holdings import (
    candidate_of,
    chunks_of,
    group_for,
    margin_of,
    offloading,
    peak_of,
    with_stages,
)
from realgraph.planner.options.meshes import mesh_fault
from realgraph.planner.options.passes import plan_problems
from realgraph.planner.options.tables import device_bytes, node_bytes
from realgraph.planner.plan.events import empty_circuit, liveness_graph, moved_calls, show_circuit
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.plan import PLAN_FORMAT, REALLOCATION, Allocation, Hashes, Plan, reallocation_node
from realgraph.planner.plan.prefetch import call_before
from realgraph.planner.plan.stages import stages_fault
from realgraph.planner.request.request import PlanRequest, hashes, kept_by

HASHED = {  # parts of `Hashes` in words
    "graph": "graph or its models",
    "workload": "batch or lengths",
    "cluster": "cluster",
    "costs": "table of measured costs",
}


def validate(plan: Plan, request: PlanRequest, file: str = "") -> tuple[Problem, ...]:
    """All problems; later checks assume that earlier ones passed, so what they would say for certain is left out."""
    problems = [*_format(plan, file), *_hashes(plan, hashes(request), file), *_calls(plan, request, file)]
    problems += _staleness(plan, request, file)
    request = kept_by(request, plan)
    if not problems:
        problems += [*_layouts(plan, request, file), *_apart(plan, request, file)]
        if not problems:
            plan = replace(plan, allocations=with_stages(request, plan.allocations))
        problems += _orders(plan, request, file)
    if not problems:
        problems += [*_prefetches(plan, request, file)]
    if not problems:
        problems += [*_memory(plan, request, file), *_host_memory(plan, request, file)]
        problems += [*_liveness(plan, request, file)]
    return tuple(problems)


def _at(file: str, path: str) -> Where:
    return Where(file, path=path)


def _format(plan: Plan, file: str) -> Iterator[Problem]:
    if plan.format != PLAN_FORMAT:
        text = f"this plan has format {plan.format}; this version reads format {PLAN_FORMAT}"
        yield Problem(_at(file, "$.format"), text, "make the plan again with `realgraph plan --out`", "plan_format")


def _hashes(plan: Plan, now: Hashes, file: str) -> Iterator[Problem]:
    """Measured costs decide how fast a plan is, not whether it runs: only two tables at once contradict each other."""
    for part, what in HASHED.items():
        before, after = getattr(plan.hashes, part), getattr(now, part)
        if before != after and not (part == "costs" and not (before and after)):
            text = f"the plan was made for another {what} (hash {before}, now {after})"
            hint = "make the plan again, or run with what it was made for"
            yield Problem(_at(file, f"$.hashes.{part}"), text, hint, "plan_hash")


def _staleness(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    most = request.workload.staleness
    if not 0 <= plan.staleness <= most:
        text = f"the plan lets samples lag {plan.staleness} steps behind the weights; the run allows 0 to {most}"
        hint = f"make the plan again, or run with staleness={plan.staleness}" if plan.staleness > 0 else "0 or more"
        yield Problem(_at(file, "$.staleness"), text, hint, "plan_staleness")


def _calls(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    for name in plan.allocations:
        if name not in request.mesh_calls:
            what = "holds no devices" if name in request.graph.calls else "is no call of the graph"
            where = _at(file, f"$.allocations.{name}")
            yield Problem(where, f"{name!r} {what}", suggest(name, request.mesh_calls), "plan_calls")
    for name in request.mesh_calls:
        if name not in plan.allocations:
            yield Problem(_at(file, "$.allocations"), f"no allocation for call {name!r}", "", "plan_calls")


def _layouts(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    for name, allocation in plan.allocations.items():
        layout, place = allocation.layout, f"$.allocations.{name}"
        fault = mesh_fault(layout.mesh, request.cluster)
        if fault:
            yield Problem(_at(file, f"{place}.layout.mesh"), fault, "", "plan_mesh")
        yield from _axes(layout, request.model(name), _at(file, f"{place}.layout"))
        yield from _stages(plan, request, name, _at(file, f"{place}.layout.stages"))
        yield from _engine_problems(plan, request, name, file)
    yield from _places(plan, request, file)


def _axes(layout: Layout, model: ModelSpec, where: Where) -> Iterator[Problem]:
    """Ranks that do not fill the mesh, or that can't cut the model."""
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "ep", "cp")}
    faults = [(axis, f"{axis} must be at least 1, not {size}") for axis, size in axes.items() if size < 1]
    if not faults:
        faults += shape_faults(model, layout.tp, layout.pp, layout.ep)
        stage = layout.dp * layout.cp * layout.tp
        if stage % layout.ep:
            text = f"ep {layout.ep} does not divide the {stage} devices of a stage, over which experts are spread"
            faults.append(("ep", text))
    for axis, text in faults:
        yield Problem(replace(where, path=f"{where.path}.{axis}"), text, shape_fix(model, axis), "plan_axes")
    product = layout.dp * layout.tp * layout.pp * layout.cp
    if product != layout.mesh.n_devices:
        text = f"dp x tp x pp x cp is {product}, the mesh has {layout.mesh.n_devices} devices"
        yield Problem(where, text, "set dp to what is left of the devices", "plan_axes")


def _stages(plan: Plan, request: PlanRequest, name: str, where: Where) -> Iterator[Problem]:
    """Layers that can't lie so; an allocation that leaves them out has them balanced."""
    layout = plan.allocations[name].layout
    if layout.stages:
        chunks = chunks_of(request, plan.allocations, name)
        if fault := stages_fault(layout.stages, request.model(name).layers, layout.pp, chunks):
            yield Problem(where, fault, "leave `stages` out: then they are balanced", "plan_stages")


def _engine_problems(plan: Plan, request: PlanRequest, name: str, file: str) -> Iterator[Problem]:
    allocation, place = plan.allocations[name], f"$.allocations.{name}"
    generates = isinstance(request.graph.calls[name], Generate)
    if generates and allocation.layout.sharding != "replicated":
        text = "generation needs whole weights on a device"
        yield Problem(_at(file, f"{place}.layout.sharding"), text, "set it to replicated", "plan_engine")
    yield from _tokens(sized(request, name), allocation, generates, _at(file, place))
    yield from _residency(request, name, allocation, _at(file, f"{place}.residency"))
    layout = allocation.layout
    if not generates and layout.sharding == "fsdp" and layout.dp * layout.cp == 1 < layout.mesh.n_devices:
        text = f"{ONE_SHARD}, of which this layout has one"
        yield Problem(_at(file, f"{place}.layout.sharding"), text, "set it to replicated, or raise dp", "plan_engine")
    if generates and allocation.running < 1:
        text = "0 sequences decode at once: expected 1 or more"
        hint = "as many as a rank's share of the step, or fewer"
        yield Problem(_at(file, f"{place}.running"), text, hint, "plan_engine")
    candidate = candidate_of(request, plan.allocations, name)
    yield from plan_problems(request, name, candidate, _at(file, place))
    yield from _lacking(plan, request, name, file)


def _residency(request: PlanRequest, name: str, allocation: Allocation, where: Where) -> Iterator[Problem]:
    """Problems of weights that can't wait in host memory, or that nobody brings."""
    call, role = request.graph.calls[name], request.graph.role(name)
    stays = lacking_offload(request.engine, call) or not_offloaded(request, name)
    if allocation.residency == "offloaded" and stays:
        yield Problem(where, stays, "set it to resident", "plan_engine")
    elif allocation.residency == "reallocated" and (isinstance(call, Train) or not is_trained(request, role)):
        why = "trains its weights itself" if isinstance(call, Train) else "reads weights that nothing trains"
        yield Problem(where, f"the call {why}: none are brought to it", "set it to resident", "plan_engine")


def _tokens(request: PlanRequest, allocation: Allocation, generates: bool, where: Where) -> Iterator[Problem]:
    """Problems of the tokens of a micro-batch, or of a cache that holds no sample; or those of another kind of call."""
    own, other = token_fields(generates)
    if getattr(allocation, other) is not None:
        place = replace(where, path=f"{where.path}.{other}")
        yield Problem(place, other_tokens(own, other), f"set {own}", "plan_tokens")
    tokens, longest = getattr(allocation, own), sample_tokens(request)
    place = replace(where, path=f"{where.path}.{own}")
    if tokens is None:
        yield Problem(place, "the call has no tokens", f"set it; the longest sample has {longest}", "plan_tokens")
    elif tokens < 1 or (generates and tokens < longest):
        yield Problem(place, f"{tokens} tokens hold no sample: the longest has {longest}", "", "plan_tokens")


def _lacking(plan: Plan, request: PlanRequest, name: str, file: str) -> Iterator[Problem]:
    """Problems of what the engines can't do."""
    allocation, place, support = plan.allocations[name], f"$.allocations.{name}", request.engine
    if text := lacking_dtype(support, request.role(name).dtype):
        hint = f"set models.{request.graph.role(name)}.dtype to {' or '.join(support.dtypes)}"
        yield Problem(_at(file, place), text, hint, "plan_engine")
    generates = isinstance(request.graph.calls[name], Generate)
    for axis in FEATURES:
        if text := lacking_axis(support, axis, getattr(allocation.layout, axis), generates=generates):
            hint = f"set {axis} to 1, and dp to what is left of the devices"
            yield Problem(_at(file, f"{place}.layout.{axis}"), text, hint, "plan_engine")
    tp, ep = allocation.layout.tp, allocation.layout.ep
    if text := lacking_spread(support, tp, ep, generates=generates):
        yield Problem(_at(file, f"{place}.layout.ep"), text, "set it to 1, or to a divisor of tp", "plan_engine")
    call = request.graph.calls[name]
    if text := lacking_transport(support, call, plan.reallocation_transport.get(name, "in_place")):
        hint = f"set it to {' or '.join(support.transports_to(call))}"
        yield Problem(_at(file, f"$.reallocation_transport.{name}"), text, hint, "plan_engine")


def _places(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    """Problems of calls that must lie together: train calls of a role, whose states lie once, and references that
    follow."""
    shared = {tuple(calls) for calls in request.constraints.share}
    for tie in ties_of(request):
        if tie.tasks in shared:
            continue  # a constraint binds the search; an edited plan may part from it
        first = tie.tasks[0]
        for name in tie.tasks[1:]:
            here, there = plan.allocations[name].layout, plan.allocations[first].layout
            if (here != there) if tie.layout else (here.mesh != there.mesh):
                what = "layout" if tie.layout else "mesh"
                why = "trains role" if isinstance(request.graph.calls[name], Train) else "follows the training of role"
                text = f"{why} {request.graph.role(name)!r} in another {what} than {first!r}"
                where = _at(file, f"$.allocations.{name}.layout")
                yield Problem(where, text, f"give both the same {what}", "plan_train")


def _apart(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    """Calls beside generate calls whose engine shares its devices with none."""
    generates = [n for n in request.mesh_calls if isinstance(request.graph.calls[n], Generate)]
    for name in generates if request.engine.own_devices else ():
        mesh = plan.allocations[name].layout.mesh
        for other in request.mesh_calls:
            if other != name and plan.allocations[other].layout.mesh.overlaps(mesh):
                text = f"{other!r} has devices of {name!r}, and {request.engine.name} share none"
                yield Problem(_at(file, f"$.allocations.{name}.layout.mesh"), text, "place them apart", "plan_mesh")


def _orders(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    offsets: dict[str, tuple[int, int]] = {}
    holders = _holders(plan, request)
    for device in plan.orders:
        if device not in range(request.cluster.n_devices):
            text = f"the cluster has devices 0 to {request.cluster.n_devices - 1}"
            yield Problem(_at(file, f"$.orders.{device}"), text, "", "plan_orders")
    for device in range(request.cluster.n_devices):
        place = _at(file, f"$.orders.{device}")
        due = {name for name, devices in holders.items() if device in devices}
        yield from _turns([turn.call for turn in plan.orders.get(device, ())], due, place)
        for turn in plan.orders.get(device, ()):
            offset, where = offsets.setdefault(turn.call, (turn.offset, device))
            if offset != turn.offset:
                text = f"{turn.call!r} has offset {turn.offset} here and {offset} on device {where}"
                yield Problem(place, text, "one call has one offset on all its devices", "plan_orders")


def _holders(plan: Plan, request: PlanRequest) -> dict[str, set[int]]:
    """Call -> its devices; and of each reallocation that some order names the devices of both its meshes."""
    holders = {name: set(allocation.layout.mesh.devices) for name, allocation in plan.allocations.items()}
    named = {turn.call for order in plan.orders.values() for turn in order}
    for call, train in moved_calls(request.graph, plan).items():
        if reallocation_node(call) in named:
            holders[reallocation_node(call)] = holders[call] | holders[train]
    return holders


def _turns(turns: list[str], due: set[str], place: Where) -> Iterator[Problem]:
    """One device's round runs each call that is due there once, and nothing else."""
    for name in dict.fromkeys(turns):
        if name not in due:
            what = "brings weights where none are needed" if name.startswith(REALLOCATION) else "has no allocation"
            yield Problem(place, f"{name!r} {what} on this device", suggest(name, due), "plan_orders")
        elif turns.count(name) > 1:
            text = f"{name!r} occurs {turns.count(name)} times; a round runs it once"
            yield Problem(place, text, "", "plan_orders")
    for name in sorted(due - set(turns)):
        why = "both meshes of the reallocation have" if name.startswith(REALLOCATION) else "its mesh has"
        yield Problem(place, f"{name!r} is missing: {why} this device", "", "plan_orders")


def _prefetches(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    """States that can't come from host memory while the call that is named runs."""
    for name, allocation in plan.allocations.items():
        during, where = allocation.prefetch_during, _at(file, f"$.allocations.{name}.prefetch_during")
        if during and allocation.residency != "offloaded":
            yield Problem(where, f"the states of {name!r} are not offloaded", "leave it out", "plan_prefetch")
        elif during and isinstance(request.graph.calls[name], Generate):
            text = "generate calls bring their weights themselves"
            yield Problem(where, text, "leave it out", "plan_prefetch")
        elif during and during != (before := call_before(request.graph, plan, name)):
            text = f"{during!r} is not the call before {name!r} on all its devices, with nothing else between the two"
            hint = f"set it to {before}, or leave it out" if before else "leave it out"
            yield Problem(where, text, hint, "plan_prefetch")


def _memory(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    for name, allocation in plan.allocations.items():
        device, footprint = peak_of(request, plan.allocations, name)
        bound = footprint.total + margin_of(request, plan.allocations, name)
        usable = device_bytes(request, group_for(request, allocation.layout))
        if bound > usable:
            part = f"{footprint.worst.replace('_', ' ')} {shown_bytes(getattr(footprint, footprint.worst))}"
            needed = needed_text(request, device, footprint.total, bound)
            text = f"needs {needed}, {shown_bytes(usable)} are usable; most of it: {part}"
            generates = isinstance(request.graph.calls[name], Generate)
            less = "" if generates else ", sharding fsdp"
            risk = ", or a lower memory.quantile" if footprint.total <= usable else ""
            hint = f"fewer {token_fields(generates)[0]}{less}, or a larger mesh{risk}"
            yield Problem(_at(file, f"$.allocations.{name}"), text, hint, "plan_memory")


def _host_memory(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    rooms = [node_bytes(request, group) for group in request.cluster.groups for _ in range(group.nodes)]
    for node, nbytes in offloading(request, plan.allocations).items():
        if nbytes > rooms[node]:
            text = f"{shown_bytes(nbytes)} wait in the memory of node {node}, {shown_bytes(rooms[node])} are usable"
            yield Problem(_at(file, "$.allocations"), text, "keep some states resident", "plan_memory")


def _liveness(plan: Plan, request: PlanRequest, file: str) -> Iterator[Problem]:
    stuck = empty_circuit(liveness_graph(request.graph, plan))
    if stuck is not None:
        text = f"the plan deadlocks: {show_circuit(stuck)} wait for each other within a step"
        yield Problem(_at(file, "$.orders"), text, "change the order of these calls, or their offsets", "plan_deadlock")
