"""The peers of the planner's benchmark: their plans are plans, and none of them beats the optimum."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.planner_chain import MoveCache, _fits, _makespan, _moved, chained, flat
from benchmarks.planner_peers import mapped, partitions
from realgraph.planner.plan.problem import SearchProblem
from tests.planner_oracles import brute_force, every_choice, fits
from tests.planner_problems import Size, problem_of_seed

SMALL = Size(tasks=(2, 5), choices=400)


def without_ties(seed: int) -> SearchProblem:
    """The problem of a seed without ties, on devices that are all alike, as the peers want it."""
    problem = problem_of_seed(seed, SMALL)
    return replace(problem, ties=(), memory=np.full_like(problem.memory, problem.memory.min()))


def test_partitions_are_all_different_and_complete() -> None:
    for n, bell in enumerate((1, 1, 2, 5, 15, 52)):
        found = {frozenset(map(frozenset, sets)) for sets in partitions("abcde"[:n])}
        assert len(found) == bell
        assert all(sorted(item for some in sets for item in some) == sorted("abcde"[:n]) for sets in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_the_chain_knows_what_fits_and_never_undercuts_the_busiest_device(seed: int) -> None:
    problem, rng = without_ties(seed), random.Random(seed)
    data, cache = flat(problem), MoveCache(problem)
    for _ in range(20):
        state = np.array([rng.randrange(data.begin[i], data.begin[i + 1]) for i in range(len(problem.tasks))])
        choices = {
            task.name: next(
                choice
                for choice in every_choice(problem, task)
                if (choice.mesh, choice.option) == (data.mesh[c], data.local[c])
            )
            for task, c in zip(problem.tasks, state, strict=True)
        }
        assert _fits(data, state) == fits(problem, choices)
        moved = np.zeros(len(problem.moves))
        while (i := _moved(data, (cache.known, cache.begin, cache.pool), state, moved)) >= 0:
            cache.ask(i, *(int(data.mesh[state[end]]) for end in data.moves[i, :2]))
        busiest = max(
            sum(
                float(data.seconds[data.row[c]])
                for c in state
                if data.first[c] <= device < data.first[c] + data.size[c]
            )
            for device in range(problem.devices)
        )
        assert _makespan(data, state, moved) >= busiest * (1 - 1e-9)


@pytest.fixture(scope="module")
def compiled() -> None:
    """The chain's machine code is there before its time counts."""
    chained(without_ties(0), 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(12))
def test_no_peer_beats_the_optimum(seed: int) -> None:
    problem = without_ties(seed)
    best = brute_force(problem)
    optimum = float("inf") if best is None else best.period
    assert mapped(problem).period >= optimum * (1 - 1e-6)
    chain = chained(problem, 0.1, seed)
    assert chain.period >= optimum * (1 - 1e-6)
    assert chain.tried > 0
