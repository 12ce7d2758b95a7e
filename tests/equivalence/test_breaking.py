"""Mistakes made on purpose inside the ranks: the comparison with one process finds each of them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.stage import PipelineStage
from realgraph.runtime.parallel.tensor.pieces import TensorCut
from tests.equivalence.comparing import alone, check, check_gradients, check_metrics, check_states
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, Training, train
from tests.ranks import RankProcesses


def leave_unsummed(patch: pytest.MonkeyPatch, pattern: str) -> None:
    """Gradients of parameters of such names stay what each tensor-parallel rank has added up itself."""
    sum_copies = TensorCut.sum_copies

    def sum_others(cut: TensorCut, grads: Mapping[str, Tensor]) -> None:
        sum_copies(cut, {name: grad for name, grad in grads.items() if not re.search(pattern, name)})

    patch.setattr(TensorCut, "sum_copies", sum_others)


MISTAKES: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "QK-norms unsummed": lambda patch: leave_unsummed(patch, r"[qk]_norm"),
    "norms unsummed": lambda patch: leave_unsummed(patch, r"layernorm"),
    "KV copies unsummed": lambda patch: leave_unsummed(patch, r"[kv]_proj"),
    "tied embedding unsummed": lambda patch: patch.setattr(PipelineStage, "sum_tied", lambda *_: None),
    "tensor copies counted twice": lambda patch: patch.setattr(TensorCut, "owns", lambda *_: True),
    "tied embedding counted twice": lambda patch: patch.setattr(PipelineStage, "owns", lambda *_: True),
}
CASES = [
    ("QK-norms unsummed", "qwen3", "rl", "tp2"),
    ("QK-norms unsummed", "qwen3", "sft", "fsdp2 tp2"),
    ("norms unsummed", "llama", "sft", "tp2"),
    ("KV copies unsummed", "qwen2", "rl", "tp4"),
    ("tied embedding unsummed", "qwen3", "rl", "pp2"),
    ("tied embedding unsummed", "qwen2", "sft", "tp2 pp2"),
    ("tensor copies counted twice", "qwen3", "rl", "tp2"),
    ("tensor copies counted twice", "qwen2", "rl", "tp4"),
    ("tied embedding counted twice", "qwen3", "rl", "pp2"),
]


def train_wrongly(ranks: LayoutRanks, case: Case, models: Path, mistake: str) -> Training | None:
    """`train`, with a mistake that every rank makes."""
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake](patch)
        return train(ranks, case, models)


@pytest.mark.parametrize(("mistake", "model", "loss", "layout"), CASES)
def test_each_mistake_is_found(
    four: RankProcesses, models: Path, mistake: str, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", LAYOUTS[layout])
    one = alone(case, models)
    found = four.run(train_wrongly, case, models, mistake)
    with pytest.raises(AssertionError):
        check(case, found, one, 1e-10)
    here = [training for training in found if training is not None]
    for part in (check_metrics, check_gradients, check_states):  # each alone: norms, what they clip, what that changes
        with pytest.raises(AssertionError):
            part(case, here, one, 1e-10)
    check(case, four.run(train, case, models), one, 1e-10)  # without it all is well


def test_every_mistake_is_made() -> None:
    assert {mistake for mistake, *_ in CASES} == MISTAKES.keys()
