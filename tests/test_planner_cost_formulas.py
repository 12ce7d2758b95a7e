"""Formulas of training costs: against oracles, against hand-computed values, and monotone in hardware and work."""

import itertools
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.backend import backend_of
from realgraph.planner.costs.comm import Link, axis_link, collective_bytes_per_s, exchange_seconds, gather_seconds
from realgraph.planner.costs.compute.forward import forward_seconds
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.pipeline import MicroBatch, Pipeline, pipeline_seconds
from realgraph.planner.costs.compute.states import exposed_seconds, stage_params, state_costs
from realgraph.planner.costs.compute.train import TrainWork, microbatches, train_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

BF16 = ModelRole(trainable=True, dtype="bfloat16")
MIXTURE = known("Qwen/Qwen3-30B-A3B")  # 8 experts a token, of all
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-72B")
KINDS = ("A100-80", "H100-SXM", "H20", "B200", "MI300X")


@st.composite
def points(draw: st.DrawFn) -> tuple[Setting, TrainWork]:
    """A setting on whole nodes and a batch large enough for every rank."""
    model = known(draw(st.sampled_from(MODELS)))
    tp, cp, pp = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 4)))
    dp = draw(st.sampled_from((1, 2, 8)))
    ep = draw(st.sampled_from([n for n in (1, 2, 8) if dp % n == 0])) if model.experts else 1
    shardings: tuple[Literal["replicated", "fsdp"], ...] = ("replicated", "fsdp")
    sharding = draw(st.sampled_from(shardings)) if pp == 1 and ep == 1 else shardings[0]
    devices = max(8, tp * cp * pp * dp)
    layout = Layout(DeviceMesh(0, tp * cp * pp * dp), dp=dp, tp=tp, pp=pp, ep=ep, cp=cp, sharding=sharding)
    machine = cluster(draw(st.sampled_from(KINDS)), 8, -(-devices // 8))
    work = TrainWork(
        tokens=draw(st.sampled_from((1 << 18, 1 << 22))),
        sample_tokens=draw(st.sampled_from((512.0, 4096.0))),
        microbatch_tokens=draw(st.sampled_from((4096, 16384))),
        optimizer_steps=draw(st.sampled_from((1, 4))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        schedule=draw(st.sampled_from(("1f1b", "interleaved"))),
    )
    speedup = draw(st.sampled_from((1.0, 1.9)))
    return Setting(model, BF16, layout, machine, None, replace(backend_of(layout), product_speedup=speedup)), work


RATES = ("flops", "memory_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s")


@settings(max_examples=200)
@given(points(), st.sampled_from(RATES), st.floats(1.05, 8))
def test_no_faster_device_or_link_ever_takes_longer(point: tuple[Setting, TrainWork], rate: str, factor: float) -> None:
    setting, work = point
    better = replace(setting.cluster, **{rate: factor * getattr(setting.cluster, rate)})
    faster = replace(setting, cluster=better)
    for seconds in (train_seconds, inference_seconds):
        assert 0 < seconds(faster, work) <= seconds(setting, work) * (1 + 1e-9)


@settings(max_examples=200)
@given(points())
def test_more_work_takes_longer_and_recomputation_is_ordered(point: tuple[Setting, TrainWork]) -> None:
    setting, work = point
    seconds = train_seconds(setting, work)
    assert train_seconds(setting, replace(work, tokens=2 * work.tokens)) > seconds
    assert train_seconds(setting, replace(work, epochs=2)) == pytest.approx(2 * seconds)
    assert train_seconds(setting, replace(work, sample_tokens=2 * work.sample_tokens)) > seconds
    assert train_seconds(setting, replace(work, longest_tokens=65536)) >= seconds
    none, selective, full = (
        train_seconds(setting, replace(work, recompute=way)) for way in ("none", "selective", "full")
    )
    assert none < selective < full < 1.5 * none
    if work.schedule != "interleaved":  # which takes more and smaller micro-batches
        assert inference_seconds(setting, work) < seconds


@settings(max_examples=100)
@given(points())
def test_twice_the_devices_are_never_slower_where_there_is_work_for_all(point: tuple[Setting, TrainWork]) -> None:
    setting, work = point
    layout, machine = setting.layout, setting.cluster
    work = replace(
        work, tokens=1 << 26, optimizer_steps=1, microbatch_tokens=65536
    )  # sharded weights are gathered for each
    nodes = -(-2 * layout.mesh.n_devices // 8)
    wider = replace(layout, mesh=DeviceMesh(0, 2 * layout.mesh.n_devices), dp=2 * layout.dp)
    more = replace(setting, layout=wider, cluster=replace(machine, nodes=nodes))
    assert train_seconds(more, work) <= train_seconds(setting, work)
    assert inference_seconds(more, work) <= inference_seconds(setting, work)


def run_1f1b(one: MicroBatch, layers: int, stages: int, count: int) -> float:
    """1F1B, simulated: forward and backward of each stage in its order, as their inputs arrive."""
    share = layers // stages
    cost = {True: share * one.forward, False: share * one.backward}
    done: dict[tuple[int, int, bool], float] = {}
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, count)
        order = [(i, True) for i in range(warm)]
        for i in range(count):
            order += [(warm + i, True)] if warm + i < count else []
            order.append((i, False))
        orders.append(order)
    clocks, heads = [0.0] * stages, [0] * stages
    while any(heads[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if heads[s] == len(orders[s]):
                continue
            i, ahead = orders[s][heads[s]]
            needs = (i, s - 1, True) if ahead else (i, s + 1, False)
            first = s == 0 if ahead else s == stages - 1
            if not first and needs not in done:
                continue
            clocks[s] = max(clocks[s], 0.0 if first else done[needs]) + cost[ahead]
            done[i, s, ahead] = clocks[s]
            heads[s] += 1
    return max(clocks)


@pytest.mark.parametrize(("stages", "count"), list(itertools.product((2, 4, 7), (1, 3, 8, 40))))
def test_the_bubble_is_that_of_a_simulated_pipeline(stages: int, count: int) -> None:
    one = MicroBatch(forward=1.0, backward=2.3, head=0.0)
    layers = 3 * stages
    simulated = run_1f1b(one, layers, stages, count)
    assert pipeline_seconds(one, Pipeline(((3,),) * stages), count) == pytest.approx(simulated)
    interleaved = pipeline_seconds(one, Pipeline(((1, 1, 1),) * stages, "interleaved"), count)
    ideal = count * 3 * 3.3
    assert interleaved - ideal == pytest.approx((simulated - ideal) / 3)


def test_traffic_hides_behind_compute_but_never_entirely() -> None:
    assert exposed_seconds(1.0, 100.0, 0.8) == 0.25
    assert exposed_seconds(10.0, 5.0, 0.8) == 6.0
    assert exposed_seconds(10.0, 5.0, 0.0) == 10.0


def test_rings_between_nodes_use_all_cards_of_a_node() -> None:
    """DGX H100: 450 GB/s x 0.75 inside, 50 GB/s x 0.8 a card between; eight cards for dp, one each with tp 8."""
    machine = cluster("H100-SXM", 8, 4)
    wide = Setting(known(MODELS[0]), BF16, Layout(DeviceMesh(0, 32), dp=32), machine)
    assert axis_link(wide, 8, 1).bytes_per_s == pytest.approx(337.5e9)
    assert axis_link(wide, 32, 1).bytes_per_s == pytest.approx(320e9)
    assert axis_link(wide, 4, 8).bytes_per_s == pytest.approx(40e9)
    assert gather_seconds(320e9, 32, 320e9, 0.0) == pytest.approx(31 / 32)


@pytest.mark.parametrize("tp", [1, 8, 16, 32])
def test_neighbours_on_several_nodes_meet_over_all_cards_however_wide_their_layout(tp: int) -> None:
    wide = Setting(
        known("meta-llama/Llama-3.1-70B"), BF16, Layout(DeviceMesh(0, 32), dp=32 // tp, tp=tp), cluster(nodes=4)
    )
    one = wide.cluster.nic_bytes_per_s * wide.costs.nic
    link = wide.cluster.link_bytes_per_s * wide.costs.link
    assert collective_bytes_per_s(wide, 8) == link
    assert collective_bytes_per_s(wide, 16) == collective_bytes_per_s(wide, 32) == min(link, 8 * one)


def test_a_token_crosses_to_each_node_once() -> None:
    """8 copies among 4 nodes of 8: 3.6 distinct nodes on average, of which a quarter is its own."""
    link = Link(inside=8, bytes_per_s=320e9, link_bytes_per_s=1e15, nic_bytes_per_s=40e9)
    setting = Setting(MIXTURE, BF16, Layout(DeviceMesh(0, 32), dp=32, ep=32), cluster(nodes=4))
    reached = 4 * (1 - 0.75**8) * 3 / 4
    assert exchange_seconds(setting, 14336, 32, link) == pytest.approx(14336 * reached / 40e9)
    near = replace(link, nic_bytes_per_s=1e18, link_bytes_per_s=300e9)
    assert exchange_seconds(setting, 14336, 32, near) == pytest.approx(14336 * 8 * 7 / 8 / 300e9)
    plain = replace(setting, backend=replace(setting.engine, expert_copies=True))
    assert exchange_seconds(plain, 14336, 32, link) == pytest.approx(14336 * 8 * 3 / 4 / 40e9)
    assert exchange_seconds(plain, 14336, 32, near) == exchange_seconds(setting, 14336, 32, near)


def test_states_of_a_megatron_layout_by_hand() -> None:
    """Llama 3.1 70B on tp 8, pp 4, dp 4: float32 gradients scattered, bf16 weights gathered over one card each."""
    model = known("meta-llama/Llama-3.1-70B")
    layout = Layout(DeviceMesh(0, 128), dp=4, tp=8, pp=4)
    point = Setting(model, BF16, layout, cluster("H100-SXM", 8, 16))
    dense, routed = stage_params(point)
    assert (dense, routed) == (pytest.approx(model.n_params() / 32), 0)
    costs = state_costs(point)
    assert costs.step == pytest.approx(6 * dense * 3 / 4 / 40e9, rel=0.01)
    assert costs.optimizer == pytest.approx(32 * dense / 4 / (3.35e12 * 0.85) + 0.01, rel=1e-6)
    assert microbatches(point, TrainWork(1 << 20, 1024, 8192)) == 32


def test_experts_cost_their_share_of_products_and_their_dispatch() -> None:
    """A model with experts is dearer than a dense one of its active size, and far cheaper than one of its full size."""
    model = known("Qwen/Qwen3-30B-A3B")
    point = Setting(model, BF16, Layout(DeviceMesh(0, 8), dp=8, ep=8), cluster("H100-SXM", 8))
    bare = 8192 * (2 * model.active_params() + model.head_flops()) / (989e12 * 0.72 * 0.9)
    seconds = forward_seconds(point, 8192, 512)
    assert 1.5 * bare < seconds < 8192 * 2 * model.n_params() / (989e12 * 0.72 * 0.9)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_long_sample_holds_up_its_dp_rank_as_much_however_many_cp_ranks_share_it(cp: int) -> None:
    work = TrainWork(2**20, 4096.0, 65536, longest_tokens=2**17)

    def longer(size: int) -> float:
        layout = Layout(DeviceMesh(0, 2 * size), dp=2, cp=size)
        point = Setting(known(MODELS[0]), BF16, layout, cluster("H100-SXM", 8, 2))
        return train_seconds(point, work) / train_seconds(point, replace(work, longest_tokens=None)) - 1

    assert longer(cp) == pytest.approx(longer(1), rel=0.05)


def test_a_layout_that_cuts_nothing_runs_as_this_projects_engine() -> None:
    model = known(MODELS[0])
    machine = cluster("H100-SXM", 8)
    engines = {
        Setting(model, BF16, layout, machine).engine.name
        for layout in (Layout(DeviceMesh(0, 8), dp=8), Layout(DeviceMesh(0, 8), dp=8, sharding="fsdp"))
    }
    assert engines == {"replicated", "fsdp"}
    assert Setting(model, BF16, Layout(DeviceMesh(0, 8), dp=4, tp=2), machine).engine.name == "megatron"
