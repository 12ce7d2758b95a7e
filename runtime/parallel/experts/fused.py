"""Experts whose files have one tensor for all of a layer, with biases (gpt-oss). Knows no router and no exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FusedExperts(nn.Module):
    """The experts of a layer, in order; gate and up lie in turns along the columns of one tensor. Expert parallelism
    leaves some of them here, tensor parallelism a part of each one's width.

    Expert: down(clip(up) + 1) x gate x sigmoid(alpha x gate), with gate at most `limit` and up within it (gpt-oss model
    card, arXiv:2508.10925).
    """

    def __init__(self, n_experts: int, hidden: int, width: int, unit: tuple[float, float]) -> None:
        """unit: alpha and limit."""
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(n_experts, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(n_experts, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(n_experts, hidden))
        self._alpha, self._limit = unit
        self.own = range(n_experts)  # those that are here

    @property
    def output_bias(self) -> Tensor:
        """[experts, hidden], which every tensor-parallel rank has whole."""
        return self.down_proj_bias

    def forward(self, rows: Tensor, counts: Sequence[int], *, biased: bool = True) -> Tensor:
        """See `Experts`."""
        parameters = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        # all at once: the gradient of one expert's part would be a whole tensor, and there would be one for each
        experts = zip(*(torch.unbind(each.to(rows.dtype)) for each in parameters), strict=True)
        out = []
        for part, (gate_up, gate_up_bias, down, down_bias) in zip(
            torch.split(rows, list(counts)), experts, strict=True
        ):
            if len(part) or torch.is_grad_enabled():  # see `Experts`
                inner = self._unit(torch.addmm(gate_up_bias, part, gate_up))
                out.append(torch.addmm(down_bias, inner, down) if biased else inner @ down)
        return torch.cat(out) if out else rows

    def _unit(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[:, ::2].clamp(max=self._limit), gate_up[:, 1::2].clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._alpha))
