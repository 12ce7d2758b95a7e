"""Offloaded states that come back while the call before runs: where they fit, and what that makes of the period."""

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import resolve
from realgraph.planner.options.footprints import holding
from realgraph.planner.options.holdings import active_of, candidate_of, group_for, resident_copies
from realgraph.planner.options.tables import device_bytes
from realgraph.planner.plan.events import period
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Allocation, Plan, Turn
from realgraph.planner.plan.prefetch import turn_before
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.assembly import events_of, repriced
from realgraph.planner.search.prefetch import PREFETCHED, with_prefetches
from tests.planner_cases import MACHINE, cluster, ppo, request

replace = msgspec.structs.replace
PPO = request(ppo(), "Qwen/Qwen3-0.6B", cluster())
CPUS = resolve(ClusterSpec(devices=2, kind="cpu", memory_gb=96, host_memory_gb=400), MACHINE)
PACKED = ("ref", "values", "actor_train", "critic_train")
ALL, LOW, HIGH = DeviceMesh(0, 8), DeviceMesh(0, 4), DeviceMesh(4, 4)


def plan(
    asked: PlanRequest, meshes: dict[str, DeviceMesh], order: Sequence[str], away: frozenset[str], staleness: int = 0
) -> Plan:
    """Without prices; each device has its calls in this order, those before `generate` of the step before."""
    allocations = {}
    for name in asked.mesh_calls:
        mesh = meshes.get(name, ALL)
        cache, tokens = (65_536, None) if name == "generate" else (None, 8192)
        own = Allocation(Layout(mesh, dp=mesh.n_devices), tokens, kv_cache_tokens=cache, running=64)
        allocations[name] = replace(own, residency="offloaded") if name in away else own
    turns = {
        device: tuple(
            Turn(name, -(order.index(name) < order.index("generate")))
            for name in order
            if device in allocations[name].layout.mesh.devices
        )
        for device in range(asked.cluster.n_devices)
    }
    return Plan(allocations, turns, hashes(asked), staleness)


def limited(asked: PlanRequest, gigabytes: float) -> PlanRequest:
    return replace(asked, constraints=Constraints(memory_gb=gigabytes))


@settings(max_examples=30)
@given(
    meshes=st.fixed_dictionaries(dict.fromkeys(PACKED, st.sampled_from((ALL, ALL, LOW, HIGH)))),
    order=st.tuples(st.permutations(PACKED[:2]), st.permutations(PACKED[2:]), st.integers(0, 2)),
    away=st.frozensets(st.sampled_from(("ref", "actor_train", "critic_train")), min_size=1),
    gigabytes=st.floats(4, 40),
)
def test_what_comes_back_early_fits_beside_the_call_before_and_makes_no_plan_slower(
    meshes: dict[str, DeviceMesh], order: tuple[list[str], list[str], int], away: frozenset[str], gigabytes: float
) -> None:
    asked = limited(PPO, gigabytes)
    reads, trains, later = order
    late = repriced(asked, plan(asked, meshes, [*trains[2 - later :], "generate", *reads, *trains[: 2 - later]], away))
    early = with_prefetches(asked, late)
    assert early.period_seconds <= late.period_seconds
    assert period(events_of(asked, early)).seconds <= late.period_seconds * (1 + 1e-9)
    assert not [problem for problem in validate(early, asked) if problem.rule == "plan_prefetch"]
    limit = device_bytes(asked, asked.cluster)
    for name in PACKED:
        during = early.allocations[name].prefetch_during
        befores = {turn_before(early.orders[device], name) for device in meshes[name].devices}
        found = next(iter(befores)) if len(befores) == 1 else None
        possible = name in away and found is not None and found[0] in PACKED
        possible = possible and asked.graph.role(found[0]) != asked.graph.role(name)  # type: ignore[index]
        if not possible:
            assert not during, (name, during)
            continue
        assert found is not None
        fullest = held_meanwhile(asked, early, found[0], name)
        assert during == (found[0] if fullest <= limit else ""), (name, fullest / limit)
        if not during:
            assert early.allocations[name].seconds == late.allocations[name].seconds
            continue
        own, other = early.allocations[name], early.allocations[during]
        assert own.seconds + own.prefetch_seconds >= late.allocations[name].seconds * (1 - 1e-9)
        assert own.seconds + max(0.0, own.prefetch_seconds - other.seconds) <= late.allocations[name].seconds * (
            1 + 1e-9
        )


def held_meanwhile(asked: PlanRequest, found: Plan, during: str, name: str) -> int:
    """Bytes of the fullest device of `during` while it runs and the states of `name`, and of all that are planned
    besides, come."""
    allocations = found.allocations
    early = {name, *(other for other, its in allocations.items() if its.prefetch_during == during)}
    states = {}
    for one in early:
        candidate = candidate_of(asked, allocations, one)
        states[one] = holding(asked, one, candidate, group_for(asked, candidate.layout)).host
    return active_of(asked, allocations, during).total + max(
        sum(copy.footprint.total for copy in resident_copies(asked, allocations) if device in copy.layout.mesh.devices)
        + sum(nbytes for one, nbytes in states.items() if device in allocations[one].layout.mesh.devices)
        for device in allocations[during].layout.mesh.devices
    )


IN_TURN = ("generate", "ref", "values", "actor_train", "critic_train")


def test_the_way_back_takes_what_the_call_before_is_too_short_for() -> None:
    late = repriced(PPO, plan(PPO, {}, IN_TURN, frozenset({"critic_train"})))
    early = with_prefetches(PPO, late)
    own, before = early.allocations["critic_train"], early.allocations["actor_train"]
    saved = late.allocations["critic_train"].seconds - own.seconds
    assert own.prefetch_during == "actor_train"
    assert saved == pytest.approx(own.prefetch_seconds)  # nothing else is on the way
    assert saved < before.seconds
    assert early.period_seconds == pytest.approx(late.period_seconds - saved)
    assert early.scope.endswith(PREFETCHED)
    short = {**early.allocations, "actor_train": replace(before, seconds=saved / 4)}
    left = period(events_of(PPO, replace(early, allocations=short))).seconds
    assert left == pytest.approx(early.period_seconds - before.seconds + saved)


def test_two_offloaded_calls_share_the_way_to_the_host() -> None:
    late = repriced(PPO, plan(PPO, {}, IN_TURN, frozenset({"actor_train", "critic_train"})))
    early = with_prefetches(PPO, late)
    actor, critic = early.allocations["actor_train"], early.allocations["critic_train"]
    assert (actor.prefetch_during, critic.prefetch_during) == ("values", "actor_train")
    saved = [
        late.allocations[name].seconds - early.allocations[name].seconds for name in ("actor_train", "critic_train")
    ]
    assert math.isclose(actor.prefetch_seconds, saved[0])
    assert math.isclose(critic.prefetch_seconds, sum(saved))  # the actor's states go back to the host first


def test_an_edited_plan_is_priced_as_it_says_and_one_as_found_stays() -> None:
    early = with_prefetches(PPO, repriced(PPO, plan(PPO, {}, IN_TURN, frozenset({"critic_train"}))))
    again = repriced(PPO, early)
    assert again.allocations["critic_train"] == early.allocations["critic_train"]
    assert again.period_seconds == pytest.approx(early.period_seconds)
    assert again.starts["critic_train"] >= again.starts["actor_train"] + again.allocations["actor_train"].seconds - 1e-9
    own = early.allocations["critic_train"]
    within = repriced(PPO, changed(early, "critic_train", prefetch_during=""))
    assert within.allocations["critic_train"].seconds > own.seconds
    assert within.allocations["critic_train"].prefetch_seconds == 0
    before = [one.allocations["actor_train"].peak_bytes for one in (again, within)]
    assert before[0] - before[1] == within.allocations["critic_train"].host_bytes > 0


def test_on_cpus_states_come_early_and_no_second_is_saved() -> None:
    """The copy takes the cores and the memory of the call before."""
    meshes = {name: DeviceMesh(0, 2) for name in ("generate", *PACKED)}
    asked = request(ppo(), "Qwen/Qwen3-0.6B", CPUS)
    late = repriced(asked, plan(asked, meshes, IN_TURN, frozenset({"critic_train"})))
    early = with_prefetches(asked, late)
    assert early.allocations["critic_train"].prefetch_during == "actor_train"
    assert early.allocations["critic_train"].seconds == late.allocations["critic_train"].seconds
    assert early.period_seconds == pytest.approx(late.period_seconds)


def changed(found: Plan, call: str, **changes: object) -> Plan:
    return replace(found, allocations={**found.allocations, call: replace(found.allocations[call], **changes)})


APART = {"ref": HIGH, "values": LOW}
SOUND = plan(PPO, {}, IN_TURN, frozenset({"critic_train", "ref"}))


@pytest.mark.parametrize(
    ("edited", "call", "says"),
    [
        (changed(SOUND, "values", prefetch_during="ref"), "values", "are not offloaded"),
        (changed(SOUND, "critic_train", prefetch_during="values"), "critic_train", "set it to actor_train"),
        (changed(SOUND, "critic_train", prefetch_during="nothing"), "critic_train", "set it to actor_train"),
        (changed(SOUND, "ref", prefetch_during="generate"), "ref", "leave it out"),
        (
            changed(
                plan(
                    PPO,
                    APART,
                    ("generate", "ref", "values", "critic_train", "actor_train"),
                    frozenset({"critic_train"}),
                ),
                "critic_train",
                prefetch_during="ref",
            ),
            "critic_train",
            "not the call before 'critic_train' on all its devices",
        ),
    ],
)
def test_what_no_call_leaves_room_for_is_refused(edited: Plan, call: str, says: str) -> None:
    (problem,) = validate(edited, PPO)
    assert problem.where.path == f"$.allocations.{call}.prefetch_during"
    assert says in f"{problem.text}: {problem.hint}"


def test_a_stream_of_generation_leaves_nothing_between_two_calls() -> None:
    asked = replace(PPO, workload=replace(PPO.workload, staleness=1))
    stale = plan(asked, {}, IN_TURN, frozenset({"critic_train"}), staleness=1)
    assert with_prefetches(asked, stale) == stale
    meshes = {"generate": HIGH, **dict.fromkeys(PACKED, LOW)}
    apart = with_prefetches(asked, plan(asked, meshes, IN_TURN, frozenset({"critic_train"}), staleness=1))
    assert apart.allocations["critic_train"].prefetch_during == "actor_train"


def test_an_edited_plan_without_the_memory_is_refused_at_the_call_before() -> None:
    both = plan(PPO, {}, IN_TURN, frozenset({"actor_train", "critic_train"}))
    late = repriced(PPO, both)
    early = with_prefetches(PPO, late)
    most = max(allocation.bound_bytes for allocation in late.allocations.values())
    tight = limited(PPO, (most + 1_000_000) / 1e9)
    assert validate(both, tight) == ()
    found = {problem.where.path: problem.rule for problem in validate(early, tight)}
    assert found == {"$.allocations.actor_train": "plan_memory"}
    assert with_prefetches(tight, repriced(tight, both)).allocations["critic_train"].prefetch_during == ""
