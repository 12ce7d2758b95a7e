"""Parts of weights that are copied to where they are wanted, all in one go, or come as they travel."""

import random
from itertools import pairwise

import pytest
import torch

from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import Reallocation, WeightPart
from realgraph.runtime.parallel.mapped import copied

DTYPES = (torch.float64, torch.float32)
BUCKET = 64  # bytes


def cut(rng: random.Random, box: Box) -> list[Box]:
    """The box in parts along one dim, in any order."""
    dim = rng.randrange(len(box.shape))
    n = rng.randint(1, min(4, box.shape[dim]))
    edges = [0, *sorted(rng.sample(range(1, box.shape[dim]), n - 1)), box.shape[dim]]
    parts = []
    for first, end in pairwise(edges):
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = start[dim] + first, end - first
        parts.append(Box(tuple(start), tuple(shape)))
    return rng.sample(parts, len(parts))


@pytest.mark.parametrize("seed", range(100))
def test_parts_are_copied_to_where_they_are_wanted_or_come_as_they_travel(seed: int) -> None:
    """Tensors of one to three dims, cut by rows, columns or not, of the dtype that travels or another."""
    rng, travels = random.Random(seed), random.Random(seed).choice(DTYPES)
    whole, wanted, parts = dict[str, torch.Tensor](), dict[str, WeightPart](), list[WeightPart]()
    for name in ("a", "b", "c", "d"):
        shape = tuple(rng.randint(2, 9) for _ in range(rng.choice([1, 2, 2, 2, 3])))
        whole[name] = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        box = Box(tuple(rng.randrange(2) for _ in shape), tuple(n - 1 for n in shape))
        if rng.random() < 0.8:
            wanted[name] = WeightPart(name, box, torch.zeros(box.shape, dtype=rng.choice(DTYPES)))
        lying = rng.choice(DTYPES)
        parts += [WeightPart(name, part, whole[name][part.slices].to(lying)) for part in cut(rng, box)]
    rng.shuffle(parts)  # those of one tensor are not next to each other
    moves, came = Reallocation((), {}, travels, BUCKET), {name: torch.zeros_like(one) for name, one in whole.items()}
    for name, box, values in copied(parts, moves, wanted):
        assert values.dtype == travels
        came[name][box.slices] += values
        into = wanted.get(name)
        if into is not None and into.values.dtype == travels:
            assert values.untyped_storage().data_ptr() == into.values.untyped_storage().data_ptr()
    for name, one in whole.items():
        expected = torch.zeros_like(one)
        for part in parts:
            if part.name == name:
                expected[part.box.slices] = one[part.box.slices]
        assert torch.equal(came[name], expected)  # each element once
        if name in wanted and wanted[name].values.dtype == travels:
            assert torch.equal(wanted[name].values.double(), one[wanted[name].box.slices])
