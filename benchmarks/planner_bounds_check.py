"""A checker of answers to planning problems; shares no code with the search.

The plan is held against the rules of docs/planning_problem.md, its period against the least of its own options, and the
bound against every combination of options there is: see planner_bounds_walk.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import floor

import numpy as np

from benchmarks.planner_bounds_arrays import Links, Room, Rows, arrays
from benchmarks.planner_bounds_walk import fits, plan_within, ties_hold
from realgraph.planner.problem_file.codec import NoAnswer, ProblemAnswer
from realgraph.planner.problem_file.spec import ProblemFile

BELOW = 1e-6  # relative: a bound may be above an optimum by so little, as periods are exact to 1e-8
NEAR = 1e-7  # of a period: what the starts of an answer may miss a constraint by


def mistakes(spec: ProblemFile, answer: ProblemAnswer | NoAnswer, gap: float) -> list[str]:
    """Mistakes in the answer of a search for this gap, in words. Bounds are held against every combination."""
    rows, links, room = arrays(spec)
    found = []
    if _passed(rows, links, room, answer.bound, spec.floor_seconds):
        found.append(f"bound {answer.bound!r}, but options {_options(rows, room)} have a shorter period")
    if isinstance(answer, NoAnswer):
        if not answer.proven:
            return [*found, f"no plan was found, and none ruled out: {answer.stopped}"]
        if plan_within(rows, links, room, np.inf, 0):
            found.append(f"said to be infeasible, but options {_options(rows, room)} fit")
        return found
    room.row[:] = [_row(rows, spec, i, answer) for i in range(len(rows.count))]
    if not (all(ties_hold(rows, room, call) for call in range(len(rows.count))) and fits(rows, links, room)):
        found.append("the plan breaks a tie or does not fit")
    if answer.stopped == "proven" and answer.period > answer.bound * (1 + gap) * (1 + BELOW) + 1e-12:
        found.append(f"proven, but period {answer.period!r} is further than {gap} from bound {answer.bound!r}")
    if answer.stopped == "exhausted":
        found.append("the search left some options undecided")
    if answer.period < spec.floor_seconds:
        found.append(f"period {answer.period!r} is below the floor {spec.floor_seconds!r}")
    shorter = answer.period * (1 - BELOW)
    if shorter > spec.floor_seconds and plan_within(rows, links, room, shorter, 1):
        found.append(f"the plan's own options have a shorter period than {answer.period!r}")
    return found + _schedule_mistakes(spec, answer, (rows, links, room))  # which also looks at the orders


def _passed(rows: Rows, links: Links, room: Room, bound: float, least: float) -> bool:
    """True where some plan has a period below the bound, which is then wrong."""
    below = bound * (1 - BELOW)
    return below > least and below > 1e-12 and bool(plan_within(rows, links, room, below, 0))


def _options(rows: Rows, room: Room) -> list[tuple[int, str]]:
    """The number of each call's option and its devices as bits."""
    return [(int(rows.option[c, r]), f"{int(rows.devices[c, r]):b}"[::-1]) for c, r in enumerate(room.row.tolist())]


def _row(rows: Rows, spec: ProblemFile, call: int, answer: ProblemAnswer) -> int:
    chosen = answer.choices[spec.calls[call].name]
    bits = ((1 << chosen.mesh[1]) - 1) << chosen.mesh[0]
    same = (rows.option[call] == chosen.option) & (rows.devices[call] == bits)
    return int(np.flatnonzero(same[: rows.count[call]])[0])


def _schedule_mistakes(spec: ProblemFile, answer: ProblemAnswer, made: tuple[Rows, Links, Room]) -> list[str]:
    """Rules 1 to 3 of the document, held against the answer's starts; and its orders, against these starts."""
    rows, links, room = made
    period, names = answer.period, [call.name for call in spec.calls]
    at = {name: int(room.row[i]) for i, name in enumerate(names)}
    seconds = {name: float(rows.seconds[i, at[name]]) for i, name in enumerate(names)}
    latency = {name: float(rows.latency[i, at[name]]) for i, name in enumerate(names)}
    devices = {name: int(rows.devices[i, at[name]]) for i, name in enumerate(names)}
    waits = [(e.source, e.target, latency[e.source] + e.delay, e.distance) for e in spec.edges]
    moved: dict[str, float] = {}
    for m, entry in enumerate(spec.reallocations):
        took = float(links.move_seconds[m, at[entry.source], at[entry.target]])
        through = entry.target
        if took > 0:
            through = f"reallocate:{entry.target}"
            moved[entry.target] = seconds[through] = took
            devices[through] = devices[entry.source] | devices[entry.target]
            waits.append((through, entry.target, took, 0))
        waits.append((entry.source, through, latency[entry.source], entry.distance))
    if set(answer.starts) != set(seconds) or answer.reallocation_seconds != moved:
        return [f"starts of {sorted(answer.starts)}, reallocations {answer.reallocation_seconds}, not {moved}"]
    slack = NEAR * (period + max(map(abs, answer.starts.values())))
    found = [
        f"{target} starts too soon after {source}"
        for source, target, ready, distance in waits
        if answer.starts[target] + slack < answer.starts[source] + ready - distance * period
    ]
    for i, one in enumerate(seconds):
        for two in list(seconds)[:i]:
            if devices[one] & devices[two]:
                between = answer.starts[two] - answer.starts[one]
                found += (
                    []
                    if _kept_apart(between, seconds[one], seconds[two], (period, slack))
                    else [f"{one} overlaps {two}"]
                )
    found += [f"{name} takes longer than a period" for name in seconds if seconds[name] > period + slack]
    return found + _order_mistakes(spec, answer, seconds, devices) + _stuck(answer, waits)


def _kept_apart(between: float, one: float, two: float, within: tuple[float, float]) -> bool:
    """True where two nodes that begin `between` apart never run at the same time. within: a period, and a slack."""
    period, slack = within
    if period <= 0:
        return one <= slack and two <= slack
    turns = floor(between / period)
    rests = [between - (turns + step) * period for step in (-1, 0, 1)]
    return any(one - slack <= rest <= period - two + slack for rest in rests)


def _order_mistakes(
    spec: ProblemFile, answer: ProblemAnswer, seconds: dict[str, float], devices: dict[str, int]
) -> list[str]:
    """Every device runs what holds it, once a round, one after the other."""
    found, seen = [], 0
    slack = NEAR * (answer.period + max(map(abs, answer.starts.values())))
    for order in answer.orders:
        turns = [(answer.starts[t.call] + t.offset * answer.period, seconds[t.call], t.call) for t in order.turns]
        for (start, took, name), (after, _, other) in pairwise(turns):
            if start + took > after + slack:
                found.append(f"{other} comes before {name} is done")
        again = answer.period > 0 and turns and turns[0][0] + answer.period + slack
        if again and turns[-1][0] + turns[-1][1] > again:
            found.append("a round takes longer than a period")
        for first, count in order.devices:
            for device in range(first, first + count):
                seen |= 1 << device
                used = sorted(name for name, bits in devices.items() if bits >> device & 1)
                if used != sorted(name for _, _, name in turns):
                    found.append(f"device {device} is held by {used}")
    if seen != (1 << spec.devices) - 1:
        found.append("some device has no order")
    return found


def _stuck(answer: ProblemAnswer, waits: Sequence[tuple[str, str, float, int]]) -> list[str]:
    """Calls that wait for each other for ever if devices keep to their orders: a circuit of distance 0."""
    names = list(answer.starts)
    steps = np.full((len(names), len(names)), 1 << 40, np.int64)
    links = [(source, target, distance) for source, target, _, distance in waits]
    for order in answer.orders:
        for at, turn in enumerate(order.turns):
            after, lap = (order.turns[at + 1], 0) if at + 1 < len(order.turns) else (order.turns[0], 1)
            links.append((turn.call, after.call, lap + after.offset - turn.offset))
    for source, target, distance in links:
        i, j = names.index(source), names.index(target)
        steps[i, j] = min(steps[i, j], distance)
    for via in range(len(names)):
        np.minimum(steps, steps[:, via, None] + steps[None, via, :], out=steps)
    return [f"{name} waits for itself" for i, name in enumerate(names) if steps[i, i] < 1]
