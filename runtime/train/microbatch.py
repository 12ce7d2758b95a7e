"""Cutting a packed batch into micro-batches balanced by tokens, never by padding. Pure; knows no model and no loss."""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from realgraph.graphs.maths import Loss
from realgraph.runtime.batch import Packed


def units(batch: Packed, whole_groups: bool) -> list[tuple[int, ...]]:
    """The positions of samples that must stay together, in the batch's order."""
    if not whole_groups or not batch.groups:
        return [(i,) for i in range(batch.n_samples)]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(batch.groups):
        members.setdefault(group, []).append(i)
    return [tuple(positions) for positions in members.values()]


def balance(sizes: Sequence[int], limit: int | None) -> list[list[int]]:
    """Items that go together: the fewest parts found whose sums stay within `limit`, evened out.

    An item above the limit is alone. Greedy, longest first: parts differ by at most the longest item that fits. Every
    part is non-empty and in ascending order.
    """
    if not sizes:
        return []
    if limit is None:
        return [list(range(len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    alone = [[i] for i in order if sizes[i] > limit]
    rest = order[len(alone) :]
    if not rest:
        return alone
    parts = _first_fit(rest, sizes, limit)
    for n in range(-(-sum(sizes[i] for i in rest) // limit), len(parts) + 1):
        even = _longest_first(rest, sizes, n)
        if all(sum(sizes[i] for i in part) <= limit for part in even):
            parts = even
            break
    return [sorted(part) for part in alone + parts]


def _longest_first(order: Sequence[int], sizes: Sequence[int], n: int) -> list[list[int]]:
    loads = [(0, part) for part in range(n)]
    parts: list[list[int]] = [[] for _ in range(n)]
    for i in order:
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + sizes[i], part))
    return [part for part in parts if part]


def _first_fit(order: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for part, left in enumerate(room):
            if sizes[i] <= left:
                parts[part].append(i)
                room[part] -= sizes[i]
                break
        else:
            parts.append([i])
            room.append(limit - sizes[i])
    return parts


def cut(batch: Packed, limit: int | None, whole_groups: bool = False) -> list[tuple[int, ...]]:
    """Positions of each micro-batch's samples: within `limit` tokens, but for a sample or group that is longer."""
    together = units(batch, whole_groups)
    sizes = [sum(batch.lengths[i] for i in unit) for unit in together]
    return [tuple(i for u in part for i in together[u]) for part in balance(sizes, limit)]


def rejoin(parts: Sequence[Sequence[int]], values: Sequence[Tensor], lengths: Sequence[int] | None) -> list[Tensor]:
    """Per-sample pieces in the batch's order, of values that came per micro-batch.

    values: [T of the part] where `lengths` (of all samples, in tokens) is given, else [N of the part].
    """
    pieces: dict[int, Tensor] = {}
    for part, value in zip(parts, values, strict=True):
        sizes = [lengths[i] if lengths is not None else 1 for i in part]
        pieces.update(zip(part, torch.split(value, sizes), strict=True))
    return [pieces[i] for i in sorted(pieces)]


def idle(loss: Loss, batch: Packed) -> Tensor:
    """[N] bool: samples whose part of the loss and of its gradient is exactly zero, whatever the model says.

    Those without a masked token; and, where the loss is nothing but policy gradients (and terms of coefficient 0),
    those whose advantages are all 0, as in a group of equal rewards. Never any of a loss of pairs.
    """
    nothing = torch.zeros(batch.n_samples, dtype=torch.bool, device=batch.mask.device)
    if loss.needs_whole_groups or any(term.sees_idle for term in loss.terms.values()):
        return nothing
    works = torch.zeros_like(batch.mask)
    for term in loss.terms.values():
        key = term.idle_where_zero
        if key is not None and (key in batch.token_keys or key in batch.sample_keys):
            works = works | (batch.key(key) != 0)
        elif term.coefficient != 0:
            works = torch.ones_like(works)
    busy = nothing.to(torch.int64).index_add(0, batch.sample_index(), (works & batch.mask).to(torch.int64))
    return busy == 0
