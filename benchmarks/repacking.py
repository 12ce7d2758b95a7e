"""Bounds of what moving long samples onto few engines could gain, on the clock.

Run `python -m benchmarks.repacking`. The very Scheduler drives engines whose token steps take a fixed time and some for
each sequence (`tests/plan_clock.py`), at staleness 2, with log-normal lengths whose longest is eleven times the median,
for several ratios of generation and training. Two figures bound the gain from above:

`starved`: the share of time in which a sample waits for a slot though all that is under way would fit on fewer engines.
Only then would an engine that is emptied let something begin earlier.

`interrupt over wait`: under `interrupt: wait` new weights wait for the longest sample. Engines emptied by moving it
could take them at once; under `recompute` all do, without moving anything.
"""

import argparse
import json
import math
import random
from pathlib import Path

from msgspec.structs import replace

from benchmarks.clocked import verdict
from benchmarks.machine import describe
from realgraph.runtime.job.job import CheckpointSpec, Job, RuntimeSpec
from realgraph.runtime.job.rollout import Interrupt, RolloutSpec
from tests.plan_clock import PlanClock
from tests.shapes import Shape, job_of

ENGINES, SLOTS, GROUPS, PER_GROUP, STEPS, BOUND = 4, 64, 16, 8, 30, 2
MEDIAN, LONGEST, SIGMA = 700.0, 7700.0, 1.0
STEP_SECONDS, SEQUENCE_SECONDS, PREFILL_SECONDS = 0.008, 4e-5, 2e-5  # of a token step, a sequence in it, a token
RATIOS = (4.0, 2.0, 1.0, 0.5, 0.25)  # of generation to training
MOST_STARVED = 0.01


class LongTail:
    """An engine as the clock knows it."""

    def __init__(self) -> None:
        self.slots, self.kept, self.prompt_tokens, self.per_group = SLOTS, True, 200.0, PER_GROUP
        self.fixed = [0.0] + [STEP_SECONDS + SEQUENCE_SECONDS * n for n in range(1, SLOTS + 1)]
        self.each = [0.0] * (SLOTS + 1)
        self.start = PREFILL_SECONDS * self.prompt_tokens

    def again(self, running: int, tokens: float) -> float:
        """Seconds in which caches are computed again."""
        return PREFILL_SECONDS * tokens if running else 0.0

    def length(self, sample: int) -> float:
        """Tokens of a sample."""
        return min(LONGEST, MEDIAN * math.exp(random.Random(sample).gauss(0.0, SIGMA)))


class Watched(PlanClock):
    """Sums the seconds in which a sample waits for a slot, and all would fit on an engine less."""

    starved = total = 0.0
    looked = 0.0

    def _go_on(self, number: int) -> None:
        homes = list(self._homes.values())
        seconds, self.looked = self.now - self.looked, self.now
        n_all = sum(len(home.running) + len(home.waiting) for home in homes)
        waits = any(home.waiting for home in homes)
        self.total += seconds
        self.starved += seconds if waits and n_all <= SLOTS * (len(homes) - 1) else 0.0
        super()._go_on(number)


def job(train_seconds: float, interrupt: Interrupt) -> Job:
    """A run with engines of its own."""
    made = job_of(Shape(n_workers=2 * ENGINES, split=True, staleness=BOUND, steps=STEPS, groups=GROUPS, n=PER_GROUP))
    train = replace(made.plan.allocations["train"], seconds=train_seconds)
    plan = replace(made.plan, allocations={**made.plan.allocations, "train": train})
    alike = {"checkpoint": CheckpointSpec(minutes=0), "runtime": RuntimeSpec(min_deadline_seconds=1e6)}
    return replace(made, plan=plan, rollout=RolloutSpec(interrupt=interrupt), **alike)


def measure(ratio: float) -> dict[str, float]:
    """Both figures at one ratio."""
    mean = sum(LongTail().length(sample) for sample in range(1000)) / 1000
    generation = mean * GROUPS * PER_GROUP / (ENGINES * SLOTS) * (STEP_SECONDS + SEQUENCE_SECONDS * SLOTS)
    seconds, starved = {}, 0.0
    for interrupt in ("recompute", "wait"):
        clock = Watched(job(generation / ratio, interrupt), {}, LongTail())
        seconds[interrupt] = clock.period()
        starved = starved if interrupt == "wait" else clock.starved / clock.total
    return {"ratio": ratio, "starved": starved, "interrupt_over_wait": seconds["wait"] / seconds["recompute"]}


def main() -> None:
    """Print a table; `--json` writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    path = parser.parse_args().json
    print(describe())
    rows = [measure(ratio) for ratio in RATIOS]
    print(f"{'generation/training':>20} {'starved':>9} {'interrupt over wait':>20}")
    for row in rows:
        print(f"{row['ratio']:>20} {row['starved']:>9.2%} {row['interrupt_over_wait']:>20.3f}")
    passed = all(row["starved"] <= MOST_STARVED for row in rows)
    print(
        verdict(passed=passed),
        f"moving samples could let others begin earlier in {MOST_STARVED:.0%} of the time at most",
    )
    if path is not None:
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
