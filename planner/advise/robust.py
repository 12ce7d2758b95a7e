"""The plan that regrets least: costs have error bars, and among near-optimal plans the steadiest one is chosen.

Calls err by the deviations of the printed bar (`costs/spread.py`). One number is drawn for all calls of a phase, as
they err together there, and a further one for how a phase scales with its mesh. The step's own deviation is left out:
it makes all plans alike longer. The same seed draws the same errors.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.options.calls import phase_of
from realgraph.planner.options.pricing import PricedOption
from realgraph.planner.options.tables import PreparedProblem
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Choice, Floats, Limits, Move, OptionTable, SearchProblem, Solution
from realgraph.planner.request.cost_table import Phase
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.period_error import moves_error
from realgraph.planner.search.search import solved
from realgraph.planner.solve.solver import evaluate, solve

PHASES: tuple[Phase, ...] = ("train", "inference", "generate", "reallocate")
N_SCENARIOS = 16  # of errors, under each of which every plan is judged
N_SEARCHED_SCENARIOS = 6  # of them that are also planned for: their best plans are the candidates
MOST_NOMINAL_LOSS = 0.05  # relative: plans worse than this by the nominal costs are left out
SCALING_DEVIATION = 0.05  # standard deviation of the exponent of a mesh's size, in which a phase's seconds err


class Scenario(Struct, frozen=True):
    """One draw of how far each phase is off, in deviations of its calls, and of how it scales with its meshes."""

    deviations: dict[Phase, float]
    exponents: dict[Phase, float]  # of the share of all devices that a call's mesh has


class RobustResult(Struct, frozen=True):
    """The plan that is steadiest under errors of the costs.

    Regret: how much longer a step is than under the best plan known for the true costs, relative; expected over the
    scenarios, and the worst.
    """

    plan: Plan  # of least expected regret
    nominal: Plan  # the best by the costs as they are
    expected_regret: float
    worst_regret: float
    nominal_expected_regret: float
    nominal_worst_regret: float
    candidates: int  # plans that were compared
    scenarios: int

    @property
    def text(self) -> str:
        """The finding, in one sentence."""
        if self.plan.allocations == self.nominal.allocations:
            return (
                f"the best plan is also the steadiest: expected regret {self.expected_regret:.1%}, at worst "
                f"{self.worst_regret:.1%} under {self.scenarios} draws of the costs' errors, beside "
                f"{self.candidates - 1} other plans"
            )
        slower = self.plan.period_seconds / self.nominal.period_seconds - 1
        return (
            f"slower by {slower:.1%} than the best plan if costs are exact, but its expected regret is "
            f"{self.expected_regret:.1%} instead of {self.nominal_expected_regret:.1%} (at worst "
            f"{self.worst_regret:.1%} instead of {self.nominal_worst_regret:.1%})"
        )


def robust(request: PlanRequest, limits: Limits = Limits()) -> RobustResult:
    """The near-optimal plan of least expected regret under sampled errors. Raises as `search` does."""
    prepared, best = solved(request, limits)
    rng = np.random.default_rng(limits.seed)
    scenarios = [scenario(rng) for _ in range(N_SCENARIOS)]
    problems = [erring(prepared, drawn) for drawn in scenarios]
    candidates = _candidates(prepared, best, problems[:N_SEARCHED_SCENARIOS], limits)
    periods = np.array([[_period(problem, choices) for choices in candidates] for problem in problems])
    regrets = periods / periods.min(axis=1, keepdims=True) - 1
    expected, worst = regrets.mean(axis=0), regrets.max(axis=0)
    chosen = int(np.argmin(expected))
    nominal = plan_of(prepared, best)
    return RobustResult(
        plan=nominal if chosen == 0 else plan_of(prepared, _solution(prepared, candidates[chosen], best)),
        nominal=nominal,
        expected_regret=float(expected[chosen]),
        worst_regret=float(worst[chosen]),
        nominal_expected_regret=float(expected[0]),
        nominal_worst_regret=float(worst[0]),
        candidates=len(candidates),
        scenarios=len(problems),
    )


def scenario(rng: np.random.Generator) -> Scenario:
    """One draw: standard normal, and exponents of `SCALING_DEVIATION`."""
    deviations: dict[Phase, float] = {}
    exponents: dict[Phase, float] = {}
    for phase in PHASES:
        deviations[phase] = float(rng.normal())
        exponents[phase] = float(rng.normal(0.0, SCALING_DEVIATION))
    return Scenario(deviations, exponents)


def erring(prepared: PreparedProblem, drawn: Scenario) -> SearchProblem:
    """The problem as it would be under these errors: each option and move is off by the deviation that the bar has."""
    problem, request = prepared.problem, prepared.request
    tables = list(problem.tables)
    for task in problem.tasks:
        phase = phase_of(request.graph.calls[task.name])
        sizes = {table: problem.meshes[mesh].n_devices for mesh, table in task.tables.items()}
        for table, size in sizes.items():
            factors = np.exp(drawn.deviations[phase] * _errors(prepared.options[table]))
            factors *= (size / problem.devices) ** drawn.exponents[phase]
            tables[table] = _scaled(problem.tables[table], factors)
    longer = float(np.exp(drawn.deviations["reallocate"] * moves_error(request)))

    def move_seconds(move: Move, source: int, target: int) -> Floats:
        return problem.move_seconds(move, source, target) * longer

    return replace(problem, tables=tuple(tables), move_seconds=move_seconds)


def _errors(options: Sequence[PricedOption]) -> Floats:
    return np.array([option.error for option in options], dtype=np.float64)


def _scaled(table: OptionTable, factors: Floats) -> OptionTable:
    return replace(table, seconds=table.seconds * factors, latency=table.latency * factors)


def _candidates(
    prepared: PreparedProblem, best: Solution, problems: Sequence[SearchProblem], limits: Limits
) -> list[Mapping[str, Choice]]:
    """The best plan, and the best ones of some scenarios where they are near it by the nominal costs."""
    candidates: list[Mapping[str, Choice]] = [best.choices]
    quick = replace(limits, gap=max(limits.gap, 0.01), seconds=max(0.5, limits.seconds / 10))
    for problem in problems:
        other = solve(problem, quick)
        if not isinstance(other, Solution) or other.choices in candidates:
            continue
        if _period(prepared.problem, other.choices) <= (1 + MOST_NOMINAL_LOSS) * best.period:
            candidates.append(other.choices)
    return candidates


def _period(problem: SearchProblem, choices: Mapping[str, Choice]) -> float:
    """The least period of these choices. They fit, as bytes have no errors here."""
    schedule = evaluate(problem, choices)
    return float("inf") if schedule is None else schedule.period


def _solution(prepared: PreparedProblem, choices: Mapping[str, Choice], best: Solution) -> Solution:
    """Other choices as a solution under the nominal costs, with the bound of the search."""
    schedule = evaluate(prepared.problem, choices)
    assert schedule is not None, "a candidate has a nominal period"
    return replace(
        best, choices=dict(choices), period=schedule.period, starts=schedule.starts, critical=schedule.critical
    )
