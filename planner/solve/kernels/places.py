"""The places of a mesh that differ: of those that a symmetry of the devices maps onto each other, one stands for all.

A symmetry permutes the children of blocks. It is used only where it maps every mesh that a task may still take onto one
with the same table, and where all that has a place already stays as it is. Two kinds per block: any permutation, where
no mesh is a run of some of the children, else the reversal.
"""

from typing import NamedTuple

import numpy as np

from realgraph.planner.plan.problem import DeviceBlock, SearchProblem
from realgraph.planner.solve.kernels.compiled import Ints, Mask, compiled
from realgraph.planner.solve.kernels.instance import Instance

NO_SYMMETRY, REVERSAL, PERMUTATION = 0, 1, 2


class Tree(NamedTuple):
    """Blocks from the top; only those that hold a mesh. Children of a block are numbered one after the other."""

    first: Ints  # [blocks]
    size: Ints
    child: Ints  # [blocks + 1]: children of block b are child[b] to child[b + 1]
    mesh: Ints  # the mesh that is the block, -1 where none is
    run: Ints  # [blocks + 1]: runs of its children are run[b] to run[b + 1]
    run_mesh: Ints  # [runs]
    run_from: Ints  # number of the run's first child in its block
    run_length: Ints
    symmetry: Ints  # [blocks], of its children
    kin: Ints  # [blocks]: equal for siblings that look alike
    stack: Ints  # [blocks]: scratch


class _Branch:
    """A block while the tree is built."""

    def __init__(self, block: DeviceBlock) -> None:
        self.block = block
        self.mesh = -1
        self.runs: list[tuple[int, int, int]] = []  # mesh, from, length
        self.children: list[_Branch] = []
        self.shape: int = -1
        self.symmetry = NO_SYMMETRY


def tree_of(problem: SearchProblem, allowed: Mask) -> Tree | None:
    """The blocks under the meshes that tasks may choose from; None where some mesh is neither block nor run.

    allowed: bool [tasks, meshes]. Tasks with one mesh left are placed first, and may lie anywhere.
    """
    if problem.tree is None:
        return None
    choosers = [i for i in range(len(problem.tasks)) if allowed[i].sum() > 1]
    wanted = {
        (problem.meshes[m].first, problem.meshes[m].n_devices): int(m)
        for m in np.flatnonzero(allowed[choosers].any(axis=0))
    }
    left = dict(wanted)
    root = _branch(problem.tree, left)
    if left or root is None:
        return None
    shapes: dict[tuple[object, ...], int] = {}
    _name_shapes(root, problem, [problem.tasks[i].tables for i in choosers], allowed[choosers], shapes)
    return _flat(root)


def _branch(block: DeviceBlock, left: dict[tuple[int, int], int]) -> _Branch | None:
    """The block with all meshes under it, which are taken out of `left`; None where there is none."""
    made = _Branch(block)
    made.mesh = left.pop((block.first, block.n_devices), -1)
    branches = [_branch(child, left) for child in block.children]
    for start in range(len(block.children)):
        size = block.children[start].n_devices
        for end in range(start + 1, len(block.children)):
            size += block.children[end].n_devices
            mesh = left.pop((block.children[start].first, size), -1)
            if mesh >= 0:
                made.runs.append((mesh, start, end + 1 - start))
    kept = [branch for branch in branches if branch is not None]
    if kept or made.runs:
        made.children = [branch or _Branch(child) for branch, child in zip(branches, block.children, strict=True)]
    return made if made.mesh >= 0 or made.children else None


def _name_shapes(
    branch: _Branch,
    problem: SearchProblem,
    tables: list[dict[int, int]],
    allowed: Mask,
    shapes: dict[tuple[object, ...], int],
) -> None:
    """Gives equal numbers to branches that look alike: in meshes, tables, memory and all below them."""

    def seen(mesh: int) -> tuple[int, ...]:
        return tuple(own[mesh] if allowed[i, mesh] else -1 for i, own in enumerate(tables)) if mesh >= 0 else ()

    for child in branch.children:
        _name_shapes(child, problem, tables, allowed, shapes)
    block = branch.block
    below = tuple(child.shape for child in branch.children)
    runs = {(start, length): seen(mesh) for mesh, start, length in branch.runs}
    if branch.children and block.symmetric:
        count = len(below)
        mirrored = {(count - start - length, length): value for (start, length), value in runs.items()}
        if not runs:
            branch.symmetry = PERMUTATION
        elif below == below[::-1] and runs == mirrored:
            branch.symmetry = REVERSAL
    devices = problem.memory[block.first : block.first + block.n_devices]
    first = block.first // problem.devices_per_node
    nodes = problem.host_memory[first : -(-(block.first + block.n_devices) // problem.devices_per_node)]
    memory = () if branch.children else _values(devices)
    key = (block.n_devices, seen(branch.mesh), tuple(sorted(runs.items())), below, memory, _values(nodes))
    branch.shape = shapes.setdefault(key, len(shapes))


def _values(values: Ints) -> tuple[int, ...]:
    """All of them, but where all are equal one."""
    distinct = np.unique(values)
    return tuple((distinct if len(distinct) < 2 else values).tolist())


def _flat(root: _Branch) -> Tree:
    order = [root]
    for branch in order:  # grows while it is walked: breadth first
        order.extend(branch.children)
    child, run = [1], [0]
    runs: list[tuple[int, int, int]] = []
    for branch in order:
        child.append(child[-1] + len(branch.children))
        runs += branch.runs
        run.append(len(runs))

    def ints(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    return Tree(
        first=ints([branch.block.first for branch in order]),
        size=ints([branch.block.n_devices for branch in order]),
        child=ints(child),
        mesh=ints([branch.mesh for branch in order]),
        run=ints(run),
        run_mesh=ints([entry[0] for entry in runs]),
        run_from=ints([entry[1] for entry in runs]),
        run_length=ints([entry[2] for entry in runs]),
        symmetry=ints([branch.symmetry for branch in order]),
        kin=ints([branch.shape for branch in order]),
        stack=np.zeros(len(order), np.int64),
    )


def no_tree() -> Tree:
    """Stands for a problem without symmetry."""
    empty = np.zeros(0, np.int64)
    return Tree(*[empty] * 11)


# --- compiled ---------------------------------------------------------------------------------------------------------


@compiled
def places(instance: Instance, tree: Tree, allowed: Mask, task: int, mesh: Ints, single: bool, meshes: Ints) -> int:
    """Fills `meshes` with meshes that `task` may take, and says how many; `mesh` has the places so far, -1 for none.

    single: the task has one mesh only, which may lie anywhere.
    """
    count = 0
    if len(tree.first) == 0 or single:
        for m in range(allowed.shape[1]):
            if allowed[task, m]:
                meshes[count] = m
                count += 1
        return count
    stack = tree.stack
    stack[0], top = 0, 1
    while top > 0:
        top -= 1
        block = stack[top]
        if tree.mesh[block] >= 0 and allowed[task, tree.mesh[block]]:
            meshes[count] = tree.mesh[block]
            count += 1
        begin, end = int(tree.child[block]), int(tree.child[block + 1])
        if begin == end:
            continue
        mirrored = tree.symmetry[block] == REVERSAL and _is_mirrored(instance, tree, mesh, begin, end)
        for r in range(tree.run[block], tree.run[block + 1]):
            other = end - begin - tree.run_length[r] - tree.run_from[r]
            if allowed[task, tree.run_mesh[r]] and not (mirrored and other < tree.run_from[r]):
                meshes[count] = tree.run_mesh[r]
                count += 1
        for child in range(end - 1, begin - 1, -1):
            if mirrored and end - 1 - (child - begin) < child:
                continue
            if tree.symmetry[block] == PERMUTATION and _has_twin(instance, tree, mesh, begin, child):
                continue
            stack[top] = child
            top += 1
    return count


@compiled
def _cover(instance: Instance, tree: Tree, mesh: Ints, block: int) -> int:
    """Bit i is set where task i lies on all of the block; -1 where some task lies on a part of it only."""
    first, end = tree.first[block], tree.first[block] + tree.size[block]
    cover = 0
    for i in range(len(mesh)):
        if mesh[i] < 0:
            continue
        left, right = instance.first[mesh[i]], instance.first[mesh[i]] + instance.size[mesh[i]]
        if left < end and first < right:
            if left > first or right < end:
                return -1
            cover |= 1 << i
    return cover


@compiled
def _is_mirrored(instance: Instance, tree: Tree, mesh: Ints, begin: int, end: int) -> bool:
    for child in range(begin, end):
        own = _cover(instance, tree, mesh, child)
        if own < 0 or own != _cover(instance, tree, mesh, end - 1 - (child - begin)):
            return False
    return True


@compiled
def _has_twin(instance: Instance, tree: Tree, mesh: Ints, begin: int, child: int) -> bool:
    """True where an earlier sibling looks alike and has the same tasks all over it."""
    own = _cover(instance, tree, mesh, child)
    if own < 0:
        return False
    for other in range(begin, child):
        if tree.kin[other] == tree.kin[child] and _cover(instance, tree, mesh, other) == own:
            return True
    return False
