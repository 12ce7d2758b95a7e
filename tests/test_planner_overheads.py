"""Overheads of engines and a runtime: priced in every call that they belong to, and nowhere else."""

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.published_steps import SYSTEM, Batch, Engines, layout_of, overheads, plan_for, step_request
from realgraph.planner.costs.engine_overheads import NO_OVERHEADS, EngineOverheads
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import free_seconds, overhead_seconds, setting_of, step_end_seconds
from realgraph.planner.options.moves import Place, longest_moves, move_matrix
from realgraph.planner.options.pricing import PricedOption
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.option import CallOption, Residency
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.cost_table import CostTable, PhaseFactor
from realgraph.planner.request.engine_support import TORCH, TORCH_OVERHEADS
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import reprice, search
from realgraph.runtime.master.step_metrics import planned_seconds
from tests.planner_cases import cluster, grpo, known, ppo, request

APART = {"rollout": Pin(first=0, devices=4, tp=2), "train": Pin(first=4, devices=4)}
TOGETHER = {"rollout": Pin(first=0, devices=8, tp=2), "train": Pin(first=0, devices=8, residency="offloaded")}
LARGE = {  # of each field, what shows in a step of a second or so
    "decode_step_seconds": 0.01,
    "decode_sequence_seconds": 1e-4,
    "wake_seconds": 1.0,
    "wake_layer_seconds": 0.1,
    "sync_seconds": 1.0,
    "sync_tensor_seconds": 0.01,
    "sync_bytes_per_s": 1e8,
    "microbatch_seconds": 0.1,
    "call_seconds": 0.1,
    "call_device_seconds": 0.1,
    "sample_seconds": 0.01,
    "admission_seconds": 0.01,
    "padded_token_seconds": 1e-5,
    "function_seconds": 0.1,
    "step_seconds": 1.0,
}


def planned(own: EngineOverheads, pins: dict[str, Pin], staleness: int = 0) -> Plan:
    asked = request(grpo(), pins=pins, workload=Workload(64, 8, 512, 1024, 400.0, staleness=staleness))
    return search(replace(asked, engine=replace(TORCH, overheads=own)), levels=(staleness,))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_overhead_lengthens_a_step(name: str) -> None:
    known_plan = planned(NO_OVERHEADS, TOGETHER)
    slower = planned(replace(NO_OVERHEADS, **{name: LARGE[name]}), TOGETHER)
    assert slower.period_seconds > known_plan.period_seconds * 1.02
    assert slower.lower_bound_seconds > known_plan.period_seconds


def test_what_a_stream_loses_at_new_weights_lengthens_it() -> None:
    slower = planned(replace(NO_OVERHEADS, interrupt_seconds=2.0), APART, staleness=1)
    rollout = planned(NO_OVERHEADS, APART, staleness=1).allocations["rollout"]
    assert slower.allocations["rollout"].seconds > rollout.seconds + 1.5


def test_ranks_on_several_nodes_and_whole_models_are_dearer() -> None:
    nodes = replace(NO_OVERHEADS, decode_nodes_seconds=0.01)
    machine = cluster(nodes=2)
    asked = replace(request(grpo(), machine=machine), engine=replace(TORCH, overheads=nodes))
    wide, narrow = (Layout(DeviceMesh(0, 16), dp=16 // tp, tp=tp) for tp in (16, 8))
    device = device_kind(machine.kind).costs.step_seconds
    steps = [setting_of(asked, "rollout", one, machine).costs.step_seconds - device for one in (wide, narrow)]
    assert steps == [pytest.approx(0.01), 0.0]
    rate = replace(NO_OVERHEADS, sync_bytes_per_s=1e9)
    part, whole = (planned(replace(rate, sync_whole=all_of_it), APART) for all_of_it in (False, True))
    moved = [plan.reallocation_seconds["rollout"] for plan in (part, whole)]
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.05)  # each of two ranks gets all


def test_our_own_engines_send_a_row_for_each_expert_and_other_systems_one_for_each_node() -> None:
    """`runtime/parallel/experts/dispatch.py` exchanges a row for each of a token's experts."""
    asked = request(grpo(), machine=cluster(nodes=2))
    layout = Layout(DeviceMesh(0, 16), dp=16)
    for engine, copies in ((TORCH, True), (SYSTEM, False)):
        for call in ("rollout", "train"):
            own = setting_of(replace(asked, engine=engine), call, layout, asked.cluster)
            assert own.engine.expert_copies == copies
            assert replace(own.engine, expert_copies=False) == replace(own, backend=None).engine


def test_a_cpu_and_measured_factors_hold_what_was_measured_with_them() -> None:
    cpu = request(grpo(), machine=cluster("cpu", 2))
    assert cpu.overheads(cpu.cluster) == EngineOverheads(step_seconds=TORCH_OVERHEADS.step_seconds)
    gpu = request(grpo())
    assert gpu.overheads(gpu.cluster) == TORCH_OVERHEADS
    factors = device_kind("H100-SXM").costs
    measured = replace(gpu, costs=CostTable(kind="H100-SXM", factors=factors)).overheads(gpu.cluster)
    assert measured.decode_step_seconds == measured.call_seconds == measured.sample_seconds == 0
    assert measured.wake_layer_seconds == TORCH_OVERHEADS.wake_layer_seconds
    assert measured.step_seconds == TORCH_OVERHEADS.step_seconds
    given = EngineOverheads(step_seconds=3.0)
    assert replace(cpu, costs=CostTable(overheads=given)).overheads(cpu.cluster) == given
    known = replace(cpu, costs=CostTable(overheads=given, step_end_seconds=4.0))
    assert known.overheads(cpu.cluster) == EngineOverheads(step_seconds=4.0)


def test_the_controller_ends_a_step_with_the_training_of_what_generates() -> None:
    asked = replace(request(ppo()), engine=replace(TORCH, overheads=EngineOverheads(step_seconds=5.0)))
    machine = asked.cluster
    ends = {name: step_end_seconds(asked, name, machine) for name in asked.mesh_calls}
    assert {name: seconds for name, seconds in ends.items() if seconds} == {"actor_train": 5.0}
    plan = search(asked)
    assert {name: one.step_end_seconds for name, one in plan.allocations.items()} == ends
    without = search(replace(asked, engine=replace(TORCH, overheads=NO_OVERHEADS)))
    assert plan.period_seconds == pytest.approx(without.period_seconds + 5.0, rel=0.02)
    assert planned_seconds(plan)["actor_train"] == pytest.approx(plan.allocations["actor_train"].seconds - 5.0)
    slow = replace(asked, costs=CostTable(phases={"train": PhaseFactor(2.0, error=0.1)}))
    again = reprice(slow, plan).allocations["actor_train"]
    assert again.seconds == pytest.approx(2 * planned_seconds(plan)["actor_train"] + 5.0)  # it is part of no train call


def test_an_engine_wakes_where_others_may_have_had_its_devices() -> None:
    def wakes(asked: PlanRequest) -> float:
        return overhead_seconds(asked, "rollout", Layout(DeviceMesh(0, 8), dp=8), asked.cluster)

    engine = replace(TORCH, overheads=EngineOverheads(wake_seconds=2.0))
    asked = replace(request(grpo()), engine=engine)
    late = replace(asked, workload=replace(asked.workload, staleness=1))
    assert wakes(asked) == 2.0
    assert wakes(replace(asked, engine=replace(engine, own_devices=True))) == wakes(late) == 0.0


def test_functions_run_on_as_many_processes_as_there_are() -> None:
    own = EngineOverheads(function_seconds=0.5, function_workers=16)
    asked = replace(request(grpo()), engine=replace(TORCH, overheads=own))
    assert free_seconds(asked)["reward"] == 0.5 * asked.workload.n_samples / 16


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_no_move_takes_longer_than_what_leaves_options_out(whole: bool) -> None:
    own = EngineOverheads(sync_seconds=1.0, sync_tensor_seconds=1e-3, sync_bytes_per_s=5e9, sync_whole=whole)
    asked = replace(request(grpo(), machine=cluster(nodes=2)), engine=replace(TORCH, overheads=own))
    here, there = DeviceMesh(0, 8), DeviceMesh(8, 8)

    def place(mesh: DeviceMesh) -> Place:
        layouts = [Layout(mesh, dp=8 // tp, tp=tp) for tp in (1, 2, 4, 8)]
        kept: tuple[Residency, ...] = ("resident", "offloaded") if mesh == here else ("reallocated",)
        candidates = [CallOption(layout, 1024, residency=one) for layout in layouts for one in kept]
        return Place(mesh, 0, [PricedOption(one, 0.0, 0.0, (0, 0, 0)) for one in candidates])

    longest = longest_moves(asked, "rollout", place(there))
    for mesh in (here, there):
        assert np.all(move_matrix(asked, "rollout", place(mesh), place(there)) <= longest * (1 + 1e-9))


def test_a_published_step_is_what_the_plan_says_of_its_request() -> None:
    model, machine = known("Qwen/Qwen3-1.7B"), cluster()
    engines = Engines(layout_of(8, 2), layout_of(8, 2, 2), colocated=True)
    batch = Batch(samples=512, per_group=8, prompt=100, mean=300.0, limit=1024, passes=("old", "ref"))
    asked = step_request(model, machine, engines, batch)
    plan = plan_for(asked)
    assert isinstance(plan, Plan)
    assert plan == replace(search(asked), search_seconds=plan.search_seconds)
    assert {name: plan.allocations[name].layout.axes[:3] for name in plan.allocations} == {
        "rollout": (4, 2, 1),
        "ref_logp": (2, 2, 2),
        "old_logp": (2, 2, 2),
        "train": (2, 2, 2),
    }
    assert asked.overheads(asked.cluster).wake_seconds == overheads().wake_seconds
    wide = replace(engines, train=layout_of(8, 2, 8))
    assert "mesh" in str(plan_for(step_request(model, machine, wide, batch)))
