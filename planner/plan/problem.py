"""The planning problem: tasks with tables of options on meshes, precedences, moves of weights, memory limits.

It knows no model and no device: `options/tables.py` makes it from a PlanRequest, `problem_file/codec.py` from a user's
JSON, and the search reads nothing else. Seconds, bytes per device. One period repeats for ever: see `events.py`.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.plan.layout import DeviceMesh

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class OptionTable(Struct, frozen=True, eq=False):
    """The ways to run one task on meshes of one kind: arrays of one length n; bytes are per device of the mesh."""

    seconds: Floats  # for which the task holds its mesh
    # from its start to the end of its outputs, at least `seconds`; longer only where a generate session streams and is
    # paused
    latency: Floats
    resident: Ints  # bytes that lie there all the time
    active: Ints  # further bytes while the task runs
    # the part of `active` that is not needed where the task's role is trained on the same mesh under an equal `layout`
    shared: Ints
    host: Ints  # bytes of the node's memory, all the time
    layout: Ints  # equal numbers stand for equal (dp, tp, pp, ep, cp, sharding), in all tables of a problem

    def __len__(self) -> int:
        return len(self.seconds)


class SearchTask(Struct, frozen=True, eq=False):
    """One mesh-holding call."""

    name: str
    role: str
    trains: bool
    tables: dict[int, int]  # number of a mesh -> number of the option table there; other meshes are barred


class Precedence(Struct, frozen=True):
    """`target` of step k starts at least `delay` after `source` of step k - `distance` has its outputs ready."""

    source: str
    target: str
    distance: int
    delay: float = 0.0  # seconds of the free calls (functions, advantages) and of the data transfer between the two


class Move(Struct, frozen=True):
    """The weights that `source` trained in step k - `distance` are brought to `target` before it runs step k.

    A task of its own that holds both meshes; none where `SearchProblem.move_seconds` is 0.
    """

    source: str
    target: str
    distance: int


class Tie(Struct, frozen=True):
    """Tasks that must lie on one mesh, and where `layout` is true under an equal layout number too."""

    tasks: tuple[str, ...]
    layout: bool = False


class DeviceBlock(Struct, frozen=True):
    """A node of the cluster's tree of devices. Children of equal shape are interchangeable where `symmetric`."""

    first: int
    n_devices: int
    children: tuple["DeviceBlock", ...] = ()
    symmetric: bool = True


class SearchProblem(Struct, frozen=True, eq=False):
    """The problem whose period is minimised. The meshes of tasks that run at one time never overlap.

    Tasks of one frozen role on the same mesh under an equal layout keep one copy: their `resident` counts once.
    """

    devices: int
    devices_per_node: int
    # int64 [devices]; the sum of `resident` over the tasks of a device plus the largest `active` may not pass it
    memory: Ints
    host_memory: Ints  # int64 [nodes], of the sum of `host` over a node's devices
    meshes: tuple[DeviceMesh, ...]
    tables: tuple[OptionTable, ...]
    tasks: tuple[SearchTask, ...]
    precedences: tuple[Precedence, ...]
    moves: tuple[Move, ...]
    # (move, source mesh, target mesh) -> float64 [options of source there, options of target there]
    move_seconds: Callable[[Move, int, int], Floats]
    tree: DeviceBlock | None = None  # of the devices, for symmetry; None where nothing is known to be symmetric
    floor_seconds: float = 0.0  # a period below it is impossible whatever is chosen (free calls, the user's own limits)
    # the user's constraint that calls share a mesh, and the train calls of one role, whose optimizer states lie once
    # (the tables of the second and later ones have no `resident`)
    ties: tuple[Tie, ...] = ()
    longest_move_seconds: float = 0.0  # no move takes longer; 0 where none takes much longer than all tasks together
    moves_by_layout: bool = True  # whether options of equal layouts on one mesh have equal `move_seconds`


class Limits(Struct, frozen=True):
    """Limits of a search: it ends at a proven relative `gap`, after `seconds`, or when `stop()` is true (looked at
    often).

    progress(incumbent period, lower bound) is called at each improvement of either.
    """

    gap: float = 0.002
    seconds: float = 60.0
    seed: int = 0
    stop: Callable[[], bool] = lambda: False
    progress: Callable[[float, float], None] = lambda period, bound: None


class Choice(Struct, frozen=True):
    """The choice of one task: the number of a mesh, and the number of an option in its table there."""

    mesh: int
    option: int


class Schedule(Struct, frozen=True):
    """The least period of fixed choices, starts that reach it (as in `Solution`), and the circuit that bounds it."""

    period: float
    starts: dict[str, float]
    critical: tuple[str, ...]


Stopped = Literal["proven", "time limit", "interrupted", "exhausted"]


class Solution(Struct, frozen=True):
    """The best choices found, a schedule that reaches `period`, and what is proven."""

    choices: dict[str, Choice]
    period: float
    bound: float  # no plan of the problem has a smaller period, given 1-periodic schedules
    # of every task and of every move that takes time (`reallocation_node`), the start of step 0's instance in seconds;
    # step k starts k periods later
    starts: dict[str, float]
    critical: tuple[str, ...]  # the names on the circuit that bounds the period
    stopped: Stopped
    seconds: float
    nodes: int  # of the search tree

    @property
    def gap(self) -> float:
        if self.period <= self.bound:
            return 0.0
        return self.period / self.bound - 1 if self.bound > 0 else float("inf")


class Unsolved(Struct, frozen=True):
    """No plan: proven where `proven`, else none was found in time. `bound`: of any plan there may be."""

    proven: bool
    reason: str
    stopped: Stopped
    seconds: float
    bound: float = 0.0
