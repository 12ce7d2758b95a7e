"""Beginnings that samples of a packed batch have in common, and ends that nobody asks for: what of it is computed.

Causal attention gives equal beginnings equal states, so one copy of each passes through a model's projections, and the
others' slots in the attention read it (Prefix Grouper, arXiv:2506.05433, does so for the prompts of a group; here it is
the whole prefix tree, responses included). Knows no model and no attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.batch import Packed


@dataclass(frozen=True)
class Shared:
    """kept: [U] int64, ascending, the packed positions that are computed. place: [T] int64, in 0 ... U - 1: where among
    them the state of every packed position is found (0 for those that nobody asks for). needed: of each sample the
    tokens, from its first on, whose state somebody asks for. groups: samples of equal numbers are likely to share."""

    kept: Tensor
    place: Tensor
    needed: tuple[int, ...]
    groups: tuple[int, ...] = ()


def share_prefixes(batch: Packed, needed: Sequence[int], beside: Tensor | None = None) -> Shared | None:
    """The part of a batch on the CPU that has to be computed; None where that is all of it.

    needed: of each sample the tokens, from its first on, whose state is asked for; at least 1 each. beside: [T, ...],
    further values that states follow from.
    """
    tokens = batch.tokens.numpy()
    if beside is not None:
        columns = (tokens[:, None], beside.flatten(1).numpy())
        tokens = np.concatenate([np.ascontiguousarray(column).view(np.uint8) for column in columns], 1)
    ends = np.cumsum(batch.lengths)
    starts = (ends - np.array(batch.lengths)).tolist()
    source = np.arange(len(tokens))
    keep = np.zeros(len(tokens), bool)
    raw = [tokens[start : start + n].tobytes() for start, n in zip(starts, needed, strict=True)]
    item = tokens[:1].nbytes
    before, begin = b"", 0
    # sorted, the sample before is the one with the longest common beginning
    for i in sorted(range(len(raw)), key=raw.__getitem__):
        start, own = starts[i], raw[i]
        common = _common(before, own) // item
        source[start : start + common] = source[begin : begin + common]
        keep[start + common : start + needed[i]] = True
        before, begin = own, start
    if keep.all():
        return None
    place = (np.cumsum(keep) - 1)[source]
    return Shared(
        torch.from_numpy(np.flatnonzero(keep)),
        torch.from_numpy(np.where(keep[source], place, 0)),
        tuple(needed),
        batch.groups,
    )


def _common(a: bytes, b: bytes) -> int:
    """The length of the longest common beginning."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    view: NDArray[np.bool_] = np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n)
    return int(view.argmax())
