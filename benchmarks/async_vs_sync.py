"""Asynchronous training against the best synchronous plan, on two cores of this machine: trained tokens a second.

Real processes; samples have log-normal lengths, the longest more than ten times the median (`long_tail`). Asynchronous:
generation on one core, training on the other, samples at most four steps old, or less by the plan. Synchronous: the
better of both calls on both cores (colocated), and one core each (apart), each under the planner's best plan; both are
printed. Only steady steps count, and of them the tokens that a loss used: a run's first steps, and the last ones, for
which nothing is made any more, are left out. All kinds of runs take turns; medians and quartiles are over the rounds.

Claims: at least 0.85 of the ideal, the smaller of what generation reaches alone (`--no-train`) and what training calls
take; at least 1.8x the better synchronous plan where rewards take 50 to 500 ms; and interrupted samples at least 1.10x
the speed of waiting for them. Beside them: weights read in shared memory against weights sent by gloo.

About ten minutes on two idle cores: `python -m benchmarks.async_vs_sync [--rounds 5] [--quick]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.long_tail import STATES, is_long_tailed, make_folder, mean_length
from benchmarks.machine import describe
from tests.runs import PLAIN, Special, finish, logs, merged, records, write_run

RESULTS = Path(__file__).parent / "results" / "async_vs_sync.json"
GROUPS, SAMPLES, STALENESS = 8, 4, 4
WARM_UP_STEPS = 6
QUICK_STEPS = WARM_UP_STEPS + STALENESS + 4
IDEAL, SLOW_REWARDS, INTERRUPTED = 0.85, 1.8, 1.10
ALONE = "generation alone"
APART = {"allocation": {"rollout": {"first": 0, "devices": 1}, "train": {"first": 1, "devices": 1}}}
SHARED = {"allocation": {"rollout": {"first": 0, "devices": 2}, "train": {"first": 0, "devices": 2}}}
AHEAD = merged(APART, {"staleness": STALENESS})
SLOW = {"calls": {"reward": {"fn": "tailed:slow", "args": {"least": 0.05, "most": 0.5}}}}
MESSAGES = Special(limits={"parallel.mapped.MARK_BYTES": 0})  # no memory of others looks right: weights are sent


@dataclass(frozen=True)
class Mode:
    """A kind of run: what is laid over the common run file, and how many steps it takes."""

    name: str
    parts: dict[str, Any] = field(hash=False)
    steps: int
    arguments: tuple[str, ...] = ()
    special: Special = field(default=PLAIN, hash=False)


MODES = (
    Mode("asynchronous", AHEAD, 26),
    Mode("colocated", SHARED, 14),
    Mode("apart", APART, 14),
    Mode(ALONE, AHEAD, 26, ("--no-train",)),
    Mode("asynchronous, slow rewards", merged(AHEAD, SLOW), 26),
    Mode("colocated, slow rewards", merged(SHARED, SLOW), 14),
    Mode("apart, slow rewards", merged(APART, SLOW), 14),
    Mode("asynchronous, wait", merged(AHEAD, {"rollout": {"interrupt": "wait"}}), 26),
    Mode("asynchronous, gloo", AHEAD, 26, special=MESSAGES),
)


@dataclass(frozen=True)
class Measured:
    """The steady steps of a run. tokens_per_s: new ones that a loss used, where something trains. train_tokens_per_s:
    the same over the seconds of the train calls alone. age: of a token on average, in steps."""

    mode: str
    steps: int
    tokens_per_s: float
    train_tokens_per_s: float
    running: float
    age: float
    unused_share: float
    moved_seconds: float
    lengths: tuple[int, ...] = field(repr=False, default=())


def run_file(mode: Mode) -> dict[str, Any]:
    """GRPO, with a learning rate that leaves lengths as they are."""
    common: dict[str, Any] = {
        "graph": "grpo",
        "params": {"group_size": SAMPLES, "lr": 1e-8},
        "inputs": {"answer": None},
        "data": {"max_prompt_tokens": 16, "columns": {"prompt": "prompt", "answer": None}},
        "batch": {"groups": GROUPS, "max_new_tokens": STATES + 1, "expected_new_tokens": round(mean_length())},
        "calls": {"reward": {"fn": "tailed:score", "reads": ["text"], "timeout_seconds": 20.0}},
        "outputs": {"transcripts_every": 0},
        "checkpoint": {"minutes": 0},
        "steps": mode.steps,
        "seed": 1,
    }
    return merged(common, mode.parts)


def measure(home: Path, mode: Mode, number: int) -> Measured:
    """One run, from its start to its end."""
    name = f"{mode.name.replace(', ', '-').replace(' ', '-')}-{number}"
    file = write_run(home, name, run_file(mode))
    finish(home, "run", str(file), *mode.arguments, name=name, special=mode.special)
    folder = home / (f"{name}-no-train" if mode.arguments else name)
    if mode.special == MESSAGES:
        assert "come as messages" in logs(folder), "weights were read in shared memory, and not sent"
    steps = records(folder)
    ahead = mode.parts.get("staleness", 0)
    return measured(mode.name, steps[WARM_UP_STEPS : len(steps) - 1 - ahead])


def measured(name: str, steady: Sequence[dict[str, Any]]) -> Measured:
    """The figures of steady steps, by their records."""
    metrics = [step["metrics"] for step in steady]
    unused = [one.get("train/masked_share", 0.0) + one.get("train/overdue", 0.0) for one in metrics]
    made = [one["batch/new_tokens"] for one in metrics]
    tokens = sum(n * (1 - share) for n, share in zip(made, unused, strict=True))
    trained = sum(one.get("train/seconds", 0.0) for one in metrics)

    def mean(key: str) -> float:
        return (
            statistics.fmean(one[key] for one in metrics if key in one) if any(key in one for one in metrics) else 0.0
        )

    return Measured(
        mode=name,
        steps=len(steady),
        tokens_per_s=tokens / sum(step["seconds"] for step in steady),
        train_tokens_per_s=tokens / trained if trained else 0.0,
        running=mean("rollout/running"),
        age=mean("staleness/mean"),
        unused_share=1 - tokens / sum(made),
        moved_seconds=mean("reallocate/seconds"),
        lengths=tuple(length for step in steady for length in step["lengths"]),
    )


# --- what follows -----------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


class Rounds:
    """All that was measured, by the kind of run."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self._rows = rows

    def speeds(self, mode: str) -> list[float]:
        return [row.tokens_per_s for row in self._rows if row.mode == mode]

    def speed(self, mode: str) -> float:
        return statistics.median(self.speeds(mode))

    def synchronous(self, ending: str = "") -> str:
        """The better of the two synchronous kinds."""
        return max((f"colocated{ending}", f"apart{ending}"), key=self.speed)

    @property
    def ideal(self) -> float:
        """Tokens a second of the slower of the two cores, if neither ever waited for the other."""
        alone = [row.train_tokens_per_s for row in self._rows if row.mode == "apart"]
        return min(self.speed(ALONE), statistics.median(alone))

    def ratio(self, above: str, below: str) -> tuple[float, float, float]:
        """Quartiles of the ratio of two kinds of runs, round by round."""
        return quartiles([a / b for a, b in zip(self.speeds(above), self.speeds(below), strict=True)])

    def lines(self) -> list[tuple[str, float, float]]:
        """(what, value, target; 0: none) of every claim."""
        better, slow = self.synchronous(), self.synchronous(", slow rewards")
        return [
            ("of the ideal", self.speed("asynchronous") / self.ideal, IDEAL),
            (f"over {better}, the best synchronous plan", self.ratio("asynchronous", better)[1], 0.0),
            (f"over {slow}", self.ratio("asynchronous, slow rewards", slow)[1], SLOW_REWARDS),
            ("interrupt over wait", self.ratio("asynchronous", "asynchronous, wait")[1], INTERRUPTED),
            ("shared memory over gloo", self.ratio("asynchronous", "asynchronous, gloo")[1], 0.0),
        ]


def report(rows: Sequence[Measured]) -> bool:
    """Print the table and the verdicts; True where all claims hold."""
    rounds, passed = Rounds(rows), True
    print(f"{'':<30}  {'tokens/s: quartiles':>24}  {'running':>7}  {'age':>4}  unused")
    for mode in dict.fromkeys(row.mode for row in rows):
        own = [row for row in rows if row.mode == mode]
        first, middle, third = quartiles(rounds.speeds(mode))
        running, age, unused = (
            statistics.fmean(getattr(row, key) for row in own) for key in ("running", "age", "unused_share")
        )
        print(f"{mode:<30}  {first:>6.0f} {middle:>8.0f} {third:>8.0f}  {running:>7.1f}  {age:>4.1f}  {unused:>6.1%}")
    print(f"ideal: {rounds.ideal:.0f} tokens/s")
    for what, value, target in rounds.lines():
        holds = not target or value >= target
        passed = passed and holds
        claim = f"  {'PASS' if holds else 'FAIL'} (>= {target})" if target else ""
        print(f"{value:>6.2f}x  {what}{claim}")
    return passed


def main() -> int:
    """Run all kinds in turn and write what came of it; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of short runs, which writes nothing")
    parser.add_argument("--only", default="", help="kinds of runs whose names have this, with no verdicts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="realgraph-async-") as folder:
        home = Path(folder)
        make_folder(home)
        for number in range(1 if asked.quick else asked.rounds):
            for mode in MODES:
                if asked.only not in mode.name:
                    continue
                shorter = replace(mode, steps=QUICK_STEPS) if asked.quick else mode
                rows.append(measure(home, shorter, number))
                print(rows[-1], flush=True)
    lengths = [length for row in rows for length in row.lengths]
    print(f"lengths: median {statistics.median(lengths):.0f}, longest {max(lengths)}")
    assert is_long_tailed(lengths), "the lengths have no long tail"
    if asked.only:
        return 0
    passed = report(rows)
    if not asked.quick:
        found = {"machine": describe(), "rounds": asked.rounds, "ideal": Rounds(rows).ideal}
        found["claims"] = [
            {"what": what, "value": value, "target": target} for what, value, target in Rounds(rows).lines()
        ]
        found["rows"] = [{name: value for name, value in asdict(row).items() if name != "lengths"} for row in rows]
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
