"""Schedules, the loss scale, and tensors on disk: the train engine's parts that need no model."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realgraph.graphs.spec import Optimizer
from realgraph.runtime.models.checkpoint_files import CheckpointTarget, Reader, TensorEntry, write
from realgraph.runtime.train.optimizer import LossScale, lr_factor


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("seed", range(10))
def test_schedules_rise_then_fall_and_end_at_the_fraction(schedule: Any, seed: int) -> None:
    rng = random.Random(seed)
    total, warmup, final = rng.randint(2, 50), rng.randint(0, 5), rng.random()
    settings = Optimizer(schedule=schedule, warmup_steps=warmup, final_lr_fraction=final)
    factors = [lr_factor(step, settings, total + warmup) for step in range(total + warmup + 3)]
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
    settings = Optimizer(schedule=schedule, warmup_steps=warmup)
    for step in range(warmup, total):
        (factor,) = (theirs.lr_lambdas[0](step),)
        assert lr_factor(step, settings, total) == pytest.approx(factor, abs=1e-12)
        assert factor > 0


def test_good_steps_double_the_scale() -> None:
    scale = LossScale(8.0, dynamic=True, patience=3)
    for _ in range(3):
        scale.succeeded()
    assert scale.value == 16.0
    assert [scale.overflowed() for _ in range(5)] == [True, True, True, True, False]
    assert scale.value == 1.0
    assert not LossScale().overflowed()


@pytest.mark.parametrize("seed", range(5))
def test_files_give_back_what_was_written(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    tensors: Sequence[tuple[str, Tensor]] = [
        (f"t{i}", torch.randn([rng.randint(0, 5) for _ in range(rng.randint(0, 3))]).to(rng.choice(dtypes)))
        for i in range(12)
    ]
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    write(CheckpointTarget(tmp_path, "x", rng.choice([100, 10**9])), entries, tensors)
    with Reader(tmp_path, "x") as reader:
        assert reader.names == {name for name, _ in tensors}
        for name, tensor in tensors:
            found = reader.part(name, tuple(slice(0, n) for n in tensor.shape))
            assert torch.equal(found, tensor)
            assert found.dtype == tensor.dtype
