"""The training of all workers of a layout beside that of one process."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realgraph.planner.plan.axes import coordinates_of
from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.training import SAMPLES, Case, Parts, Training, merged, minibatches, shares, train

_one: dict[Case, Training] = {}  # the training of one process


def alone(case: Case, models: Path) -> Training:
    if case.alone not in _one:
        found = train(LayoutRanks.alone(torch.device("cpu")), case.alone, models)
        assert found is not None
        _one[case.alone] = found
    return _one[case.alone]


def compare(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float, what: str) -> None:
    """Every tensor within `tolerance` of its largest entry."""
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, (what, name)
        scale = max(float(abs(expected).max()), 1e-30) if expected.size else 1.0
        worst = float(abs(ours[name] - expected).max()) / scale if expected.size else 0.0
        assert worst <= tolerance, (what, name, worst)


def compare_parts(found: Sequence[Parts], theirs: Parts, tolerance: float, what: str) -> None:
    """Every worker's part of each tensor as that part of the whole one, and together they are all of it."""
    assert {name for parts in found for name in parts} == theirs.keys()
    for name, (_, expected) in theirs.items():
        here = [parts[name] for parts in found if name in parts]
        boxes = {(start, values.shape) for start, values in here}
        assert sum(math.prod(shape) for _, shape in boxes) == expected.size, (what, name)
        scale = max(float(abs(expected).max()), 1e-30)
        for start, values in here:
            place = tuple(slice(first, first + n) for first, n in zip(start, values.shape, strict=True))
            worst = float(abs(values - expected[place]).max()) / scale if values.size else 0.0
            assert worst <= tolerance, (what, name, worst)


def check(case: Case, found: list[Training | None], one: Training, tolerance: float) -> None:
    """All workers of the layout against one process. tolerance: of all but weights and moments in float32."""
    here = [training for training in found if training is not None]
    assert len(here) == case.layout.mesh.n_devices
    assert len(one.gradients) == 2 * case.epochs
    check_metrics(case, here, one, tolerance)
    check_gradients(case, here, one, tolerance)
    check_states(case, here, one, tolerance)
    check_outputs(case, here, one, tolerance)


def _late(case: Case, tolerance: float) -> float:
    """The tolerance after steps whose directions rounding has changed."""
    return tolerance if case.dtype == "float64" else 1e-3


def check_metrics(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """All workers' metrics together: losses, gradient norms, and whatever else a train call returns."""
    late = _late(case, tolerance)
    for step in range(len(one.steps)):
        ours, expected = merged(here, step), merged([one], step)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=late, abs=late), (step, name)


def check_gradients(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Every gradient of every step, clipped."""
    for step, gradients in enumerate(one.gradients):
        stepped = [worker.gradients[step] for worker in here]
        within = tolerance if step == 0 else _late(case, tolerance)
        compare_parts(stepped, gradients, within, f"gradient of step {step}")
    assert {len(worker.gradients) for worker in here} == {len(one.gradients)}


def check_states(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Weights and moments after the last step."""
    late = _late(case, tolerance)
    compare_parts([worker.weights for worker in here], one.weights, late, "weights")
    compare_parts([worker.moments for worker in here], one.moments, late, "moments")


def check_outputs(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Outputs before the first step, of each sample: every worker has those of its data-parallel rank's samples."""
    layout = case.layout
    lengths = [batch.lengths for batch in minibatches(case.dtype, 0)]
    for worker, training in enumerate(here):
        assert training.before.keys() == one.before.keys()
        rank = coordinates_of(layout, layout.mesh.first + worker).dp
        for name, batches in one.before.items():
            for i, whole in enumerate(batches):
                n = [1] * SAMPLES if name == "scores" else lengths[i]
                samples = np.split(whole, np.cumsum(n)[:-1])
                expected = np.concatenate([whole[:0], *(samples[at] for at in shares(layout.dp)[i][rank])])
                compare({name: training.before[name][i]}, {name: expected}, tolerance, f"batch {i} of worker {worker}")
