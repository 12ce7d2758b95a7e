"""The choice of experts for every token, and what a forward pass notes of it. Knows no expert.

Router: softmax over all experts of the logits, top-k of it (arXiv:2401.04088, sec. 2.1; Qwen3, arXiv:2505.09388), in
at least float32 whatever the model's dtype is: near-ties would else send tokens to other experts than the generator's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realgraph.planner.inputs.model_spec import choice_bytes
from realgraph.runtime.parallel.groups import Ranks


@dataclass(frozen=True)
class Routes:
    """The experts of n tokens. weights: [n, k] with gradient, in at least float32; experts: [n, k] int64, the likeliest
    first; probabilities: [n, experts], of all of them."""

    weights: Tensor
    experts: Tensor
    probabilities: Tensor


def route_dtype(n_experts: int) -> torch.dtype:
    """The smallest integers that hold the number of an expert, and `n_experts` itself, which stands for no choice."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[choice_bytes(n_experts)]


def choose(
    x: Tensor,
    router: Tensor,
    top_k: int,
    *,
    normalised: bool,
    given: Tensor | None = None,
    bias: Tensor | None = None,
) -> Routes:
    """x: [n, hidden]; router: [experts, hidden]; bias: [experts], of its logits. normalised: the weights of a token's
    experts sum to 1. given: [n, k] of `route_dtype`, the experts to take, whatever the router says; where they are no
    expert, its own choice."""
    wide = torch.promote_types(x.dtype, torch.float32)
    probabilities = F.linear(x.to(wide), router.to(wide), None if bias is None else bias.to(wide)).softmax(-1)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if given is not None:
        experts = torch.where(given < len(router), given.long(), experts)
        weights = probabilities.gather(-1, experts)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(weights, experts, probabilities)


class RoutingRecord:
    """The routes of one forward pass over this worker's rows, by layer of experts. A layer that is computed again in a
    backward pass, or outside of a pass, adds nothing."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.n_layers = n_layers  # of experts, of the whole model
        self.n_experts = n_experts
        self._open = False
        self._idle = False
        self._rows = 0
        self._counts: dict[int, Tensor] = {}
        self._sums: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._given: Tensor | None = None
        self._noted: dict[int, Tensor] | None = None

    def replay(self, given: Tensor | None) -> None:
        """The experts that the rows of the pass in hand go to: [own rows, layers, k], see `choose`; None: as their
        routers say. Holds until it is called again, for layers that are computed again."""
        self._given = given

    def given(self, layer: int) -> Tensor | None:
        """[own rows, k] of a layer."""
        return None if self._given is None else self._given[:, layer]

    def note(self) -> None:
        """From here on the choices of a pass are noted, until `noted`."""
        self._noted = {}

    def noted(self) -> dict[int, Tensor]:
        """The choices since `note`, by layer: [rows, k] each."""
        found, self._noted = self._noted or {}, None
        return found

    def begin(self, *, idle: bool = False) -> None:
        """A forward pass begins. idle: its rows are those of other workers, and don't count here."""
        self._open, self._idle = True, idle
        self._rows, self._counts, self._sums, self._entropies = 0, {}, [], []

    def end(self) -> None:
        """The forward pass has ended: what comes now is computed again."""
        self._open = False

    def add(self, layer: int, routes: Routes, live: int) -> None:
        """The routes of a layer, numbered among those of experts, of which the first `live` rows are no padding."""
        probabilities, experts = routes.probabilities[:live], routes.experts[:live]
        if self._noted is not None:
            self._noted[layer] = routes.experts
        total = probabilities.sum(0)  # also where it is computed again: the graph must be the same
        if not self._open:
            return
        with torch.no_grad():
            ones = torch.ones((), dtype=total.dtype, device=total.device).expand(experts.numel())
            self._counts[layer] = torch.zeros_like(total).scatter_add_(0, experts.reshape(-1), ones)
            self._entropies.append(torch.special.entr(probabilities).sum())
        self._sums.append(total)
        self._rows += live

    @property
    def n_numbers(self) -> int:
        """Entries of `load`."""
        return self.n_layers * self.n_experts + 2

    def load(self) -> Tensor:
        """[n_numbers] float64, on the CPU: assignments to each expert of each layer, the entropies of the routers
        summed over rows and layers, in nats, and the number of those. Adds over passes and workers."""
        found = torch.zeros(self.n_numbers, dtype=torch.float64)
        if self._counts and not self._idle:
            by_layer = found[:-2].view(self.n_layers, self.n_experts)
            by_layer[list(self._counts)] = torch.stack([*self._counts.values()]).double().cpu()
            found[-2], found[-1] = torch.stack(self._entropies).double().sum().cpu(), self._rows
        return found

    def totals(self, device: torch.device) -> Tensor:
        """[2 experts + 1] float64, over the rows and layers of the pass that are here: assignments to each expert, its
        probabilities (with their gradient), and the rows, each layer's counted. Adds over workers and stages."""
        if not self._sums or self._idle:
            return torch.zeros(2 * self.n_experts + 1, dtype=torch.float64, device=device)
        counts, sums = torch.stack([*self._counts.values()]).sum(0), torch.stack(self._sums).sum(0)
        return torch.cat([counts, sums, counts.new_tensor([float(self._rows)])]).double()

    def balance(self, sharers: Sequence[Ranks], device: torch.device) -> Tensor:
        """The `load_balance` of the pass. Collective. Raises ValueError where layers lie on other workers."""
        if len(self._counts) != self.n_layers:
            raise ValueError(f"{len(self._counts)} of {self.n_layers} layers of experts are here: no balance of all")
        return load_balance(self.totals(device), sharers)


def load_balance(totals: Tensor, sharers: Sequence[Ranks]) -> Tensor:
    """The load-balancing loss of a pass: experts x sum over experts of (share of assignments x mean probability), over
    all rows and layers; top_k where all are alike. totals: of `RoutingRecord.totals`, over all layers of this worker's
    rows. A float64 scalar, the same on all workers that share a pass's rows, along the axes of `sharers`; each has the
    gradient of its own. Collective. Source: Switch Transformer, arXiv:2101.03961, eq. 4-6, over layers as transformers'
    load_balancing_loss_func has it."""
    n = len(totals) // 2
    counted = torch.cat([totals[:n], totals[-1:]]).detach()
    for ranks in sharers:
        ranks.add(counted)
    counts, rows = counted[:-1], counted[-1].clamp(min=1)
    own = n * (counts / rows * totals[n:-1] / rows).sum()
    whole = own.detach().clone()
    for ranks in sharers:
        ranks.add(whole)
    return own + (whole - own.detach())


def load_metrics(load: Tensor, record: RoutingRecord | None) -> dict[str, float]:
    """load: of `RoutingRecord.load`, summed over passes and workers. load_imbalance: the largest load of an expert over
    the mean, from 1 on, mean over layers; expert_load_0, expert_load_1, ...: the same of each expert; router_entropy:
    in nats, mean over rows and layers. None where nothing was routed."""
    if record is None or not load[-1]:
        return {}
    counts = load[:-2].view(record.n_layers, -1)
    counts = counts[counts.sum(-1) > 0]
    over_mean = counts / counts.mean(-1, keepdim=True)
    by_expert = {f"expert_load_{expert}": found for expert, found in enumerate(over_mean.mean(0).tolist())}
    imbalance = float(over_mean.amax(-1).mean())
    return {"load_imbalance": imbalance, **by_expert, "router_entropy": float(load[-2] / load[-1])}


def record_of(network: nn.Module) -> RoutingRecord | None:
    """The record of a network's mixtures; None where it has none."""
    record = getattr(network, "routing_record", None)
    return record if isinstance(record, RoutingRecord) else None
