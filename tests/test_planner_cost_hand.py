"""Parts of a layer, of a training step and of a decode step, by hand from data sheets: each term by itself.

H100 SXM: 989 TFLOP/s x 0.72 x 0.9 for products, x 0.54 x 0.9 for attention; 3.35 TB/s x 0.85; NVLink 450 GB/s x 0.75;
a card 50 GB/s x 0.8. Collectives: 10 us, and 2 us for each further rank.
"""

import math

import pytest
from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.states import state_costs
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.generate.decode import decode_step
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

PRODUCTS, ATTENTION = 989e12 * 0.72 * 0.9, 989e12 * 0.54 * 0.9  # operations a second
MEMORY, LINK, NIC = 3.35e12 * 0.85, 450e9 * 0.75, 50e9 * 0.8  # bytes a second
ROWS = 250  # of tokens whose seconds a product costs besides
LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-235B-A22B"
PARAMS = 8_030_261_248  # of Llama 3.1 8B
PROJECTIONS, MLP, HEAD = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336, 4096 * 128256


def setting(name: str = LLAMA, **axes: int) -> Setting:
    n_devices = math.prod(size for axis, size in axes.items() if axis != "ep")
    layout = Layout(DeviceMesh(0, n_devices), **axes)  # type: ignore[arg-type]
    role = ModelRole(trainable=True, dtype="bfloat16")
    return Setting(known(name), role, layout, cluster("H100-SXM", 8, max(1, n_devices // 8)))


def product(params: float, width: float) -> float:
    """Seconds of a token in a product whose smaller side is `width`: half the rate at 128 columns."""
    return 2 * params / (PRODUCTS * width / (width + 128))


def hop(ranks: int) -> float:
    return 10e-6 + 2e-6 * (ranks - 1)


def test_the_parts_of_a_dense_layer() -> None:
    parts, token = layer_costs(setting()), product(PROJECTIONS + MLP, 4096)
    assert (parts.products.token, parts.products.fixed) == pytest.approx((token, ROWS * token), rel=1e-6)
    assert parts.attention.position == pytest.approx(4 * 32 * 128 / ATTENTION)
    assert parts.traffic.token == pytest.approx(2 * (14 * 4096 + 4 * 14336) / MEMORY)
    assert parts.fixed == pytest.approx(10e-6)
    assert parts.head.token == pytest.approx(product(HEAD, 4096) + 10 * 128256 / MEMORY)
    assert parts.head_backward.token == pytest.approx(2 * product(HEAD, 4096) + 10 * 128256 / MEMORY)
    unused = (parts.experts, parts.tensor, parts.context, parts.dispatch, parts.exchange)
    assert all(part.at(4096, 2048) == 0 for part in unused) and parts.routing == 0


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_ranks_share_products_and_gather_and_scatter_four_times(tp: int) -> None:
    parts = layer_costs(setting(tp=tp))
    each = product(PROJECTIONS / tp, 4096 / tp) + product(MLP / tp, min(4096, 14336 / tp))
    assert parts.products.token == pytest.approx(each, rel=1e-6)
    assert parts.tensor.fixed == pytest.approx(4 * hop(tp))
    assert parts.tensor.token == pytest.approx(0.4 * 4 * (tp - 1) / tp * 2 * 4096 / LINK)  # 0.6 hide behind products
    assert parts.traffic.token == pytest.approx(2 * (14 * 4096 + 4 * 14336) / tp / MEMORY)


@pytest.mark.parametrize(("tp", "cp", "rate"), [(1, 4, LINK), (8, 2, NIC)])
def test_context_parallel_ranks_pass_keys_and_values_round(tp: int, cp: int, rate: float) -> None:
    """8 KV heads of 128, keys and values, 2 bytes; half of it hides behind attention."""
    ring = layer_costs(setting(tp=tp, cp=cp)).context
    assert ring.fixed == pytest.approx(hop(cp))
    assert ring.token == pytest.approx((cp - 1) * 2 * 2 * 8 * 128 / tp / rate / 2)


def test_the_parts_of_an_expert_layer() -> None:
    """16 of 128 experts on each of 8 devices, 8 of a token; tiles of 128 rows are half empty; 4 us a launch."""
    parts = layer_costs(setting(QWEN, dp=8, ep=8))
    token = product(3 * 4096 * 1536, 1536) / 0.8
    assert parts.experts.token == pytest.approx(8 * token)
    assert parts.experts.fixed == pytest.approx((ROWS + 16 * 64) * token + 3 * 4e-6 * 16)
    assert parts.dispatch.token == pytest.approx(8 * 8 * 2 * 4096 / MEMORY)
    assert parts.exchange.token == pytest.approx(2 * 8 * 7 / 8 * 2 * 4096 / LINK)
    assert parts.exchange.fixed == pytest.approx(2 * hop(8))
    assert parts.routing == pytest.approx(1e-3)


@pytest.mark.parametrize("count", [1, 3])
def test_a_training_step_on_one_device(count: int) -> None:
    """Backward: twice the products and element-wise traffic, 2.5 times attention; 12 bytes a parameter to add gradients
    up, 32 for AdamW; 10 ms of a step."""
    tokens, context = 8192, 1024
    products, head = product(PROJECTIONS + MLP, 4096), product(HEAD, 4096)
    attention, traffic = context * 4 * 4096 / ATTENTION, 2 * (14 * 4096 + 4 * 14336) / MEMORY
    layer = (tokens + ROWS) * 3 * products + tokens * (3.5 * attention + 3 * traffic) + 2 * 10e-6
    ends = (tokens + ROWS) * 3 * head + tokens * 20 * 128256 / MEMORY
    sums, adamw = (count - 1) * 12 * PARAMS / MEMORY, 32 * PARAMS / MEMORY + 0.01
    seconds = train_seconds(setting(dp=1), TrainWork(count * tokens, 2.0 * context, tokens))
    assert seconds == pytest.approx(count * (32 * layer + ends) + sums + adamw, rel=1e-4)


def test_states_wait_for_two_collectives_a_step() -> None:
    """Gradients of 8 whole copies are all-reduced in float32; else scattered, and weights gathered in bf16."""
    assert state_costs(setting(dp=8)).step == pytest.approx(2 * 7 / 8 * 4 * PARAMS / LINK + 2 * hop(8))
    cut = state_costs(setting(dp=4, tp=2))
    assert cut.step == pytest.approx(3 / 4 * 6 * PARAMS / 2 / LINK + 2 * hop(4))


def test_a_decode_step_of_experts_over_two_nodes() -> None:
    """Qwen3 235B-A22B on two replicas of tp 8 whose 16 devices hold 8 of 128 experts each, whole; 8 of a token.

    Fixed: 0.6 ms, of each of 94 layers 10 us and 30 us for small kernels, and a dispatch and a combine between nodes.
    """
    step = decode_step(setting(QWEN, dp=2, tp=8, ep=16))
    expert, layers = 3 * 4096 * 1536, 94
    assert step.expert_read == pytest.approx(2 * layers * 8 * expert / MEMORY * (1 + 64 / 1536))
    assert step.fixed == pytest.approx(6e-4 + layers * (10e-6 + 30e-6) + 2 * layers * (10e-6 + 15e-6))
    attention = 2 * 4096 * 64 * 128 + 2 * 4096 * 4 * 128 + 2 * 128
    dense = layers * (attention + 2 * 4096 + 128 * 4096) + 4096 + 4096 * 151936
    assert step.dense_read == pytest.approx(2 * dense / 8 / MEMORY, rel=1e-6)
    assert step.cache_token == pytest.approx(layers * 2 * 2 * 4 * 128 / 4 / (3.35e12 * 0.75))
    rate = 989e12 * 0.72 * 512 / (512 + 128)
    assert step.expert_token == pytest.approx(2 * 8 * layers * expert / 8 / (rate * 0.8))
    exchanged = 2 * layers * 2 * 4096 / 8 * (1 - 0.5**8) / NIC  # once to the other node, unless all 8 are here
    elementwise = layers * 2 * (14 * 4096 + 4 * 12288 / 8) / MEMORY
    assert step.sequence == pytest.approx(1e-6 + elementwise + exchanged)
    one = 1 - (1 - 8 / 128) ** (4 * 2)  # of the experts, by 4 sequences on each replica
    direct = 2 * layers * (10e-6 + 4 * 7 * 2 * 4096 / LINK)
    expected = step.dense_read + one * step.expert_read + 4 * (1000 * step.cache_token + step.sequence) + direct
    assert step.seconds(4, 1000) == pytest.approx(expected + step.fixed)


@pytest.mark.parametrize(("longest", "mean", "refills"), [(64, 64.0, 3.0), (1000, 100.0, 3 * math.sqrt(100.0))])
def test_on_a_cpu_each_step_that_takes_prompts_in_is_a_pass_of_its_own(
    longest: int, mean: float, refills: float
) -> None:
    """32 samples on 8 slots: three times all of them at once where lengths are equal, else every 10th step."""
    model, role = known("Qwen/Qwen3-0.6B"), ModelRole(dtype="float32")
    machine = cluster("cpu", 1)
    work = GenerateWork(32, 8, 16.0, mean, longest, 8)

    def seconds(of_a_layer: float) -> float:
        costs = replace(device_kind("cpu").costs, pass_layer_seconds=of_a_layer)
        return generate_seconds(Setting(model, role, Layout(DeviceMesh(0, 1)), machine, costs), work)

    assert seconds(1e-3) - seconds(0.0) == pytest.approx(28e-3 * (1 + refills), rel=0.02)


def test_each_sample_of_a_call_is_sent_and_of_a_rollout_taken_in_besides() -> None:
    """64 samples on two ranks: 32 each, 1 ms a sample, 2 ms of each that generation takes in, 5 ms of the call."""
    bare = replace(device_kind("cpu").costs, call_seconds=0.0, sample_seconds=0.0, admission_seconds=0.0)
    costs = replace(bare, call_seconds=5e-3, sample_seconds=1e-3, admission_seconds=2e-3)
    layout, machine = Layout(DeviceMesh(0, 2), dp=2), cluster("cpu", 2)
    before, after = (
        Setting(known("Qwen/Qwen3-0.6B"), ModelRole(dtype="float32"), layout, machine, each) for each in (bare, costs)
    )
    rollout, packed = GenerateWork(64, 8, 16.0, 32.0, 64, 8), TrainWork(64 * 48, 48.0, 1024)
    assert generate_seconds(after, rollout) - generate_seconds(before, rollout) == pytest.approx(5e-3 + 32 * 3e-3)
    for seconds in (train_seconds, inference_seconds):
        assert seconds(after, packed) - seconds(before, packed) == pytest.approx(5e-3 + 32e-3)
