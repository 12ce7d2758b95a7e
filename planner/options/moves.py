"""Seconds of bringing trained weights to the copies that read them, for every pair of options. Cached by geometry."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate
from realgraph.planner.costs.compute.move import (
    LEAST_SHARE,
    Copies,
    copies_of,
    fastest_transports,
    move_seconds,
    offload_seconds,
    reallocation_seconds,
    received,
)
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.options.pricing import PricedOption, factors_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import TRANSPORTS, Transport
from realgraph.planner.plan.problem import Bools, Floats, Ints, Move
from realgraph.planner.request.cost_table import PhaseFactor
from realgraph.planner.request.request import PlanRequest

STATE_BYTES = 12  # of a trained parameter in all, at least: what it is trained on has memory for it


Copy = tuple[Layout, bool]  # a copy's layout, and whether it waits in host memory


class Place(Struct, frozen=True, eq=False, dict=True):
    """A mesh in a group of nodes, with the options of one call there."""

    mesh: DeviceMesh
    group: int
    options: Sequence[PricedOption]

    @cached_property
    def _numbers(self) -> dict[Copy, int]:
        return {row: i for i, row in enumerate(dict.fromkeys(map(_copy_of, self.options)))}

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of the different copies that the options stand for."""
        return [replace(layout, mesh=self.mesh) for layout, _ in self._numbers]

    @cached_property
    def away(self) -> Bools:
        """True for each of these copies that waits in host memory."""
        return np.array([away for _, away in self._numbers])

    @cached_property
    def numbers(self) -> Ints:
        """The number of each option's copy among them."""
        return np.array([self._numbers[_copy_of(one)] for one in self.options], dtype=np.int64)

    @property
    def shapes(self) -> tuple[tuple[object, ...], ...]:
        """The different copies, wherever the mesh lies."""
        return tuple((layout.axes, away) for layout, away in self._numbers)


def _copy_of(option: PricedOption) -> Copy:
    return option.candidate.layout, option.candidate.residency == "offloaded"


def move_matrix(request: PlanRequest, target: str, source: Place, there: Place) -> Floats:
    """Seconds of [options of the source, options of the target]: 0 where nothing is to be moved."""
    return _of_options(_copy_seconds(request, target, source, there), source, there)


def _of_options(seconds: Floats, source: Place, there: Place) -> Floats:
    """The seconds between options, from those between their different copies."""
    return seconds[np.ix_(source.numbers, there.numbers)]


def _copy_seconds(request: PlanRequest, target: str, source: Place, there: Place) -> Floats:
    """The same of the different copies alone."""
    copies = _copies(request, target, source), _copies(request, target, there)
    return corrected(request, move_seconds(*copies, _transports(request, target)), there)


def transport_of(request: PlanRequest, target: str, source: Place, there: Place) -> Transport:
    """The transport of the weights of the source's only option to the target's only one."""
    copies = _copies(request, target, source), _copies(request, target, there)
    chosen = fastest_transports(*copies, _transports(request, target))[1]
    return TRANSPORTS[int(chosen[0, 0])]


def _transports(request: PlanRequest, target: str) -> tuple[Transport, ...]:
    return request.engine.transports_to(request.graph.calls[target])


def corrected(request: PlanRequest, seconds: Floats, place: Place) -> Floats:
    """With what was measured of reallocations to the kind of device of a place; what takes no time stays so.

    In a mixed cluster moves to other kinds take what the formulas say.
    """
    there = request.cluster.groups[place.group].kind
    speaks = not request.cluster.more or request.costs.kind in ("", there)
    correction = request.costs.phases.get("reallocate", PhaseFactor()) if speaks else PhaseFactor()
    return np.where(seconds > 0, correction.factor * seconds + correction.constant_seconds, 0.0)


def _copies(request: PlanRequest, call: str, place: Place) -> Copies:
    """The different copies of the role of `call` that the options of a place stand for.

    Of a move both ends are cut as the engine of its target cuts experts: what is read in place is the trained copy.
    """
    cluster = request.cluster.groups[place.group]
    layouts = place.layouts
    setting = Setting(request.model(call), request.role(call), layouts[0], cluster, factors_of(request, cluster))
    kind = request.graph.calls[call]
    copies = copies_of(setting, layouts, request.cluster.first_of(place.group), request.engine.serves(kind), place.away)
    return received(copies, setting.model, request.overheads(cluster)) if isinstance(kind, Generate) else copies


def longest_moves(request: PlanRequest, call: str, place: Place) -> Floats:
    """Per option of a call that reads trained weights, seconds that no move to it exceeds.

    From other nodes, or through host memory; and where fewer devices train than receive, no faster than they can send.
    """
    cluster, there = request.cluster.groups[place.group], _copies(request, call, place)
    slowest = replace(there, nic=min(_nic_bytes_per_s(request, group) for group in request.cluster.groups))
    seconds = reallocation_seconds(slowest, cluster.nodes > 1)
    if request.cluster.nodes > 1 or request.cluster.more:
        seconds = seconds + there.whole / _fewest_senders(request, call) / slowest.nic
    most = corrected(request, seconds + _host_seconds(request, call, there, resident=False), place)
    return most[place.numbers]


def _host_seconds(request: PlanRequest, call: str, there: Copies, *, resident: bool) -> Floats:
    """Per option, seconds that the way through host memory takes at most, 0 where no move goes there. resident: of
    moves of trained weights that lie on devices."""
    links = "device" in _transports(request, call)
    if links and (resident or "train" not in request.engine.offload):
        return np.zeros(len(there.cut))
    seconds = there.taken[there.cut] / there.host
    if not links:
        sent = there.whole / _fewest_senders(request, call)
        seconds = seconds + max(offload_seconds(one, sent, factors_of(request, one)) for one in request.cluster.groups)
    return np.asarray(seconds)


def _fewest_senders(request: PlanRequest, call: str) -> int:
    """Devices that train the weights of a call, at least."""
    params = request.model(call).n_params(request.role(call).head)
    return max(1, int(STATE_BYTES * params / max(group.memory_bytes for group in request.cluster.groups)))


def _nic_bytes_per_s(request: PlanRequest, group: Cluster) -> float:
    """Bytes a second of each device of a group to other nodes."""
    return group.nic_bytes_per_s * (factors_of(request, group) or device_kind(group.kind).costs).nic


class LongerMoves(Struct, frozen=True, eq=False):
    """Seconds that moves from one option of a call that trains take longer than from another on the same mesh, to
    whatever option of the calls that read the weights: at most `more` of the one and `less` of the other together."""

    more: Floats
    less: Floats


def longer_moves(request: PlanRequest, targets: Mapping[str, Sequence[Place]], source: Place) -> LongerMoves:
    """Per option of a source. targets: of each call that reads its weights, all its places.

    Where a target's nodes are none of the source's, or a move begins in host memory, all layouts of a source do alike.
    Else a layout can spare a node's cards no more than a node of the source holds under it, and the devices no more
    than all that they get.
    """
    away = source.away
    more, less = np.zeros(len(away)), np.zeros(len(away))
    for call, places in targets.items():
        at_source = _copies(request, call, source)
        spared = np.minimum(at_source.whole, at_source.node_bytes[at_source.cut] + LEAST_SHARE * at_source.whole)
        inside, outside, cards = 0.0, 0.0, np.zeros(len(away))
        for place in places:
            there = _copies(request, call, place)
            rest = reallocation_seconds(there, far=False)
            both = [rest + _host_seconds(request, call, there, resident=resident) for resident in (True, False)]
            near, far = (float(corrected(request, seconds, place).max()) for seconds in both)
            inside, outside = max(inside, near), max(outside, far)
            if request.cluster.nodes > 1 or request.cluster.more:
                seconds = spared / min(there.per_node, at_source.per_node) / there.nic
                cards = np.maximum(cards, corrected(request, seconds, place))
        more, less = more + np.where(away, outside, inside), less + cards
    return LongerMoves(more[source.numbers], less[source.numbers])


class Moves:
    """The search's `move_seconds`. Two pairs of meshes of equal sizes and equal relative places have equal matrices.

    known: seconds between copies that other problems of the same request have asked for, by place and copies.
    """

    def __init__(
        self,
        request: PlanRequest,
        places: Sequence[tuple[DeviceMesh, int]],
        known: dict[tuple[object, ...], Floats] | None = None,
    ) -> None:
        self._request, self._places = request, places
        self._options: dict[str, Mapping[int, Sequence[PricedOption]]] = {}
        self._known: dict[tuple[object, ...], Floats] = {}
        self._between = {} if known is None else known

    def add(self, call: str, options: Mapping[int, Sequence[PricedOption]]) -> None:
        """The options of a call on each mesh."""
        self._options[call] = options

    def seconds(self, move: Move, source: int, target: int) -> Floats:
        """[options of the source there, options of the target there]."""
        (mesh, near), (other, group) = self._places[source], self._places[target]
        key = (move.source, move.target, near, group, *self._relation(mesh, other, near))
        if key not in self._known:
            here = Place(mesh, near, self._options[move.source][source])
            there = Place(other, group, self._options[move.target][target])
            between = (*key, here.shapes, there.shapes)
            if between not in self._between:
                self._between[between] = _copy_seconds(self._request, move.target, here, there)
            self._known[key] = _of_options(self._between[between], here, there)
        return self._known[key]

    def _relation(self, source: DeviceMesh, target: DeviceMesh, group: int) -> tuple[int, ...]:
        """Sizes, where the two lie to each other as far as they overlap, and which nodes of one hold the other."""
        per_node = self._request.cluster.groups[group].devices_per_node
        offset = target.first - source.first if source.overlaps(target) else source.n_devices
        ends = [(mesh.first // per_node, (mesh.devices.stop - 1) // per_node) for mesh in (source, target)]
        (first, last), (begin, end) = ends
        inside = begin <= first and last <= end
        return (source.n_devices, target.n_devices, offset, int(inside))
