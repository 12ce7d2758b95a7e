"""The search that ReaL describes, on our own problems and costs: Metropolis-Hastings over the choices of calls.

Written from the paper, not from anyone's code (Mei et al. 2024, arXiv:2406.14088, section 5): start with the fastest
option of each call; propose another (mesh, option) of one call, all alike likely; price a plan by list scheduling of
five steps, whatever is ready first runs first, three times as much where memory overflows; accept by the difference.
Here moves of weights are tasks that hold both meshes, and the temperature is relative to the makespan and tuned. The
best few plans are timed by our exact evaluator, which can only help.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from benchmarks.planner_peers import RETIMED, PeerPlan
from realgraph.planner.plan.problem import Choice, SearchProblem
from realgraph.planner.solve.solver import evaluate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STEPS = 5  # unrolled by the list scheduler
OVERFLOW = 3.0  # times the makespan, where memory does not suffice
TEMPERATURES = (0.02, 0.03, 0.06)  # of the current makespan: a worsening by so much is accepted with 1 / e
CHUNK = 20_000  # proposals between two looks at the clock
UNKNOWN = -1  # a pair of meshes whose moves were not asked for yet


class Flat(NamedTuple):
    """A problem as arrays. Candidates [c] are (task, mesh, row of a table); rows [r] are those of all tables."""

    begin: Ints  # [tasks + 1]: candidates of a task
    mesh: Ints  # [c]
    first: Ints  # [c]
    size: Ints  # [c]
    row: Ints  # [c]
    local: Ints  # [c]: row within its table
    seconds: Floats  # [r]
    latency: Floats
    resident: Ints
    active: Ints
    shared: Ints
    host: Ints
    layout: Ints
    role: Ints  # [tasks]
    trains: Ints  # [tasks]
    edges: Ints  # [e, 3]: source, target, distance
    delay: Floats  # [e]
    moves: Ints  # [m, 3]: source, target, distance
    limits: Ints  # bytes of a device, of a node; devices of a node


class MoveCache:
    """Seconds of moves, asked of the problem when a chain first needs a pair of meshes."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        n = len(problem.meshes)
        self.known = np.full((max(1, len(problem.moves)), n, n), UNKNOWN, np.int64)  # number of a matrix
        self.begin = np.zeros((64, 2), np.int64)  # [matrices, (offset in `pool`, columns)]
        self.pool = np.zeros(1 << 16)
        self._numbers: dict[bytes, int] = {}
        self._used = 0

    def ask(self, i: int, source: int, target: int) -> None:
        matrix = self._problem.move_seconds(self._problem.moves[i], source, target)
        key = matrix.shape[1].to_bytes(8, "big") + matrix.tobytes()
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers)
            if number == len(self.begin):
                self.begin = np.concatenate([self.begin, np.zeros_like(self.begin)])
            while self._used + matrix.size > len(self.pool):
                self.pool = np.concatenate([self.pool, np.zeros_like(self.pool)])
            self.begin[number] = self._used, matrix.shape[1]
            self.pool[self._used : self._used + matrix.size] = matrix.ravel()
            self._used += matrix.size
        self.known[i, source, target] = self._numbers[key]


def flat(problem: SearchProblem) -> Flat:
    """The problem as flat arrays, for a cluster of one kind."""
    start = np.cumsum([0, *(len(table) for table in problem.tables)])
    number = {task.name: i for i, task in enumerate(problem.tasks)}
    roles = {role: i for i, role in enumerate(dict.fromkeys(task.role for task in problem.tasks))}
    begin, meshes, rows, local = [0], [], [], []
    for task in problem.tasks:
        for mesh, table in sorted(task.tables.items()):
            n = len(problem.tables[table])
            meshes += [mesh] * n
            rows += range(start[table], start[table] + n)
            local += range(n)
        begin.append(len(meshes))
    columns = {
        name: np.concatenate([getattr(table, name) for table in problem.tables])
        for name in ("seconds", "latency", "resident", "active", "shared", "host", "layout")
    }
    edges = [(number[p.source], number[p.target], p.distance) for p in problem.precedences]
    moves = [(number[m.source], number[m.target], m.distance) for m in problem.moves]
    return Flat(
        begin=np.array(begin),
        mesh=np.array(meshes),
        first=np.array([problem.meshes[mesh].first for mesh in meshes]),
        size=np.array([problem.meshes[mesh].n_devices for mesh in meshes]),
        row=np.array(rows),
        local=np.array(local),
        role=np.array([roles[task.role] for task in problem.tasks]),
        trains=np.array([task.trains for task in problem.tasks], np.int64),
        edges=np.array(edges, np.int64).reshape(-1, 3),
        delay=np.array([p.delay for p in problem.precedences], np.float64),
        moves=np.array(moves, np.int64).reshape(-1, 3),
        limits=np.array([problem.memory.min(), problem.host_memory.min(), problem.devices_per_node], np.int64),
        **columns,
    )


def chained(problem: SearchProblem, seconds: float, seed: int = 0) -> PeerPlan:
    """The best of one chain per temperature, each for an equal part of `seconds` of this process's CPU time."""
    data, cache = flat(problem), MoveCache(problem)
    n = len(problem.tasks)
    start = np.array([data.begin[i] + _fastest(data, i) for i in range(n)])
    kept, periods = np.zeros((RETIMED, n), np.int64), np.full(RETIMED, np.inf)
    _proceed(data, cache, start.copy(), (np.zeros((1, n), np.int64), np.full(1, np.inf)), (0.01, 1))  # compiles
    began, tried = time.process_time(), 0
    seed_chain(seed)
    for part, temperature in enumerate(TEMPERATURES):
        state = start.copy()
        while time.process_time() - began < seconds * (part + 1) / len(TEMPERATURES):
            _proceed(data, cache, state, (kept, periods), (temperature, CHUNK))
            tried += CHUNK
    best = float("inf")
    for row in kept[np.isfinite(periods)]:
        schedule = evaluate(problem, _choices(problem, data, row))
        best = best if schedule is None else min(best, schedule.period)
    return PeerPlan(best, time.process_time() - began, tried)


def _proceed(data: Flat, cache: MoveCache, state: Ints, best: tuple[Ints, Floats], how: tuple[float, int]) -> None:
    """`how`: temperature and number of proposals. Stops to ask for moves that were never needed before."""
    temperature, left = how
    pending = -1
    while left > 0:
        done, pending, i = run_chain(
            data, (cache.known, cache.begin, cache.pool), state, best, (temperature, left, pending)
        )
        left -= done
        if i >= 0:
            task = int(np.searchsorted(data.begin, pending, side="right")) - 1 if pending >= 0 else -1
            source, target = (int(data.mesh[pending if int(end) == task else state[end]]) for end in data.moves[i, :2])
            cache.ask(i, source, target)


def _fastest(data: Flat, task: int) -> int:
    mine = slice(data.begin[task], data.begin[task + 1])
    return int(np.argmin(data.seconds[data.row[mine]]))


def _choices(problem: SearchProblem, data: Flat, state: Ints) -> Mapping[str, Choice]:
    return {
        task.name: Choice(int(data.mesh[c]), int(data.local[c])) for task, c in zip(problem.tasks, state, strict=True)
    }


# --- compiled ---------------------------------------------------------------------------------------------------------


@numba.njit(cache=True)
def seed_chain(seed: int) -> None:  # pragma: no cover - compiled
    np.random.seed(seed)


@numba.njit(cache=True)
def run_chain(
    data: Flat,
    known: tuple[Ints, Ints, Floats],
    state: Ints,
    best: tuple[Ints, Floats],
    how: tuple[float, int, int],
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Metropolis steps, which change `state` and `best`. how: temperature, proposals, and one to begin with (-1: none).

    Returns how many proposals are done; where a move was not known, the proposal that needs it, and the move (else -1).
    """
    temperature, proposals, pending = how
    total = data.begin[len(data.role)]
    moved = np.zeros(len(data.moves))
    lacking = _moved(data, known, state, moved)
    if lacking >= 0:
        return 0, pending, lacking
    cost = _makespan(data, state, moved) * (1.0 if _fits(data, state) else OVERFLOW)
    for done in range(proposals):
        candidate = pending if pending >= 0 else np.random.randint(total)
        pending = -1
        task = np.searchsorted(data.begin, candidate, side="right") - 1
        before = state[task]
        state[task] = candidate
        lacking = _moved(data, known, state, moved)
        if lacking >= 0:
            state[task] = before
            return done, candidate, lacking
        fits = _fits(data, state)
        after = _makespan(data, state, moved) * (1.0 if fits else OVERFLOW)
        if after <= cost or np.random.random() < np.exp(-(after - cost) / (temperature * cost)):
            cost = after
            if fits:
                _keep(state, after, best)
        else:
            state[task] = before
    return proposals, -1, -1


@numba.njit(cache=True)
def _moved(
    data: Flat, known: tuple[Ints, Ints, Floats], state: Ints, moved: Floats
) -> int:  # pragma: no cover - compiled
    """Fills in the seconds of all moves; the number of one that is not known, else -1."""
    matrices, begin, pool = known
    for i in range(len(data.moves)):
        source, target = state[data.moves[i, 0]], state[data.moves[i, 1]]
        matrix = matrices[i, data.mesh[source], data.mesh[target]]
        if matrix < 0:
            return i
        moved[i] = pool[begin[matrix, 0] + data.local[source] * begin[matrix, 1] + data.local[target]]
    return -1


@numba.njit(cache=True)
def _keep(state: Ints, cost: float, best: tuple[Ints, Floats]) -> None:  # pragma: no cover - compiled
    """Among the best plans of different makespans."""
    kept, periods = best
    worst = 0
    for i in range(len(periods)):
        if abs(periods[i] - cost) <= 1e-9 * cost:
            return
        if periods[i] > periods[worst]:
            worst = i
    if cost < periods[worst]:
        periods[worst] = cost
        kept[worst, :] = state


@numba.njit(cache=True)
def _fits(data: Flat, state: Ints) -> bool:  # pragma: no cover - compiled
    """True where the first device of every mesh, which holds all that others hold, and its node have the memory."""
    n, per_node = len(state), data.limits[2]
    for at in range(n):
        device = data.first[state[at]]
        node = device // per_node
        resident, active, host = 0, 0, 0
        for t in range(n):
            c, r = state[t], data.row[state[t]]
            low = max(data.first[c], node * per_node)
            high = min(data.first[c] + data.size[c], (node + 1) * per_node)
            host += max(0, high - low) * data.host[r]
            if not data.first[c] <= device < data.first[c] + data.size[c]:
                continue
            frozen, mine, needs = True, data.resident[r], data.active[r]
            for u in range(n):
                if data.role[u] == data.role[t] and data.trains[u]:
                    frozen = False
                    if not data.trains[t] and _same_copy(data, state, t, u):
                        needs = data.active[r] - data.shared[r]
            if frozen:
                for u in range(t):
                    if data.role[u] == data.role[t] and _same_copy(data, state, t, u):
                        mine = max(0, mine - data.resident[data.row[state[u]]])
            resident += mine
            active = max(active, needs)
        if resident + active > data.limits[0] or host > data.limits[1]:
            return False
    return True


@numba.njit(cache=True)
def _same_copy(data: Flat, state: Ints, t: int, u: int) -> bool:  # pragma: no cover - compiled
    same = data.mesh[state[t]] == data.mesh[state[u]]
    return same and data.layout[data.row[state[t]]] == data.layout[data.row[state[u]]]


@numba.njit(cache=True)
def _meet(data: Flat, c: int, d: int) -> bool:  # pragma: no cover - compiled
    return data.first[c] < data.first[d] + data.size[d] and data.first[d] < data.first[c] + data.size[c]


@numba.njit(cache=True)
def _makespan(data: Flat, state: Ints, moved: Floats) -> float:  # pragma: no cover - compiled
    """Seconds a step of STEPS steps, where whatever is ready first runs first on meshes that overlap."""
    n, m = len(state), len(data.moves)
    size = n + m
    seconds, latency = np.zeros(size), np.zeros(size)
    one, two = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for t in range(n):
        seconds[t], latency[t] = data.seconds[data.row[state[t]]], data.latency[data.row[state[t]]]
        one[t], two[t] = state[t], state[t]
    for i in range(m):
        seconds[n + i], latency[n + i] = moved[i], moved[i]
        one[n + i], two[n + i] = state[data.moves[i, 0]], state[data.moves[i, 1]]
    overlaps = np.zeros((size, size), np.bool_)
    for a in range(size):
        for b in range(size):
            if seconds[a] > 0 and seconds[b] > 0:
                overlaps[a, b] = _meet(data, one[a], one[b])
                if not overlaps[a, b] and (a >= n or b >= n):
                    overlaps[a, b] = (
                        _meet(data, one[a], two[b]) or _meet(data, two[a], one[b]) or _meet(data, two[a], two[b])
                    )
    ready, waits = _start(data, size)
    nearest = np.zeros(size, np.int64)  # of every node the first step that has not run
    free_at = np.zeros(size)
    span = 0.0
    for _ in range(size * STEPS):
        best, earliest = -1, np.inf
        for a in range(size):
            k = nearest[a]
            if k < STEPS and waits[a, k] == 0 and ready[a, k] < earliest:
                best, earliest = a, ready[a, k]
        begin = earliest
        for b in range(size):
            if overlaps[best, b] and free_at[b] > begin:
                begin = free_at[b]
        step = nearest[best]
        nearest[best] += 1
        free_at[best] = begin + seconds[best]
        done = begin + latency[best]
        span = max(span, done)
        _release(data, best, step, done, (ready, waits))
    return span / STEPS


@numba.njit(cache=True)
def _start(data: Flat, size: int) -> tuple[Floats, Ints]:  # pragma: no cover - compiled
    """Ready times of instances, and how many others they wait for, [nodes, steps]."""
    n = len(data.role)
    ready, waits = np.zeros((size, STEPS)), np.zeros((size, STEPS), np.int64)
    for e in range(len(data.edges)):
        for k in range(data.edges[e, 2], STEPS):
            waits[data.edges[e, 1], k] += 1
    for i in range(len(data.moves)):
        for k in range(STEPS):
            waits[data.moves[i, 1], k] += 1
            if k >= data.moves[i, 2]:
                waits[n + i, k] += 1
    return ready, waits


@numba.njit(cache=True)
def _release(
    data: Flat, node: int, step: int, done: float, due: tuple[Floats, Ints]
) -> None:  # pragma: no cover - compiled
    """Count this instance off from whatever waited for it."""
    ready, waits = due
    n = len(data.role)
    if node >= n:
        target = data.moves[node - n, 1]
        waits[target, step] -= 1
        ready[target, step] = max(ready[target, step], done)
        return
    for e in range(len(data.edges)):
        k = step + data.edges[e, 2]
        if data.edges[e, 0] == node and k < STEPS:
            waits[data.edges[e, 1], k] -= 1
            ready[data.edges[e, 1], k] = max(ready[data.edges[e, 1], k], done + data.delay[e])
    for i in range(len(data.moves)):
        k = step + data.moves[i, 2]
        if data.moves[i, 0] == node and k < STEPS:
            waits[n + i, k] -= 1
            ready[n + i, k] = max(ready[n + i, k], done)
