"""The limit of work in flight against the admission rule alone, in real runs: masked tokens and speed.

What `benchmarks.staleness_control` measures on the clock, on two cores: the runs of `benchmarks.async_vs_sync`
(generation on one core, training on the other, log-normal lengths, the longest more than ten times the median) at
staleness 2 and 4, of 8 groups and of 32. One epoch: generation takes longer than training; four: training does. *The
rule alone*: `rollout.max_running` has room for all that the admission rule lets in, so the scheduler sets no limit of
its own. Both kinds take turns; figures are medians over the rounds, of steady steps. *Trained tokens* are those that a
loss used.

The bound of the pass: at most 5 % masked, at >= 0.95 of the trained tokens a second of the rule alone. About half an
hour on two idle cores: `python -m benchmarks.staleness_runs [--rounds 3] [--quick]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import Struct, to_builtins

from benchmarks.async_vs_sync import APART, GROUPS, SAMPLES, Measured, Mode, measure
from benchmarks.clocked import verdict
from benchmarks.long_tail import is_long_tailed, make_folder
from benchmarks.machine import describe
from benchmarks.staleness_control import BOUNDS, LEAST_SPEED, MOST_MASKED
from tests.runs import merged

RESULTS = Path(__file__).parent / "results" / "staleness_runs.json"
Setting = tuple[int, int, int]  # staleness, groups, epochs
EPOCHS = (1, 4)
MANY_GROUPS = 32
SETTINGS: tuple[Setting, ...] = (
    *((bound, GROUPS, epochs) for bound in BOUNDS for epochs in EPOCHS),
    *((bound, MANY_GROUPS, 1) for bound in BOUNDS),
)
STEPS = 40
QUICK_STEPS = 16


def mode_of(setting: Setting, *, limited: bool) -> Mode:
    """A kind of run: GRPO at a staleness, with the scheduler's limit or without it."""
    bound, groups, epochs = setting
    parts = merged(APART, {"staleness": bound, "params": {"epochs": epochs}, "batch": {"groups": groups}})
    if not limited:
        parts = merged(parts, {"rollout": {"max_running": (1 + bound) * groups * SAMPLES}})
    kind = "limited" if limited else "rule"
    return Mode(f"staleness {bound}, {groups} groups, {epochs} epochs, {kind}", parts, STEPS)


class Row(Struct, frozen=True):
    """Both kinds of runs of a setting, medians over the rounds. masked: share of the tokens that no loss used. ratio:
    trained tokens a second, limited over the rule alone, round by round."""

    staleness: int
    groups: int
    epochs: int
    rule_masked: float
    masked: float
    rule_age: float
    age: float
    rule_running: float
    running: float
    ratio: float

    @property
    def passed(self) -> bool:
        return self.masked <= MOST_MASKED and self.ratio >= LEAST_SPEED


def row_of(setting: Setting, rule: Sequence[Measured], limited: Sequence[Measured]) -> Row:
    """The rounds of one setting, in their order."""

    def median(rows: Sequence[Measured], key: str) -> float:
        return round(float(statistics.median(getattr(row, key) for row in rows)), 4)

    speeds = [one.tokens_per_s / other.tokens_per_s for one, other in zip(limited, rule, strict=True)]
    bound, groups, epochs = setting
    return Row(
        staleness=bound,
        groups=groups,
        epochs=epochs,
        rule_masked=median(rule, "unused_share"),
        masked=median(limited, "unused_share"),
        rule_age=median(rule, "age"),
        age=median(limited, "age"),
        rule_running=median(rule, "running"),
        running=median(limited, "running"),
        ratio=round(statistics.median(speeds), 4),
    )


def show(rows: Sequence[Row]) -> bool:
    """Print the table; True where every row passes."""
    head = (
        "staleness",
        "groups",
        "epochs",
        "masked: rule",
        "limited",
        "age: rule",
        "limited",
        "running: rule",
        "limited",
    )
    print("  ".join(f"{name:>13}" for name in (*head, "trained/s")))
    for row in rows:
        values = "  ".join(f"{value:>13}" for value in to_builtins(row).values())
        print(f"{values}  {verdict(passed=row.passed)}")
    passed = all(row.passed for row in rows)
    print(
        f"{verdict(passed=passed)}: masked <= {MOST_MASKED} at >= {LEAST_SPEED} of the rule's trained tokens a second"
    )
    return passed


def main() -> int:
    """Run all kinds in turn and write what came of it; 1 where the bound of the pass is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of short runs, which writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[tuple[Setting, bool], list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="realgraph-staleness-") as folder:
        home = Path(folder)
        make_folder(home)
        for number in range(1 if asked.quick else asked.rounds):
            for setting in SETTINGS:
                for limited in (False, True):
                    mode = mode_of(setting, limited=limited)
                    mode = replace(mode, steps=QUICK_STEPS) if asked.quick else mode
                    found.setdefault((setting, limited), []).append(one := measure(home, mode, number))
                    print(one, flush=True)
    lengths = [length for rows in found.values() for row in rows for length in row.lengths]
    assert is_long_tailed(lengths), "the lengths have no long tail"
    rows = [row_of(setting, found[setting, False], found[setting, True]) for setting in SETTINGS]
    passed = show(rows)
    if not asked.quick:
        limits = {"most_masked": MOST_MASKED, "least_speed": LEAST_SPEED}
        written = {"machine": describe(), **limits, "rounds": asked.rounds, "passed": passed}
        asked.out.write_text(json.dumps(written | {"rows": [to_builtins(row) for row in rows]}, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
