"""The search itself: passes of branch and bound with falling tolerance, each of which proves a bound. Owns the clock.

A pass with tolerance e looks for plans of a period below (best known) / (1 + e). What it finds tightens the limit at
once; when it ends, no plan of a smaller period is left. While a pass finds nothing for long, neighbourhoods of the best
plan are searched: a few tasks get new meshes, and all get new options.
"""

import random
import sys
import time

import numpy as np
from msgspec import Struct

from realgraph.planner.problem import Choice, Limits, Schedule, SearchProblem, Solution, Stopped, Unsolved
from realgraph.planner.solve.bound import ascend, conditioned, first_prices, priced, rows_of
from realgraph.planner.solve.compiled import Floats, Mask
from realgraph.planner.solve.evaluate import fits, schedule, ties_hold, timing
from realgraph.planner.solve.instance import instance_of
from realgraph.planner.solve.lists import new_lists
from realgraph.planner.solve.memory import new_needs
from realgraph.planner.solve.meshes import (
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
from realgraph.planner.solve.options import FOUND, PAUSED, UNDECIDED, choose, new_choosing
from realgraph.planner.solve.period import new_net
from realgraph.planner.solve.places import Tree, no_tree, tree_of

TOLERANCES = (0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005)
QUICK = 5_000  # placements and options: after a pass that looked at fewer the next tolerance but one follows
SLICE = 500  # placements between two looks at the clock
OPTIONS_SLICE = 200  # of the second level
PATIENCE = 50_000  # placements and options without a better plan, after which neighbourhoods are searched
NEARBY = 10_000  # placements and options looked at in one neighbourhood
ROUND = 12  # neighbourhoods
STEPS, MORE_STEPS = 150, 12  # of the ascent of prices: at the root, and with one task on meshes of one table
FEW = 14.0  # logarithm of a number of placements that are looked at faster than prices are found for each table
LONG, LONG_NEARBY = 25, 8  # slices after which a placement with too many options is put off, or left


class Incumbent(Struct, frozen=True):
    """The best plan so far."""

    choices: dict[str, Choice]
    schedule: Schedule


class Space(Struct, frozen=True, eq=False):
    """Where one walk looks: the meshes left to each task, their symmetries, and prices under the limit."""

    allowed: Mask
    tree: Tree
    costs: Costs


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
        self.lists = new_lists(n, int(np.diff(self.instance.begin).max(initial=1)), arcs)
        self.choosing = new_choosing(n, arcs)
        self.moves = new_moves(1 << 12)
        self.known_moves = 0
        self.matrices: dict[tuple[int, int, int], Floats] = {}
        self.walk, self.near_walk = new_walk(n, meshes), new_walk(n, meshes)
        self.everywhere = self._shared(self.instance.tables >= 0)
        self.best: Incumbent | None = None
        self.bound = problem.floor_seconds
        self.nodes = 0
        self.put_off: list[list[int]] = []
        self.undecided = False
        self.rng = random.Random(limits.seed)

    # --- what the caller sees -----------------------------------------------------------------------------------------

    def run(self) -> Solution | Unsolved:
        """Until the gap is proven, time is up, or the caller stops it."""
        stopped: Stopped = "proven"
        try:
            self._passes()
        except Halt:
            stopped = "interrupted" if self.limits.stop() else "time limit"
        if stopped == "proven" and self.undecided:
            stopped = "exhausted"
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
        self._together()
        if self.best is None:
            self._pass(None)
        last = max(1e-7, 0.999 * self.limits.gap)
        left = [tolerance for tolerance in TOLERANCES if tolerance > last] + [last]
        while left and self.best is not None:
            tolerance = left.pop(0)
            if self.best.schedule.period > self.bound * (1 + tolerance):
                before = self._effort()
                self._pass(tolerance)
                if len(left) > 1 and self._effort() - before < QUICK:
                    left.pop(0)

    def _together(self) -> None:
        """A first plan: all tasks on the largest mesh that all of them may take."""
        common = np.flatnonzero(self.everywhere.all(axis=0))
        if len(common):
            largest = int(common[np.argmax(self.instance.size[common])])
            self._leaf([largest] * len(self.problem.tasks), 0.05, LONG)

    def _limit(self, tolerance: float | None) -> float:
        """The period that is asked for."""
        if self.best is not None:
            return self.best.schedule.period / (1 + (tolerance or 0.0))
        longest = len(self.problem.tasks) * float(self.instance.latency.max(initial=0.0))
        longest += len(self.problem.moves) * self.problem.longest_move_seconds
        return 50 * (longest + float(self.instance.arc_delay.sum()) + self.problem.floor_seconds) + 1.0

    def _pass(self, tolerance: float | None) -> None:
        """Looks at every placement under the limit; without a tolerance only until some plan is found."""
        space = self._space(self._limit(tolerance))
        if space is None:
            self._prove(self._limit(tolerance))
            return
        self._restart(self.walk, space.allowed)
        for i in range(len(self.problem.tasks)):
            self.lists.fastest[i], self.lists.soonest[i], _ = self._least(i, space.allowed[i])
        patience, since, best = PATIENCE, 0, self.best
        while self._limit(tolerance) > self.bound:
            before = self._effort()
            status = self._step(self.walk, space, tolerance)
            if status == DONE or (tolerance is None and self.best is not None):
                break
            since = since + self._effort() - before if self.best is best else 0
            if since > patience and self.best is not None:
                found = self._neighbourhoods(space, max(1e-3, (tolerance or 0.0) / 20))
                patience, since = PATIENCE if found else 2 * patience, 0
            best = self.best
        for meshes in self.put_off:
            self._leaf(meshes, tolerance, sys.maxsize)
        self.put_off.clear()
        if not self.undecided and (tolerance is not None or self.best is None):
            self._prove(self._limit(tolerance))

    def _effort(self) -> int:
        """Placements and options looked at."""
        return self.nodes + int(self.choosing.nodes[0])

    def _step(self, walk: Walk, space: Space, tolerance: float | None) -> int:
        """One slice of a walk, and what it asks for."""
        before = int(walk.nodes[0])
        limit = self._limit(tolerance)
        status = advance(
            self.instance,
            space.tree,
            space.allowed,
            space.costs,
            walk,
            self.needs,
            self.lists,
            self.moves,
            self.net,
            limit,
            SLICE,
        )
        self.nodes += int(walk.nodes[0]) - before
        self._look_up()
        if status == MISSING:
            self._learn_moves()
        elif status == LEAF:
            meshes = walk.mesh.tolist()
            if walk is self.near_walk:
                self._leaf(meshes, tolerance, LONG_NEARBY)
            elif not self._leaf(meshes, tolerance, LONG):
                self.put_off.append(meshes)
        return status

    def _neighbourhoods(self, space: Space, least_gain: float) -> bool:
        """New meshes for a few tasks at a time, the others where the best plan has them; whether a plan was better."""
        before = self.best
        for _ in range(ROUND):
            assert self.best is not None
            names = [task.name for task in self.problem.tasks]
            count = min(len(names), self.rng.choice((2, 3, 3, 4)))
            free = set(self.rng.sample(range(len(names)), count))
            allowed = space.allowed.copy()
            for i, name in enumerate(names):
                mesh = self.best.choices[name].mesh
                leads = {int(self.instance.leader[j]) for j in free}
                if int(self.instance.leader[i]) not in leads:
                    allowed[i] = False
                    allowed[i, mesh] = True
            self._restart(self.near_walk, allowed)
            stop = self._effort() + NEARBY
            near = Space(allowed, space.tree, space.costs)
            while self._effort() < stop and self._step(self.near_walk, near, least_gain) != DONE:
                pass
        return self.best is not before

    # --- the space of a pass ------------------------------------------------------------------------------------------

    def _space(self, limit: float) -> Space | None:
        """Places and prices under the limit; None where prices alone forbid it."""
        allowed = self.everywhere
        rows = rows_of(self.instance, allowed, limit)
        if rows is None:
            return None
        start = first_prices(rows)
        small = float(np.log(allowed.sum(axis=1)).sum()) < FEW
        best = ascend(rows, start, min(limit, 3 * max(start.bound, 1e-9)), MORE_STEPS if small else STEPS)
        self._prove(min(best.bound, limit))
        if best.bound > limit:
            return None
        target = min(limit, 3 * max(best.bound, 1e-9))
        sets = [start, best]
        for task in range(len(self.problem.tasks)):
            self._look_up()
            tables = np.unique(rows.table[rows.task == task])
            if len(tables) > 1 and not small:
                sets += [ascend(conditioned(rows, task, int(table)), best, target, MORE_STEPS) for table in tables]
        found = priced(self.instance, rows, sets)
        total = found.free.sum(axis=1) - found.spent
        excess = (total[:, None, None] - found.free[:, :, None] + found.table - limit).max(axis=0)
        allowed = allowed.copy()
        for task in range(len(self.problem.tasks)):
            over = np.flatnonzero(excess[task] > 1e-9 * limit)
            allowed[task] &= ~np.isin(self.instance.tables[task], over)
        allowed = self._shared(allowed)
        if not allowed.any(axis=1).all():
            return None
        tree = tree_of(self.problem, allowed) or no_tree()
        return Space(allowed, tree, Costs(found.table, found.free, found.spent))

    def _shared(self, allowed: Mask) -> Mask:
        """Tied tasks may lie only where all of them may."""
        shared = allowed.copy()
        for i, leader in enumerate(self.instance.leader):
            shared[leader] &= allowed[i]
        for i, leader in enumerate(self.instance.leader):
            shared[i] &= shared[leader]
        return shared

    def _restart(self, walk: Walk, allowed: Mask) -> None:
        """The walk at its beginning. Tasks with one mesh come first, then those with most work; tied ones together."""
        leader = self.instance.leader
        work = np.array([self._least(i, allowed[i])[2] for i in range(len(leader))])
        walk.places[:] = allowed.sum(axis=1)

        def rank(task: int) -> tuple[bool, float, int, int]:
            first = int(leader[task])
            return bool(walk.places[first] > 1), -float(work[leader == first].max()), first, task

        walk.order[:] = sorted(range(len(leader)), key=rank)
        walk.mesh[:] = -1
        walk.many[:] = -1
        walk.depth[0] = 0

    def _least(self, task: int, allowed: Mask) -> tuple[float, float, float]:
        """Least seconds, latency and device seconds of a task on the meshes left to it."""
        instance = self.instance
        tables, places = np.unique(instance.tables[task][allowed], return_index=True)
        sizes = instance.size[np.flatnonzero(allowed)[places]].tolist()
        options = [slice(int(instance.begin[table]), int(instance.begin[table + 1])) for table in tables]
        seconds = [float(instance.seconds[rows].min(initial=np.inf)) for rows in options]
        latency = min(float(instance.latency[rows].min(initial=np.inf)) for rows in options)
        return min(seconds), latency, min(size * least for size, least in zip(sizes, seconds, strict=True))

    # --- placements ---------------------------------------------------------------------------------------------------

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
                for old, seconds in zip(self.moves.keys.tolist(), self.moves.seconds.tolist(), strict=True):
                    if old >= 0:
                        remember(larger, old, seconds)
                self.moves = larger
            remember(self.moves, key, float(self._matrix(move, source, target).min()))
            self.known_moves += 1

    def _leaf(self, meshes: list[int], tolerance: float | None, slices: int) -> bool:
        """Chooses options on these meshes again while the period falls; false where `slices` were too few."""
        moves = self._flat_moves(meshes)
        status = FOUND
        while status == FOUND:
            self.needs.mesh[:] = meshes
            limit = self._limit(tolerance)
            if limit <= self.bound:
                break
            status, left = PAUSED, slices
            self.choosing.depth[0] = -1
            while status == PAUSED and left > 0:
                status = choose(
                    self.instance, self.needs, self.lists, self.choosing, moves, self.net, limit, OPTIONS_SLICE
                )
                self._look_up()
                left -= 1
            if status == UNDECIDED:
                self.undecided = True
            elif status == FOUND and not self._accept():
                break
        return status != PAUSED

    def _flat_moves(self, meshes: list[int]) -> Floats:
        """The matrices of all moves between these meshes, one after the other."""
        instance, flat, at = self.instance, [np.zeros(1)], 1
        for arc, move in enumerate(instance.arc_move.tolist()):
            if move >= 0:
                source, target = int(instance.arc_source[arc]), int(instance.arc_target[arc])
                matrix = self._matrix(move, meshes[source], meshes[target])
                self.choosing.move_begin[arc], self.choosing.move_columns[arc] = at, matrix.shape[1]
                flat.append(matrix.ravel())
                at += matrix.size
        return np.concatenate(flat)

    def _accept(self) -> bool:
        """Whether the plan that was found is better than the best; it is then the best."""
        choices = {
            task.name: Choice(int(mesh), int(self.instance.number[option]))
            for task, mesh, option in zip(self.problem.tasks, self.needs.mesh, self.needs.option, strict=True)
        }
        assert fits(self.problem, choices) and ties_hold(self.problem, choices), "the search and the rules disagree"
        found = schedule(self.problem, timing(self.problem, choices))
        if found is None or (self.best is not None and found.period >= self.best.schedule.period * (1 - 1e-9)):
            return False
        self.best = Incumbent(choices, found)
        self.limits.progress(found.period, min(self.bound, found.period))
        return True
