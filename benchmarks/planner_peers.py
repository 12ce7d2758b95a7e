"""The search that HybridFlow describes, on our own problems and costs; ReaL's is in planner_chain.py.

Written from the paper, not from anyone's code: Algorithm 1 of HybridFlow (Sheng et al. 2024, arXiv:2409.19256) tries
all ways to put models together on disjoint meshes, each set of models with the fastest options that fit there, and
takes the one with the least sum over stages of the slowest mesh. The best few by that estimate are timed by our exact
evaluator, which can only help it.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.plan.problem import Choice, Limits, SearchProblem, SearchTask, Solution
from realgraph.planner.solve.solver import evaluate, solve

RETIMED = 12  # best plans of a peer that the exact evaluator times
GAP = 1e-6  # relative: of the fastest options of models that share a mesh


class PeerPlan(Struct, frozen=True):
    """The plan that a peer found."""

    period: float  # exact, inf where it found nothing that fits
    seconds: float
    tried: int  # placements or proposals


# --- HybridFlow, Algorithm 1 ------------------------------------------------------------------------------------------


class Group(Struct, frozen=True):
    """Roles together on one mesh: their fastest choices that fit there, and the seconds of each stage."""

    choices: dict[str, Choice]
    stages: tuple[float, float, float]


def mapped(problem: SearchProblem) -> PeerPlan:
    """The best of all placements of models on disjoint meshes, by the paper's estimate."""
    began = time.process_time()
    roles = list(dict.fromkeys(task.role for task in problem.tasks))
    sizes = sorted({mesh.n_devices for mesh in problem.meshes})
    known: dict[tuple[tuple[str, ...], int], Group | None] = {}
    found: list[tuple[float, int, tuple[tuple[tuple[str, ...], int], ...]]] = []
    tried = 0
    for sets in partitions(roles):
        for shares in product(sizes, repeat=len(sets)):
            if sum(shares) > problem.devices:
                continue
            tried += 1
            placed = tuple(zip(sets, shares, strict=True))
            for key in placed:
                if key not in known:
                    known[key] = _group(problem, *key)
            groups = [known[key] for key in placed]
            stages = [[group.stages[stage] for group in groups if group] for stage in range(3)]
            if all(groups):
                found.append((sum(map(max, stages)), tried, placed))
    best, timed = float("inf"), 0
    for _, _, placed in sorted(found):
        meshes = _packed(problem, [size for _, size in placed])
        if meshes is None:
            continue
        choices = {}
        for key, mesh in zip(placed, meshes, strict=True):
            group = known[key]
            assert group is not None
            choices |= {name: Choice(mesh, choice.option) for name, choice in group.choices.items()}
        schedule = evaluate(problem, choices)
        if schedule is not None:
            best, timed = min(best, schedule.period), timed + 1
        if timed >= RETIMED:
            break
    return PeerPlan(best, time.process_time() - began, tried)


def partitions(items: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """All partitions into sets."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [(items[0],), *rest]
        for i, some in enumerate(rest):
            yield [*rest[:i], (items[0], *some), *rest[i + 1 :]]


def stage_of(problem: SearchProblem, task: SearchTask) -> int:
    """0: generation, 1: preparation, 2: learning."""
    waits = any(p.target == task.name and p.distance == 0 for p in problem.precedences)
    return 2 if task.trains else int(waits)


def _group(problem: SearchProblem, roles: tuple[str, ...], size: int) -> Group | None:
    """None where these roles don't fit on a mesh of this size."""
    mesh = next(i for i, one in enumerate(problem.meshes) if one.n_devices == size)
    tasks = tuple(task for task in problem.tasks if task.role in roles)
    if any(mesh not in task.tables for task in tasks):
        return None
    names = {task.name for task in tasks}
    part = replace(
        problem,
        tasks=tuple(replace(task, tables={mesh: task.tables[mesh]}) for task in tasks),
        precedences=tuple(p for p in problem.precedences if p.source in names and p.target in names),
        moves=tuple(m for m in problem.moves if m.source in names and m.target in names),
        ties=(),
        tree=None,
    )
    found = solve(part, Limits(gap=GAP))
    if not isinstance(found, Solution):
        return None
    stages = [0.0, 0.0, 0.0]
    for task in tasks:
        stages[stage_of(problem, task)] += problem.tables[task.tables[mesh]].seconds[found.choices[task.name].option]
    return Group(found.choices, (stages[0], stages[1], stages[2]))


def _packed(problem: SearchProblem, sizes: Sequence[int]) -> list[int] | None:
    """Disjoint meshes of these sizes, the largest placed first; None where they don't lie side by side."""
    taken: list[int] = []
    found: dict[int, int] = {}
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        free = (
            i
            for i, mesh in enumerate(problem.meshes)
            if mesh.n_devices == sizes[place] and not any(mesh.overlaps(problem.meshes[other]) for other in taken)
        )
        mesh = next(free, None)
        if mesh is None:
            return None
        taken.append(mesh)
        found[place] = mesh
    return [found[i] for i in range(len(sizes))]
