"""Low-rank adapters of the published measurements: by hand, ordered by rank, and never faster than their devices."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_adapters import adapted_share, adapted_train_seconds, adapter_costs, lora_params
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.states import state_costs
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.memory.memory import StateShare, trained_copy
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

BF16 = ModelRole(trainable=True, dtype="bfloat16")
LLAMA = "meta-llama/Llama-3.1-8B"
MODELS = (LLAMA, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-72B")
KINDS = ("A100-80", "H100-SXM", "H20", "B200", "MI300X")


@st.composite
def points(draw: st.DrawFn) -> tuple[Setting, TrainWork]:
    """A setting on whole nodes and a batch large enough for every rank."""
    model = known(draw(st.sampled_from(MODELS)))
    tp, pp, dp = draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 4))), draw(st.sampled_from((1, 2, 8)))
    shardings: tuple[Literal["replicated", "fsdp"], ...] = ("replicated", "fsdp")
    sharding = draw(st.sampled_from(shardings)) if pp == 1 else shardings[0]
    layout = Layout(DeviceMesh(0, tp * pp * dp), dp=dp, tp=tp, pp=pp, sharding=sharding)
    machine = cluster(draw(st.sampled_from(KINDS)), 8, -(-layout.mesh.n_devices // 8))
    work = TrainWork(
        tokens=draw(st.sampled_from((1 << 18, 1 << 22))),
        sample_tokens=draw(st.sampled_from((512.0, 4096.0))),
        microbatch_tokens=draw(st.sampled_from((4096, 16384))),
        optimizer_steps=draw(st.sampled_from((1, 4))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
    )
    return Setting(model, BF16, layout, machine), work


@settings(max_examples=200)
@given(points())
def test_adapters_take_longer_with_their_rank_and_leave_out_gradients_of_weights(
    point: tuple[Setting, TrainWork],
) -> None:
    setting, work = point
    adapted = [adapted_train_seconds(setting, work, rank) for rank in (8, 64, 256)]
    assert adapted[0] <= adapted[1] < adapted[2]  # thin products are as long as a tile, however low the rank
    whole = train_seconds(setting, work)
    assert adapted[0] < (1.6 if setting.model.hidden < 4096 else 1.25) * whole  # a small model's adapters do not pay
    products = 2 * setting.model.active_params() + setting.model.head_flops("lm")
    attention = 4 * setting.model.attention_width() * work.context * setting.model.layers
    peak = setting.cluster.flops * setting.layout.mesh.n_devices
    assert adapted[0] > 2 * work.tokens * (products + attention) / peak


def test_adapters_of_a_layer_by_hand() -> None:
    """Llama 3.1 8B: seven matrices from 4096 x 3, 4096, 4096 x 2 and 14336 to 4096, 1024 x 2, 4096, 14336 x 2, 4096."""
    setting = Setting(known(LLAMA), BF16, Layout(DeviceMesh(0, 1)), cluster("H100-SXM", 8))
    inputs, outputs = 6 * 4096 + 14336, 3 * 4096 + 2 * 1024 + 2 * 14336
    rate, moved = 989e12 * 0.72 * 0.9 * 64 / (64 + 128), 2 * (inputs + 4 * outputs)
    token = 2 * 64 * (inputs + outputs) / rate + moved / (3.35e12 * 0.85)
    assert adapter_costs(setting, 16).token == pytest.approx(token)
    assert adapter_costs(setting, 64) == adapter_costs(setting, 16)


def test_adapters_have_states_and_the_rest_only_weights() -> None:
    """Rank 16 on all matrices of Llama 3.1 8B: 41,943,040 parameters, as PEFT prints them."""
    model, layout = known(LLAMA), Layout(DeviceMesh(0, 1))
    assert lora_params(model, 16) == 41_943_040
    light = trained_copy(model, BF16, layout, share=StateShare(trained=adapted_share(model, BF16, 16)))
    assert light.weights == 2 * model.n_params()
    assert light.gradients + light.optimizer == pytest.approx(16 * 41_943_040, rel=1e-6)


def test_only_adapters_are_reduced_between_copies() -> None:
    wide = Setting(known(LLAMA), BF16, Layout(DeviceMesh(0, 8), dp=8), cluster("H100-SXM", 8))
    share = adapted_share(wide.model, BF16, 16)
    far, near = state_costs(wide), state_costs(wide, share)
    latency = state_costs(wide, 0.0)
    assert near.step - latency.step == pytest.approx(share * (far.step - latency.step))
    assert near.accumulate == pytest.approx(share * far.accumulate)
