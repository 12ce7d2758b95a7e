"""A plan's steady state as pictures need it: when each call runs in two periods, on which devices, and with what slack.

A lane is a group of devices that do the same things in the same order. Draws nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train
from realgraph.planner.plan.events import Dependency, EventGraph
from realgraph.planner.plan.plan import Plan, reallocation_node
from realgraph.planner.plan.residency import reallocations

Kind = Literal["generate", "inference", "train", "reallocate", "other"]  # other: holds no mesh
SHOWN_PERIODS = 2  # that a timeline shows
ROUNDING_FRACTION = 1e-9  # of a period: what rounding leaves


class DrawnTask(Struct, frozen=True):
    """A task that holds devices: a mesh-holding call, or a reallocation.

    A reallocation holds the devices whose orders name it; where none does, those of its call (see `events.py`).
    """

    name: str
    kind: Kind
    seconds: float
    start: float  # of step 0, seconds
    devices: frozenset[int]


class Bar(Struct, frozen=True):
    """One task of one step in the window, seconds from its left edge. Cut off where it reaches beyond. critical: on the
    critical circuit; None where it was measured."""

    task: str
    kind: Kind
    step: int
    start: float
    end: float
    critical: bool | None


class Lane(Struct, frozen=True):
    """Devices with equal orders, what they do, and the share of a period in which they do nothing."""

    devices: tuple[int, ...]
    bars: tuple[Bar, ...]
    busy_seconds: float
    idle: float


class Timeline(Struct, frozen=True):
    """Two periods of the steady state; the window begins where the first call of step 0 does."""

    period_seconds: float
    window_seconds: float
    lanes: tuple[Lane, ...]


def tasks_of(graph: Graph, plan: Plan, events: EventGraph) -> tuple[DrawnTask, ...]:
    """The tasks in the graph's order, each reallocation before its call.

    Starts are the plan's own where it has them all, else the earliest that its event graph allows.
    """
    starts = plan.starts if has_starts(plan) else earliest_starts(events, plan.period_seconds)
    return started_tasks(graph, plan, starts, events.seconds)


def has_starts(plan: Plan) -> bool:
    """True where the plan says itself when each call starts."""
    return plan.starts.keys() >= plan.allocations.keys()


def started_tasks(
    graph: Graph, plan: Plan, starts: Mapping[str, float], seconds: Mapping[str, float]
) -> tuple[DrawnTask, ...]:
    """The tasks with these starts of step 0, by call and reallocation node. seconds: of reallocations, by node."""
    moved = reallocations(graph, plan.allocations)
    tasks: list[DrawnTask] = []
    for name in (name for name in graph.calls if name in plan.allocations):
        own = frozenset(plan.allocations[name].layout.mesh.devices)
        node = reallocation_node(name)
        taken = seconds.get(node, 0.0)
        if name in moved and taken > 0 and node in starts:
            ordered = frozenset(device for device, turns in plan.orders.items() if any(t.call == node for t in turns))
            tasks.append(DrawnTask(node, "reallocate", taken, starts[node], ordered or own))
        tasks.append(DrawnTask(name, kind_of(graph, name), plan.allocations[name].seconds, starts[name], own))
    return tuple(tasks)


def kind_of(graph: Graph, call: str) -> Kind:
    """The kind of a call."""
    match graph.calls[call]:
        case Generate():
            return "generate"
        case Inference():
            return "inference"
        case Train():
            return "train"
        case Function() | Advantage():
            return "other"


def timeline(tasks: tuple[DrawnTask, ...], period: float, critical: Collection[str], n_devices: int) -> Timeline:
    """Two periods, lane by lane, the lanes in the order of their first devices. critical: names of tasks."""
    origin = min((task.start for task in tasks if task.kind != "reallocate"), default=0.0)
    lanes: list[Lane] = []
    for devices, members in _groups(tasks, n_devices).items():
        busy = sum(task.seconds for task in members)
        bars = sorted(
            (bar for task in _pieces(members, period) for bar in _bars(task, origin, period, task.name in critical)),
            key=lambda bar: (bar.start, bar.end),
        )
        idle = min(1.0, max(0.0, 1 - busy / period)) if period > 0 else 0.0
        lanes.append(Lane(devices, tuple(bars), busy, idle))
    return Timeline(period, SHOWN_PERIODS * period, tuple(sorted(lanes, key=lambda lane: lane.devices)))


def _groups(tasks: tuple[DrawnTask, ...], n_devices: int) -> Mapping[tuple[int, ...], tuple[DrawnTask, ...]]:
    """Devices that serve the same tasks (and so, in one schedule, in the same order) -> those tasks."""
    served: dict[tuple[DrawnTask, ...], list[int]] = {}
    for device in range(n_devices):
        served.setdefault(tuple(task for task in tasks if device in task.devices), []).append(device)
    return {tuple(devices): members for members, devices in served.items()}


def _pieces(tasks: tuple[DrawnTask, ...], period: float) -> Iterator[DrawnTask]:
    """The tasks of a lane, generation in pieces: a stream stands still while others have its devices."""
    others = [task for task in tasks if task.kind != "generate"]
    for task in tasks:
        if task.kind != "generate" or period <= 0:
            yield task
            continue
        phases = [((other.start - task.start) % period, other.seconds) for other in others]
        at, left = 0.0, task.seconds
        for start, seconds in sorted((phase + shift, seconds) for phase, seconds in phases for shift in (-period, 0.0)):
            piece = min(left, start - at)
            if piece > ROUNDING_FRACTION * period:
                yield replace(task, start=task.start + at, seconds=piece)
                left -= piece
            at = max(at, start + seconds)
        if left > ROUNDING_FRACTION * period:
            yield replace(task, start=task.start + at, seconds=left)


def _bars(task: DrawnTask, origin: float, period: float, critical: bool) -> Iterator[Bar]:
    """Every instance that meets the window, the earliest first."""
    if period <= 0 or task.seconds <= 0:
        return
    window, first = SHOWN_PERIODS * period, task.start - origin
    step = -int((first + task.seconds) // period) - 1
    while (start := first + step * period) < window * (1 - ROUNDING_FRACTION):
        end = start + task.seconds
        if end > window * ROUNDING_FRACTION:
            yield Bar(task.name, task.kind, step, max(0.0, start), min(window, end), critical)
        step += 1


# --- the event graph --------------------------------------------------------------------------------------------------


def earliest_starts(events: EventGraph, period: float) -> dict[str, float]:
    """The least starts >= 0 of step 0 under a feasible period: longest paths with seconds - period x distance.

    Bellman-Ford; circuits of weight 0 (the critical ones) may round upwards, so it ends after n rounds at the latest.
    """
    starts = dict.fromkeys(events.seconds, 0.0)
    tolerance = ROUNDING_FRACTION * max(period, 1e-9)
    for _ in range(len(starts)):
        changed = False
        for dependency in events.dependencies:
            reached = starts[dependency.source] + _weight(events, dependency, period)
            if reached > starts[dependency.target] + tolerance:
                starts[dependency.target], changed = reached, True
        if not changed:
            break
    return starts


def slacks(events: EventGraph, period: float) -> dict[str, float]:
    """Seconds that each node could take longer, alone, before the period grows; 0 on a critical circuit.

    A node on a circuit of total distance h and s seconds has h x period - s left; the least over its circuits, by all
    longest paths (Floyd-Warshall; a graph has a few dozen nodes).
    """
    nodes = list(events.seconds)
    rank = {name: i for i, name in enumerate(nodes)}
    longest = [[float("-inf")] * len(nodes) for _ in nodes]
    for dependency in events.dependencies:
        source, target = rank[dependency.source], rank[dependency.target]
        longest[source][target] = max(longest[source][target], _weight(events, dependency, period))
    for middle in range(len(nodes)):
        onward = longest[middle]
        for row in longest:
            head = row[middle]
            if head > float("-inf"):
                for column, tail in enumerate(onward):
                    if head + tail > row[column]:
                        row[column] = head + tail
    left = {name: max(0.0, -longest[i][i]) for i, name in enumerate(nodes)}
    for names in events.loads:
        room = max(0.0, period - sum(events.seconds[name] for name in names))
        left |= {name: min(left[name], room) for name in names}
    return left


def circuit_parts(events: EventGraph, circuit: Sequence[str], period: float) -> tuple[tuple[float, ...], int]:
    """Seconds of each node of a circuit, with the delay of its outputs, and the distance of the whole circuit.

    Of several dependencies between two nodes, the one that binds most under this period.
    """
    if tuple(circuit) in events.loads:
        return tuple(events.seconds[name] for name in circuit), 1
    seconds: list[float] = []
    distance = 0
    for source, target in zip(circuit, [*circuit[1:], circuit[0]], strict=True):
        between = [d for d in events.dependencies if (d.source, d.target) == (source, target)]
        binding = max(between, key=lambda d: _weight(events, d, period))
        seconds.append(events.seconds[source] + binding.delay)
        distance += binding.distance
    return tuple(seconds), distance


def _weight(events: EventGraph, dependency: Dependency, period: float) -> float:
    return events.seconds[dependency.source] + dependency.delay - period * dependency.distance
