"""The tensor store: it equals a dict of clones, whatever is put, dropped and looked at; its memory does not grow."""

import gc
import itertools
import os
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realgraph.runtime.memory.anonymous import ALIGN_BYTES
from realgraph.runtime.store.memory import Arena, SharedBlock
from realgraph.runtime.store.store import DTYPES, MissingValueError, Store


def random_value(rng: random.Random, limit: int = 5000) -> Tensor:
    """A tensor of any dtype, of 0 to 3 dims, sometimes a view that is not contiguous."""
    dtype = DTYPES[rng.choice(sorted(DTYPES))]
    shape = [rng.choice([0, 1, 2, 3, rng.randint(1, 17)]) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.1:
        shape = [rng.randint(1, limit)]
    count = torch.Size(shape).numel()
    raw = torch.tensor(list(rng.randbytes(count * dtype.itemsize)), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    value = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return value.transpose(0, -1) if value.dim() > 1 and rng.random() < 0.5 else value


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, not-a-number included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_a_store_equals_a_dict_of_clones(seed: int) -> None:
    """Random puts, replacements, drops and views: also the views of what was dropped or replaced keep their bytes."""
    rng = random.Random(seed)
    store, truth = Store(host_segment_bytes=1 << rng.randint(13, 17)), dict[tuple[str, int], Tensor]()
    views = list[tuple[Tensor, Tensor]]()
    for _ in range(rng.randint(1, 40)):
        key = rng.choice("abc")
        match rng.randint(0, 4):
            case 0 | 1:
                ids = rng.sample(range(12), rng.randint(0, 6))
                values = [random_value(rng) for _ in ids]
                store.put(key, ids, values)
                truth |= {(key, id): value.clone() for id, value in zip(ids, values, strict=True)}
            case 2:
                ids = rng.sample(range(12), rng.randint(0, 6))
                gone = [(key, id) for id in ids if (key, id) in truth]
                assert store.drop([key], ids) == len(gone)
                for one in gone:
                    del truth[one]
            case 3:
                odd = rng.randint(0, 1)

                def is_odd(key: str, id: int, odd: int = odd) -> bool:
                    return key == "b" and id % 2 == odd

                store.drop_where(is_odd)
                truth = {(k, i): v for (k, i), v in truth.items() if not (k == "b" and i % 2 == odd)}
            case 4 if truth:
                key, id = rng.choice(sorted(truth))
                views.append((store.get(key, id), truth[key, id]))
                del views[: -rng.randint(1, 10)]
        assert all(same(store.get(key, id), value) for (key, id), value in truth.items())
        assert all(same(view, value) for view, value in views)
        keys = store.keys()
        assert {(k, i) for k in keys for i in store.ids(k)} == truth.keys()
        assert store.nbytes == sum(value.nbytes for value in truth.values())
    store.close()
    assert all(same(view, value) for view, value in views)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_pieces_are_the_values_cut_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    store = Store(host_segment_bytes=1 << 17)
    dtype = DTYPES[rng.choice(["bool", "uint8", "int64", "float32"])]
    sizes = [rng.choice([0, 1, 5, 300, 30_000]) for _ in range(rng.randint(0, 40))]
    drawn = np.frombuffer(rng.randbytes(sum(sizes)), np.uint8).copy()
    whole = torch.from_numpy(drawn).to(dtype)
    ids = rng.sample(range(100), len(sizes))
    store.put_pieces("a", ids, whole, sizes)
    for id, piece in zip(ids, torch.split(whole, sizes) if sizes else (), strict=True):
        entry = store.entries("a", [id])[0]
        assert same(entry.tensor, piece)
        assert bytes(entry.raw) == piece.numpy().tobytes()
    assert store.nbytes == whole.nbytes
    store.drop(["a"], ids)
    assert not store.nbytes
    assert not store.keys()
    with pytest.raises(ValueError, match="1 ids but 2 values"):
        store.put_pieces("a", [1], whole, [0, 0])


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_blocks_never_overlap_and_all_memory_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    arena = Arena(1 << 14)
    blocks: list[SharedBlock] = []
    for _ in range(rng.randint(1, 120)):
        if blocks and rng.random() < 0.45:
            blocks.pop(rng.randrange(len(blocks)))
        else:
            blocks.append(arena.allocate(rng.choice([1, 63, 64, 65, 4096, rng.randint(1, 40_000)])))
        spans = sorted((b.segment, b.offset, b.offset + b.nbytes) for b in blocks)
        assert all(b.offset % ALIGN_BYTES == 0 for b in blocks)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
        assert arena.live_bytes >= sum(b.nbytes for b in blocks)
    blocks.clear()
    assert arena.live_bytes == 0
    assert arena.reserved_bytes <= arena.segment_bytes
    whole = arena.allocate(arena.segment_bytes)  # the halves have found one another again
    assert arena.reserved_bytes <= 2 * arena.segment_bytes
    assert whole.nbytes == arena.segment_bytes


def test_memory_does_not_grow_over_thousands_of_steps() -> None:
    """A window of three steps of samples of random lengths, and a large tensor that is replaced every step."""
    rng = random.Random(0)
    store = Store(host_segment_bytes=1 << 17)
    weights = torch.zeros(140_000, dtype=torch.uint8)
    reserved, descriptors = set[int](), set[int]()
    for step in range(2000):
        ids = range(4 * step, 4 * step + 4)
        store.put("tokens", ids, [torch.zeros(rng.randint(1, 2000), dtype=torch.int32) for _ in ids])
        store.put("weights", [0], [weights[step % 7 :]])
        store.drop(["tokens"], range(4 * (step - 3), 4 * (step - 2)))
        if step >= 100 and step % 50 < 4:
            reserved.add(store.arena.reserved_bytes)
            descriptors.add(len(os.listdir("/dev/fd")))
    assert max(reserved) <= 1 << 20
    assert max(descriptors) - min(descriptors) <= 8
    store.close()


def test_descriptors_and_mappings_go_with_the_store() -> None:
    gc.collect()
    before = len(os.listdir("/dev/fd"))
    store = Store(host_segment_bytes=1 << 16)
    store.put("a", range(50), [torch.zeros(30_000, dtype=torch.uint8) for _ in range(50)])
    assert len(os.listdir("/dev/fd")) > before
    store.close()
    del store
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before


def test_threads_may_put_drop_and_look_at_once() -> None:
    store, errors = Store(host_segment_bytes=1 << 18), list[BaseException]()

    def work(worker: int) -> None:
        rng = random.Random(worker)
        try:
            for n in range(300):
                value = torch.full((rng.randint(1, 3000),), worker * 1000 + n, dtype=torch.int32)
                store.put("x", [worker], [value])
                assert torch.equal(store.get("x", worker), value)
                other = store.get("x", worker)
                store.drop(["x"], [worker])
                assert torch.equal(other, value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert store.nbytes == 0


@pytest.mark.parametrize("text", ["", "seven", "Grüße, 世界 \N{SNOWMAN}", "x" * 100_000])
def test_texts_come_back(text: str) -> None:
    store = Store()
    store.put_text("text", [3], [text])
    assert store.text("text", 3) == text
    store.put_text("text", [3], [text.encode()])
    assert store.text("text", 3) == text


def test_a_reserved_value_is_filled_in_place() -> None:
    store = Store()
    store.reserve("w", 0, (3, 4), torch.bfloat16).fill_(1.5)
    assert torch.equal(store.get("w", 0), torch.full((3, 4), 1.5, dtype=torch.bfloat16))


def test_mistakes_are_named_and_change_nothing() -> None:
    store = Store()
    store.put("a", [1], [torch.ones(2)])
    with pytest.raises(MissingValueError, match="holds no 'a' of id 2"):
        store.get("a", 2)
    with pytest.raises(MissingValueError, match="holds no 'b' of id 1"):
        store.get("b", 1)
    with pytest.raises(ValueError, match="'a': 2 ids but 1 values"):
        store.put("a", [1, 2], [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"'a' of id 3 is a .* on meta"):
        store.put("a", [1, 3], [torch.zeros(2), torch.zeros(2, device="meta")])
    assert store.ids("a") == (1,)
    assert torch.equal(store.get("a", 1), torch.ones(2))
    with pytest.raises(ValueError, match="power of two"):
        Store(host_segment_bytes=5000)
