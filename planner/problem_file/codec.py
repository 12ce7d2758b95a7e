"""From a problem file to the search problem, and from what the search found to the answer's JSON. Searches nothing.

A file lists options one by one; here they become the tables of `problem.py`, one for all meshes with equal options.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.graphs.errors import ConfigError
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Turn, reallocation_node
from realgraph.planner.plan.problem import (
    Floats,
    Ints,
    Move,
    OptionTable,
    Precedence,
    SearchProblem,
    SearchTask,
    Solution,
    Stopped,
    Tie,
    Unsolved,
)
from realgraph.planner.problem_file.checks import has_ranks, n_nodes, no_json, problems_of, refusals
from realgraph.planner.problem_file.spec import PROBLEM_FORMAT, CallSpec, OptionSpec, ProblemFile, ReallocationSpec
from realgraph.planner.problem_file.symmetry import symmetric_tree

UNLIMITED_BYTES = 1 << 60
SCOPE = (
    "schedules that repeat each period (1-periodic), calls that hold their meshes for the seconds given, "
    "the meshes and options of the file"
)


class FileProblem(Struct, frozen=True, eq=False):
    """The contents of a file, and the search problem it stands for."""

    spec: ProblemFile
    problem: SearchProblem
    # of every call and number of a mesh, the numbers of the call's options there, in the order of its table
    rows: dict[tuple[str, int], Ints]


def read_problem(text: str | bytes, file: str = "") -> FileProblem:
    """The search problem of a JSON text. Raises ConfigError with all the problems found."""
    try:
        spec = msgspec.json.decode(text, type=ProblemFile)
    except msgspec.ValidationError as error:
        raise ConfigError(refusals(text, error, file)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([no_json(error, file)]) from error
    problems = problems_of(spec, file)
    if problems:
        raise ConfigError(problems)
    return build_problem(spec)


# --- the search problem -----------------------------------------------------------------------------------------------


class OptionColumns(Struct, frozen=True, eq=False):
    """The options of one call as arrays [options]; `layout` has equal numbers for equal layouts of one file."""

    seconds: Floats
    latency: Floats
    resident: Ints
    active: Ints
    shared: Ints
    host: Ints
    layout: Ints

    def table(self, rows: Ints) -> OptionTable:
        return OptionTable(**{name: getattr(self, name)[rows] for name in self.__struct_fields__})


class FileMoves:
    """The search's `move_seconds`, from the matrices of the file."""

    def __init__(
        self, spec: ProblemFile, columns: Mapping[str, OptionColumns], rows: Mapping[tuple[str, int], Ints]
    ) -> None:
        self._entries = {(entry.source, entry.target): entry for entry in spec.reallocations}
        self._seconds = {ends: np.array(entry.seconds, np.float64) for ends, entry in self._entries.items()}
        self._free = {ends: _free(entry, columns) for ends, entry in self._entries.items() if entry.in_place}
        self._rows = rows
        self._known: dict[tuple[str, str, bytes, bytes, bool], Floats] = {}

    def __call__(self, move: Move, source: int, target: int) -> Floats:
        ends = (move.source, move.target)
        here, there = self._rows[move.source, source], self._rows[move.target, target]
        in_place = ends in self._free and source == target
        key = (*ends, here.tobytes(), there.tobytes(), in_place)
        if key not in self._known:
            self._known[key] = self._matrix(ends, (here, there), in_place)
        return self._known[key]

    def _matrix(self, ends: tuple[str, str], rows: tuple[Ints, Ints], in_place: bool) -> Floats:
        given, (here, there) = self._seconds[ends], rows
        if given.ndim == 1:
            matrix = np.broadcast_to(given[there], (len(here), len(there))).copy()
        else:
            matrix = given[np.ix_(here, there)]
        if in_place:
            matrix[self._free[ends][np.ix_(here, there)]] = 0.0
        return matrix


def _free(entry: ReallocationSpec, columns: Mapping[str, OptionColumns]) -> npt.NDArray[np.bool_]:
    """[options of the source, options of the target]: what takes no time on one mesh."""
    left, right = columns[entry.source].layout, columns[entry.target].layout
    if isinstance(entry.in_place, bool):
        return np.equal.outer(left, right)
    free = np.zeros((len(left), len(right)), np.bool_)
    for target, sources in enumerate(entry.in_place):
        free[list(sources), target] = True
    return free


def _by_layout(spec: ProblemFile, entry: ReallocationSpec, columns: Mapping[str, OptionColumns]) -> bool:
    """True where options of equal layouts on one mesh have equal seconds, at both ends."""
    matrix = np.atleast_2d(np.array(entry.seconds, np.float64))
    free = _free(entry, columns) if entry.in_place else np.zeros((1, 1), np.bool_)
    calls = {call.name: call for call in spec.calls}
    for end, name in enumerate((entry.source, entry.target)):
        seen: dict[tuple[int, DeviceMesh], int] = {}
        for i, option in enumerate(calls[name].options):
            for mesh in meshes_of(option):
                other = seen.setdefault((int(columns[name].layout[i]), mesh), i)
                for seconds in (matrix, free):
                    last = seconds.shape[end] - 1
                    if (seconds.take(min(i, last), end) != seconds.take(min(other, last), end)).any():
                        return False
    return True


def build_problem(spec: ProblemFile) -> FileProblem:
    """The search problem of a file without mistakes."""
    meshes = sorted({mesh for call in spec.calls for option in call.options for mesh in meshes_of(option)})
    number = {mesh: i for i, mesh in enumerate(meshes)}
    layouts: dict[tuple[object, ...], int] = {}
    columns = {call.name: _columns(call, layouts) for call in spec.calls}
    rows = {(call.name, number[mesh]): np.array(here) for call in spec.calls for mesh, here in _by_mesh(call).items()}
    tables: list[OptionTable] = []
    known: dict[tuple[bytes, ...], int] = {}
    tasks = []
    for call in spec.calls:
        numbers: dict[int, int] = {}
        for mesh in sorted(_by_mesh(call)):
            table = columns[call.name].table(rows[call.name, number[mesh]])
            key = tuple(getattr(table, name).tobytes() for name in table.__struct_fields__)
            if known.setdefault(key, len(tables)) == len(tables):
                tables.append(table)
            numbers[number[mesh]] = known[key]
        tasks.append(SearchTask(call.name, call.role or call.name, call.trains, numbers))
    problem = SearchProblem(
        devices=spec.devices,
        devices_per_node=spec.devices_per_node or spec.devices,
        memory=_bytes(spec.memory, spec.devices),
        host_memory=_bytes(UNLIMITED_BYTES if spec.host_memory is None else spec.host_memory, n_nodes(spec)),
        meshes=tuple(meshes),
        tables=tuple(tables),
        tasks=tuple(tasks),
        precedences=tuple(Precedence(e.source, e.target, e.distance, e.delay) for e in spec.edges),
        moves=tuple(Move(entry.source, entry.target, entry.distance) for entry in spec.reallocations),
        move_seconds=FileMoves(spec, columns, rows),
        floor_seconds=spec.floor_seconds,
        ties=tuple(Tie(tie.calls, tie.layout) for tie in spec.ties),
        longest_move_seconds=max((float(np.max(entry.seconds)) for entry in spec.reallocations), default=0.0),
        moves_by_layout=all(_by_layout(spec, entry, columns) for entry in spec.reallocations),
    )
    problem = msgspec.structs.replace(problem, tree=symmetric_tree(problem, rows))
    return FileProblem(spec, problem, rows)


def meshes_of(option: OptionSpec) -> tuple[DeviceMesh, ...]:
    """The meshes on which an option stands."""
    return tuple(DeviceMesh(*mesh) for mesh in option.meshes or (option.mesh,) if mesh is not None)


def _by_mesh(call: CallSpec) -> dict[DeviceMesh, list[int]]:
    rows: dict[DeviceMesh, list[int]] = {}
    for i, option in enumerate(call.options):
        for mesh in meshes_of(option):
            rows.setdefault(mesh, []).append(i)
    return rows


def _columns(call: CallSpec, layouts: dict[tuple[object, ...], int]) -> OptionColumns:
    """layouts: layout -> its number; new ones are added."""
    options = call.options
    return OptionColumns(
        seconds=np.array([option.seconds for option in options]),
        latency=np.array([max(option.latency, option.seconds) for option in options]),
        resident=np.array([round(option.resident) for option in options], np.int64),
        active=np.array([round(option.active) for option in options], np.int64),
        shared=np.array([round(option.shared) for option in options], np.int64),
        host=np.array([round(option.host) for option in options], np.int64),
        layout=np.array(
            [layouts.setdefault(_layout(call, i, option), len(layouts)) for i, option in enumerate(options)], np.int64
        ),
    )


def _layout(call: CallSpec, row: int, option: OptionSpec) -> tuple[object, ...]:
    if not (has_ranks(option) or option.sharding):
        return (call.name, row)
    ranks = (option.dp or 1, option.tp or 1, option.pp or 1, option.ep, option.cp)
    return (*ranks, option.sharding, option.offloaded)


def _bytes(given: float | tuple[float, ...], count: int) -> Ints:
    return np.array([round(one) for one in given] if isinstance(given, tuple) else [round(given)] * count, np.int64)


# --- the answer -------------------------------------------------------------------------------------------------------


class ChosenOption(Struct, frozen=True, omit_defaults=True):
    """The choice of one call: its option's number in the file, counted from 0, the mesh, and the option's numbers
    again."""

    option: int
    mesh: tuple[int, int]
    seconds: float
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int = 1
    cp: int = 1
    note: str = ""


class DeviceOrder(Struct, frozen=True):
    """The order of one round on runs of devices [first, number], in every round the same."""

    devices: tuple[tuple[int, int], ...]
    turns: tuple[Turn, ...]


class ProblemAnswer(Struct, frozen=True):
    """A plan and what is proven of it. Times in seconds; see `problem.Solution`."""

    period: float
    bound: float
    gap: float | None  # period / bound - 1
    choices: dict[str, ChosenOption]
    reallocation_seconds: dict[str, float]
    starts: dict[str, float]
    critical: tuple[str, ...]
    orders: tuple[DeviceOrder, ...]
    seconds: float
    stopped: Stopped
    nodes: int
    scope: str = SCOPE
    name: str = ""
    feasible: Literal[True] = True
    format: int = PROBLEM_FORMAT


class NoAnswer(Struct, frozen=True):
    """No plan: there is none where `proven`, else none was found in time."""

    proven: bool
    reason: str
    bound: float
    seconds: float
    stopped: Stopped
    scope: str = SCOPE
    name: str = ""
    feasible: Literal[False] = False
    format: int = PROBLEM_FORMAT


def solution_json(read: FileProblem, outcome: Solution | Unsolved, turns: Mapping[int, Iterable[Turn]]) -> str:
    """The answer as indented JSON. turns: the order of calls on every device, `evaluate.orders`; empty for Unsolved."""
    return msgspec.json.format(msgspec.json.encode(answer_of(read, outcome, turns)), indent=2).decode() + "\n"


def answer_of(
    read: FileProblem, outcome: Solution | Unsolved, turns: Mapping[int, Iterable[Turn]]
) -> ProblemAnswer | NoAnswer:
    """The answer as data."""
    name = read.spec.name
    if isinstance(outcome, Unsolved):
        return NoAnswer(outcome.proven, outcome.reason, outcome.bound, outcome.seconds, outcome.stopped, name=name)
    return ProblemAnswer(
        period=outcome.period,
        bound=outcome.bound,
        gap=outcome.gap if isfinite(outcome.gap) else None,
        choices={call.name: _chosen(read, call, outcome) for call in read.spec.calls},
        reallocation_seconds=_moved(read.problem, outcome),
        starts=outcome.starts,
        critical=outcome.critical,
        orders=_orders(turns),
        seconds=outcome.seconds,
        stopped=outcome.stopped,
        nodes=outcome.nodes,
        name=name,
    )


def _chosen(read: FileProblem, call: CallSpec, solution: Solution) -> ChosenOption:
    choice = solution.choices[call.name]
    row = int(read.rows[call.name, choice.mesh][choice.option])
    option, mesh = call.options[row], read.problem.meshes[choice.mesh]
    ranks = (option.dp, option.tp, option.pp, option.ep, option.cp)
    return ChosenOption(row, (mesh.first, mesh.n_devices), option.seconds, *ranks, option.note)


def _moved(problem: SearchProblem, solution: Solution) -> dict[str, float]:
    """Call -> seconds of bringing its weights, where that takes time."""
    moved = {}
    for move in problem.moves:
        source, target = solution.choices[move.source], solution.choices[move.target]
        seconds = problem.move_seconds(move, source.mesh, target.mesh)[source.option, target.option]
        if reallocation_node(move.target) in solution.starts:
            moved[move.target] = float(seconds)
    return moved


def _orders(turns: Mapping[int, Iterable[Turn]]) -> tuple[DeviceOrder, ...]:
    """Devices of equal orders together, as runs of consecutive devices."""
    runs: dict[tuple[Turn, ...], list[tuple[int, int]]] = {}
    for device in sorted(turns):
        spans = runs.setdefault(tuple(turns[device]), [])
        if spans and sum(spans[-1]) == device:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((device, 1))
    return tuple(DeviceOrder(tuple(devices), order) for order, devices in runs.items())
