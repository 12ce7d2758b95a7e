"""A mixture of experts in place of transformers' own: each expert has parameters of its own, named as in its files.

transformers fuses the experts of a layer into one tensor, and files name each: with parameters that are named as in
files, a part of one expert is a part of one tensor for cuts, shards, optimizers, messages and checkpoints alike. Files
of gpt-oss fuse experts, too. Knows Qwen3-MoE, Mixtral, gpt-oss and DeepSeek-V3. No token is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realgraph.runtime.parallel.cuts import split
from realgraph.runtime.parallel.experts.dispatch import Dispatch
from realgraph.runtime.parallel.experts.fused import FusedExperts
from realgraph.runtime.parallel.experts.routers import GroupedRouter, GroupLimit, Router
from realgraph.runtime.parallel.experts.routing import RoutingRecord
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.stage import Chunk, layers_of, stage_of
from realgraph.runtime.parallel.sharding import shard
from realgraph.runtime.parallel.tensor.edges import Edges
from realgraph.runtime.parallel.tensor.network import edges_of


class FileNames(NamedTuple):
    """Names in files. block: of the mixture in its layer. gate, up, down: of an expert's matrices."""

    block: str
    gate: str
    up: str
    down: str


NAMES = {
    "qwen3_moe": FileNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": FileNames("block_sparse_moe", "w1", "w3", "w2"),
    "deepseek_v3": FileNames("mlp", "gate_proj", "up_proj", "down_proj"),
}
FUSED = "gpt_oss"  # whose files fuse the experts of a layer


class Matrix(nn.Module):
    """One matrix without a bias, [out, in]."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))


class Expert(nn.Module):
    """The matrices of one expert, under their names in files."""

    def __init__(self, names: FileNames, hidden: int, width: int) -> None:
        super().__init__()
        self.names = names
        self.add_module(names.gate, Matrix(width, hidden))
        self.add_module(names.up, Matrix(width, hidden))
        self.add_module(names.down, Matrix(hidden, width))

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """gate [width, hidden], up [width, hidden], down [hidden, width]; of a rank its part, perhaps nothing."""
        gate, up, down = (self.get_submodule(name).weight for name in self.names[1:])
        assert isinstance(gate, Tensor)
        assert isinstance(up, Tensor)
        assert isinstance(down, Tensor)
        return gate, up, down


class Experts(nn.Module):
    """The experts of a layer, by their numbers. FSDP gathers and shards them as one."""

    def __init__(self, names: FileNames, settings: "MixtureSpec", activation: Any) -> None:
        super().__init__()
        self.act_fn = activation
        self.own = range(settings.n_experts)  # those that are here
        for number in range(settings.n_experts):
            self.add_module(str(number), Expert(names, settings.hidden, settings.width))

    @property
    def output_bias(self) -> None:
        """They have none."""
        return

    def forward(self, rows: Tensor, counts: Sequence[int], *, biased: bool = True) -> Tensor:
        """The rows of each expert that is here, in order of experts, through it. rows: [n, hidden]; counts: rows of
        each. biased: with the bias of the outputs."""
        out = []
        for number, part in zip(self.own, torch.split(rows, list(counts)), strict=True):
            if len(part) or torch.is_grad_enabled():  # without rows it still has a gradient, of zeros, on every rank
                expert = self.get_submodule(str(number))
                assert isinstance(expert, Expert)
                gate, up, down = (weight.to(rows.dtype) for weight in expert.weights)
                out.append(F.linear(self.act_fn(F.linear(part, gate)) * F.linear(part, up), down))
        return torch.cat(out) if out else rows


@dataclass(frozen=True)
class MixtureSpec:
    """The shape of a mixture. width: of an expert."""

    n_experts: int
    top_k: int
    hidden: int
    width: int


class SparseBlock(nn.Module):
    """A router and its experts. edges: where tensor parallelism cuts rows; spread: the workers over which whole experts
    are spread (one alone: each expert is here, or cut by width)."""

    def __init__(
        self,
        settings: MixtureSpec,
        router: tuple[str, Router | GroupedRouter],
        experts: Experts | FusedExperts,
        place: tuple[RoutingRecord, int],
        shared: nn.Module | None = None,
    ) -> None:
        """router: with its name in files. place: where it notes its routes, and its number among the layers of experts.
        shared: the MLP of the experts that every token passes."""
        super().__init__()
        self.settings = settings
        self._router = router[0]
        self.add_module(*router)
        self.experts = experts
        self.shared_experts = shared
        self.record, self.layer = place
        self.edges: Edges | None = None
        self.spread: Ranks | None = None

    @property
    def router_module(self) -> Router | GroupedRouter:
        """Its router, whatever its name in files."""
        return cast(Router | GroupedRouter, self.get_submodule(self._router))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]; of rows that tensor parallelism cuts, this rank's."""
        x = hidden_states.reshape(-1, self.settings.hidden)
        live = len(x) if self.edges is None else self.edges.live_rows(len(x))
        routes = self.router_module.choose(x, self.record.given(self.layer))
        self.record.add(self.layer, routes, live)
        if self.spread is not None:
            own = slice(live) if self.edges is None else self.edges.own_share(live)
            out = self._apart(x[own], routes.weights[own], routes.experts[own], self.spread)
            if self.edges is not None:
                out = self.edges.join_shares(out, live)
            out = F.pad(out, (0, 0, 0, len(x) - live))
        elif self.edges is not None:
            edges = self.edges
            whole, weights = edges.enter(x[None])[0], edges.enter(routes.weights[None])[0]
            out = edges.leave(self._here(whole, weights, edges.gather(routes.experts), biased=False)[None])[0]
            if (added := self.experts.output_bias) is not None:  # once, behind the sum over ranks
                shares = torch.zeros_like(routes.probabilities).scatter(1, routes.experts, routes.weights)
                out = out + (shares @ added.to(shares.dtype)).to(out.dtype)
        else:
            out = self._here(x, routes.weights, routes.experts)
        out = out.view(hidden_states.shape)
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states)

    def _here(self, x: Tensor, weights: Tensor, chosen: Tensor, *, biased: bool = True) -> Tensor:
        """Every expert is on this rank. x: [n, hidden]; weights, chosen: [n, k]. Returns [n, hidden]."""
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.settings.n_experts).tolist()
        rows = self.experts(x.index_select(0, order // self.settings.top_k), counts, biased=biased)
        return _combined(rows, order, weights).to(x.dtype)

    def _apart(self, x: Tensor, weights: Tensor, chosen: Tensor, ranks: Ranks) -> Tensor:
        """Whole experts are spread over `ranks`: rows go to theirs, and come back."""
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.settings.n_experts)
        dispatch = Dispatch(counts, ranks)
        there = dispatch.send(x.index_select(0, order // self.settings.top_k))
        rows = dispatch.give_back(self.experts(there, dispatch.received))
        return _combined(rows, order, weights).to(x.dtype)

    def pass_by(self) -> None:
        """Take part in the exchanges of a pass without rows of one's own: those of others may come. Collective."""
        assert self.spread is not None, "every expert is here"
        none = next(self.experts.parameters()).new_zeros((0, self.settings.hidden))
        dispatch = Dispatch(none.new_zeros(self.settings.n_experts, dtype=torch.int64), self.spread)
        dispatch.give_back(self.experts(dispatch.send(none), dispatch.received))


class PairedBlock(SparseBlock):
    """As the layers of gpt-oss call it, which leave the second result aside."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """See `SparseBlock`."""
        return super().forward(hidden_states), None


def _combined(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """[n, hidden]: the weighted sums of what the experts of each of n tokens gave. rows: [n x k, hidden], sorted by
    `order`; weights: [n, k], in whose dtype they are summed."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return (rows.index_select(0, place).view(*weights.shape, rows.shape[-1]) * weights[..., None]).sum(1)


def name_experts(network: Any) -> None:
    """Put a SparseBlock in place of each fused mixture of a network, in place; of any other network nothing changes."""
    config = network.config
    kind = config.model_type
    if kind not in (*NAMES, FUSED):
        return
    config.output_router_logits = False  # transformers would look for its own routers
    sparse = [layer for layer in network.model.layers if hasattr(layer.mlp, "experts")]
    record = RoutingRecord(len(sparse), config.num_local_experts)
    for number, layer in enumerate(sparse):
        with torch.device(layer.mlp.experts.down_proj.device):
            if kind == FUSED:
                layer.mlp = _fused_block(config, layer.mlp.experts, (record, number))
            else:
                _put_named_block(layer, config, (record, number))
    if sparse:
        network.routing_record = record


def _put_named_block(layer: Any, config: Any, place: tuple[RoutingRecord, int]) -> None:
    """In place of a layer's mixture one whose experts have names."""
    names, fused = NAMES[config.model_type], layer.mlp.experts
    settings = MixtureSpec(
        n_experts=fused.num_experts,
        top_k=config.num_experts_per_tok,
        hidden=fused.hidden_dim,
        width=fused.intermediate_dim,
    )
    experts, shared = Experts(names, settings, fused.act_fn), getattr(layer.mlp, "shared_experts", None)
    block = SparseBlock(settings, ("gate", _router_of(config, settings)), experts, place, shared)
    if names.block != "mlp":
        del layer.mlp
        object.__setattr__(layer, "mlp", block)  # what the layer calls; not a second name of its parameters
    setattr(layer, names.block, block)


def _router_of(config: Any, settings: MixtureSpec) -> Router | GroupedRouter:
    shape = settings.n_experts, settings.hidden
    normalised = bool(getattr(config, "norm_topk_prob", True))
    if config.model_type != "deepseek_v3":
        return Router(shape, settings.top_k, normalised=normalised)
    groups = config.n_group, config.topk_group
    return GroupedRouter(shape, GroupLimit(settings.top_k, *groups, normalised, config.routed_scaling_factor))


def _fused_block(config: Any, fused: Any, place: tuple[RoutingRecord, int]) -> PairedBlock:
    """gpt-oss's mixture, which chooses by logits alone: the weights of a token's experts sum to 1."""
    shape = (config.num_local_experts, config.hidden_size, config.intermediate_size)
    settings = MixtureSpec(shape[0], config.num_experts_per_tok, *shape[1:])
    router = "router", Router(shape[:2], settings.top_k, normalised=True, biased=True)
    return PairedBlock(settings, router, FusedExperts(*shape, (fused.alpha, fused.limit)), place)


def blocks_by_chunk(network: Any) -> tuple[tuple[SparseBlock, ...], ...]:
    """The mixtures of each chunk of a stage, of a network that is not cut to one of all its layers."""
    stage = stage_of(network)
    chunks = [network.modules()] if stage is None else [_modules(network, chunk) for chunk in stage.chunks]
    return tuple(tuple(module for module in modules if isinstance(module, SparseBlock)) for modules in chunks)


def _modules(network: Any, chunk: Chunk) -> list[nn.Module]:
    return [module for layer in layers_of(network.model, chunk) for module in layer.modules()]


def join_experts(network: Any, spread: Ranks) -> None:
    """Tell the mixtures of a network that `cut_network` has cut between which ranks their rows go."""
    for block in network.modules():
        if isinstance(block, SparseBlock):
            block.edges = edges_of(network)
            if spread.size > 1:
                first, n_own = split(block.settings.n_experts, spread.size, spread.rank)
                block.spread, block.experts.own = spread, range(first, first + n_own)


def shard_experts(network: Any, copies: Ranks, dtypes: tuple[torch.dtype, torch.dtype]) -> set[nn.Parameter]:
    """Cut the experts that are spread over those ranks that hold the same ones, by FSDP2; dtypes: see `groups.shard`.

    Returns the parameters that other shards of the network leave out: of experts that lie elsewhere, or here alone.
    """
    blocks = [block for block in network.modules() if isinstance(block, SparseBlock) and block.spread is not None]
    parameters = {parameter for block in blocks for parameter in block.experts.parameters()}
    if copies.size == 1:
        return parameters
    elsewhere = {parameter for parameter in parameters if not parameter.numel()}
    for block in blocks:
        shard(block.experts, (), copies, dtypes, elsewhere)
    return elsewhere
