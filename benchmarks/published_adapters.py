"""Low-rank adapters (LoRA, arXiv:2106.09685) beside frozen weights: for comparison, no engine of this project trains
them.

Adapters lie beside every matrix of attention and of the MLP, router and head aside.
"""

import math

from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.states import state_costs
from realgraph.planner.costs.compute.train import TrainWork, gpu_train_seconds
from realgraph.planner.costs.layer import ALIGNED_ELEMENTS, Part, layer_costs, product
from realgraph.planner.costs.overhead import elementwise_bytes_per_s
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec

ADAPTER_OUTPUTS = 4  # of an adapter's: written, read with the matrix's own output, and their sum written


def adapted_train_seconds(setting: Setting, work: TrainWork, rank: int) -> float:
    """One train call on GPUs: adapters run beside the frozen products, and alone have gradients and states."""
    layers, adapters = layer_costs(setting), adapter_costs(setting, rank)
    adapted = replace(layers, products=layers.products + adapters, gradients=adapters, expert_gradients=Part())
    states = state_costs(setting, adapted_share(setting.model, setting.role, rank))
    return gpu_train_seconds(setting, work, adapted, states)


def adapter_costs(setting: Setting, rank: int) -> Part:
    """The mean layer's forward pass through adapters: two thin products beside each matrix, which read its input, write
    an output as wide as its own, and add that to it: apart from the matrix's own product. The rank fills whole tiles.
    """
    model = setting.model
    queries, keys = model.attention_width(), model.kv_heads * model.head_dim
    inputs, outputs = 3.0 * model.hidden + queries, queries + 2.0 * keys + model.hidden
    experts, inner = model.expert_layers / model.layers, model.mlp_matrices - 1
    for share, wide in (
        (1 - experts, model.intermediate),
        (experts * model.experts_per_token, model.expert_intermediate),
    ):
        inputs += share * (inner * model.hidden + wide)
        outputs += share * (inner * wide + model.hidden)
    tile = ALIGNED_ELEMENTS * math.ceil(rank / ALIGNED_ELEMENTS)
    thin = product(setting, tile * (inputs + outputs) / setting.layout.tp, tile)
    moved = setting.element * (inputs + ADAPTER_OUTPUTS * outputs) / setting.layout.tp
    return (thin + Part(token=moved / elementwise_bytes_per_s(setting))).scaled(setting.engine.compute)


def adapted_share(model: ModelSpec, role: ModelRole, rank: int) -> float:
    """Parameters of adapters over those of the model."""
    return lora_params(model, rank) / model.n_params(role.head)


def lora_params(model: ModelSpec, rank: int) -> int:
    """Parameters of adapters of `rank` on attention's and the MLP's matrices: rank x (rows + columns) each."""
    queries, keys = model.attention_width(), model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    dense = model.mlp_matrices * (model.hidden + model.intermediate)
    routed = 3 * model.experts * (model.hidden + model.expert_intermediate)
    mlps = (model.layers - model.expert_layers) * dense + model.expert_layers * routed
    return rank * (model.layers * attention + mlps)
