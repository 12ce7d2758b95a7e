"""The user's constraints are kept, mistakes in them are named with their place, and conflicting ones are told apart."""

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import ModelRole, Train
from realgraph.planner.advise.alternatives import alternatives
from realgraph.planner.feasibility.changes import more_devices
from realgraph.planner.feasibility.diagnose import infeasible
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.constraints import constraint_problems
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import Infeasible, search
from tests.planner_cases import cluster, grpo, ppo, request

replace = msgspec.structs.replace
QUICK = Limits(gap=0.2, seconds=10.0)
PPO = request(ppo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2), workload=Workload(256, 1, 512, 1024, 500.0))


def planned(**constraints: object) -> Plan:
    asked = replace(PPO, constraints=Constraints(**constraints))  # type: ignore[arg-type]
    plan = search(asked, QUICK)
    assert validate(plan, asked) == ()
    return plan


def test_calls_that_share_lie_on_one_mesh() -> None:
    plan = planned(share=(("generate", "critic_train"), ("ref", "values")))
    meshes = {name: allocation.layout.mesh for name, allocation in plan.allocations.items()}
    assert meshes["generate"] == meshes["critic_train"]
    assert meshes["ref"] == meshes["values"]


def test_what_is_forbidden_is_not_chosen() -> None:
    free = search(PPO, QUICK)
    layout = free.allocations["actor_train"].layout
    plan = planned(forbid={"actor_train": (Pin(tp=layout.tp), Pin(sharding="fsdp"))})
    assert plan.allocations["actor_train"].layout.tp != layout.tp
    assert plan.allocations["actor_train"].layout.sharding == "replicated"
    assert plan.period_seconds >= free.lower_bound_seconds
    moved = planned(forbid={"generate": (Pin(first=0),)})
    assert moved.allocations["generate"].layout.mesh.first > 0


def test_reserved_devices_stay_free() -> None:
    plan = planned(reserve=4)
    assert all(allocation.layout.mesh.devices.stop <= 12 for allocation in plan.allocations.values())
    assert all(plan.orders[device] == () for device in range(12, 16))


def test_colocated_calls_lie_on_all_devices_and_run_in_turn() -> None:
    plan = planned(colocated=True)
    assert {allocation.layout.mesh for allocation in plan.allocations.values()} == {DeviceMesh(0, 16)}
    busy = sum(allocation.seconds for allocation in plan.allocations.values())
    moved = sum(plan.reallocation_seconds.values())
    assert busy + moved <= plan.period_seconds <= (busy + moved) * 1.01  # rewards and advantages beside
    assert search(PPO, QUICK).lower_bound_seconds <= plan.period_seconds


def test_a_memory_cap_is_kept_and_costs_time() -> None:
    caps = [planned(memory_gb=gigabytes) for gigabytes in (75, 45)]
    for plan, gigabytes in zip(caps, (75, 45), strict=True):
        assert max(allocation.peak_bytes for allocation in plan.allocations.values()) <= gigabytes * 1e9
    assert caps[0].lower_bound_seconds <= caps[1].period_seconds


def test_without_offload_nothing_waits_in_host_memory() -> None:
    plan = planned(offload=False)
    assert all(allocation.residency != "offloaded" for allocation in plan.allocations.values())
    assert all(allocation.host_bytes == 0 for allocation in plan.allocations.values())
    tight = replace(PPO, constraints=Constraints(host_memory_gb=1e-3))
    assert all(a.host_bytes == 0 for a in search(tight, QUICK).allocations.values())


def test_every_axis_can_be_pinned_where_engines_do_not_matter() -> None:
    pins = {
        "generate": Pin(first=8, devices=8, tp=2),
        "actor_train": Pin(devices=8, tp=4, pp=2, recompute="full", residency="resident"),
        "ref": Pin(tp=8, residency="offloaded"),
    }
    asked = replace(PPO, pins=pins)
    plan = search(asked, QUICK)
    assert validate(plan, asked) == ()
    for name, pin in pins.items():
        allocation = plan.allocations[name]
        layout = allocation.layout
        assert pin.devices is None or layout.mesh == DeviceMesh(pin.first or 0, pin.devices)
        for axis in ("dp", "tp", "pp"):
            assert getattr(pin, axis) in (None, getattr(layout, axis))
        assert pin.recompute in (None, allocation.recompute)
        assert pin.residency is None or (allocation.residency == "offloaded") == (pin.residency == "offloaded")


def test_gradient_checkpointing_is_forced_by_the_model_and_else_chosen() -> None:
    models = {name: replace(role, gradient_checkpointing=True) for name, role in PPO.graph.models.items()}
    forced = search(replace(PPO, graph=replace(PPO.graph, models=models)), QUICK)
    assert all(forced.allocations[name].recompute == "full" for name in ("actor_train", "critic_train"))
    long = replace(PPO.workload, max_new_tokens=8192)
    whole = dict.fromkeys(("actor_train", "critic_train"), Pin(tp=1, pp=1))
    small = replace(PPO, constraints=Constraints(memory_gb=50), workload=long, pins=whole)
    assert any(allocation.recompute != "none" for allocation in search(small, QUICK).allocations.values())


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "path", "says"),
    [
        ({"constraints": Constraints(share=(("generate", "rf"),))}, "$.constraints.share[0]", "'ref'?"),
        ({"constraints": Constraints(forbid={"trian": (Pin(tp=2),)})}, "$.constraints.forbid.trian", "no call"),
        ({"constraints": Constraints(forbid={"ref": (Pin(),)})}, "$.constraints.forbid.ref[0]", "sets nothing"),
        ({"constraints": Constraints(reserve=16)}, "$.constraints.reserve", "the cluster has 16"),
        ({"constraints": Constraints(colocated=True, reserve=3)}, "$.constraints.colocated", "no mesh has all"),
        ({"constraints": Constraints(share=(("generate", "reward"),))}, "$.constraints.share[0]", "holds no devices"),
        ({"constraints": Constraints(share=(("ref", "values"), ("generate",)))}, "$.constraints.share[1]", "one call"),
        ({"constraints": Constraints(share=(("ref", "ref"),))}, "$.constraints.share[0]", "two calls or more"),
        ({"constraints": Constraints(share=((),))}, "$.constraints.share[0]", "binds nothing"),
        ({"constraints": Constraints(memory_gb=90)}, "$.constraints.memory_gb", "has more than 8"),
        ({"constraints": Constraints(host_memory_gb=1e6)}, "$.constraints.host_memory_gb", "bind nothing"),
        ({"pins": {"ref": Pin(tp=3)}}, "$.allocation.ref", "tp 3"),
        ({"pins": {"ref": Pin(pp=64)}}, "$.allocation.ref", "pp 64"),
        ({"pins": {"ref": Pin(ep=2)}}, "$.allocation.ref", "experts"),
        ({"pins": {"ref": Pin(tp=8, dp=3)}}, "$.allocation.ref", "dp x tp is 24, which no mesh can hold"),
        (
            {"constraints": Constraints(forbid={"ref": (Pin(first=0, tp=2),)})},
            "$.constraints.forbid.ref[0]",
            "a place and a layout in one",
        ),
        ({"pins": {"ref": Pin(first=12, devices=8)}}, "$.allocation.ref", "not all of the cluster's"),
        (
            {"pins": {"ref": Pin(residency="offloaded")}, "constraints": Constraints(offload=False)},
            "$.allocation.ref",
            "constraints.offload is false",
        ),
    ],
)
def test_a_wrong_constraint_is_refused_at_its_place(changed: dict[str, object], path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(replace(PPO, **changed), QUICK)
    assert not isinstance(caught.value, Infeasible)
    assert any(p.where.path.startswith(path) and says in str(p) for p in caught.value.problems), caught.value


def test_ranks_that_leave_devices_of_their_mesh_idle_are_one_error_with_the_product_and_the_fix() -> None:
    asked = request(grpo(), "Qwen/Qwen3-0.6B", cluster("cpu", 4), pins={"train": Pin(dp=2, devices=4)})
    (problem,) = constraint_problems(asked)
    assert problem.where.path == "$.allocation.train.dp"
    assert problem.text == "dp is 2, the mesh has 4 devices: dp x tp x pp x cp must be 4"
    assert problem.hint.startswith("set devices to 2, leave dp out, or give another axis the factor of 2 that is left")
    for pin in (Pin(dp=2, devices=2), Pin(devices=4), Pin(dp=2, tp=2, devices=4), Pin(dp=4, devices=4)):
        assert not constraint_problems(replace(asked, pins={"train": pin}))
    assert not constraint_problems(replace(asked, cluster=cluster("H100-SXM", 4)))  # the search chooses another axis


def test_ranks_may_be_pinned_that_fill_a_part_of_the_cluster() -> None:
    """16 of 24 devices are two nodes; that 16 does not divide 24 forbids nothing."""
    asked = replace(PPO, cluster=cluster(nodes=3), pins={"ref": Pin(dp=16, tp=1, pp=1, cp=1)})
    assert search(asked, QUICK).allocations["ref"].layout.mesh.n_devices == 16


def spread_over(kind: str, call: str = "train", pin: Pin | None = None) -> set[tuple[int, int, int]]:
    """(dp, tp, ep) of all that a call on four devices may choose."""
    pins = {} if pin is None else {"train": pin}
    asked = request(grpo(), "Qwen/Qwen3-30B-A3B", cluster(kind, 4), pins=pins)
    found = (one.layout for one in candidates(asked, call, DeviceMesh(0, 4), asked.cluster))
    return {(layout.dp, layout.tp, layout.ep) for layout in found}


def test_experts_are_spread_over_cpus_only_where_that_is_pinned() -> None:
    assert {ep for _, _, ep in spread_over("H100-SXM")} == {1, 2, 4}
    assert spread_over("cpu") == {(4, 1, 1)}
    assert spread_over("cpu", pin=Pin(dp=4, ep=2)) == {(4, 1, 2)}
    assert spread_over("cpu", pin=Pin(tp=2, ep=4)) == {(2, 2, 4)}  # over all devices of the stage
    assert {ep for _, _, ep in spread_over("cpu", "rollout", Pin(dp=4, ep=2))} == {1}
    with pytest.raises(ConfigError, match=r"\$\.allocation\.train\.ep: ep 8 does not divide the 4 devices of a stage"):
        search(request(grpo(), "Qwen/Qwen3-30B-A3B", cluster("cpu", 4), pins={"train": Pin(devices=4, ep=8)}), QUICK)


# --- constraints in conflict ------------------------------------------------------------------------------------------


def refused(asked: PlanRequest) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        search(asked, QUICK)
    return caught.value


def test_conflicting_constraints_are_named_and_no_others() -> None:
    """Two pinned places against one shared mesh; the third constraint has no part in it."""
    pins = {"generate": Pin(first=0, devices=8), "critic_train": Pin(first=8, devices=8), "ref": Pin(tp=2)}
    error = refused(replace(PPO, pins=pins, constraints=Constraints(share=(("generate", "critic_train"),))))
    assert set(error.conflict) == {"allocation.generate", "allocation.critic_train", "constraints.share[0]"}
    assert {p.where.path for p in error.problems} >= {f"$.{path}" for path in error.conflict}
    assert error.exit_code == 4
    for path in error.conflict:  # a smallest set: without any one of them there is a plan
        kept = {name: pin for name, pin in pins.items() if path != f"allocation.{name}"}
        share = () if "share" in path else (("generate", "critic_train"),)
        search(replace(PPO, pins=kept, constraints=Constraints(share=share)), QUICK)


def test_a_batch_that_does_not_fit_is_told_with_sizes_that_do() -> None:
    huge = replace(PPO, workload=replace(PPO.workload, max_tokens_per_microbatch=1 << 20))
    error = refused(huge)
    assert error.conflict == ("batch.max_tokens_per_microbatch",)
    size = int(error.changes[0].split(" to ")[1].split()[0])
    search(replace(PPO, workload=replace(PPO.workload, max_tokens_per_microbatch=size)), QUICK)
    if size * 2 < 1 << 20:
        refused(replace(PPO, workload=replace(PPO.workload, max_tokens_per_microbatch=2 * size)))


def test_too_few_devices_are_told_with_how_many_more_would_do() -> None:
    asked = request(grpo(), "meta-llama/Llama-3.1-70B", cluster())
    error = refused(asked)
    assert error.conflict == ()
    said = str(error)
    assert "GB of" in said
    assert "on device 0" in said
    change = next(change for change in error.changes if "cluster." in change)
    nodes = int(change.split("cluster.nodes: ")[1].split()[0])
    assert f"({8 * nodes} devices, now 8)" in change
    assert search(replace(asked, cluster=cluster(nodes=nodes)), QUICK).period_seconds > 0


@pytest.mark.parametrize(
    ("kind", "devices", "first"), [("cpu", 1, "cluster.nodes: 2 ("), ("L40S", 2, "cluster.devices: 4 (")]
)
def test_more_devices_are_offered_as_what_a_run_file_says(kind: str, devices: int, first: str) -> None:
    """Each offer, written into the run file's cluster, is the cluster that was meant."""
    asked = request(grpo(), machine=cluster(kind, devices))
    found = more_devices(asked)
    assert found[0].text.startswith(f"set {first}")
    for change in found:
        said = dict(pair.split(": ") for pair in change.text[4:].split(" (")[0].split(" and "))
        nodes, per_node = int(said.get("cluster.nodes", 1)), int(said.get("cluster.devices", devices))
        assert (nodes, per_node) == (change.request.cluster.nodes, change.request.cluster.devices_per_node)
        assert f"({nodes * per_node:,} devices, now {devices})" in change.text


def test_a_cap_below_the_weights_is_the_conflict() -> None:
    error = refused(replace(PPO, constraints=Constraints(memory_gb=2.0)))
    assert error.conflict == ("constraints.memory_gb",)


def test_what_no_time_was_left_to_decide_is_called_neither_spare_nor_too_large() -> None:
    """Constraints in conflict for certain stay named after an interruption, which is told apart from an end."""
    pins = {"rollout": Pin(first=0, devices=4), "train": Pin(first=4, devices=4, sharding="fsdp")}
    asked = replace(request(grpo()), pins=pins, constraints=Constraints(share=(("rollout", "train"),)))
    conflict = {"allocation.rollout", "allocation.train", "constraints.share[0]"}
    assert cut_after(asked, looks=0) == (set(), True)
    assert cut_after(asked, looks=3) == (conflict, True)
    assert cut_after(asked, looks=1_000_000) == (conflict, False)


def cut_after(asked: PlanRequest, looks: int) -> tuple[set[str], bool]:
    """The conflict as told by a diagnosis interrupted after so many looks at the clock, and whether it has doubts."""
    left = iter(range(looks))
    error = infeasible(asked, replace(QUICK, stop=lambda: next(left, None) is None))
    return set(error.conflict), "did not tell" in str(error)


# --- roles that are trained twice, or followed ------------------------------------------------------------------------


def twice() -> Graph:
    """PPO whose actor is trained by two calls, as with an auxiliary loss."""
    base = ppo()
    train = base.calls["actor_train"]
    assert isinstance(train, Train)
    calls = {**base.calls, "actor_again": replace(train, minibatches=2)}
    edges = tuple(
        replace(e, producer="actor_again") if e.producer == "actor_train" and e.role else e for e in base.edges
    )
    data = tuple(replace(e, consumer="actor_again") for e in base.edges if e.consumer == "actor_train")
    return replace(base, calls=calls, edges=(*edges, *data))


def test_two_train_calls_of_a_role_have_one_layout() -> None:
    asked = replace(PPO, graph=twice(), models=dict.fromkeys(PPO.models, request(grpo()).model("train")))
    plan = search(asked, QUICK)
    assert validate(plan, asked) == ()
    assert plan.allocations["actor_train"].layout == plan.allocations["actor_again"].layout


def test_a_reference_that_follows_a_role_lies_where_that_is_trained() -> None:
    graph = ppo()
    models = {**graph.models, "ref": ModelRole(init="actor", ema_rate=0.01, dtype="bfloat16", path="x")}
    edges = (*graph.edges, replace(graph.edges[-1], producer="actor_train", consumer="ref", role="ref", distance=1))
    asked = replace(PPO, graph=replace(graph, models=models, edges=edges))
    plan = search(asked, QUICK)
    assert validate(plan, asked) == ()
    mesh = plan.allocations["actor_train"].layout.mesh
    assert plan.allocations["ref"].layout.mesh == mesh
    for other in alternatives(asked, plan, "ref"):
        assert other.option.layout.mesh == mesh or "on one mesh" in other.reason
