"""Compiled: the subgradient ascent of the multipliers (`bound.py` says of which rows). Knows no call and no device."""

from typing import NamedTuple

import numpy as np

from realgraph.planner.solve.kernels.compiled import Floats, Ints, compiled, entry

PATIENCE_STEPS, LEAST_SCALE = 10, 0.01  # steps without gain before they are halved, and how often


class BoundRows(NamedTuple):
    """The options of all tasks side by side, and the rows that bound a period. Each array has one entry per option."""

    task: Ints
    table: Ints
    seconds: Floats
    area: Floats  # seconds x share of the devices
    resident: Floats  # share of all memory
    active: Floats
    begin: Ints  # [tasks]: where a task's options begin
    inside: Floats  # [cliques, tasks]: 1 in Q
    beside: Floats  # [cliques, tasks]: 1 in E


class Climb(NamedTuple):
    """The state of an ascent: the point where it stands, the step that led there, and what the point costs."""

    cliques: Floats
    memory: Floats  # [tasks]
    along: Floats  # the last step of `cliques`
    above: Floats  # and of `memory`
    least: Ints  # [tasks]: the cheapest option


@entry
def climb(rows: BoundRows, cliques: Floats, memory: Floats, bound: float, target: float, steps: int) -> float:
    """Raises the multipliers in place from where they prove `bound`; returns what they prove then.

    Projected subgradients with Polyak's steps towards `target`, which ends the ascent. Each step goes half the way of
    the one before as well, which keeps it from swinging (Camerini, Fratta and Maffioli 1975).
    """
    at = Climb(
        cliques.copy(), memory.copy(), np.zeros_like(cliques), np.zeros_like(memory), np.zeros(len(memory), np.int64)
    )
    scale, stale = 1.0, 0
    scaled = max(target, 1e-9)  # multipliers of memory are in units of it
    for _ in range(steps):
        proven = _cost(rows, at)
        stale = 0 if proven > bound + 1e-4 * scaled else stale + 1
        if proven > bound:
            bound = proven
            cliques[:] = at.cliques
            memory[:] = at.memory
        if proven > target:
            break
        if stale > PATIENCE_STEPS:
            scale, stale = scale / 2, 0
            if scale < LEAST_SCALE:
                break
            at.cliques[:] = cliques
            at.memory[:] = memory
            at.along[:] = 0.0
            at.above[:] = 0.0
            continue
        norm = _turn(rows, at, scaled)
        if norm <= 1e-18:
            break
        length = scale * max(target - proven, 1e-3 * scaled) / norm
        for q in range(len(at.cliques)):
            at.cliques[q] += length * at.along[q]
        for i in range(len(at.memory)):
            at.memory[i] = max(0.0, at.memory[i] + length * at.above[i] * scaled)
        project(at.cliques)
    return bound


@compiled
def _cost(rows: BoundRows, at: Climb) -> float:
    """The dual bound of the multipliers; fills `least`."""
    total = 0.0
    for i in range(len(at.memory)):
        total += at.memory[i]
    bound = -total
    for i in range(len(at.memory)):
        inside, beside, memory = 0.0, 0.0, at.memory[i]
        for q in range(len(at.cliques)):
            inside += at.cliques[q] * rows.inside[q, i]
            beside += at.cliques[q] * rows.beside[q, i]
        end = rows.begin[i + 1] if i + 1 < len(rows.begin) else len(rows.seconds)
        cheapest, cost = rows.begin[i], np.inf
        for o in range(rows.begin[i], end):
            own = rows.seconds[o] * inside + rows.area[o] * beside + rows.resident[o] * total + rows.active[o] * memory
            if own < cost:
                cheapest, cost = o, own
        at.least[i] = cheapest
        bound += cost
    return bound


@compiled
def _turn(rows: BoundRows, at: Climb, scaled: float) -> float:
    """Sets the direction of the next step, and returns its squared length."""
    mean, resident, norm = 0.0, -1.0, 0.0
    for q in range(len(at.cliques)):
        mean += at.cliques[q] * _row(rows, at, q)
    for q in range(len(at.cliques)):
        at.along[q] = _row(rows, at, q) - mean + at.along[q] / 2
        norm += at.along[q] * at.along[q]
    for i in range(len(at.memory)):
        resident += rows.resident[at.least[i]]
    for i in range(len(at.memory)):
        excess = (resident + rows.active[at.least[i]]) * scaled
        if at.memory[i] <= 0 and excess < 0:
            excess = 0.0
        at.above[i] = excess + at.above[i] / 2
        norm += at.above[i] * at.above[i]
    return norm


@compiled
def _row(rows: BoundRows, at: Climb, clique: int) -> float:
    """The left side of a row of time, under the cheapest options."""
    total = 0.0
    for i in range(len(at.least)):
        o = at.least[i]
        total += rows.inside[clique, i] * rows.seconds[o] + rows.beside[clique, i] * rows.area[o]
    return total


@compiled
def project(values: Floats) -> None:
    """The nearest point whose entries are at least 0 and sum to 1 (Michelot 1986).

    The largest is brought to 0 first, which moves no projection: beside numbers of any size, 1 is not lost.
    """
    largest = -np.inf
    for q in range(len(values)):
        largest = max(largest, values[q])
    theta, count, before = -np.inf, len(values) + 1, len(values) + 2
    while count < before:  # fewer each time, but for what rounding does
        before, count, total = count, 0, 0.0
        for q in range(len(values)):
            if values[q] - largest > theta:
                count += 1
                total += values[q] - largest
        theta = (total - 1.0) / count
    for q in range(len(values)):
        values[q] = max(0.0, values[q] - largest - theta)
