"""The memory that choices lack: the one exact rule. `kernels/memory.py` relaxes it while some choices are still open.

On every device the `resident` bytes of all copies there and the largest `active` bytes of one task must fit; on every
node the sum of `host` bytes. Calls of a frozen role under an equal layout on one mesh keep one copy; what reads the
trained copy in place brings none of its `shared` bytes.
"""

from collections.abc import Mapping

import numpy as np

from realgraph.planner.plan.problem import Choice, Ints, OptionTable, SearchProblem, SearchTask


def fits(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    """True where the memory of every device and of every node holds what lies and runs there."""
    return bool((device_excess(problem, choices) <= 0).all() and (node_excess(problem, choices) <= 0).all())


def device_excess(problem: SearchProblem, choices: Mapping[str, Choice]) -> Ints:
    """Bytes that each device would lack; those that it has to spare are negative."""
    trained = {
        (task.role, choices[task.name].mesh, layout_of(problem, task, choices[task.name]))
        for task in problem.tasks
        if task.trains
    }
    roles = {role for role, _, _ in trained}
    copies: dict[tuple[str, int, int | str], int] = {}
    largest = np.zeros(problem.devices, np.int64)
    for task in problem.tasks:
        choice = choices[task.name]
        table, layout = table_of(problem, task, choice), layout_of(problem, task, choice)
        copy = (task.role, choice.mesh, task.name if task.role in roles else layout)
        copies[copy] = max(copies.get(copy, 0), int(table.resident[choice.option]))
        in_place = not task.trains and (task.role, choice.mesh, layout) in trained
        active = int(table.active[choice.option]) - (int(table.shared[choice.option]) if in_place else 0)
        here = _devices(problem, choice.mesh)
        largest[here] = np.maximum(largest[here], active)
    over: Ints = largest - problem.memory
    for (_, mesh, _), nbytes in copies.items():
        over[_devices(problem, mesh)] += nbytes
    return over


def node_excess(problem: SearchProblem, choices: Mapping[str, Choice]) -> Ints:
    """Bytes that the memory of each node would lack."""
    host = np.zeros(problem.devices, np.int64)
    for task in problem.tasks:
        choice = choices[task.name]
        host[_devices(problem, choice.mesh)] += int(table_of(problem, task, choice).host[choice.option])
    firsts = np.arange(0, problem.devices, problem.devices_per_node)
    over: Ints = np.add.reduceat(host, firsts) - problem.host_memory
    return over


def table_of(problem: SearchProblem, task: SearchTask, choice: Choice) -> OptionTable:
    """The option table that the choice is of."""
    return problem.tables[task.tables[choice.mesh]]


def layout_of(problem: SearchProblem, task: SearchTask, choice: Choice) -> int:
    """The number of the choice's layout."""
    return int(table_of(problem, task, choice).layout[choice.option])


def _devices(problem: SearchProblem, mesh: int) -> slice:
    return slice(problem.meshes[mesh].first, problem.meshes[mesh].devices.stop)
