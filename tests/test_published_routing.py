"""Experts dealt in their order, in published measurements; and the nodes that a token's experts lie on."""

import random

import pytest
from msgspec.structs import replace

from benchmarks.published_routing import dealt_train_seconds, places_met
from benchmarks.published_shapes import DEEPSEEK_V3, KIMI_K2
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.comm import nodes_reached
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

QWEN3 = known("Qwen/Qwen3-30B-A3B")
GPT_OSS = known("openai/gpt-oss-120b")


@pytest.mark.parametrize(
    ("model", "places", "met"),
    [
        (QWEN3, 8, 1.0),  # 16 experts each, eight of them a token's
        (GPT_OSS, 64, 2.0),
        (DEEPSEEK_V3, 64, 2.0),
        (DEEPSEEK_V3, 8, 1.0),
        (KIMI_K2, 32, 4 / 3),  # 12 each: of three tokens the middle one's lie on two
    ],
)
def test_neighbouring_experts_lie_on_few_places(model: ModelSpec, places: int, met: float) -> None:
    assert places_met(model, places) == pytest.approx(met)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_dealt_experts_are_never_slower_and_without_a_second_device_save_copies_alone(ep: int) -> None:
    layout = Layout(DeviceMesh(0, 8), dp=8, ep=ep, sharding="fsdp")
    setting = Setting(QWEN3, ModelRole(trainable=True, dtype="bfloat16"), layout, cluster("H100-SXM", 8, 1))
    work = TrainWork(tokens=1 << 21, sample_tokens=4096.0, microbatch_tokens=16384, imbalance=1.0)
    dealt, chosen = dealt_train_seconds(setting, work), train_seconds(setting, work)
    assert 0.5 * chosen < dealt < chosen
    if ep > 1:
        one = replace(setting, layout=replace(layout, ep=1))
        assert chosen - dealt > train_seconds(one, work) - dealt_train_seconds(one, work)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK_V3], ids=["all", "groups"])
def test_as_many_nodes_are_reached_as_by_drawn_choices(model: ModelSpec, nodes: int) -> None:
    """Choices drawn as routers make them: groups, and of those experts, all different."""
    draw, each = random.Random(0), model.experts // model.router_groups
    total, tokens = 0, 4000
    for _ in range(tokens):
        groups = draw.sample(range(model.router_groups), model.router_groups_per_token)
        candidates = [group * each + number for group in groups for number in range(each)]
        experts = draw.sample(candidates, model.experts_per_token)
        total += len({expert * nodes // model.experts for expert in experts})
    assert nodes_reached(model, nodes) == pytest.approx(total / tokens, rel=0.06)


def test_a_token_that_keeps_to_four_groups_reaches_no_more_nodes() -> None:
    free = replace(DEEPSEEK_V3, router_groups=1, router_groups_per_token=1)
    for nodes in (2, 4, 8, 16, 32):
        assert nodes_reached(DEEPSEEK_V3, nodes) <= min(nodes, nodes_reached(free, nodes) + 1e-9)
