"""The limit of work in flight: what it learns of engines, what it predicts of ages, and what a run gains by it."""

import math
import random

import pytest
from msgspec.structs import replace

from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.concurrency.ages import BatchedGroup, TrainedGroup, masked_share
from realgraph.runtime.scheduler.concurrency.controller import Concurrency
from realgraph.runtime.scheduler.concurrency.settings import ConcurrencySettings, settings_of
from realgraph.runtime.scheduler.concurrency.speed import Speed
from tests.plan_clock import PlanClock
from tests.shapes import Shape, job_of

# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_speed_is_learned_from_groups_of_any_length_and_noise(seed: int) -> None:
    rng = random.Random(seed)
    fixed, each = rng.uniform(0, 2), rng.uniform(0, 0.1)
    exact, noisy = Speed(200.0), Speed(200.0)
    for _ in range(2000):
        running, longest = rng.uniform(10, 60), round(rng.lognormvariate(5, 1)) + 1
        seconds = longest * (fixed + each * running)
        exact.add(running, longest, seconds)
        noisy.add(running, longest, seconds * rng.uniform(0.8, 1.2))
    assert exact.terms == pytest.approx((fixed, each), rel=1e-6, abs=1e-9)
    for running in (20, 40, 60):
        assert noisy.token_seconds(running) == pytest.approx(fixed + each * running, rel=0.1)
    for running in (1.0, 10.0, 100.0):
        assert exact.running_for(exact.groups_per_second(running)) == pytest.approx(running, rel=1e-5)
    most = 1 / (exact.longest * each)  # groups a second with any number in flight
    assert exact.running_for(1.01 * most) == float("inf")


def test_a_constant_number_of_groups_tells_no_slope_and_old_speeds_are_forgotten() -> None:
    speed = Speed(50.0)
    for _ in range(300):
        speed.add(30.0, 100, 50.0)
    assert speed.terms == pytest.approx((0.5, 0.0))
    for i in range(600):
        running = 30.0 + i % 10
        speed.add(running, 100, 2 * running)
    assert speed.terms == pytest.approx((0.0, 0.02), abs=1e-4)


# --- ages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_masked_share_is_that_of_tokens_counted_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    bound, token_steps = rng.randint(1, 4), 10 ** rng.uniform(-4, -1)
    groups = [
        TrainedGroup(tuple(rng.randint(1, 200) for _ in range(rng.randint(1, 6))), rng.uniform(-1, bound + 1))
        for _ in range(rng.randint(1, 8))
    ]
    n_old = n_tokens = 0
    for group in groups:
        for length in group.lengths:
            for token in range(length):
                n_tokens += 1
                n_old += group.waited + (max(group.lengths) - token) * token_steps > bound
    n_samples = sum(len(group.lengths) for group in groups)
    found = masked_share(groups, bound, token_steps)
    assert abs(found - n_old / n_tokens) <= n_samples / n_tokens + 1e-9  # a part of a token each
    more = masked_share(groups, bound, 2 * token_steps)
    assert found <= more <= 1


# --- the limit --------------------------------------------------------------------------------------------------------


class Lives:
    """Random lives of groups told to a controller, on a clock of their own."""

    def __init__(self, rng: random.Random, settings: ConcurrencySettings) -> None:
        self.rng, self.settings = rng, settings
        self.concurrency = Concurrency(settings)
        self.now, self.next_group, self.step, self.version = 0.0, 0, 0, 0
        self.flying: list[int] = []
        self.ready: list[tuple[int, tuple[int, ...]]] = []

    def event(self) -> int:
        """One event; the room after it."""
        self.now += self.rng.expovariate(1.0)
        room = self.concurrency.room(len(self.ready))
        assert room >= 0
        if room and self.rng.random() < 0.7:
            new = list(range(self.next_group, self.next_group + min(room, self.rng.randint(1, 4))))
            self.next_group += len(new)
            self.flying += new
            self.concurrency.admitted(new, self.now)
        elif self.flying:
            group = self.flying.pop(self.rng.randrange(len(self.flying)))
            if self.rng.random() < 0.1:
                self.concurrency.left([group], self.now)
            else:
                lengths = tuple(self.rng.randint(0, 90) for _ in range(self.settings.samples_per_group))
                self.concurrency.generated(group, lengths, self.version, self.now)
                self.ready.append((group, lengths))
        if len(self.ready) >= self.settings.per_batch:
            taken, self.ready = self.ready[: self.settings.per_batch], self.ready[self.settings.per_batch :]
            batch = [BatchedGroup(group, lengths, self.rng.randint(0, sum(lengths))) for group, lengths in taken]
            self.concurrency.batched(self.step, batch, self.now)
            self.concurrency.step_ended(self.step, self.now + self.rng.random())
            self.step += 1
            self.version = self.step
        return self.concurrency.room(len(self.ready))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_run_always_goes_on_and_no_more_are_in_flight_than_slots_need(seed: int) -> None:
    """And a controller that goes on from an image in the middle gives the very same limits."""
    rng = random.Random(seed)
    slots = rng.choice([float("inf"), rng.randint(1, 30)])
    fixed = slots < float("inf") and rng.random() < 0.5
    settings = ConcurrencySettings(
        rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 4), slots, rng.randint(1, 4), fixed
    )
    lives, second = Lives(rng, settings), Concurrency(settings)
    for _ in range(800):
        room = lives.event()
        if not lives.flying and len(lives.ready) <= settings.per_batch:
            assert room >= 1, "nothing is in flight, and nothing may be"
        if slots < float("inf"):
            assert len(lives.flying) + room <= max(len(lives.flying), slots + 2)
        second.restore(lives.concurrency.image)
        assert second.room(len(lives.ready)) == room
        assert second.image == lives.concurrency.image
        lives.concurrency, second = second, lives.concurrency
    assert lives.step > 10


def limits_told(seed: int, old: float) -> list[int]:
    """Room after each batch of a run whose groups begin and end as they come, whatever it is. old: share of the tokens
    of each batch that is beyond the bound."""
    rng, per_batch = random.Random(seed), 8
    concurrency, rooms = Concurrency(ConcurrencySettings(per_batch, 2, 2, math.inf, 2, fixed=False)), list[int]()
    flying, began, now = list[int](), 0, 0.0
    for step in range(40):
        batch = []
        n_flying = rng.randint(12, 20)
        for _ in range(per_batch):
            new = list(range(began, began + n_flying - len(flying)))
            flying, began = [*flying, *new], began + len(new)
            concurrency.admitted(new, now)
            now += rng.uniform(0.5, 1.0)
            group, lengths = flying.pop(0), (rng.randint(1, 90), rng.randint(1, 90))
            concurrency.generated(group, lengths, step, now)
            batch.append(BatchedGroup(group, lengths, round(old * sum(lengths))))
        concurrency.batched(step, batch, now)
        rooms.append(concurrency.room(0))
        concurrency.step_ended(step, now + 1.0)
    return rooms


@pytest.mark.parametrize("seed", range(10))
def test_tokens_beyond_the_bound_that_nothing_predicts_lower_the_limit(seed: int) -> None:
    none, some, many = (limits_told(seed, old) for old in (0.0, 0.2, 0.6))
    assert all(a >= b >= c for a, b, c in zip(none, some, many, strict=True))
    assert sum(none) > sum(some)


def test_a_job_says_which_slots_there_are_and_a_synchronous_one_has_no_limit() -> None:
    job = job_for(2, 1.0, 0)
    assert settings_of(replace(job, plan=replace(job.plan, staleness=0)), 1) is None
    known = settings_of(job, 2)
    assert known is not None and known.slots == float("inf") and known.places == 3 * GROUPS
    rollout = replace(job.plan.allocations["rollout"], running=12)
    job = replace(job, plan=replace(job.plan, allocations={**job.plan.allocations, "rollout": rollout}))
    planned, named = settings_of(job, 2), settings_of(replace(job, rollout=replace(job.rollout, max_running=5)), 2)
    assert planned is not None and (planned.slots, planned.fixed) == (24, False)
    assert named is not None and (named.slots, named.fixed) == (10, True)


# --- in a run ---------------------------------------------------------------------------------------------------------

GROUPS, SAMPLES, MEAN, STEPS = 24, 4, 200.0, 42


class Replica:
    """An engine whose token step takes seconds for itself and for each sequence, whatever their length."""

    kept, prompt_tokens, per_group, start = True, 20.0, SAMPLES, 0.0

    def __init__(self, fixed: float, each: float, slots: int, seed: int) -> None:
        self.slots, self._seed = slots, seed
        self.fixed = [fixed + each * n for n in range(slots + 1)]
        self.each = [0.0] * (slots + 1)

    def again(self, running: int, tokens: float) -> float:
        return 0.0

    def length(self, sample: int) -> float:
        """Log-normal, the longest 3.2 deviations above the median: eleven times as long."""
        deviation = 0.745
        drawn = random.Random(f"{self._seed} {sample}").gauss(0, 1)
        return max(1.0, MEAN * math.exp(deviation * min(drawn, 3.2) - deviation**2 / 2))


def job_for(bound: int, train_seconds: float, seed: int, max_running: int | None = None) -> Job:
    shape = Shape(n_workers=2, split=True, groups=GROUPS, n=SAMPLES, staleness=bound, steps=STEPS, seed=seed)
    job = job_of(shape)
    seconds = {"rollout": 1.0, "ref_logp": 0.01, "train": train_seconds}
    allocations = {name: replace(one, seconds=seconds[name]) for name, one in job.plan.allocations.items()}
    plan = replace(job.plan, allocations=allocations)
    runtime = replace(job.runtime, min_deadline_seconds=1e9)
    return replace(job, plan=plan, runtime=runtime, rollout=replace(job.rollout, max_running=max_running))


def reached(job: Job, replica: Replica, *, limited: bool) -> tuple[float, float, float]:
    """Seconds of a step, masked share, mean age."""
    clock = PlanClock(job, {}, replica, limited=limited)
    seconds, ages = clock.period(), clock.steady_ages()
    masked = sum(share for age, share in ages.items() if age > job.staleness)
    return seconds, masked, sum(age * share for age, share in ages.items())


CASES = [
    *(("busy", bound, ratio) for bound in (2, 4) for ratio in (4.0, 1.0, 0.25)),
    *(("between", bound, ratio) for bound in (2, 4) for ratio in (4.0, 1.0, 0.25)),
    *(("idle", 2, ratio) for ratio in (4.0, 1.0, 0.25)),
]
FIXED = {"busy": 0.0002, "between": 0.004, "idle": 0.05}  # seconds of a token step; each sequence adds 0.0001


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "bound", "ratio"), CASES)
def test_few_tokens_are_masked_and_no_trained_token_is_lost(engine: str, bound: int, ratio: float) -> None:
    """On engines that a few sequences keep busy, and on such that more make ever faster, with small batches.

    More tokens are masked only where fewer groups in flight would train fewer tokens within the bound. What idle
    engines gain and lose by it is nearly the same, and less sure.
    """
    replica = Replica(FIXED[engine], 0.0001, 10_000, seed=bound)
    generation, _, _ = reached(job_for(bound, 1e-3, 1), replica, limited=False)
    job = job_for(bound, generation / ratio, 1)
    rule, limited = (reached(job, replica, limited=limited) for limited in (False, True))
    trained = (1 - limited[1]) / limited[0] * rule[0] / (1 - rule[1])
    assert trained >= (0.9 if engine == "idle" else 0.95)
    assert limited[1] <= 0.06 or (limited[1] < rule[1] and trained < 1.0)
    assert limited[2] <= rule[2] + 0.05
    if ratio < 1 and engine != "idle":  # groups that wait for training are not made up for: they would only grow old
        assert limited[2] <= 1.4


@pytest.mark.parametrize("by_user", [False, True])
def test_slots_of_the_engines_are_filled_and_little_waits_for_one(by_user: bool) -> None:
    """Whoever sets them: the plan, whose number is an upper bound, or the user, who wants them filled."""
    slots = 30
    replica = Replica(0.05, 0.0001, slots, seed=1)
    job = job_for(2, 1e-3, 1, slots if by_user else None)
    rollout = replace(job.plan.allocations["rollout"], running=slots)
    job = replace(job, plan=replace(job.plan, allocations={**job.plan.allocations, "rollout": rollout}))
    rule, limited = (reached(job, replica, limited=limited) for limited in (False, True))
    assert limited[0] <= 1.05 * rule[0]
    assert limited[1] <= rule[1] + 0.01
