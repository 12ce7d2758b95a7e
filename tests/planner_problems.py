"""Small random planning problems: roles that are trained or frozen, tables on a few meshes, limits that sometimes bind.

Where a problem carries a tree of devices, everything in it depends on the shape of meshes alone, never on their place.
"""

import random
from itertools import combinations

import numpy as np
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import (
    DeviceBlock,
    Floats,
    Ints,
    Move,
    OptionTable,
    Precedence,
    SearchProblem,
    SearchTask,
    Tie,
)

ROLES = ("actor", "critic", "ref", "judge")


class Size(Struct, frozen=True):
    """Limits of a random problem. choices: at most about so many combinations of all tasks' options."""

    tasks: tuple[int, int] = (2, 6)
    devices: tuple[int, ...] = (4, 8)
    choices: int = 3000
    options: int = 3


class MoveTable(Struct, frozen=True, eq=False):
    """Seconds to bring weights over: by how two meshes lie to each other, and by the two options' layouts.

    quicker: options of equal layouts differ as well, as under unlike micro-batches: the later ones of a table are moved
    faster, each by so much.
    """

    meshes: tuple[DeviceMesh, ...]
    layouts: dict[tuple[str, int], Ints]
    base: dict[tuple[str, str], float]
    quicker: float = 0.0

    def __call__(self, move: Move, source: int, target: int) -> Floats:
        left, right = self.meshes[source], self.meshes[target]
        here, there = self.layouts[move.source, source], self.layouts[move.target, target]
        distance = 1.0 if left.overlaps(right) else 1.5
        scale = distance * self.base[move.source, move.target] / min(left.n_devices, right.n_devices)
        seconds: Floats = scale * (1.0 + ((here[:, None] * 7 + there[None, :] * 3) % 5) / 10)
        seconds /= 1.0 + self.quicker * (np.arange(len(here))[:, None] + np.arange(len(there))[None, :])
        return np.where((here[:, None] == there[None, :]) & (left == right), 0.0, seconds)


def small_meshes(devices: int, smallest: int) -> tuple[DeviceMesh, ...]:
    """All aligned powers of two of `devices`, from everything down to `smallest` devices."""
    sizes = [devices >> shift for shift in range(devices.bit_length()) if devices >> shift >= smallest]
    return tuple(DeviceMesh(first, size) for size in sizes for first in range(0, devices, size))


def run_meshes(devices: int) -> tuple[DeviceMesh, ...]:
    """All runs of neighbours among four equal blocks."""
    width = devices // 4
    runs = [(i, j) for i in range(4) for j in range(i + 1, 5)]
    return tuple(DeviceMesh(i * width, (j - i) * width) for i, j in sorted(runs, key=lambda r: (r[0] - r[1], r[0])))


def quartered(devices: int) -> DeviceBlock:
    """The tree of four blocks, with the runs of `run_meshes`."""
    width = devices // 4
    return DeviceBlock(0, devices, tuple(halved(i * width, width) for i in range(4)))


def halved(first: int, devices: int) -> DeviceBlock:
    """The tree whose blocks are split in two down to single devices."""
    if devices == 1:
        return DeviceBlock(first, 1)
    half = devices // 2
    return DeviceBlock(first, devices, (halved(first, half), halved(first + half, half)))


def random_problem(rng: random.Random, size: Size = Size()) -> SearchProblem:
    """Two to six tasks on four or eight devices, every field of the problem in use now and then."""
    devices = rng.choice(size.devices)
    per_node = rng.choice([devices, devices // 2])
    in_runs = rng.random() < 0.3
    meshes = run_meshes(devices) if in_runs else small_meshes(devices, rng.choice([max(1, devices // 4), devices // 2]))
    tasks = _tasks(rng, rng.randint(*size.tasks))
    placed, tables = _tables(rng, tasks, meshes, size)
    precedences, moves = _edges(rng, placed)
    symmetric = rng.random() < 0.6
    memory = np.full(devices, _cap(rng, placed, tables), np.int64)
    host = np.full(devices // per_node, rng.choice([10**6, rng.randint(10, 60)]), np.int64)
    if not symmetric and rng.random() < 0.5:
        memory = np.maximum(0, memory - np.array([rng.randint(0, 15) for _ in range(devices)], np.int64))
    tree = quartered(devices) if in_runs else halved(0, devices)
    layouts = {(task.name, mesh): tables[table].layout for task in placed for mesh, table in task.tables.items()}
    base = {(move.source, move.target): rng.choice([0.0, rng.uniform(0.1, 6.0)]) for move in moves}
    moved = MoveTable(meshes, layouts, base)
    problem = SearchProblem(
        devices=devices,
        devices_per_node=per_node,
        memory=memory,
        host_memory=host,
        meshes=meshes,
        tables=tables,
        tasks=placed,
        precedences=precedences,
        moves=moves,
        ties=_ties(rng, placed),
        move_seconds=moved,
        tree=tree if symmetric and _same_by_size(placed, meshes) else None,
        floor_seconds=rng.choice([0.0, 0.0, 0.0, rng.uniform(1.0, 40.0)]),
    )
    if rng.random() < 0.6:  # drawn last: what else a seed stands for does not depend on it
        return problem
    return replace(problem, moves_by_layout=False, move_seconds=replace(moved, quicker=0.3))


def with_slower_twins(problem: SearchProblem) -> SearchProblem:
    """Each first option of a task whose weights are moved once more: a little slower, but moved much faster."""
    moved = {name for move in problem.moves for name in (move.source, move.target)}
    known = {table for task in problem.tasks if task.name in moved for table in task.tables.values()}
    tables = tuple(_twinned(table) if i in known else table for i, table in enumerate(problem.tables))
    layouts = {(task.name, mesh): tables[table].layout for task in problem.tasks for mesh, table in task.tables.items()}
    assert isinstance(problem.move_seconds, MoveTable)
    quick = replace(problem.move_seconds, layouts=layouts, quicker=3.0)
    return replace(problem, tables=tables, move_seconds=quick, moves_by_layout=False)


def _twinned(table: OptionTable) -> OptionTable:
    columns = {name: np.append(getattr(table, name), getattr(table, name)[0]) for name in OptionTable.__struct_fields__}
    columns["seconds"][-1] *= 1.01
    columns["latency"][-1] *= 1.01
    return OptionTable(**columns)


def problem_of_seed(seed: int, size: Size = Size()) -> SearchProblem:
    return random_problem(random.Random(seed), size)


problems = st.randoms(use_true_random=False).map(random_problem)


def _tasks(rng: random.Random, count: int) -> list[SearchTask]:
    """Random tasks in topological order, without tables: roles are trained by their last task, or frozen."""
    roles = [rng.choice(ROLES) for _ in range(count)]
    trained = {role for role in sorted(set(roles)) if rng.random() < 0.6}
    last = {role: max(i for i, name in enumerate(roles) if name == role) for role in trained}
    twice = {role for role in sorted(trained) if rng.random() < 0.15}
    return [
        SearchTask(
            f"task{i}", role, role in trained and (i == last[role] or (role in twice and rng.random() < 0.5)), {}
        )
        for i, role in enumerate(roles)
    ]


def _tables(
    rng: random.Random, tasks: list[SearchTask], meshes: tuple[DeviceMesh, ...], size: Size
) -> tuple[tuple[SearchTask, ...], tuple[OptionTable, ...]]:
    """A table per task and mesh size; a few meshes are barred; the product of the choices is held down."""
    room = max(1, int(size.choices ** (1 / len(tasks))))
    tables: list[OptionTable] = []
    placed: list[SearchTask] = []
    frozen = {task.role for task in tasks} - {task.role for task in tasks if task.trains}
    weights = {(role, n): rng.randint(2, 12) for role in ROLES for n in sorted({mesh.n_devices for mesh in meshes})}
    for task in tasks:
        allowed = [number for number in range(len(meshes)) if rng.random() < 0.85]
        by_size = rng.random() < 0.6
        if by_size or not allowed:
            allowed = list(range(len(meshes)))
        if len(allowed) > room and not by_size:
            allowed = sorted(rng.sample(allowed, room))
        while by_size and len(allowed) > max(room, 1) and len({meshes[m].n_devices for m in allowed}) > 1:
            gone = rng.choice(sorted({meshes[m].n_devices for m in allowed}))
            allowed = [m for m in allowed if meshes[m].n_devices != gone]
        per_mesh = max(1, min(size.options, room // len(allowed)))
        numbers: dict[int, int] = {}
        work = rng.uniform(10, 100)
        for n_devices in sorted({meshes[m].n_devices for m in allowed}):
            held = (
                weights[task.role, n_devices] if task.role in frozen else None,
                work / n_devices ** rng.uniform(0.5, 1),
            )
            numbers[n_devices] = len(tables)
            tables.append(_table(rng, rng.randint(1, per_mesh), n_devices, held))
            if task.trains:
                tables[-1].shared[:] = 0
        placed.append(SearchTask(task.name, task.role, task.trains, {m: numbers[meshes[m].n_devices] for m in allowed}))
    return tuple(placed), tuple(tables)


def _table(rng: random.Random, options: int, n_devices: int, held: tuple[int | None, float]) -> OptionTable:
    """held: the resident bytes of a frozen role's copy here, and the seconds of an option of middling speed."""
    copy, middling = held
    seconds = np.array([round(middling * rng.uniform(0.7, 1.5), rng.choice([0, 3])) + 0.5 for _ in range(options)])
    longer = np.array([rng.choice([1.0, 1.0, 1.0, rng.uniform(1.0, 3.0)]) for _ in range(options)])
    active = np.array([rng.randint(0, 30) for _ in range(options)], np.int64)
    stays = [rng.choice([0, rng.randint(0, 25)]) if copy is None else rng.choice([0, copy]) for _ in range(options)]
    layout = np.array([n_devices * 10 + rng.randint(0, 2) for _ in range(options)], np.int64)
    resident = np.array(stays, np.int64)
    if copy is not None:  # one copy is one size: twins under an equal layout either all hold it or none
        resident = np.where(layout % 2 == 0, copy, 0).astype(np.int64)
    return OptionTable(
        seconds=seconds,
        latency=seconds * longer,
        resident=resident,
        active=active,
        shared=(active * rng.choice([0.0, 0.5, 1.0])).astype(np.int64),
        host=np.array([rng.choice([0, 0, rng.randint(1, 8)]) for _ in range(options)], np.int64),
        layout=layout,
    )


def _edges(rng: random.Random, tasks: tuple[SearchTask, ...]) -> tuple[tuple[Precedence, ...], tuple[Move, ...]]:
    """Data of the same step or the one before, weights from train calls, and now and then a second step of slack."""
    found: list[Precedence] = []
    density = rng.uniform(0.1, 0.8)
    for source, target in combinations(tasks, 2):
        if rng.random() < density:
            found.append(Precedence(source.name, target.name, rng.choice([0, 0, 0, 1]), _delay(rng)))
    if len(tasks) > 1 and rng.random() < 0.7:
        found.append(Precedence(tasks[-1].name, tasks[0].name, rng.choice([1, 1, 1, 2, 3]), _delay(rng)))
    moves: list[Move] = []
    last = {task.role: i for i, task in enumerate(tasks) if task.trains}
    for i, target in enumerate(tasks):
        if target.role in last and not target.trains:
            trained = tasks[last[target.role]].name
            distance = rng.choice([1, 1, 1, 2]) if last[target.role] > i else rng.choice([0, 1])
            if rng.random() < 0.8:
                moves.append(Move(trained, target.name, distance))
            if rng.random() < 0.5:
                found.append(Precedence(trained, target.name, distance))
    return tuple(found), tuple(moves)


def _ties(rng: random.Random, tasks: tuple[SearchTask, ...]) -> tuple[Tie, ...]:
    """Now and then two tasks that must share a mesh, of one role perhaps a layout too."""
    pairs = [pair for pair in combinations(tasks, 2) if pair[0].tables.keys() & pair[1].tables.keys()]
    if not pairs or rng.random() < 0.8:
        return ()
    left, right = rng.choice(pairs)
    return (Tie((left.name, right.name), left.role == right.role and rng.random() < 0.5),)


def _delay(rng: random.Random) -> float:
    return rng.choice([0.0, 0.0, rng.uniform(0.0, 5.0)])


def _cap(rng: random.Random, tasks: tuple[SearchTask, ...], tables: tuple[OptionTable, ...]) -> int:
    """Bytes of a device: plenty, scarce, or too few for many of the choices."""
    least = sum(min(int(tables[t].resident.min()) for t in task.tables.values()) for task in tasks)
    most = sum(max(int(tables[t].resident.max()) for t in task.tables.values()) for task in tasks)
    return rng.choice([10**6, rng.randint(least, most + 30) + 5, least + rng.randint(10, 40)])


def _same_by_size(tasks: tuple[SearchTask, ...], meshes: tuple[DeviceMesh, ...]) -> bool:
    """True where each task may lie on all meshes of a size, or on none."""
    sizes = [mesh.n_devices for mesh in meshes]
    return all(
        sum(meshes[m].n_devices == size for m in task.tables) in (0, sizes.count(size))
        for task in tasks
        for size in set(sizes)
    )
