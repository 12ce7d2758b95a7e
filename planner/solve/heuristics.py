"""Places that people choose by hand: where the search begins, and what its plans are held against."""

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import SearchProblem


def one_mesh(problem: SearchProblem) -> int | None:
    """The number of the largest mesh that every task may lie on."""
    common = set.intersection(*(set(task.tables) for task in problem.tasks)) if problem.tasks else set()
    return max(common, key=lambda number: (problem.meshes[number].n_devices, -number), default=None)


def together(problem: SearchProblem) -> dict[str, int] | None:
    """Every task on all devices; None where no mesh has all tasks."""
    whole = one_mesh(problem)
    return None if whole is None else {task.name: whole for task in problem.tasks}


def real_heuristic(problem: SearchProblem) -> dict[str, int] | None:
    """ReaL's heuristic plan: generation and the first frozen inference on all devices; train calls split the nodes by
    their work; the other inference calls take the first and the second half in turn. None where no mesh has all tasks.
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
    return places


def _split(problem: SearchProblem, whole: int, work: tuple[float, float]) -> tuple[int, int]:
    """Two meshes side by side that fill `whole`, nearly in proportion to their work; else `whole` twice."""
    all_of = problem.meshes[whole]
    share = work[0] / sum(work) if sum(work) > 0 else 0.5
    number = {mesh: i for i, mesh in enumerate(problem.meshes)}
    best, pair = float("inf"), (whole, whole)
    for i, mesh in enumerate(problem.meshes):
        rest = number.get(DeviceMesh(mesh.first + mesh.n_devices, all_of.n_devices - mesh.n_devices))
        off = abs(mesh.n_devices / all_of.n_devices - share)
        if mesh.first == all_of.first and rest is not None and off < best:
            best, pair = off, (i, rest)
    return pair
