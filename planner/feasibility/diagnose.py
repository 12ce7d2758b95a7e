"""Reasons why no plan fits, and changes that would help: constraints in conflict, the worst moment in memory, changes
proven by solving."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Train
from realgraph.planner.costs.memory.memory import Footprint
from realgraph.planner.feasibility.changes import Change, Series, changes, combined, more_devices
from realgraph.planner.feasibility.conflicts import Constraint, constraints_of
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.constraints import constraint_problems, named_meshes
from realgraph.planner.options.footprints import holding
from realgraph.planner.options.holdings import allocation_of, group_for, margin_of, peak_of, resident_copies
from realgraph.planner.options.meshes import family
from realgraph.planner.options.tables import Known, allowed, device_bytes, problem_of
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Allocation
from realgraph.planner.plan.problem import Limits, Unsolved
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.solve.solver import solve

GB = 1e9
ANY_PLAN_GAP = 1e9  # relative gap: the first plan that fits will do
PROBE_SECONDS = 2.0  # of one question whether any plan fits
UNDECIDED = "a short search did not tell whether"
MOST_CHANGES = 3  # sorts of them that are offered, more devices aside


Fits = Callable[[PlanRequest], bool | None]  # whether some plan of a request fits; None where that was not decided


class Infeasible(ConfigError):
    """No plan fits, which is proven. conflict: paths of constraints that can't all be kept, a smallest set but where
    the problems say otherwise; none where the models do not fit the cluster under any. changes: what would make it fit,
    the nearest first.
    """

    exit_code = 4

    def __init__(self, problems: Sequence[Problem], conflict: tuple[str, ...], changes: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.conflict, self.changes = conflict, changes


def infeasible(request: PlanRequest, limits: Limits) -> Infeasible:
    """The error for a request that no plan fits. Solves again without each constraint, and with each change."""
    fits = _asker(limits)
    constraints = constraints_of(request)
    freed = request
    for constraint in constraints:
        freed = constraint.without(freed)
    spared = fits(freed) if constraints else False
    conflict, smallest = _smallest(request, constraints, fits) if spared else ((), True)
    tight = tightest(request)
    texts = tuple(_fixes(request, fits, bool(conflict)))
    if conflict:
        paths = tuple(constraint.path for constraint in conflict)
        why = _ruled_out(request, paths)
        problems = [_conflict_problem(constraint, paths, texts, (smallest, why)) for constraint in conflict]
        if tight is not None and tight.needed > tight.usable:
            problems.append(_memory_problem(request, tight, texts))
        return Infeasible(problems, paths, texts)
    if tight is None or tight.needed <= tight.usable:
        within = f"more than they hold, with memory.quantile: {request.memory.quantile:g}"
        why = "" if spared is None else f": what must lie on the devices together is {within}"
        text = f"no plan fits{why}"
        problem = Problem(Where(path="$.cluster"), text, "; or ".join(texts), "memory")
    else:
        problem = _memory_problem(request, tight, texts)
    if spared is None:
        doubt = (
            f"{problem.text}; {UNDECIDED} one would without the run file's allocation, constraints and micro-batch size"
        )
        problem = replace(problem, text=doubt)
    return Infeasible([problem], (), texts)


def unfinished(unsolved: Unsolved) -> ConfigError:
    """The error where time ran out before a plan was found, and none was ruled out."""
    text = (
        f"the search ended after {unsolved.seconds:.2g} s ({unsolved.stopped}) before it found a plan or ruled one out"
    )
    return ConfigError([Problem(Where(path="$.cluster"), text, "give it more time: --time-limit 60", "search")])


def _asker(limits: Limits) -> Fits:
    """A function that tells if some plan of a request fits: yes and no are certain, a short search may not tell."""
    quick = replace(
        limits, gap=ANY_PLAN_GAP, seconds=min(limits.seconds, PROBE_SECONDS), progress=lambda period, bound: None
    )

    def fits(request: PlanRequest) -> bool | None:
        if constraint_problems(request):
            return False
        problem = problem_of(request, known=Known(memory_only=True)).problem
        if not all(task.tables for task in problem.tasks):
            return False
        outcome = solve(problem, quick)
        if isinstance(outcome, Unsolved):
            return False if outcome.proven else None
        return True

    return fits


def _smallest(
    request: PlanRequest, constraints: Sequence[Constraint], fits: Fits
) -> tuple[tuple[Constraint, ...], bool]:
    """A set of constraints in conflict, and whether none of them can be spared for certain.

    Each is left out for good where no plan fits without it either; Chinneck and Dravnieks 1991 call it a deletion
    filter. Where that was not decided the constraint stays: those that are named are in conflict in any case.
    """
    kept, now, smallest = list(constraints), request, True
    for constraint in constraints:
        less = constraint.without(now)
        match fits(less):
            case False:
                kept.remove(constraint)
                now = less
            case None:
                smallest = False
            case True:
                pass
    return tuple(kept), smallest


def _fixes(request: PlanRequest, fits: Fits, in_conflict: bool) -> Iterator[str]:
    """The smallest change of each sort under which some plan fits; without a conflict more devices are one of them.

    Where no single change is enough, the smallest of several at once.
    """
    n_changes = 0
    for series in changes(request):
        change = _nearest(series, fits) if n_changes < MOST_CHANGES else None
        if change is not None:
            n_changes += 1
            yield change.text
    if in_conflict:
        return
    change = _nearest(more_devices(request), fits) or (None if n_changes else _nearest(combined(request), fits))
    if change is not None:
        yield change.text


def _nearest(series: Series, fits: Fits) -> Change | None:
    """The first of the series that fits, by halving: what fits under one fits under all later ones.

    What was not decided counts as too little, which the text of the change says then.
    """
    if not series or not fits(series[-1].request):
        return None
    low, high, decided = 0, len(series) - 1, True
    while low < high:
        middle = (low + high) // 2
        answer = fits(series[middle].request)
        decided = decided and answer is not None
        low, high = (low, middle) if answer else (middle + 1, high)
    change = series[low]
    return change if decided else replace(change, text=f"{change.text} ({UNDECIDED} less would do)")


# --- the worst moment -------------------------------------------------------------------------------------------------


class Tight(Struct, frozen=True):
    """The plan of least memory at its fullest moment: while `call` runs on `device`."""

    call: str
    device: int
    footprint: Footprint
    parts: tuple[tuple[str, int], ...]  # owners and bytes
    usable: int
    bound: int  # below which the peak stays with the probability that is asked

    @property
    def needed(self) -> int:
        return self.bound


def tightest(request: PlanRequest) -> Tight | None:
    """Every call on its largest mesh with what takes least there; None where a call has no layout at all."""
    allocations: dict[str, Allocation] = {}
    for call in sorted(request.mesh_calls, key=lambda name: not isinstance(request.graph.calls[name], Train)):
        candidate = _least(request, call, allocations)
        if candidate is None:
            return None
        allocations[call] = allocation_of(candidate)
    peaks = {call: peak_of(request, allocations, call) for call in request.mesh_calls}
    usable = {call: device_bytes(request, group_for(request, allocations[call].layout)) for call in peaks}
    bounds = {call: peaks[call][1].total + margin_of(request, allocations, call) for call in peaks}
    worst = max(peaks, key=lambda call: bounds[call] - usable[call])
    device, footprint = peaks[worst]
    parts = [
        (f"the {'trained states' if copy.trained else 'weights'} of {copy.role!r} for {', '.join(copy.calls)}", nbytes)
        for copy in resident_copies(request, allocations)
        if device in copy.layout.mesh.devices and (nbytes := copy.footprint.total)
    ]
    own = footprint.total - sum(nbytes for _, nbytes in parts)
    return Tight(worst, device, footprint, (*parts, (f"{worst!r} itself", own)), usable[worst], bounds[worst])


def _least(request: PlanRequest, call: str, beside: dict[str, Allocation]) -> CallOption | None:
    """The candidate on the call's largest mesh that takes least; what equals a trained copy's layout takes no more."""
    mesh_family = family(request.cluster, request.constraints.reserve, named_meshes(request))
    fitting = [mesh for mesh in mesh_family.meshes if allowed(mesh, call, request)]
    if not fitting:
        return None
    mesh: DeviceMesh = max(fitting, key=lambda one: (one.n_devices, -one.first))
    cluster = request.cluster.groups[mesh_family.groups[mesh_family.meshes.index(mesh)]]
    role = request.graph.role(call)
    trained = {a.layout for name, a in beside.items() if request.graph.role(name) == role}

    def needed(candidate: CallOption) -> tuple[int, int, int]:
        own = holding(request, call, candidate, cluster)
        resident = 0 if candidate.layout in trained else own.resident.total
        return (resident + own.active.total + own.margin, own.resident.total, candidate.tokens)

    choices = [candidate for candidate in candidates(request, call, mesh, cluster) if candidate.residency != "in_place"]
    return min(choices, key=needed, default=None)


# --- words ------------------------------------------------------------------------------------------------------------


def shown_bytes(nbytes: int) -> str:
    """`57.7 GB`, or `3.2 MB` below a GB."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB else f"{nbytes / 1e6:.1f} MB"


def needed_text(request: PlanRequest, device: int, mean: int, bound: int) -> str:
    """`78.1 GB on device 0 (95 % bound, memory.quantile: 0.95; 74.0 GB expected)`; without margin the bytes alone."""
    needed = f"{shown_bytes(bound)} on device {device}"
    if bound == mean:
        return needed
    quantile = request.memory.quantile
    risk = f"{100 * quantile:g} % bound, memory.quantile: {quantile:g}"
    return f"{needed} ({risk}; {shown_bytes(mean)} expected)"


def _memory_problem(request: PlanRequest, tight: Tight, changes: Sequence[str]) -> Problem:
    footprint = tight.footprint
    largest, nbytes = max(tight.parts, key=lambda part: part[1])
    group = next(g for g in request.cluster.groups if device_bytes(request, g) == tight.usable)
    needed = needed_text(request, tight.device, footprint.total, tight.bound)
    text = (
        f"no plan fits: call {tight.call!r} needs {needed}, "
        f"{shown_bytes(tight.usable)} of {shown_bytes(group.memory_bytes)} are usable; "
        f"largest by purpose: {footprint.worst.replace('_', ' ')} {shown_bytes(getattr(footprint, footprint.worst))}; "
        f"by owner: {largest} {shown_bytes(nbytes)}"
    )
    more = "use more devices, or devices with more memory"
    if request.cluster.is_cpu:  # its processes share the machine's memory: more of them have less each
        fewer = f"set cluster.devices below {request.cluster.devices_per_node}: they share the memory of one machine"
        first = fewer if request.cluster.devices_per_node > 1 else "use a machine with more memory"
        more = f"{first}; or, where cluster.memory_gb is set, raise it"
    hint = "; or ".join(changes) or more
    return Problem(Where(path="$.cluster"), text, hint, "memory")


def _conflict_problem(
    constraint: Constraint, conflict: Sequence[str], changes: Sequence[str], known: tuple[bool, str]
) -> Problem:
    """known: whether none of the conflict can be spared for certain, and why there is one where memory is not it."""
    others, (smallest, why) = [path for path in conflict if path != constraint.path], known
    text = f"no plan fits with {constraint.text}" + (f" together with {', '.join(others)}" if others else "") + why
    if not smallest:
        text += f"; {UNDECIDED} each of these matters"
    hint = "; or ".join([f"leave {'one of them' if others else 'it'} out", *changes])
    return Problem(Where(path=f"$.{constraint.path}"), text, hint, "conflict")


def _ruled_out(request: PlanRequest, conflict: Sequence[str]) -> str:
    """That a call has no layout left which agrees with its settings, however much memory there is; '' where all do."""
    named = {path.split(".")[1] for path in conflict if path.startswith("allocation.")}
    mesh_family = family(request.cluster, request.constraints.reserve, named_meshes(request))
    for call in sorted(named):
        groups = [
            (mesh, request.cluster.groups[group])
            for mesh, group in zip(mesh_family.meshes, mesh_family.groups, strict=True)
            if allowed(mesh, call, request)
        ]
        if not groups:
            return f": no mesh is left to {call!r}"
        if not any(next(candidates(request, call, *place), None) for place in groups):
            return f": no layout of {call!r} agrees with it, however much memory there is"
    return ""
