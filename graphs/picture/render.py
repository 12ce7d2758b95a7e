"""A graph for the eye: a tree for the terminal, a Mermaid flowchart, an SVG picture. Judges nothing."""

from collections.abc import Iterator
from html import escape

import networkx as nx
from rich.text import Text
from rich.tree import Tree

from realgraph.graphs.graph import Edge, Graph
from realgraph.graphs.keys import Level
from realgraph.graphs.picture.layered import MARGIN, BoxSize, PlacedBox, Placement, Route, place
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, ModelRole, Train

_ORDER: dict[Level, int] = {"group": 0, "sample": 1, "token": 2}


def kind_of(call: ModelCall) -> str:
    """The word for a call's kind, as in a graph file."""
    match call:
        case Generate():
            return "generate"
        case Inference():
            return "inference"
        case Function():
            return "function"
        case Advantage():
            return "advantage"
        case Train():
            return "train"


def settings_of(call: ModelCall) -> str:
    """A call's own settings in a few words."""
    match call:
        case Generate():
            cut = f", top_p {call.top_p:g}" if call.top_p < 1 else ""
            return f"n {call.n}, temperature {call.temperature:g}{cut}{f', top_k {call.top_k}' if call.top_k else ''}"
        case Inference():
            return call.output
        case Function():
            return call.fn if call.over == "sample" else f"{call.fn} over a {call.over}"
        case Advantage():
            return ", ".join(entry for entry, step in call.steps.items() if step is not None)
        case Train():
            cut = f", {call.minibatches} mini-batches" if call.minibatches > 1 else ""
            again = f", {call.epochs} epochs" if call.epochs > 1 else ""
            return f"{' + '.join(call.loss.terms)}, lr {call.lr:g}{cut}{again}"


# --- terminal ---------------------------------------------------------------------------------------------------------

_COLOURS = {"generate": "green", "inference": "blue", "function": "yellow", "advantage": "magenta", "train": "red"}


def tree(graph: Graph) -> Tree:
    """Models, inputs and calls in the order of a step; each call with what it reads, from whom, and what it writes."""
    root = Tree(Text(graph.name, style="bold"), guide_style="dim")
    models = root.add(Text("models"))
    for name, role in graph.models.items():
        models.add(_line(name, "", _role_words(role)))
    inputs = root.add(Text("data"))
    for key in graph.inputs:
        inputs.add(_line(key.name, "cyan", str(key.type)))
    for name, call in graph.calls.items():
        root.add(_call_branch(graph, name, call))
    if graph.samples_per_group > 1:
        root.add(Text(f"{graph.samples_per_group} samples a group", style="dim"))
    return root


def _call_branch(graph: Graph, name: str, call: ModelCall) -> Tree:
    kind, role = kind_of(call), graph.role(name)
    head = _line(name, f"bold {_COLOURS[kind]}", f"{kind} {role}".rstrip())
    branch = Tree(head.append(f"  {settings_of(call)}", style="dim"), guide_style="dim")
    for key in graph.reads[name]:
        entry = graph.keys[key]
        branch.add(Text("reads  ").append(_line(key, "cyan", f"{entry.type} of {entry.producer or 'the data'}")))
    for key in graph.writes[name]:
        branch.add(Text("writes ").append(_line(key, "cyan", str(graph.keys[key].type))))
    for edge in graph.edges:
        if edge.producer == name and edge.role:
            branch.add(Text(f"weights of {edge.role} to {edge.consumer}, {_later(edge)}", style="dim"))
    return branch


def _line(name: str, style: str, words: str) -> Text:
    return Text(name, style=style).append(f"  {words}", style="dim") if words else Text(name, style=style)


def _role_words(role: ModelRole) -> str:
    words = ["trained" if role.trainable else "frozen"]
    if role.head != "lm":
        words.append(f"{role.head} head")
    if role.path:
        words.append(role.path)
    elif role.init:
        words.append(f"starts as {role.init}")
    return ", ".join(words)


def _later(edge: Edge) -> str:
    if edge.distance == 0:
        return "same step"
    return "next step" if edge.distance == 1 else f"up to {edge.distance} steps later"


# --- Mermaid ----------------------------------------------------------------------------------------------------------


def mermaid(graph: Graph) -> str:
    """A Mermaid flowchart: data edges carry their keys, dotted edges carry weights to later steps."""
    ids = {name: f"c{i}" for i, name in enumerate(graph.calls)}
    lines = ["flowchart LR"]
    lines += [f'  d{i}(["{_mermaid_text(key.name)}"]):::data' for i, key in enumerate(graph.inputs)]
    for name, call in graph.calls.items():
        kind = kind_of(call)
        label = f"<b>{_mermaid_text(name)}</b><br/>{_mermaid_text(f'{kind} {graph.role(name)}'.rstrip())}"
        lines.append(f'  {ids[name]}["{label}"]:::{kind}')
    for i, key in enumerate(graph.inputs):
        lines += [f"  d{i} --> {ids[consumer]}" for consumer in key.consumers]
    for edge in graph.edges:
        words = ", ".join(edge.keys) if edge.keys else f"{edge.role} weights, {_later(edge)}"
        arrow = "-->" if edge.keys else "-.->"
        lines.append(f'  {ids[edge.producer]} {arrow}|"{_mermaid_text(words)}"| {ids[edge.consumer]}')
    lines.append("  classDef data fill:none,stroke:#8b949e,stroke-dasharray:3")
    lines += [f"  classDef {kind} fill:{fill}33,stroke:{fill}" for kind, fill in _FILLS.items()]
    return "\n".join(lines) + "\n"


def _mermaid_text(text: str) -> str:
    """Text inside quotes, with Mermaid's own entity codes for what it would read as markup."""
    return "".join(char if char.isalnum() or char in " _-.,:/" else f"#{ord(char)};" for char in text)


# --- SVG --------------------------------------------------------------------------------------------------------------

_FILLS = {
    "generate": "#2da44e",
    "inference": "#218bff",
    "function": "#d4a72c",
    "advantage": "#a475f9",
    "train": "#fa4549",
}
_PAD = 12.0
_TITLE, _SMALL = 8.4, 6.7  # pixels a character takes at most, at 14 px semibold and 11 px monospace
_LINE = 16.0
_LANE = 16.0
_STYLE = """
    svg { font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
    .name { font-size: 14px; font-weight: 600; fill: #1f2328; }
    .kind { font-size: 11px; fill: #59636e; }
    .key { font-size: 11px; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
    .type, .lane { font-size: 11px; fill: #59636e; }
    .edge { fill: none; stroke: #59636e; stroke-width: 1.5; }
    .far { stroke-width: 1; opacity: 0.45; }
    .weights { fill: none; stroke: #59636e; stroke-width: 1.3; stroke-dasharray: 5 4; }
    .tip { fill: #59636e; }
    .data { fill: none; stroke: #8b949e; stroke-dasharray: 3 3; }
    @media (prefers-color-scheme: dark) {
      .name, .key { fill: #f0f6fc; }
      .kind, .type, .lane { fill: #9198a1; }
      .edge, .weights { stroke: #9198a1; }
      .tip { fill: #9198a1; }
    }"""


def svg(graph: Graph) -> str:
    """A picture in SVG, on a transparent ground, in the reader's light or dark colours.

    Columns follow the data from left to right; a box names its call and lists the keys it writes; edges that others
    imply are pale; dashed lines below carry weights to later steps.
    """
    names = {f"data {key.name}": key.name for key in graph.inputs}
    sizes = {node: _data_size(graph, key) for node, key in names.items()}
    sizes |= {name: _call_size(graph, name) for name in graph.calls}
    edges = [(node, consumer) for node, key in names.items() for consumer in graph.keys[key].consumers]
    edges += [(edge.producer, edge.consumer) for edge in graph.edges if edge.distance == 0]
    placed = place(sizes, list(dict.fromkeys(edges)))
    near = set(nx.transitive_reduction(nx.DiGraph(edges)).edges)
    lanes = [edge for edge in graph.edges if edge.distance > 0]
    width, height = placed.width + 6 * len(lanes), placed.height + _LANE * 1.4 * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img">',
        f"  <title>{escape(graph.name)}</title>",
        f"  <style>{_STYLE}\n  </style>",
        '  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0,0.5 L8,4 L0,7.5 Z"/></marker></defs>',
    ]
    parts += [_curve(route, (route.source, route.target) in near) for route in placed.routes]
    parts += [line for i, edge in enumerate(lanes) for line in _lane(placed, edge, i)]
    parts += [line for node, key in names.items() for line in _data_box(graph, key, placed.boxes[node])]
    parts += [line for name in graph.calls for line in _call_box(graph, name, placed.boxes[name])]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _key_lines(graph: Graph, call: str) -> list[tuple[str, str]]:
    """Keys that somebody reads, with types; the wider levels first."""
    keys = [graph.keys[key] for key in graph.writes[call] if graph.keys[key].consumers]
    return [(key.name, str(key.type)) for key in sorted(keys, key=lambda key: _ORDER[key.type.level])]


def _subtitle(graph: Graph, name: str) -> str:
    call = graph.calls[name]
    return f"{kind_of(call)} · {graph.role(name) or settings_of(call)}"


def _call_size(graph: Graph, name: str) -> BoxSize:
    lines = _key_lines(graph, name)
    widths = [len(name) * _TITLE, len(_subtitle(graph, name)) * _SMALL]
    widths += [(len(key) + 2 + len(words)) * _SMALL for key, words in lines]
    return BoxSize(max(widths) + 2 * _PAD, 2 * _PAD + 32 + (len(lines) * _LINE + 6 if lines else 0))


def _data_size(graph: Graph, key: str) -> BoxSize:
    return BoxSize(max(len(key), len(str(graph.keys[key].type))) * _SMALL + 2 * _PAD, 44)


def _call_box(graph: Graph, name: str, box: PlacedBox) -> Iterator[str]:
    fill = _FILLS[kind_of(graph.calls[name])]
    yield (
        f'  <rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" '
        f'fill="{fill}" fill-opacity="0.14" stroke="{fill}" stroke-width="1.5"/>'
    )
    yield _text("name", box.x + _PAD, box.y + _PAD + 11, name)
    yield _text("kind", box.x + _PAD, box.y + _PAD + 28, _subtitle(graph, name))
    for i, (key, words) in enumerate(_key_lines(graph, name)):
        y = box.y + _PAD + 32 + 6 + _LINE * (i + 0.75)
        yield _text("key", box.x + _PAD, y, key)
        yield _text("type", box.right - _PAD, y, words, "end")


def _data_box(graph: Graph, key: str, box: PlacedBox) -> Iterator[str]:
    yield (
        f'  <rect class="data" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{box.height / 2:.1f}"/>'
    )
    middle = box.x + box.width / 2
    yield _text("key", middle, box.middle - 3, key, "middle")
    yield _text("type", middle, box.middle + 12, str(graph.keys[key].type), "middle")


def _text(style: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'  <text class="{style}" x="{x:.1f}" y="{y:.1f}"{at}>{escape(words)}</text>'


def _curve(route: Route, near: bool) -> str:
    """Through its points: level inside columns, an S between them."""
    (x, y), *others = route.points
    path = [f"M{x:.1f},{y:.1f}"]
    for i, (next_x, next_y) in enumerate(others):
        if i % 2:
            path.append(f"L{next_x:.1f},{next_y:.1f}")
        else:
            bend = (x + next_x) / 2
            path.append(f"C{bend:.1f},{y:.1f} {bend:.1f},{next_y:.1f} {next_x:.1f},{next_y:.1f}")
        x, y = next_x, next_y
    return f'  <path class="edge{"" if near else " far"}" d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _column(placed: Placement, box: PlacedBox) -> list[PlacedBox]:
    """The boxes above, below and at `box`."""
    return [other for other in placed.boxes.values() if other.x < box.right and box.x < other.right]


def _lane(placed: Placement, edge: Edge, i: int) -> Iterator[str]:
    """A line from the right side of the training call, below everything, into the left side of the reader."""
    source, target = placed.boxes[edge.producer], placed.boxes[edge.consumer]
    out = max(box.right for box in _column(placed, source)) + 10 + 6 * i
    back = min(box.x for box in _column(placed, target)) - 16 - 6 * i
    y = placed.height - MARGIN + _LANE * 1.4 * (1 + i)
    end = target.bottom - 12
    yield (
        f'  <path class="weights" d="M{source.right:.1f},{source.middle:.1f} H{out:.1f} V{y:.1f} H{back:.1f} '
        f'V{end:.1f} H{target.x:.1f}" marker-end="url(#tip)"/>'
    )
    yield _text("lane", (out + back) / 2, y - 4, f"{edge.role} weights, {_later(edge)}", "middle")
