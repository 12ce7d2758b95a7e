"""CPU seconds of the master inside the Scheduler per event and per call, from 8 to 1,024 workers.

Run from the repository root: `python -m benchmarks.scheduler`. Workers are simulated: they answer at once, with a
realistic number of metrics; only the time inside the Scheduler counts. PPO with six mesh-holding calls over every
device, 8 samples a worker and step. A *worker call* is one call as one worker executes it; a *model call* is that call
on all its workers, from its commands to its last answer. Three rounds, the sizes interleaved; the median is kept.
"""

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.machine import describe
from realgraph.runtime.commands.actions import Action, Event, Halt, Send, StepEnded
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Evaluate, Execute, Generated, Reallocate, Sample, Save, Submit, encode
from tests.shapes import Shape, job_of

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
SIZES = (8, 128, 1024)
STEPS, ROUNDS = 4, 3
LIMIT_MS = 1.0  # of master time per call at the largest size
METRICS = {
    "train": {f"metric_{i}": Mean(1.0, 8.0) for i in range(12)},
    "critic_train": {f"metric_{i}": Mean(1.0, 8.0) for i in range(6)},
}


class Cost:
    """Seconds inside the Scheduler, and what it did in them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.n_events = self.n_sends = self.n_steps = 0
        self.n_worker_calls = self.n_model_calls = 0
        self.encode_seconds = 0.0


def answer(action: Send, n: int, rng: random.Random) -> Event | None:
    """The immediate answer of a worker to a command."""
    command = action.command
    match command:
        case Submit():
            lengths = [rng.randint(100, 2000) for _ in range(len(command.groups) * n)]
            ids = [sample for group in command.groups for sample in sample_ids(group, n)]
            samples = tuple(Sample(sample, length, length) for sample, length in zip(ids, lengths, strict=True))
            return Generated(action.worker, command.call, command.groups, samples, started=1.0, ended=2.0)
        case Execute():
            metrics, groups = METRICS.get(command.call, {}), {group_of(share[0]) for share in command.shares}
            means = {group: {"reward": Mean(4.0, 8.0)} for group in groups if command.call == "reward"}
            return Done(action.worker, command.task, command.call, metrics, by_group=means, started=1.0, ended=2.0)
        case Reallocate() | Save() | Evaluate():
            return Done(action.worker, command.task, "")
    return None


def run(n_workers: int, seed: int) -> Cost:
    """STEPS steps of PPO on `n_workers`."""
    n = 8
    shape = Shape(algorithm="ppo", n_workers=n_workers, groups=n_workers, n=n, steps=STEPS, minibatches=1)
    rng, cost = random.Random(seed), Cost()
    scheduler = Scheduler(job_of(shape), range(n_workers), 10**6)
    pending: list[Event] = []

    def spend(event: Event | None) -> list[Action]:
        started = time.thread_time()
        actions = scheduler.start(0.0) if event is None else scheduler.on(event, 0.0)
        scheduler.deadline()
        cost.seconds += time.thread_time() - started
        cost.n_events += 1
        return actions

    gc.collect()
    actions = spend(None)
    while True:
        for action in actions:
            if isinstance(action, Send):
                started = time.thread_time()
                encode(action.command)
                cost.encode_seconds += time.thread_time() - started
                cost.n_sends += 1
                reply = answer(action, n, rng)
                if reply is not None:
                    pending.append(reply)
                cost.n_worker_calls += isinstance(action.command, Execute | Submit)
            elif isinstance(action, StepEnded):
                cost.n_steps += 1
                cost.n_model_calls += len(action.spans)
            elif isinstance(action, Halt):
                assert action.error is None, action.reason
                return cost
        at = rng.randrange(len(pending))
        pending[at], pending[-1] = pending[-1], pending[at]
        event = pending.pop()
        actions = spend(event)


def table(costs: dict[int, list[Cost]]) -> list[dict[str, float]]:
    """Medians over the rounds, one row per size."""
    rows = []
    for size, runs in costs.items():

        def median(value: Callable[[Cost], float], runs: list[Cost] = runs) -> float:
            return statistics.median(map(value, runs))

        rows.append(
            {
                "workers": size,
                "samples_per_step": size * 8,
                "events_per_s": round(median(lambda c: c.n_events / c.seconds)),
                "us_per_event": round(median(lambda c: 1e6 * c.seconds / c.n_events), 2),
                "ms_per_worker_call": round(median(lambda c: 1e3 * c.seconds / c.n_worker_calls), 5),
                "ms_per_model_call": round(median(lambda c: 1e3 * c.seconds / c.n_model_calls), 3),
                "ms_per_step": round(median(lambda c: 1e3 * c.seconds / c.n_steps), 2),
                "encode_us_per_command": round(median(lambda c: 1e6 * c.encode_seconds / c.n_sends), 2),
            }
        )
    return rows


def main() -> int:
    """Measure, print, write the results; 1 where the limit is passed."""
    costs: dict[int, list[Cost]] = {size: [] for size in SIZES}
    for round_ in range(ROUNDS):
        for size in SIZES:
            costs[size].append(run(size, round_))
    rows = table(costs)
    for name in rows[0]:
        print(f"{name:24}" + "".join(f"{row[name]:>14}" for row in rows))
    worst = rows[-1]["ms_per_worker_call"]
    passed = worst <= LIMIT_MS
    verdict = "PASS" if passed else "FAIL"
    print(f"{verdict}: {worst} ms of master time per worker call at {SIZES[-1]} workers, limit {LIMIT_MS}")
    RESULTS.parent.mkdir(exist_ok=True)
    report = {"machine": describe(), "limit_ms_per_worker_call": LIMIT_MS, "passed": passed, "rows": rows}
    RESULTS.write_bytes(msgspec.json.format(json.dumps(report).encode(), indent=1) + b"\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
