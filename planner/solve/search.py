"""The search itself: passes of branch and bound with falling tolerance, each of which proves a bound. Owns the clock.

A pass with tolerance e looks for plans of a period below (best known) / (1 + e). What it finds tightens the limit at
once; when it ends, no plan of a smaller period is left. While a pass finds nothing for long, neighbourhoods of the best
plan are searched: a few tasks get new meshes, and all get new options. So they are when the gap is proven, for a tenth
of the work so far: what is left of the gap may hold a better plan that is near.
"""

import random
import sys
import time
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.problem import Choice, Limits, Schedule, SearchProblem, Solution, Stopped, Unsolved
from realgraph.planner.solve.evaluate import precedence_graph, schedule, ties_hold
from realgraph.planner.solve.heuristics import real_heuristic, together
from realgraph.planner.solve.kernels.compiled import Floats
from realgraph.planner.solve.kernels.instance import instance_of
from realgraph.planner.solve.kernels.lists import new_lists
from realgraph.planner.solve.kernels.memory import new_needs
from realgraph.planner.solve.kernels.meshes import (
    DONE,
    LEAF,
    MISSING,
    Walk,
    advance,
    new_moves,
    new_walk,
    remember,
)
from realgraph.planner.solve.kernels.options import FOUND, PAUSED, UNDECIDED, choose, new_choosing
from realgraph.planner.solve.kernels.period import new_net
from realgraph.planner.solve.memory import fits
from realgraph.planner.solve.space import MANY_TASKS, Space, busy_seconds, least_of, order_of, shared, space_of

TOLERANCES = (0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005)
TOLERANCES_OF_FEW, FEW_PLACEMENTS_LOG = (0.1,), 9.0  # with fewer placements (a logarithm) a pass is mostly preparation
# Efforts count placements and options looked at.
QUICK_PASS_EFFORT = 5_000  # after a pass that looked at fewer the next tolerance but one follows
SLICE_PLACEMENTS = 500  # placements between two looks at the clock
SLICE_OPTIONS = 200  # of the second level
PATIENCE_EFFORT = 30_000  # without a better plan, after which neighbourhoods get as many
PATIENCE_EFFORT_OF_MANY = 6_000  # the same with more than `MANY_TASKS` tasks, where a pass seldom ends
NEIGHBOURHOOD_EFFORT = 4_000  # in one neighbourhood
MOST_REPEATED_DRAWS = 30  # neighbourhoods drawn again one after the other: few are left
POLISH_EFFORT, POLISH_SHARE = 2_000, 0.1  # when the gap is proven: so much, and of all before
LEAST_POLISHED_GAP = 1e-6  # relative: a smaller gap is left as it is
LEAST_GAIN = 1e-9  # relative: of a plan that is kept
# Slices after which a placement with many options is put off, or left.
LONG_SLICES, LONG_FIRST_SLICES, LONG_NEARBY_SLICES = 25, 8, 4


class Incumbent(Struct, frozen=True):
    """The best plan so far."""

    choices: dict[str, Choice]
    schedule: Schedule


class SearchEnded(Exception):
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
        self.everywhere = shared(self.instance, self.instance.tables >= 0)
        self.best: Incumbent | None = None
        self.bound = max(problem.floor_seconds, busy_seconds(problem))
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
        except SearchEnded:
            stopped = "interrupted" if self.limits.stop() else "time limit"
        else:
            self._polish()
        if stopped == "proven" and self.undecided:
            stopped = "exhausted"
        seconds = time.monotonic() - self.began
        if self.best is None:
            reason = "no choice of meshes and options fits" if stopped == "proven" else "no plan was found in time"
            return Unsolved(stopped == "proven", reason, stopped, seconds, self.bound)
        best_schedule = self.best.schedule
        return Solution(
            choices=self.best.choices,
            period=best_schedule.period,
            bound=min(self.bound, best_schedule.period),
            starts=best_schedule.starts,
            critical=best_schedule.critical,
            stopped=stopped,
            seconds=seconds,
            nodes=self.nodes,
        )

    def _look_up(self) -> None:
        """Raises SearchEnded where the search is to end."""
        if self.limits.stop() or time.monotonic() - self.began > self.limits.seconds:
            raise SearchEnded

    def _prove(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            if self.best is not None:
                self.limits.progress(self.best.schedule.period, min(bound, self.best.schedule.period))

    # --- passes -------------------------------------------------------------------------------------------------------

    def _passes(self) -> None:
        self._begin()
        if self.best is None:
            self._pass(None)
        last = max(1e-7, 0.999 * self.limits.gap)
        few = float(np.log(np.maximum(1, self.everywhere.sum(axis=1))).sum()) < FEW_PLACEMENTS_LOG
        left = [tolerance for tolerance in (TOLERANCES_OF_FEW if few else TOLERANCES) if tolerance > last] + [last]
        while left and self.best is not None:
            tolerance = left.pop(0)
            if self.best.schedule.period > self.bound * (1 + tolerance):
                before = self._effort()
                self._pass(tolerance)
                if len(left) > 1 and self._effort() - before < QUICK_PASS_EFFORT:
                    left.pop(0)

    def _begin(self) -> None:
        """First plans: where people would place the tasks."""
        for meshes in self._heuristics():
            self._leaf(meshes, 0.05 if self.best is None else 0.01, LONG_FIRST_SLICES, all_of_it=False)

    def _heuristics(self) -> list[list[int]]:
        """Places that people choose by hand, as far as all tasks may lie there."""
        leader, placements = self.instance.leader.tolist(), []
        for places in (together(self.problem), real_heuristic(self.problem)):
            meshes = [] if places is None else [places[task.name] for task in self.problem.tasks]
            allowed = all(self.everywhere[task, mesh] for task, mesh in enumerate(meshes))
            if meshes and allowed and all(meshes[leader[i]] == mesh for i, mesh in enumerate(meshes)):
                placements.append(meshes)
        return placements

    def _limit(self, tolerance: float | None) -> float:
        """The period that is asked for."""
        if self.best is not None:
            return self.best.schedule.period / (1 + (tolerance or 0.0))
        longest = len(self.problem.tasks) * float(self.instance.latency.max(initial=0.0))
        longest += len(self.problem.moves) * self.problem.longest_move_seconds
        return 50 * (longest + float(self.instance.arc_delay.sum()) + self.problem.floor_seconds) + 1.0

    def _pass(self, tolerance: float | None) -> None:
        """Looks at every placement under the limit; without a tolerance only until some plan is found."""
        space = self._space(self._limit(tolerance), closely=True)
        if space is None:
            return
        self.walk.places[:], self.walk.order[:] = order_of(self.instance, space.allowed)
        self.walk.restart()
        least = PATIENCE_EFFORT_OF_MANY if len(self.problem.tasks) > MANY_TASKS else PATIENCE_EFFORT
        patience, since, best = least, 0, self.best
        while self._limit(tolerance) > self.bound:
            before = self._effort()
            status = self._step(self.walk, space, tolerance)
            if status == DONE or (tolerance is None and self.best is not None):
                break
            since = since + self._effort() - before if self.best is best else 0
            if since > patience and self.best is not None:
                gain = max(1e-3, (tolerance or 0.0) / 100)  # the way to a plan of this pass may lead over slower ones
                improved = self._neighbourhoods(self._space(self._limit(gain), closely=False) or space, gain, patience)
                self._take(space)
                patience, since = least if improved else 2 * patience, 0
            best = self.best
        for meshes in self.put_off:
            self._leaf(meshes, tolerance, sys.maxsize)
        self.put_off.clear()
        if not self.undecided and (tolerance is not None or self.best is None):
            self._prove(self._limit(tolerance))

    def _space(self, limit: float, closely: bool) -> Space | None:
        """The space where plans within the limit may lie, and what is proven on the way; None where there is none."""
        look_up = self._look_up if closely else None
        bound, space = space_of(self.problem, self.instance, self.everywhere, limit, look_up)
        self._prove(bound)
        if space is not None:
            self._take(space)
        return space

    def _take(self, space: Space) -> None:
        """Tells the compiled code the least that tasks without a place need in this space."""
        for i in range(len(self.problem.tasks)):
            self.lists.fastest[i], self.lists.soonest[i], _ = least_of(self.instance, i, space.allowed[i])

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
            space.reduced_costs,
            walk,
            self.needs,
            self.lists,
            self.moves,
            self.net,
            limit,
            SLICE_PLACEMENTS,
        )
        self.nodes += int(walk.nodes[0]) - before
        self._look_up()
        if status == MISSING:
            self._learn_moves()
        elif status == LEAF:
            meshes = walk.mesh.tolist()
            if walk is self.near_walk:
                self._leaf(meshes, tolerance, LONG_NEARBY_SLICES, all_of_it=False)
            elif not self._leaf(meshes, tolerance, LONG_SLICES):
                self.put_off.append(meshes)
        return status

    # --- neighbourhoods -----------------------------------------------------------------------------------------------

    def _neighbourhoods(self, space: Space, least_gain: float, effort: int) -> bool:
        """New meshes for a few tasks at a time, as long as plans get better; whether one did. effort: without one."""
        before = best = self.best
        stop = self._effort() + effort
        tried: set[frozenset[int]] = set()  # of the best plan: again they would find what they found
        repeated = 0
        while self._effort() < stop and repeated < MOST_REPEATED_DRAWS and self._limit(least_gain) > self.bound:
            count = min(len(self.problem.tasks), self.rng.choice((2, 3, 3, 4)))
            free = frozenset(self._some(count))
            if free in tried:
                repeated += 1
                continue
            tried.add(free)
            repeated = 0
            self._near(space, least_gain, free, NEIGHBOURHOOD_EFFORT)
            if self.best is not best:
                best, stop = self.best, self._effort() + effort
                tried.clear()
        return self.best is not before

    def _some(self, count: int) -> list[int]:
        """So many tasks, drawn by the device seconds that they take in the best plan (Efraimidis and Spirakis 2006)."""
        assert self.best is not None
        drawn: list[tuple[float, int]] = []
        for i, task in enumerate(self.problem.tasks):
            choice = self.best.choices[task.name]
            seconds = float(self.problem.tables[task.tables[choice.mesh]].seconds[choice.option])
            work = max(1e-9, seconds * self.problem.meshes[choice.mesh].n_devices)
            drawn.append((-np.log(1.0 - self.rng.random()) / work, i))
        return [i for _, i in sorted(drawn)[:count]]

    def _near(self, space: Space, least_gain: float, free: Iterable[int], effort: int) -> None:
        """The best plan with new meshes for the tasks `free` and those tied to them, and new options for all."""
        assert self.best is not None
        allowed = space.allowed.copy()
        leads = {int(self.instance.leader[j]) for j in free}
        for i, task in enumerate(self.problem.tasks):
            if int(self.instance.leader[i]) not in leads:
                allowed[i] = False
                allowed[i, self.best.choices[task.name].mesh] = True
        self.near_walk.places[:], self.near_walk.order[:] = order_of(self.instance, allowed)
        self.near_walk.restart()
        stop = self._effort() + effort
        near = Space(allowed, space.tree, space.reduced_costs)
        while self._effort() < stop and self._step(self.near_walk, near, least_gain) != DONE:
            pass

    def _polish(self) -> None:
        """Looks for a better plan near the best one, when nothing is left to prove."""
        if self.best is None or self._limit(LEAST_POLISHED_GAP) <= self.bound:
            return
        try:
            for meshes in self._heuristics():
                self._leaf(meshes, LEAST_GAIN, LONG_SLICES, all_of_it=False)
            space = self._space(self._limit(LEAST_GAIN), closely=False)
            stop = self._effort() + POLISH_EFFORT + int(POLISH_SHARE * self._effort())
            for task in range(len(self.problem.tasks)):
                if space is not None and self._effort() < stop:
                    self._near(space, LEAST_GAIN, (task,), stop - self._effort())
            if space is not None and self._effort() < stop:
                self._neighbourhoods(space, LEAST_GAIN, stop - self._effort())
        except SearchEnded:
            return  # what is proven stays so

    # --- placements ---------------------------------------------------------------------------------------------------

    def _matrix(self, move: int, source: int, target: int) -> Floats:
        key = (move, source, target)
        if key not in self.matrices:
            seconds = self.problem.move_seconds(self.problem.moves[move], source, target)
            self.matrices[key] = np.ascontiguousarray(seconds, np.float64)
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

    def _leaf(self, meshes: list[int], tolerance: float | None, slices: int, all_of_it: bool = True) -> bool:
        """Chooses options on these meshes again while the period falls; false where `slices` were too few.

        all_of_it: a proof hangs on it.
        """
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
                    self.instance, self.needs, self.lists, self.choosing, moves, self.net, limit, SLICE_OPTIONS
                )
                self._look_up()
                left -= 1
            if status == UNDECIDED and all_of_it:
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
        """True where the plan that was found is better than the best; it is then the best."""
        choices = {
            task.name: Choice(int(mesh), int(self.instance.number[option]))
            for task, mesh, option in zip(self.problem.tasks, self.needs.mesh, self.needs.option, strict=True)
        }
        assert fits(self.problem, choices) and ties_hold(self.problem, choices), "the search and the rules disagree"
        scheduled = schedule(self.problem, precedence_graph(self.problem, choices))
        if scheduled is None or (
            self.best is not None and scheduled.period >= self.best.schedule.period * (1 - LEAST_GAIN)
        ):
            return False
        self.best = Incumbent(choices, scheduled)
        self.limits.progress(scheduled.period, min(self.bound, scheduled.period))
        return True
