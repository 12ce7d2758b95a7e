"""Training with experts as NeMo AutoModel measures it, for comparison: no engine of this project does so.

A token goes once to each rank that has one of its experts (DeepEP), where one kernel copies it for them and another
adds their outputs. Its router is one made for measurements: it deals the experts in their order, so that the experts of
a token are neighbours, nearly always on one or two ranks of one node (nemo_automodel/components/moe/layers.py,
FakeBalancedGate).
"""

import math

from msgspec.structs import replace

from realgraph.planner.costs.comm import axis_link, hop_seconds
from realgraph.planner.costs.compute.states import state_costs
from realgraph.planner.costs.compute.train import TrainWork, gpu_train_seconds
from realgraph.planner.costs.layer import PERMUTE_ELEMENTS, Part, layer_costs
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec

READ_AND_WRITTEN = 2  # there and back: a row that arrives, and each of its copies


def dealt_train_seconds(setting: Setting, work: TrainWork) -> float:
    """One train call on GPUs with experts dealt in their order."""
    layers, model = layer_costs(setting), setting.model
    rows = places_met(model, setting.layout.ep)
    moved = READ_AND_WRITTEN * (rows + model.experts_per_token)
    dispatch = layers.dispatch.scaled(moved / (PERMUTE_ELEMENTS * model.experts_per_token))
    changed = replace(layers, dispatch=dispatch, exchange=_exchange(setting, rows))
    return gpu_train_seconds(setting, work, changed, state_costs(setting))


def places_met(model: ModelSpec, places: float) -> float:
    """Mean number of places that a token's experts lie on, dealt in their order, of `places` with equal shares."""
    chosen, each = model.experts_per_token, model.experts / places
    deals = math.lcm(model.experts, chosen) // chosen
    ends = ((first, first + chosen - 1) for first in (deal * chosen % model.experts for deal in range(deals)))
    return sum(last // each - first // each + 1 for first, last in ends) / deals


def _exchange(setting: Setting, rows: float) -> Part:
    """The mean layer's, both ways: rows over the link of a node, and over the NIC one to each other node."""
    model, layout = setting.model, setting.layout
    if layout.ep == 1:
        return Part()
    link = axis_link(setting, layout.ep, 1, "exchange")
    nodes, nbytes = layout.ep / link.inside, setting.element * model.hidden / layout.tp
    near = nbytes * rows * (link.inside - 1) / link.inside / link.link_bytes_per_s
    far = nbytes * places_met(model, nodes) * (nodes - 1) / nodes / link.nic_bytes_per_s
    both = Part(2 * hop_seconds(setting, layout.ep, "exchange"), 2 * max(near, far))
    return both.scaled(model.expert_layers / model.layers)
