"""Seconds of a model's layers and head on one device, affine in the tokens of a pass. Pure formulas for GPUs.

A pass over n tokens costs `fixed + n x token + n x context x position` seconds in each part; the terms depend on the
setting alone and are computed once. Matrix products: 2 operations per weight and token (arXiv:2001.08361, table 1); a
product of n rows reaches n / (n + gemm_tokens) of its best rate, so half-empty tiles cost as many seconds as
gemm_tokens further rows.
"""

from functools import lru_cache

from msgspec import Struct

from realgraph.planner.costs.comm import axis_link, exchange_seconds, gather_seconds, hop_seconds
from realgraph.planner.costs.overhead import Operation, elementwise_bytes_per_s, pass_layer_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.axes import stride_of
from realgraph.planner.plan.layout import DeviceMesh, Layout

NORM_ELEMENTS = 14  # elements of hidden width that a layer's norms, residuals and rotary embedding read and write
MLP_ELEMENTS = 4  # of the MLP's width: gate, up, their product, read again
PERMUTE_ELEMENTS = 8  # of hidden width per token and expert: into experts' order and back, read and written twice
# Rows of a grouped product's tile: each expert's rows fill whole ones (DeepGEMM, README, grouped GEMMs), so the last of
# each expert is half empty.
EXPERT_TILE = 128
# Rate of grouped products over that of one product of the same rows: many small ones of unequal counts. Set with the
# published training speeds of models with experts in view, as the constants of a generation in devices.yaml.
GROUPED_RATE = 0.8
# Of an expert layer's pass: the host waits for the tokens of each expert, and the device then for the launches that no
# queue hides: about 200 at 5 us each, a layer's with its permutations and all-to-alls. Set like GROUPED_RATE.
ROUTING_SECONDS = 1e-3
# Of one expert's product: a kernel's launch takes 4 to 5 us, and experts' products are launched one by one in the
# manner of Megatron-Core's grouped MLP (a cuBLAS call each).
EXPERT_LAUNCH_SECONDS = 4e-6
BACKWARD_ATTENTION_RATIO = 2.5  # five products instead of two: scores are computed again (arXiv:2307.08691)
ALIGNED_ELEMENTS = (
    64  # elements of a side on which tensor cores read whole lines (NVIDIA, Matrix Multiplication Background)
)
HEAD_ELEMENTS = 8  # of 16 bits: a head's row of 16 bytes, which tensor cores load at once (the same guide, sec. 3)
MISALIGNED_RATE = 0.62  # rate of products with a side that is no multiple of it (compare arXiv:2401.14489, sec. 6)


ROW_OPERATIONS: tuple[Operation, ...] = ("gather", "scatter")
ONE_DEVICE = DeviceMesh(0, 1)


class Part(Struct, frozen=True):
    """Seconds of one pass: `fixed + tokens x (token + context x position)`."""

    fixed: float = 0.0
    token: float = 0.0
    position: float = 0.0

    def at(self, tokens: float, context: float) -> float:
        return self.fixed + tokens * (self.token + context * self.position)

    def __add__(self, other: "Part") -> "Part":
        return Part(self.fixed + other.fixed, self.token + other.token, self.position + other.position)

    def scaled(self, factor: float) -> "Part":
        return Part(self.fixed * factor, self.token * factor, self.position * factor)


class LayerCosts(Struct, frozen=True):
    """Mean seconds of one layer's forward pass by what they are spent on, and of the head's forward and backward."""

    products: Part
    experts: Part  # products of routed experts
    gradients: Part  # of the products' weights, in a backward pass
    expert_gradients: Part  # of routed experts' weights
    attention: Part
    traffic: Part
    tensor: Part  # collectives of tensor parallelism
    context: Part  # keys and values round the ring of context parallelism
    dispatch: Part  # of tokens to experts and back: permutation
    exchange: Part  # of tokens to experts and back: all-to-all
    fixed: float  # launches
    routing: float  # the host's wait for the tokens of each expert; serving engines have none
    head: Part
    head_backward: Part


@lru_cache(maxsize=1 << 14)
def layer_costs(setting: Setting) -> LayerCosts:
    """The mean layer's and the head's costs under a setting."""
    at = setting.layout
    alike = Layout(ONE_DEVICE, tp=at.tp, cp=at.cp, ep=at.ep)  # of settings that differ elsewhere, one is computed
    return _layer_costs(Setting(setting.model, setting.role, alike, setting.cluster, setting.factors, setting.engine))


@lru_cache(maxsize=1 << 12)
def _layer_costs(setting: Setting) -> LayerCosts:
    model, engine = setting.model, setting.engine
    experts = model.expert_layers / model.layers
    products, routed, dispatch = _dense_products(setting, 1 - experts), Part(), Part()
    if experts:
        products += _every_token(setting).scaled(experts)
        routed, dispatch = (part.scaled(experts) for part in _expert_layer(setting))
    products, routed = products.scaled(engine.compute), routed.scaled(engine.compute)
    of_weights = setting.costs.backward - 1  # backward, products for gradients of inputs take as long as forward
    head, head_backward = _head(setting)
    return LayerCosts(
        products=products,
        experts=routed,
        gradients=products.scaled(of_weights),
        expert_gradients=routed.scaled(of_weights),
        attention=attention(setting).scaled(engine.compute),
        traffic=elementwise(setting).scaled(engine.compute),
        tensor=tensor_traffic(setting),
        context=context_traffic(setting),
        dispatch=dispatch.scaled(engine.compute),
        exchange=expert_traffic(setting),
        fixed=pass_layer_seconds(setting.costs) + engine.layer_seconds,
        routing=experts * ROUTING_SECONDS,
        head=head.scaled(engine.compute),
        head_backward=head_backward.scaled(engine.compute),
    )


def product(setting: Setting, params: float, width: float) -> Part:
    """A matrix product with `params` weights on this device, its smaller side `width`; a core has no tiles to fill."""
    costs = setting.costs
    rate = setting.flops * costs.gemm * costs.sustained * width / (width + costs.gemm_width)
    if width % ALIGNED_ELEMENTS and not setting.cluster.is_cpu:
        rate *= MISALIGNED_RATE
    token = 2 * params / rate
    return Part(fixed=token * (costs.pass_tokens or costs.gemm_tokens), token=token)


def _layer_product(setting: Setting, params: float, width: float) -> Part:
    """One of a layer's, as fast as the engine has them."""
    return product(setting, params, width).scaled(1 / setting.engine.product_speedup)


def _dense_products(setting: Setting, dense: float) -> Part:
    """Attention's projections, and the MLP of the share `dense` of layers."""
    model, tp = setting.model, setting.layout.tp
    queries, params = model.attention_width() / tp, model.attention_params() / tp + model.attention_copies(tp)
    projections = _layer_product(setting, params, min(model.hidden, queries))
    if not dense:
        return projections
    mlp = _layer_product(setting, model.mlp_params() / tp, min(model.hidden, model.intermediate / tp))
    return projections + mlp.scaled(dense)


def _every_token(setting: Setting) -> Part:
    """The part of an expert layer that every token passes: the router, and a shared expert."""
    model, tp = setting.model, setting.layout.tp
    router = product(setting, model.experts * model.hidden / tp, model.hidden)
    if not model.shared_intermediate:
        return router
    wide = min(model.hidden, model.shared_intermediate / tp)
    return router + _layer_product(setting, 3 * model.hidden * model.shared_intermediate / tp, wide)


def _expert_layer(setting: Setting) -> tuple[Part, Part]:
    """Routed experts: products and permutation."""
    model, layout = setting.model, setting.layout
    tensor = layout.tp if layout.ep == 1 else 1  # with ep, experts are whole on a device
    share = 1 if layout.ep == 1 else layout.tp  # of a micro-batch's tokens that one device routes
    k, local = model.experts_per_token / share, model.experts / layout.ep
    width = min(model.hidden, model.expert_intermediate / tensor)
    grouped = _layer_product(setting, model.expert_params() / tensor / GROUPED_RATE, width)
    tiles = grouped.token * EXPERT_TILE / 2 * local
    routed = Part(grouped.fixed + tiles + 3 * EXPERT_LAUNCH_SECONDS * local, grouped.token * k)
    nbytes = setting.element * model.hidden / share
    permuted = PERMUTE_ELEMENTS * model.experts_per_token * nbytes
    return routed, Part(token=permuted / elementwise_bytes_per_s(setting))


def expert_traffic(setting: Setting) -> Part:
    """All-to-all between the ep ranks, to experts and back; of the mean layer, some of which have no experts."""
    model, layout = setting.model, setting.layout
    if layout.ep == 1 or not model.expert_layers:
        return Part()
    link = axis_link(setting, layout.ep, 1, "exchange")
    row = setting.element * model.hidden / layout.tp
    both = 2 * exchange_seconds(setting, row, layout.ep, link)
    return Part(2 * hop_seconds(setting, layout.ep, "exchange"), both).scaled(model.expert_layers / model.layers)


def attention(setting: Setting) -> Part:
    """Scores and weighted sums; unfused attention also moves every score through memory.

    Kernels for heads of a size that is no multiple of 8 read and multiply as slowly as other misaligned products.
    """
    model, costs = setting.model, setting.costs
    rate = setting.flops * costs.attention * costs.sustained
    if model.head_dim % HEAD_ELEMENTS and not setting.cluster.is_cpu:
        rate *= MISALIGNED_RATE
    position = 4 * model.attention_width() / setting.layout.tp / rate
    if setting.engine.attention == "fused":
        return Part(position=position)
    scores = (
        2 * setting.engine.score_bytes * model.heads / setting.layout.tp
    )  # masked ones are computed too: twice the context
    return Part(position=2 * position + scores / (setting.cluster.memory_bytes_per_s * costs.memory))


def elementwise(setting: Setting) -> Part:
    """Element-wise operations, bound by memory."""
    model, tp = setting.model, setting.layout.tp
    dense = model.intermediate if model.expert_layers < model.layers else 0
    routed = model.experts_per_token * model.expert_intermediate + model.shared_intermediate
    mlp = max(dense, routed if model.expert_layers else 0)
    whole = NORM_ELEMENTS * model.hidden / (tp if setting.engine.sequence_parallel else 1)
    nbytes = setting.element * (whole + MLP_ELEMENTS * mlp / tp) * setting.engine.elementwise
    return Part(token=nbytes / elementwise_bytes_per_s(setting))


def tensor_traffic(setting: Setting) -> Part:
    """Two all-reduces of the hidden states, as gathers and scatters of as many bytes; what overlap leaves of them."""
    return row_traffic(setting).scaled(2)


def row_traffic(setting: Setting) -> Part:
    """The hidden states of all rows gathered on each tensor-parallel rank, and scattered again as sums."""
    layout = setting.layout
    if layout.tp == 1:
        return Part()
    both, nbytes = Part(), setting.element * setting.model.hidden
    for operation in ROW_OPERATIONS:
        rate = axis_link(setting, layout.tp, 1, operation).bytes_per_s
        token = gather_seconds(nbytes, layout.tp, rate, 0.0) * (1 - setting.engine.tp_overlap)
        both += Part(hop_seconds(setting, layout.tp, operation), token)
    return both


def context_traffic(setting: Setting, operation: Operation = "gather") -> Part:
    """Keys and values of the other cp ranks' tokens, in part behind attention (arXiv:2310.01889); in a backward pass
    their gradients, scattered."""
    layout = setting.layout
    if layout.cp == 1:
        return Part()
    link = axis_link(setting, layout.cp, stride_of(layout, "cp"), operation)
    model = setting.model
    width = model.kv_width() if model.latent is None else 2 * model.attention_width()
    nbytes = setting.element * width / layout.tp * (layout.cp - 1)
    return Part(hop_seconds(setting, layout.cp, operation), nbytes / link.bytes_per_s * (1 - setting.engine.cp_overlap))


def _head(setting: Setting) -> tuple[Part, Part]:
    """The head's products and logits, forward; and backward with twice the products."""
    model, tp = setting.model, setting.layout.tp
    if setting.role.head != "lm":
        return Part(), Part()
    products = product(setting, model.vocab * model.hidden / tp, min(model.hidden, model.vocab / tp))
    logits = Part(token=setting.engine.logit_bytes / 2 * model.vocab / tp / elementwise_bytes_per_s(setting))
    return products + logits, products.scaled(2.0) + logits
