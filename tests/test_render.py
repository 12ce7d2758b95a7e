"""Pictures of graphs: nothing overlaps, nothing is left out, and what users write can't break the markup."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import msgspec
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from realgraph.graphs.picture.layered import COLUMN_GAP, MARGIN, ROW_GAP, BoxSize, PlacedBox, place
from realgraph.graphs.picture.render import mermaid, svg, tree
from realgraph.screen.terminal import Terminal
from tests.strategies import TREES, Tree, change, rl_tree, spec_of, trees, where

SVG = "{http://www.w3.org/2000/svg}"


def graph_of(source: Tree) -> Graph:
    return compile_graph(spec_of(source), where, Facts())


def overlap(one: PlacedBox, other: PlacedBox) -> bool:
    apart = one.right <= other.x or other.right <= one.x or one.bottom <= other.y or other.bottom <= one.y
    return not apart


@st.composite
def acyclic(draw: st.DrawFn) -> tuple[dict[str, BoxSize], list[tuple[str, str]]]:
    names = [f"n{i}" for i in range(draw(st.integers(1, 12)))]
    side = st.integers(20, 300).map(float)
    sizes = {name: BoxSize(draw(side), draw(side)) for name in names}
    pairs = list(combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return sizes, edges


@settings(max_examples=200)
@given(acyclic())
def test_boxes_keep_apart_and_edges_run_right(drawn: tuple[dict[str, BoxSize], list[tuple[str, str]]]) -> None:
    sizes, edges = drawn
    placed = place(sizes, edges)
    assert {name: (box.width, box.height) for name, box in placed.boxes.items()} == {
        name: (size.width, size.height) for name, size in sizes.items()
    }
    for one, other in combinations(placed.boxes.values(), 2):
        assert not overlap(one, other)
    for box in placed.boxes.values():
        assert box.x >= MARGIN - 1e-6
        assert box.y >= MARGIN - 1e-6
        assert box.right <= placed.width - MARGIN + 1e-6
        assert box.bottom <= placed.height - MARGIN + 1e-6
    assert [(route.source, route.target) for route in placed.routes] == edges
    for route in placed.routes:
        source, target = placed.boxes[route.source], placed.boxes[route.target]
        assert route.points[0] == pytest.approx((source.right, source.middle))
        assert route.points[-1] == pytest.approx((target.x, target.middle))
        assert target.x >= source.right + COLUMN_GAP - 1e-6
        assert [x for x, _ in route.points] == sorted(x for x, _ in route.points)


@settings(max_examples=100)
@given(acyclic())
def test_long_edges_pass_between_boxes(drawn: tuple[dict[str, BoxSize], list[tuple[str, str]]]) -> None:
    placed = place(*drawn)
    for route in placed.routes:
        for x, y in route.points[1:-1]:
            crossed = [box for box in placed.boxes.values() if box.x <= x <= box.right]
            assert all(not box.y - ROW_GAP / 2 < y < box.bottom + ROW_GAP / 2 for box in crossed)


def test_an_empty_picture_has_a_size() -> None:
    assert place({}, []).boxes == {}


@settings(max_examples=60)
@given(trees())
def test_svg_names_every_call_and_draws_every_edge_once(source: Tree) -> None:
    graph = graph_of(source)
    root = ElementTree.fromstring(svg(graph))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert set(graph.calls) <= set(texts)
    assert {key.name for key in graph.inputs} <= set(texts)
    classes = [path.get("class", "") for path in root.iter(f"{SVG}path")]
    within = {(edge.producer, edge.consumer) for edge in graph.edges if edge.distance == 0}
    n_inputs = sum(len(key.consumers) for key in graph.inputs)
    assert sum(name.startswith("edge") for name in classes) == len(within) + n_inputs
    assert classes.count("weights") == sum(edge.distance > 0 for edge in graph.edges)


@settings(max_examples=60)
@given(trees())
def test_mermaid_draws_the_same_graph(source: Tree) -> None:
    graph = graph_of(source)
    text = mermaid(graph)
    assert text.startswith("flowchart LR\n")
    nodes = dict(re.findall(r'^  (c\d+)\["<b>(.*?)</b>', text, re.MULTILINE))
    assert list(nodes.values()) == list(graph.calls)
    drawn = re.findall(r"^  (c\d+) (-->|-\.->)\|.*?\| (c\d+)$", text, re.MULTILINE)
    assert [(nodes[a], nodes[b], arrow == "-->") for a, arrow, b in drawn] == [
        (edge.producer, edge.consumer, bool(edge.keys)) for edge in graph.edges
    ]
    data = nx.DiGraph((a, b) for a, arrow, b in drawn if arrow == "-->")
    assert nx.is_directed_acyclic_graph(data)


@pytest.mark.parametrize("name", TREES)
def test_the_tree_shows_calls_keys_and_roles(name: str) -> None:
    graph = graph_of(TREES[name]())
    console = Terminal(width=200, record=True, force_terminal=False, file=None)
    with console.capture() as captured:
        console.print(tree(graph))
    lines = captured.get().splitlines()
    for call in graph.calls:
        (line,) = [line for line in lines if re.match(rf"[├└]── {call}  ", line)]
        assert graph.role(call) in line
    for key in graph.keys:
        assert any(re.search(rf"(writes |── ){key}  ", line) for line in lines)


def test_names_are_text_and_not_markup() -> None:
    hostile = '<b>"[red]&|;{`'
    graph = graph_of(change(rl_tree(), {"name": "reward"}))
    text = msgspec.json.encode(graph).replace(b'"reward"', msgspec.json.encode(hostile))
    graph = msgspec.json.decode(text, type=Graph)
    root = ElementTree.fromstring(svg(graph))
    assert hostile in [text.text for text in root.iter(f"{SVG}text")]
    assert hostile not in mermaid(graph)
    console = Terminal(width=200)
    with console.capture() as captured:
        console.print(tree(graph))
    assert captured.get().count(hostile) >= 2


def test_pictures_are_the_same_every_time() -> None:
    graph = graph_of(rl_tree())
    assert svg(graph) == svg(graph)
    assert mermaid(graph) == mermaid(graph)
