"""The ascent of multipliers: what it proves is what its multipliers prove, and it never loses what was proven."""

import random
from typing import Any, cast

import numpy as np
import pytest

from realgraph.planner.solve.bound import ascend, dual_bound, first_multipliers, rows_of
from realgraph.planner.solve.kernels.ascent import project
from realgraph.planner.solve.kernels.instance import instance_of
from tests.planner_oracles import brute_force
from tests.planner_problems import problem_of_seed


@pytest.mark.parametrize("block", range(4))
def test_an_ascent_proves_what_its_multipliers_prove(block: int) -> None:
    raised = 0
    for seed in range(50 * block, 50 * block + 50):
        problem = problem_of_seed(seed)
        instance = instance_of(problem)
        longest = float(instance.seconds.max(initial=0.0)) * len(problem.tasks)
        rows = rows_of(instance, instance.tables >= 0, longest)
        if rows is None:
            continue
        start = first_multipliers(rows)
        for steps in (0, 1, 40):
            found = ascend(rows, start, longest, steps)
            assert found.bound >= start.bound, (seed, steps)
            assert found.bound == pytest.approx(dual_bound(rows, found).bound, rel=1e-9), (seed, steps)
            assert found.cliques.sum() == pytest.approx(1.0) and (found.cliques >= 0).all(), (seed, steps)
            assert (found.memory >= 0).all(), (seed, steps)
        raised += found.bound > start.bound
    assert raised >= 5


@pytest.mark.parametrize("block", range(2))
def test_no_plan_is_faster_than_an_ascent_proves(block: int) -> None:
    compared = 0
    for seed in range(500 + 20 * block, 520 + 20 * block):
        problem = problem_of_seed(seed)
        best, instance = brute_force(problem), instance_of(problem)
        if best is None:
            continue
        rows = rows_of(instance, instance.tables >= 0, best.period)
        assert rows is not None, seed
        found = ascend(rows, first_multipliers(rows), 2 * best.period, 100)
        assert found.bound <= best.period * (1 + 1e-9), seed
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("block", range(4))
def test_the_projection_is_the_nearest_point_of_the_simplex(block: int) -> None:
    """Beside the one that sorts (Duchi et al. 2008). Some values lie at the threshold, give or take a rounding."""
    for seed in range(500 * block, 500 * block + 500):
        rng = random.Random(seed)
        n, scale = rng.randint(1, 12), rng.choice([1.0, 1.0, 1e-3, 1e6])
        part = 1 / rng.randint(1, n)
        values = np.array([scale * rng.choice([0.1, 0.7, part, part + 0.1, part + 0.7]) for _ in range(n)])
        falling = np.sort(values)[::-1]
        excess = (np.cumsum(falling) - 1.0) / np.arange(1, n + 1)
        nearest = np.maximum(0.0, values - excess[np.flatnonzero(falling > excess)[-1]])
        found = values.copy()
        cast(Any, project).py_func(found)
        assert found == pytest.approx(nearest, abs=1e-9 * max(1.0, scale)), seed
        assert found.sum() == pytest.approx(1.0) and (found >= 0).all(), seed
