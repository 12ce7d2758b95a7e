"""Plans of a request that allows staleness: the best of every level of staleness up to its bound, and of the rules.

How much is in flight is no choice of the search: a run admits what its level lets it, and may pay more for that than it
gains. So each level is searched by itself, and a plan keeps to a level that is at most the request's. The levels of a
smaller bound are among those of a larger one, which therefore never has the slower plan.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.options.tables import Known, PreparedProblem, StreamRows, problem_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits, Solution, Stopped, Unsolved
from realgraph.planner.request.request import PlanRequest, at_staleness
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.baselines import rule_solutions
from realgraph.planner.search.streams import streams
from realgraph.planner.search.window import window_of
from realgraph.planner.solve.solver import solve

RETRIED_GAP = 0.01  # of a gap: a plan of streams that is worse than its bound by more is tried in other ways
UNPROVEN_SHARE = 0.25  # of the gap that is asked for: what a search on cut intervals, which are few, leaves unproven
EVERY_LEVEL_STEPS = 16  # steps of staleness: each level up to here is searched, above it half as many again


class Found(Struct, frozen=True):
    """A plan and what it comes from."""

    prepared: PreparedProblem
    solution: Solution
    plan: Plan


class Level(Struct, frozen=True):
    """The result of one level of staleness: the best plan, None where none was found that is better than one known
    before; a bound on all of its plans; and what the searches took, in seconds of their own clock."""

    best: Found | None
    bound: float
    stopped: Stopped
    seconds: float
    nodes: int


def levels_up_to(staleness: int) -> tuple[int, ...]:
    """The levels that are searched, the largest first."""
    levels = list(range(min(staleness, EVERY_LEVEL_STEPS) + 1))
    while levels[-1] + max(1, levels[-1] // 2) <= staleness and levels[-1] >= EVERY_LEVEL_STEPS:
        levels.append(levels[-1] + levels[-1] // 2)
    return tuple(reversed(levels))


def levels_of(request: PlanRequest) -> tuple[int, ...]:
    """The levels that are searched for a request: all up to its own where generation streams, else that alone."""
    staleness = request.workload.staleness
    return levels_up_to(staleness) if streams(request) else (staleness,)


def best_level(
    request: PlanRequest, limits: Limits, known: Known, levels: Sequence[int], below: float = float("inf")
) -> Level:
    """The best of these levels, with a bound that holds for all of them. below: seconds that a plan must take less
    than; each level is searched for no longer than one may."""
    best: Found | None = None
    bounds: list[float] = []
    seconds, nodes = 0.0, 0
    stopped: Stopped = "proven"
    for level in levels:
        left = replace(limits, seconds=max(0.0, limits.seconds - seconds))
        period = below if best is None else best.plan.period_seconds
        searched = _level(problem_of(at_staleness(request, level), known=known), left, known, period)
        seconds, nodes = seconds + searched.seconds, nodes + searched.nodes
        if searched.stopped != "proven":
            stopped = searched.stopped
        bounds.append(searched.bound)
        if searched.best is not None and searched.best.plan.period_seconds < period:
            best = searched.best
    return Level(best, min(bounds), stopped, seconds, nodes)


def _level(prepared: PreparedProblem, limits: Limits, known: Known, known_period: float) -> Level:
    """known_period: that a plan has to be better than; where the bound passes it, nothing better is left."""
    if not all(task.tables for task in prepared.problem.tasks):
        return Level(None, float("inf"), "proven", 0.0, 0)
    solution = solve(prepared.problem, _until_worse(limits, known_period))
    if isinstance(solution, Unsolved):
        bound = float("inf") if solution.proven else solution.bound
        return Level(None, bound, solution.stopped, solution.seconds, 0)
    if solution.bound >= known_period:
        return Level(None, solution.bound, "proven", solution.seconds, solution.nodes)
    first = Found(prepared, solution, plan_of(prepared, solution))
    if not streams(prepared.request):
        return Level(first, solution.bound, solution.stopped, solution.seconds, solution.nodes)
    return _of_streams(first, limits, known, known_period)


def _of_streams(first: Found, limits: Limits, known: Known, known_period: float) -> Level:
    """The best of what the search finds on tables that are a bound and of the rules. Where it is much worse than the
    bound, intervals of streams are cut finer; where it still is, it is also the best of what the search finds on tables
    that are right for plans as slow as that, which bound nothing."""
    tried = [first]
    bound = _bound(tried, first.solution.bound, limits, known, None)
    if bound < known_period:
        for prepared, solution in rule_solutions(tried[-1].prepared, _left(limits, tried)):
            tried.append(Found(prepared, solution, plan_of(prepared, solution)))
        if _is_loose(tried, bound, limits):
            bound = _bound(tried, bound, limits, known, known_period)
        for careful in (False, True):
            if not _is_loose(tried, bound, limits):
                break
            period = _best(tried).plan.period_seconds
            rows = StreamRows(period, careful, window_of(first.prepared, period))
            again, _ = _again(first, rows, _left(limits, tried), known)
            tried += [] if again is None else [again]
    spent = sum(one.solution.seconds for one in tried)
    nodes = sum(one.solution.nodes for one in tried)
    return Level(_best(tried), bound, first.solution.stopped, spent, nodes)


def _is_loose(tried: Sequence[Found], bound: float, limits: Limits) -> bool:
    return _best(tried).plan.period_seconds > bound * (1 + max(RETRIED_GAP, limits.gap))


def _bound(tried: list[Found], bound: float, limits: Limits, known: Known, known_period: float | None) -> float:
    """A bound of all plans, on tables for ever larger periods; what is found there is appended to `tried`. With a known
    period, on intervals of streams that are cut, of those that a faster plan may use."""
    first, least = tried[0], 0.0
    while first.solution.stopped == "proven" and bound > least * (1 + limits.gap / 2):
        least = bound
        window = None
        if known_period is not None:
            window = window_of(first.prepared, min(known_period, _best(tried).plan.period_seconds))
        left = _left(limits, tried)
        if window is not None:
            left = replace(left, gap=UNPROVEN_SHARE * limits.gap)
        again, proven = _again(first, StreamRows(least, window=window), left, known)
        if window is not None:
            bound = max(bound, min(proven, window.period))  # a bound of faster plans alone
        if again is None:
            break
        bound = max(bound, again.solution.bound) if window is None else bound
        tried.append(again)
    return bound


def _again(first: Found, rows: StreamRows, limits: Limits, known: Known) -> tuple[Found | None, float]:
    """Searched on other tables: a plan, None where there is none or time did not last, and a bound of all plans that
    have rows there."""
    prepared = problem_of(first.prepared.request, asked=rows, known=known)
    if not all(task.tables for task in prepared.problem.tasks):
        return None, float("inf")
    solution = solve(prepared.problem, limits)
    if isinstance(solution, Unsolved):
        return None, float("inf") if solution.proven else solution.bound
    if solution.stopped != "proven":
        return None, solution.bound
    return Found(prepared, solution, plan_of(prepared, solution)), solution.bound


def _best(tried: Sequence[Found]) -> Found:
    """The fastest; of equals the first."""
    return min(tried, key=lambda attempt: attempt.plan.period_seconds)


def _left(limits: Limits, tried: Sequence[Found]) -> Limits:
    """Limits of what is left of the time."""
    spent = sum(attempt.solution.seconds for attempt in tried)
    return replace(limits, seconds=max(0.0, limits.seconds - spent))


def _until_worse(limits: Limits, period: float) -> Limits:
    """Limits of a search that ends, unproven, as soon as its bound says that it finds nothing better than `period`."""
    proven = [0.0]

    def progress(incumbent: float, bound: float) -> None:
        proven[0] = max(proven[0], bound)
        if period == float("inf"):
            limits.progress(incumbent, bound)

    return replace(limits, stop=lambda: limits.stop() or proven[0] >= period, progress=progress)
