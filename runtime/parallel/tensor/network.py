"""A transformers network turned into its tensor-parallel form, in place: own pieces of its parameters, and edges.

Queries, keys and values are cut by heads, MLPs by width, the embedding and the head by vocabulary; norms, biases that
are added once, and value heads every rank holds whole. Where there are fewer KV heads than ranks, neighbours hold
copies of one. Knows the decoders of `runtime.models`, which name their modules alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.model_spec import Head, shape_faults, shape_fix, spec_from_config
from realgraph.runtime.parallel.cuts import EMBEDDING, Box, Shard, cut, is_expert
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.tensor.edges import Edges
from realgraph.runtime.parallel.tensor.pieces import Pieces, Span, TensorCut


def pieces_of(network: Any, head: Head, tp: int, ep: int = 1) -> dict[str, Pieces]:
    """The pieces of every parameter that is cut, by its name: over `tp` ranks, or of whole experts over `ep`. Raises
    ConfigError for ranks that the model can't be cut over."""
    model = spec_from_config(network.config.to_dict(), Where())
    for axis, fault in shape_faults(model, tp, 1, ep):
        raise ConfigError([Problem(Where(path=f"$.layout.{axis}"), fault, shape_fix(model, axis), "layout")])
    layers = tuple(range(model.layers))
    over_tp = [Shard(layers, tp_rank=rank, tp=tp) for rank in range(tp)]
    over_ep = [Shard(layers, ep_rank=rank, ep=ep) for rank in range(ep)]
    pieces = {}
    for name, parameter in network.named_parameters():
        shards, shape = over_ep if ep > 1 and is_expert(name) else over_tp, tuple(parameter.shape)
        if len(shards) > 1:
            pieces[name] = _pieces(shape, [cut(model, head, name, shape, at) for at in shards])
    return pieces


def _pieces(shape: tuple[int, ...], boxes: Sequence[Box | None]) -> Pieces:
    """The boxes of one tensor as spans along the one dim that they cut; no box is a span of nothing."""
    cuts = [box for box in boxes if box is not None]
    dim = next((i for i, n in enumerate(shape) if any(box.shape[i] != n for box in cuts)), 0)
    return Pieces(shape, dim, tuple((0, 0) if box is None else (box.start[dim], box.shape[dim]) for box in boxes))


def cut_network(network: Any, head: Head, ranks: Ranks, experts: Ranks) -> None:
    """Cut a network without storage (on the meta device) in place; `cut_of` and `edges_of` then know it. Tied
    embeddings stay tied. ranks: the tensor-parallel ones; experts: those over which whole experts are spread. Raises
    ConfigError for ranks that the model can't be cut over."""
    by_name = pieces_of(network, head, ranks.size, experts.size)
    apart = frozenset(filter(is_expert, by_name)) if experts.size > 1 else frozenset()
    tensor_cut = TensorCut(ranks, by_name, experts, apart)
    model, lm_head = network.model, getattr(network, "lm_head", None)
    tied = getattr(lm_head, "weight", None) is model.embed_tokens.weight
    for name, pieces in by_name.items():
        owner, _, last = name.rpartition(".")
        whole = getattr(network.get_submodule(owner), last)
        shape = pieces.local_shape(tensor_cut.ranks_of(name).rank)
        own = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        setattr(network.get_submodule(owner), last, own)
    if lm_head is not None and tied:
        lm_head.weight = model.embed_tokens.weight
    network.tensor_cut = tensor_cut
    if ranks.size > 1:
        _join(network, ranks, by_name[EMBEDDING].spans[ranks.rank])


def _join(network: Any, ranks: Ranks, vocabulary: Span) -> None:
    """Put the edges between the ranks of a network whose parameters are cut. vocabulary: of this rank."""
    model, edges = network.model, Edges(ranks)
    model.embed_tokens = CutEmbedding(model.embed_tokens, edges, vocabulary)
    for layer in model.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, edges)
        layer.self_attn.register_forward_pre_hook(_enter_attention(edges), with_kwargs=True)
        # a mixture of experts has its edges inside
        mlp = layer.mlp if hasattr(layer.mlp, "down_proj") else getattr(layer.mlp, "shared_experts", None)
        if mlp is not None:
            mlp.down_proj = SummedLinear(mlp.down_proj, edges)
            mlp.register_forward_pre_hook(_enter_mlp(edges))
    network.tensor_edges = edges


def _enter_attention(edges: Edges) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    return lambda _, given, named: (given, {**named, "hidden_states": edges.enter(named["hidden_states"])})


def _enter_mlp(edges: Edges) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
    return lambda _, given: (edges.enter(given[0]), *given[1:])


class SummedLinear(nn.Linear):
    """A linear layer cut by its inputs: a part of the sum on each rank, and the bias once. Keeps the parameters of the
    layer that it stands for."""

    def __init__(self, layer: nn.Linear, edges: Edges) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would draw new parameters
        self.out_features, self.in_features = layer.weight.shape
        self.weight, self.bias = layer.weight, layer.bias
        self.edges = edges

    def forward(self, input: Tensor) -> Tensor:
        """[1, all rows, own inputs] -> [1, own rows, outputs]"""
        out = self.edges.leave(F.linear(input, self.weight))
        return out if self.bias is None else out + self.bias


class CutEmbedding(nn.Module):
    """An embedding cut by vocabulary: each rank looks up the tokens that it has. Gemma's scale comes after the sum."""

    embed_scale: Tensor

    def __init__(self, embedding: Any, edges: Edges, span: Span) -> None:
        """embedding: transformers' own, an nn.Embedding, of Gemma with a scale."""
        super().__init__()
        self.weight = embedding.weight
        self._edges = edges
        self._start, self._size = span
        self._padding: int | None = None  # the row without a gradient, where it is here
        if embedding.padding_idx is not None and 0 <= embedding.padding_idx - self._start < self._size:
            self._padding = embedding.padding_idx - self._start
        self.scalar_embed_scale = getattr(embedding, "scalar_embed_scale", None)
        if self.scalar_embed_scale is not None:
            self.register_buffer("embed_scale", embedding.embed_scale, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, all rows] int64 -> [1, own rows, hidden]"""
        row = tokens - self._start
        here = (row >= 0) & (row < self._size)
        rows = F.embedding(row.where(here, 0), self.weight, self._padding) * here[..., None]
        out = self._edges.leave(rows)
        return out if self.scalar_embed_scale is None else out * self.embed_scale.to(out.dtype)


def edges_of(network: nn.Module) -> Edges | None:
    """The edges of a network that is cut."""
    edges = getattr(network, "tensor_edges", None)
    return edges if isinstance(edges, Edges) else None
