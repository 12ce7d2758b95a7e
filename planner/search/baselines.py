"""Plans that people run without a search: made by rules, on the search's own problem and costs. Bounds nothing.

"All devices" are the largest mesh that every call may lie on: in a mixed cluster, devices of one kind.
Every period is the exact one of the rule's choices, so a rule also gains from the best cyclic order of its calls.
symmetric: all calls on all devices, one (tp, pp, ep, cp) for all calls of a role, the best of all such plans.
megatron: symmetric with a node's tensor parallelism and the fewest pipeline stages that fit, as Narayanan et al. 2021
(arXiv:2104.04473, takeaway 1) advise. colocated: all calls on all devices, each with the layout that suits it.
real: the places of ReaL's heuristic plan (arXiv:2406.14088, released as realhf 0.3), with the layouts that suit them.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.options.tables import PreparedProblem
from realgraph.planner.plan.problem import Choice, Limits, Schedule, SearchProblem, Solution, Unsolved
from realgraph.planner.search.assembly import option_of, plan_of
from realgraph.planner.search.streams import streams
from realgraph.planner.search.symmetric import LayoutShape, shaped_plan
from realgraph.planner.search.whole_problem import whole_problem
from realgraph.planner.solve import heuristics
from realgraph.planner.solve.heuristics import one_mesh, together
from realgraph.planner.solve.solver import solve

RULE_LIMITS = Limits(gap=0.002, seconds=5.0)
NODE_RANKS = 8  # of tensor parallelism, where nodes have as many devices


class Baselines(Struct, frozen=True):
    """Each rule's plan; None where it does not fit, or where the problem has no mesh for it."""

    symmetric: "Baseline | None" = None
    colocated: "Baseline | None" = None
    megatron: "Baseline | None" = None
    real: "Baseline | None" = None


class Baseline(Struct, frozen=True):
    """The choices of a rule, and the least period of these choices."""

    choices: dict[str, Choice]
    schedule: Schedule

    @property
    def period(self) -> float:
        return self.schedule.period


def baselines_of(prepared: PreparedProblem, limits: Limits = RULE_LIMITS) -> Baselines:
    """All rules on a request's problem: the symmetric ones on every option there is, the others on the search's own."""
    baselines = {name: _in_steady_state(where, baseline) for name, where, baseline in _rules(prepared, limits)}
    return Baselines(**baselines)


def rule_solutions(prepared: PreparedProblem, limits: Limits = RULE_LIMITS) -> list[tuple[PreparedProblem, Solution]]:
    """Every rule's plan, as the search's answers are: what they prove is nothing."""
    quick = replace(limits, gap=RULE_LIMITS.gap, seconds=min(limits.seconds, RULE_LIMITS.seconds))
    return [(where, _unproven(baseline)) for _, where, baseline in _rules(prepared, quick) if baseline is not None]


def best_of_rules(prepared: PreparedProblem, solution: Solution) -> tuple[PreparedProblem, Solution]:
    """The plan of a search that had no time to end, or the plan of a rule where that is faster."""
    others = rule_solutions(prepared)
    where, best = min(others, key=lambda other: other[1].period, default=(prepared, solution))
    if best.period >= solution.period:
        return prepared, solution
    return where, replace(
        best, bound=solution.bound, stopped=solution.stopped, seconds=solution.seconds, nodes=solution.nodes
    )


def _rules(prepared: PreparedProblem, limits: Limits) -> Iterator[tuple[str, PreparedProblem, "Baseline | None"]]:
    """Each rule's name, the problem that it is on, and what it chooses there."""
    yield "colocated", prepared, colocated(prepared.problem, limits)
    yield "real", prepared, real_heuristic(prepared.problem, limits)
    everything = whole_problem(prepared)
    if everything is not None:
        whole, shapes = everything.prepared, everything.shapes
        yield "symmetric", whole, symmetric(whole.problem, shapes, limits)
        yield "megatron", whole, megatron(whole.problem, shapes, limits)


def _in_steady_state(prepared: PreparedProblem, baseline: "Baseline | None") -> "Baseline | None":
    """With the period that its plan comes to where the tables only bound that: of a stream of generation, or with
    offloaded states that come back early."""
    if baseline is None or not (streams(prepared.request) or _offloads(prepared, baseline)):
        return baseline
    period = plan_of(prepared, _unproven(baseline)).period_seconds
    return replace(baseline, schedule=replace(baseline.schedule, period=period))


def _offloads(prepared: PreparedProblem, baseline: "Baseline") -> bool:
    chosen = (option_of(prepared, name, choice) for name, choice in baseline.choices.items())
    return any(option.candidate.residency == "offloaded" for option in chosen)


def _unproven(baseline: "Baseline") -> Solution:
    schedule = baseline.schedule
    return Solution(baseline.choices, schedule.period, 0.0, schedule.starts, schedule.critical, "exhausted", 0.0, 0)


def symmetric(
    problem: SearchProblem, shapes: Mapping[int, LayoutShape], limits: Limits = RULE_LIMITS
) -> Baseline | None:
    """None where no such plan fits, or no mesh has all tasks. shapes: of every layout number.

    Tables from which slower options were left out may lack the best symmetric plan: see `whole_problem`.
    """
    return _baseline(shaped_plan(problem, shapes, limits))


def megatron(
    problem: SearchProblem, shapes: Mapping[int, LayoutShape], limits: Limits = RULE_LIMITS
) -> Baseline | None:
    """None where it doesn't fit however many stages there are."""
    mesh = one_mesh(problem)
    if mesh is None:
        return None
    offered = {task.role: set(shapes.values()) for task in problem.tasks}
    for task in problem.tasks:
        layouts = problem.tables[task.tables[mesh]].layout
        offered[task.role] &= {shapes[int(number)] for number in layouts}
    plain = {role: {s for s in own if s.cp == 1} for role, own in offered.items()}
    wide = {role: max((s.tp for s in own if s.tp <= NODE_RANKS), default=0) for role, own in plain.items()}
    stages = sorted({s.pp for own in plain.values() for s in own})
    for most in stages:
        wanted = {role: _deepest(own, wide[role], most) for role, own in plain.items()}
        solution = shaped_plan(problem, shapes, limits, wanted)
        if solution is not None:
            return _baseline(solution)
    return None


def _deepest(shapes: Iterable[LayoutShape], tp: int, most: int) -> set[LayoutShape]:
    """The shape with this tensor parallelism with the most stages up to `most`, and experts on as many ranks as that
    leaves."""
    deep = max((shape for shape in shapes if shape.tp == tp and shape.pp <= most), default=None)  # in order of pp, ep
    return set() if deep is None else {deep}


def colocated(problem: SearchProblem, limits: Limits = RULE_LIMITS) -> Baseline | None:
    """None where nothing fits, or no mesh has all tasks."""
    return _at(problem, together(problem), limits)


def real_heuristic(problem: SearchProblem, limits: Limits = RULE_LIMITS) -> Baseline | None:
    """None where no mesh has all tasks, or where that doesn't fit."""
    return _at(problem, heuristics.real_heuristic(problem), limits)


def _at(problem: SearchProblem, places: Mapping[str, int] | None, limits: Limits) -> Baseline | None:
    """The best options with every task on its place."""
    if places is None or any(places[task.name] not in task.tables for task in problem.tasks):
        return None
    tasks = tuple(replace(task, tables={places[task.name]: task.tables[places[task.name]]}) for task in problem.tasks)
    return _baseline(solve(replace(problem, tasks=tasks, tree=None), limits))


def _baseline(outcome: Solution | Unsolved | None) -> Baseline | None:
    if not isinstance(outcome, Solution):
        return None
    return Baseline(outcome.choices, Schedule(outcome.period, outcome.starts, outcome.critical))
