"""The training of all workers of a layout beside that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.planner.plan.layout import Layout
from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.training import Case, Training, merged, train

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


def joined_stages(found: list[Training], layout: Layout) -> list[Training]:
    """The workers of each copy's stages as one that has all layers. A parameter that lies on two has one gradient."""
    size = len(found) // layout.pp
    whole = []
    for first, *later in (found[place::size] for place in range(size)):
        for other in later:
            for ours, theirs in zip([*first.gradients, first.moments], [*other.gradients, other.moments], strict=True):
                for name in ours.keys() & theirs.keys():
                    assert (ours[name] == theirs[name]).all(), name
                ours.update(theirs)
            assert first.weights.keys() == other.weights.keys()
            assert all((first.weights[name] == tensor).all() for name, tensor in other.weights.items())
        whole.append(first)
    return whole


def check(case: Case, found: list[Training | None], one: Training, tolerance: float) -> None:
    """All workers of the layout against one process. tolerance: of all but weights and moments in float32."""
    late = tolerance if case.dtype == "float64" else 1e-3  # after steps whose directions rounding has changed
    here = [training for training in found if training is not None]
    assert len(here) == case.layout.mesh.n_devices
    for step in range(len(one.steps)):
        ours, expected = merged(here, step), merged([one], step)
        assert ours.keys() == expected.keys()
        if case.loss in ("sft", "pairs", "sequences") and case.layout.dp * case.layout.cp > 1:
            del expected["entropy"]  # as a metric alone it is that of a data-parallel rank's first micro-batch
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=late, abs=late), (step, name)
    for worker in here if case.layout.pp == 1 else joined_stages(here, case.layout):
        assert len(worker.gradients) == len(one.gradients) == 4
        for step, gradients in enumerate(one.gradients):
            compare(worker.gradients[step], gradients, tolerance if step == 0 else late, f"gradient of step {step}")
        compare(worker.weights, one.weights, late, "weights")
        compare(worker.moments, one.moments, late, "moments")
        for seen, expected in zip([*worker.gradients, worker.moments], [*one.gradients, one.moments], strict=True):
            assert seen.keys() == expected.keys()
    layout = case.layout
    last = here[-len(here) // layout.pp :]  # the last stage
    heads = last[:: layout.tp * layout.cp]
    for batch, expected in one.before.items():
        parts = [worker.before[batch] for worker in heads]
        assert sum(part.size for part in parts) == expected.size
        if case.layout.dp == 1:
            for worker in here:
                compare({"out": worker.before[batch]}, {"out": expected}, max(tolerance, 1e-6), f"outputs of {batch}")
