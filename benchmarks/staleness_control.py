"""The limit of work in flight against the admission rule alone: masked tokens and speed, on the clock.

Run from the repository root: `python -m benchmarks.staleness_control`. The very Scheduler drives workers that take the
cost model's seconds (`tests/plan_clock.py`): GRPO of Qwen3-1.7B on eight H100s, generation on four of them and training
on four, log-normal lengths whose longest is eleven times the median, at staleness 2 and 4. Seconds of training are set
for each ratio: those of generation, with all places filled and training at once, over the ratio. *Trained tokens* are
those within the age bound. The bound of the pass: at most 5 % masked, and at least 0.95 of the trained tokens a second
of the rule alone; steps a second, which count masked tokens as work, are printed beside it and judged by themselves.

Beside it, unjudged, the most that functions would gain if they began with each sample and not with its group: a reward
of 50 or 500 ms a sample, one at a time in a group, runs on all samples of a group after its last one, or on that last
one alone; groups do not wait for each other's rewards. `--streaming` measures this alone and writes nothing.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.clocked import GRPO, LONG_TAIL, planned, verdict
from benchmarks.machine import describe
from tests.plan_clock import PlanClock

RESULTS = Path(__file__).parent / "results" / "staleness_control.json"
RATIOS = (4.0, 2.0, 1.0, 0.5, 0.25)
BOUNDS = (2, 4)
MOST_MASKED, LEAST_SPEED = 0.05, 0.95
REWARD_SECONDS = (0.05, 0.5)  # of a sample
AT_ONCE = 1e-3  # seconds of training with which generation is measured
APART = (
    *("allocation.rollout.first=0", "allocation.rollout.devices=4"),
    *("allocation.train.first=4", "allocation.train.devices=4"),
)


class Reached(Struct, frozen=True):
    """The steady state of a run. seconds: of a step."""

    seconds: float
    masked: float
    mean_age: float

    @property
    def trained(self) -> float:
        """Tokens within the bound a second, in batches."""
        return (1 - self.masked) / self.seconds


class Case:
    """One plan, on the clock with any seconds of training."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._planned = planned(GRPO, f"staleness={bound}", *LONG_TAIL, *APART)
        self._job = replace(self._planned.job, staleness=bound)

    @property
    def samples_per_group(self) -> int:
        return self._job.graph.samples_per_group

    def run(self, train_seconds: float, *, limited: bool, reward_seconds: float | None = None) -> Reached:
        """Admission runs ahead by the whole bound, whatever the plan keeps to. reward_seconds: between a group's last
        sample and its rewards, if not as planned."""
        plan, extra = self._planned.plan, self._planned.extra
        if reward_seconds is not None:
            extra = {**extra, "reward": reward_seconds}
        train = replace(plan.allocations["train"], seconds=train_seconds)
        plan = replace(plan, allocations={**plan.allocations, "train": train}, staleness=self.bound)
        clock = PlanClock(replace(self._job, plan=plan), extra, self._planned.prices, limited=limited)
        seconds, ages = clock.period(), clock.steady_ages()
        masked = sum(share for age, share in ages.items() if age > self.bound)
        return Reached(seconds, masked, sum(age * share for age, share in ages.items()))


def row_of(bound: int, ratio: float, rule: Reached, limited: Reached) -> dict[str, float | int | bool]:
    trained, steps = limited.trained / rule.trained, rule.seconds / limited.seconds
    few = limited.masked <= MOST_MASKED
    return {
        "staleness": bound,
        "generation_over_training": ratio,
        "rule_masked": round(rule.masked, 4),
        "masked": round(limited.masked, 4),
        "rule_mean_age": round(rule.mean_age, 3),
        "mean_age": round(limited.mean_age, 3),
        "trained_tokens_ratio": round(trained, 4),
        "steps_ratio": round(steps, 4),
        "passed": few and trained >= LEAST_SPEED,
        "passed_by_steps": few and steps >= LEAST_SPEED,
    }


def streamed(case: Case, generation: float) -> Iterator[dict[str, float | int | bool]]:
    """Rewards that begin with a sample over such that begin with its group: ratios, and the ages of both."""
    for ratio in RATIOS[::2]:
        for seconds in REWARD_SECONDS:
            waits = (case.samples_per_group * seconds, seconds)
            group, sample = (case.run(generation / ratio, limited=True, reward_seconds=wait) for wait in waits)
            yield {
                "staleness": case.bound,
                "generation_over_training": ratio,
                "reward_seconds": seconds,
                "trained_tokens_ratio": round(sample.trained / group.trained, 4),
                "steps_ratio": round(group.seconds / sample.seconds, 4),
                "group_mean_age": round(group.mean_age, 3),
                "sample_mean_age": round(sample.mean_age, 3),
            }


def print_streamed() -> list[dict[str, float | int | bool]]:
    """Measure and print all of it."""
    rows = []
    print("rewards by the sample over rewards by the group:")
    for bound in BOUNDS:
        case = Case(bound)
        for row in streamed(case, case.run(AT_ONCE, limited=False).seconds):
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def main() -> int:
    """Measure, print, write the results; 1 where a ratio misses the bound of the pass."""
    if "--streaming" in sys.argv[1:]:
        print_streamed()
        return 0
    rows = []
    head = ("staleness", "ratio", "masked: rule", "limited", "mean age: rule", "limited", "trained/s", "steps/s")
    print("  ".join(f"{name:>14}" for name in head))
    for bound in BOUNDS:
        case = Case(bound)
        generation = case.run(AT_ONCE, limited=False).seconds
        for ratio in RATIOS:
            rule, limited = (case.run(generation / ratio, limited=limited) for limited in (False, True))
            row = row_of(bound, ratio, rule, limited)
            rows.append(row)
            shown = [*list(row.values())[:8]]
            print("  ".join(f"{value:>14}" for value in shown), end="  ")
            print(f"{verdict(passed=bool(row['passed']))}, by steps {verdict(passed=bool(row['passed_by_steps']))}")
    passed = all(row["passed"] for row in rows)
    limits = {"most_masked": MOST_MASKED, "least_speed": LEAST_SPEED}
    report = {"machine": describe(), **limits, "passed": passed, "rows": rows, "streaming": print_streamed()}
    RESULTS.write_bytes(msgspec.json.format(json.dumps(report).encode(), indent=1) + b"\n")
    print(
        f"{verdict(passed=passed)}: masked <= {MOST_MASKED} at >= {LEAST_SPEED} of the rule's trained tokens a second"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
