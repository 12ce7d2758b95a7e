"""From a request to the best plan: tables, the search, and the plan with its predictions. Also prices given plans."""

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.plan import Plan
from realgraph.planner.problem import Limits, Solution
from realgraph.planner.request import PlanRequest
from realgraph.planner.search.assembly import events_of as events_of
from realgraph.planner.search.assembly import plan_of, repriced
from realgraph.planner.search.diagnose import Infeasible as Infeasible
from realgraph.planner.search.diagnose import infeasible, unfinished
from realgraph.planner.search.fixed import choices_of, pinned_to
from realgraph.planner.search.streams import streams
from realgraph.planner.solve.solver import evaluate, solve
from realgraph.planner.space.tables import Prepared, problem_of
from realgraph.planner.space.wishes import wish_problems

DEFAULT = Limits()
CAREFUL = 5  # times the gap that is asked for: a plan of streams that is worse than its bound by so much


def search(request: PlanRequest, limits: Limits = DEFAULT) -> Plan:
    """The plan of the least predicted period that was found, with a proven lower bound.

    Raises ConfigError where a pin or constraint is wrong or time ran out before any plan was found, `Infeasible` where
    no plan fits.
    """
    return plan_of(*solved(request, limits))


def solved(request: PlanRequest, limits: Limits = DEFAULT) -> tuple[Prepared, Solution]:
    """The search problem of a request and its solution. Raises as `search` does."""
    problems = wish_problems(request)
    if problems:
        raise ConfigError(problems)
    prepared = problem_of(request)
    if not all(task.tables for task in prepared.problem.tasks):
        raise infeasible(request, limits)
    found = solve(prepared.problem, limits)
    if not isinstance(found, Solution):
        raise infeasible(request, limits) if found.proven else unfinished(found)
    return _streamed(prepared, found, limits) if streams(request) else (prepared, found)


def _streamed(prepared: Prepared, found: Solution, limits: Limits) -> tuple[Prepared, Solution]:
    """With what the bound of a first search says of streams: they wait for periods, which are no shorter.

    And where the plan is still much worse than the bound, the search whose streams pay for every pause they may have:
    it is no bound, but may find the better plan.
    """
    request, least = prepared.request, 0.0
    while found.stopped == "proven" and found.bound > least * (1 + limits.gap / 2):
        least = found.bound
        closer = problem_of(request, least=least)
        again = _further(closer, found, limits)
        if again is None:
            return prepared, found
        prepared, found = closer, again
    if found.stopped != "proven":
        return prepared, found
    plan = plan_of(prepared, found)
    if plan.gap <= CAREFUL * limits.gap:
        return prepared, found
    other = problem_of(request, least=least, careful=True)
    again = _further(other, found, limits)
    if again is None or plan_of(other, again).period_seconds >= plan.period_seconds:
        return prepared, found
    return other, replace(again, bound=found.bound)


def _further(prepared: Prepared, before: Solution, limits: Limits) -> Solution | None:
    """The solution in what is left of the time, with all seconds that were spent; None where none was proven."""
    found = solve(prepared.problem, replace(limits, seconds=max(0.0, limits.seconds - before.seconds)))
    if not isinstance(found, Solution) or found.stopped != "proven":
        return None
    return replace(found, seconds=before.seconds + found.seconds)


def reprice(request: PlanRequest, plan: Plan) -> Plan:
    """An edited plan with every prediction computed anew; its orders stay. The plan must be valid: see `validate`.

    The lower bound is the least period of the same allocations in any order.
    """
    priced = repriced(request, plan)
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
