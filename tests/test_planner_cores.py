"""Costs on CPU cores: hand-computed passes, what each axis adds, and limits that hold for every layout."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.forward import forward_seconds
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.generate.decode import decode_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute
from tests.planner_cases import known

DENSE = ModelSpec("qwen3", 128, 4, 4, 2, 32, 384, 16, True, 1024, qk_norm=True)
EXPERTS = replace(
    DENSE, architecture="qwen3_moe", experts=8, experts_per_token=2, expert_intermediate=64, expert_layers=4
)
LINK = 8e9  # of the cpu row of devices.yaml
CORES = resolve(ClusterSpec(kind="cpu", devices=64), Probe(cores=64, host_memory_bytes=64_000_000_000))
COSTS = replace(
    device_kind("cpu").costs,
    gemm=0.5,
    gemm_tokens=10,
    gemm_width=16,
    attention=0.4,
    memory=0.8,
    elementwise=0.25,
    optimizer=0.8,
    backward=1.5,
    pass_layer_seconds=1e-3,
    microbatch_seconds=0.0,
    optimizer_step_seconds=0.0,
    call_seconds=0.0,
    sample_seconds=0.0,
    admission_seconds=0.0,
    link=0.1,
    collective_seconds=1e-4,
    gather=0.2,
    gather_seconds=2e-4,
    scatter=0.05,
    scatter_seconds=3e-4,
    exchange=0.4,
    exchange_seconds=4e-4,
    p2p=0.5,
    p2p_seconds=5e-5,
)
HOP = 2e-6  # of a ring of two


def at(layout: Layout, model: ModelSpec = DENSE, costs: EfficiencyFactors = COSTS) -> Setting:
    return Setting(model, ModelRole(trainable=True), layout, CORES, costs)


def cut(dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Layout:
    return Layout(DeviceMesh(0, dp * tp * pp * cp), dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)


def core_rate(setting: Setting, width: float) -> float:
    """Operations a second for rows that are computed with 10 more."""
    return setting.cluster.flops * 0.5 * width / (width + 16)


def layer_seconds(setting: Setting, tokens: float, context: float, tp: int) -> tuple[float, float]:
    """One layer's work on each of tp cores, and the element-wise part of it."""
    mlp = 3 * 128 * 384
    rest = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 32 + 2 * 128 + 128 / 4
    products = 2 * (tokens + 10) * rest / tp / core_rate(setting, 128 / tp)
    products += 2 * (tokens + 10) * mlp / tp / core_rate(setting, min(128, 384 / tp))
    scores = 4 * 128 / tp * context * tokens / (setting.cluster.flops * 0.4)
    elementwise = 4 * tokens * (14 * 128 + 4 * 384) / tp / (setting.cluster.memory_bytes_per_s * 0.25)
    return products + scores + elementwise + 1e-3, elementwise


def head_seconds(setting: Setting, tokens: float, tp: int) -> float:
    return 2 * (tokens + 10) * 128 * 16 / tp / core_rate(setting, 128)


def row_seconds(tokens: float, tp: int) -> float:
    """The hidden states of all tokens gathered, and scattered."""
    share = (tp - 1) / tp * 4 * 128 * tokens
    return share / (LINK * 0.2) + share / (LINK * 0.05) + 5e-4 + 2 * HOP * (tp - 1)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_forward_pass_is_what_a_hand_computes(tp: int) -> None:
    """Each layer's collectives are two gathers and two scatters, and the ends have one of each and two small sums."""
    setting = at(cut(tp=tp))
    moved = 9 * row_seconds(500, tp) + 4 * (1e-4 + HOP * (tp - 1)) if tp > 1 else 0.0
    expected = 4 * layer_seconds(setting, 500, 40, tp)[0] + head_seconds(setting, 500, tp) + moved
    assert forward_seconds(setting, 500, 40) == pytest.approx(expected)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_training_step_is_what_a_hand_computes(recompute: Recompute) -> None:
    """2,560 tokens in two micro-batches of 64 samples of 20 tokens, the last of which nobody asks for."""
    setting = at(cut())
    work = TrainWork(2560, 20, 1280, recompute=recompute)
    own, elementwise = layer_seconds(setting, 1280 - 64, 10, 1)
    again = {"none": 0.0, "selective": elementwise + 6.5e-3, "full": own}[recompute]
    passes = 2 * (4 * (2.5 * own + again) + 2.5 * head_seconds(setting, 1280 - 64, 1))
    optimizer = 32 * DENSE.n_params() / (setting.cluster.memory_bytes_per_s * 0.8)
    assert train_seconds(setting, work) == pytest.approx(passes + optimizer)


def test_stages_fill_and_drain_and_hand_over() -> None:
    """1F1B of two stages with two layers each, whose head is next to nothing: count + 1 halves of the model's passes,
    and each stage's hand-over both ways."""
    whole, halved = at(cut()), at(cut(pp=2))
    work = TrainWork(2560, 20, 320)
    tokens = 320 - 16
    transfer = 4 * 128 * tokens / (LINK * 0.5) + 5e-5
    own, head = layer_seconds(whole, tokens, 10, 1)[0], head_seconds(whole, tokens, 1)
    fullest, mean = 2.5 * (2 * own + head), 2.5 * (4 * own + head) / 2
    passes = 8 * (fullest + 2 * transfer) + mean + 2 * transfer
    optimizer = 32 * DENSE.n_params() / 2 / (whole.cluster.memory_bytes_per_s * 0.8)
    tied = 4 * 16 * 128 / (LINK * 0.1) + 2e-4 + 2 * HOP
    assert train_seconds(halved, work) == pytest.approx(passes + optimizer + tied)
    forward = 8 * (2 * own + head + transfer) + (4 * own + head) / 2
    assert inference_seconds(halved, work) == pytest.approx(forward)


def test_context_parallel_ranks_gather_keys_and_values_and_scatter_their_gradients() -> None:
    """Against dp 2, where each rank has as many tokens: what cp adds a layer and micro-batch."""
    work = TrainWork(2560, 20, 1280, prompt_tokens=0.0)
    one = layer_seconds(at(cut(cp=2)), 1280, 10, 1)[0]
    nbytes = 4 * 2 * 2 * 32 * 1280
    gathered, scattered = nbytes / (LINK * 0.2) + 2e-4 + HOP, nbytes / (LINK * 0.05) + 3e-4 + HOP
    head = head_seconds(at(cut()), 1280, 1)
    assert inference_seconds(at(cut(cp=2)), work) == pytest.approx(4 * (one + gathered) + head)
    free = replace(COSTS, gather=1e3, gather_seconds=0.0, scatter=1e3, scatter_seconds=0.0)
    added = train_seconds(at(cut(cp=2)), work) - train_seconds(at(cut(cp=2), costs=free), work)
    states = 4 * at(cut()).model.n_params("lm") / 2  # gradients are scattered, and new weights gathered
    step = states / (LINK * 0.2) + 2e-4 + states / (LINK * 0.05) + 3e-4
    assert added == pytest.approx(4 * (gathered + scattered - 2 * HOP) + step, rel=1e-3)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Two choices of eight experts on two ranks: half of the rows go to the other rank, and as many come back."""
    setting, free = at(cut(dp=2, ep=2), EXPERTS), replace(COSTS, exchange=1e3, exchange_seconds=0.0)
    one_way = 4 * 128 * 2 / 2 * 1000 / (LINK * 0.4)
    forward = 4 * (2 * one_way + 3 * 4e-4)
    added = forward_seconds(setting, 1000, 10) - forward_seconds(replace(setting, factors=free), 1000, 10)
    assert added == pytest.approx(forward, rel=1e-3)
    whole = at(cut(dp=2), EXPERTS)
    each = 2 * 3 * 128 * 64 / core_rate(whole, 64)
    fewer = 4 * 4 * (10 * each + 0.06e-3)  # of the four experts in each of four layers that another rank holds
    silent, hops = replace(setting, factors=free), 4 * 3 * HOP
    assert forward_seconds(whole, 1000, 10) - forward_seconds(silent, 1000, 10) == pytest.approx(fewer - hops, rel=1e-3)


def test_a_decode_step_sums_twice_a_layer() -> None:
    """Seconds of the sums of two ranks for 3 sequences, by what an all-reduce takes here."""
    for tp in (1, 2):
        slow = decode_seconds(at(cut(tp=tp)), 3, 20)
        added = slow - decode_seconds(at(cut(tp=tp), costs=replace(COSTS, link=1e3, collective_seconds=0.0)), 3, 20)
        assert added == pytest.approx(0.0 if tp == 1 else 8 * (2e-4 + 3 * 4 * 128 / (LINK * 0.1)), rel=1e-3, abs=1e-9)


def test_processes_that_share_a_core_wait_for_their_turns() -> None:
    """Four a core: everything that is moved or waited for takes four times as long, products too."""
    shared = resolve(ClusterSpec(kind="cpu", devices=64), Probe(cores=16, host_memory_bytes=64_000_000_000))
    bare = replace(COSTS, pass_layer_seconds=0.0)
    alone, crowded = at(cut(tp=2), costs=bare), replace(at(cut(tp=2), costs=bare), cluster=shared)
    assert forward_seconds(crowded, 500, 40) == pytest.approx(4 * forward_seconds(alone, 500, 40), rel=1e-2)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_small_model_is_trained_quickest_as_data_parallel_copies(axis: str) -> None:
    """512 short samples of the quickstart on two cores, by the factors that the planner comes with."""
    work = TrainWork(512 * 11, 11.0, 1024, optimizer_steps=2, prompt_tokens=6.0, samples_per_group=8)
    copies, other = (at(layout, costs=device_kind("cpu").costs) for layout in (cut(dp=2), cut(**{axis: 2})))
    assert train_seconds(copies, work) < train_seconds(other, work)
    assert inference_seconds(copies, work) < inference_seconds(other, work)


def test_a_large_model_is_trained_quicker_on_two_cores_however_it_is_cut() -> None:
    """0.6B parameters, long samples in 16 micro-batches: each axis gains about as much as its products are cut."""
    work, costs = TrainWork(1 << 16, 2048.0, 1 << 12), device_kind("cpu").costs
    alone = train_seconds(at(cut(), known("Qwen/Qwen3-0.6B"), costs), work)
    for axis in ("dp", "tp", "pp", "cp"):
        two = train_seconds(at(cut(**{axis: 2}), known("Qwen/Qwen3-0.6B"), costs), work)
        assert 1.5 < alone / two < 2.05, axis


LAYOUTS = st.builds(
    cut,
    dp=st.sampled_from((1, 2, 4)),
    tp=st.sampled_from((1, 2)),
    pp=st.sampled_from((1, 2, 4)),
    cp=st.sampled_from((1, 2)),
)
WORK = st.builds(
    TrainWork,
    tokens=st.sampled_from((4096, 1 << 16)),
    sample_tokens=st.sampled_from((16.0, 120.0)),
    microbatch_tokens=st.sampled_from((512, 4096)),
    optimizer_steps=st.sampled_from((1, 2)),
    recompute=st.sampled_from(("none", "selective", "full")),
    schedule=st.sampled_from(("1f1b", "interleaved")),
    prompt_tokens=st.sampled_from((0.0, 8.0)),
    samples_per_group=st.sampled_from((1, 8)),
)


@settings(max_examples=150)
@given(LAYOUTS, WORK)
def test_more_work_and_slower_links_take_longer(layout: Layout, work: TrainWork) -> None:
    setting = at(layout)
    seconds = train_seconds(setting, work)
    assert train_seconds(setting, replace(work, tokens=2 * work.tokens)) > seconds
    assert train_seconds(setting, replace(work, recompute="none")) <= seconds
    assert inference_seconds(setting, replace(work, schedule="1f1b")) < seconds
    slower = replace(setting, cluster=replace(setting.cluster, link_bytes_per_s=LINK / 3))
    for one in (train_seconds, inference_seconds):
        alone = layout.mesh.n_devices == 1 or (one is inference_seconds and layout.mesh.n_devices == layout.dp)
        assert (one(slower, work) == one(setting, work)) == alone


@settings(max_examples=100)
@given(LAYOUTS, WORK, st.sampled_from(("collective", "gather", "scatter", "exchange", "p2p")))
def test_only_layouts_that_use_an_operation_pay_for_it(layout: Layout, work: TrainWork, operation: str) -> None:
    copies, cut_up = layout.dp * layout.cp > 1, layout.mesh.n_devices > layout.dp  # whose optimizer states are cut too
    users = {
        "collective": layout.mesh.n_devices > 1,  # gradients, and what tied or cut copies share
        "gather": layout.tp > 1 or (copies and cut_up),
        "scatter": layout.tp > 1 or (copies and cut_up),
        "exchange": False,
        "p2p": layout.pp > 1,
    }
    setting = at(layout)
    later = replace(setting, factors=replace(COSTS, **{f"{operation}_seconds": 1e-2}))
    assert (train_seconds(later, work) > train_seconds(setting, work)) == users[operation]


@settings(max_examples=50)
@given(WORK, st.sampled_from(("tp", "pp", "cp")))
def test_without_latency_and_bytes_two_cores_take_half_as_long_at_most(work: TrainWork, axis: str) -> None:
    """A large model: no fixed seconds or narrow products are left. Stages also fill."""
    large, free = known("Qwen/Qwen3-0.6B"), {"pass_layer_seconds": 0.0, "layer_seconds": 0.0, "gemm_width": 0.0}
    for name in ("link", "gather", "scatter", "p2p"):
        free |= {name: 1e3}
    for name in ("collective", "gather", "scatter", "p2p"):
        free |= {f"{name}_seconds": 0.0}
    costs, work = replace(COSTS, **free), replace(work, prompt_tokens=0.0, schedule="1f1b")
    one, two = (train_seconds(at(layout, large, costs), work) for layout in (cut(), cut(**{axis: 2})))
    count = math.ceil(work.tokens / work.optimizer_steps / work.microbatch_tokens)
    bubble = (count + 1) / count if axis == "pp" else 1.0
    assert 0.45 * bubble < two / one < 0.6 * bubble
