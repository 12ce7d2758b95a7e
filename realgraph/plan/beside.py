"""Searches beside the plan: other plans of the same run, and what changes would bring."""

from collections.abc import Iterator

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.plan.session import Budget, Session
from realgraph.planner.advise.servers import with_servers
from realgraph.planner.advise.sweep import Hint, changes_tried, synchronous
from realgraph.planner.options.constraints import constraint_problems
from realgraph.planner.options.tables import Known, PreparedProblem, problem_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.content import Comparison
from realgraph.planner.report.format import change_text, gap_text, seconds_text
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.baselines import baselines_of
from realgraph.planner.search.levels import best_level, levels_of
from realgraph.planner.solve.heuristics import one_mesh

RULE_SECONDS, RULE_GAP = 2.0, 0.002  # of the search for the best layouts under a rule
PROVEN_GAP = 0.05  # relative: a larger one proves little
SIMPLER_LOSS, EQUAL_LOSS = 0.01, 1e-6  # longer by less: a simpler plan is worth it; as long
BASELINE_NAMES = ("symmetric", "colocated", "Megatron's rule", "ReaL-style heuristic")
FREE = "free choice"
OTHER_SECONDS = 3.0  # of the search for one other plan
HINT_SECONDS = 1.0  # of the search behind one hint
BESIDE_SECONDS = 12.0  # of everything beside the plan
WITHOUT = "without pins and constraints"  # a hint that stands among the other plans


def rules(session: Session, prepared: PreparedProblem) -> tuple[Comparison, ...]:
    """Plans that people make without a search, on the same option tables."""
    if session.stop():
        return ()
    place = one_mesh(prepared.problem)
    if place is None:
        apart = "no devices may hold every call, which this rule asks for"
        return tuple(Comparison(name, None, apart, "no such plan") for name in BASELINE_NAMES)
    where = _devices_of(prepared, place)
    plans = baselines_of(prepared, session.quick(RULE_SECONDS, RULE_GAP))
    everywhere = [baseline for baseline in (plans.colocated, plans.symmetric) if baseline is not None]
    colocated = min(
        everywhere, key=lambda baseline: baseline.period, default=None
    )  # the symmetric one is colocated too
    what = (
        f"one layout per role for all its calls, on {where}; the best of them",
        f"every call on {where}, each with the layout that suits it",
        "tp of a node, the fewest stages that fit, dp for the rest",
        "its places for generation and training, the best layouts there",
    )
    baselines = (plans.symmetric, colocated, plans.megatron, plans.real)
    return tuple(
        Comparison(name, None, f"{note}: none fits") if baseline is None else Comparison(name, baseline.period, note)
        for name, baseline, note in zip(BASELINE_NAMES, baselines, what, strict=True)
    )


def _devices_of(prepared: PreparedProblem, place: int) -> str:
    """The devices that a rule uses: layouts span no two kinds, and pins may leave less than there is."""
    request, size = prepared.request, prepared.problem.meshes[place].n_devices
    if size == request.cluster.n_devices - request.constraints.reserve:
        return "all devices"
    kind = f" {request.cluster.groups[prepared.groups[place]].kind} alone" if request.cluster.more else ""
    return f"{size:,}{kind or ' devices'}"


def other_plans(session: Session, request: PlanRequest, judged: bool) -> Iterator[Comparison]:
    """The user's settings against free choice. judged: the plan was given."""
    if session.stop():
        return
    pinned = bool(request.pins) or request.constraints != Constraints()
    if judged:
        yield _searched("best plan", "what the search finds under the run file's settings", session, request)
    if pinned:
        free = _placed(replace(request, pins={}, constraints=Constraints()), session)
        if free != request:  # the planner has placed the servers, and nothing else is pinned
            yield _searched(FREE, "without the run file's allocation and constraints", session, free)


def _placed(request: PlanRequest, session: Session) -> PlanRequest:
    """The request with places for its servers; as it is where there are none."""
    try:
        return with_servers(request, session.quick(OTHER_SECONDS)).request
    except ConfigError:  # which whoever searches next says
        return request


def _searched(name: str, note: str, session: Session, request: PlanRequest) -> Comparison:
    """The least period of a request found in a short time; why there is none where none is."""
    problems = constraint_problems(request)
    if problems:
        return Comparison(name, None, problems[0].text)
    prepared = problem_of(request)
    lost = [task.name for task in prepared.problem.tasks if not task.tables]
    if lost:
        return Comparison(name, None, f"{lost[0]} has no layout that fits the devices")
    level = best_level(request, session.quick(OTHER_SECONDS), Known(), levels_of(request))
    if level.best is not None:
        return Comparison(name, level.best.plan.period_seconds, note)
    if level.stopped == "proven":
        return Comparison(name, None, "no plan fits the memory")
    return Comparison(name, None, "a short search found none, and did not rule one out", "not found")


def hints_of(session: Session, request: PlanRequest, plan: Plan, budget: Budget) -> tuple[tuple[Hint, ...], str]:
    """The gains that changes would bring, each planned anew, and a word on those that the time, or Ctrl-C, left no
    answer to."""
    hints: list[Hint] = []
    missing: list[str] = []
    limits = session.quick(max(HINT_SECONDS, 2 * plan.search_seconds))
    limits = replace(limits, stop=lambda: session.stop() or budget.left <= 0)
    for tried in changes_tried(request, plan, limits):
        session.progress.show(f"what if: {tried.text} (Ctrl-C leaves the rest out)")
        if tried.text == WITHOUT:
            continue
        if tried.hint is not None:
            hints.append(tried.hint)
        if not tried.conclusive:
            missing.append(tried.text)
    return tuple(hints), f"what-ifs cut short by time, inconclusive: {', '.join(missing)}" if missing else ""


def synchrony(session: Session, request: PlanRequest, plan: Plan) -> str:
    """Says how a synchronous run would do in place of an asynchronous one; '' for a synchronous plan."""
    if request.workload.staleness == 0 or plan.staleness == 0 or session.stop():
        return ""
    try:
        hint = synchronous(request, plan, session.quick(OTHER_SECONDS))
    except ConfigError:  # no synchronous plan in so short a time: nothing can be said
        return ""
    if hint is None or hint.period_seconds is None:
        return ""
    return f"{hint.text}: {change_text(1 + hint.gain)} samples/s, on-policy"


def cut_short(plan: Plan, comparisons: tuple[Comparison, ...]) -> str:
    """Says that a rule is faster than what a search found that had no time to end; '' where none is."""
    periods = [
        (other.period_seconds, other.name) for other in comparisons if other.period_seconds and other.name != FREE
    ]
    least, name = min(periods, default=(plan.period_seconds, ""))
    if plan.stopped not in ("time limit", "interrupted") or least >= plan.period_seconds * (1 - SIMPLER_LOSS):
        return ""
    return f"the search ended too early: {name} takes {seconds_text(least)} a step; give it more time (--time-limit)"


def simplified_text(plan: Plan) -> Iterator[str]:
    """Says what of the best plan was left out to make it simpler, and what that costs."""
    if plan.simplified:
        loss, high = plan.period_seconds / plan.exact_seconds - 1, plan.period_bar_seconds[1]
        bar = f", within the error bar of {gap_text(high / plan.period_seconds - 1)}" if high else ""
        cost = f"{gap_text(max(0.0, loss))} longer than the best plan found{bar}"
        yield f"simpler, and {cost}: {'; '.join(plan.simplified)} (--exact for the best)"


def simpler(request: PlanRequest, plan: Plan, comparisons: tuple[Comparison, ...]) -> str:
    """Says that placing every call on all devices, which has less to go wrong, is as good; '' where it is worse."""
    if len(plan.allocations) < 2:
        return ""
    if len({allocation.layout.mesh for allocation in plan.allocations.values()}) == 1:
        if request.constraints.colocated or plan.gap > PROVEN_GAP:
            return ""
        return f"every call on the same devices: no other placement is more than {gap_text(plan.gap)} faster, proven"
    colocated = replace(request, constraints=replace(request.constraints, colocated=True))
    if constraint_problems(colocated):
        return ""
    for other in comparisons:
        if other.name == "colocated" and other.period_seconds is not None:
            excess = other.period_seconds / plan.period_seconds - 1
            if -EQUAL_LOSS <= excess <= SIMPLER_LOSS:
                return (
                    f"every call on all devices (--colocated) is simpler and takes {gap_text(max(0.0, excess))} longer"
                )
    return ""
