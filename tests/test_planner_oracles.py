"""The search against slow oracles: brute force over all choices and orders, and CP-SAT."""

import random
from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from realgraph.planner.plan.plan import Turn
from realgraph.planner.plan.problem import Choice, Limits, SearchProblem, Solution, Unsolved
from realgraph.planner.solve.evaluate import evaluate, orders
from realgraph.planner.solve.solver import solve
from tests.planner_oracles import (
    Edges,
    Optimum,
    brute_force,
    critical_ratio,
    every_choice,
    fits,
    least_period,
    nodes_of,
    ties_hold,
    violations,
)
from tests.planner_problems import Size, problem_of_seed, problems, with_slower_twins

EXACT = Limits(gap=1e-7, seconds=30.0)
NEAR = 1e-6  # relative: what two exact answers may differ by


@cache
def best_of_seed(seed: int) -> Optimum | None:
    """The optimum of `problem_of_seed`, by brute force: of seeds that several tests share it is looked for once."""
    return brute_force(problem_of_seed(seed))


def check_optimal(problem: SearchProblem, best: Optimum | None) -> None:
    """An exact search finds the brute-force optimum, or that there is none, and its schedule holds."""
    found = solve(problem, EXACT)
    if isinstance(found, Unsolved):
        assert best is None and found.proven, (best, found)
        return
    assert best is not None, found
    assert found.period == pytest.approx(best.period, rel=NEAR)
    assert found.bound <= best.period * (1 + NEAR)
    assert found.stopped == "proven" and found.gap <= NEAR
    check_schedule(problem, found)


def check_schedule(problem: SearchProblem, found: Solution) -> None:
    """Assert that what was found is a plan: it fits, and its starts keep every rule of the problem."""
    assert ties_hold(problem, found.choices) and fits(problem, found.choices)
    assert violations(problem, found.choices, found.starts, found.period) == []
    again = evaluate(problem, found.choices)
    assert again is not None and again.period == pytest.approx(found.period, rel=NEAR)


def ordered_period(
    problem: SearchProblem, choices: Mapping[str, Choice], turns: Mapping[int, tuple[Turn, ...]]
) -> float:
    """The period of an event graph where the orders of the devices alone keep tasks apart; inf where it is stuck."""
    nodes, edges = nodes_of(problem, choices)
    number = {node.name: i for i, node in enumerate(nodes)}
    in_turn: Edges = []
    for order in set(turns.values()):
        for at, turn in enumerate(order):
            after, lap = (order[at + 1], 0) if at + 1 < len(order) else (order[0], 1)
            i = number[turn.call]
            in_turn.append((i, number[after.call], nodes[i].seconds, lap + after.offset - turn.offset))
    found = critical_ratio(len(nodes), edges + in_turn, problem.floor_seconds, float("inf"))
    return float("inf") if found is None else found[0]


# --- the oracle itself ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_brute_force_answers_with_a_schedule_that_holds(block: int) -> None:
    answered = 0
    for seed in range(100 * block, 100 * block + 100, 5):
        problem, best = problem_of_seed(seed), best_of_seed(seed)
        if best is not None:
            assert fits(problem, best.choices) and ties_hold(problem, best.choices), seed
            assert violations(problem, best.choices, best.starts, best.period) == [], seed
            answered += 1
    assert answered >= 10


def test_the_check_of_a_schedule_sees_what_is_wrong() -> None:
    seen = set()
    for seed in range(60):
        problem, best = problem_of_seed(seed), best_of_seed(seed)
        if best is None or len(problem.tasks) < 3:
            continue
        seen.add(bool(violations(problem, best.choices, best.starts, best.period * 0.97)))
        rng = random.Random(seed)
        moved = {name: start + rng.uniform(-0.4, 0.4) * best.period for name, start in best.starts.items()}
        seen.add(bool(violations(problem, best.choices, moved, best.period)))
        assert violations(problem, best.choices, {}, best.period)
    assert True in seen


# --- the evaluator ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_the_evaluator_is_exact(block: int) -> None:
    for seed in range(block * 40, (block + 1) * 40):
        problem, rng = problem_of_seed(seed), random.Random(seed)
        for _ in range(3):
            choices = {task.name: rng.choice(every_choice(problem, task)) for task in problem.tasks}
            fitting = fits(problem, choices) and ties_hold(problem, choices)
            exact = least_period(problem, choices) if fitting else None
            found = evaluate(problem, choices)
            assert (found is None) == (exact is None), seed
            if found is not None and exact is not None:
                assert found.period == pytest.approx(exact[0], rel=NEAR), seed
                assert violations(problem, choices, found.starts, found.period) == [], seed


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(6))
def test_the_search_equals_brute_force(block: int) -> None:
    """300 problems; benchmarks/planner_bounds.py holds the search to another checker on 10^5."""
    for seed in range(block * 50, (block + 1) * 50):
        try:
            check_optimal(problem_of_seed(seed), best_of_seed(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems)
def test_the_search_equals_brute_force_on_drawn_problems(problem: SearchProblem) -> None:
    check_optimal(problem, brute_force(problem))


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_no_bound_is_above_the_optimum_wherever_the_search_ends(seed: int) -> None:
    problem, best = problem_of_seed(seed), best_of_seed(seed)
    polls, rng = 0, random.Random(seed)
    last = rng.choice([1, 2, 3, 10])
    seen: list[tuple[float, float]] = []

    def stop() -> bool:
        nonlocal polls
        polls += 1
        return polls >= last

    limits = Limits(gap=rng.choice([1e-7, 0.002, 0.05]), stop=stop, progress=lambda *pair: seen.append(pair))
    found = solve(problem, limits)
    optimum = float("inf") if best is None else best.period
    assert all(bound <= optimum * (1 + NEAR) for _, bound in seen)
    assert found.bound <= optimum * (1 + NEAR)
    if isinstance(found, Solution):
        assert found.period >= optimum * (1 - NEAR)
        check_schedule(problem, found)
    else:
        assert best is None or not found.proven


@pytest.mark.parametrize("block", range(5))
def test_the_orders_of_the_devices_alone_give_the_period(block: int) -> None:
    ordered = 0
    for seed in range(80 * block + 1, 80 * block + 81, 4):
        problem = problem_of_seed(seed)
        found = solve(problem, EXACT)
        if isinstance(found, Solution):
            period = ordered_period(problem, found.choices, orders(problem, found))
            assert period == pytest.approx(found.period, rel=NEAR), seed
            ordered += 1
    assert ordered >= 10


def test_the_search_is_the_same_twice() -> None:
    for seed in range(40):
        one, two = (solve(problem_of_seed(seed), EXACT) for _ in range(2))
        assert type(one) is type(two)
        if isinstance(one, Solution) and isinstance(two, Solution):
            assert (one.choices, one.period, one.starts, one.nodes) == (two.choices, two.period, two.starts, two.nodes)


def test_options_of_equal_layouts_may_be_moved_in_unlike_times() -> None:
    """An option that is beaten in everything else may be the best one; without the problem's word it is left out."""
    missed = 0
    for seed in range(150):
        problem = with_slower_twins(problem_of_seed(seed, Size(tasks=(2, 3), choices=50)))
        if not problem.moves:
            continue
        check_optimal(problem, brute_force(problem))
        found, hasty = solve(problem, EXACT), solve(replace(problem, moves_by_layout=True), EXACT)
        if isinstance(found, Solution) and isinstance(hasty, Solution):
            missed += hasty.period > found.period * (1 + NEAR)
    assert missed >= 5


# --- CP-SAT -----------------------------------------------------------------------------------------------------------

MID = Size(tasks=(4, 5), choices=60_000, options=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1010, 1024))
def test_cp_sat_finds_nothing_better(seed: int) -> None:
    pytest.importorskip("ortools")
    from tests.planner_cp_sat import SCALE, cp_sat

    problem = problem_of_seed(seed, MID)
    verdict = cp_sat(problem, seconds=30.0)
    assert verdict.proven, "CP-SAT needed 0.1 to 3 CPU seconds of each when these seeds were chosen"
    found = solve(problem, EXACT)
    if isinstance(found, Unsolved):
        assert found.proven and verdict.period == float("inf")
        return
    rounding = (2 * len(problem.tasks) + 1) / SCALE
    assert found.period == pytest.approx(verdict.period, abs=rounding)


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_had_no_time_has_a_bound_that_holds_and_says_something(seed: int) -> None:
    """All that the tasks take of the devices at least, spread evenly."""
    problem, best = problem_of_seed(seed), best_of_seed(seed)
    found = solve(problem, Limits(seconds=0.0, stop=lambda: True))
    assert found.bound > 0
    if best is not None:
        assert found.bound <= best.period * (1 + NEAR)
        assert found.bound >= best.period / (2 * len(problem.tasks) * problem.devices)
