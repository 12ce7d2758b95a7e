"""Devices of a planning problem that can be exchanged: proven from its numbers, as no problem file says so.

Two neighbouring blocks of devices can be exchanged where each mesh goes over into a mesh with the same table for every
task, devices and nodes have the same memory, and every move takes as long as before.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.problem import DeviceBlock, Ints, Move, SearchProblem


class Numbers(Struct, frozen=True, eq=False):
    """A problem as arrays over its meshes, in order of (first, devices)."""

    first: Ints
    size: Ints
    keys: Ints  # first x (devices + 1) + size, rising
    tables: Ints  # [tasks, meshes], -1 where barred
    # [meshes, meshes] per move, equal numbers for equal matrices of seconds, -1 where one of the two is barred
    moves: tuple[Ints, ...]


def symmetric_tree(problem: SearchProblem, rows: Mapping[tuple[str, int], Ints]) -> DeviceBlock | None:
    """The devices as a tree of halves (and of thirds, fifths ... where they are odd); None where nothing is symmetric.

    rows: of every task and mesh, what its options are: equal rows make equal matrices of moves.
    """
    numbers = _numbers(problem, rows)
    tree = _block(problem, numbers, (0, problem.devices))
    return tree if _any_symmetric(tree) else None


def _any_symmetric(block: DeviceBlock) -> bool:
    return (bool(block.children) and block.symmetric) or any(map(_any_symmetric, block.children))


def _block(problem: SearchProblem, numbers: Numbers, place: tuple[int, int]) -> DeviceBlock:
    first, size = place
    parts = _parts(size, problem.devices_per_node)
    if parts == 1:
        return DeviceBlock(first, size)
    width = size // parts
    children = tuple(_block(problem, numbers, (first + i * width, width)) for i in range(parts))
    same = all(_exchangeable(problem, numbers, (first + i * width, width)) for i in range(parts - 1))
    return DeviceBlock(first, size, children, symmetric=same)


def _parts(size: int, per_node: int) -> int:
    """Into how many parts to cut: the least prime factor of the nodes, or of the devices of a node."""
    whole = size // per_node if size % per_node == 0 and size > per_node else size
    if size > per_node and whole == size:
        return 1  # neither whole nodes nor a part of one
    return next((factor for factor in range(2, whole + 1) if whole % factor == 0), 1)


def _exchangeable(problem: SearchProblem, numbers: Numbers, place: tuple[int, int]) -> bool:
    """True where the block at `place` and the one after it can be exchanged."""
    at, width = place
    if not _same_memory(problem, at, width):
        return False
    ends = numbers.first + numbers.size
    left = (numbers.first >= at) & (ends <= at + width)
    right = (numbers.first >= at + width) & (ends <= at + 2 * width)
    around = (numbers.first <= at) & (ends >= at + 2 * width)
    apart = (ends <= at) | (numbers.first >= at + 2 * width)
    if not (left | right | around | apart).all():
        return False
    images = numbers.keys + (left.astype(np.int64) - right.astype(np.int64)) * width * (problem.devices + 1)
    after = np.minimum(np.searchsorted(numbers.keys, images), len(numbers.keys) - 1)
    if (numbers.keys[after] != images).any() or (numbers.tables[:, after] != numbers.tables).any():
        return False
    moved = np.flatnonzero(left | right)
    return all(
        (move[np.ix_(moved, np.arange(len(after)))] == move[np.ix_(after[moved], after)]).all()
        and (move[:, moved] == move[np.ix_(after, after[moved])]).all()
        for move in numbers.moves
    )


def _same_memory(problem: SearchProblem, at: int, width: int) -> bool:
    if (problem.memory[at : at + width] != problem.memory[at + width : at + 2 * width]).any():
        return False
    if width < problem.devices_per_node:
        return True
    node, nodes = at // problem.devices_per_node, width // problem.devices_per_node
    host = problem.host_memory[node : node + 2 * nodes]
    return bool((host[:nodes] == host[nodes:]).all())


def _numbers(problem: SearchProblem, rows: Mapping[tuple[str, int], Ints]) -> Numbers:
    """The meshes of `problem` must be in order of (first, devices)."""
    first = np.array([mesh.first for mesh in problem.meshes], np.int64)
    size = np.array([mesh.n_devices for mesh in problem.meshes], np.int64)
    tables = np.full((len(problem.tasks), len(first)), -1, np.int64)
    for i, task in enumerate(problem.tasks):
        for mesh, table in task.tables.items():
            tables[i, mesh] = table
    moves = tuple(_move_numbers(problem, rows, move) for move in problem.moves)
    return Numbers(first, size, first * (problem.devices + 1) + size, tables, moves)


def _move_numbers(problem: SearchProblem, rows: Mapping[tuple[str, int], Ints], move: Move) -> Ints:
    """[meshes, meshes]: equal numbers for equal matrices; each different pair of rows is looked at once."""
    tasks = {task.name: task for task in problem.tasks}
    sources, targets = sorted(tasks[move.source].tables), sorted(tasks[move.target].tables)
    numbers = np.full((len(problem.meshes), len(problem.meshes)), -1, np.int64)
    pairs: dict[tuple[bytes, bytes, bool], int] = {}
    matrices: dict[bytes, int] = {}
    there = {target: rows[move.target, target].tobytes() for target in targets}
    for source in sources:
        here = rows[move.source, source].tobytes()
        for target in targets:
            pair = (here, there[target], source == target)
            if pair not in pairs:
                matrix = problem.move_seconds(move, source, target)
                pairs[pair] = matrices.setdefault(matrix.tobytes(), len(matrices))
            numbers[source, target] = pairs[pair]
    return numbers
