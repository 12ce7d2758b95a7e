"""From a request to the best plan: tables, the search, and the plan with its predictions. Also prices given plans."""

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.plan import Plan
from realgraph.planner.problem import Limits, Solution
from realgraph.planner.request import PlanRequest, at_staleness, kept_by
from realgraph.planner.search.assembly import events_of as events_of
from realgraph.planner.search.assembly import plan_of, repriced
from realgraph.planner.search.diagnose import Infeasible as Infeasible
from realgraph.planner.search.diagnose import infeasible, unfinished
from realgraph.planner.search.fixed import choices_of, pinned_to
from realgraph.planner.search.streams import streams
from realgraph.planner.solve.solver import evaluate, solve
from realgraph.planner.space.tables import Known, Prepared, problem_of
from realgraph.planner.space.wishes import wish_problems

DEFAULT = Limits()
FAR = 0.01  # of a gap: a plan of streams that is worse than its bound by more is tried in other ways
FEWER = (4, 2, 1)  # less staleness that is tried


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
    known = Known()
    prepared = problem_of(request, known=known)
    if not all(task.tables for task in prepared.problem.tasks):
        raise infeasible(request, limits)
    found = solve(prepared.problem, limits)
    if not isinstance(found, Solution):
        raise infeasible(request, limits) if found.proven else unfinished(found)
    return _streamed((prepared, found), limits, known) if streams(request) else (prepared, found)


class _Streamed(Struct, frozen=True):
    """A plan of streams and what it comes from."""

    prepared: Prepared
    solution: Solution
    plan: Plan


def _streamed(first: tuple[Prepared, Solution], limits: Limits, known: Known) -> tuple[Prepared, Solution]:
    """The best plan of streams; where it is much worse than its bound, also of those under less staleness.

    How much is in flight is no choice of the search: a run admits what its bound lets it, and may pay more for that
    than it gains. The bound allows for less in flight, so it also holds for less staleness; where that has a bound
    above the best plan, so has still less.
    """
    best = _at_its_staleness(*first, limits, known)
    last, request = best.solution, best.prepared.request
    for fewer in FEWER:
        if fewer >= request.workload.staleness or last.stopped != "proven" or best.plan.gap <= max(FAR, limits.gap):
            continue
        other = problem_of(at_staleness(request, fewer), least=last.bound, known=known)
        again = _further(other, last, _until_worse(limits, best.plan.period_seconds))
        if again is None:
            break
        tried = _at_its_staleness(other, again, limits, known)
        last = replace(tried.solution, bound=min(last.bound, again.bound))
        if tried.plan.period_seconds <= best.plan.period_seconds:
            best = tried
    return best.prepared, replace(best.solution, bound=last.bound, seconds=last.seconds)


def _at_its_staleness(prepared: Prepared, found: Solution, limits: Limits, known: Known) -> _Streamed:
    """With what the bound of a first search says of streams: they wait for periods, which are no shorter.

    And where the plan is still much worse than the bound, the search whose streams pay for every pause they may have:
    it is no bound, but may find the better plan.
    """
    request, least = prepared.request, 0.0
    while found.stopped == "proven" and found.bound > least * (1 + limits.gap / 2):
        least = found.bound
        closer = problem_of(request, least=least, known=known)
        again = _further(closer, found, limits)
        if again is None:
            return _Streamed(prepared, found, plan_of(prepared, found))
        prepared, found = closer, again
    plan = plan_of(prepared, found)
    if found.stopped != "proven" or plan.gap <= max(FAR, limits.gap):
        return _Streamed(prepared, found, plan)
    other = problem_of(request, least=least, careful=True, known=known)
    again = _further(other, found, limits)
    if again is None:
        return _Streamed(prepared, found, plan)
    last = replace(again, bound=found.bound)
    tried = plan_of(other, last)
    if tried.period_seconds < plan.period_seconds:
        return _Streamed(other, last, tried)
    return _Streamed(prepared, replace(found, seconds=last.seconds), plan)


def _until_worse(limits: Limits, period: float) -> Limits:
    """Limits of a search that ends, unproven, as soon as its bound says that it finds nothing better than `period`."""
    proven = [0.0]

    def progress(_: float, bound: float) -> None:
        proven[0] = max(proven[0], bound)

    return replace(limits, stop=lambda: limits.stop() or proven[0] >= period, progress=progress)


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
    request = kept_by(request, plan)
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
