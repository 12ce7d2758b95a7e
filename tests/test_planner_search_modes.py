"""Beside the best plan: what a call could be instead, other clusters and settings, steadiness, synchronous runs."""

import math
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.planner.advise import sweep
from realgraph.planner.advise.alternatives import alternatives
from realgraph.planner.advise.robust import PHASES, erring, robust, scenario
from realgraph.planner.advise.sweep import changes_tried, hints, is_conclusive, larger_memory, resize, synchronous
from realgraph.planner.costs.spread import SPREADS, measured_deviation
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import phase_of
from realgraph.planner.plan.events import period
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.cost_table import CostTable, PhaseFactor
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, at_staleness, hashes
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.search import Infeasible, events_of, reprice, search, solved
from realgraph.planner.solve.memory import device_excess
from realgraph.planner.solve.solver import evaluate
from realgraph.run.requests import with_lengths
from tests.planner_cases import cluster, grpo, ppo, request
from tests.planner_oracles import every_choice, fits
from tests.planner_problems import problem_of_seed

replace = msgspec.structs.replace
QUICK = Limits(gap=0.05, seconds=10.0)
WORK = Workload(256, 1, 512, 1024, 500.0)
PPO = request(ppo(), "meta-llama/Llama-3.1-8B", cluster(devices=4, nodes=2), workload=WORK)
ONE_MODEL = replace(PPO, models=dict.fromkeys(PPO.models, request(grpo()).model("train")))


@cache
def best() -> Plan:
    """The plan of PPO."""
    return search(PPO, QUICK)


@cache
def best_of_one_model() -> Plan:
    return search(ONE_MODEL, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["generate", "ref", "actor_train"])
def test_no_alternative_beats_the_plan_by_more_than_the_gap_and_each_says_why(
    call: str,
) -> None:
    asked, plan = ONE_MODEL, best_of_one_model()
    found = alternatives(asked, plan, call)
    assert len(found) >= 3
    own = plan.allocations[call].layout
    for i, one in enumerate(found):
        assert bool(one.reason) == (one.period_seconds is None)
        if one.period_seconds is None:
            assert "GB" in one.reason or "fit" in one.reason or "in place" in one.reason
            continue
        assert one.period_seconds >= plan.lower_bound_seconds * (1 - 1e-6)
        if i % 5:
            continue
        layout = one.option.layout
        pinned = Pin(
            first=layout.mesh.first,
            devices=layout.mesh.n_devices,
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            sharding=layout.sharding,
        )
        assert search(replace(asked, pins={call: pinned}), QUICK).lower_bound_seconds <= one.period_seconds * (1 + 1e-6)
    assert any(one.option.layout.mesh != own.mesh for one in found)
    assert any(one.option.layout.mesh == own.mesh for one in found)


@pytest.mark.parametrize("block", range(4))
def test_what_devices_lack_is_what_does_not_fit(block: int) -> None:
    """Copies that frozen calls share count once, and what reads a trained copy in place needs none of its own."""
    seen: set[bool] = set()
    for seed in range(block * 50, (block + 1) * 50):
        problem, rng = problem_of_seed(seed), random.Random(seed)
        roomy = replace(problem, host_memory=problem.host_memory + 10**9)
        for _ in range(5):
            choices = {task.name: rng.choice(every_choice(problem, task)) for task in problem.tasks}
            over = device_excess(problem, choices)
            assert bool((over <= 0).all()) == fits(roomy, choices), seed
            seen.add(fits(roomy, choices))
            if not fits(roomy, choices):  # with so much more everywhere it fits, and with a byte less it does not
                assert fits(replace(roomy, memory=problem.memory + over.max()), choices)
                assert not fits(replace(roomy, memory=problem.memory + over.max() - 1), choices)
    assert seen == {True, False}


def test_present_settings_are_priced_beside_the_best() -> None:
    pins = {"actor_train": Pin(tp=4), "generate": Pin(tp=4)}
    mine = search(replace(PPO, pins=pins), QUICK)
    assert mine.allocations["generate"].layout.tp == 4
    assert best().lower_bound_seconds <= mine.period_seconds


def test_the_same_seed_takes_the_same_way_to_the_same_plan() -> None:
    """No step of a search that ends by its proof depends on a clock."""
    first, again = (solved(PPO, Limits(gap=0.001, seconds=60.0))[1] for _ in range(2))
    assert first.stopped == again.stopped == "proven"
    assert (first.nodes, first.choices, first.bound) == (again.nodes, again.choices, again.bound)


@pytest.mark.slow
def test_more_devices_are_never_worse() -> None:
    asked = request(grpo(), "meta-llama/Llama-3.1-70B", cluster(nodes=8), workload=WORK)
    sizes = [replace(asked, cluster=resize(asked.cluster, devices)) for devices in (8, 32, 64)]
    with pytest.raises(Infeasible, match="no plan fits"):
        search(sizes[0], QUICK)
    plans = [search(size, QUICK) for size in sizes[1:]]
    for smaller, larger in pairwise(plans):
        assert larger.lower_bound_seconds <= smaller.period_seconds * (1 + 1e-9)
    assert resize(asked.cluster, 4).n_devices == 4
    with pytest.raises(ValueError, match="whole nodes"):
        resize(asked.cluster, 12)


@pytest.mark.slow
def test_hints_are_searches_of_their_own() -> None:
    asked = replace(PPO, pins={"generate": Pin(tp=4)})
    plan = search(asked, QUICK)
    texts = {hint.text: hint for hint in hints(asked, plan, QUICK)}
    assert "16 devices" in texts
    assert texts["16 devices"].gain > 0
    assert texts["16 devices"].period_seconds == pytest.approx(plan.period_seconds / (1 + texts["16 devices"].gain))
    assert any("batch.groups 512" in text for text in texts)
    assert any(text.startswith("staleness") for text in texts)
    free = texts.get("without pins and constraints")
    assert free is None or free.period_seconds == pytest.approx(best().period_seconds, rel=0.02)
    larger = larger_memory(PPO.cluster)
    assert larger is not None
    assert larger.memory_bytes > PPO.cluster.memory_bytes


@pytest.mark.parametrize(("kind", "larger", "wanted"), [("H100-SXM", "GH200", False), ("L40S", "H100-PCIe", True)])
def test_other_devices_are_hinted_at_only_where_they_are_faster(kind: str, larger: str, wanted: bool) -> None:
    """GH200s have more memory than H100s in a node of eight, but no NVLink between them."""
    asked = request(grpo(), "Qwen/Qwen3-8B", cluster(kind), workload=WORK)
    tried = next(one for one in changes_tried(asked, search(asked, QUICK), QUICK) if one.text.startswith(larger))
    assert tried.conclusive
    assert (tried.hint is not None) == wanted
    assert tried.hint is None or tried.hint.gain > 0


@pytest.mark.parametrize(
    ("own", "periods", "gains"),
    [
        (0, {1: 3.0, 2: 4.0}, {1: None, 2: None, 4: None}),
        (2, {0: 2.0, 1: 3.0}, {0: None, 1: None, 4: None}),
        (2, {0: 2.5, 1: 1.6, 4: 1.8}, {0: -0.2, 1: 0.25, 4: 0.25}),
        (0, {1: 3.0, 2: 1.0, 4: 1.25}, {1: None, 2: 1.0, 4: 1.0}),
    ],
)
def test_no_larger_staleness_bound_is_said_to_be_slower(
    own: int, periods: dict[int, float], gains: dict[int, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """own: staleness of the run, whose plan takes 2 seconds; periods: of each level by itself, none where none fits."""

    def of_level(changed: PlanRequest, limits: Limits, levels: Sequence[int]) -> Plan:
        if changed.workload.staleness not in periods:
            raise Infeasible((), (), ())
        seconds = periods[changed.workload.staleness]
        return replace(best(), period_seconds=seconds, lower_bound_seconds=seconds)

    monkeypatch.setattr(sweep, "search", of_level)
    plan = replace(best(), period_seconds=2.0, lower_bound_seconds=2.0)
    found = {one.text: one for one in sweep._staler(at_staleness(PPO, own), plan, QUICK)}
    assert found.keys() == {f"staleness {bound}" for bound in gains}
    for bound, gain in gains.items():
        tried = found[f"staleness {bound}"]
        assert tried.conclusive and (tried.hint.gain if tried.hint else None) == (gain and pytest.approx(gain))


def test_changes_that_were_not_tried_are_not_told() -> None:
    tried = list(changes_tried(PPO, best(), replace(QUICK, stop=lambda: True)))
    assert len(tried) > 4
    assert all(one.hint is None and not one.conclusive for one in tried)


@given(period=st.floats(0.3, 3.0), gap=st.floats(0.0, 1.0))
def test_a_hint_is_kept_where_no_better_plan_could_turn_it_round(period: float, gap: float) -> None:
    """Against a plan of one second: of a change's plan of `period`, the best one takes period / (1 + gap) at least."""
    gain, best_gain = 1 / period - 1, (1 + gap) / period - 1
    if is_conclusive(gain, gap, asked=0.0):
        assert gap <= 0.02 or gain > 0 or best_gain <= 1e-9
    else:
        assert abs(gain) < 0.005 or gap > max(0.02, abs(gain))
    assert is_conclusive(0.5, 0.03, 0.01) and is_conclusive(-0.3, 0.1, 0.01)
    assert (
        not is_conclusive(0.004, 0.0, 0.01)
        and not is_conclusive(0.01, 0.03, 0.01)
        and not is_conclusive(-0.01, 0.03, 0.01)
    )


@pytest.mark.slow
def test_staleness_never_costs_and_synchronous_is_compared_with_it() -> None:
    asked = replace(PPO, workload=replace(WORK, staleness=2))
    plan, before = search(asked, QUICK), best()
    for found, of in ((plan, asked), (before, PPO)):
        assert period(events_of(of, found)).seconds == pytest.approx(found.period_seconds, rel=1e-9)
        assert reprice(of, found).period_seconds == pytest.approx(found.period_seconds, rel=1e-9)
        assert found.latency_seconds >= max(a.seconds for a in found.allocations.values())
        assert min(found.starts.values()) == 0
    assert plan.lower_bound_seconds <= before.period_seconds * (1 + 1e-9)
    hint = synchronous(asked, plan, QUICK)
    assert hint is not None
    assert hint.period_seconds is not None
    assert hint.gain == pytest.approx(plan.period_seconds / hint.period_seconds - 1)
    assert ("as good as" in hint.text) == (hint.gain >= -0.01)
    assert synchronous(PPO, before, QUICK) is None


def test_a_robust_plan_regrets_no_more_than_the_nominal_one_and_is_drawn_alike_for_a_seed() -> None:
    found = robust(PPO, QUICK)
    assert found.expected_regret <= found.nominal_expected_regret + 1e-12
    assert 0 <= found.expected_regret <= found.worst_regret < 1
    assert found.candidates >= 1
    assert validate(found.plan, PPO) == ()
    assert found.plan.period_seconds <= 1.05 * found.nominal.period_seconds
    again = robust(PPO, QUICK)
    assert (again.expected_regret, again.plan.allocations) == (found.expected_regret, found.plan.allocations)
    assert "regret" in found.text


def test_errors_of_a_robust_plan_are_those_of_the_bar() -> None:
    """Measured phases whose repeats agree keep the bar's least deviations; drawn one deviation up, a plan's calls and
    moves take longer by what its bar says of each."""
    sure = {phase: PhaseFactor(error=1e-12) for phase in ("train", "inference", "generate", "reallocate")}
    for asked in (PPO, replace(PPO, costs=CostTable(phases=sure))):  # type: ignore[arg-type]
        prepared, solution = solved(asked, QUICK)
        calm = scenario(np.random.default_rng(0))
        calm = replace(calm, deviations=dict.fromkeys(PHASES, 0.0), exponents=dict.fromkeys(PHASES, 0.0))
        same = evaluate(erring(prepared, calm), solution.choices)
        assert same is not None
        assert same.period == pytest.approx(solution.period, rel=1e-6)
        off = erring(prepared, replace(calm, deviations=dict.fromkeys(PHASES, 1.0)))
        plan = plan_of(prepared, solution)
        for task in off.tasks:
            choice, planned = solution.choices[task.name], plan.allocations[task.name]
            took = float(off.tables[task.tables[choice.mesh]].seconds[choice.option])
            assert math.log(took / planned.seconds) == pytest.approx(planned.error)
            phase = phase_of(asked.graph.calls[task.name])
            assert planned.error >= measured_deviation(phase, cpu=False) > 0.05
        for move in off.moves:
            source, target = (solution.choices[name].mesh for name in (move.source, move.target))
            expected = prepared.problem.move_seconds(move, source, target) * math.exp(SPREADS["reallocate"]["plain"])
            assert off.move_seconds(move, source, target) == pytest.approx(expected)


def test_measured_phases_and_calls_replace_predictions() -> None:
    base = best()
    slow = replace(PPO, costs=CostTable(phases={"generate": PhaseFactor(factor=3.0, error=0.07)}))
    plan = search(slow, QUICK)
    assert plan.period_seconds > base.period_seconds
    assert plan.allocations["generate"].error == 0.07
    assert plan.hashes.costs != base.hashes.costs


def test_what_does_not_fit_is_an_error_of_its_own() -> None:
    with pytest.raises(Infeasible):
        search(replace(PPO, constraints=Constraints(memory_gb=1.0)), QUICK)


@pytest.mark.parametrize("seed", range(5))
def test_measured_lengths_replace_the_guess_and_change_seconds_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    measured = [int(n) for n in rng.lognormal(6.0, 1.0, 500)]
    work = with_lengths(WORK, measured)
    cut = [max(1, min(n, WORK.max_new_tokens)) for n in measured]
    assert work.mean_new_tokens == pytest.approx(sum(cut) / len(cut))
    assert list(work.lengths) == sorted(work.lengths)
    assert max(work.lengths) <= WORK.max_new_tokens
    asked = replace(PPO, workload=work)
    assert hashes(asked) == hashes(PPO)
    assert with_lengths(WORK, ()) == WORK
    assert search(asked, QUICK).period_seconds != best().period_seconds


@pytest.mark.slow
def test_a_run_that_more_in_flight_would_slow_down_keeps_to_less_staleness() -> None:
    """A stream of PPO with 4 batches in flight pays more for its caches, computed anew after each update, than it
    gains."""
    work = Workload(512, 1, 512, 1024, 512.0)
    less, more = (replace(PPO, graph=ppo(staleness=n), workload=replace(work, staleness=n)) for n in (2, 4))
    one, other = search(less), search(more)
    assert other.staleness < 4
    assert other.period_seconds <= one.period_seconds * (1 + 1e-9)
    assert other.lower_bound_seconds <= one.period_seconds
    assert validate(other, more) == ()
