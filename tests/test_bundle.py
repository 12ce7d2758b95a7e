"""Values as the frames of one answer: in order, aligned, and refused where they contradict themselves."""

import random

import pytest

from realgraph.runtime.store import bundle
from realgraph.runtime.store.bundle import Extent
from realgraph.runtime.store.store import Store
from tests.test_store import random_value, same


@pytest.mark.parametrize("seed", range(30))
def test_frames_hold_the_values_in_order_each_aligned(seed: int) -> None:
    rng = random.Random(seed)
    store = Store(1 << 16)
    values = [random_value(rng, 50_000) for _ in range(rng.randint(0, 20))]
    store.put("a", range(len(values)), values)
    entries = store.entries("a", range(len(values)))
    size = rng.choice([64, 1000, 4096, 1 << 20])
    pieces = list(bundle.frames(entries, size))
    assert all(0 < len(piece) <= size for piece in pieces)
    extents = bundle.extents(entries)
    landed = bundle.landing(extents)
    landed[:] = memoryview(b"".join(pieces))
    assert all(same(a, b) for a, b in zip(bundle.carve(landed, extents), values, strict=True))


@pytest.mark.parametrize("bad", [Extent("float99", (1,), 4), Extent("float32", (2,), 4), Extent("int8", (3,), 4)])
def test_an_extent_that_contradicts_itself_is_refused(bad: Extent) -> None:
    with pytest.raises(ValueError):
        bundle.carve(bundle.landing([bad]), [bad])
