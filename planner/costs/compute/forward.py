"""Predicted seconds of one forward pass: 2 operations per weight and token (arXiv:2001.08361, table 1)."""

from realgraph.planner.costs.compute.cores import core_forward_seconds
from realgraph.planner.costs.layer import LayerCosts, layer_costs
from realgraph.planner.costs.setting import Setting

# Tokens of the busiest expert's device over the mean, with a trained router: an assumption, between 1 of a balance that
# training enforces and the capacity factor of 1.25 at which few tokens are left out (arXiv:2101.03961, sec. 2.2).
EXPERT_IMBALANCE = 1.1


def forward_seconds(setting: Setting, tokens: float, context: float) -> float:
    """One forward pass of `tokens` packed tokens that each see `context` tokens, mean over tokens and layers; logits.

    Of all layers, whatever pp: a pass through all stages.
    """
    if setting.cluster.is_cpu:
        return core_forward_seconds(setting, tokens, context)
    costs = layer_costs(setting)
    return setting.model.layers * layer_seconds(costs, tokens, context) + costs.head.at(tokens, context)


def layer_seconds(costs: LayerCosts, tokens: float, context: float, imbalance: float = EXPERT_IMBALANCE) -> float:
    """The mean layer's forward pass. imbalance: of tokens between the devices that hold experts."""
    own = costs.products.at(tokens, context) + costs.attention.at(tokens, context) + costs.traffic.at(tokens, context)
    moved = costs.tensor.at(tokens, context) + costs.context.at(tokens, context)
    routed = costs.experts.at(tokens, context) + costs.exchange.at(tokens, context)
    return own + moved + imbalance * routed + costs.dispatch.at(tokens, context) + costs.fixed
