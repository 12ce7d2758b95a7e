"""Predicted seconds of one forward pass: 2 operations per weight and token (arXiv:2001.08361, table 1)."""

from realgraph.planner.cost import Setting, gemm_efficiency
from realgraph.planner.cost_comm import allreduce_seconds, collective_bytes_per_s
from realgraph.planner.cost_overhead import elementwise_bytes_per_s, pass_layer_seconds


def forward_seconds(setting: Setting, tokens: float, context: float) -> float:
    """One forward pass of `tokens` packed tokens that each see `context` tokens on average; logits of all of them."""
    model, layout, costs = setting.model, setting.layout, setting.costs
    width = min(model.hidden, model.expert_intermediate or model.intermediate) / layout.tp
    rate = setting.flops * gemm_efficiency(costs, tokens, width)
    products = tokens * (2 * model.active_params() + model.head_flops(setting.role.head)) / layout.tp / rate
    attended = 4 * model.heads * model.head_dim * context * model.layers * tokens / layout.tp
    attention = attended / (setting.flops * costs.attention)
    elementwise = setting.element * model.layers * tokens * (14 * model.hidden + 4 * model.intermediate) / layout.tp
    traffic = elementwise / elementwise_bytes_per_s(setting)
    nbytes = setting.element * tokens * model.hidden
    reduced = 2 * model.layers * allreduce_seconds(nbytes, layout.tp, collective_bytes_per_s(setting, layout.tp))
    return products + attention + traffic + reduced + model.layers * pass_layer_seconds(costs)
