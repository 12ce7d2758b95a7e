"""Plans under a staleness bound: never slower than those of a smaller bound, nor than a rule that the report prints."""

from math import inf, isfinite
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.planner.costs.memory.memory import decode_logits
from realgraph.planner.costs.memory.terms import CACHE_PAGE_TOKENS, usable_bytes
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import tokens_in_flight
from realgraph.planner.options.holdings import active_of, peak_of
from realgraph.planner.options.tables import Known, problem_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits, Solution
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, at_staleness, kept_by
from realgraph.planner.search import levels, streams
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.baselines import baselines_of, best_of_rules, rule_solutions
from realgraph.planner.search.levels import levels_up_to
from realgraph.planner.search.search import reprice, search
from realgraph.planner.search.streams import gives_up_caches, kept_caches
from realgraph.planner.search.window import window_of
from realgraph.planner.solve.solver import evaluate, solve
from tests.planner_cases import cluster, grpo, ppo, request
from tests.planner_oracles import every_choice

LIMITS = Limits(gap=0.005, seconds=30.0)
LONG = Workload(128, 8, 1024, 8192, 3000.0)  # at 2 and 4 steps more is in flight than pays
REQUESTS = {
    "grpo 32B on 16": (request(grpo(), "Qwen/Qwen3-32B", cluster(nodes=2), workload=LONG), (0, 1, 2, 4)),
    "ppo 8B on 8": (
        request(ppo(), "meta-llama/Llama-3.1-8B", cluster(), workload=Workload(512, 1, 512, 1024, 512.0)),
        (0, 1, 2),
    ),
}


def rules_of(asked: PlanRequest, plan: Plan) -> list[float]:
    """The periods of the rules that the report prints beside a plan."""
    found = baselines_of(problem_of(kept_by(asked, plan)), LIMITS)
    return [one.period for one in (found.symmetric, found.colocated, found.megatron, found.real) if one is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_a_larger_staleness_bound_never_makes_a_plan_slower(name: str) -> None:
    asked, bounds = REQUESTS[name]
    before = float("inf")
    least = float("inf")
    for staleness in bounds:
        here = at_staleness(asked, staleness)
        plan = search(here, LIMITS)
        assert plan.period_seconds <= before * (1 + (LIMITS.gap if staleness == 0 else 1e-9)), staleness
        assert plan.staleness <= staleness and validate(plan, here) == ()
        assert plan.lower_bound_seconds <= plan.period_seconds
        slack = LIMITS.gap if plan.staleness == 0 else 1e-9  # a synchronous search ends within its gap
        assert all(plan.period_seconds <= rule * (1 + slack) for rule in rules_of(here, plan)), staleness
        before, least = plan.period_seconds, min(least, plan.period_seconds)
        assert plan.lower_bound_seconds <= least


@pytest.mark.slow
def test_plans_of_larger_bounds_alone_are_slower() -> None:
    """So a search that looked at no smaller bound would fail the test above."""
    asked, (_, *bounds) = REQUESTS["grpo 32B on 16"]
    alone = [search(at_staleness(asked, staleness), LIMITS, (staleness,)).period_seconds for staleness in bounds]
    assert alone[0] * (1 + LIMITS.gap) < alone[1] < alone[2]


@pytest.mark.slow
@settings(max_examples=3)
@given(
    algorithm=st.sampled_from([grpo(), ppo()]),
    together=st.booleans(),
    groups=st.integers(4, 64),
    mean=st.floats(100.0, 450.0),
    bounds=st.tuples(st.integers(0, 3), st.integers(1, 4)),
)
@example(algorithm=grpo(), together=False, groups=16, mean=200.0, bounds=(4, 4))
def test_more_staleness_never_makes_the_plan_of_a_random_run_slower(
    algorithm: Graph, together: bool, groups: int, mean: float, bounds: tuple[int, int]
) -> None:
    """Also above the steps of which each is searched, of which there are few here. bounds: the smaller, and what the
    larger has more; of the example's, the level of the larger alone has a slower plan."""
    work = Workload(groups, 8, 256, 512, mean)
    drawn = request(algorithm, "Qwen/Qwen3-0.6B", cluster(devices=2), workload=work)
    drawn = replace(drawn, constraints=Constraints(colocated=together))
    less, more = bounds[0], sum(bounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "EVERY_LEVEL_STEPS", 2)
        before, after = (search(at_staleness(drawn, bound), Limits(gap=0.0, seconds=60.0)) for bound in (less, more))
    assert before.stopped != "time limit" and after.stopped != "time limit"
    assert after.period_seconds <= before.period_seconds * (1 + 1e-9)
    assert after.staleness <= more and after.lower_bound_seconds <= before.lower_bound_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_window_of_a_period_has_the_streams_of_all_faster_plans(name: str, staleness: int) -> None:
    """The best plan's and those of the rules."""
    asked = at_staleness(REQUESTS[name][0], staleness)
    best, prepared = search(asked, LIMITS, (staleness,)), problem_of(asked)
    plans = [best, *(plan_of(where, found) for where, found in rule_solutions(prepared, LIMITS))]
    for plan in plans:
        window = window_of(prepared, plan.period_seconds * (1 + 1e-6))
        stream = plan.allocations[asked.graph.generates[0]]
        wait = stream.latency_seconds + stream.ahead * plan.period_seconds
        assert window.has(stream.layout.mesh.n_devices, stream.seconds, (0, wait))
        assert 0 < window.return_seconds < (1 + staleness) * plan.period_seconds
    assert window_of(prepared, 0.5 * best.lower_bound_seconds).most_seconds == ()


def test_intervals_that_are_cut_prove_a_stream_near_the_best_one() -> None:
    """Uncut they proved it within 0.61 %, of which the search's own gap is 0.2 %."""
    work = Workload(256, 1, 512, 4096, 1024.0)
    asked = at_staleness(request(ppo(), "meta-llama/Llama-3.1-8B", cluster(), workload=work), 1)
    plan = search(asked, replace(LIMITS, gap=0.002))
    assert plan.staleness == 1 and plan.stopped == "proven"
    assert plan.period_seconds <= plan.lower_bound_seconds * (1 + 0.006)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    algorithm=st.sampled_from([grpo(), ppo()]),
    devices=st.sampled_from([2, 4]),
    groups=st.integers(4, 64),
    mean=st.floats(100.0, 450.0),
    staleness=st.integers(1, 3),
    rng=st.randoms(use_true_random=False),
)
def test_no_plan_of_a_small_run_beats_the_bound(
    algorithm: Graph, devices: int, groups: int, mean: float, staleness: int, rng: Random
) -> None:
    """Plans of every choice for generation beside the best of all others, and of random choices, each with the period
    that its stream comes to."""
    work = Workload(groups, 8, 256, 512, mean, staleness=staleness)
    asked = request(algorithm, "Qwen/Qwen3-0.6B", cluster(devices=devices), workload=work)
    found = levels.best_level(asked, Limits(gap=1e-4, seconds=60.0), Known(), (staleness,))
    prepared = problem_of(asked)
    best = solve(prepared.problem, Limits(gap=1e-4))
    assert isinstance(best, Solution)
    every = {task.name: every_choice(prepared.problem, task) for task in prepared.problem.tasks}
    tried = [{**best.choices, name: rng.choice(options)} for name, options in every.items() for _ in range(10)]
    tried += [{**best.choices, algorithm.generates[0]: rng.choice(every[algorithm.generates[0]])} for _ in range(30)]
    tried += [{name: rng.choice(options) for name, options in every.items()} for _ in range(20)]
    periods = [found.bound]
    for choices in [best.choices, *tried]:
        schedule = evaluate(prepared.problem, choices)
        if schedule is not None:
            solution = replace(
                best, choices=choices, period=schedule.period, starts=schedule.starts, critical=schedule.critical
            )
            periods.append(plan_of(prepared, solution).period_seconds)
    assert len(periods) > 10 and min(periods[1:]) >= found.bound * (1 - 1e-9)


def test_levels_of_a_smaller_bound_are_among_those_of_a_larger_one() -> None:
    for staleness in range(80):
        less, more = set(levels_up_to(staleness)), set(levels_up_to(staleness + 1))
        assert less <= more and max(more) <= staleness + 1
        assert more >= set(range(min(staleness + 1, 16) + 1))
    assert len(levels_up_to(1000)) < 30


@pytest.mark.slow
def test_a_search_that_had_no_time_gives_no_plan_that_a_rule_beats() -> None:
    prepared = problem_of(request(ppo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2)))
    found = solve(prepared.problem, Limits(gap=0.0, seconds=10.0))
    assert isinstance(found, Solution)
    slow = replace(found, period=found.period * 2, stopped="time limit")
    where, best = best_of_rules(prepared, slow)
    assert best.period < slow.period and best.stopped == "time limit" and best.bound == slow.bound
    assert best_of_rules(prepared, replace(found, period=found.period / 2))[1].period == found.period / 2
    assert set(best.choices) == {task.name for task in where.problem.tasks}


@pytest.mark.slow
def test_a_plan_whose_generation_no_stream_keeps_to_stays_as_the_search_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = at_staleness(REQUESTS["ppo 8B on 8"][0], 1)
    plan = replace(search(asked, LIMITS), staleness=1)
    assert isfinite(streams.steady_state(asked, plan).period_seconds)
    point = streams._point
    monkeypatch.setattr(streams, "_point", lambda *of: replace(point(*of), period=inf, bound=False))
    assert streams.steady_state(asked, plan) is plan


@pytest.mark.parametrize("cache_tokens", [100_000, 400_000])
def test_calls_that_a_stream_pauses_for_count_the_caches_that_it_keeps(cache_tokens: int) -> None:
    """On one device the stream pauses for training. Its caches stay where both have room, and only there."""
    pins = {"rollout": Pin(kv_cache_tokens=cache_tokens), "train": Pin(max_tokens_per_microbatch=4096)}
    asked = at_staleness(request(grpo(), "Qwen/Qwen3-1.7B", cluster(devices=1), pins), 2)
    plan = search(asked, LIMITS)
    assert plan.staleness > 0
    alone = peak_of(asked, plan.allocations, "train")[1]
    cache = active_of(asked, plan.allocations, "rollout").kv_cache
    kept = plan.allocations["train"].peak_bytes - alone.total
    assert cache > 0 and kept == (0 if gives_up_caches(asked, plan) else cache)
    assert gives_up_caches(asked, plan) == (cache_tokens == 400_000)
    assert plan.allocations["train"].bound_bytes <= usable_bytes(asked.cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "staleness"), [("Qwen/Qwen3-1.7B", 0), ("Qwen/Qwen3-1.7B", 2), ("Qwen/Qwen3-8B", 2)])
def test_half_of_the_memory_that_is_left_is_spare_room_for_generation(model: str, staleness: int) -> None:
    """As far as the sequences that may run at once can fill it, which of a stream are all that can be in flight, the
    engine runs and the cache holds; none where the size of the cache is pinned."""
    asked = at_staleness(request(grpo(), model, cluster(devices=4), workload=LONG), staleness)
    plan = search(asked, LIMITS)
    rollout, room = plan.allocations["rollout"], usable_bytes(asked.cluster)
    in_flight = (1 + staleness) * LONG.n_samples // rollout.layout.dp
    spare, most = rollout.spare_cache_tokens, in_flight * (LONG.prompt_tokens + LONG.max_new_tokens)
    assert spare % CACHE_PAGE_TOKENS == 0
    assert 0 < spare <= max(0, most - rollout.tokens) + CACHE_PAGE_TOKENS
    filled = (rollout.tokens + spare) / tokens_in_flight(asked)
    assert (rollout.spare_running > 0) == (staleness > 0)
    assert rollout.most_running <= max(rollout.running, min(in_flight, asked.engine.max_running, filled))
    lean_rollout = replace(rollout, spare_cache_tokens=0, spare_running=0)
    lean = replace(plan, allocations={**plan.allocations, "rollout": lean_rollout})
    assert gives_up_caches(asked, plan) == gives_up_caches(asked, lean)
    before = reprice(asked, lean).allocations
    more_of = {"rollout": rollout.peak_bytes - before["rollout"].peak_bytes}  # of what pauses it, its cache alone
    logits = decode_logits(asked.model("rollout"), asked.role("rollout"), rollout.layout, rollout.spare_running)
    more_of |= dict.fromkeys(kept_caches(asked, plan), more_of["rollout"] - logits)
    for name, allocation in plan.allocations.items():
        more = more_of.get(name, 0)
        assert allocation.bound_bytes == before[name].bound_bytes + more
        assert more <= (room - before[name].bound_bytes) / 2
        assert allocation.seconds == before[name].seconds
    assert reprice(asked, plan).allocations == plan.allocations
    pinned = search(replace(asked, pins={"rollout": Pin(kv_cache_tokens=rollout.kv_cache_tokens)}), LIMITS)
    assert pinned.allocations["rollout"].spare_cache_tokens == 0
    edited = replace(rollout, spare_cache_tokens=1 << 40)
    (problem,) = validate(replace(plan, allocations={**plan.allocations, "rollout": edited}), asked)
    assert "usable" in problem.text
