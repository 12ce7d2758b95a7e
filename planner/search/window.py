"""Bounds on the stream of every plan that is faster than a known one: see `costs/generate/refined.py`. Prices nothing.

From tables of wide intervals, which are bounds of every stream as well.
"""

from functools import cache

import numpy as np

from realgraph.planner.costs.generate.refined import StreamWindow
from realgraph.planner.options.tables import PreparedProblem
from realgraph.planner.plan.problem import SearchProblem
from realgraph.planner.solve.solver import most_seconds


def window_of(prepared: PreparedProblem, period: float) -> StreamWindow:
    """The window of the request's stream in plans of less than `period`."""
    request, problem = prepared.request, prepared.problem
    call, distance = request.graph.generates[0], 1 + request.workload.staleness
    most = tuple(sorted(most_seconds(problem, call, period).items()))
    return StreamWindow(period, return_seconds(problem, call, distance), distance, most)


def return_seconds(problem: SearchProblem, call: str, distance: int) -> float:
    """Seconds from the end of a call's outputs until its run so many steps later may start, at least: the longest path
    back to it, every task as fast as it may be anywhere; -inf where no path leads back."""
    least = {
        task.name: min(float(np.min(problem.tables[n].latency, initial=np.inf)) for n in task.tables.values())
        for task in problem.tasks
        if task.tables
    }
    arcs = [(one.source, one.target, one.distance, one.delay) for one in problem.precedences]
    arcs += [(one.source, one.target, one.distance, 0.0) for one in problem.moves]

    @cache
    def longest(name: str) -> float:
        """From the end of a task's outputs; arcs within a step form no circuit."""
        paths = [-np.inf]
        for source, target, steps, delay in arcs:
            if source == name and target == call:
                paths.append(delay if steps == distance else -np.inf)
            elif source == name and steps == 0:
                paths.append(delay + least.get(target, 0.0) + longest(target))
        return max(paths)

    return longest(call)
