"""Common beginnings that tensor-parallel ranks compute once: the training of one process that computes all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.runtime.attention.sharing import Shared, share_prefixes
from realgraph.runtime.models import models as models_module
from realgraph.runtime.models.models import PackedModel
from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.comparing import check
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, Training, train
from tests.ranks import RankProcesses

TOLERANCE = 2e-5  # a beginning's gradients are summed in another order, and how much that changes depends on the CPU
CASES = [
    ("none", "qwen3", "rl", "tp2"),
    ("none", "qwen2", "rl", "tp4"),
    ("full", "mistral", "sft", "dp2 tp2"),
    ("none", "gemma2", "rl", "tp2"),
    ("none", "llama", "value", "fsdp2 tp2"),
    ("full", "qwen3", "rl", "tp2 pp2"),
]


def train_sharing(ranks: LayoutRanks, case: Case, models: Path) -> tuple[Training | None, int]:
    """`train`, and the tokens that were not computed as they were already."""
    saved = [0]

    def counted(*arguments: Any) -> Shared | None:
        shared = share_prefixes(*arguments)
        saved[0] += 0 if shared is None else len(shared.place) - len(shared.kept)
        return shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_module, "share_prefixes", counted)
        return train(ranks, case, models), saved[0]


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "model", "loss", "layout"), CASES)
def test_beginnings_computed_once_train_as_those_computed_each(
    four: RankProcesses, models: Path, recompute: Any, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float32", LAYOUTS[layout], recompute, alike=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedModel, "_shares", lambda *_: False)
        one, saved = train_sharing(LayoutRanks.alone(torch.device("cpu")), case.alone, models)
    assert one is not None and saved == 0
    found, counts = zip(*four.run(train_sharing, case, models), strict=True)
    here = [count for training, count in zip(found, counts, strict=True) if training is not None]
    assert max(here) > 0
    check(case, [*found], one, TOLERANCE)
