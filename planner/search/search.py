"""From a request to the best plan: tables, the search, and the plan with its predictions. Also prices given plans."""

from collections.abc import Sequence

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.feasibility.diagnose import Infeasible as Infeasible
from realgraph.planner.feasibility.diagnose import infeasible, unfinished
from realgraph.planner.options.constraints import constraint_problems
from realgraph.planner.options.tables import Known, PreparedProblem, problem_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits, Solution, Unsolved
from realgraph.planner.request.request import PlanRequest, hashes, kept_by
from realgraph.planner.search.assembly import events_of as events_of
from realgraph.planner.search.assembly import plan_of, repriced
from realgraph.planner.search.baselines import best_of_rules
from realgraph.planner.search.fixed import choices_of, pinned_to
from realgraph.planner.search.levels import RETRIED_GAP, best_level, levels_up_to
from realgraph.planner.search.streams import streams
from realgraph.planner.solve.solver import evaluate, solve

DEFAULT_LIMITS = Limits()


def search(request: PlanRequest, limits: Limits = DEFAULT_LIMITS, levels: Sequence[int] = ()) -> Plan:
    """The plan of the least predicted period that was found, with a proven lower bound.

    levels: of staleness, among which it is the best; by default all up to the request's.
    Raises ConfigError where a pin or constraint is wrong or time ran out before any plan was found, `Infeasible` where
    no plan fits.
    """
    return plan_of(*solved(request, limits, levels))


def solved(
    request: PlanRequest, limits: Limits = DEFAULT_LIMITS, levels: Sequence[int] = ()
) -> tuple[PreparedProblem, Solution]:
    """The search problem of a request and its solution. Raises as `search` does."""
    problems = constraint_problems(request)
    if problems:
        raise ConfigError(problems)
    if streams(request):
        return _leveled(request, limits, levels or levels_up_to(request.workload.staleness))
    prepared = problem_of(request)
    if not all(task.tables for task in prepared.problem.tasks):
        raise infeasible(request, limits)
    solution = solve(prepared.problem, limits)
    if not isinstance(solution, Solution):
        raise infeasible(request, limits) if solution.proven else unfinished(solution)
    if solution.stopped == "time limit":
        return best_of_rules(prepared, solution)
    return prepared, solution


def _leveled(request: PlanRequest, limits: Limits, levels: Sequence[int]) -> tuple[PreparedProblem, Solution]:
    """The best plan of these levels of staleness."""
    level = best_level(request, limits, Known(), levels)
    if level.best is None:
        if level.stopped == "proven":
            raise infeasible(request, limits)
        raise unfinished(Unsolved(False, "no plan was found in time", level.stopped, level.seconds, level.bound))
    plan, stopped = level.best.plan, level.stopped
    if stopped == "proven" and plan.period_seconds > level.bound * (1 + max(RETRIED_GAP, limits.gap)):
        stopped = "exhausted"  # of the plan's own period, which the tables of streams only bound
    solution = replace(
        level.best.solution, bound=level.bound, stopped=stopped, seconds=level.seconds, nodes=level.nodes
    )
    return level.best.prepared, solution


def reprice(request: PlanRequest, plan: Plan) -> Plan:
    """An edited plan with every prediction computed anew; its orders stay. The plan must be valid: see `validate`.

    The lower bound is the least period of the same allocations in any order.
    """
    request = kept_by(request, plan)
    priced = replace(repriced(request, plan), exact_seconds=0.0, simplified=())
    if plan.hashes.costs and not hashes(request).costs:  # other tables than the plan's bound nothing of it
        bound = min(max(_loads(priced).values(), default=0.0), priced.period_seconds)
        return replace(priced, lower_bound_seconds=bound, scope="any order of the allocations given")
    prepared = problem_of(pinned_to(request, priced))
    choices = choices_of(prepared, priced)
    schedule = evaluate(prepared.problem, choices) if choices is not None else None
    bound = priced.period_seconds if schedule is None else min(schedule.period, priced.period_seconds)
    if schedule is None:
        bound = max(_loads(priced).values(), default=0.0)
    return replace(priced, lower_bound_seconds=bound, scope="any order of the allocations given")


def _loads(plan: Plan) -> dict[int, float]:
    """Device -> seconds of its calls in a step."""
    return {
        device: sum(plan.allocations[turn.call].seconds for turn in order if turn.call in plan.allocations)
        for device, order in plan.orders.items()
    }
