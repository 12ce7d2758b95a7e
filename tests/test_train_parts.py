"""Schedules, the loss scale, and tensors on disk: the train engine's parts that need no model."""

import random
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from realgraph.graphs.spec import Optimizer
from realgraph.runtime.job.run_folder import write_at
from realgraph.runtime.models import checkpoint_files
from realgraph.runtime.models.checkpoint_files import CheckpointTarget, Reader, TensorEntry, Writer, write_parts
from realgraph.runtime.parallel.cuts import Box, split
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.routes import Gap
from realgraph.runtime.parallel.shares import shares
from realgraph.runtime.train.optimizer import LossScale, lr_factor


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("seed", range(10))
def test_schedules_rise_then_fall_and_end_at_the_fraction(schedule: Any, seed: int) -> None:
    rng = random.Random(seed)
    total, warmup, final = rng.randint(2, 50), rng.randint(0, 5), rng.random()
    chosen = Optimizer(schedule=schedule, warmup_steps=warmup, final_lr_fraction=final)
    factors = [lr_factor(step, chosen, total + warmup) for step in range(total + warmup + 3)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup] == 1
    if schedule != "constant":
        assert factors[total + warmup - 1] > final  # the last step that is taken, also where the fraction is 0
        assert factors[total + warmup :] == pytest.approx([final] * 3, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 0), (10, 3), (7, 7), (100, 10)])
def test_after_the_warm_up_schedules_are_those_of_transformers(schedule: Any, total: int, warmup: int) -> None:
    from transformers import get_scheduler

    theirs: Any = get_scheduler(schedule, torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup, total)
    chosen = Optimizer(schedule=schedule, warmup_steps=warmup)
    for step in range(warmup, total):
        (factor,) = (theirs.lr_lambdas[0](step),)
        assert lr_factor(step, chosen, total) == pytest.approx(factor, abs=1e-12)
        assert factor > 0


def test_good_steps_double_the_scale() -> None:
    scale = LossScale(8.0, dynamic=True, patience=3)
    for _ in range(3):
        scale.succeeded()
    assert scale.value == 16.0
    assert [scale.overflowed() for _ in range(5)] == [True, True, True, True, False]
    assert scale.value == 1.0
    assert not LossScale().overflowed()


@st.composite
def held(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[int, dict[str, Box]]]:
    """Tensors by their shapes, and the boxes of a grid of each that workers hold: every part on one at least."""
    sizes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {f"t{i}": shape for i, shape in enumerate(draw(st.lists(sizes, min_size=1, max_size=6)))}
    workers = draw(st.integers(1, 5))
    found: dict[int, dict[str, Box]] = {worker: {} for worker in range(workers)}
    for name, shape in shapes.items():
        parts = [Box((0,) * len(shape), shape)]
        if shape:
            dim = draw(st.integers(0, len(shape) - 1))
            cuts = range(draw(st.integers(1, min(workers, shape[dim]))))
            spans = [split(shape[dim], len(cuts), i) for i in cuts]
            first, size = parts[0]
            parts = [Box((*first[:dim], at, *first[dim + 1 :]), (*size[:dim], n, *size[dim + 1 :])) for at, n in spans]
        for worker, i in enumerate(draw(st.permutations(range(workers)))):
            if i < len(parts) or draw(st.booleans()):
                found[worker][name] = parts[i % len(parts)]
    return shapes, found


@pytest.mark.parametrize(("n_tensors", "n_files"), [(1, 1), (6, 1), (7, 2), (40, 7), (400, 8), (4800, 10)])
def test_files_are_as_many_as_several_writers_need(n_tensors: int, n_files: int) -> None:
    """Tensors of 10 MB: files of 64 MB at least, eight where there is more, of 5 GB at most."""
    entries = [TensorEntry(f"t.{i}", torch.float32, (2500, 1000)) for i in range(n_tensors)]
    files = checkpoint_files._tensor_files(CheckpointTarget(Path(), "x"), entries)
    assert len(files) == n_files
    assert [name for file in files for name in file.starts] == [entry.name for entry in entries]


@pytest.mark.parametrize("n", range(1, 9))
def test_writers_begin_with_different_files_and_leave_none_out(n: int) -> None:
    entries = [TensorEntry(f"t.{i}", torch.float32, (1000,)) for i in range(40)]
    files = checkpoint_files._tensor_files(CheckpointTarget(Path(), "x", 20_000), entries)
    number = {name: i for i, file in enumerate(files) for name in file.starts}
    parts = [WeightPart(entry.name, Box((0,), (1000,)), torch.empty(1000)) for entry in entries]
    walks = []
    for writer in range(n):
        turns = [number[part.name] for part in checkpoint_files._apart(parts, files, Writer(writer, n))]
        walks.append([turns[0], *(b for a, b in pairwise(turns) if a != b)])
    assert all(sorted(walk) == list(range(8)) for walk in walks)
    assert all(len(set(at_a_time)) == n for at_a_time in zip(*walks, strict=True))


@settings(max_examples=60)
@given(held(), st.sampled_from([100, 10**9]), st.sampled_from([16, 64, 10**6]), st.randoms(use_true_random=False))
def test_writers_of_parts_write_the_files_of_one_writer(
    case: tuple[dict[str, tuple[int, ...]], dict[int, dict[str, Box]]], limit: int, bucket: int, rng: random.Random
) -> None:
    """In any order, a bucket at a time, each element once; the safetensors package reads what they wrote."""
    shapes, boxes = case
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    full = {name: torch.randn(shape).to(rng.choice(dtypes)) for name, shape in shapes.items()}
    entries = [TensorEntry(name, tensor.dtype, shapes[name]) for name, tensor in full.items()]
    entries.append(TensorEntry("empty", torch.float32, (0, 3)))
    mine = shares(boxes, shapes)
    assert sum(box.numel for share in mine.values() for own in share.values() for box in own) == sum(
        tensor.numel() for tensor in full.values()
    )
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "BUCKET_BYTES", bucket)
        sizes, put = [0], write_at

        def noted(handle: int, data: memoryview, offset: int) -> None:
            sizes.append(len(data) if offset else 0)  # the header comes first
            put(handle, data, offset)

        patch.setattr(checkpoint_files, "write_at", noted)
        several, one = Path(folder) / "several", Path(folder) / "one"
        several.mkdir()
        one.mkdir()
        for worker in rng.sample(sorted(mine), len(mine)):
            own = [(name, box) for name, found in mine[worker].items() for box in found]
            assert all(boxes[worker][name].intersect(box) == box for name, box in own)
            parts = [WeightPart(name, box, full[name][box.slices]) for name, box in rng.sample(own, len(own))]
            write_parts(CheckpointTarget(several, "x", limit), entries, parts, Writer(worker, len(mine)))
        whole = [WeightPart(name, Box((0,) * t.ndim, tuple(t.shape)), t) for name, t in full.items()]
        write_parts(CheckpointTarget(one, "x", limit), entries, whole, Writer())
        assert {f.name: f.read_bytes() for f in several.iterdir()} == {f.name: f.read_bytes() for f in one.iterdir()}
        assert max(sizes) <= bucket
        theirs = [load_file(file) for file in several.glob("*.safetensors")]
        assert {name for file in theirs for name in file} == {*full, "empty"}
        assert all(torch.equal(tensor, full[name]) for file in theirs for name, tensor in file.items() if name in full)
        with Reader(several, "x") as reader:
            for worker, own_boxes in boxes.items():
                for name, box in own_boxes.items():
                    values = torch.empty(box.shape, dtype=full[name].dtype)
                    reader.read(name, WeightPart(name, box, values))
                    assert torch.equal(values, full[name][box.slices]), worker


def test_copies_share_the_writing_and_a_part_that_nobody_has_is_named() -> None:
    shapes = {"large": (1024, 512), "small": (7,), "other": (512, 1024)}
    whole = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
    found = shares(dict.fromkeys(range(3), whole), shapes)
    written = [sum(box.numel for boxes in mine.values() for box in boxes) for mine in found.values()]
    assert sum(written) == 1024 * 512 * 2 + 7
    assert max(written) - min(written) <= 2 * 1024
    cut = Box((0, 0), (1024, 100))
    with pytest.raises(Gap, match=r"no worker holds \[0:1024, 100:512\] of 'large'"):
        shares({0: {**whole, "large": cut}, 1: {"large": cut}}, shapes)
