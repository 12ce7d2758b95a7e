"""Training under any layout equals that of one process: outputs, losses, every gradient and its norm, weights and
moments."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings

from realgraph.runtime.cpu.train import lean_trains
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.errors import NumericsError
from tests import tiny
from tests.equivalence.comparing import alone, check, compare
from tests.equivalence.drawn import RANKS, cases, every_layout
from tests.equivalence.layouts import EIGHT, LAYOUTS
from tests.equivalence.training import LOSSES, MODELS, Case, call_of, minibatches, open_case, ranks_of, train
from tests.ranks import RankProcesses

# (model, loss, layout): of tied and untied, QK-norm, biases, softcaps, windows, odd widths, 2 KV heads on 4 ranks,
# experts narrower than 4 ranks
EXACT = [
    ("qwen3", "rl", "tp2"),
    ("qwen3", "rl", "tp4"),
    ("qwen3", "rl", "dp2 tp2"),
    ("qwen2", "sft", "tp2 apart"),
    ("llama", "sft", "tp2"),
    ("llama", "value", "fsdp2 tp2"),
    ("qwen2", "rl", "tp4"),
    ("qwen2", "sft", "dp2 tp2"),
    ("gemma2", "rl", "fsdp2 tp2"),
    ("gemma2", "sft", "tp4"),
    ("gemma3", "rl", "tp4"),
    ("gemma3", "sft", "dp2 tp2"),
    ("mistral", "rl", "tp4"),
    ("mistral", "value", "fsdp2 tp2"),
    ("qwen3", "rl", "cp2"),
    ("qwen3", "rl", "cp4"),
    ("qwen3", "rl", "dp2 cp2"),
    ("mistral", "sft", "cp2 apart"),
    ("llama", "rl", "fsdp cp2 tp2"),
    ("qwen2", "pairs", "dp2 cp2"),
    ("qwen2", "scores", "cp2 tp2"),
    ("llama", "sequences", "cp2"),
    ("gemma2", "rl", "cp2"),
    ("gemma2", "sft", "fsdp2 cp2"),
    ("gemma3", "rl", "cp4"),
    ("gemma3", "sft", "cp2 tp2"),
    ("mistral", "rl", "cp2 tp2"),
    ("mistral", "value", "fsdp2 cp2"),
    ("qwen3", "rl", "pp2"),
    ("qwen3 deep", "rl", "pp4"),
    ("mistral", "rl", "dp2 pp2"),
    ("qwen3", "rl", "tp2 pp2"),
    ("qwen3", "rl", "fsdp2 pp2"),
    ("qwen3 deep", "rl", "pp2 uneven"),
    ("qwen3 deep", "rl", "pp2 twice"),
    ("qwen3 deep", "rl", "fsdp2 pp2 twice"),
    ("qwen3 deep", "value", "tp2 pp2 twice"),
    ("llama", "value", "pp2"),
    ("llama", "sft", "dp2 pp2"),
    ("llama deep", "rl", "pp4"),
    ("llama deep", "value", "dp2 pp2 twice"),
    ("llama deep", "rl", "fsdp2 pp2 twice"),
    ("qwen2", "sft", "tp2 pp2"),
    ("gemma2", "rl", "dp2 pp2"),
    ("gemma2 deep", "rl", "tp2 pp2 twice"),
    ("gemma3 deep", "rl", "pp2 twice"),
    ("mistral", "value", "fsdp2 pp2"),
    ("qwen2", "rl", "cp2 pp2"),
    ("gemma2", "rl", "cp2 pp2"),
    ("gemma3 deep", "sft", "cp2 pp2 twice"),
    ("qwen2", "value", "fsdp cp2 pp2"),
    ("gemma2", "rl", "dp4"),
    ("gemma3", "rl", "fsdp4"),
    ("gemma3", "rl", "dp2 cp2"),
    ("mistral", "sft", "dp4"),
    ("llama", "rl", "fsdp4"),
    ("gemma", "rl", "tp2"),
    ("gemma", "sft", "tp4"),
    ("gemma", "rl", "dp2"),
    ("gemma", "value", "fsdp2"),
    ("gemma", "rl", "cp2 tp2"),
    ("gemma", "sft", "cp2 apart"),
    ("gemma", "rl", "pp2"),
    ("gemma", "rl", "tp2 pp2"),
    ("qwen3_moe", "rl", "dp2"),
    ("qwen3_moe", "rl", "fsdp2"),
    ("mixtral", "rl", "fsdp2"),
    ("mixtral", "rl", "tp4"),
    ("mixtral", "sft", "dp2 tp2"),
    ("qwen3_moe", "balanced", "tp4"),
    ("mixtral", "balanced", "ep2 tp4"),
    ("qwen3_moe deep", "balanced", "pp2 twice"),
    ("mixtral", "balanced", "ep2 tp2 pp2"),
    ("qwen3_moe", "balanced", "cp2 pp2"),
    ("qwen3_moe", "rl", "ep2"),
    ("qwen3_moe", "rl", "ep4"),
    ("qwen3_moe", "rl", "ep2 tp2"),
    ("qwen3_moe", "rl", "ep4 tp2"),
    ("qwen3_moe", "rl", "ep2 fsdp4"),
    ("qwen3_moe", "value", "ep2 dp4"),
    ("mixtral", "rl", "ep2 dp4"),
    ("mixtral", "sft", "ep4 tp2"),
    ("mixtral", "rl", "ep2 fsdp2"),
    ("qwen3_moe", "rl", "ep2 pp2"),
    ("qwen3_moe", "value", "ep2 tp2 pp2"),
    ("qwen3_moe deep", "rl", "ep2 pp2 twice"),
    ("qwen3_moe", "rl", "ep2 fsdp2 pp2"),
    ("qwen3_moe", "balanced", "ep2 cp2"),
    ("qwen3_moe", "rl", "ep2 dp2 cp2"),
    ("qwen3_moe", "balanced", "ep2 cp2 tp2"),
    ("qwen3_moe", "rl", "ep2 fsdp2 cp2"),
    ("qwen3_moe", "value", "fsdp cp2 tp2 ep2"),
    ("mixtral", "rl", "pp2"),
    ("mixtral", "sft", "tp2 pp2"),
    ("mixtral", "rl", "ep2 pp2"),
    ("mixtral", "rl", "fsdp2 pp2"),
    ("mixtral", "rl", "ep2 fsdp2 pp2"),
    ("mixtral", "sft", "ep4 dp2 cp2"),
    ("mixtral", "rl", "ep2 fsdp2 cp2"),
    ("gpt_oss", "rl", "dp2 tp2"),
    ("gpt_oss", "sft", "tp4"),
    ("gpt_oss", "balanced", "tp2"),
    ("gpt_oss", "value", "fsdp2"),
    ("gpt_oss", "rl", "fsdp2 tp2"),
    ("gpt_oss", "rl", "ep2"),
    ("gpt_oss", "sft", "ep4"),
    ("gpt_oss", "rl", "ep4 tp2"),
    ("gpt_oss", "rl", "ep2 fsdp4"),
    ("gpt_oss", "rl", "cp2 tp2"),
    ("gpt_oss", "sft", "cp4"),
    ("gpt_oss", "rl", "ep2 fsdp2 cp2"),
    ("gpt_oss", "rl", "pp2"),
    ("gpt_oss", "value", "tp2 pp2"),
    ("gpt_oss", "rl", "ep2 fsdp2 pp2"),
    ("gpt_oss deep", "rl", "ep2 pp2 twice"),
    ("gpt_oss", "replayed", "ep2 cp2 tp2"),
    ("deepseek", "rl", "dp2 tp2"),
    ("deepseek", "sft", "tp4"),
    ("deepseek", "balanced", "tp2"),
    ("deepseek", "value", "fsdp2 tp2"),
    ("deepseek", "rl", "ep4 tp2"),
    ("deepseek", "sft", "ep2 fsdp4"),
    ("deepseek", "rl", "cp2 tp2"),
    ("deepseek", "rl", "ep2 fsdp2 cp2"),
    ("deepseek", "rl", "pp2"),
    ("deepseek", "rl", "ep2 tp2 pp2"),
    ("deepseek deep", "rl", "ep2 pp2 twice"),
    ("deepseek deep", "rl", "tp2 pp2 twice"),
    ("deepseek", "replayed", "ep2 cp2 tp2"),
    ("qwen3_moe", "replayed", "ep2"),
    ("qwen3_moe", "replayed", "tp2"),
    ("qwen3_moe", "replayed", "pp2"),
    ("qwen3_moe", "replayed", "cp2"),
    ("mixtral", "replayed", "fsdp2 tp2"),
    ("mixtral", "replayed", "ep2 cp2 tp2"),
]
ROUNDED = [
    ("qwen3", "rl", "dp2 tp2"),
    ("gemma2", "rl", "tp4"),
    ("llama", "value", "tp2"),
    ("qwen2", "sft", "fsdp2 tp2"),
    ("qwen3", "rl", "dp2 cp2"),
    ("gemma2", "value", "fsdp2 cp2"),
    ("qwen3", "rl", "pp2"),
    ("llama deep", "value", "dp2 pp2 twice"),
    ("qwen3_moe", "balanced", "cp2"),
    ("mixtral", "balanced", "tp4"),
]
DRAWN = 40  # cases; thousands are benchmarks/equivalence.py
BLOCKS = 4  # of layouts, each with simple ones and others, for several processes of tests
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # an explanation takes too many trainings


def test_each_model_has_eight_layouts_and_thirty_layouts_have_two_models() -> None:
    models, layouts = defaultdict(set), defaultdict(set)
    for model, _, layout in EXACT:
        kind = MODELS[model][0]
        models[kind].add(layout)
        layouts[layout].add(kind)
    assert models.keys() == set(tiny.KINDS)
    assert min(map(len, models.values())) >= 8
    assert sum(len(kinds) >= 2 for kinds in layouts.values()) >= 30
    assert layouts.keys() == LAYOUTS.keys()
    assert {loss for _, loss, _ in EXACT} == LOSSES.keys()


@pytest.mark.parametrize(("model", "loss", "layout"), EXACT)
def test_every_layout_trains_as_one_process(
    four: RankProcesses, models: Path, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", LAYOUTS[layout])
    check(case, four.run(train, case, models), alone(case, models), 1e-10)


@pytest.fixture(scope="module")
def any_four() -> Iterator[RankProcesses]:
    """Four processes with the groups of every layout that can be drawn."""
    processes = RankProcesses(RANKS, every_layout())
    yield processes
    processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_drawn_trainings_equal_those_of_one_process(any_four: RankProcesses, models: Path, block: int) -> None:
    @settings(max_examples=DRAWN // BLOCKS, phases=PHASES)
    @given(cases(every_layout()[block::BLOCKS]))
    def equal(case: Case) -> None:
        check(case, any_four.run(train, case, models), alone(case, models), 1e-10)

    (seed(block)(equal) if settings().derandomize else equal)()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "layout"),
    [
        ("qwen3", "rl", "dp2 tp2 pp2"),
        ("gemma2", "sft", "dp2 tp2 pp2"),
        ("llama", "rl", "dp2 cp2 pp2"),
        ("qwen2", "sft", "dp2 cp2 pp2"),
    ],
)
def test_eight_workers_train_as_one_process(
    eight: RankProcesses, models: Path, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", EIGHT[layout])
    check(case, eight.run(train, case, models), alone(case, models), 1e-10)


def train_by_walk(ranks: LayoutRanks, case: Case, models: Path) -> Any:
    """`train`, with the walk of float32 models on a CPU through layers, whatever their dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realgraph.runtime.cpu.train.lean_applies", lambda *_: True)
        return train(ranks, case, models)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "model", "loss", "layout"),
    [
        ("none", "qwen3", "rl", "tp4"),
        ("full", "qwen2", "sft", "dp2 tp2"),
        ("none", "llama", "value", "tp2"),
        ("full", "mistral", "pairs", "cp2 tp2"),
        ("none", "qwen3 deep", "rl", "tp2 pp2 twice"),
        ("full", "qwen3 deep", "rl", "tp2 pp2 twice"),
        ("none", "qwen3", "rl", "fsdp2"),
        ("full", "mistral", "value", "fsdp2 tp2"),
        ("full", "llama deep", "rl", "fsdp2 pp2 twice"),
    ],
)
def test_the_walk_of_cpus_under_any_layout_equals_one_process(
    four: RankProcesses, models: Path, recompute: Any, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", LAYOUTS[layout], recompute)
    check(case, four.run(train_by_walk, case, models), alone(case, models), 1e-10)


def walks(ranks: LayoutRanks, models: Path, dtypes: list[str]) -> list[bool] | None:
    """If models of each dtype, in parts by FSDP, take the walk of CPUs."""
    cases = [Case("qwen3", "sft", dtype, LAYOUTS["fsdp2"]) for dtype in dtypes]
    here = ranks_of(cases[0], ranks)
    return None if here is None else [lean_trains(open_case(case, models, here).model.network) for case in cases]


def test_sharded_models_that_compute_in_float32_take_the_walk_of_cpus(four: RankProcesses, models: Path) -> None:
    found = four.run(walks, models, ["float32", "bfloat16"])  # of both dtypes the shards are float32
    assert found == [[True, False], [True, False], None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "loss", "layout"), ROUNDED)
def test_float32_differs_by_rounding(four: RankProcesses, models: Path, model: str, loss: str, layout: str) -> None:
    case = Case(model, loss, "float32", LAYOUTS[layout])
    check(case, four.run(train, case, models), alone(case, models), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "model", "loss", "layout"),
    [
        ("selective", "qwen3", "rl", "dp2 tp2"),
        ("full", "qwen3", "rl", "dp2 tp2"),
        ("selective", "qwen3", "rl", "cp2 tp2"),
        ("selective", "qwen3 deep", "rl", "tp2 pp2 twice"),
        ("full", "llama deep", "rl", "fsdp2 pp2 twice"),
        ("full", "qwen3", "rl", "cp2 pp2"),
        ("selective", "qwen3_moe", "balanced", "ep2 tp4"),
        ("full", "qwen3_moe", "balanced", "ep2 tp4"),
        ("full", "qwen3_moe", "balanced", "fsdp cp2 pp2"),
        ("full", "mixtral", "rl", "ep2 pp2"),
        ("full", "qwen3_moe deep", "replayed", "ep2 pp2 twice"),
    ],
)
def test_recomputation_changes_nothing(
    four: RankProcesses, models: Path, recompute: Any, model: str, loss: str, layout: str
) -> None:
    case = Case(model, loss, "float64", LAYOUTS[layout], recompute)
    check(case, four.run(train, case, models), alone(case, models), 1e-10)


def refused(ranks: LayoutRanks, case: Case, models: Path) -> tuple[str, tuple[int, ...], bool] | None:
    """The error of a batch with a bad sample, the samples that it names, and if the weights stayed as they were."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine = open_case(case, models, here)
    batches = minibatches(case.dtype, 0)
    poisoned = batches[0].token_keys["advantages"].masked_fill(batches[0].sample_index() == 3, float("nan"))
    batches[0] = replace(batches[0], token_keys={**batches[0].token_keys, "advantages": poisoned})
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(NumericsError) as caught:
        engine.train(call_of(case), batches)
    same = all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    return str(caught.value), caught.value.samples, same


@pytest.mark.parametrize("layout", ["tp4", "cp4", "cp2 tp2"])
def test_ranks_that_share_samples_refuse_together(four: RankProcesses, models: Path, layout: str) -> None:
    first, *others = four.run(refused, Case("qwen3", "rl", "float32", LAYOUTS[layout]), models)
    assert others == [first] * 3
    assert "loss is nan" in first[0]
    assert 3 in first[1]
    assert first[2]


def trained(ranks: LayoutRanks, case: Case, models: Path, lengths: list[int]) -> tuple[Any, Any] | None:
    """Log-probabilities of a batch, and the weights after four steps on it."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine, batch = open_case(case, models, here), tiny.batch(lengths, dtype=torch.float64)
    before = engine.inference(batch, "logprobs", 1.0)
    engine.train(call_of(case), [batch] * 4)
    return before.double().numpy(), {name: tensor.numpy() for name, tensor in engine.weights()}


@pytest.mark.parametrize("layout", ["cp4", "fsdp cp2 tp2"])
@pytest.mark.parametrize("lengths", [[3], [2, 1]])
def test_ranks_without_a_token_take_part(four: RankProcesses, models: Path, layout: str, lengths: list[int]) -> None:
    case = Case("qwen2", "sft", "float64", LAYOUTS[layout])
    one = trained(LayoutRanks.alone(torch.device("cpu")), case.alone, models, lengths)
    assert one is not None
    for found in four.run(trained, case, models, lengths):
        compare({"logprobs": found[0]}, {"logprobs": one[0]}, 1e-6, "logprobs")
        compare(found[1], one[1], 1e-10, "weights")
