"""Parts of a layer, and of a whole training step, computed by hand from data sheets: each term by itself.

H100 SXM: 989 TFLOP/s x 0.72 x 0.9 for products, x 0.54 x 0.9 for attention; 3.35 TB/s x 0.85; NVLink 450 GB/s x 0.75;
a card 50 GB/s x 0.8. Collectives: 10 us, and 2 us for each further rank.
"""

import math

import pytest

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.states import state_costs
from realgraph.planner.costs.train import TrainWork, train_seconds
from realgraph.planner.layout import DeviceMesh, Layout
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
    """Of 8 whole copies gradients are all-reduced in float32; else scattered, and weights gathered in bf16."""
    assert state_costs(setting(dp=8)).step == pytest.approx(2 * 7 / 8 * 4 * PARAMS / LINK + 2 * hop(8))
    cut = state_costs(setting(dp=4, tp=2))
    assert cut.step == pytest.approx(3 / 4 * 6 * PARAMS / 2 / LINK + 2 * hop(4))
