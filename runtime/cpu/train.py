"""A differentiable walk over a model's own decoder layers, with fewer operations than its forward: for a CPU.

A small model in float32 spends most of a pass on moving activations, not on its products. This walk writes queries,
keys and values side by side (and gate and up), turns queries and keys at once, and has its own backward for the norms,
the rotation and the gate. It reads the module's own parameters (no weight is copied, so none can be stale) and leaves
the gradients there. It knows the decoders of `lean_decode`; every other model takes its own forward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from realgraph.runtime.attention.attention import PartOfRow, ScoreShape, attend
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.cpu.decode import Layer, Norm, decoder_layer, lean_applies


def lean_trains(network: Any) -> bool:
    """True where the walk may stand for the forward of `network.model`: see `lean_applies`; also where FSDP cuts its
    layers and computes in their own dtype. Not where some products are kept and others computed again in the backward
    pass, which names operations that the walk does not use."""
    selective = getattr(network, "recomputed", "none") == "selective"
    sharded = {m for m in network.modules() if isinstance(m, FSDPModule) and _computes_in_own_dtype(m)}
    return (
        lean_applies(network, frozenset(cast(set[nn.Module], sharded)))
        and network.config.hidden_act == "silu"
        and not selective
    )


def _computes_in_own_dtype(part: FSDPModule) -> bool:
    """True where the gathered parameters have the dtype of the sharded ones."""
    return part._get_fsdp_state()._mp_policy.param_dtype is None


# of a model: its last layers, and the residual stream [T, hidden] before them
Part = tuple[Sequence[nn.Module], Tensor]


def lean_hidden(
    model: Any,
    row: tuple[Tensor, Tensor],
    segments: Segments | PartOfRow,
    rows: Tensor | None = None,
    part: Part | None = None,
) -> Tensor:
    """The final norm's output for a row of packed tokens [T] int64 at positions [T] (`segments.n_rows` of them): [T,
    hidden], or [n, hidden] of those that `rows` names ([n] int64), the only ones that then pass through the last MLP.
    part: what is left of the way, where some of it has been gone elsewhere.

    Equal to `model(...).last_hidden_state[0]`, and its gradients, but for the order of float32 sums.
    """
    tokens, positions = row
    layers, x = part or (list(model.layers), model.embed_tokens(tokens[None])[0])
    x = lean_layers(model, layers, (x, positions), segments, rows)
    norm = model.norm
    return cast(Tensor, _RMSNorm.apply(x, norm.weight, norm.variance_epsilon))  # type: ignore[no-untyped-call]


def lean_layers(
    model: Any,
    layers: Sequence[nn.Module],
    row: tuple[Tensor, Tensor],
    segments: Segments | PartOfRow,
    rows: Tensor | None = None,
) -> Tensor:
    """The residual stream behind some of the model's layers that follow each other. row: the stream before them [T,
    hidden], where tensor parallelism cuts the rows those of this rank, and all positions [T]; rows: as in
    `lean_hidden`."""
    x, positions = row
    cos, sin = model.rotary_emb(x, positions[None])
    half = cos.shape[-1] // 2
    # rotate_half(x) sin = roll(x) signed
    tables = cos[0][:, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
    again = torch.is_grad_enabled() and any(getattr(module, "gradient_checkpointing", False) for module in layers)
    last = len(layers) - 1
    for number, module in enumerate(layers):
        wanted = rows if number == last else None
        step = partial(
            _between_hooks, module, partial(_through_layer, module, what=(tables, wanted), segments=segments)
        )
        x = checkpoint(step, x, use_reentrant=False, preserve_rng_state=False) if again else step(x)
    return x


def _between_hooks(module: nn.Module, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """step(x), in place of the forward of a layer; where FSDP cuts that, its hooks gather the weights before."""
    if not isinstance(module, FSDPModule):
        return step(x)
    vars(module)["forward"] = step
    try:
        return cast(Tensor, nn.Module.__call__(module, x))  # a layer's own call would make a checkpoint again
    finally:
        del vars(module)["forward"]


def _through_layer(
    module: nn.Module, x: Tensor, what: tuple[tuple[Tensor, Tensor], Tensor | None], segments: Segments | PartOfRow
) -> Tensor:
    """The residual stream behind one layer; arguments as of `_attend`."""
    layer = decoder_layer(module)
    x = _attend(layer, x, what, segments)
    both = _side_by_side(_entering(layer, layer.mlp_norm, x), (layer.gate, layer.up))
    gated: Tensor = _Gate.apply(both)  # type: ignore[no-untyped-call]
    return _add_linear(x, gated, layer.down)


def _entering(layer: Layer, norm: Norm, x: Tensor) -> Tensor:
    """The normed rows that an attention or an MLP begins with: all of them, of x [own rows, hidden]."""
    own = cast(Tensor, _RMSNorm.apply(x, norm.weight, norm.epsilon))  # type: ignore[no-untyped-call]
    return own if layer.edges is None else layer.edges.enter(own[None])[0]


def _attend(
    layer: Layer, x: Tensor, what: tuple[tuple[Tensor, Tensor], Tensor | None], segments: Segments | PartOfRow
) -> Tensor:
    """x [own rows, hidden] plus the layer's attention. what: cos and signed sin, [T, 1, head_dim] each, and which rows
    of the result are wanted (None: all)."""
    (tables, rows), dim = what, layer.head_dim
    inside = _entering(layer, layer.norm, x)
    qkv = _side_by_side(inside, (layer.q, layer.k, layer.v)).view(len(inside), -1, dim)
    heads, kv_heads = len(layer.q.weight) // dim, len(layer.k.weight) // dim
    turned, value = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
    weight, eps = None, 0.0
    if layer.q_norm is not None and layer.k_norm is not None:
        weight = torch.cat([layer.q_norm.weight.expand(heads, dim), layer.k_norm.weight.expand(kv_heads, dim)])
        eps = layer.q_norm.epsilon
    turned = _NormRotate.apply(turned, weight, eps, tables)  # type: ignore[no-untyped-call]
    query, key = torch.split(turned, [heads, kv_heads], 1)
    window = layer.head.window
    if window is not None and window >= segments.longest:
        window = None
    out = attend((query, key, value), segments, layer.head.scale, ScoreShape(window))
    out = out.reshape(len(inside), -1)
    if rows is not None:
        x, out = x.index_select(0, rows), out.index_select(0, rows)
    return _add_linear(x, out, layer.out)


def _side_by_side(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The outputs of several layers for one input x [T, d], next to each other: [T, sum of their widths]."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return cast(Tensor, _SideBySide.apply(x, *weights, *biases))  # type: ignore[no-untyped-call]


def _add_linear(residual: Tensor, x: Tensor, layer: nn.Linear) -> Tensor:
    """residual + layer(x), of which a layer that sums over ranks gives this rank's rows"""
    if type(layer) is not nn.Linear:
        return residual + cast(Tensor, layer(x[None]))[0]
    out = torch.addmm(residual, x, layer.weight.t())
    return out if layer.bias is None else out + layer.bias


class _SideBySide(torch.autograd.Function):
    """x [T, d] times n weights [w, d] each, plus n biases ([w] or None): [T, sum of w]. Joining the weights instead
    would keep a second copy of them until the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> Tensor:
        n = len(parameters) // 2
        weights = [weight for weight in parameters[:n] if weight is not None]
        out = x.new_empty(x.shape[0], sum(len(weight) for weight in weights))
        ctx.widths = [len(weight) for weight in weights]
        ctx.biased = [bias is not None for bias in parameters[n:]]
        ctx.save_for_backward(x, *weights)
        for piece, weight, bias in zip(torch.split(out, ctx.widths, 1), weights, parameters[n:], strict=True):
            if bias is None:
                torch.mm(x, weight.t(), out=piece)
            else:
                torch.addmm(bias, x, weight.t(), out=piece)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        pieces = torch.split(grads[0], ctx.widths, 1)
        d_x = torch.mm(pieces[0], weights[0])
        for piece, weight in zip(pieces[1:], weights[1:], strict=True):
            d_x.addmm_(piece, weight)
        d_biases = [piece.sum(0) if biased else None for piece, biased in zip(pieces, ctx.biased, strict=True)]
        return d_x, *(torch.mm(piece.t(), x) for piece in pieces), *d_biases


def _inverse(x: Tensor, eps: float) -> Tensor:
    """[..., 1]: 1 / sqrt(mean(x^2) + eps), of the last dim."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(d x, d weight) of y = u weight, u = x inverse: d u = grad weight; d x = inverse (d u - u mean(d u u)).

    grad, x: [..., d]; inverse: [..., 1]; weight: [d], or [n, d] for x of [T, n, d]. Source: RMSNorm, arXiv:1910.07467.
    """
    unit = x * inverse
    along = grad * unit
    d_weight = along.sum(0) if weight.dim() > 1 else along.view(-1, weight.shape[0]).sum(0)
    mean = along.mul_(weight).sum(-1, keepdim=True).mul_(-1 / x.shape[-1])
    d_x = torch.mul(grad, weight, out=along).addcmul_(unit, mean).mul_(inverse)
    return d_x, d_weight


class _RMSNorm(torch.autograd.Function):
    """weight x / sqrt(mean(x^2) + eps) over the last dim. x: [T, d]; weight: [d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        return *_norm_backward(grads[0], x, weight, inverse), None


class _NormRotate(torch.autograd.Function):
    """A norm per head where there is a weight [n, d], then the rotary embedding: x [T, n, d], tables [T, 1, d] each.

    The rotation's transpose is the rotation back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, signed = tables
        inverse, unit = None, x
        if weight is not None:
            inverse = _inverse(x, eps)
            unit = torch.mul(x, inverse).mul_(weight)
        ctx.half = x.shape[-1] // 2
        # without a norm the backward needs no x, which would keep the projections' output alive
        ctx.save_for_backward(None if weight is None else x, weight, inverse, cos, signed)
        return torch.mul(unit, cos).addcmul_(unit.roll(ctx.half, -1), signed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse, cos, signed = ctx.saved_tensors
        back = torch.mul(grads[0], cos).addcmul_(grads[0].roll(ctx.half, -1), signed, value=-1)
        if weight is None:
            return back, None, None, None
        return *_norm_backward(back, x, weight, inverse), None, None


class _Gate(torch.autograd.Function):
    """silu(gate) up: [T, 2 d], gate and up side by side, -> [T, d]. The backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grads[0], out=d_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=d_gate)
        return (out,)
