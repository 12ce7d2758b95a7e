"""The pieces into which tensor parallelism cuts a model's tensors, and how they are read, gathered and summed.

Knows shapes and ranks, no module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realgraph.runtime.parallel.groups import FLAT_BYTES, Ranks

Span = tuple[int, int]  # start and size


@dataclass(frozen=True)
class Pieces:
    """The pieces of one tensor that the ranks hold. shape: of the whole. spans: of each rank, along `dim`.

    Ranks of one span hold copies; a tensor that all hold whole has one span.
    """

    shape: tuple[int, ...]
    dim: int
    spans: tuple[Span, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the piece of `rank`."""
        return (*self.shape[: self.dim], self.spans[rank][1], *self.shape[self.dim + 1 :])

    def owned_by(self, rank: int) -> bool:
        """True on the first of the ranks that hold the piece of `rank`: who counts it where each counts once."""
        return self.spans.index(self.spans[rank]) == rank

    @property
    def distinct(self) -> tuple[Span, ...]:
        """The spans, each once."""
        return tuple(dict.fromkeys(self.spans))

    @property
    def copied(self) -> bool:
        """True where several ranks hold a piece."""
        return len(self.distinct) < len(self.spans)


@dataclass(frozen=True)
class TensorCut:
    """The cut of one network over the tensor-parallel ranks, and of whole experts over theirs. by_name: of every
    parameter that is cut; a network that is not cut has none, and is its own whole.

    spread: the ranks over which the experts of `apart`, by name, are spread. The gradients of those are never summed
    here: a rank has the rows of all of them.
    """

    ranks: Ranks
    by_name: Mapping[str, Pieces] = field(default_factory=dict)
    spread: Ranks | None = None
    apart: frozenset[str] = frozenset()

    def ranks_of(self, name: str) -> Ranks:
        """The ranks among which the pieces of a parameter are."""
        return self.spread if self.spread is not None and name in self.apart else self.ranks

    def shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, of which this rank holds a piece of shape `own`."""
        return self.by_name[name].shape if name in self.by_name else own

    def place(self, name: str, inner: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of the whole tensor that is the part `inner` of this rank's piece."""
        pieces = self.by_name.get(name)
        if pieces is None:
            return inner
        start = pieces.spans[self.ranks_of(name).rank][0]
        moved = slice(inner[pieces.dim].start + start, inner[pieces.dim].stop + start)
        return (*inner[: pieces.dim], moved, *inner[pieces.dim + 1 :])

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor, of which this rank holds the piece `own`; collective where it is cut."""
        pieces = self.by_name.get(name)
        if pieces is None or len(pieces.distinct) == 1:
            return own
        ranks = self.ranks_of(name)
        shapes = [pieces.local_shape(rank) for rank in range(ranks.size)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own.reshape(-1)
        flat = ranks.gather_rows(padded).view(ranks.size, -1)
        gathered = own.new_empty(pieces.shape)
        for row, shape, size, (start, n) in zip(flat, shapes, sizes, pieces.spans, strict=True):
            gathered.narrow(pieces.dim, start, n).copy_(row[:size].view(shape))
        return gathered

    def owns(self, name: str) -> bool:
        """True where this rank counts the parameter in sums that count each once."""
        return name not in self.by_name or self.by_name[name].owned_by(self.ranks_of(name).rank)

    def sum_copies(self, grads: Mapping[str, Tensor]) -> None:
        """Sum, in place, the gradients of pieces over the ranks that hold them: each has added up its own part.

        grads: by parameter, each this rank's piece, or the same shard of it on every rank. Collective.
        """
        bucket: list[tuple[Tensor, int, int]] = []
        n_bytes = 0
        for name, grad in grads.items():
            pieces = self.by_name.get(name)
            if pieces is None or not pieces.copied or name in self.apart:
                continue
            spans = pieces.distinct
            bucket.append((grad, spans.index(pieces.spans[self.ranks.rank]), len(spans)))
            n_bytes += grad.numel() * grad.element_size() * len(spans)
            if n_bytes >= FLAT_BYTES:
                self._sum(bucket)
                bucket, n_bytes = [], 0
        self._sum(bucket)

    def _sum(self, bucket: list[tuple[Tensor, int, int]]) -> None:
        """bucket: gradients, which of its pieces each is, and how many there are; each piece has a place of its own
        in what is summed."""
        if not bucket:
            return
        parts = [grad.new_zeros(n, grad.numel()) for grad, _, n in bucket]
        for (grad, at, _), part in zip(bucket, parts, strict=True):
            part[at] = grad.reshape(-1)
        flat = self.ranks.add(torch.cat([part.view(-1) for part in parts]))
        summed = torch.split(flat, [part.numel() for part in parts])
        for (grad, at, n), part in zip(bucket, summed, strict=True):
            grad.copy_(part.view(n, -1)[at].view_as(grad))


def cut_of(network: nn.Module) -> TensorCut:
    """The cut that `cut_network` made, or that of a network which every rank holds whole."""
    tensor_cut = getattr(network, "tensor_cut", None)
    return tensor_cut if isinstance(tensor_cut, TensorCut) else _WHOLE


_WHOLE = TensorCut(Ranks(torch.device("cpu")))


def shard_of(parameter: Tensor) -> Tensor:
    """The storage that this rank has of a parameter."""
    return parameter._local_tensor.detach() if isinstance(parameter, DTensor) else parameter.detach()
