"""Which copies of a role's weights lie where, and which calls read which copy. Prices nothing."""

from collections.abc import Mapping

from msgspec import Struct

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, ModelCall, Train
from realgraph.planner.plan.layout import Layout


class Copy(Struct, frozen=True):
    """One copy of a role's weights under a layout, and the calls that use it. `trained`: with optimizer states."""

    role: str
    layout: Layout
    calls: tuple[str, ...]
    trained: bool


def shares_trained_copy(call: ModelCall, layout: Layout, trained: Layout) -> bool:
    """True where a call reads the trained copy in place.

    The embedded generation engine wants whole tensors on every device, so it can't read sharded weights.
    """
    if isinstance(call, Generate) and trained.sharding != "replicated":
        return False
    return layout == trained


def copies(graph: Graph, layouts: Mapping[str, Layout]) -> tuple[Copy, ...]:
    """All copies, in the order of the graph's calls. Calls that `layouts` does not know are left out."""
    found: dict[tuple[str, Layout, bool], list[str]] = {}
    trained = _trained_layouts(graph, layouts)
    for name, call in graph.calls.items():
        role = graph.role(name)
        if not role or name not in layouts:
            continue
        known = trained.get(role)
        in_place = isinstance(call, Train) or (known is not None and shares_trained_copy(call, layouts[name], known[1]))
        found.setdefault((role, layouts[name], in_place), []).append(name)
    return tuple(Copy(role, layout, tuple(calls), kept) for (role, layout, kept), calls in found.items())


def reallocations(graph: Graph, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """call -> train call, where the call reads a copy of its own that training must refresh."""
    trained = _trained_layouts(graph, layouts)
    return {
        name: trained[graph.role(name)][0]
        for copy in copies(graph, layouts)
        if not copy.trained and copy.role in trained
        for name in copy.calls
    }


def _trained_layouts(graph: Graph, layouts: Mapping[str, Layout]) -> dict[str, tuple[str, Layout]]:
    """role -> (its last train call, the layout that trains it)."""
    return {
        call.model: (name, layouts[name])
        for name, call in graph.calls.items()
        if isinstance(call, Train) and name in layouts
    }
