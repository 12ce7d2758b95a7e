"""Drawing one token per row where the vocabulary is cut over tensor-parallel ranks: the same draw as from the whole.

A rank has the logits of its own span of tokens. Unless a row asks for top-k or top-p they are never gathered: what is
exchanged is each rank's maximum and sum, and then the token and its log-probability.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from realgraph.runtime.generate.sampling import SamplingSettings, draw, uniform
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.tensor.pieces import Span


@dataclass(frozen=True)
class CutVocabulary:
    """spans: start and size of each rank's tokens, in order."""

    ranks: Ranks
    spans: tuple[Span, ...]

    def whole(self, logits: Tensor) -> Tensor:
        """[n, own] of every rank -> [n, V]."""
        most = max(size for _, size in self.spans)
        padded = logits.new_zeros((most, len(logits)))
        padded[: logits.shape[1]] = logits.T
        rows = self.ranks.gather_rows(padded).view(self.ranks.size, most, -1)
        return torch.cat([part[:size] for part, (_, size) in zip(rows, self.spans, strict=True)]).T

    def draw(self, logits: Tensor, settings: SamplingSettings, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`sampling.draw` from this rank's logits [n, own]: the same tokens and log-probabilities on every rank."""
        if settings.truncated:
            return draw(self.whole(logits), settings, positions)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = self.ranks.rank
        start, size = self.spans[own]
        most = logits.amax(-1) if size else logits.new_full((len(logits),), -torch.inf)
        temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
        weights = ((logits - most[:, None]) / temperature).exp() if size else logits
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1] if size else torch.zeros_like(most, dtype=torch.float64)
        mosts, totals = self.ranks.gather_rows(torch.stack([most.double(), total])[None]).unbind(1)  # [ranks, n]
        highest = mosts.amax(0)
        # each rank's part of the sum, relative to the highest logit of all
        scale = ((mosts - highest) / temperature[:, 0].double()).exp()
        ends = (totals * scale).cumsum(0)
        target = uniform(settings.streams, positions) * ends[-1]
        chosen = (ends <= target).sum(0).clamp_(max=len(self.spans) - 1)
        if settings.greedy:
            chosen = torch.where(settings.temperature == 0, mosts.argmax(0), chosen)
        found = torch.zeros((2, len(logits)), dtype=torch.float64, device=logits.device)
        if size:
            before = ends[own - 1] if own else torch.zeros_like(target)
            inside = ((target - before) / scale[own])[:, None]
            at = torch.searchsorted(cumulative, inside, right=True).clamp_(max=size - 1)
            if settings.greedy:
                at = torch.where(settings.temperature[:, None] == 0, logits.argmax(-1, keepdim=True), at)
            value = (logits.gather(-1, at)[:, 0].double() - highest) / temperature[:, 0].double()
            found = torch.stack([(at[:, 0] + start).double(), value]) * (chosen == own)
        tokens, values = self.ranks.add(found)
        drawn = values - ends[-1].log()
        if settings.greedy:
            drawn = torch.where((settings.temperature == 0) & ~drawn.isnan(), 0.0, drawn)
        return tokens.nan_to_num().long(), drawn.to(logits.dtype)
