"""Layouts that are candidates on a CPU, whose devices share one memory."""

from typing import Literal

import pytest
from msgspec.structs import replace

from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.choices import candidates
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.option import CallOption
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from tests.planner_cases import cluster, grpo, ppo, request


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_on_a_cpu_a_model_is_cut_only_for_roles_that_are_pinned_so(axis: Literal["tp", "pp", "cp"]) -> None:
    long = Workload(256, 2, 512, 64512, 16e3)
    model, machine = "meta-llama/Llama-3.1-8B", cluster("cpu", devices=8)
    here = request(ppo(), model, machine, workload=long)
    mesh = DeviceMesh(0, 8)

    def found(asked: PlanRequest, call: str) -> list[CallOption]:
        return list(candidates(asked, call, mesh, asked.cluster))

    def sizes(asked: PlanRequest, call: str) -> set[int]:
        return {getattr(candidate.layout, axis) for candidate in found(asked, call)}

    assert {ranks for call in here.mesh_calls for ranks in sizes(here, call)} == {1}
    pinned = replace(here, pins={"critic_train": replace(Pin(), **{axis: 4})})
    assert sizes(pinned, "critic_train") == {4}
    assert {candidate.schedule for candidate in found(pinned, "critic_train")} == {"1f1b"}
    assert sizes(pinned, "values") == {1, 4}  # it may read the trained copy in place
    assert sizes(pinned, "actor_train") == sizes(pinned, "generate") == {1}
    interleaved = replace(here, pins={"critic_train": Pin(pp=4, schedule="interleaved")})
    chosen = found(interleaved, "critic_train")
    assert chosen and all(candidate.schedule == "interleaved" for candidate in chosen)


@pytest.mark.parametrize("machine", [cluster(), cluster("cpu", devices=8)], ids=["H100", "cpu"])
def test_every_cut_of_a_trained_model_is_offered_whole_and_sharded(machine: Cluster) -> None:
    """But where one rank has all shards, and to generate."""
    asked = request(grpo(), "Qwen/Qwen3-30B-A3B", machine)
    pins = {"train": Pin(pp=2, ep=2)}
    here = replace(asked, pins=pins) if machine.is_cpu else asked
    layouts = {one.layout for one in candidates(here, "train", DeviceMesh(0, 8), machine)}
    whole, sharded = ({one for one in layouts if one.sharding == kind} for kind in ("replicated", "fsdp"))
    assert sharded == {replace(one, sharding="fsdp") for one in whole if one.dp * one.cp > 1}
    assert any(one.pp > 1 and one.ep > 1 for one in sharded)
    rollouts = candidates(asked, "rollout", DeviceMesh(0, 8), machine)
    assert {one.layout.sharding for one in rollouts} == {"replicated"}
