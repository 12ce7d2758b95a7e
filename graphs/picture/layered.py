"""Positions for a picture of a graph: columns by depth, few crossings, short edges. Knows boxes, not calls.

The layered method of Sugiyama, Tagawa and Toda 1981 (IEEE Trans. SMC 11(2)): an edge over several columns gets a point
of its own in each column between, columns are ordered by the mean position of their neighbours, then moved close.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import networkx as nx
from msgspec import Struct

COLUMN_GAP = 56.0
ROW_GAP = 22.0
MARGIN = 24.0
_SWEEPS = 12


class BoxSize(Struct, frozen=True):
    """Width and height of a box in pixels."""

    width: float
    height: float


class PlacedBox(Struct, frozen=True):
    """A placed box: x and y of its top left corner, in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


class Route(Struct, frozen=True):
    """An edge as the corner points that its curve goes through, from right side to left side."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]


class Placement(Struct, frozen=True):
    """Everything placed. Width and height of the whole in pixels, margins included."""

    boxes: dict[str, PlacedBox]
    routes: tuple[Route, ...]
    width: float
    height: float


_Point = tuple[str, str, int]  # source, target, column: where a long edge crosses a column
_Node = str | _Point


def place(sizes: Mapping[str, BoxSize], edges: Sequence[tuple[str, str]]) -> Placement:
    """Place boxes of these sizes so that every edge of the acyclic `edges` runs from left to right."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sizes)
    graph.add_edges_from(edges)
    column_of = _columns(graph)
    columns, chains = _with_points(sizes, edges, column_of)
    neighbours = _neighbours(chains)
    columns = _ordered(columns, neighbours)
    heights = {node: sizes[node].height if isinstance(node, str) else 4.0 for column in columns for node in column}
    middles = _middles(columns, neighbours, heights)
    return _placement(sizes, edges, columns, chains, middles)


def _columns(graph: nx.DiGraph) -> dict[str, int]:
    """Column = longest path from the left; then sources move right, next to what they feed."""
    column_of: dict[str, int] = {}
    for depth, names in enumerate(nx.topological_generations(graph)):
        column_of |= dict.fromkeys(names, depth)
    for name in graph:
        if graph.in_degree(name) == 0 and graph.out_degree(name) > 0:
            column_of[name] = min(column_of[after] for after in graph.successors(name)) - 1
    return column_of


def _with_points(
    sizes: Mapping[str, BoxSize], edges: Sequence[tuple[str, str]], column_of: Mapping[str, int]
) -> tuple[list[list[_Node]], dict[tuple[str, str], list[_Node]]]:
    """Nodes and crossing points by column, and for each edge the chain of nodes that it goes through."""
    columns: list[list[_Node]] = [[] for _ in range(max(column_of.values(), default=-1) + 1)]
    for name in sizes:
        columns[column_of[name]].append(name)
    chains: dict[tuple[str, str], list[_Node]] = {}
    for source, target in edges:
        between: list[_Node] = [(source, target, i) for i in range(column_of[source] + 1, column_of[target])]
        for point, column in zip(between, columns[column_of[source] + 1 :], strict=False):
            column.append(point)
        chains[source, target] = [source, *between, target]
    return columns, chains


def _neighbours(chains: Mapping[tuple[str, str], Sequence[_Node]]) -> dict[_Node, tuple[list[_Node], list[_Node]]]:
    """Neighbours of each node: those one column to the left and to the right."""
    neighbours: dict[_Node, tuple[list[_Node], list[_Node]]] = {}
    for chain in chains.values():
        for left, right in pairwise(chain):
            neighbours.setdefault(left, ([], []))[1].append(right)
            neighbours.setdefault(right, ([], []))[0].append(left)
    return neighbours


def _ordered(
    columns: list[list[_Node]], neighbours: Mapping[_Node, tuple[list[_Node], list[_Node]]]
) -> list[list[_Node]]:
    """Columns sorted by the mean rank of their neighbours, swept right and left; the order with fewest crossings."""
    best, fewest = columns, _crossings(columns, neighbours)
    for sweep in range(_SWEEPS):
        side = sweep % 2
        ranks = {node: float(i) for column in columns for i, node in enumerate(column)}
        ordered = []
        for column in columns if side == 0 else columns[::-1]:
            means = {
                node: _mean([ranks[n] for n in neighbours.get(node, ((), ()))[side]], ranks[node]) for node in column
            }
            moved = sorted(column, key=lambda node: means[node])
            ranks |= {node: float(i) for i, node in enumerate(moved)}
            ordered.append(moved)
        columns = ordered if side == 0 else ordered[::-1]
        if (n_crossings := _crossings(columns, neighbours)) < fewest:
            best, fewest = columns, n_crossings
    return best


def _crossings(columns: Sequence[Sequence[_Node]], neighbours: Mapping[_Node, tuple[list[_Node], list[_Node]]]) -> int:
    total = 0
    for left, right in pairwise(columns):
        rank = {node: i for i, node in enumerate(right)}
        ends = [sorted(rank[n] for n in neighbours.get(node, ([], []))[1]) for node in left]
        flat = [end for of_node in ends for end in of_node]
        total += sum(1 for i, one in enumerate(flat) for other in flat[i + 1 :] if one > other)
    return total


def _middles(
    columns: Sequence[Sequence[_Node]],
    neighbours: Mapping[_Node, tuple[list[_Node], list[_Node]]],
    heights: Mapping[_Node, float],
) -> dict[_Node, float]:
    """Vertical middles: each node near the mean of its neighbours, in its column's order and without overlap."""
    middles: dict[_Node, float] = {}
    for column in columns:
        middles |= _stacked(column, [0.0] * len(column), heights)
    for sweep in range(2 * _SWEEPS):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            targets = []
            for node in column:
                left, right = neighbours.get(node, ([], []))
                targets.append(_mean([middles[other] for other in (*left, *right)], middles[node]))
            middles |= _stacked(column, targets, heights)
    return middles


def _stacked(column: Sequence[_Node], targets: Sequence[float], heights: Mapping[_Node, float]) -> dict[_Node, float]:
    """The middles closest to `targets` (least squares) that keep order and gaps: isotonic regression of what is left
    of each target after the room that the nodes above need; neighbours that pull past each other are pooled."""
    offsets, room = [], 0.0
    for above, node in zip([None, *column], column, strict=False):
        room += 0.0 if above is None else heights[above] / 2 + ROW_GAP + heights[node] / 2
        offsets.append(room)
    pools: list[tuple[float, int]] = []  # mean, count
    for target, offset in zip(targets, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, n_low), (high, n_high) = pools.pop(), pools.pop()
            pools.append(((low * n_low + high * n_high) / (n_low + n_high), n_low + n_high))
    levels = [mean for mean, count in pools for _ in range(count)]
    return {node: level + offset for node, level, offset in zip(column, levels, offsets, strict=True)}


def _placement(
    sizes: Mapping[str, BoxSize],
    edges: Sequence[tuple[str, str]],
    columns: Sequence[Sequence[_Node]],
    chains: Mapping[tuple[str, str], Sequence[_Node]],
    middles: Mapping[_Node, float],
) -> Placement:
    """Turn columns and middles into boxes and routes, the top left one at the margin."""
    tops = [middles[name] - size.height / 2 for name, size in sizes.items()]
    shift = MARGIN - min((*tops, *(middles[n] for column in columns for n in column)), default=0.0)
    boxes: dict[str, PlacedBox] = {}
    spans: dict[_Node, tuple[float, float]] = {}
    x = MARGIN
    for column in columns:
        names = [node for node in column if isinstance(node, str)]
        width = max((sizes[name].width for name in names), default=0.0)
        for name in names:
            size = sizes[name]
            boxes[name] = PlacedBox(
                x + (width - size.width) / 2, middles[name] + shift - size.height / 2, size.width, size.height
            )
        spans |= {
            node: (boxes[node].x, boxes[node].right) if isinstance(node, str) else (x, x + width) for node in column
        }
        x += width + COLUMN_GAP
    routes = []
    for source, target in edges:
        points: list[tuple[float, float]] = []
        for node in chains[source, target]:
            y = middles[node] + shift
            points += [(spans[node][0], y), (spans[node][1], y)]
        routes.append(Route(source, target, tuple(points[1:-1])))
    bottom = max((*(box.bottom for box in boxes.values()), *(y for r in routes for _, y in r.points)), default=0.0)
    return Placement(boxes, tuple(routes), x - COLUMN_GAP + MARGIN, bottom + MARGIN)


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
