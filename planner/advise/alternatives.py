"""The alternatives to one call's option in a plan, everything else left as it is, and why each loses."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.feasibility.diagnose import shown_bytes
from realgraph.planner.options.tables import PreparedProblem, problem_of
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Choice
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.assembly import option_of
from realgraph.planner.search.fixed import choices_of, pinned_to
from realgraph.planner.solve.memory import device_excess, layout_of
from realgraph.planner.solve.solver import evaluate

MOST_LAYOUTS = 8  # that are shown on the call's own mesh
MOST_SIZES = 6  # of meshes of other sizes or places, each with its best layout
MOST_TRIED = 200  # of which the exact period is found


class Alternative(Struct, frozen=True):
    """One other way to run a call beside the rest of the plan."""

    option: CallOption
    seconds: float
    period_seconds: float | None  # of the whole plan with it, None where it does not fit
    reason: str  # why not, or what it costs


def alternatives(request: PlanRequest, plan: Plan, call: str) -> tuple[Alternative, ...]:
    """The next-best options of one call beside the plan's other allocations, the best first.

    On its own mesh each other layout, on every other size of mesh its best. Raises ValueError for a call without mesh.
    """
    if call not in plan.allocations:
        raise ValueError(f"{call!r} has no allocation")
    prepared = problem_of(pinned_to(request, plan, but=call), whole=call)
    chosen = choices_of(prepared, plan)
    if chosen is None:
        return ()
    ranked = [_judged(prepared, {**chosen, call: choice}, call, plan) for choice in _tried(prepared, chosen, call)]
    ranked.sort(key=lambda one: (one.period_seconds is None, one.period_seconds or one.seconds, one.seconds))
    return tuple(_distinct(ranked, plan.allocations[call].layout.mesh))


def _tried(prepared: PreparedProblem, chosen: dict[str, Choice], call: str) -> list[Choice]:
    """The fastest options of each layout on each mesh, the plan's own left out; the plan's mesh first."""
    task = next(task for task in prepared.problem.tasks if task.name == call)
    own = prepared.problem.meshes[chosen[call].mesh]

    def far(mesh: int) -> tuple[bool, int, int]:
        there = prepared.problem.meshes[mesh]
        return (there != own, abs(there.n_devices - own.n_devices), abs(there.first - own.first))

    tried: list[Choice] = []
    seen: dict[int, int] = {}
    for mesh in sorted(task.tables, key=far):
        size = prepared.problem.meshes[mesh].n_devices
        if seen.get(size, 0) >= 2 or len(tried) >= MOST_TRIED:
            continue
        seen[size] = seen.get(size, 0) + 1
        tried += [Choice(mesh, row) for row in _fastest(prepared, task.tables[mesh])]
    return [choice for choice in tried if choice != chosen[call]][:MOST_TRIED]


def _fastest(prepared: PreparedProblem, table: int) -> Iterator[int]:
    """The fastest row of each layout, and the one that takes least memory."""
    rows = prepared.problem.tables[table]
    for layout in np.unique(rows.layout):
        of = np.flatnonzero(rows.layout == layout)
        fast = of[np.argmin(rows.seconds[of])]
        small = of[np.argmin((rows.resident + rows.active)[of])]
        yield int(fast)
        if small != fast:
            yield int(small)


def _judged(prepared: PreparedProblem, choices: dict[str, Choice], call: str, plan: Plan) -> Alternative:
    option = option_of(prepared, call, choices[call])
    mesh = prepared.problem.meshes[choices[call].mesh]
    schedule = evaluate(prepared.problem, choices)
    candidate = option.candidate
    return Alternative(
        option=replace(candidate, layout=replace(candidate.layout, mesh=mesh)),
        seconds=option.seconds,
        period_seconds=None if schedule is None else schedule.period,
        reason=_reason(prepared, choices, call, plan) if schedule is None else "",
    )


def _reason(prepared: PreparedProblem, choices: dict[str, Choice], call: str, plan: Plan) -> str:
    """By how much what does not fit is too large."""
    over = device_excess(prepared.problem, choices)
    device = int(np.argmax(over))
    option = option_of(prepared, call, choices[call])
    if option.candidate.residency == "in_place":
        return "reads the trained copy in place, which lies elsewhere or under another layout"
    tasks = prepared.problem.tasks
    layouts = {task.name: layout_of(prepared.problem, task, choices[task.name]) for task in tasks}
    for tie in prepared.problem.ties:
        unlike = tie.layout and len({layouts[name] for name in tie.tasks}) > 1
        if call in tie.tasks and (unlike or len({choices[name].mesh for name in tie.tasks}) > 1):
            rule = "on one mesh under one layout" if tie.layout else "on one mesh"
            return f"does not fit the rule that {', '.join(tie.tasks)} lie {rule}"
    if over[device] > 0:
        return f"device {device} would lack {shown_bytes(int(over[device]))}"
    return "the memory of a node, where offloaded weights wait, does not fit them all"


def _distinct(ranked: Sequence[Alternative], own: DeviceMesh) -> Iterator[Alternative]:
    """Each layout on the call's own mesh once, with its best; of every other size of mesh the best."""
    seen: set[tuple[object, ...]] = set()
    counts = {True: 0, False: 0}
    for one in ranked:
        layout, here = one.option.layout, one.option.layout.mesh == own
        key = (here, *layout.axes) if here else (here, layout.mesh.n_devices)
        if key in seen or counts[here] >= (MOST_LAYOUTS if here else MOST_SIZES):
            continue
        seen.add(key)
        counts[here] += 1
        yield one
