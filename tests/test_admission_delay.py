"""Requests that could run wait for others, so that one prefill serves several of them: how long, at what cost."""

import itertools
import random

import pytest

from realgraph.planner.costs.generate.generate import PREFILL_STEPS
from realgraph.runtime.engine import Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.prefill import MOST_DELAY, AdmissionDelay
from tests.rollouts import model, requests

DOUBLE = model("qwen3", 5).double()


def cost(free: list[int], slots: int) -> float:
    """Decode steps that a refill and the wait for it take: so many slots are free at each step of the wait."""
    return PREFILL_STEPS + sum(n / slots for n in free)


@pytest.mark.parametrize(("slots", "most"), [(8, 2.0), (64, 1.25), (256, 1.25)])
@pytest.mark.parametrize("mean", [3, 30, 300])
def test_a_wait_costs_about_as_little_as_the_best_one(slots: int, most: float, mean: int) -> None:
    """Against every interval between two refills, of slots that become free one after the other while others wait."""
    ended = [int(step * slots / mean) for step in range(10 * mean)]  # until that step
    lengths = range(1, 10 * mean)
    best = min(cost(ended[1 : length + 1], slots) / length for length in lengths if ended[length])
    delay = AdmissionDelay()
    wait = next(step for step in itertools.count(1) if delay.ends(ended[step], 1000, slots - ended[step]))
    assert cost(ended[1 : wait + 1], slots) / wait <= most * best


def test_nothing_waits_for_others_where_nothing_runs() -> None:
    assert AdmissionDelay().ends(1, 1, 0)
    assert AdmissionDelay().ends(1, 50, 0)


@pytest.mark.parametrize("running", [1, 20, 1000])
def test_the_last_requests_wait_for_few_steps(running: int) -> None:
    delay = AdmissionDelay()
    assert next(step for step in itertools.count(1) if delay.ends(1, 1, running)) <= MOST_DELAY


def test_requests_come_along_where_others_are_prefilled_anew() -> None:
    engine = ContinuousBatch(DOUBLE, RolloutLimits(max_running=40))
    engine.submit([Request(i, (1, 2, 3), 60, seed=i) for i in range(30)])
    engine.step()
    engine.submit([Request(30, (4, 5), 60, seed=30)])
    engine.step()
    assert (engine.running, engine.waiting) == (30, 1)
    engine.weights_changed(1)
    engine.step()
    assert (engine.running, engine.waiting) == (31, 0)


@pytest.mark.parametrize("cache", [None, 1024])
def test_a_queue_is_prefilled_in_fewer_passes_and_nearly_as_few_steps(cache: int | None) -> None:
    """Against requests that begin as soon as there is room; the same tokens are drawn."""
    limits = RolloutLimits(max_running=32, max_cache_tokens=cache)
    wanted = requests(random.Random(1), 200)

    class AtOnce(AdmissionDelay):
        def ends(self, could_join: int, waiting: int, running: int) -> bool:
            return True

    counts, drawn = [], []
    for delay in (AdmissionDelay(), AtOnce()):
        engine = ContinuousBatch(DOUBLE, limits)
        engine._delay = delay
        engine.submit(wanted)
        steps = passes = 0
        done: dict[int, tuple[int, ...]] = {}
        while not engine.idle:
            waiting = engine.waiting
            done |= {completion.id: completion.tokens for completion in engine.step()}
            steps, passes = steps + 1, passes + (engine.waiting < waiting)
        counts.append((steps, passes))
        drawn.append(done)
    (steps, passes), (steps_at_once, passes_at_once) = counts
    assert passes < 0.5 * passes_at_once
    assert steps < 1.2 * steps_at_once
    assert steps + PREFILL_STEPS * passes < steps_at_once + PREFILL_STEPS * passes_at_once
    assert drawn[0] == drawn[1]
