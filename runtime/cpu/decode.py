"""A forward pass that walks a model's own layers with fewer operations than its forward: for small models on a CPU.

Small models spend a step on the cost of issuing operations, not on arithmetic. This walk reads the very
parameters of the module (nothing is copied or fused), joins what needs no operation of its own, and leaves the rotary
tables to the module. It knows pre-norm decoders with gated MLPs; every other model takes its own forward.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from realgraph.runtime.attention.passes import Head, RolloutPass

# the four are line by line the same decoder but for query and key norms, biases and windows
_KNOWN = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


@dataclass(frozen=True)
class Norm:
    """RMS norm of the last dim: weight x / sqrt(mean(x^2) + eps), in five operations; torch's own takes eight."""

    weight: Tensor
    eps: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, self.weight).mul_(inverse)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, torch.tensor(module.variance_epsilon), module.variance_epsilon)


class RowEdges(Protocol):
    """The way of a rank's rows into an attention or an MLP; the layer behind it knows the way out."""

    def enter(self, x: Tensor) -> Tensor:
        """[1, own rows, hidden] -> [1, all rows, hidden]"""
        ...


@dataclass(frozen=True)
class Layer:
    """One decoder layer's modules, as found."""

    index: int
    head: Head
    norm: Norm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    out: nn.Linear
    mlp_norm: Norm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: nn.Module
    head_dim: int
    edges: RowEdges | None  # where tensor parallelism cuts it


def decoder_layer(module: Any) -> Layer:
    """Find the modules of one decoder layer of a known architecture."""
    attention, mlp = module.self_attn, module.mlp
    window = getattr(attention, "sliding_window", None)
    if type(attention).__name__ == "MistralAttention":
        window = attention.config.sliding_window
    normed = hasattr(attention, "q_norm")
    return Layer(
        index=attention.layer_idx,
        head=Head(attention.scaling, window, None),
        norm=_norm(module.input_layernorm),
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        q_norm=_norm(attention.q_norm) if normed else None,
        k_norm=_norm(attention.k_norm) if normed else None,
        out=attention.o_proj,
        mlp_norm=_norm(module.post_attention_layernorm),
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        act=mlp.act_fn,
        head_dim=attention.head_dim,
        edges=getattr(attention.o_proj, "edges", None),
    )


def lean_applies(module: Any, called: frozenset[nn.Module] = frozenset()) -> bool:
    """True where a walk knows this network: a backbone of `_KNOWN` in float32 on a CPU, of plain layers without hooks;
    or one that tensor parallelism cuts, with its own hooks of attentions and MLPs, and sums behind them. called: the
    modules that the walk calls, so that their hooks take part."""
    if type(getattr(module, "model", None)).__name__ not in _KNOWN or any(
        p.dtype != torch.float32 or p.device.type != "cpu" for p in module.parameters()
    ):
        return False
    layers = [decoder_layer(layer) for layer in module.model.layers]
    cut = all(layer.edges is not None for layer in layers)
    edged = {part for layer in module.model.layers for part in (layer.self_attn, layer.mlp)} if cut else set()
    # modules that FSDP has cut have hooks, too
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in module.modules()
        if m not in edged and m not in called
    )
    plain = all(type(m) is nn.Linear for y in layers for m in (y.q, y.k, y.v, y.gate, y.up))
    return not hooked and plain and all(cut or type(m) is nn.Linear for y in layers for m in (y.out, y.down))


def _add_linear(residual: Tensor, x: Tensor, layer: nn.Linear) -> Tensor:
    """residual + layer(x), with its sum over ranks where tensor parallelism cuts it"""
    if type(layer) is not nn.Linear:
        return residual + cast(Tensor, layer(x[None]))[0]
    out = torch.addmm(residual, x, layer.weight.t())
    return out if layer.bias is None else out.add_(layer.bias)


class LeanDecoder:
    """The walk over one module's layers. Made anew when `lean_applies` may have changed."""

    def __init__(self, module: Any) -> None:
        self._layers = [decoder_layer(layer) for layer in module.model.layers]
        self._embed = module.model.embed_tokens
        self._rotary = module.model.rotary_emb
        self._final_norm = _norm(module.model.norm)
        self._head: nn.Linear = module.lm_head

    def logits(self, tokens: Tensor, positions: Tensor, rollout_pass: RolloutPass, at: Tensor | None = None) -> Tensor:
        """Logits [n x q, V] after q tokens of each of n slots, or after those that `at` names (places in n x q);
        tokens and positions [n, q]. Equal to the module's own but for the order of float32 sums."""
        x = self.hidden(tokens, positions, rollout_pass)
        x = self._final_norm(x if at is None else x[at])
        return linear(x, self._head.weight, self._head.bias)

    def hidden(self, tokens: Tensor, positions: Tensor, rollout_pass: RolloutPass) -> Tensor:
        """The last layer's output [n x q, hidden] for q tokens of each of n slots: tokens and positions [n, q]."""
        n, q = tokens.shape
        x: Tensor = self._embed(tokens.reshape(-1))
        cos, sin = self._rotary(x, positions.reshape(1, -1))
        # rotate_half(x) * sin = roll(x) * signed: no negation, no concatenation
        cos, half = cos.view(n * q, 1, -1), cos.shape[-1] // 2
        signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).view(n * q, 1, -1)
        for layer in self._layers:
            x = self._attention(layer, x, (n, cos, signed), rollout_pass)
            y = layer.mlp_norm(x)
            gate = layer.act(linear(y, layer.gate.weight, layer.gate.bias))
            x = _add_linear(x, gate.mul_(linear(y, layer.up.weight, layer.up.bias)), layer.down)
        return x

    @staticmethod
    def _attention(layer: Layer, x: Tensor, tables: tuple[int, Tensor, Tensor], rollout_pass: RolloutPass) -> Tensor:
        t, dim = x.shape[0], layer.head_dim
        n, cos, signed = tables
        y = layer.norm(x)
        query = linear(y, layer.q.weight, layer.q.bias).view(t, -1, dim)
        key = linear(y, layer.k.weight, layer.k.bias).view(t, -1, dim)
        value = linear(y, layer.v.weight, layer.v.bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(query), layer.k_norm(key)
        heads = query.shape[1]
        both = torch.cat([query, key], 1)
        both = (both * cos).addcmul_(both.roll(dim // 2, -1), signed).view(n, t // n, -1, dim).transpose(1, 2)
        value = value.view(n, t // n, -1, dim).transpose(1, 2)
        out = rollout_pass.attend(layer.index, (both[:, :heads], both[:, heads:], value), layer.head)
        return _add_linear(x, out.reshape(t, -1), layer.out)
