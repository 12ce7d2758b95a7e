"""The shortage of a problem without a plan: the fewest calls that can't lie on the devices together, and what they
lack."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.plan.problem import Limits, OptionTable, SearchProblem, Solution
from realgraph.planner.solve.solver import solve

ANY_PLAN_GAP = 1e9  # relative gap: the first plan that fits will do
QUESTION_SECONDS = 1.0  # of one question
HALVING_STEPS = 24  # of halving towards the bytes that are missing
BYTES_TOLERANCE = 1e-3  # relative: how exact they are

What = Literal["memory", "host_memory", "places"]
Fits = Callable[[SearchProblem], bool]


class Shortage(Struct, frozen=True):
    """Calls that lack memory, or a common place, together."""

    calls: tuple[str, ...]  # names, none of which can be left out
    roles: tuple[str, ...]  # of these calls
    what: What  # the devices' memory, the nodes', or that ties leave no common place
    missing: int = 0  # bytes that each device, or node, would need more, exact to `BYTES_TOLERANCE`

    @property
    def text(self) -> str:
        """In words."""
        named = [
            f"{call!r}" + (f" (role {role!r})" if role != call else "")
            for call, role in zip(self.calls, self.roles, strict=True)
        ]
        together = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
        if self.what == "places":
            return f"{together} have no mesh and layout in common, as ties ask"
        where = "device" if self.what == "memory" else "node"
        verb = "do not fit together" if len(named) > 1 else "does not fit"
        gigabytes = self.missing / 1e9
        shown = f"{gigabytes:,.1f} GB" if gigabytes >= 0.05 else f"{self.missing:,} bytes"
        return f"{together} {verb}: {shown} are missing on a {where}, whatever options are chosen"


def shortage(problem: SearchProblem, limits: Limits) -> Shortage | None:
    """The shortage of a problem without a plan; None where the time did not last to tell."""
    quick = replace(
        limits, gap=ANY_PLAN_GAP, seconds=min(limits.seconds, QUESTION_SECONDS), progress=lambda period, bound: None
    )
    undecided = False

    def fits(asked: SearchProblem) -> bool:
        nonlocal undecided
        outcome = solve(asked, quick)
        undecided |= not isinstance(outcome, Solution) and not outcome.proven
        return isinstance(outcome, Solution)

    kept = [task.name for task in problem.tasks]
    for name in list(kept):
        fewer = [other for other in kept if other != name]
        if fewer and not fits(_of(problem, fewer)):
            kept = fewer
    least = _of(problem, kept)
    if undecided or fits(least):
        return None
    what, missing = _missing(least, fits)
    roles = {task.name: task.role for task in problem.tasks}
    return None if undecided else Shortage(tuple(kept), tuple(roles[name] for name in kept), what, missing)


def _of(problem: SearchProblem, names: Sequence[str]) -> SearchProblem:
    """The problem of some of its calls, which needs no more memory than they do beside the others.

    Where the train call of a role is left out, its other calls need no more than beside it.
    """
    tasks = [task for task in problem.tasks if task.name in names]
    trained = {task.role for task in tasks if task.trains}
    lost = {task.role for task in problem.tasks if task.trains} - trained
    tables = list(problem.tables)
    placed = []
    for task in tasks:
        if task.role in lost:
            numbers = {}
            for mesh, table in task.tables.items():
                numbers[mesh] = len(tables)
                tables.append(_sparing(problem.tables[table]))
            task = replace(task, tables=numbers)
        placed.append(task)
    ties = [replace(tie, tasks=tuple(name for name in tie.tasks if name in names)) for tie in problem.ties]
    return replace(
        problem,
        tables=tuple(tables),
        tasks=tuple(placed),
        precedences=(),
        moves=(),
        ties=tuple(tie for tie in ties if len(tie.tasks) > 1),
        tree=None,
    )


def _sparing(table: OptionTable) -> OptionTable:
    """With what a trained copy beside it saves."""
    return replace(table, active=table.active - table.shared, shared=np.zeros_like(table.shared))


def _missing(problem: SearchProblem, fits: Fits) -> tuple[What, int]:
    """The resource that the calls lack, and how many bytes of it."""
    most = max(int(table.resident.max() + table.active.max()) for table in problem.tables) * len(problem.tasks)
    host = max(int(table.host.max()) for table in problem.tables) * len(problem.tasks) * problem.devices

    def roomier(memory: int, host_memory: int = 0) -> SearchProblem:
        return replace(problem, memory=problem.memory + memory, host_memory=problem.host_memory + host_memory)

    if fits(roomier(most)):
        return "memory", _least(lambda more: fits(roomier(more)), most)
    if fits(roomier(most, host)):
        return "host_memory", _least(lambda more: fits(roomier(most, more)), host)
    return "places", 0


def _least(enough: Callable[[int], bool], most: int) -> int:
    """The least number that is enough, nearly; `most` is."""
    low, high = 0, most
    for _ in range(HALVING_STEPS):
        if high - low <= max(1, int(BYTES_TOLERANCE * high)):
            break
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
