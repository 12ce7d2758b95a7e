"""Bounds and plans of the search against a checker that looks at every combination; the whole sweep is a benchmark."""

import ast
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import planner_bounds_arrays, planner_bounds_check, planner_bounds_walk
from benchmarks.planner_bounds import EXACT, answered, gap_of
from benchmarks.planner_bounds_arrays import arrays
from benchmarks.planner_bounds_check import mistakes
from benchmarks.planner_bounds_problems import family, problem_of
from benchmarks.planner_bounds_walk import plan_within
from benchmarks.problem_export import problem_spec, problem_text
from realgraph.planner.problem_file.checks import problems_of
from realgraph.planner.problem_file.codec import ProblemAnswer, read_problem
from realgraph.planner.problem_file.spec import (
    CallSpec,
    EdgeSpec,
    OptionSpec,
    ProblemFile,
    ReallocationSpec,
)
from tests.planner_oracles import brute_force
from tests.planner_problems import problem_of_seed

BLOCK = 50
FORBIDDEN = ("realgraph.planner.solve", "realgraph.planner.search", "realgraph.planner.options", "tests")


def call(
    name: str, seconds: float, *meshes: tuple[int, int], role: str = "", trains: bool = False, latency: float = 0.0
) -> CallSpec:
    """A call with one option that needs no memory."""
    return CallSpec(name, (OptionSpec(seconds, 0.0, 0.0, meshes=meshes, latency=latency),), role or name, trains)


def solved(spec: ProblemFile) -> ProblemAnswer:
    """The exact answer, which the checker has found right."""
    assert problems_of(spec, "") == []
    found = answered(spec, EXACT)
    assert mistakes(spec, found, EXACT) == [] and isinstance(found, ProblemAnswer)
    return found


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_no_combination_has_a_shorter_period_than_the_bound_and_plans_keep_the_rules(block: int) -> None:
    wrong = {}
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        spec = problem_of(seed)
        assert problems_of(spec, "") == []
        found = mistakes(spec, answered(spec, gap_of(seed)), gap_of(seed))
        if found:
            wrong[seed] = (family(seed), found)
    assert not wrong


@pytest.mark.slow
def test_a_task_may_run_beside_weights_that_are_brought_to_another_device() -> None:
    """`other` overlaps no call of device 0, but the reallocation that holds device 0 has nothing to do with it."""
    spec = ProblemFile(
        devices=3,
        memory=100.0,
        calls=(
            call("read", 16.0, (0, 1), role="b"),
            call("train", 11.0, (1, 1), role="b", trains=True),
            call("other", 30.0, (2, 1), (1, 1), trains=True),
        ),
        edges=(EdgeSpec("read", "other"), EdgeSpec("other", "read", 1)),
        reallocations=(ReallocationSpec("train", "read", ((15.1,),), 2),),
    )
    assert solved(spec).bound == pytest.approx(46.0, rel=1e-5)


def test_the_bound_of_a_device_counts_its_reallocations_or_the_task_beside_it() -> None:
    """Two reallocations leave one train call, and one of them holds every device."""
    read = CallSpec("read", (OptionSpec(11.0, 0, 0, (0, 2)), OptionSpec(7.0, 0, 0, (0, 4))), "actor")
    calls = (call("generate", 13.0, (3, 1), role="actor"), read, call("train", 17.0, (2, 1), role="actor", trains=True))
    moves = (
        ReallocationSpec("train", "generate", ((10.0,),), 3),
        ReallocationSpec("train", "read", ((6.0, 5.0),)),
    )
    solved(ProblemFile(4, 45.0, calls, (EdgeSpec("read", "train"),), moves))


# --- calls of 0 s -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [18, 20, 26, 162, 163, 2360, 2651])
def test_options_of_0_seconds_are_planned_and_ordered(seed: int) -> None:
    spec = problem_of(seed)
    assert any(option.seconds == 0 for one in spec.calls for option in one.options)
    assert mistakes(spec, answered(spec, EXACT), EXACT) == []


def test_two_train_calls_of_0_seconds_are_planned() -> None:
    whole, halves = (0, 2), ((0, 1), (1, 1))
    options = (OptionSpec(0.0, 0, 0, whole), OptionSpec(0.0, 0, 0, meshes=halves))
    calls = tuple(CallSpec(name, options, name, True) for name in ("actor", "critic"))
    found = solved(ProblemFile(2, 10.0, calls))
    assert (found.period, found.bound) == (0.0, 0.0)


def test_delays_hold_where_no_call_takes_time() -> None:
    calls = (call("first", 0.0, (0, 1)), call("second", 0.0, (0, 1)), call("third", 0.0, (0, 1)))
    found = solved(
        ProblemFile(1, 1.0, calls, (EdgeSpec("first", "third", 0, 1.5), EdgeSpec("third", "second", 1, 1.0)))
    )
    assert found.period == 0.0 and found.starts == {"first": 0.0, "third": 1.5, "second": 2.5}


def test_a_call_of_0_seconds_lies_between_calls_not_inside_one() -> None:
    """`moment` waits 3 s for `long` to have begun, but may run only when `long` is done."""
    calls = (call("long", 10.0, (0, 1)), call("moment", 0.0, (0, 1)), call("begins", 0.0, (1, 1)))
    edges = (EdgeSpec("begins", "moment", 0, 3.0), EdgeSpec("begins", "long"), EdgeSpec("moment", "begins", 1))
    found = solved(ProblemFile(2, 1.0, calls, edges))
    phase = (found.starts["moment"] - found.starts["long"]) % found.period
    assert min(phase, found.period - phase) <= 1e-6
    assert next(turn.call for order in found.orders if (0, 1) in order.devices for turn in order.turns) == "moment"


def test_weights_are_brought_only_after_the_outputs_of_their_source_are_ready() -> None:
    calls = (call("train", 2.0, (0, 1), role="a", trains=True, latency=7.0), call("read", 1.0, (1, 1), role="a"))
    spec = ProblemFile(2, 1.0, calls, (EdgeSpec("read", "train"),), (ReallocationSpec("train", "read", ((3.0,),)),))
    found = solved(spec)
    assert found.period == pytest.approx(1.0 + 7.0 + 3.0)
    assert found.starts["reallocate:read"] + found.period - found.starts["train"] >= 7.0 - 1e-9


# --- the checker ------------------------------------------------------------------------------------------------------


def test_the_checker_shares_no_code_with_the_search() -> None:
    for module in (planner_bounds_arrays, planner_bounds_check, planner_bounds_walk):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert froms and not [name for name in froms | names if name.startswith(FORBIDDEN)]


@pytest.mark.slow
def test_the_checker_agrees_with_an_enumeration_of_all_orders() -> None:
    infeasible = 0
    for seed in range(150):
        problem = problem_of_seed(seed)
        best, (rows, links, room) = brute_force(problem), arrays(problem_spec(problem))
        if best is None:
            infeasible += 1
            assert not plan_within(rows, links, room, np.inf, 0), seed
            continue
        assert plan_within(rows, links, room, best.period * (1 + 1e-6), 0), seed
        less = best.period * (1 - 1e-6)
        assert less <= problem.floor_seconds or not plan_within(rows, links, room, less, 0), seed
    assert infeasible


def test_the_checker_refuses_wrong_answers() -> None:
    seen: set[str] = set()
    for seed in range(1, 140, 2):
        spec = problem_of(seed)
        found = answered(spec, EXACT)
        if not isinstance(found, ProblemAnswer) or found.period < 0.1:
            continue
        assert mistakes(spec, found, EXACT) == []
        if found.period > spec.floor_seconds * 1.01:
            high = replace(found, bound=found.period * 1.001, period=found.period * 1.001)
            assert any("bound" in text for text in mistakes(spec, high, EXACT)), seed
            low = replace(found, period=found.period * 0.99, bound=found.bound * 0.99)
            assert mistakes(spec, low, EXACT), seed
        rng = random.Random(seed)
        name = rng.choice(sorted(found.starts))
        moved = replace(found, starts={**found.starts, name: found.starts[name] + rng.uniform(0.2, 0.8) * found.period})
        seen |= {text.split()[-1] for text in mistakes(spec, moved, EXACT)}
        turned = [replace(order, turns=order.turns[::-1]) for order in found.orders]
        if any(len(order.turns) > 2 for order in found.orders) and found.period > 1.0:
            seen |= {text.split()[-1] for text in mistakes(spec, replace(found, orders=tuple(turned)), EXACT)}
    assert len(seen) > 5, seen


def test_random_problems_use_the_whole_format() -> None:
    specs = [problem_of(seed) for seed in range(180)]
    assert {family(seed) for seed in range(180)} == set(
        itertools.product(("ppo", "grpo", "any"), ("halves", "runs", "irregular"), ("whole", "any", "zeros", "equal"))
    )
    texts = [problem_text(spec) for spec in specs]
    for word in (
        "host_memory",
        "ties",
        "in_place",
        "offloaded",
        "latency",
        "shared",
        "floor_seconds",
        "distance",
        "dp",
    ):
        assert any(f'"{word}"' in text for text in texts), word
    assert all(read_problem(text).spec == spec for text, spec in zip(texts, specs, strict=True))
    assert max(entry.distance for spec in specs for entry in spec.reallocations) > 4
