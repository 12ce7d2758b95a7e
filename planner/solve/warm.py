"""Brings the search's machine code into memory before any clock runs: compiled by a first call, or kept from one."""

from functools import lru_cache

import numpy as np

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import Limits, Move, OptionTable, Precedence, SearchProblem, SearchTask
from realgraph.planner.solve.kernels.compiled import fast_compile
from realgraph.planner.solve.kernels.dominance import columns_of, nondominated
from realgraph.planner.solve.search import Search


@lru_cache(maxsize=1)
def warm() -> None:
    """Solves a problem of two tasks and a move, and prunes a table: calls all that is compiled; once per process.

    All of it lies on one of two devices: no dual bound is tight, so placements are searched as well.
    """
    table = OptionTable(np.ones(1), np.ones(1), *(np.ones(1, np.int64) for _ in range(5)))
    tasks = (SearchTask("train", "role", True, {0: 0}), SearchTask("read", "role", False, {0: 0}))
    memory = np.full(2, 100, np.int64)
    edges = (Precedence("read", "train", 0),)
    moves = (Move("train", "read", 2),)
    meshes = (DeviceMesh(0, 1),)
    problem = SearchProblem(2, 2, memory, memory[:1], meshes, (table,), tasks, edges, moves, lambda *_: np.ones((1, 1)))
    with fast_compile():
        nondominated(columns_of(table, np.zeros(1, np.int64)), 0)
        Search(problem, Limits()).run()
