"""Seconds of packed passes on a CPU core, and what cutting a model over cores adds. Pure formulas.

On a core few fixed seconds, which `realgraph profile` measures, matter as much as arithmetic, and a backward pass takes
a measured multiple of its forward pass. Where a model is cut, each core has its part of the products, and collectives
whose rates and latencies are measured each by itself; nothing hides them.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.comm import allreduce_seconds, axis_link, hop_seconds
from realgraph.planner.costs.compute.pipeline import MicroBatch
from realgraph.planner.costs.layer import (
    ONE_DEVICE,
    Part,
    attention,
    context_traffic,
    elementwise,
    expert_traffic,
    product,
    row_traffic,
    tensor_traffic,
)
from realgraph.planner.costs.memory.memory import master_bytes
from realgraph.planner.costs.overhead import pass_layer_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.axes import stride_of
from realgraph.planner.plan.layout import Layout, Recompute

# Fixed seconds of a layer whose backward pass computes norms, rotations and activations again, over those of its
# forward pass: torch asks Python about every operation, forward and again. Measured with 64 to 512 columns: 5.5 to 8.
SELECTIVE_FIXED = 6.5
# Over a layer's fixed seconds, those that its experts have besides: choosing and sorting, and of each expert that it
# holds. Measured with 4, 16 and 32 experts.
ROUTING_FIXED, EXPERT_FIXED = 0.4, 0.06


class CorePass(Struct, frozen=True):
    """Seconds of a forward pass on one core."""

    layer: Part  # the mean layer's own work, without routed experts and element-wise operations
    routed: Part  # its routed experts' products
    elementwise: Part
    moved: Part  # its collectives
    moved_back: Part  # those of its backward pass
    head: Part
    ends: Part  # collectives of the embedding and the head, as long in a backward pass

    def own(self, tokens: float, context: float, imbalance: float = 1.0) -> float:
        """Seconds of the mean layer's work. imbalance: of tokens between the devices that hold experts."""
        rest = self.layer.at(tokens, context) + self.elementwise.at(tokens, context)
        return rest + imbalance * self.routed.at(tokens, context)


def core_pass(setting: Setting) -> CorePass:
    """The costs of passes under a setting; tokens are those of a micro-batch on each context-parallel rank."""
    at = setting.layout
    # of settings that differ elsewhere, one is computed
    return _core_pass(replace(setting, layout=Layout(ONE_DEVICE, tp=at.tp, cp=at.cp, ep=at.ep), backend=setting.engine))


@lru_cache(maxsize=1 << 12)
def _core_pass(setting: Setting) -> CorePass:
    model = setting.model
    width = min(model.hidden, model.intermediate)
    across = tensor_traffic(setting) + expert_traffic(setting)
    return CorePass(
        layer=_dense_products(setting) + attention(setting) + Part(pass_layer_seconds(setting.costs)),
        routed=_routed_products(setting),
        elementwise=elementwise(setting),
        moved=across + _count_exchange(setting) + context_traffic(setting),
        moved_back=across + context_traffic(setting, "scatter"),
        head=product(setting, model.head_flops(setting.role.head) / 2 / setting.layout.tp, width),
        ends=_row_ends(setting),
    )


def _dense_products(setting: Setting) -> Part:
    """The mean layer's products but those of routed experts; a core's pieces are narrower by tp."""
    model, tp = setting.model, setting.layout.tp
    mlp = (model.layers - model.expert_layers) * model.mlp_params()
    routed = model.expert_layers * model.experts_per_token * model.expert_params()
    rest = model.active_params() - mlp - routed
    wide = min(model.hidden, model.intermediate / tp)
    projections = product(setting, rest / model.layers / tp, min(model.intermediate, model.hidden / tp))
    return projections + product(setting, mlp / model.layers / tp, wide)


def _routed_products(setting: Setting) -> Part:
    """Those of routed experts, each of which has a product of its own."""
    model, layout = setting.model, setting.layout
    if not model.expert_layers:
        return Part()
    tensor = layout.tp if layout.ep == 1 else 1  # with ep, experts are whole on a device
    local = model.experts / layout.ep
    one = product(setting, model.expert_params() / tensor, min(model.hidden, model.expert_intermediate / tensor))
    of_all = one.token * model.experts_per_token / (1 if layout.ep == 1 else layout.tp)
    fixed = (ROUTING_FIXED + EXPERT_FIXED * local) * pass_layer_seconds(setting.costs)
    return Part(fixed + local * one.fixed, of_all).scaled(model.expert_layers / model.layers)


def _count_exchange(setting: Setting) -> Part:
    """Before tokens go to experts, each device tells the others how many come."""
    model, ep = setting.model, setting.layout.ep
    return Part(hop_seconds(setting, ep, "exchange") * (model.expert_layers / model.layers))


def _row_ends(setting: Setting) -> Part:
    """The embedding's rows scattered and the last states gathered; two small sums of the head's over its vocabulary."""
    layout = setting.layout
    if layout.tp == 1:
        return Part()
    sums = 4 * hop_seconds(setting, layout.tp) if setting.role.head == "lm" else 0.0
    return row_traffic(setting) + Part(sums)


def core_forward_seconds(setting: Setting, tokens: float, context: float) -> float:
    """One forward pass of `tokens` packed tokens that each see `context` tokens on average; logits of all of them."""
    costs = core_pass(setting)
    layer = costs.own(tokens, context) + costs.moved.at(tokens, context)
    return setting.model.layers * layer + costs.head.at(tokens, context) + costs.ends.at(tokens, context)


def core_microbatch(
    setting: Setting, size: tuple[float, float], recompute: Recompute, imbalance: float, transfer: float
) -> MicroBatch:
    """Forward and backward of one micro-batch. size: computed tokens on each cp rank, and tokens that each sees.

    imbalance: see `CorePass.own`, where experts are spread. transfer: from stage to stage.
    """
    costs, ratio = core_pass(setting), setting.costs.backward
    own = costs.own(*size, imbalance if setting.layout.ep > 1 else 1.0)
    moved, back = costs.moved.at(*size), costs.moved_back.at(*size)
    again = 0.0
    if recompute == "full":
        again = own + moved
    elif recompute == "selective":
        again = costs.elementwise.at(*size) + SELECTIVE_FIXED * pass_layer_seconds(setting.costs)
    head = (1 + ratio) * costs.head.at(*size) + 2 * costs.ends.at(*size)
    return MicroBatch(own + moved, ratio * own + back + again, head, transfer)


def shared_gradients_seconds(setting: Setting) -> float:
    """Sums of gradients in each optimizer step of what cut copies share: norms over tp, a tied embedding over the first
    and the last stage."""
    model, layout, nbytes = setting.model, setting.layout, master_bytes(setting.role)
    seconds = 0.0
    if layout.tp > 1:
        norms = nbytes * (model.norms * model.hidden + 2 * model.qk_norm * model.head_dim) * model.layers / layout.pp
        seconds += allreduce_seconds(norms, layout.tp, axis_link(setting, layout.tp, 1).bytes_per_s, 0.0)
        seconds += 4 * hop_seconds(setting, layout.tp)  # these, and the gradient's norm
    if layout.pp > 1 and model.tied and setting.role.head == "lm":
        rate = axis_link(setting, 2, stride_of(layout, "pp")).bytes_per_s
        seconds += allreduce_seconds(nbytes * model.vocab * model.hidden / layout.tp, 2, rate, 0.0)
        seconds += 2 * hop_seconds(setting, 2)
    return seconds
