"""The search itself: passes of branch and bound with falling tolerance, each of which proves a bound. Owns the clock.

A pass with tolerance e looks for plans of a period below (best known) / (1 + e). What it finds tightens the limit at
once; when it ends, no plan of a smaller period is left.
"""

import time
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from realgraph.planner.evaluate import fits, schedule, timing
from realgraph.planner.problem import Choice, Limits, Schedule, SearchProblem, Solution, Stopped, Unsolved
from realgraph.planner.solve_bound import Prices, ascend, conditioned, first_prices, priced, rows_of
from realgraph.planner.solve_compiled import Floats
from realgraph.planner.solve_instance import instance_of
from realgraph.planner.solve_memory import new_needs
from realgraph.planner.solve_meshes import (
    DONE,
    LEAF,
    MISSING,
    Costs,
    Walk,
    advance,
    new_moves,
    new_walk,
    remember,
)
from realgraph.planner.solve_options import choose, new_choosing
from realgraph.planner.solve_period import new_net
from realgraph.planner.solve_places import no_tree, tree_of

TOLERANCES = (0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005)
SLICE = 1000  # nodes between two looks at the clock
OPTIONS_SLICE = 4000  # of the second level


class Incumbent(Struct, frozen=True):
    """The best plan so far."""

    choices: dict[str, Choice]
    schedule: Schedule


class Halt(Exception):
    """Time is up, or the caller said stop."""


class Search:
    """One search: its arrays, the incumbent and the bound."""

    def __init__(self, problem: SearchProblem, limits: Limits) -> None:
        self.problem, self.limits = problem, limits
        self.began = time.monotonic()
        self.instance = instance_of(problem)
        n, meshes = self.instance.tables.shape
        arcs = len(self.instance.arc_source)
        self.net = new_net(n + len(problem.moves), arcs + 2 * len(problem.moves))
        self.needs = new_needs(n)
        most = int(np.diff(self.instance.begin).max(initial=1))
        self.choosing = new_choosing(n, most, arcs)
        self.moves = new_moves(1 << 12)
        self.known_moves = 0
        self.matrices: dict[tuple[int, int, int], Floats] = {}
        self.walk = new_walk(n, meshes)
        self.everywhere = self._shared_places(self.instance.tables >= 0)
        self.best: Incumbent | None = None
        self.bound = problem.floor_seconds
        self.nodes = 0
        self.prices: list[Prices] = []

    # --- what the caller sees -----------------------------------------------------------------------------------------

    def run(self) -> Solution | Unsolved:
        """Until the gap is proven, time is up, or the caller stops it."""
        stopped: Stopped = "proven"
        try:
            self._passes()
        except Halt:
            stopped = "interrupted" if self.limits.stop() else "time limit"
        seconds = time.monotonic() - self.began
        if self.best is None:
            reason = "no choice of meshes and options fits" if stopped == "proven" else "no plan was found in time"
            return Unsolved(stopped == "proven", reason, stopped, seconds, self.bound)
        found = self.best.schedule
        return Solution(
            choices=self.best.choices,
            period=found.period,
            bound=min(self.bound, found.period),
            starts=found.starts,
            critical=found.critical,
            stopped=stopped,
            seconds=seconds,
            nodes=self.nodes,
        )

    def _look_up(self) -> None:
        """Raises Halt where the search is to end."""
        if self.limits.stop() or time.monotonic() - self.began > self.limits.seconds:
            raise Halt

    def _prove(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            if self.best is not None:
                self.limits.progress(self.best.schedule.period, min(bound, self.best.schedule.period))

    # --- passes -------------------------------------------------------------------------------------------------------

    def _passes(self) -> None:
        self._pass(None)
        last = max(1e-7, 0.999 * self.limits.gap)
        for tolerance in (*(t for t in TOLERANCES if t > last), last):
            if self.best is None:
                return
            if self.best.schedule.period / self.bound - 1 > tolerance if self.bound > 0 else True:
                self._pass(tolerance)

    def _limit(self, tolerance: float | None) -> float:
        """The period that is asked for."""
        if self.best is not None:
            return self.best.schedule.period / (1 + (tolerance or 0.0))
        seconds = sum(float(self.instance.latency.max(initial=0.0)) for _ in self.problem.tasks)
        return 50 * (seconds + float(self.instance.arc_delay.sum()) + self.problem.floor_seconds) + 1.0

    def _pass(self, tolerance: float | None) -> None:
        """Looks at every placement under the limit; without a tolerance only until some plan is found."""
        limit = self._limit(tolerance)
        allowed, costs = self._priced(limit)
        if allowed is None or costs is None:
            self._prove(limit)
            return
        tree = tree_of(self.problem, allowed) or no_tree()
        walk = self.walk
        self._restart(walk, allowed)
        while True:
            limit = self._limit(tolerance)
            before = int(walk.nodes[0])
            status = advance(self.instance, tree, allowed, costs, walk, self.needs, self.moves, self.net, limit, SLICE)
            self.nodes += int(walk.nodes[0]) - before
            self._look_up()
            if status == MISSING:
                self._learn_moves()
            elif status == LEAF:
                self._leaf(tolerance)
                if tolerance is None and self.best is not None:
                    return
            elif status == DONE:
                break
        if self.best is not None:
            self._prove(self._limit(tolerance))

    def _priced(self, limit: float) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None, Costs | None]:
        """The places left to each task under the limit, and tables of prices."""
        allowed = self.everywhere.copy()
        for _ in range(2):
            rows = rows_of(self.instance, allowed, limit)
            if rows is None:
                return None, None
            best = ascend(rows, first_prices(rows), limit, 150)
            if self.best is not None:
                self._prove(min(best.bound, limit))
            if best.bound > limit:
                return None, None
            self.prices = [best, *self.prices[:0]]
            sets = [first_prices(rows), best]
            for task in range(len(self.problem.tasks)):
                for table in np.unique(rows.table[rows.task == task]):
                    sets.append(ascend(conditioned(rows, task, int(table)), best, limit, 12))
            found = priced(self.instance, rows, sets)
            total = found.free.sum(axis=1) - found.spent
            excess = (total[:, None, None] - found.free[:, :, None] + found.table - limit).max(axis=0)
            over = excess > 1e-9 * limit
            for task in range(len(self.problem.tasks)):
                tables = np.flatnonzero(over[task])
                allowed[task] &= ~np.isin(self.instance.tables[task], tables)
            allowed = self._shared_places(allowed)
            if not allowed.any(axis=1).all():
                return None, None
        return allowed, Costs(found.table, found.free, found.spent)

    def _shared_places(self, allowed):  # type: ignore[no-untyped-def]
        """Tied tasks may lie only where all of them may."""
        shared = allowed.copy()
        for i, leader in enumerate(self.instance.leader):
            shared[leader] &= allowed[i]
        for i, leader in enumerate(self.instance.leader):
            shared[i] &= shared[leader]
        return shared

    def _restart(self, walk: Walk, allowed) -> None:  # type: ignore[no-untyped-def]
        instance = self.instance
        n = len(self.problem.tasks)
        area = np.zeros(n)
        for i in range(n):
            seconds, latency, work = [], [], []
            for table in np.unique(instance.tables[i][allowed[i]]):
                options = slice(instance.begin[table], instance.begin[table + 1])
                size = instance.size[allowed[i] & (instance.tables[i] == table)].min()
                seconds.append(instance.seconds[options].min())
                latency.append(instance.latency[options].min())
                work.append(size * instance.seconds[options].min())
            walk.fastest[i], walk.soonest[i], area[i] = min(seconds), min(latency), min(work)
        choosers = allowed.sum(axis=1) > 1
        rank = [
            (
                bool(choosers[instance.leader[i]]),
                -max(area[instance.leader == instance.leader[i]]),
                int(instance.leader[i]),
                i,
            )
            for i in range(n)
        ]
        walk.order[:] = [entry[3] for entry in sorted(rank)]
        walk.mesh[:] = -1
        walk.count[:] = -1
        walk.depth[0] = 0

    # --- leaves -------------------------------------------------------------------------------------------------------

    def _matrix(self, move: int, source: int, target: int) -> Floats:
        key = (move, source, target)
        if key not in self.matrices:
            found = self.problem.move_seconds(self.problem.moves[move], source, target)
            self.matrices[key] = np.ascontiguousarray(found, np.float64)
        return self.matrices[key]

    def _learn_moves(self) -> None:
        meshes = len(self.problem.meshes)
        for key in self.moves.missing[1 : 1 + int(self.moves.missing[0])].tolist():
            rest, target = divmod(key, meshes)
            move, source = divmod(rest, meshes)
            if 2 * self.known_moves > len(self.moves.keys):
                larger = new_moves(4 * len(self.moves.keys))
                for old, seconds in zip(self.moves.keys, self.moves.seconds, strict=True):
                    if old >= 0:
                        remember(larger, int(old), float(seconds))
                self.moves = larger
            remember(self.moves, key, float(self._matrix(move, source, target).min()))
            self.known_moves += 1

    def _leaf(self, tolerance: float | None) -> None:
        """Chooses options on the meshes of the walk, again and again while the period falls."""
        meshes = self.walk.mesh.copy()
        flat: list[Floats] = [np.zeros(1)]
        at = 1
        for arc, move in enumerate(self.instance.arc_move):
            if move >= 0:
                matrix = self._matrix(
                    int(move), int(meshes[self.instance.arc_source[arc]]), int(meshes[self.instance.arc_target[arc]])
                )
                self.choosing.move_begin[arc], self.choosing.move_columns[arc] = at, matrix.shape[1]
                flat.append(matrix.ravel())
                at += matrix.size
        moves = np.concatenate(flat)
        budget = OPTIONS_SLICE
        while True:
            self.needs.mesh[:] = meshes
            status = choose(self.instance, self.needs, self.choosing, moves, self.net, self._limit(tolerance), budget)
            self._look_up()
            if status == 0:
                return
            if status == -1:
                budget *= 4
                continue
            if not self._accept():
                return

    def _accept(self) -> bool:
        choices = {
            task.name: Choice(int(mesh), int(self.instance.number[option]))
            for task, mesh, option in zip(self.problem.tasks, self.needs.mesh, self.needs.option, strict=True)
        }
        assert fits(self.problem, choices)
        found = schedule(self.problem, timing(self.problem, choices))
        if found is None or (self.best is not None and found.period >= self.best.schedule.period * (1 - 1e-9)):
            return False
        self.best = Incumbent(choices, found)
        self.limits.progress(found.period, min(self.bound, found.period))
        return True
