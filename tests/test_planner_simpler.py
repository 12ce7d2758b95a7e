"""Plans are made simpler within their error bar, and only what is odd is left out."""

import random
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.advise.alternatives import alternatives
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.tables import Known
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits, SearchProblem, Solution, Unsolved
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, at_staleness
from realgraph.planner.search import levels, simpler
from realgraph.planner.search.search import search
from realgraph.planner.search.simpler import Oddity, OddKind, oddities, simplest
from realgraph.planner.solve import solver
from tests.planner_cases import cluster, grpo, request

WORK = Workload(64, 8, 512, 1024, 400.0)
QUICK = Limits(gap=0.01, seconds=20.0)


def asked(model: str = "Qwen/Qwen3-8B", nodes: int = 1, pins: Mapping[str, Pin] | None = None) -> PlanRequest:
    return request(grpo(), model, cluster("H100-SXM", 8, nodes), dict(pins or {}), WORK)


def odd_plan(free: PlanRequest, pins: Mapping[str, Pin]) -> Plan:
    """The best plan under these pins, as if the search had chosen them freely."""
    return search(replace(free, pins=dict(pins)), QUICK)


@pytest.mark.parametrize(
    ("model", "nodes", "train", "word"),
    [
        ("Qwen/Qwen3-8B", 1, Pin(pp=8), "train: pp 4, which divides 36 layers as 8 does not"),
        (
            "Qwen/Qwen3-8B",
            1,
            Pin(pp=4, chunks=6, schedule="interleaved"),
            "train: 1F1B, not interleaved x6 in 4 stages of 36",
        ),
        (
            "Qwen/Qwen3-8B",
            1,
            Pin(pp=2, chunks=8, schedule="interleaved"),
            "train: 1F1B, not interleaved x8 in 2 stages of 36",
        ),
        ("Qwen/Qwen3-30B-A3B", 2, Pin(ep=16), "train: ep 8 within a node, not 16 over several"),
    ],
)
def test_what_is_odd_is_left_out_within_the_bar(model: str, nodes: int, train: Pin, word: str) -> None:
    free = asked(model, nodes)
    plan = odd_plan(free, {"train": train})
    found = simplest(free, plan, QUICK)
    assert any(text.startswith(word) for text in found.simplified), found.simplified
    assert found.exact_seconds == plan.period_seconds
    assert found.period_seconds <= min(plan.period_bar_seconds[1], plan.period_seconds * (1 + simpler.MOST_LOSS))
    assert found.lower_bound_seconds <= plan.lower_bound_seconds
    assert validate(found, free) == ()
    allocation = found.allocations["train"]
    layers = free.model("train").layers
    assert allocation.layout.ep <= 8 and layers % allocation.layout.pp == 0
    assert not any(oddity.call == "train" for oddity in oddities(free, found))
    assert layers // allocation.layout.pp >= 2 * allocation.chunks
    assert layers % (allocation.layout.pp * allocation.chunks) == 0


def test_a_simpler_plan_is_odd_in_fewer_ways_and_in_no_new_one() -> None:
    n_simpler = 0
    for seed in range(8):
        rng = random.Random(seed)
        model, nodes, expert_ways = rng.choice([("Qwen/Qwen3-8B", 1, (1,)), ("Qwen/Qwen3-30B-A3B", 2, (8, 16))])
        free = asked(model, nodes)
        train = Pin(pp=rng.choice([1, 2, 4, 8]), ep=rng.choice(expert_ways))
        rollout = Pin(devices=rng.choice([4, 8]), ep=rng.choice(expert_ways[:1]))
        try:
            plan = odd_plan(free, {"train": train, "rollout": rollout})
        except ConfigError:
            continue  # these pins do not go together
        found = simplest(free, plan, QUICK)
        if found is not plan:
            n_simpler += 1
            assert oddities(free, found) < oddities(free, plan)
            assert found.simplified and found.exact_seconds == plan.period_seconds
            longest = min(plan.period_bar_seconds[1], plan.period_seconds * (1 + simpler.MOST_LOSS))
            assert found.period_seconds <= longest
    assert n_simpler > 2


@pytest.mark.parametrize(
    ("kind", "pp", "chunks", "fewer"),
    [("single layers", 4, 4, 3), ("uneven chunks", 2, 8, 6), ("uneven chunks", 4, 2, 3)],
)
def test_an_interleaving_that_pays_keeps_chunks_of_as_many_layers(
    kind: OddKind, pp: int, chunks: int, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B is refused here, as if it took too long; the plan's option is among those that `--explain` compares."""
    free = asked()
    plan = odd_plan(free, {"train": Pin(pp=pp, chunks=chunks, schedule="interleaved")})
    assert Oddity(kind, "train") in oddities(free, plan)
    searched = simpler._searched

    def no_plain_order(changed: PlanRequest, limits: Limits, most: float) -> Plan | None:
        return None if changed.pins["train"].schedule == "1f1b" else searched(changed, limits, most)

    monkeypatch.setattr(simpler, "_searched", no_plain_order)
    found = simplest(free, plan, QUICK)
    assert any(text.startswith(f"train: interleaved x{fewer}, not interleaved x{chunks}") for text in found.simplified)
    assert found.allocations["train"].chunks == fewer
    assert alternatives(free, found, "train")


def test_a_level_that_can_not_be_good_enough_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stale, stopped, solve = at_staleness(asked(), 1), list[bool](), solver.solve

    def hopeless_at_first(problem: SearchProblem, limits: Limits) -> Solution | Unsolved:
        if stopped:
            return solve(problem, limits)
        limits.progress(float("inf"), 1e9)
        stopped.append(limits.stop())
        return Unsolved(False, "", "interrupted", 0.0, 1e9)

    monkeypatch.setattr(levels, "solve", hopeless_at_first)
    found = levels.best_level(stale, QUICK, Known(), (1, 0), 1e9)
    assert stopped == [True]
    assert found.best is not None and found.best.plan.staleness == 0


def test_calls_that_lie_apart_for_nothing_share_all_devices() -> None:
    free = asked()
    half = {"rollout": Pin(first=0, devices=4), "train": Pin(first=4, devices=4)}
    plan = odd_plan(free, half)
    found = simplest(free, plan, QUICK)
    assert "every call on all devices" in found.simplified
    assert len({allocation.layout.mesh for allocation in found.allocations.values()}) == 1


def test_what_is_pinned_stays_and_so_does_what_is_worth_its_oddness() -> None:
    pins = {"train": Pin(pp=8), "rollout": Pin(devices=8)}
    plan = odd_plan(asked(), pins)
    assert simplest(asked(pins=pins), plan, QUICK) is plan
    fast = replace(plan, period_seconds=plan.period_seconds / 4, period_bar_seconds=plan.period_bar_seconds)
    assert simplest(asked(), fast, QUICK) is fast, "no simpler plan is nearly as fast"
    sure = replace(plan, period_bar_seconds=(plan.period_seconds / 4, plan.period_seconds / 4))
    assert simplest(asked(), replace(sure, period_seconds=plan.period_seconds / 4), QUICK).simplified == ()


def test_a_plain_plan_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = odd_plan(asked(), {name: Pin(first=0, devices=8, pp=1, ep=1) for name in ("rollout", "train")})
    monkeypatch.setattr(simpler, "best_level", None)
    assert simplest(asked(), plan) is plan
