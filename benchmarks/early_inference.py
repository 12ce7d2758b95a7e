"""The most that inference of frozen models could gain if it began with samples and not with batches, on the clock.

Run from the repository root: `python -m benchmarks.early_inference`. The very Scheduler drives workers that take the
cost model's seconds (`tests/plan_clock.py`), lengths with a long tail, at staleness 1, 2 and 4. Beside each run stands
one in which a call of a frozen model has been at work on its samples in every second since its last batch in which all
of its mesh was idle, by up to seven eighths of its seconds: the last of eight chunks always waits for the last sample.
That is a bound: not all samples of the batch were there by then, and chunks fill their micro-batches less.

Plans: those that the search finds of PPO (8B, 16 H100s) and of GRPO with a reference (1.7B, 8 H100s); and GRPO with its
reference on two devices of its own, generation on four, training on two, with seconds of training that are those of
generation alone over a ratio. Prints and judges nothing: `docs/async.md` has the figures.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.clocked import GRPO, LONG_TAIL, PPO, ClockedPlan, planned
from realgraph.graphs.spec import Inference, Train
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.program import ranks_of
from tests.plan_clock import Engine, Made, PlanClock

BOUNDS = (1, 2, 4)
RATIOS = (4.0, 2.0, 1.0, 0.5, 0.25)
CHUNKS = 8  # of a batch: the last of them waits for the last sample
AT_ONCE = 1e-3  # seconds of training with which generation is measured
APART = (
    *("allocation.rollout.first=0", "allocation.rollout.devices=4"),
    *("allocation.ref_logp.first=4", "allocation.ref_logp.devices=2"),
    *("allocation.train.first=6", "allocation.train.devices=2"),
)


def _devices(layout: Layout) -> tuple[int, ...]:
    return tuple([device for rank in ranks_of(layout) for device in rank])


class Early(PlanClock):
    """Calls of frozen models have used the idle time of their meshes before their batches were there."""

    def __init__(self, job: Job, extra: Mapping[str, float], prices: Engine | None) -> None:
        super().__init__(job, extra, prices)
        calls = job.graph.calls
        trained = {call.model for call in calls.values() if isinstance(call, Train)}
        self.frozen = [
            name for name, call in calls.items() if isinstance(call, Inference) and call.model not in trained
        ]
        self._meshes = {name: _devices(job.plan.allocations[name].layout) for name in self.frozen}
        self._full = {name: self._seconds[name] for name in self.frozen}
        self._idle = dict.fromkeys(self.frozen, 0.0)  # seconds since the call's last batch
        self._calls_on = Counter[int]()  # worker -> calls that hold it
        self._task, self._looked = -1, 0.0
        self.hidden = 0.0  # seconds of calls that had been done before their batches were there

    def _note(self) -> None:
        """Nothing has changed since the last look: account for what was idle until now."""
        seconds, self._looked = self.now - self._looked, self.now
        for name, mesh in self._meshes.items():
            if seconds and not any(self._busy(device) for device in mesh):
                self._idle[name] += seconds

    def _busy(self, device: int) -> bool:
        home = self._homes.get(self._home_of.get(device, -1))
        return self._calls_on[device] > 0 or (home is not None and bool(home.running))

    def _work(self, worker: int, task: int, call: str, node: str) -> None:
        if node in self._full and task != self._task:
            self._note()
            self._task, full = task, self._full[node]
            self._seconds[node] = max(full / CHUNKS, full - self._idle[node])
            self.hidden += full - self._seconds[node]
            self._idle[node] = 0.0
        super()._work(worker, task, call, node)

    def _call_began_or_ended(self, worker: int, call: str, change: int) -> None:
        self._note()
        if call in self.job.plan.allocations:
            self._calls_on[worker] += change
        super()._call_began_or_ended(worker, call, change)

    def _submit(self, home: int, groups: tuple[int, ...], version: int) -> None:
        self._note()
        super()._submit(home, groups, version)

    def _made(self, made: Made) -> None:
        self._note()
        super()._made(made)


class Gain(Struct, frozen=True):
    """A plan with and without. seconds: of a step; ages: mean ages of the tokens, in steps."""

    share: float  # of a step's seconds that the frozen calls take, one after the other
    hidden: float  # share of their seconds that idle time would have taken
    seconds: float
    early_seconds: float
    age: float
    early_age: float

    def __str__(self) -> str:
        return (
            f"frozen calls {self.share:6.1%} of a step, {self.hidden:6.1%} of them hidden; step {self.seconds:8.3f} s, "
            f"steps a second x {self.seconds / self.early_seconds:.4f}; mean age {self.age:.3f} -> {self.early_age:.3f}"
        )


def gain(case: ClockedPlan, job: Job) -> Gain:
    """Both runs of `job`, on the prices of `case`."""
    plain, early = PlanClock(job, case.extra, case.prices), Early(job, case.extra, case.prices)
    seconds, early_seconds = plain.period(), early.period()
    of_frozen = sum(job.plan.allocations[name].seconds for name in early.frozen)
    ages = [sum(age * share for age, share in clock.steady_ages().items()) for clock in (plain, early)]
    return Gain(of_frozen / seconds, early.hidden / (of_frozen * len(early.ended)), seconds, early_seconds, *ages)


def with_training(case: ClockedPlan, seconds: float) -> Job:
    """The job of a plan whose train call takes so long."""
    plan = case.job.plan
    train = replace(plan.allocations["train"], seconds=seconds)
    return replace(case.job, plan=replace(plan, allocations={**plan.allocations, "train": train}))


def lines() -> Iterator[str]:
    """All of it, as it is measured."""
    reference = "params.kl_coef=0.001"
    for title, config, more in (("PPO, searched", PPO, ()), ("GRPO, searched", GRPO, (reference,))):
        for bound in BOUNDS:
            case = planned(config, f"staleness={bound}", *LONG_TAIL, *more)
            yield f"{title}, staleness {bound}: {gain(case, case.job)}"
    for bound in BOUNDS:
        case = planned(GRPO, f"staleness={bound}", *LONG_TAIL, reference, *APART)
        generation = PlanClock(with_training(case, AT_ONCE), case.extra, case.prices, limited=False).period()
        for ratio in RATIOS:
            found = gain(case, with_training(case, generation / ratio))
            yield f"GRPO, apart, staleness {bound}, ratio {ratio}: {found}"


def main() -> int:
    """Print the figures."""
    for line in lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
