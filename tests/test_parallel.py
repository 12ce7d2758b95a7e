"""Two ranks compute what one computes: replicated and sharded, ragged and empty shares, over several optimizer steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import torch


from realgraph.graphs.maths import KL, Decoupled, Entropy, Loss, PolicyGradient, SequenceMean, TokenMean, Value
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.runtime.batch import Packed
from realgraph.runtime.parallel import Ranks
from realgraph.runtime.protocol import Mean
from realgraph.runtime.train_engine import LogprobGap, Settings, TorchTrainEngine, open_engine
from realgraph.runtime.train_passes import NumericsError
from tests import tiny
from tests.ranks import RankProcesses

Sharding = Literal["replicated", "fsdp"]
OPTIMIZER = Optimizer(weight_decay=0.01, schedule="cosine", warmup_steps=2, max_grad_norm=1.0)
LOSSES = {
    "lm": Loss(
        {
            "policy": PolicyGradient(off_policy=Decoupled(cap=1e6)),
            "kl": KL(to="ref_logprobs", coef=0.1),
            "entropy": Entropy(coef=0.01),
        },
        SequenceMean(),
    ),
    "value": Loss({"value": Value(clip=None)}, TokenMean()),
}
N_STEPS = 3


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny.save(base / "tied", "qwen3"),
        "untied": tiny.save(base / "untied", "llama"),
        "gemma2": tiny.save(base / "gemma2", "gemma2"),
    }


def call(head: str) -> Train:
    return Train(
        model="actor", loss=LOSSES[head], lr=1e-2, optimizer=OPTIMIZER, minibatches=2, epochs=2, temperature=0.8
    )


def minibatches(step: int, dtype: str) -> list[Packed]:
    """Two mini-batches; samples 0 and 1 of the second have an empty mask."""
    batches = []
    for i in range(2):
        batch = tiny.batch(tiny.lengths(6, 24, 10 * step + i), 10 * step + i, dtype=getattr(torch, dtype))
        batches.append(batch)
    mask = batches[1].mask.clone()
    mask[: sum(batches[1].lengths[:2])] = False
    second = batches[1]
    batches[1] = Packed(
        second.tokens, second.lengths, mask, second.samples, second.groups, second.token_keys, second.sample_keys
    )
    return batches


def shares(batches: list[Packed], ranks: Ranks, step: int) -> list[Packed]:
    """Ragged: the first mini-batch is split 5 to 1, or 6 to 0; of the second, rank 1 gets the samples without a mask."""
    first = [[0, 1, 2, 4, 5], [3]] if step % 2 else [[0, 1, 2, 3, 4, 5], []]
    second = [[2, 3, 4, 5], [0, 1]]
    if ranks.size == 1:
        return batches
    return [batches[0].select(first[ranks.rank]), batches[1].select(second[ranks.rank])]


def engine(ranks: Ranks, folder: Path, role: ModelRole, sharding: Sharding, **changes: Any) -> TorchTrainEngine:
    settings = Settings(**{"max_tokens_per_microbatch": 40, "optimizer": OPTIMIZER, "total_steps": 12, **changes})
    return open_engine(
        role, str(folder), Layout(DeviceMesh(0, ranks.size), dp=ranks.size, sharding=sharding), ranks, settings
    )


def role_of(head: Any, dtype: Any, **changes: Any) -> ModelRole:
    return ModelRole(trainable=True, head=head, dtype=dtype, **changes)


def train(
    ranks: Ranks, folder: Path, role: ModelRole, sharding: Sharding
) -> tuple[list[dict[str, Mean]], dict[str, Any]]:
    """Metrics of each step and the weights after the last, as numpy (tensors would travel by file descriptors)."""
    one = engine(ranks, folder, role, sharding, skip_idle=False)
    if role.head == "value":
        one.load_weights(iter([(n, t + 0.1 if n == "score.weight" else t) for n, t in one.weights()]), 0)
    metrics = []
    for step in range(N_STEPS):
        metrics.append(one.train(call(role.head), shares(minibatches(step, role.dtype), ranks, step)))
    return metrics, {name: tensor.double().numpy() for name, tensor in one.weights()}


def merged(per_rank: list[dict[str, Mean]]) -> dict[str, float]:
    total: dict[str, Mean] = {}
    for metrics in per_rank:
        for name, mean in metrics.items():
            total[name] = total[name] + mean if name in total else mean
    return {name: mean.value for name, mean in total.items()}


def close(a: Any, b: Any, tolerance: float) -> bool:
    scale = max(float(abs(b).max()), 1e-30)
    return float(abs(a - b).max()) <= tolerance * scale


@pytest.mark.parametrize(
    ("model", "head", "dtype", "sharding", "checkpointing"),
    [
        ("tied", "lm", "float64", "replicated", False),
        ("tied", "lm", "float64", "fsdp", False),
        ("untied", "lm", "float64", "fsdp", True),
        ("untied", "value", "float64", "replicated", False),
        ("untied", "value", "float64", "fsdp", True),
        ("tied", "lm", "float32", "replicated", True),
        ("tied", "lm", "float32", "fsdp", False),
        ("gemma2", "lm", "float32", "fsdp", False),
        ("untied", "value", "float32", "fsdp", False),
    ],
)
def test_two_ranks_equal_one(
    two: RankProcesses,
    folders: dict[str, Path],
    model: str,
    head: str,
    dtype: str,
    sharding: Sharding,
    checkpointing: bool,
) -> None:
    role = role_of(head, dtype, gradient_checkpointing=checkpointing)
    expected, weights = train(Ranks(torch.device("cpu")), folders[model], role_of(head, dtype), "replicated")
    found = two.run(train, folders[model], role, sharding)
    for step in range(N_STEPS):
        one, both = merged([expected[step]]), merged([metrics[step] for metrics, _ in found])
        assert one.keys() == both.keys()
        for name in one:
            tolerance = 1e-11 if dtype == "float64" else 1e-5
            if name != "ratio_max":  # a maximum, not a mean
                assert both[name] == pytest.approx(one[name], rel=tolerance, abs=tolerance), (step, name)
    for _, ours in found:
        assert ours.keys() == weights.keys()
        for name in weights:
            assert close(ours[name], weights[name], 1e-12 if dtype == "float64" else 1e-3), name
