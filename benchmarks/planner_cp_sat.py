"""CP-SAT (ortools) on a planning problem: the constraint program of tests/planner_cp_sat.py under a limit of time.

A peer that need not be installed. It plans on durations rounded to 1 / 100 s, so its period is no row of the claim that
no peer is better; what it says is how far a general solver gets on the same problem.
"""

import importlib.util
import time

from msgspec import Struct

from realgraph.planner.plan.problem import SearchProblem

MOST_PAIRS = 100_000  # pairs of options of two calls that weights move between: each is a literal of the program


class ConstraintProgram(Struct, frozen=True):
    """CP-SAT's answer, as a constraint program."""

    period: float | None = None  # None where it has none
    bound: float | None = None  # None where it has none
    proven: bool = False
    seconds: float = 0.0  # of wall time, the making of the model included
    note: str = ""  # why it was not tried, '' where it was


def programmed(problem: SearchProblem, seconds: float) -> ConstraintProgram:
    """CP-SAT's best plan within so many seconds of solving, or why it was left out."""
    note = _left_out(problem, seconds)
    if note:
        return ConstraintProgram(note=note)
    from tests.planner_cp_sat import cp_sat

    began = time.monotonic()
    found = cp_sat(problem, seconds)
    took = time.monotonic() - began
    return ConstraintProgram(_finite(found.period), _finite(found.bound), found.proven, took)


def _left_out(problem: SearchProblem, seconds: float) -> str:
    if seconds <= 0:
        return "not asked for"
    if importlib.util.find_spec("ortools") is None:
        return "ortools is not installed"
    options = {task.name: sum(len(problem.tables[number]) for number in task.tables.values()) for task in problem.tasks}
    pairs = sum(options[move.source] * options[move.target] for move in problem.moves)
    return f"{pairs:,} pairs of options are too many for it" if pairs > MOST_PAIRS else ""


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
