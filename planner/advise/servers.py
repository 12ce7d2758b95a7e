"""Places of servers, which share their devices with no other call, where the run file pins none: the splits of the
cluster between them and the rest, and the one whose best plan is the fastest."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import Generate
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.constraints import constraint_problems, server_meshes
from realgraph.planner.options.holdings import group_for
from realgraph.planner.options.meshes import mesh_fault
from realgraph.planner.options.tables import Known
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.levels import best_level, levels_of
from realgraph.planner.search.search import search

SECONDS, GAP = 5.0, 0.01  # of the search for one split
MOST_SPLITS = 64  # that are tried, where several calls have servers
PARTS = 8  # of a cluster's nodes, whose multiples servers may have besides powers of two


class Placed(Struct, frozen=True):
    """A request that pins the servers of every generate call. text: the choice in words; '' where there was none."""

    request: PlanRequest
    text: str = ""


def with_servers(request: PlanRequest, limits: Limits = Limits()) -> Placed:
    """The request with pins for the servers of generate calls that have none: of the splits of the cluster that are
    tried, the one whose best plan is the fastest. As it is where the engines share their devices, or all are pinned.

    limits: of all splits together, that of each at most SECONDS. Raises ConfigError where a pin or constraint is wrong,
    and as `search` does, of the split nearest to halves, where none has a plan.
    """
    missing = [name for name in request.graph.generates if name not in server_meshes(request)]
    if not request.engine.own_devices or not missing or len(request.mesh_calls) == 1:
        return Placed(request)
    asked = [_pinned(request, meshes) for meshes in _splits(request, missing)]
    sound = [one for one in asked if not constraint_problems(one)]
    if not sound:
        raise ConfigError(constraint_problems(asked[0] if asked else request))
    if len(sound) == 1:
        return Placed(sound[0])
    each = replace(limits, seconds=min(SECONDS, limits.seconds / len(sound)), gap=max(GAP, limits.gap))
    best, period, unfinished, began, known = None, math.inf, 0, time.monotonic(), Known()
    for number, one in enumerate(sound):
        if best is not None and (limits.stop() or time.monotonic() - began > limits.seconds):
            unfinished += len(sound) - number
            break
        level = best_level(one, each, known, levels_of(one), period)
        unfinished += level.stopped != "proven"
        if level.best is not None:
            best, period = one, level.best.plan.period_seconds
    if best is None:
        search(sound[0], limits)  # raises the reason, unless more time than each split had is enough
        best = sound[0]
    devices = ", ".join(f"{_devices_text(best, name)} for {name}" for name in missing)
    cut = f" ({unfinished} of them not searched to the end)" if unfinished else ""
    return Placed(best, f"devices of {request.engine.name}: {devices}, the fastest of {len(sound)} splits{cut}")


def _devices_text(request: PlanRequest, call: str) -> str:
    """`4`; of a cluster of several kinds, `4 L40S`."""
    mesh = server_meshes(request)[call]
    kind = f" {group_for(request, Layout(mesh)).kind}" if request.cluster.more else ""
    return f"{mesh.n_devices}{kind}"


def _pinned(request: PlanRequest, meshes: Mapping[str, DeviceMesh]) -> PlanRequest:
    pins = {
        name: replace(request.pins.get(name, Pin()), first=mesh.first, devices=mesh.n_devices)
        for name, mesh in meshes.items()
    }
    return replace(request, pins={**request.pins, **pins})


def _splits(request: PlanRequest, missing: Sequence[str]) -> list[dict[str, DeviceMesh]]:
    """Places of the servers of these calls, each of them leaving devices to the other calls; those nearest to halves
    first."""
    total = request.cluster.n_devices - request.constraints.reserve
    shared = any(not isinstance(request.graph.calls[name], Generate) for name in request.mesh_calls)
    kinds = tuple(enumerate(request.cluster.groups))
    blocks = [(group, size) for group, nodes in reversed(kinds) for size in _sizes(nodes)]
    splits = []
    for chosen in product(blocks, repeat=len(missing)):
        meshes = _places(request, dict(zip(missing, chosen, strict=True)))
        taken = sum(mesh.n_devices for mesh in {**server_meshes(request), **meshes}.values())
        if meshes and taken <= total - shared:
            splits.append(meshes)
    splits.sort(key=lambda meshes: abs(2 * sum(mesh.n_devices for mesh in meshes.values()) - total))
    return splits[:MOST_SPLITS]


def _places(request: PlanRequest, blocks: Mapping[str, tuple[int, int]]) -> dict[str, DeviceMesh]:
    """The free devices nearest to the end of a group of nodes of one kind, for servers of each call's group and size,
    the largest first; empty where there are none. A pin may say where they begin."""
    cluster, found, pinned = request.cluster, dict[str, DeviceMesh](), server_meshes(request)
    for name, (group, size) in sorted(blocks.items(), key=lambda entry: -entry[1][1]):
        begin = cluster.first_of(group)
        end = min(cluster.first_of(group + 1), cluster.n_devices - request.constraints.reserve)
        first, others = request.pins.get(name, Pin()).first, (*pinned.values(), *found.values())
        meshes = (DeviceMesh(at, size) for at in range(end - size, begin - 1, -1) if first in (None, at))
        free = (one for one in meshes if not any(one.overlaps(other) for other in others))
        mesh = next((one for one in free if not mesh_fault(one, cluster)), None)
        if mesh is None:
            return {}
        found[name] = mesh
    return found


def _sizes(nodes: Cluster) -> list[int]:
    """Numbers of devices of one kind that servers may have: powers of two, and eighths in whole nodes."""
    total = nodes.n_devices
    part = math.ceil(nodes.nodes / PARTS) * nodes.devices_per_node
    return sorted({2**i for i in range(total.bit_length())} | set(range(part, total + 1, part)))
