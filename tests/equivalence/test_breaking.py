"""Mistakes made on purpose inside the ranks: the comparison with one process finds each of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from realgraph.runtime.batch import Packed
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.stage import PipelineStage
from realgraph.runtime.parallel.tensor.pieces import TensorCut
from realgraph.runtime.train import passes
from realgraph.runtime.train.observed import observed
from realgraph.runtime.wire.metrics import Mean
from tests.equivalence.comparing import alone, check, check_gradients, check_metrics, check_outputs, check_states
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, Training, train
from tests.ranks import RankProcesses


def leave_unsummed(patch: pytest.MonkeyPatch, pattern: str) -> None:
    """Gradients of parameters of such names stay what each tensor-parallel rank has added up itself."""
    sum_copies = TensorCut.sum_copies

    def sum_others(cut: TensorCut, grads: Mapping[str, Tensor]) -> None:
        sum_copies(cut, {name: grad for name, grad in grads.items() if not re.search(pattern, name)})

    patch.setattr(TensorCut, "sum_copies", sum_others)


def count_prompts(patch: pytest.MonkeyPatch) -> None:
    """The mean of entropies is over all tokens, those of prompts too."""

    def of_all(batch: Packed, *others: Any) -> dict[str, Mean]:
        return observed(replace(batch, mask=torch.ones_like(batch.mask)), *others)

    patch.setattr(passes, "observed", of_all)


class Mistake(NamedTuple):
    """make: patches the code under test. found_by: the comparisons that find it, each alone."""

    make: Callable[[pytest.MonkeyPatch], None]
    found_by: tuple[Callable[[Case, Sequence[Training], Training, float], None], ...]


SUMS = check_metrics, check_gradients, check_states  # norms, what they clip, what that changes
MISTAKES: Mapping[str, Mistake] = {
    "QK-norms unsummed": Mistake(lambda patch: leave_unsummed(patch, r"[qk]_norm"), SUMS),
    "norms unsummed": Mistake(lambda patch: leave_unsummed(patch, r"layernorm"), SUMS),
    "KV copies unsummed": Mistake(lambda patch: leave_unsummed(patch, r"[kv]_proj"), SUMS),
    "tied embedding unsummed": Mistake(lambda patch: patch.setattr(PipelineStage, "sum_tied", lambda *_: None), SUMS),
    "tensor copies counted twice": Mistake(lambda patch: patch.setattr(TensorCut, "owns", lambda *_: True), SUMS),
    "tied embedding counted twice": Mistake(lambda patch: patch.setattr(PipelineStage, "owns", lambda *_: True), SUMS),
    "outputs in the order of micro-batches": Mistake(
        lambda patch: patch.setattr(passes, "rejoin", lambda cuts, values, lengths: values), (check_outputs,)
    ),
    "entropies of prompts counted": Mistake(count_prompts, (check_metrics,)),
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
    ("outputs in the order of micro-batches", "qwen3", "sft", "dp2"),
    ("outputs in the order of micro-batches", "llama", "value", "fsdp2 tp2"),
    ("entropies of prompts counted", "qwen3", "sft", "dp2"),
    ("entropies of prompts counted", "qwen2", "sft", "cp2"),
]


def train_wrongly(ranks: LayoutRanks, case: Case, models: Path, mistake: str) -> Training | None:
    """`train`, with a mistake that every rank makes."""
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake].make(patch)
        return train(ranks, case, models)


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "model", "loss", "layout"), CASES)
def test_each_mistake_is_found(
    four: RankProcesses, models: Path, mistake: str, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", LAYOUTS[layout], epochs=1)
    one = alone(case, models)
    found = four.run(train_wrongly, case, models, mistake)
    with pytest.raises(AssertionError):
        check(case, found, one, 1e-10)
    here = [training for training in found if training is not None]
    for compared in MISTAKES[mistake].found_by:
        with pytest.raises(AssertionError):
            compared(case, here, one, 1e-10)
    check(case, four.run(train, case, models), one, 1e-10)  # without it all is well


def test_every_mistake_is_made() -> None:
    assert {mistake for mistake, *_ in CASES} == MISTAKES.keys()
