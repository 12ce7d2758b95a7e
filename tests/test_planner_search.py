"""The search and the validator: what is found fits, is valid, and is the best of what was looked at."""

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.planner.costs.memory.memory import usable_bytes
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.devices import device_kinds
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.holdings import active_of, prefetched_during, resident_copies
from realgraph.planner.options.tables import Known, problem_of
from realgraph.planner.plan.events import period
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Plan, Turn
from realgraph.planner.plan.problem import Limits, Unsolved
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import Infeasible, events_of, reprice, search
from realgraph.planner.search.streams import kept_caches
from realgraph.planner.solve.solver import solve
from tests.planner_cases import cluster, grpo, ppo, request

replace = msgspec.structs.replace
QUICK = Limits(gap=0.05, seconds=5.0)
SOME = settings(
    max_examples=6,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B")
GPUS = tuple(kind for kind in device_kinds() if kind != "cpu")


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    longest = draw(st.sampled_from([64, 512, 4096]))
    workload = Workload(
        groups=draw(st.integers(1, 300)),
        samples_per_group=draw(st.integers(1, 16)),
        prompt_tokens=draw(st.sampled_from([16, 512, 2048])),
        max_new_tokens=longest,
        mean_new_tokens=draw(st.floats(1, longest)),
        staleness=draw(st.integers(0, 4)),
    )
    machine = cluster(draw(st.sampled_from(GPUS)), draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4)))
    algorithm = draw(st.sampled_from([ppo(), grpo(), ppo("float32")]))
    return request(algorithm, draw(st.sampled_from(MODELS)), machine, workload=workload)


def found(asked: PlanRequest) -> Plan | None:
    """The plan, or None where memory forbids all; any other refusal fails the test."""
    try:
        return search(asked, QUICK)
    except ConfigError as error:
        if isinstance(error, Infeasible) and all(problem.hint for problem in error.problems):
            return None
        raise


def has_room(asked: PlanRequest) -> bool | None:
    """True where some plan fits, by a search among options that all take as long; None where time did not last."""
    problem = problem_of(asked, known=Known(memory_only=True)).problem
    if not all(task.tables for task in problem.tasks):
        return False
    outcome = solve(problem, replace(QUICK, gap=1e9))
    return None if isinstance(outcome, Unsolved) and not outcome.proven else not isinstance(outcome, Unsolved)


@pytest.mark.slow
@SOME
@given(requests())
def test_a_plan_that_is_found_is_valid_fits_and_is_bounded(asked: PlanRequest) -> None:
    plan = found(asked)
    assert has_room(asked) in (None, plan is not None)
    if plan is None:
        return
    assert validate(plan, asked) == ()
    assert set(plan.allocations) == set(asked.mesh_calls)
    assert all(0 < a.peak_bytes <= usable_bytes(asked.cluster) for a in plan.allocations.values())
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds
    assert plan.period_seconds >= max(a.seconds for a in plan.allocations.values())
    repriced = reprice(asked, plan)
    assert repriced.allocations == plan.allocations
    assert repriced.period_seconds == pytest.approx(plan.period_seconds, rel=1e-9)
    assert period(events_of(asked, plan)).seconds == pytest.approx(plan.period_seconds, rel=1e-9)
    keeps_its_order(asked, repriced)


def keeps_its_order(asked: PlanRequest, plan: Plan) -> None:
    """The plan's starts are those of a first step that waits for all that it must, and its latency spans that step."""
    starts, events = plan.starts, events_of(asked, plan)
    assert set(starts) >= set(plan.allocations)
    assert min(starts.values()) == 0
    for edge in events.dependencies:
        if edge.source in starts and edge.target in starts:
            ready = starts[edge.source] + events.seconds[edge.source] + edge.delay - edge.distance * plan.period_seconds
            assert starts[edge.target] >= ready - 1e-9 * plan.period_seconds
    ends = [starts[name] + max(a.seconds, a.latency_seconds) for name, a in plan.allocations.items()]
    first = min(starts[name] - a.ahead * plan.period_seconds for name, a in plan.allocations.items())
    assert plan.latency_seconds == pytest.approx(max(ends) - first)
    assert plan.latency_seconds >= max(a.seconds for a in plan.allocations.values())


@pytest.mark.slow
@settings(SOME, max_examples=4)
@given(requests())
def test_more_memory_never_makes_a_plan_slower(asked: PlanRequest) -> None:
    larger = replace(asked, cluster=replace(asked.cluster, memory_bytes=2 * asked.cluster.memory_bytes))
    before, after = found(asked), found(larger)
    assert before is None or (after is not None and after.lower_bound_seconds <= before.period_seconds * (1 + 1e-9))


def test_a_role_is_sharded_only_where_it_must_be() -> None:
    small = search(request(grpo(), "Qwen/Qwen3-0.6B"))
    assert {a.layout.sharding for a in small.allocations.values()} == {"replicated"}
    large = search(request(grpo(), "Qwen/Qwen3-8B"))  # 20 bytes x 8.2e9 is more than one H100 has
    layout = large.allocations["train"].layout
    assert layout.sharding == "fsdp" or layout.tp * layout.pp > 1
    assert large.allocations["rollout"].layout.sharding == "replicated"
    assert large.allocations["rollout"].residency == "reallocated"
    weights = 2 * request(grpo(), "Qwen/Qwen3-8B").model("train").n_params()
    assert large.allocations["train"].peak_bytes > weights  # the copy that generates stays beside the shards


def test_no_plan_names_call_device_bytes_and_a_way_out() -> None:
    asked = request(grpo("float32"), "Qwen/Qwen3-32B", cluster(devices=2))
    with pytest.raises(ConfigError) as caught:
        search(asked)
    said = str(caught.value)
    for part in (
        "'train'",
        "device 0",
        "GB are usable",
        "by owner: 'train' itself",  # whose states may wait in host memory meanwhile
        "8 devices, now 2",
    ):
        assert part in said, said


def test_pins_are_kept() -> None:
    pins = {
        "rollout": Pin(first=0, devices=4),
        "train": Pin(first=4, devices=4, pp=1, sharding="fsdp", max_tokens_per_microbatch=3000),
    }
    asked = request(grpo(), pins=pins)
    plan = search(asked)
    assert plan.allocations["rollout"].layout == Layout(DeviceMesh(0, 4), dp=4)
    assert plan.allocations["rollout"].residency == "reallocated"
    assert plan.allocations["train"].layout == Layout(DeviceMesh(4, 4), dp=4, sharding="fsdp")
    assert plan.allocations["train"].max_tokens_per_microbatch == 3000
    assert set(plan.orders[0]) == {Turn("reallocate:rollout"), Turn("rollout")}
    assert {turn.call for turn in plan.orders[7]} == {"reallocate:rollout", "train"}
    assert validate(plan, asked) == ()
    stale = search(replace(asked, workload=replace(asked.workload, staleness=1)))
    assert stale.period_seconds < plan.period_seconds  # disjoint meshes overlap as soon as they may


@st.composite
def pinned_requests(draw: st.DrawFn) -> PlanRequest:
    """PPO on 2 x 4 devices, each call perhaps on a mesh of its own, with perhaps a sharding of its own."""
    asked = request(ppo(), "Qwen/Qwen3-0.6B", cluster(devices=4, nodes=2))
    meshes = [(d, n) for n in (1, 2, 4, 8) for d in range(0, 8, n)]
    pins = {}
    for name in asked.mesh_calls:
        if draw(st.booleans()):
            first, devices = draw(st.sampled_from(meshes))
            pins[name] = Pin(first=first, devices=devices)
            if name.endswith("train") and draw(st.booleans()):
                shardings = ["replicated", "fsdp"] if devices > 1 else ["replicated"]  # one device is refused fsdp
                pins[name] = replace(pins[name], sharding=draw(st.sampled_from(shardings)))
    return replace(asked, pins=pins, workload=replace(asked.workload, staleness=draw(st.integers(0, 2))))


@pytest.mark.slow
@SOME
@given(pinned_requests())
def test_any_pins_give_a_valid_live_plan_whose_fullest_device_is_found(asked: PlanRequest) -> None:
    plan = search(asked, QUICK)
    assert validate(plan, asked) == ()
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds
    for name, allocation in plan.allocations.items():
        pin = asked.pins.get(name, Pin())
        assert pin.devices is None or allocation.layout.mesh == DeviceMesh(pin.first or 0, pin.devices)
        assert pin.sharding in (None, allocation.layout.sharding)
        copies = resident_copies(asked, plan.allocations)
        early = prefetched_during(asked, plan.allocations, name)
        held = [
            sum(copy.footprint.total for copy in copies if device in copy.layout.mesh.devices)
            + sum(states.total for mesh, states in early if device in mesh.devices)
            for device in allocation.layout.mesh.devices
        ]
        kept = kept_caches(asked, plan).get(name, 0)
        assert allocation.peak_bytes == max(held) + active_of(asked, plan.allocations, name).total + kept


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"trian": Pin(devices=4)}, "did you mean 'train'"),
        ({"reward": Pin(devices=4)}, "holds no devices"),
        ({"train": Pin(tp=3)}, "tp 3 does not divide 16 attention heads"),
        ({"rollout": Pin(cp=2)}, "a decode step has one"),
        ({"train": Pin(devices=16)}, "not all of the cluster's, 0 to 7"),
        ({"train": Pin(first=1, devices=2)}, "must begin at a multiple of 2"),
        ({"train": Pin(devices=3)}, "power of two"),
        ({"rollout": Pin(sharding="fsdp")}, "whole weights"),
        ({"rollout": Pin(kv_cache_tokens=100)}, "holds no sample"),
    ],
)
def test_a_wrong_pin_is_refused(pins: dict[str, Pin], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search(request(grpo(), pins=pins))


def test_the_users_microbatch_is_kept_or_refused() -> None:
    asked = request(grpo(), workload=Workload(64, 8, 512, 1024, 400.0, max_tokens_per_microbatch=2048))
    assert search(asked).allocations["train"].max_tokens_per_microbatch == 2048
    huge = replace(asked, workload=replace(asked.workload, max_tokens_per_microbatch=1 << 24))
    with pytest.raises(ConfigError, match=r"lower batch\.max_tokens_per_microbatch"):
        search(huge)
