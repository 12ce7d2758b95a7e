"""The search for the best plan of a planning problem, and the exact period of a given one.

The compiled code is imported when it is first needed: commands that only check a file stay quick.
"""

from collections.abc import Mapping

from realgraph.planner.plan.plan import Turn
from realgraph.planner.plan.problem import Choice, Limits, Schedule, SearchProblem, Solution, Unsolved


def solve(problem: SearchProblem, limits: Limits = Limits()) -> Solution | Unsolved:
    """The plan of the least period, within limits.gap of the best one where time allows that proof.

    Deterministic but for the moment at which time ends it. Scope of the bound: 1-periodic schedules of the problem's
    own meshes and options.
    """
    from realgraph.planner.solve.search import Search
    from realgraph.planner.solve.warm import warm

    warm()
    return Search(problem, limits).run()


def evaluate(problem: SearchProblem, choices: Mapping[str, Choice]) -> Schedule | None:
    """The least period of given choices, exact to a relative 1e-8; None where memory, ties or a circuit forbid them."""
    from realgraph.planner.solve import evaluate as compiled

    return compiled.evaluate(problem, choices)


def orders(problem: SearchProblem, solution: Solution) -> dict[int, tuple[Turn, ...]]:
    """Every device's tasks and moves in the order of one round."""
    from realgraph.planner.solve import evaluate as compiled

    return compiled.orders(problem, solution)


def most_seconds(problem: SearchProblem, name: str, period: float) -> dict[int, float]:
    """Devices of a mesh -> the most seconds that a task may take there in a plan of less than `period`; no entry where
    there is no such plan."""
    from realgraph.planner.solve import room

    return room.most_seconds(problem, name, period)
