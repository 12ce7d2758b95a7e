"""Checksums of both sides of a reallocation: what a worker receives against what those that hold it have.

A checksum is a sum over elements, each its bits times a number of its place in the whole tensor, modulo 2^64: parts add
up in any order however either side is cut, and an element that is wrong, missing or elsewhere changes it. It finds
mistakes, not forgery.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from realgraph.runtime.parallel.collectives.peers import Said, expect, say, wait_for
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import Reallocation, WeightPart, WorkerParts
from realgraph.runtime.parallel.shares import Shares

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_FACTOR = -7046029254386353131  # 2^64 / golden ratio, odd, as int64


class WeightsDiffer(ArithmeticError):
    """A reallocation has not brought what was sent; the text says which tensor, and where."""


class Checksums:
    """The checksums of one reallocation on one worker. Collective: senders and receivers use it alike."""

    def __init__(
        self, moves: Reallocation, place: WorkerParts, shapes: Mapping[str, tuple[int, ...]], shares: Shares
    ) -> None:
        """shares: the boxes that each sender speaks for, so that copies count once."""
        self._moves, self._place, self._shapes, self._shares = moves, place, shapes, shares
        self._came = self._none()

    def watch(self, parts: Iterator[WeightPart]) -> Iterator[WeightPart]:
        """The parts that come, counted."""
        numbers = {name: i for i, name in enumerate(self._shapes)}
        for part in parts:
            self._came[numbers[part.name]] += checksum(part, self._shapes[part.name])
            yield part

    def count(self, own: Tensor) -> None:
        """Take the checksums [tensors] of what lies here in the end, in the place of those of what came."""
        self._came = own.to(self._came.device)

    def compare(self, send: Callable[[Tensor, int], Said | None] = say) -> list[Said]:
        """Send what each receiver should have, and compare what came. Returns what is on its way to others; raises
        WeightsDiffer on the receiver, and CollectiveError with the worker that is gone or far behind.

        send: sends values to a receiver; None: that one is gone, and not needed.
        """
        place, expected = self._place, self._none()
        sums = (
            {r: self._sums_for(wants) for r, wants in self._moves.wants.items()} if place.worker in self._shares else {}
        )
        sent = [send(sums[r], r) for r in sums if r != place.worker]
        if place.worker in self._moves.wants:
            arriving = {worker: self._none() for worker in self._shares if worker != place.worker}
            wait_for([expect(tensor, worker) for worker, tensor in arriving.items()])
            expected = sum(arriving.values(), sums.get(place.worker, expected))
        wrong = [name for name, same in zip(self._shapes, (self._came == expected).tolist(), strict=True) if not same]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            text = f"worker {place.worker} does not have {wrong[0]!r}{more} as it was sent"
            raise WeightsDiffer(f"{text}: this is a mistake of realgraph or of a transport (runtime.verify_weights)")
        return [said for said in sent if said is not None]

    def _sums_for(self, wants: Mapping[str, Box]) -> Tensor:
        """[tensors]: of what this worker speaks for among the boxes of one receiver."""
        found = self._none()
        for i, (name, shape) in enumerate(self._shapes.items()):
            for box in self._shares[self._place.worker].get(name, ()):
                common = box.intersect(wants[name]) if name in wants else None
                if common is not None:
                    part = self._place.holds[name]
                    values = part.values[common.within(part.box).slices].to(self._moves.dtype)
                    found[i] += checksum(WeightPart(name, common, values), shape)
        return found

    def _none(self) -> Tensor:
        return torch.zeros(len(self._shapes), dtype=torch.int64, device=self._place.device)


def checksum(part: WeightPart, shape: tuple[int, ...]) -> Tensor:
    """[] int64: of a part of a tensor of shape `shape`. Those of disjoint parts add up to that of all of them."""
    values = part.values.detach().contiguous()
    place = torch.zeros((), dtype=torch.int64, device=values.device)
    for first, size, whole in zip(part.box.start, part.box.shape, shape, strict=True):
        place = place[..., None] * whole + torch.arange(first, first + size, device=values.device)
    bits = values.view(_BITS[values.element_size()]).long() + 1  # so that a zero counts
    return (bits * (place * _FACTOR + zlib.crc32(part.name.encode()) * 2 + 1)).sum()
