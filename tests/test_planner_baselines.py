"""Plans made by rules: they hold, none beats the optimum, and each is the best of its kind."""

import random
from collections.abc import Iterator, Mapping
from itertools import product

import pytest
from msgspec.structs import replace

from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.tables import problem_of
from realgraph.planner.plan.problem import Choice, SearchProblem
from realgraph.planner.request.pins import Pin
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.baselines import Baseline, baselines_of, colocated, megatron, real_heuristic, symmetric
from realgraph.planner.search.search import solved
from realgraph.planner.search.symmetric import LayoutShape
from realgraph.planner.search.whole_problem import whole_problem
from realgraph.planner.solve.heuristics import one_mesh
from tests.planner_cases import cluster, grpo, ppo, request
from tests.planner_oracles import (
    brute_force,
    every_choice,
    fits,
    least_period,
    table_of,
    ties_hold,
    violations,
)
from tests.planner_problems import Size, problem_of_seed

SMALL = Size(tasks=(2, 5), choices=400)


def shapes_of(problem: SearchProblem, seed: int) -> dict[int, LayoutShape]:
    rng = random.Random(seed)
    numbers = sorted({int(number) for table in problem.tables for number in table.layout})
    return {number: LayoutShape(tp=rng.choice([1, 2]), pp=rng.choice([1, 2])) for number in numbers}


def symmetric_choices(
    problem: SearchProblem, shapes: Mapping[int, LayoutShape], mesh: int
) -> Iterator[tuple[float, dict[str, Choice]]]:
    """All that a symmetric plan may choose, with the seconds of the calls one after another, the fewest first."""
    found = []
    for row in product(*(every_choice(problem, task) for task in problem.tasks)):
        choices = {task.name: choice for task, choice in zip(problem.tasks, row, strict=True)}
        if any(choice.mesh != mesh for choice in row):
            continue
        of_role: dict[str, set[LayoutShape]] = {}
        seconds = 0.0
        for task in problem.tasks:
            table, option = table_of(problem, task, choices[task.name]), choices[task.name].option
            of_role.setdefault(task.role, set()).add(shapes[int(table.layout[option])])
            seconds += float(table.seconds[option])
        if all(len(kinds) == 1 for kinds in of_role.values()):
            found.append((seconds, choices))
    yield from sorted(found, key=lambda one: one[0])


def check(problem: SearchProblem, found: Baseline) -> None:
    assert fits(problem, found.choices) and ties_hold(problem, found.choices)
    exact = least_period(problem, found.choices)
    assert exact is not None and found.period == pytest.approx(exact[0], rel=1e-6)
    assert violations(problem, found.choices, found.schedule.starts, found.period) == []


@pytest.mark.parametrize("seed", range(80))
def test_a_symmetric_plan_is_the_fastest_of_its_kind(seed: int) -> None:
    problem = problem_of_seed(seed, SMALL)
    shapes, mesh = shapes_of(problem, seed), one_mesh(problem)
    found = symmetric(problem, shapes)
    if mesh is None:
        assert found is None
        return
    best = float("inf")
    for seconds, choices in symmetric_choices(problem, shapes, mesh):
        if seconds >= best:
            break
        if fits(problem, choices) and ties_hold(problem, choices):
            exact = least_period(problem, choices)
            best = min(best, exact[0]) if exact is not None else best
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert found.period == pytest.approx(best, rel=1e-5)
        check(problem, found)
        kinds: dict[str, set[LayoutShape]] = {}
        for task in problem.tasks:
            layout = table_of(problem, task, found.choices[task.name]).layout[found.choices[task.name].option]
            kinds.setdefault(task.role, set()).add(shapes[int(layout)])
        assert all(len(one) == 1 for one in kinds.values())


@pytest.mark.parametrize("block", range(4))
def test_no_rule_beats_the_optimum(block: int) -> None:
    compared = 0
    for seed in range(10 * block, 10 * block + 10):
        problem = problem_of_seed(seed, SMALL)
        best, shapes = brute_force(problem), shapes_of(problem, seed)
        by_shapes = symmetric(problem, shapes), megatron(problem, shapes)
        for found in (colocated(problem), real_heuristic(problem), *by_shapes):
            if found is not None:
                assert best is not None and found.period >= best.period * (1 - 1e-6), seed
                check(problem, found)
                compared += 1
    assert compared >= 5


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_rules_on_a_real_request(algorithm: str) -> None:
    graph = ppo() if algorithm == "ppo" else grpo()
    workload = Workload(128, 8, 512, 2048, 800.0)
    asked = request(graph, "Qwen/Qwen3-8B", cluster(nodes=2), workload=workload)
    prepared, best = solved(asked)
    rules = baselines_of(prepared)
    for found in (rules.symmetric, rules.colocated, rules.megatron, rules.real):
        assert found is not None
        assert found.period >= best.bound * (1 - 1e-9)
    assert rules.colocated is not None and rules.symmetric is not None and rules.megatron is not None
    assert rules.colocated.period <= rules.symmetric.period * 1.002
    assert rules.symmetric.period <= rules.megatron.period * 1.000001


def test_rules_are_judged_by_what_their_streams_come_to() -> None:
    """Rules are judged as the plan is: on the tables a stream's seconds are the least that it may take."""
    workload = Workload(128, 8, 512, 2048, 800.0, staleness=1)
    prepared, best = solved(request(grpo(), "Qwen/Qwen3-8B", cluster(nodes=2), workload=workload))
    plan, rules, bound = (
        plan_of(prepared, best),
        baselines_of(prepared),
        colocated(problem_of(prepared.request).problem),
    )
    for found in (rules.symmetric, rules.colocated, rules.megatron, rules.real):
        assert found is not None
        assert found.period >= plan.period_seconds * (1 - 1e-6)
    assert bound is not None and rules.colocated is not None
    assert rules.colocated.period > bound.period


def test_in_a_mixed_cluster_rules_use_the_devices_of_one_kind() -> None:
    """Places and layouts of the rules are those of 16 A100s alone, whatever stands beside them."""
    a100 = cluster("A100-80", nodes=2)
    mixed = request(grpo(), "Qwen/Qwen3-1.7B", replace(cluster(), more=(a100,)))
    whole = whole_problem(problem_of(mixed))
    assert whole is not None
    assert (whole.prepared.problem.meshes[0].first, whole.prepared.problem.meshes[0].n_devices) == (8, 16)
    rules, alone = baselines_of(problem_of(mixed)), baselines_of(problem_of(replace(mixed, cluster=a100)))
    for name in ("symmetric", "colocated", "megatron"):
        here, there = getattr(rules, name), getattr(alone, name)
        assert here is not None and there is not None
        assert here.period == pytest.approx(there.period, rel=0.01), name


def test_calls_that_are_pinned_apart_leave_rules_no_devices() -> None:
    pins = {"rollout": Pin(first=0, devices=4), "train": Pin(first=4, devices=4)}
    prepared = problem_of(request(grpo(), "Qwen/Qwen3-1.7B", cluster(), pins=pins))
    assert whole_problem(prepared) is None
    assert baselines_of(prepared).symmetric is None
