"""Prompts that several samples of a packed batch begin with, computed once. Knows no model and no attention.

Causal attention gives equal beginnings equal states, so of a prompt with n samples only one copy has to pass through a
model's projections; the others' slots in the attention read it (the idea of Prefix Grouper, arXiv:2506.05433).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realgraph.runtime.batch import Packed


@dataclass(frozen=True)
class Shared:
    """kept: [U] int64, ascending, the packed positions that are computed. place: [T] int64, in 0 ... U - 1: where among
    them the state of every packed position is found."""

    kept: Tensor
    place: Tensor


def share_prompts(batch: Packed) -> Shared | None:
    """What of a batch on the CPU need not be computed twice; None where nothing is shared.

    Shared are the tokens before the first masked one, between samples of one group in which they are equal.
    """
    if len(set(batch.groups)) == len(batch.groups):
        return None
    tokens, masked = batch.tokens.numpy(), np.flatnonzero(batch.mask.numpy())
    ends = np.cumsum(batch.lengths)
    starts = ends - np.array(batch.lengths)
    # the first masked position of each sample; one without any, which trains nothing, shares nothing
    first = np.append(masked, len(tokens))[np.searchsorted(masked, starts)]
    first = np.where(first < ends, first, starts)
    own = np.arange(len(tokens))
    source = own.copy()
    seen: dict[tuple[int, bytes], int] = {}
    for group, start, end in zip(batch.groups, starts.tolist(), first.tolist(), strict=True):
        if end > start:
            donor = seen.setdefault((group, tokens[start:end].tobytes()), start)
            source[start:end] = own[donor : donor + end - start]
    kept = source == own
    if kept.all():
        return None
    return Shared(torch.from_numpy(np.flatnonzero(kept)), torch.from_numpy((np.cumsum(kept) - 1)[source]))
