"""Small pieces of maths over packed tensors: KL estimators and sums over samples and groups. Knows no loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realgraph.graphs.entries import Estimator


def kl(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate, in nats, of KL(p || q) from tokens that p sampled; p = `logprobs`, q = `other`.

    Both [T], log-probability of each sampled token; returns [T]. Means over samples of p: k1 and k3 are unbiased (k3 is
    never negative), k2 is biased with little variance, abs is a distance and no KL. As a loss they differ: the
    gradient of k2 is in the mean that of KL(p || q), the gradient of k3 that of KL(q || p), that of k1 is 0.
    Raises ValueError where shapes differ. Source: Schulman 2020 (joschu.net/blog/kl-approx.html); for the gradients
    Tang & Munos 2025, arXiv:2506.09477.
    """
    if logprobs.shape != other.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} != the other's {tuple(other.shape)}")
    log_ratio = logprobs - other
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.expm1(-log_ratio) + log_ratio
        case "abs":
            return log_ratio.abs()


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs: values [T] floating, lengths [N] int64 that sum to T; returns [N], 0 for an empty run.

    The same order of additions each time on one device (an `index_add` on a GPU has none).
    """
    if not len(lengths) or not len(values):
        return values.new_zeros(len(lengths)) + values.sum()
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0.0)


def indices_by_group(groups: Sequence[int]) -> dict[int, list[int]]:
    """Positions of the samples of each prompt group; groups in the order of their first sample."""
    members: dict[int, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    return members


def suffix_sums(values: Tensor, remaining: Tensor, decay: float) -> Tensor:
    """y[t] = values[t] + decay x y[t + 1] within each run of a packed vector, in log2(longest run) vectorised passes.

    values: [M]; remaining: [M] int64, how many entries of its own run follow each entry. Returns [M]. Works by
    doubling: after pass j, y[t] holds the terms of 2^j entries; the next 2^j are added, decayed, in one shift.
    Source: recursive doubling of a first-order recurrence, Kogge & Stone 1973.
    """
    sums = values.clone()
    longest = int(remaining.max()) if len(remaining) else 0
    shift, factor = 1, decay
    while shift <= longest:
        shifted = torch.where(remaining[:-shift] >= shift, sums[shift:], 0.0) * factor
        sums = torch.cat([sums[:-shift] + shifted, sums[-shift:]])
        shift, factor = 2 * shift, factor * factor
    return sums
