"""Copies of a role's weights: where they lie, and which calls read which. Prices nothing."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, ModelCall, Train
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.option import CallOption

Options = Mapping[str, CallOption]  # by call


class Copy(Struct, frozen=True):
    """One copy of a role's weights under a layout, and the calls that use it. `trained`: with optimizer states."""

    role: str
    layout: Layout
    calls: tuple[str, ...]
    trained: bool


def shares_trained_copy(call: ModelCall, own: CallOption, trained: CallOption) -> bool:
    """True where a call reads the trained copy in place.

    The embedded generation engine wants whole tensors on every device, so it can't read sharded weights; and what waits
    in host memory is not there to be read.
    """
    if trained.residency == "offloaded" or (isinstance(call, Generate) and trained.layout.sharding != "replicated"):
        return False
    return own.layout == trained.layout


def copies(graph: Graph, options: Options) -> tuple[Copy, ...]:
    """All copies, in the order of the graph's calls. Calls that `options` does not know are left out.

    A later generate call has a copy of its own, but where it reads the trained one in place: its engine opens it.
    """
    calls_by_copy: dict[tuple[str, Layout, bool, bool, str], list[str]] = {}
    trained = _trained(graph, options)
    for name, call in graph.calls.items():
        role = graph.role(name)
        if not role or name not in options:
            continue
        known = trained.get(role)
        in_place = isinstance(call, Train) or (known is not None and shares_trained_copy(call, options[name], known[1]))
        beside = name if name in graph.generates[1:] and not in_place else ""
        key = (role, options[name].layout, in_place, waits_apart(call, options[name]), beside)
        calls_by_copy.setdefault(key, []).append(name)
    return tuple(Copy(role, layout, tuple(calls), kept) for (role, layout, kept, *_), calls in calls_by_copy.items())


def waits_apart(call: ModelCall, option: CallOption) -> bool:
    """True of a generate call whose weights wait in host memory: no other call has its copy."""
    return isinstance(call, Generate) and option.residency == "offloaded"


def reallocations(graph: Graph, options: Options) -> dict[str, str]:
    """call -> train call, where the call reads a copy of its own that training must refresh."""
    trained = _trained(graph, options)
    return {
        name: trained[graph.role(name)][0]
        for copy in copies(graph, options)
        if not copy.trained and copy.role in trained
        for name in copy.calls
    }


def dropped_copies(graph: Graph, options: Options, staleness: int) -> dict[str, tuple[str, ...]]:
    """call -> the calls that use its copy (itself among them), where the weights are given up after the call and
    brought again before the next: copies of trained weights on devices that run other calls, too.

    staleness: of the plan. With any, generation goes on over many steps and keeps its copy; so it does where several
    calls generate, side by side.
    """
    beside = staleness > 0 or len(graph.generates) > 1
    found: dict[str, tuple[str, ...]] = {}
    for copy in copies(graph, options):
        streams = beside and any(isinstance(graph.calls[name], Generate) for name in copy.calls)
        refreshed = not copy.trained and copy.role in _trained(graph, options)
        if refreshed and not streams and shares_devices(options, copy.calls):
            found |= dict.fromkeys(copy.calls, copy.calls)
    return found


def shares_devices(options: Options, calls: Sequence[str]) -> bool:
    """True where a device of these calls, which have one mesh, runs others, too."""
    mesh = options[calls[0]].layout.mesh
    return any(option.layout.mesh.overlaps(mesh) for name, option in options.items() if name not in calls)


def _trained(graph: Graph, options: Options) -> dict[str, tuple[str, CallOption]]:
    """role -> (its last train call, the option that trains it)."""
    return {
        call.model: (name, options[name])
        for name, call in graph.calls.items()
        if isinstance(call, Train) and name in options
    }
