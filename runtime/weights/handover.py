"""Trained weights for engines that are in no process group with others, since they stand for lost ones: those who train
put a copy into their stores and say so, and each worker of the engine fetches what it holds. So they may train on while
it does.

Knows no engine and no command.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from realgraph.runtime.parallel.checksums import WeightsDiffer, checksum
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import Arriving, WeightPart
from realgraph.runtime.parallel.routes import Holdings
from realgraph.runtime.parallel.shares import Shares
from realgraph.runtime.store.mail import Mail
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import GatherRequest, Values
from realgraph.runtime.wire.metrics import ArrivedBytes
from realgraph.runtime.wire.protocol import Reallocate

Gather = Callable[[Sequence[GatherRequest]], Values]


class GivenWeights(Struct, frozen=True, array_like=True):
    """The word of one who trains: its share of the weights of `version` lies in its store, one part an id, from 0.
    sums: little-endian int64, the checksums of what the receiver holds of its parts of each weight, by name; b"" where
    they are not compared."""

    version: int
    parts: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # weight, where the part begins, its shape
    sums: bytes


_DECODER = msgspec.msgpack.Decoder(GivenWeights)


class FetchedWeights(NamedTuple):
    """Weights that come. parts: to be gone through to the end. sums: [weights] int64, the checksums of what the
    receiver is to hold, by name; None where they are not compared. names: of all weights, in the receiver's order."""

    parts: Arriving
    sums: Tensor | None
    arrived: ArrivedBytes
    names: tuple[str, ...]

    def compare(self, local_sums: Callable[[], Tensor], worker: int) -> ArrivedBytes:
        """Compare what lies here in the end with what was given; returns what has come. local_sums: its checksums
        [weights], in the receiver's order. Raises WeightsDiffer."""
        if self.sums is None:
            return self.arrived
        here = dict(zip(self.names, local_sums().tolist(), strict=True))
        there = dict(zip(sorted(self.names), self.sums.tolist(), strict=True))
        if wrong := [name for name in self.names if here[name] != there[name]]:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            text = f"worker {worker} does not have {wrong[0]!r}{more} as it was given"
            raise WeightsDiffer(f"{text}: this is a mistake of realgraph or of a transport (runtime.verify_weights)")
        return self.arrived


class WeightHandover:
    """One worker's. gather: brings values of other workers' stores, as views that are soon let go."""

    def __init__(self, store: Store, gather: Gather, mail: Mail) -> None:
        self._store, self._gather, self.mail = store, gather, mail

    # --- who trains ---------------------------------------------------------------------------------------------------

    def give(
        self,
        work: Reallocate,
        parts: Sequence[WeightPart],
        wants: Holdings,
        shapes: Mapping[str, tuple[int, ...]] | None,
    ) -> None:
        """Put a copy of this worker's share of the weights, in the place of that of an older version, where the engines
        find it, and tell them. wants: what the workers of engines take; those that take nothing are told nothing.
        shapes: of the whole weights, where their checksums are to be compared."""
        call = work.call
        values = [part.values.detach().to("cpu").contiguous() for part in parts]
        self.withdraw(call)
        self._store.put(_key(call), range(len(parts)), values)
        extents = tuple([(part.name, part.box.start, part.box.shape) for part in parts])
        for receiver in work.joined.keys() & wants.keys():
            sums = b"" if shapes is None else _sums(_common(parts, wants[receiver]), shapes)
            self.mail.send(receiver, _key(call), msgspec.msgpack.encode(GivenWeights(work.version, extents, sums)))

    def withdraw(self, call: str) -> None:
        """Nobody needs the copy any more."""
        self._store.drop((_key(call),), self._store.ids(_key(call)))

    # --- who generates ------------------------------------------------------------------------------------------------

    def fetch(
        self,
        work: Reallocate,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        shares: Shares,
        wants: Mapping[str, Box],
    ) -> FetchedWeights:
        """The parts that this worker holds of the weights of a version, once all who have a share have given it. wants:
        its boxes of them. Raises WeightsDiffer where some are missing."""
        call = work.call
        given = {owner: self._awaited(owner, call, work.version) for owner, mine in shares.items() if mine}
        sums = [np.frombuffer(word.sums, "<i8") for word in given.values() if word.sums]
        total = torch.from_numpy(np.sum(sums, axis=0, dtype=np.int64)) if len(sums) == len(given) else None
        n_elements = sum(Box(start, shape).numel for word in given.values() for _, start, shape in word.parts)
        if n_elements != (needed := sum(Box((0,) * len(shape), shape).numel for shape in shapes.values())):
            raise WeightsDiffer(f"the weights of {call!r} have {needed} elements, and {n_elements} were given")
        numbers = {
            owner: [
                number
                for number, (name, start, shape) in enumerate(word.parts)
                if name in wants and Box(start, shape).intersect(wants[name]) is not None
            ]
            for owner, word in given.items()
        }
        sizes = [Box(*given[owner].parts[number][1:]).numel for owner, mine in numbers.items() for number in mine]
        arriving = Arriving(lambda wanted: _common(self._parts(call, given, numbers), wants))
        return FetchedWeights(arriving, total, ArrivedBytes(sum(sizes) * dtype.itemsize), tuple(shapes))

    def _awaited(self, owner: int, call: str, version: int) -> GivenWeights:
        """The word of one who trains about `version`; words about versions that were never fetched are passed over."""
        while True:
            word = self.mail.wait(owner, _key(call))
            assert word is not None, f"worker {owner} trains: without it there is no run"
            if (given := _DECODER.decode(word)).version == version:
                return given

    def _parts(
        self, call: str, given: Mapping[int, GivenWeights], numbers: Mapping[int, Sequence[int]]
    ) -> Iterator[WeightPart]:
        """Parts by their numbers, from those who give them."""
        for owner, word in given.items():
            if not numbers[owner]:
                continue
            found = self._gather([GatherRequest(owner, _key(call), tuple(numbers[owner]))])[_key(call)]
            for number in numbers[owner]:
                name, start, shape = word.parts[number]
                yield WeightPart(name, Box(start, shape), found.pop(number))


def _key(call: str) -> str:
    """The key of the copies for a call, and the subject of words about them: no key of a graph."""
    return f"weights of {call}"


def _common(parts: Iterable[WeightPart], wants: Mapping[str, Box]) -> Iterator[WeightPart]:
    """The parts as far as they lie in the boxes that a worker holds of their weights."""
    for part in parts:
        common = part.box.intersect(wants[part.name]) if part.name in wants else None
        if common is not None:
            yield WeightPart(part.name, common, part.values[common.within(part.box).slices])


def _sums(parts: Iterable[WeightPart], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The checksums of these parts of each weight, by name, as GivenWeights has them."""
    numbers = {name: i for i, name in enumerate(sorted(shapes))}
    found = torch.zeros(len(shapes), dtype=torch.int64)
    for part in parts:
        found[numbers[part.name]] += checksum(part, shapes[part.name]).cpu()
    return found.numpy().astype("<i8").tobytes()
