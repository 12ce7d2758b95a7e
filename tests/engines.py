"""Train engines of a tiny model on one rank, and comparisons of their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realgraph.graphs.maths import Loss, PolicyGradient, TokenMean
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.parallel.groups import Collectives, LayoutRanks, Member
from realgraph.runtime.store.mail import Mail
from realgraph.runtime.store.store import Store
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.weights.handover import WeightHandover
from tests import tiny

CPU = torch.device("cpu")
OPTIMIZER = Optimizer(weight_decay=0.01)
POLICY = Loss({"policy": PolicyGradient()}, TokenMean())


class OneRank(Collectives):
    """Every layout as if it were this worker's alone."""

    def __init__(self) -> None:
        super().__init__(Member(0, 1, CPU, 1.0), None, ())

    def of_layout(self, layout: Layout, call: str = "") -> LayoutRanks:
        return LayoutRanks.alone(CPU)


def no_handover() -> WeightHandover:
    """A worker's that is never asked to hand anything over."""
    return WeightHandover(Store(1 << 16), lambda wants: {}, Mail(0, lambda worker, data: "nobody is there"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen3"))


def engine(folder: Path, role: dict[str, Any] | None = None, **settings: Any) -> TorchTrainEngine:
    settings = {"optimizer": OPTIMIZER, "total_steps": 20, **settings}
    role = {"trainable": True, **(role or {})}
    return open_engine(
        ModelRole(**role), str(folder), Layout(DeviceMesh(0, 1)), LayoutRanks.alone(CPU), TrainSettings(**settings)
    )


def call(loss: Loss = POLICY, lr: float = 1e-2, **changes: Any) -> Train:
    return Train(model="actor", loss=loss, lr=lr, optimizer=OPTIMIZER, **changes)


def weights_of(one: TorchTrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> bool:
    return all(float((a[n] - b[n]).abs().max()) <= tolerance * float(b[n].abs().max()) for n in a)


def optimizer(**changes: Any) -> Optimizer:
    return Optimizer(**{"weight_decay": 0.01, **changes})
