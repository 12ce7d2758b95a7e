"""The search against a checker that looks at every combination: random small problems, 10^5 of them by default.

Run from the repository root: `python -m benchmarks.planner_bounds --seed 0 --count 100000 --processes 2`. It ends with
code 1 where any bound is above an optimum, or any plan breaks a rule or has a period that is not the least of its
options; each such problem is printed with its seed and written to results/planner_bounds/. The problems are those of
planner_bounds_problems.py. The checker is planner_bounds_check.py, with planner_bounds_walk.py and _arrays.py; it
shares no code with the search. Every other problem is solved exactly, the others to 1 %, so that the bounds of
searches that end early are held to the same. Results, counted by family, go to results/planner_bounds.json.
"""

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from msgspec import Struct

from benchmarks.machine import describe
from benchmarks.planner_bounds_check import mistakes
from benchmarks.planner_bounds_problems import family, problem_of
from benchmarks.problem_export import problem_text
from realgraph.planner.plan.problem import Limits, Solution
from realgraph.planner.problem_file.checks import problems_of
from realgraph.planner.problem_file.codec import NoAnswer, ProblemAnswer, answer_of, build_problem
from realgraph.planner.problem_file.spec import ProblemFile
from realgraph.planner.solve.solver import orders, solve

RESULTS = Path(__file__).parent / "results"
EXACT, ROUGH = 1e-7, 0.01  # gaps that are asked for
PART = 250  # problems that a process takes at a time


class Outcome(Struct, frozen=True):
    """Outcome of one problem."""

    seed: int
    feasible: bool
    positive: bool  # the bound is above 0
    wrong: tuple[str, ...]  # what the checker says of the answer
    search_s: float  # of CPU
    check_s: float  # of CPU


def gap_of(seed: int) -> float:
    """The gap that the search of this seed's problem is asked for."""
    return EXACT if seed % 2 else ROUGH


def answered(spec: ProblemFile, gap: float) -> ProblemAnswer | NoAnswer:
    """The search's answer to a problem."""
    read = build_problem(spec)
    found = solve(read.problem, Limits(gap=gap))
    return answer_of(read, found, orders(read.problem, found) if isinstance(found, Solution) else {})


def checked(seed: int) -> Outcome:
    """The search's answer to the problem of a seed, checked."""
    spec = problem_of(seed)
    assert not problems_of(spec, ""), f"the problem of seed {seed} has mistakes"
    began = time.process_time()
    answer = answered(spec, gap_of(seed))
    middle = time.process_time()
    wrong = tuple(mistakes(spec, answer, gap_of(seed)))
    ended = time.process_time()
    return Outcome(seed, answer.feasible, answer.bound > 0, wrong, middle - began, ended - middle)


def part(seeds: range) -> list[Outcome]:
    """One process's part; what the compiler left in memory is not looked at by the garbage collector again."""
    gc.freeze()
    return [checked(seed) for seed in seeds]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; the others follow")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    last = asked.seed + asked.count
    parts = [range(first, min(first + PART, last)) for first in range(asked.seed, last, PART)]
    checked(asked.seed)  # compiles what is not compiled yet, once
    began, outcomes = time.monotonic(), list[Outcome]()
    with ProcessPoolExecutor(asked.processes) as pool:
        for done, found in enumerate(pool.map(part, parts), start=1):
            outcomes += found
            for outcome in found:
                for text in outcome.wrong:
                    print(f"seed {outcome.seed} ({', '.join(family(outcome.seed))}): {text}", flush=True)
            if done % 20 == 0:
                print(f"{len(outcomes):,} of {asked.count:,}, {time.monotonic() - began:,.0f} s", flush=True)
    _write(outcomes, asked.seed, time.monotonic() - began)
    return int(any(outcome.wrong for outcome in outcomes))


def _write(outcomes: Sequence[Outcome], seed: int, seconds: float) -> None:
    """The results file, and the problems whose answers are wrong."""
    families = Counter(" ".join(family(outcome.seed)) for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        folder = RESULTS / "planner_bounds"
        folder.mkdir(exist_ok=True)
        (folder / f"{outcome.seed}.json").write_text(problem_text(problem_of(outcome.seed)), encoding="utf-8")
    count = len(outcomes)
    head = {
        "problems": count,
        "first_seed": seed,
        "wrong": len(wrong),
        "wrong_seeds": [outcome.seed for outcome in wrong],
        "with_a_plan": sum(outcome.feasible for outcome in outcomes),
        "proven_infeasible": sum(not outcome.feasible and not outcome.wrong for outcome in outcomes),
        "bounds_above_0": sum(outcome.positive for outcome in outcomes),
        "wall_s": round(seconds, 1),
        "search_ms": round(1e3 * sum(outcome.search_s for outcome in outcomes) / count, 2),
        "check_ms": round(1e3 * sum(outcome.check_s for outcome in outcomes) / count, 2),
        "families": dict(sorted(families.items())),
        "machine": describe(),
    }
    (RESULTS / "planner_bounds.json").write_text(json.dumps(head, indent=2) + "\n", encoding="utf-8")
    print({name: value for name, value in head.items() if name not in ("families", "machine")})


if __name__ == "__main__":
    sys.exit(main())
