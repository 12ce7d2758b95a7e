"""The paged key-value cache: no page is lost or shared wrongly, and no sample shows that memory was short."""

import random
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.planner.costs.generate.generate import GenerateWork, _refills, slots_in_use
from realgraph.planner.costs.generate.occupancy import occupancy
from realgraph.planner.costs.lengths import quantiles
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import running_sequences
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.attention.pages import PAGE_TOKENS, PagePool, pages_for
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.prefill import shared_pages
from tests.planner_cases import grpo, request
from tests.rollouts import model, requests, run

DOUBLE = model("qwen3", 5).double()
SLIDING = model("gemma2", 5).double()


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 9)), max_size=80), st.booleans())
def test_a_page_is_free_or_held_by_who_was_given_it(actions: list[tuple[str, int]], at_once: bool) -> None:
    """Against lists of what each holder has."""
    pool = PagePool(40, at_once=at_once)
    holders: list[list[int]] = []
    for action, number in actions:
        held = {page for pages in holders for page in pages}
        match action:
            case "take" if number <= pool.available:
                taken = pool.take(number)
                assert held.isdisjoint(taken)
                assert len(set(taken)) == number
                holders.append(taken)
            case "share" if holders:
                holders.append(pool.share(holders[number % len(holders)]))
            case "give" if holders:
                pool.give_back(holders.pop(number % len(holders)))
            case _:
                pass
        held = {page for pages in holders for page in pages}
        assert pool.n_used == len(held)
        assert pool.available == 40 - len(held)
        assert held <= set(range(1, pool.total + 1)) <= set(range(1, 41))


def check_pages(engine: ContinuousBatch) -> None:
    """Each running sequence has pages for what it has cached; who shares one has the prompt that lies in it."""
    running = [*engine._running, *engine._aside]
    holders: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for sequence in running:
        assert len(sequence.pages) >= pages_for(sequence.cached)
        assert len(set(sequence.pages)) == len(sequence.pages)
        for number, page in enumerate(sequence.pages):
            prompt = sequence.request.prompt
            own = prompt if number < shared_pages(len(prompt)) else (-sequence.request.id - 1,)
            holders.setdefault(page, []).append((number, own))
    assert 0 not in holders
    assert all(len(set(who)) == 1 for who in holders.values())
    assert engine._pool.n_used == len(holders)
    assert all(not sequence.pages and not sequence.cached for sequence in engine._waiting)


def mixed(seed: int) -> list[Request]:
    """Requests of a seed."""
    return requests(random.Random(seed), 14, longest=35, groups_of=4)


@cache
def unhindered(module: Any, seed: int) -> dict[int, Completion]:
    """Their samples where there is memory for all at once."""
    return run(ContinuousBatch(module, RolloutLimits(max_running=64)), mixed(seed))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "step", "step", "step", "abort", "update", "release", "aside"]), st.integers(0, 7)
    ),
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("module", [DOUBLE, SLIDING], ids=["qwen3", "gemma2"])
@settings(max_examples=10)
@given(ACTIONS, st.integers(1, 9), st.sampled_from([80, 112, 200, None]), st.sampled_from([4, 64]), st.integers(0, 5))
def test_short_memory_changes_no_sample_and_loses_no_page(
    module: Any, actions: list[tuple[str, int]], running: int, places: int | None, prefill: int, seed: int
) -> None:
    """Admissions, ends, aborts, updates, releases and evaluations in any order, in float64."""
    waiting = mixed(seed)
    others = [replace(r, max_new_tokens=3) for r in waiting[:3]]
    expected = unhindered(module, seed)
    engine = ContinuousBatch(module, RolloutLimits(running, max_cache_tokens=places, prefill_tokens=prefill))
    live: list[int] = []
    done: dict[int, Completion] = {}
    for action, number in [*actions, ("submit", 14), *[("step", 0)] * 2000]:
        match action:
            case "submit":
                engine.submit(waiting[:number])
                live += [r.id for r in waiting[:number]]
                waiting = waiting[number:]
            case "abort":
                engine.abort(live[number : number + 2])
                live = [i for i in live if i not in live[number : number + 2]]
            case "update":
                engine.weights_changed(engine.version + 1)
            case "release":
                engine.release()
            case "aside":
                with engine.set_aside():
                    engine.submit(others)
                    engine.step()
                    check_pages(engine)
            case _:
                for completion in engine.step():
                    live.remove(completion.id)
                    done[completion.id] = completion
        check_pages(engine)
        if engine.idle and not waiting:
            break
    assert engine.idle
    for number, completion in done.items():
        assert completion.tokens == expected[number].tokens
        assert completion.logprobs == pytest.approx(expected[number].logprobs, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_quarter_of_the_places_runs_more_sequences_than_a_quarter(seed: int) -> None:
    """Tokens in flight count, not places for the longest; what is preempted draws the same tokens again."""
    rng, longest = random.Random(seed), 110
    wanted = [
        Request(i, tuple(rng.randrange(1, 50) for _ in range(rng.randint(2, 8))), rng.choice([6, 12, 20, 100]), seed=i)
        for i in range(60)
    ]
    expected = run(ContinuousBatch(DOUBLE, RolloutLimits(max_running=16)), wanted)
    cache = 16 * longest // 4
    engine = ContinuousBatch(DOUBLE, RolloutLimits(max_running=16, max_cache_tokens=cache))
    engine.submit(wanted)
    done: dict[int, Completion] = {}
    most = 0
    while not engine.idle:
        done |= {c.id: c for c in engine.step()}
        most = max(most, engine.running)
        assert engine._pool.n_used <= pages_for(cache)
    assert most > 8
    assert {i: c.tokens for i, c in done.items()} == {i: c.tokens for i, c in expected.items()}


@pytest.mark.parametrize(("prompt", "longest", "cache"), [(6, 8, 1024), (6, 24, 1024), (20, 24, 1024), (40, 24, 1024)])
def test_a_plan_counts_the_sequences_and_the_steps_of_the_engine(prompt: int, longest: int, cache: int) -> None:
    """The sequences that a cache holds, prompts of whole pages shared by their samples, and the steps of a batch, with
    those that take prompts in: fewer than the plan counts where a new group waits for the pages of its prompt."""
    rng = random.Random(longest)
    tokens = [rng.randint(1, longest) for _ in range(320)]
    prompts = [tuple(rng.randrange(1, 50) for _ in range(prompt)) for _ in range(40)]
    engine = ContinuousBatch(DOUBLE, RolloutLimits(max_running=len(tokens), max_cache_tokens=cache))
    engine.submit([Request(i, prompts[i // 8], n, seed=i) for i, n in enumerate(tokens)])
    steps_taken = admitting = 0
    taking_part: list[int] = []  # sequences of each step while others wait
    while not engine.idle:
        waiting = engine.waiting
        ended = len(engine.step())
        steps_taken += 1
        admitting += engine.waiting < waiting
        if engine.waiting:
            taking_part.append(ended + engine.running)
    lengths = quantiles(tokens)
    mean = sum(tokens) / len(tokens)
    asked = request(grpo(), workload=Workload(40, 8, prompt, longest, mean, lengths=lengths))
    slots = running_sequences(asked, Layout(DeviceMesh(0, 1)), cache)
    work = GenerateWork(len(tokens), 8, float(prompt), mean, longest, slots, lengths)
    steps = occupancy(work.distribution, work.samples, slots_in_use(work), 1).steps.sum()
    assert slots_in_use(work) == pytest.approx(fmean(taking_part), rel=0.25)
    assert steps == pytest.approx(steps_taken, rel=0.12)
    assert 1 + _refills(work, work.samples) == pytest.approx(admitting, rel=0.3 if prompt < 40 else 0.5)


def test_samples_of_a_prompt_share_its_full_pages() -> None:
    prompt = tuple(range(1, 3 * PAGE_TOKENS + 6))
    engine = ContinuousBatch(DOUBLE, RolloutLimits(max_running=8))
    engine.submit([Request(i, prompt, 20, seed=i) for i in range(8)])
    engine.step()
    check_pages(engine)
    assert engine._pool.n_used == 3 + 8
    engine.abort([0, 3])  # the first is who filled them
    check_pages(engine)
    expected = run(ContinuousBatch(DOUBLE, RolloutLimits(max_running=1)), [Request(5, prompt, 20, seed=5)])
    done: dict[int, Completion] = {}
    while not engine.idle:
        done |= {c.id: c for c in engine.step()}
    assert done[5].tokens == expected[5].tokens
    assert not engine._pool.n_used
