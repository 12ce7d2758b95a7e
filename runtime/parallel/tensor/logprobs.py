"""Log-probabilities and entropies over a vocabulary that is cut over the tensor-parallel ranks, and their gradients."""

from typing import Any, cast

import torch
from torch import Tensor

from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.tensor.pieces import Span


def cut_logprobs(logits: Tensor, targets: Tensor, span: Span, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """(log-probability [n] of each target, entropy [n]) in nats, the same on every rank; both have gradients.

    logits: [n, own size], this rank's columns of the vocabulary from span's start on, in at least float32; targets: [n]
    int64. Two collectives of at most 3 n numbers forward, none backward.
    """
    return cast(tuple[Tensor, Tensor], _CutLogprobs.apply(logits, targets, span, ranks))  # type: ignore[no-untyped-call]


class _CutLogprobs(torch.autograd.Function):
    """With N = log sum exp l, p = exp(l - N), log-probability l_t - N, and entropy H = N - sum p l:
    d (l_t - N) / d l_j = [j = t] - p_j, and d H / d l_j = -p_j (l_j - N + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, span: Span, ranks: Ranks) -> tuple[Tensor, Tensor]:
        start, size = span
        most = logits.amax(-1) if size else logits.new_full((len(logits),), float("-inf"))
        most = ranks.largest(most)
        at = targets - start
        here = (at >= 0) & (at < size)
        at = at.where(here, 0)
        own = torch.where(here, logits.gather(-1, at[:, None]).squeeze(-1), 0.0) if size else torch.zeros_like(most)
        weights = (logits - most[:, None]).exp_()
        sums = ranks.add(torch.stack([weights.sum(-1), own, weights.mul_(logits).sum(-1)]))
        normaliser = sums[0].log() + most
        entropy = normaliser - sums[2] / sums[0]
        ctx.size = size
        ctx.save_for_backward(logits, at, here, normaliser, entropy)
        return sums[1] - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, at, here, normaliser, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        logprobs = logits - normaliser[:, None]
        p = logprobs.exp()
        logprobs.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(of_logprob[:, None]).mul_(p).neg_()
        if ctx.size:
            logprobs.scatter_add_(-1, at[:, None], (of_logprob * here)[:, None])
        return logprobs, None, None, None
