"""Tensors of a checkpoint that no step changes: read with the weights, kept whole on every worker of their layer, and
saved again. They are the buffers of a network that files name, in float32."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from realgraph.runtime.parallel.cuts import Box, is_fixed
from realgraph.runtime.parallel.exchange import WeightPart

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def fixed_shapes(config: Any) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a model's, by name: of DeepSeek-V3 the biases of its routers' choice."""
    if config.model_type != "deepseek_v3":
        return {}
    layers = range(config.first_k_dense_replace, config.num_hidden_layers)
    return {f"model.layers.{i}.mlp.gate.e_score_correction_bias": (config.num_local_experts,) for i in layers}


def fixed_parts(network: nn.Module) -> dict[str, WeightPart]:
    """Those that lie here, by name."""
    here = {name: buffer for name, buffer in network.named_buffers() if is_fixed(name)}
    return {name: WeightPart(name, Box((0,) * each.ndim, tuple(each.shape)), each) for name, each in here.items()}


def beyond_the_model(config: Any, name: str) -> bool:
    """True for a tensor of the layers behind the last one, by which DeepSeek-V3 predicts further tokens."""
    layer = _LAYER.match(name)
    last = config.num_hidden_layers
    return config.model_type == "deepseek_v3" and layer is not None and int(layer[1]) >= last
