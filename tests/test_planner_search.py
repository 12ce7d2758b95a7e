"""The search and the validator: what is found fits, is valid, and is the best of what was looked at."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.planner.cluster import Cluster, ClusterSpec
from realgraph.planner.detect import Gpu, Probe, probe, resolve
from realgraph.planner.devices import device_kinds
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.memory import usable_bytes
from realgraph.planner.options import active, mesh_fault, resident
from realgraph.planner.pins import Pin
from realgraph.planner.plan import Plan, Turn
from realgraph.planner.request import PlanRequest, hashes
from realgraph.planner.search import reprice, search
from realgraph.planner.validate import validate
from realgraph.planner.workload import Workload
from tests.planner_cases import MACHINE, cluster, grpo, ppo, request

replace = msgspec.structs.replace
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
        return search(asked)
    except ConfigError as error:
        if all(problem.rule == "memory" and problem.hint for problem in error.problems):
            return None
        raise


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_a_plan_that_is_found_is_valid_fits_and_is_bounded(asked: PlanRequest) -> None:
    plan = found(asked)
    if plan is None:
        return
    assert validate(plan, asked) == ()
    assert set(plan.allocations) == set(asked.mesh_calls)
    assert all(0 < a.peak_bytes <= usable_bytes(asked.cluster) for a in plan.allocations.values())
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds
    assert plan.period_seconds >= max(a.seconds for a in plan.allocations.values())
    repriced = reprice(asked, plan)
    assert (repriced.allocations, repriced.period_seconds) == (plan.allocations, plan.period_seconds)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_more_memory_never_makes_a_plan_slower(asked: PlanRequest) -> None:
    larger = replace(asked, cluster=replace(asked.cluster, memory_bytes=2 * asked.cluster.memory_bytes))
    before, after = found(asked), found(larger)
    assert before is None or (after is not None and after.period_seconds <= before.period_seconds * (1 + 1e-9))


def test_a_role_is_sharded_only_where_it_must_be() -> None:
    small = search(request(grpo(), "Qwen/Qwen3-0.6B"))
    assert {a.layout.sharding for a in small.allocations.values()} == {"replicated"}
    large = search(request(grpo(), "Qwen/Qwen3-8B"))  # 20 bytes x 8.2e9 is more than one H100 has
    assert large.allocations["train"].layout.sharding == "fsdp"
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
        "the trained states of 'actor'",
        "dtype: bfloat16",
        "more dev",
    ):
        assert part in said, said


def test_pins_are_kept() -> None:
    pins = {
        "rollout": Pin(first=0, devices=4),
        "train": Pin(first=4, devices=4, sharding="fsdp", max_tokens_per_microbatch=3000),
    }
    asked = request(grpo(), pins=pins)
    plan = search(asked)
    assert plan.allocations["rollout"].layout == Layout(DeviceMesh(0, 4), dp=4)
    assert plan.allocations["rollout"].residency == "reallocated"
    assert plan.allocations["train"].layout == Layout(DeviceMesh(4, 4), dp=4, sharding="fsdp")
    assert plan.allocations["train"].max_tokens_per_microbatch == 3000
    assert plan.orders[0] == (Turn("rollout"),)
    assert plan.orders[7] == (Turn("train"),)
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
                pins[name] = replace(pins[name], sharding=draw(st.sampled_from(["replicated", "fsdp"])))
    return replace(asked, pins=pins, workload=replace(asked.workload, staleness=draw(st.integers(0, 2))))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pinned_requests())
def test_any_pins_give_a_valid_live_plan_whose_fullest_device_is_found(asked: PlanRequest) -> None:
    plan = search(asked)
    assert validate(plan, asked) == ()
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds
    layouts = {name: allocation.layout for name, allocation in plan.allocations.items()}
    for name, allocation in plan.allocations.items():
        pin = asked.pins.get(name, Pin(first=0, devices=8))
        assert layouts[name].mesh == DeviceMesh(pin.first or 0, pin.devices or 0)
        tokens = allocation.max_tokens_per_microbatch
        held = [resident(asked, layouts, device).total for device in layouts[name].mesh.devices]
        assert allocation.peak_bytes == max(held) + active(asked, name, layouts[name], tokens).total


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"trian": Pin(devices=4)}, "did you mean 'train'"),
        ({"reward": Pin(devices=4)}, "holds no devices"),
        ({"train": Pin(tp=2)}, "needs tensor parallelism"),
        ({"train": Pin(pp=2)}, "needs pipeline parallelism"),
        ({"train": Pin(devices=16)}, "not all of the cluster's, 0 to 7"),
        ({"train": Pin(first=1, devices=2)}, "must begin at a multiple of 2"),
        ({"train": Pin(devices=3)}, "power of two"),
        ({"train": Pin(devices=4, dp=2)}, "must be 4"),
        ({"rollout": Pin(sharding="fsdp")}, "whole weights"),
        ({"rollout": Pin(max_tokens_per_microbatch=100)}, "holds no sample"),
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


# --- edited plans -----------------------------------------------------------------------------------------------------


def edited(plan: Plan, call: str, **changes: object) -> Plan:
    allocation = plan.allocations[call]
    layout_fields = {name: value for name, value in changes.items() if name in Layout.__struct_fields__}
    rest = {name: value for name, value in changes.items() if name not in layout_fields}
    changed = replace(allocation, layout=replace(allocation.layout, **layout_fields), **rest)
    return replace(plan, allocations={**plan.allocations, call: changed})


PPO = request(ppo(), "Qwen/Qwen3-0.6B")
FOUND = search(PPO)
LATE = tuple(Turn(name) for name in ("ref", "values", "actor_train", "critic_train", "generate"))


@pytest.mark.parametrize(
    ("plan", "path", "says"),
    [
        (edited(FOUND, "ref", tp=2, dp=4), "$.allocations.ref.layout.tp", "tensor parallelism"),
        (edited(FOUND, "ref", dp=4), "$.allocations.ref.layout", "the mesh has 8 devices"),
        (edited(FOUND, "ref", dp=0), "$.allocations.ref.layout.dp", "at least 1"),
        (edited(FOUND, "ref", mesh=DeviceMesh(4, 8)), "$.allocations.ref.layout.mesh", "not all of the cluster's"),
        (edited(FOUND, "generate", sharding="fsdp"), "$.allocations.generate.layout.sharding", "whole weights"),
        (edited(FOUND, "generate", max_tokens_per_microbatch=10), "$.allocations.generate.max", "hold no sample"),
        (edited(FOUND, "ref", max_tokens_per_microbatch=1 << 24), "$.allocations.ref", "GB on device 0"),
        (edited(FOUND, "ref", residency="offloaded"), "$.allocations.ref.residency", "offload"),
        (edited(FOUND, "actor_train", recompute=True), "$.allocations.actor_train.recompute", "gradient_checkpointing"),
        (replace(FOUND, orders={**FOUND.orders, 3: FOUND.orders[3][1:]}), "$.orders.3", "'generate' is missing"),
        (replace(FOUND, orders={**FOUND.orders, 9: ()}), "$.orders.9", "devices 0 to 7"),
        (replace(FOUND, orders={**FOUND.orders, 0: (*FOUND.orders[0], Turn("ref"))}), "$.orders.0", "2 times"),
        (replace(FOUND, orders={**FOUND.orders, 0: (*FOUND.orders[0], Turn("rf"))}), "$.orders.0", "'ref'?"),
        (
            replace(FOUND, orders={**FOUND.orders, 0: (Turn("generate", 1), *FOUND.orders[0][1:])}),
            "$.orders.1",
            "offset 0",
        ),
        (replace(FOUND, orders=dict.fromkeys(range(8), LATE)), "$.orders", "deadlocks: generate -> "),
        (replace(FOUND, hashes=replace(FOUND.hashes, workload="x")), "$.hashes.workload", "another batch"),
        (replace(FOUND, hashes=replace(FOUND.hashes, cluster="x")), "$.hashes.cluster", "another cluster"),
        (replace(FOUND, format=99), "$.format", "format 99"),
        (
            replace(FOUND, allocations={k: v for k, v in FOUND.allocations.items() if k != "ref"}),
            "$.allocations",
            "'ref'",
        ),
        (
            replace(FOUND, allocations={**FOUND.allocations, "reff": FOUND.allocations["ref"]}),
            "$.allocations.reff",
            "'ref'?",
        ),
        (
            replace(FOUND, allocations={**FOUND.allocations, "reward": FOUND.allocations["ref"]}),
            "$.allocations.reward",
            "no devices",
        ),
    ],
)
def test_an_invalid_plan_is_refused_with_its_place(plan: Plan, path: str, says: str) -> None:
    problems = validate(plan, PPO, "plan.json")
    assert problems
    assert any(str(p.where).startswith(f"plan.json: {path}") and says in str(p) for p in problems), problems


def test_offsets_that_agree_are_valid_and_overlap_steps() -> None:
    """The critic trains beside the next step's generation, which this cluster gives a half each."""
    halves = {"generate": DeviceMesh(0, 4), "critic_train": DeviceMesh(4, 4)}
    plan = FOUND
    for name, mesh in halves.items():
        plan = edited(plan, name, mesh=mesh, dp=4)
    shared = (Turn("ref"), Turn("values"), Turn("actor_train"))
    early = {d: (Turn("generate"), *shared) for d in range(4)}
    late = {d: (Turn("critic_train", -1), *shared) for d in range(4, 8)}
    plan = replace(plan, orders=early | late)
    assert validate(plan, PPO) == ()
    assert reprice(PPO, plan).period_seconds > 0


def test_hashes_change_with_what_predictions_depend_on_and_with_nothing_else() -> None:
    base = hashes(PPO)
    train = PPO.graph.calls["actor_train"]
    retuned = {**PPO.graph.calls, "actor_train": replace(train, lr=0.5, temperature=0.7)}
    assert hashes(replace(PPO, graph=replace(PPO.graph, calls=retuned))) == base
    doubled = {**PPO.graph.calls, "actor_train": replace(train, minibatches=2)}
    assert hashes(replace(PPO, graph=replace(PPO.graph, calls=doubled))).graph != base.graph
    assert hashes(replace(PPO, workload=replace(PPO.workload, staleness=1))).workload != base.workload
    assert hashes(replace(PPO, cluster=cluster("H200"))).cluster != base.cluster


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_meshes_are_aligned_powers_of_two_or_whole_nodes() -> None:
    machine = cluster(devices=8, nodes=3)
    good = {(d, n) for n in (1, 2, 4) for d in range(0, 24, n)} | {(0, 8), (8, 8), (16, 8), (0, 16), (8, 16), (0, 24)}
    for first in range(-1, 25):
        for n in range(26):
            assert (mesh_fault(DeviceMesh(first, n), machine) == "") == ((first, n) in good), (first, n)
    six = cluster(devices=6)
    assert mesh_fault(DeviceMesh(0, 6), six) == ""
    assert mesh_fault(DeviceMesh(0, 3), six)


def resolved(spec: ClusterSpec, machine: Probe = MACHINE) -> Cluster:
    return resolve(spec, machine)


def test_auto_is_this_machine() -> None:
    here = resolved(ClusterSpec())
    assert (here.kind, here.devices_per_node, here.memory_bytes) == ("cpu", 2, 12_000_000_000)
    gpus = Probe(16, 128 * 10**9, (Gpu("NVIDIA H200", 150 * 10**9),) * 4)
    there = resolved(ClusterSpec(), gpus)
    assert (there.kind, there.n_devices, there.memory_bytes) == ("H200", 4, 150 * 10**9)
    assert resolved(ClusterSpec(memory_gb=70), gpus).memory_bytes == 70 * 10**9
    assert resolved(ClusterSpec(kind="cpu", devices=4), gpus).kind == "cpu"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_a_driver_name_is_one_kind(name: str, kind: str) -> None:
    assert resolved(ClusterSpec(), Probe(8, 10**11, (Gpu(name, 10**10),))).kind == kind


@pytest.mark.parametrize(
    ("spec", "machine", "says"),
    [
        (ClusterSpec(kind="H100"), MACHINE, "did you mean 'H100-PCIe' or 'H100-SXM'?"),
        (ClusterSpec(kind="h100-sxm", devices=8), MACHINE, "did you mean 'H100-SXM'"),
        (ClusterSpec(kind="H200"), MACHINE, "set cluster.devices: 8 is usual"),
        (ClusterSpec(), Probe(8, 10**11, (Gpu("NVIDIA Titan", 10**10),)), "'NVIDIA Titan' is not in the table"),
        (ClusterSpec(), Probe(8, 10**11, (Gpu("NVIDIA H200", 1), Gpu("NVIDIA H20", 1))), "mixes GPUs"),
        (ClusterSpec(), Probe(8, 10**11, gpu_error="nvidia-smi failed"), "can't be read"),
    ],
)
def test_an_unclear_cluster_is_refused(spec: ClusterSpec, machine: Probe, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(spec, machine)


SMI = {
    "good": ("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'\n", 2, ""),
    "broken": ("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'\nexit 9\n", 0, "no driver"),
    "odd": ("#!/bin/sh\necho 'something else'\n", 0, "something else"),
}


@pytest.mark.parametrize("case", SMI)
def test_this_machine_is_read_through_nvidia_smi(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, count, error = SMI[case]
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    machine = probe()
    assert machine.cores >= 1
    assert machine.host_memory_bytes > 10**8
    assert len(machine.gpus) == count
    assert error in machine.gpu_error
    assert bool(error) == bool(machine.gpu_error)
    if count:
        assert resolve(ClusterSpec(), machine).memory_bytes == 81559 << 20
