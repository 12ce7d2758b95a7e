"""Routers, as files name their tensors. Knows no expert."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realgraph.runtime.parallel.experts.routing import Routes, choose


class Router(nn.Module):
    """Softmax over all experts, top-k of it: weight [experts, hidden], bias [experts] where the model has one."""

    def __init__(self, shape: tuple[int, int], top_k: int, *, normalised: bool, biased: bool = False) -> None:
        """shape: experts and hidden size. normalised: the weights of a token's experts sum to 1."""
        super().__init__()
        self._top_k, self._normalised = top_k, normalised
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if biased else None

    def choose(self, x: Tensor, given: Tensor | None) -> Routes:
        """The experts of rows x [n, hidden]; given: see `routing.choose`."""
        return choose(x, self.weight, self._top_k, normalised=self._normalised, given=given, bias=self.bias)


class GroupLimit(NamedTuple):
    """The choice of DeepSeek-V3. A token's experts are of `best` of `groups` groups of neighbours; their weights sum to
    `scale` where they are normalised."""

    top_k: int
    groups: int
    best: int
    normalised: bool
    scale: float


class GroupedRouter(nn.Module):
    """Sigmoid affinities, of which a bias changes the choice alone (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2).

    weight: [experts, hidden]. e_score_correction_bias: [experts] float32 whatever the model's dtype is; it is no
    parameter, and stays as it was read.
    """

    e_score_correction_bias: Tensor

    def __init__(self, shape: tuple[int, int], limit: GroupLimit) -> None:
        """shape: experts and hidden size."""
        super().__init__()
        self._limit = limit
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape[0]))

    def choose(self, x: Tensor, given: Tensor | None) -> Routes:
        """See `Router`. Probabilities are affinities over their sum, as in the paper's eq. 18."""
        limit, wide = self._limit, torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(x.to(wide), self.weight.to(wide)).sigmoid()
        experts = self._allowed(scores.detach() + self.e_score_correction_bias.to(wide)).topk(limit.top_k).indices
        if given is not None:
            experts = torch.where(given < scores.shape[1], given.long(), experts)
        weights = scores.gather(-1, experts)
        if limit.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routes(weights * limit.scale, experts, scores / scores.sum(-1, keepdim=True))

    def _allowed(self, scores: Tensor) -> Tensor:
        """[n, experts]: -inf outside of a row's best groups, which are those of the largest sums of two scores."""
        by_group = scores.view(len(scores), self._limit.groups, -1)
        best = by_group.topk(2).values.sum(-1).topk(self._limit.best).indices
        outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, value=False)
        return by_group.masked_fill(outside[..., None], -torch.inf).view(scores.shape)
