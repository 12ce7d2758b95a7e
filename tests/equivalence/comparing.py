"""The training of all workers of a layout beside that of one process."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.training import Case, Parts, Training, merged, train

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
        if case.loss in ("sft", "pairs", "sequences") and case.layout.dp * case.layout.cp > 1:
            del expected["entropy"]  # as a metric alone it is that of a data-parallel rank's first micro-batch
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=late, abs=late), (step, name)


def check_gradients(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Every gradient of every step, clipped."""
    for step, gradients in enumerate(one.gradients):
        stepped = [worker.gradients[step] for worker in here]
        within = tolerance if step == 0 else _late(case, tolerance)
        compare_parts(stepped, gradients, within, f"gradient of step {step}")
    assert {len(worker.gradients) for worker in here} == {len(one.gradients)} == {2 * case.epochs}


def check_states(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Weights and moments after the last step."""
    late = _late(case, tolerance)
    compare_parts([worker.weights for worker in here], one.weights, late, "weights")
    compare_parts([worker.moments for worker in here], one.moments, late, "moments")


def check_outputs(case: Case, here: Sequence[Training], one: Training, tolerance: float) -> None:
    """Outputs before the first step."""
    layout = case.layout
    last = here[-len(here) // layout.pp :]  # the last stage
    heads = last[:: layout.tp * layout.cp]
    for batch, expected in one.before.items():
        parts = [worker.before[batch] for worker in heads]
        assert sum(part.size for part in parts) == expected.size
        if layout.dp == 1:
            for worker in here:
                compare({"out": worker.before[batch]}, {"out": expected}, max(tolerance, 1e-6), f"outputs of {batch}")
