"""Turns as late as training lets them be, and a run whose turns are not: what is late, and what is measured of it."""

import random

import pytest
from msgspec.structs import replace

from benchmarks.clocked import GRPO, PPO, planned
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.options.calls import free_seconds
from realgraph.planner.plan.events import empty_circuit, event_graph, liveness_graph, period
from realgraph.planner.plan.late_turns import with_late_turns
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Allocation, Hashes, Plan, Turn
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.concurrency.controller import Concurrency
from realgraph.runtime.scheduler.concurrency.settings import ConcurrencySettings, batches_needed
from realgraph.runtime.scheduler.meshes.turns import NextTurn, Turns
from tests.plan_clock import PlanClock
from tests.planner_cases import ppo
from tests.test_concurrency import Replica, job_for

SECONDS = {"generate": 30.0, "ref": 5.0, "values": 4.0, "actor_train": 25.0, "critic_train": 24.0}
EARLY = (Turn("critic_train", -3), Turn("values", -2), Turn("ref"), Turn("actor_train", -2))


def plan_of(turns: tuple[Turn, ...], staleness: int = 2) -> Plan:
    """PPO with generation on device 0 and all else on device 1, in its steady period."""
    allocations = {
        name: Allocation(Layout(DeviceMesh(int(name != "generate"), 1)), 1024, seconds=seconds)
        for name, seconds in SECONDS.items()
    }
    plan = Plan(allocations, {0: (Turn("generate"),), 1: turns}, Hashes("", "", ""), staleness)
    return replace(plan, period_seconds=period(event_graph(ppo(), plan, {}, keeps_turns=False)).seconds)


def offsets(plan: Plan) -> dict[str, int]:
    return {turn.call: turn.offset for order in plan.orders.values() for turn in order}


def test_inference_on_a_batch_that_has_just_been_generated_gets_its_turn_when_that_is_trained() -> None:
    early = plan_of(EARLY)
    late = with_late_turns(ppo(), early, {})
    assert offsets(late) == {**offsets(early), "ref": -2}
    assert period(event_graph(ppo(), late, {}, keeps_turns=False)).seconds <= early.period_seconds
    between = with_late_turns(ppo(), early, {"advantage": 0.1})  # no time for it between the two turns of one round
    assert offsets(between) == {**offsets(early), "ref": -1}
    synchronous = plan_of((Turn("critic_train", -1), *(Turn(name) for name in ("values", "ref", "actor_train"))), 0)
    assert with_late_turns(ppo(), synchronous, {}) is synchronous


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides"),
    [(PPO, ["staleness=2"]), (PPO, ["staleness=4", "cluster.nodes=4"]), (GRPO, ["staleness=2", "params.kl_coef=0.1"])],
)
def test_turns_of_a_searched_plan_are_late_and_its_period_is_that_of_the_search(
    config: str, overrides: list[str]
) -> None:
    run = planned(config, *overrides)
    graph, plan, free = run.request.graph, run.plan, free_seconds(run.request)
    assert with_late_turns(graph, plan, free).orders == plan.orders
    fixed = {name for name, call in graph.calls.items() if isinstance(call, Generate | Train)}
    rng = random.Random(1)
    for _ in range(8):  # any of the other calls some periods earlier, where that leads to no deadlock
        earlier = {name: rng.randint(0, 2) for name in plan.allocations.keys() - fixed}
        orders = {
            device: tuple(replace(turn, offset=turn.offset + earlier.get(turn.call, 0)) for turn in order)
            for device, order in plan.orders.items()
        }
        moved = replace(plan, orders=orders)
        if empty_circuit(liveness_graph(graph, moved)) is None and fits(graph, moved, free):
            assert with_late_turns(graph, moved, free).orders == plan.orders


def fits(graph: Graph, plan: Plan, free: dict[str, float]) -> bool:
    """True where the orders allow the plan's period."""
    events = event_graph(graph, plan, free, keeps_turns=False)
    return empty_circuit(events) is None and period(events).seconds <= plan.period_seconds * (1 + 1e-9)


def test_the_batches_that_turns_need_ahead_of_training() -> None:
    assert batches_needed(ppo(), plan_of(EARLY)) == 2
    assert batches_needed(ppo(), with_late_turns(ppo(), plan_of(EARLY), {"advantage": 0.1})) == 1
    assert batches_needed(ppo(), with_late_turns(ppo(), plan_of(EARLY), {})) == 0
    assert batches_needed(ppo(), plan_of((Turn("actor_train", -1), Turn("critic_train", -1), *EARLY[2:3]))) == 0


def test_devices_starve_where_their_turn_is_a_call_whose_batch_is_not_there() -> None:
    turns = Turns(plan_of(EARLY).orders, 0, ["generate"])
    heads = turns.next(100, 100)
    assert NextTurn("ref", 0) in heads and NextTurn("generate", 0) in heads
    assert turns.awaits_batch("actor_train", heads, 0)
    assert not turns.awaits_batch("actor_train", heads, 1)  # it is there: something else is awaited
    assert not turns.awaits_batch("generate", heads, 0)
    turns.hold(turns.of("ref"), 7)
    assert not turns.awaits_batch("actor_train", heads, 0)


def test_the_wait_for_the_batch_of_another_call_is_no_training() -> None:
    limit = Concurrency(ConcurrencySettings(4, 2, 2, float("inf"), 1, fixed=False, needed=2))
    for step in range(30):
        limit.batched(step, [], 100.0)
    for step in range(30):  # each takes ten seconds, of which six wait for a batch that comes later
        limit.starves(True, 100.0 + 10.0 * step)
        limit.starves(False, 106.0 + 10.0 * step)
        limit.step_ended(step, 110.0 + 10.0 * step)
    assert limit.image.period == pytest.approx(10.0)
    assert limit.image.step_seconds == pytest.approx(4.0, abs=0.1)


def with_turns(job: Job, *turns: Turn) -> Job:
    """The job with these turns of the device that trains."""
    return replace(job, plan=replace(job.plan, orders={**job.plan.orders, 1: turns}))


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_generation_that_is_fast_enough_keeps_training_busy_whatever_batches_its_turns_need(ratio: float) -> None:
    """The limit of work in flight leaves enough groups for the batches that turns need ahead."""
    train_seconds, replica = 40.0, Replica(0.0002, 0.0001, 10_000, seed=3)
    generation = PlanClock(job_for(2, 1e-3, 1), {}, replica, limited=False).period()
    slowed = ratio * train_seconds / generation
    slower = Replica(0.0002 * slowed, 0.0001 * slowed, 10_000, seed=3)
    for ahead in (0, 1):
        job = with_turns(job_for(2, train_seconds, 1), Turn("ref_logp", ahead), Turn("train"))
        seconds = PlanClock(job, {}, slower).period()
        assert seconds <= 1.05 * train_seconds, ahead
