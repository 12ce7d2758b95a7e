"""What people run without a search: plans made by rules, on the search's own problem and costs. Bounds nothing.

Every period is the exact one of the rule's choices, so a rule also gains from the best cyclic order of its calls.
symmetric: all calls on all devices, one (tp, pp, ep, cp) for all calls of a role, the best of all such plans.
megatron: symmetric with a node's tensor parallelism and the fewest pipeline stages that fit, as Narayanan et al. 2021
(arXiv:2104.04473, takeaway 1) advise. colocated: all calls on all devices, each with the layout that suits it.
real: the places of ReaL's heuristic plan (arXiv:2406.14088, released as realhf 0.3), with the layouts that suit them.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.layout import DeviceMesh
from realgraph.planner.problem import Choice, Limits, Schedule, SearchProblem, Solution
from realgraph.planner.search.symmetric import Shape, one_mesh, shaped_choices
from realgraph.planner.search.whole_problem import whole_problem
from realgraph.planner.solve.solver import evaluate, solve
from realgraph.planner.space.tables import Prepared

RULE_LIMITS = Limits(gap=0.002, seconds=5.0)
NODE_RANKS = 8  # of tensor parallelism, where nodes have as many devices


class Baselines(Struct, frozen=True):
    """Each rule's plan; None where it does not fit, or where the problem has no mesh for it."""

    symmetric: "Baseline | None" = None
    colocated: "Baseline | None" = None
    megatron: "Baseline | None" = None
    real: "Baseline | None" = None


class Baseline(Struct, frozen=True):
    """What a rule chose, and the least period of these choices."""

    choices: dict[str, Choice]
    schedule: Schedule

    @property
    def period(self) -> float:
        return self.schedule.period


def baselines_of(prepared: Prepared, limits: Limits = RULE_LIMITS) -> Baselines:
    """All rules on a request's problem: the symmetric ones on every option there is, the others on the search's own."""
    everything = whole_problem(prepared)
    unpruned = () if everything is None else (everything.problem, everything.shapes)
    return Baselines(
        symmetric=symmetric(*unpruned) if unpruned else None,
        colocated=colocated(prepared.problem, limits),
        megatron=megatron(*unpruned) if unpruned else None,
        real=real_heuristic(prepared.problem, limits),
    )


def symmetric(problem: SearchProblem, shapes: Mapping[int, Shape]) -> Baseline | None:
    """None where no such plan fits, or no mesh has all tasks. shapes: of every layout number.

    Tables from which slower options were left out may lack the best symmetric plan: see `whole_problem`.
    """
    return _timed(problem, shaped_choices(problem, shapes))


def megatron(problem: SearchProblem, shapes: Mapping[int, Shape]) -> Baseline | None:
    """None where it doesn't fit however many stages there are."""
    mesh = one_mesh(problem)
    if mesh is None:
        return None
    offered = {task.role: set(shapes.values()) for task in problem.tasks}
    for task in problem.tasks:
        layouts = problem.tables[task.tables[mesh]].layout
        offered[task.role] &= {shapes[int(number)] for number in layouts}
    plain = {role: {s for s in found if s.cp == 1 and s.ep == _experts(found)} for role, found in offered.items()}
    wide = {role: max((s.tp for s in found if s.tp <= NODE_RANKS), default=0) for role, found in plain.items()}
    stages = sorted({s.pp for found in plain.values() for s in found})
    for most in stages:
        wanted = {role: _deepest(found, wide[role], most) for role, found in plain.items()}
        found = shaped_choices(problem, shapes, wanted)
        if found is not None:
            return _timed(problem, found)
    return None


def _deepest(found: Iterable[Shape], tp: int, most: int) -> set[Shape]:
    """Of the shapes with this tensor parallelism those with the most stages up to `most`."""
    stages = max((shape.pp for shape in found if shape.tp == tp and shape.pp <= most), default=0)
    return {shape for shape in found if (shape.tp, shape.pp) == (tp, stages)}


def _experts(found: Iterable[Shape]) -> int:
    """The most expert parallelism on offer: experts are spread before anything else is."""
    return max((shape.ep for shape in found if shape.cp == 1), default=1)


def colocated(problem: SearchProblem, limits: Limits = RULE_LIMITS) -> Baseline | None:
    """None where nothing fits, or no mesh has all tasks."""
    mesh = one_mesh(problem)
    if mesh is None:
        return None
    return _best(problem, {task.name: mesh for task in problem.tasks}, limits)


def real_heuristic(problem: SearchProblem, limits: Limits = RULE_LIMITS) -> Baseline | None:
    """Generation and the first frozen inference on all devices; train calls split the nodes by their work; the other
    inference calls take the first and the second half in turn. None where that doesn't fit.
    """
    whole = one_mesh(problem)
    if whole is None:
        return None
    trained = {task.role for task in problem.tasks if task.trains}
    sources = {task.name for task in problem.tasks} - {p.target for p in problem.precedences if p.distance == 0}
    places: dict[str, int] = {}
    halves = _split(problem, whole, (1.0, 1.0))
    frozen_seen = False
    others = []
    for task in problem.tasks:
        if task.trains:
            continue
        if task.name in sources or (task.role not in trained and not frozen_seen):
            places[task.name] = whole
            frozen_seen = frozen_seen or task.name not in sources
        else:
            others.append(task)
    for i, task in enumerate(others):
        places[task.name] = next((half for half in (halves[i % 2], *halves) if half in task.tables), whole)
    trains = [task for task in problem.tasks if task.trains]
    work = [float(problem.tables[task.tables[whole]].seconds.min()) for task in trains]
    if len(trains) == 2 and trains[0].role != trains[1].role:
        parts = _split(problem, whole, (work[0], work[1]))
        if all(part in task.tables for part, task in zip(parts, trains, strict=True)):
            places |= {task.name: part for part, task in zip(parts, trains, strict=True)}
    for task in trains:
        places.setdefault(task.name, whole)
    return _best(problem, places, limits)


def _split(problem: SearchProblem, whole: int, work: tuple[float, float]) -> tuple[int, int]:
    """Two meshes side by side that fill `whole`, nearly in proportion to their work; else `whole` twice."""
    all_of = problem.meshes[whole]
    share = work[0] / sum(work)
    number = {mesh: i for i, mesh in enumerate(problem.meshes)}
    best, found = float("inf"), (whole, whole)
    for i, mesh in enumerate(problem.meshes):
        rest = number.get(DeviceMesh(mesh.first + mesh.n_devices, all_of.n_devices - mesh.n_devices))
        off = abs(mesh.n_devices / all_of.n_devices - share)
        if mesh.first == all_of.first and rest is not None and off < best:
            best, found = off, (i, rest)
    return found


def _best(problem: SearchProblem, places: Mapping[str, int], limits: Limits) -> Baseline | None:
    """The best options with every task on its place."""
    if any(places[task.name] not in task.tables for task in problem.tasks):
        return None
    tasks = tuple(replace(task, tables={places[task.name]: task.tables[places[task.name]]}) for task in problem.tasks)
    found = solve(replace(problem, tasks=tasks, tree=None), limits)
    return Baseline(found.choices, _schedule(problem, found)) if isinstance(found, Solution) else None


def _schedule(problem: SearchProblem, found: Solution) -> Schedule:
    return Schedule(found.period, found.starts, found.critical)


def _timed(problem: SearchProblem, choices: dict[str, Choice] | None) -> Baseline | None:
    schedule = None if choices is None else evaluate(problem, choices)
    return None if choices is None or schedule is None else Baseline(choices, schedule)
